"""`cupyflash check`: real attention over a table of cases, held to the fp64 oracle.

Every case, forward and backward, runs on the CPU path and, where there is a GPU, on every kernel of
the dispatch table that runs on its architecture. The accuracy rule of `_accuracy` decides; a kernel
that refuses a case says so with a reason, but a kernel that took no case at all has failed.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from rich.table import Table

from . import _accuracy, _jit, _kernels, reference
from ._attention import attention, attention_varlen, warmup
from ._bench import environment
from ._bench.case import Case
from ._bench.runner import clock, cupy_array, cupy_host
from ._bench.timing import HostClock
from ._gradients import attention_backward
from ._kernels import Kernel
from ._problem import DESCALES
from .errors import DeviceUnavailable, InvalidArgument, UnsupportedProblem, shown
from .masks import Mask, PrefixLM, Segments

Features = tuple[str, ...]
TIMING_S = 0.05  # per case and kernel
NO_CASE = "it took no case of the table"
COLOURS = {"ok": "green", "failed": "bold red", "unsupported": "dim"}

# fmt: off
_TABLE: tuple[tuple[str, Case, Features], ...] = (
    # what is checked          dtype    B    Sq    Sk  H  Hk    D   Dv  mask          features
    ("self-attention",     Case("fp16", 2,  256,  256, 4, 4,  64,  64, "full"),       ()),
    ("self-attention",     Case("bf16", 2,  256,  256, 4, 4, 128, 128, "full"),       ()),
    ("self-attention",     Case("fp32", 2,  256,  256, 4, 4,  64,  64, "full"),       ()),
    ("self-attention",     Case("fp64", 1,  256,  256, 2, 2,  64,  64, "full"),       ()),
    ("causal",             Case("fp16", 2,  384,  384, 4, 4, 128, 128, "causal"),     ()),
    ("causal",             Case("bf16", 2,  384,  384, 4, 4,  64,  64, "causal"),     ()),
    ("causal",             Case("fp32", 2,  384,  384, 4, 4, 128, 128, "causal"),     ()),
    ("one pair",           Case("fp32", 1,    1,    1, 1, 1,   1,   1, "full"),       ()),
    ("ragged tiles",       Case("bf16", 1,  129,   65, 2, 2,  64,  64, "full"),       ()),
    ("ragged tiles",       Case("bf16", 1,   63,  127, 2, 2,  64,  64, "causal"),     ()),
    ("head dim 8",         Case("fp16", 1,  100,  130, 2, 2,   8,   8, "full"),       ()),
    ("head dim 33",        Case("bf16", 1,  100,  130, 2, 2,  33,  33, "causal"),     ()),
    ("head dim 80",        Case("bf16", 1,  100,  130, 2, 2,  80,  80, "causal"),     ()),
    ("head dim 96",        Case("fp16", 1,  100,  130, 2, 2,  96,  96, "causal"),     ()),
    ("head dim 256",       Case("bf16", 1,  200,  200, 2, 2, 256, 256, "causal"),     ()),
    ("head dim 256",       Case("fp32", 1,  200,  200, 2, 2, 256, 256, "causal"),     ()),
    ("v narrower than k",  Case("bf16", 1,  200,  200, 2, 2, 192, 128, "causal"),     ()),
    ("v wider than k",     Case("fp16", 1,  200,  200, 2, 2,  64,  96, "full"),       ()),
    ("grouped heads",      Case("bf16", 2,  200,  200, 8, 2,  64,  64, "causal"),     ()),
    ("one kv head",        Case("fp16", 2,  200,  200, 8, 1, 128, 128, "full"),       ()),
    ("one query",          Case("bf16", 4,    1,  500, 8, 2, 128, 128, "causal"),     ()),
    ("last rows of many",  Case("fp16", 1,   40,  300, 2, 2,  64,  64, "causal"),     ()),
    ("rows without keys",  Case("bf16", 1,  300,   40, 2, 2,  64,  64, "causal"),     ()),
    ("aligned top left",   Case("bf16", 1,  300,   40, 2, 2,  64,  64, "causal",
                                "top_left"),                                          ()),
    ("window",             Case("bf16", 1,  400,  400, 2, 2,  64,  64, "window:100,0"),  ()),
    ("window",             Case("fp16", 1,  400,  300, 2, 2, 128, 128, "window:33,17"),  ()),
    ("window of the self", Case("fp32", 1,  150,  150, 2, 2,  64,  64, "window:0,0"),    ()),
    ("no queries",         Case("bf16", 1,    0,   50, 2, 2,  64,  64, "full"),       ()),
    ("no keys",            Case("bf16", 1,   50,    0, 2, 2,  64,  64, "full"),       ()),
    ("layout bhsd",        Case("bf16", 2,  200,  200, 4, 2,  64,  64, "causal"),     ("bhsd",)),
    ("negative scale",     Case("fp16", 1,  200,  200, 2, 2,  64,  64, "causal"),     ("scale",)),
    ("softcap",            Case("bf16", 1,  200,  200, 2, 2,  64,  64, "causal"),     ("softcap",)),
    ("ALiBi",              Case("bf16", 1,  200,  250, 4, 2,  64,  64, "causal"),     ("alibi",)),
    ("bias",               Case("fp16", 2,  200,  200, 4, 2,  64,  64, "full"),       ("bias",)),
    ("boolean mask",       Case("bf16", 2,  200,  200, 2, 2,  64,  64, "causal"),     ("mask",)),
    ("sink",               Case("bf16", 1,  200,  200, 4, 4,  64,  64, "window:64,0"),   ("sink",)),
    ("prefix",             Case("bf16", 2,  200,  200, 2, 2,  64,  64, "full"),       ("prefix",)),
    ("segments",           Case("fp16", 2,  300,  300, 2, 2,  64,  64, "causal"),
        ("segments",)),
    ("lengths in use",     Case("bf16", 4,  200,  200, 2, 2,  64,  64, "causal"),     ("seqused",)),
    ("packed",             Case("bf16", 5,  260,  260, 4, 2,  64,  64, "causal",
                                lengths=(260, 1, 0, 64, 129)),                        ()),
    ("packed",             Case("fp32", 3,   90,   90, 2, 1,  40,  40, "full",
                                lengths=(90, 33, 17)),                                ("alibi",)),
    ("padded packing",     Case("fp16", 3,  150,  150, 2, 2, 128, 128, "window:70,9",
                                lengths=(150, 100, 50)),                     ("seqused", "sink")),
    ("dropout",            Case("fp16", 2,  200,  200, 2, 2,  64,  64, "causal"),     ("dropout",)),
    ("fp8",                Case("e4m3", 2,  256,  256, 4, 2,  64,  64, "full"),       ()),
    ("fp8",                Case("e5m2", 1,  200,  330, 4, 4, 128, 128, "causal"),     ()),
    ("fp8, descaled",      Case("e4m3", 2,  200,  200, 4, 2, 128, 128, "causal"),     ("descale",)),
    ("fp8, descaled",      Case("e5m2", 2,  150,  210, 4, 2, 256, 256, "window:99,9"),
        ("descale",)),
    ("all at once",        Case("bf16", 2,  200,  230, 4, 2,  64,  64, "window:150,3"),
        ("scale", "softcap", "alibi", "bias", "mask", "prefix", "sink", "seqused", "dropout")),
    ("all at once, packed", Case("fp16", 3, 200,  200, 4, 2,  64,  64, "window:150,3",
                                lengths=(200, 120, 65)),
        ("scale", "softcap", "alibi", "bias", "mask", "segments", "sink", "seqused", "dropout")),
    ("all at once",        Case("fp32", 2,  130,  150, 4, 2,  64,  64, "window:99,3"),
        ("scale", "softcap", "alibi", "bias", "mask", "prefix", "sink", "seqused", "dropout")),
    ("throughput",         Case("fp32", 1, 1024, 1024, 8, 8,  64,  64, "full"),       ()),
    ("throughput",         Case("bf16", 1, 1024, 1024, 8, 8, 128, 128, "causal"),     ()),
)
# fmt: on


@dataclass(frozen=True)
class Outcome:
    """What became of one case on one kernel."""

    check: str
    case: str
    kernel: str
    status: str  # "ok", "failed", "unsupported"
    error: float | None = None  # the largest |out - oracle|
    bound_ratio: float | None = None  # the largest error over its bound: at most 1 passes
    lse_error: float | None = None
    us: float | None = None
    gflops: float | None = None
    message: str = ""
    moved: dict[str, int | None] | None = None  # on the emulator: what the launch did
    op: str = "forward"

    @property
    def label(self) -> str:
        """The kernel for people: of the host two have one name."""
        return self.kernel if self.op == "forward" else f"{self.kernel} ({self.op})"


@dataclass(frozen=True)
class Inputs:
    """The arrays and options of one case, in layout (batch, length, heads, head_dim) or packed."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    options: dict[str, Any]
    layout: str

    @classmethod
    def of(cls, case: Case, features: Features) -> Inputs:
        """Draw the inputs of a row of the table."""
        rng = np.random.default_rng(2026)
        q, k, v = case.inputs(rng)
        options = case.options
        for feature in features:
            if feature in FEATURES:
                options |= FEATURES[feature](case, rng)
        if case.lengths:
            options |= {"cu_seqlens_q": case.ends, "cu_seqlens_k": case.ends}
        return cls(q, k, v, options, "bhsd" if "bhsd" in features else "bshd")

    @functools.cached_property
    def expected(self) -> _accuracy.Expected:
        """What the oracle says of every kernel's result."""
        return _accuracy.expected(self.q, self.k, self.v, **self.options)

    @functools.cached_property
    def seeds(self) -> tuple[np.ndarray, np.ndarray]:
        """The gradients of a loss by the output and by the log-sum-exp."""
        rng = np.random.default_rng(2027)
        *batch, length, heads, _ = self.q.shape
        dout = rng.standard_normal((*self.q.shape[:-1], self.v.shape[-1]), np.float32)
        dlse = rng.standard_normal((*batch, heads, length))
        return dout.astype(reference.output_dtype(self.q.dtype)), dlse.astype(
            np.float64 if self.q.dtype == np.float64 else np.float32
        )

    @functools.cached_property
    def expected_gradients(self) -> _accuracy.ExpectedGradients:
        """What the oracle says of every kernel's gradients."""
        dout, dlse = self.seeds
        return _accuracy.expected_gradients(dout, self.q, self.k, self.v, dlse=dlse, **self.options)

    @property
    def swapped(self) -> bool:
        """Whether heads come before the length where the call has its arrays."""
        return self.layout == "bhsd"

    def placed(self, place: Callable[[np.ndarray], Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return q, k and v as they lie in the layout, and the options of the call."""
        arrays = [self.q, self.k, self.v]
        if self.swapped:
            arrays = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in arrays]

        def put(value: Any) -> Any:
            if isinstance(value, Mask):
                return value.bound(*map(place, value.arrays))
            return place(value) if isinstance(value, np.ndarray) else value

        options = {name: put(value) for name, value in self.options.items()}
        if "cu_seqlens_q" not in options:
            options["layout"] = self.layout
        return [place(x) for x in arrays], options


Compute = Callable[[Case, Inputs, Kernel], dict[str, Any]]  # returns fields of an Outcome

FEATURES: dict[str, Callable[[Case, np.random.Generator], dict[str, Any]]] = {
    "scale": lambda case, rng: {"softmax_scale": -0.2},
    "softcap": lambda case, rng: {"softcap": 2.0},
    "alibi": lambda case, rng: {
        "alibi_slopes": 0.5 ** np.arange(1, case.heads_q + 1, dtype=np.float32)
    },
    "bias": lambda case, rng: {
        "attn_bias": rng.standard_normal((case.heads_q, case.len_q, case.len_k), np.float32)
    },
    "mask": lambda case, rng: {
        "attn_mask": rng.random((case.batch, 1, case.len_q, case.len_k)) < 0.7
    },
    "sink": lambda case, rng: {"learnable_sink": rng.standard_normal(case.heads_q, np.float32)},
    "prefix": lambda case, rng: {
        "mask": PrefixLM(rng.integers(0, case.len_k + 1, case.batch, dtype=np.int32))
    },
    "segments": lambda case, rng: {
        "mask": Segments(np.sort(rng.integers(0, 4, (case.batch, case.len_k), dtype=np.int32)))
    },
    "seqused": lambda case, rng: {
        "seqused_k": rng.integers(0, np.array(case.lengths or case.len_k) + 1, case.batch, np.int32)
    },
    "dropout": lambda case, rng: {"dropout_p": 0.2, "rng_state": (2026, 11)},
    "descale": lambda case, rng: {
        name: 0.5 + rng.random((case.batch, case.heads_k), np.float32)
        for name in ("q_descale", "k_descale", "v_descale")
    },
}


def available() -> list[Kernel]:
    """Return the kernels that can run here: the CPU path, and those of the GPU's architecture."""
    arch = _jit.compute_capability(0) if environment.gpu_present() else None
    return [
        kernel
        for kernel in _kernels.KERNELS
        if kernel.automatic and (kernel.arch is None or arch in kernel.arch)
    ]


def chosen(name: str | None) -> list[Kernel]:
    """Return the kernels to check: all that can run here, or those of the name."""
    here = available()
    if name is None:
        return here
    named = [kernel for kernel in _kernels.KERNELS if kernel.name == name]
    if not named:
        names = dict.fromkeys(kernel.name for kernel in _kernels.KERNELS)
        raise InvalidArgument(f"`kernel` must be one of {', '.join(names)}, got {shown(name)}")
    found = [kernel for kernel in named if kernel.arch is None or kernel in here]
    if not found:
        raise DeviceUnavailable(f"{name} needs a GPU that is not here: see `cupyflash list`")
    return found


def table(quick: bool = False) -> list[tuple[str, Case, Features]]:
    """Return the cases; the quick ones leave out those made for their throughput."""
    return [row for row in _TABLE if not (quick and row[0] == "throughput")]


def run(
    kernels: Iterable[Kernel],
    quick: bool,
    step: Callable[[str], None],
    compute: Compute | None = None,
) -> list[Outcome]:
    """Run every case on every kernel, by `measure` or another; `step` is told before each."""
    outcomes = []
    kernels = list(kernels)
    rows = [(name, case, Inputs.of(case, features)) for name, case, features in table(quick)]
    if compute is None:
        work_ahead([inputs for *_, inputs in rows], kernels)
    for name, case, inputs in rows:
        for kernel in kernels:
            step(f"{kernel.name}: {name}, {case}")
            outcomes.append(check(name, case, inputs, kernel, compute or measure))
    return outcomes + [
        replace(found[0], check="any case", case="", status="failed", message=NO_CASE)
        for found in by_kernel(outcomes).values()
        if all(o.status == "unsupported" for o in found)
    ]


def work_ahead(inputs: list[Inputs], kernels: list[Kernel]) -> None:
    """Ask the oracle, and compile and load what the kernels of a GPU need, on all cores at once.

    The code depends on the arrays too, on their strides and the dtypes of operands. What fails
    here is met again, and reported, by the case itself.
    """

    def compile_one(x: Inputs, kernel: Kernel) -> None:
        arrays, options = x.placed(cupy_array)
        backward = kernel.op == "backward"
        if backward:
            warmup(*arrays, **options)  # of the forward pass, which is asked for out and lse
        warmup(*arrays, **options, kernel=kernel.name, backward=backward)

    def attempt(task: Callable[[], Any]) -> None:
        with contextlib.suppress(Exception):
            task()

    on_gpu = [kernel for kernel in kernels if kernel.arch is not None]
    asked = {"expected" if kernel.op == "forward" else "expected_gradients" for kernel in kernels}
    codes = [functools.partial(compile_one, x, kernel) for x in inputs for kernel in on_gpu]
    truths = [functools.partial(getattr, x, name) for x in inputs for name in asked]
    with ThreadPoolExecutor() as pool:
        list(pool.map(attempt, [*codes, *truths]))


def check(name: str, case: Case, inputs: Inputs, kernel: Kernel, compute: Compute) -> Outcome:
    """Compute one case on one kernel; nothing that it raises goes further."""
    outcome = functools.partial(Outcome, name, str(case), kernel.name, op=kernel.op)
    try:
        return outcome(**compute(case, inputs, kernel))
    except UnsupportedProblem as reason:
        return outcome("unsupported", message=str(reason))
    except Exception as failure:
        return outcome("failed", message=f"{type(failure).__name__}: {failure}")


def measure(case: Case, inputs: Inputs, kernel: Kernel) -> dict[str, Any]:
    """Compare one case with the oracle and time it; return these fields of its `Outcome`."""
    call, host, timer = prepare(inputs, kernel, kernel.arch is None)
    fields = judge(inputs, kernel, host(call()))
    us = timer.kernel_us(call, TIMING_S) if case.flops() else None
    flops = case.flops() * (1 if kernel.op == "forward" else 2.5)  # five products in place of two
    return fields | {"us": us, "gflops": flops / us / 1e3 if us else None}


def judge(inputs: Inputs, kernel: Kernel, results: Sequence[np.ndarray | None]) -> dict[str, Any]:
    """Return the fields of an `Outcome` that come from the comparison with the oracle."""
    forward = kernel.op == "forward"
    if forward:
        verdict = inputs.expected.verdict(*results)
    else:
        verdict = inputs.expected_gradients.verdict(results)
    return {
        "status": "ok" if verdict.ok else "failed",
        "error": finite(verdict.error),
        "bound_ratio": finite(verdict.bound_ratio),
        "lse_error": finite(verdict.lse_error) if forward else None,
        "message": verdict.message,
    }


def prepare(
    inputs: Inputs, kernel: Kernel, on_host: bool
) -> tuple[Callable[[], Any], Callable[[Any], list[np.ndarray | None]], HostClock]:
    """Return the call on NumPy or CuPy arrays, the way back to NumPy, and a clock."""
    place = np.asarray if on_host else cupy_array
    arrays, options = inputs.placed(place)
    function = attention_varlen if "cu_seqlens_q" in options else attention
    call: Callable[[], Any] = functools.partial(
        function, *arrays, **options, return_lse=True, kernel=kernel.name
    )
    if kernel.op == "backward":
        out, lse = function(*arrays, **options, return_lse=True)
        dout, dlse = inputs.seeds
        dout = place(np.ascontiguousarray(dout.swapaxes(1, 2)) if inputs.swapped else dout)
        own = {name: x for name, x in options.items() if name not in DESCALES}
        own |= {"dlse": place(dlse), "kernel": kernel.name}
        q, k, v = arrays
        call = functools.partial(attention_backward, dout, q, k, v, out, lse, **own)

    def host(results: Any) -> list[np.ndarray | None]:
        found = [x if x is None or on_host else cupy_host(x) for x in results]
        if inputs.swapped:  # neither the log-sum-exp nor the gradient of a bias
            own = 1 if kernel.op == "forward" else 3
            found[:own] = [x.swapaxes(1, 2) for x in found[:own]]
        return found

    return call, host, clock("host" if on_host else "cupy")


def finite(value: float) -> float | None:
    """Return a number that JSON can hold, or None."""
    return float(value) if math.isfinite(value) else None


def report(outcomes: list[Outcome]) -> Table:
    """Return the outcomes as a table for a terminal."""
    lines = Table("check", "case", "kernel", title="attention against the fp64 oracle")
    for name in ("max error", "of bound", "LSE error", "time", "GFLOP/s", "result"):
        lines.add_column(name, justify="left" if name == "result" else "right")
    for o in outcomes:
        lines.add_row(
            o.check,
            o.case,
            o.label,
            *(number(value) for value in (o.error, o.bound_ratio, o.lse_error)),
            duration(o.us),
            "" if o.gflops is None else f"{o.gflops:,.1f}",
            f"[{COLOURS[o.status]}]{o.status}[/]",
        )
    return lines


def number(value: float | None) -> str:
    """Return an error with two digits."""
    return "" if value is None else f"{value:.2g}"


def duration(us: float | None) -> str:
    """Return a time in its own unit."""
    if us is None:
        return ""
    return f"{us:.1f} us" if us < 1e3 else f"{us / 1e3:.2f} ms"


def failures(outcomes: list[Outcome]) -> list[Outcome]:
    """Return what failed."""
    return [o for o in outcomes if o.status == "failed"]


def by_kernel(outcomes: list[Outcome]) -> dict[str, list[Outcome]]:
    """Return the outcomes by the label of their kernel."""
    found: dict[str, list[Outcome]] = {}
    for o in outcomes:
        found.setdefault(o.label, []).append(o)
    return found


def summary(outcomes: list[Outcome]) -> list[str]:
    """Return one sentence per kernel."""
    lines = []
    for label, found in by_kernel(outcomes).items():
        states = [o.status for o in found]
        line = f"{label}: {states.count('ok')} passed, {states.count('failed')} failed"
        if "unsupported" in states:
            line += f", {states.count('unsupported')} not for this kernel"
        lines.append(line)
    return lines
