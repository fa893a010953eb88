"""THE dispatch table: every path that computes attention, best first, with reasons for refusals.

`select` walks the rows and takes the first that does not refuse a `Problem`; it is pure and needs
no GPU. A new kernel is a new row.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from . import (
    _backward_sm80,
    _backward_sm90,
    _cpu,
    _cpu_backward,
    _forward_sm80,
    _forward_sm90,
    reference,
)
from ._array import Array, host_dtype
from ._array.host import host_view
from ._forward import MAX_HEAD_DIM, refuse_dtype
from ._launch import Launch, Steps
from ._problem import FLOAT8S, FLOATS, Operands, Problem
from ._problem_backward import Backward
from .errors import InvalidArgument, UnsupportedProblem, shown
from .masks import All

__all__ = [
    "HOST_KERNELS",
    "KERNELS",
    "Kernel",
    "KernelInfo",
    "backward_name",
    "rejections",
    "select",
    "takers",
]

HOST_DTYPES = FLOATS + FLOAT8S


class KernelInfo(NamedTuple):
    """A row of the dispatch table, for people."""

    name: str
    op: str
    arch: str
    needs: str


@dataclass(frozen=True)
class Kernel:
    """One row. Of the host it has ``run``, of the GPU ``config`` and ``launch``, or ``steps``.

    Parameters
    ----------
    name : str
        What ``kernel=`` calls it, once for each operation; of a CUDA kernel also its file and its
        symbol.
    op : str
        What it computes: "forward" or "backward".
    arch : range or None
        Compute capabilities that it runs on; None is the host.
    needs : str
        What it takes, for people.
    unsupported : callable
        Problem -> None, or why not, as the rest of a sentence that starts with the name.
    automatic : bool
        Whether it may be chosen without being named.
    run : callable, optional
        (Problem, Operands, lse) -> None: compute on the host, into ``out`` and ``lse``. Backward
        (Problem, Operands, Backward) -> None, into the gradients of the last.
    config : callable, optional
        Problem -> the configuration that its unit is rendered from.
    launch : callable, optional
        (Problem, Operands, pointer to lse or 0) -> Launch, without a GPU.
    steps : callable, optional
        (Problem, Operands, Backward) -> Steps, likewise, of a backward row.
    """

    name: str
    op: str
    arch: range | None
    needs: str
    unsupported: Callable[[Problem], str | None]
    automatic: bool = True
    run: Callable[..., None] | None = None
    config: Callable[[Problem], Any] | None = None
    launch: Callable[..., Launch] | None = None
    steps: Callable[[Problem, Operands, Backward], Steps] | None = None

    @property
    def info(self) -> KernelInfo:
        """The row for people."""
        place = "host" if self.arch is None else capabilities(self.arch)
        return KernelInfo(self.name, self.op, place, self.needs)

    def launches(
        self, problem: Problem, operands: Operands, backward: Backward | None = None
    ) -> tuple[Launch, ...]:
        """Return what a call launches, in this order; a row of the host launches nothing."""
        if self.launch is not None:
            return (self.launch(problem, operands),)
        if self.steps is not None:
            assert backward is not None
            return self.steps(problem, operands, backward).launches
        return ()

    def main(self, launches: Sequence[Launch]) -> Launch:
        """Return the one of a call's launches that does the work of its configuration."""
        return max(launches, key=lambda x: (x.symbol == self.name, x.shared_bytes))

    def refusal(self, problem: Problem) -> str | None:
        """Return why this row does not take a problem, as a sentence, or None."""
        reason = self._wrong_place(problem) or self.unsupported(problem)
        return reason and f"{self.name} {reason}"

    def _wrong_place(self, problem: Problem) -> str | None:
        if self.arch is None:
            return (
                None if problem.arch is None else "takes arrays in host memory, these are on a GPU"
            )
        if problem.arch is None:
            return "takes arrays on a GPU, these are in host memory"
        if problem.arch not in self.arch:
            return (
                f"needs compute capability {capabilities(self.arch)}, this is "
                f"{problem.arch // 10}.{problem.arch % 10}"
            )
        return None


def capabilities(arch: range) -> str:
    """Write a range of compute capabilities for people."""
    first = f"{arch.start // 10}.{arch.start % 10}"
    return first if len(arch) == 1 else f"{first} or newer"


def select(problem: Problem, name: Any = None) -> Kernel:
    """Return the first row that takes a problem, or the named one if it does.

    Raises
    ------
    InvalidArgument
        There is no row of that name.
    UnsupportedProblem
        No row, or not the named one, takes the problem; the message holds every reason.
    """
    rows = _rows(problem.op)
    if name is None:
        for kernel in rows:
            if kernel.automatic and kernel.refusal(problem) is None:
                return kernel
        reasons = "; ".join(rejections(problem).values())
        raise UnsupportedProblem(f"no kernel for {problem.op}: {reasons}")
    # What is no string (an array, say) names none.
    named = next((row for row in rows if isinstance(name, str) and row.name == name), None)
    if named is None:
        names = ", ".join(repr(kernel.name) for kernel in rows)
        raise InvalidArgument(f"`kernel` must be None or one of {names}, got {shown(name)}")
    if reason := named.refusal(problem):
        raise UnsupportedProblem(f"`kernel` is {name!r}, which cannot be used: {reason}")
    return named


def takers(problem: Problem, name: Any = None) -> tuple[Kernel, ...]:
    """Return the rows that `select` may return for a problem, or for one of its kind."""
    return tuple(
        kernel
        for kernel in _rows(problem.op)
        if (kernel.automatic if name is None else kernel.name == name)
        and kernel.refusal(problem) is None
    )


def backward_name(name: Any) -> Any:
    """Return the name of a forward kernel if a backward kernel has the same, else None."""
    names = (kernel.name for kernel in _rows("backward"))
    return name if isinstance(name, str) and name in names else None


def _rows(op: str) -> tuple[Kernel, ...]:
    return tuple(kernel for kernel in KERNELS if kernel.op == op)


def rejections(problem: Problem) -> dict[str, str]:
    """Return, by name, why every other row of the operation is not chosen, in the table's order."""
    found = {}
    for kernel in _rows(problem.op):
        reason = kernel.refusal(problem)
        if reason is None and not kernel.automatic:
            reason = f"{kernel.name} runs only when it is named"
        if reason is not None:
            found[kernel.name] = reason
    return found


def _host_dtypes(problem: Problem) -> str | None:
    return refuse_dtype(problem, HOST_DTYPES)


def _host_floats(problem: Problem) -> str | None:
    return refuse_dtype(problem, FLOATS)


def _views(problem: Problem, operands: Operands) -> dict[str, Any]:
    """Return the operands that there are as NumPy arrays, by name; masks with theirs."""
    named = {name: x for name, x in operands._asdict().items() if x is not None}
    arrays = named.pop("masks")
    views = {name: host_view(x) if isinstance(x, Array) else x for name, x in named.items()}
    if problem.masks:
        views["masks"] = tuple(
            mask.bound(*map(host_view, own))
            for mask, own in zip(problem.masks, arrays, strict=True)
        )
    return views


def _run_cpu(problem: Problem, operands: Operands, lse: np.ndarray | None) -> None:
    _cpu.attention(
        lse=lse,
        band=problem.band,
        scale=problem.scale,
        softcap=problem.softcap,
        dropout_p=problem.dropout_p,
        **_views(problem, operands),
    )


def _run_cpu_backward(problem: Problem, operands: Operands, backward: Backward) -> None:
    views = {"dlse": None, "dbias": None, "dsink": None, **_views(problem, operands)}
    views |= {name: host_view(x) for name, x in backward._asdict().items() if x is not None}
    _cpu_backward.attention_backward(
        band=problem.band,
        scale=problem.scale,
        softcap=problem.softcap,
        dropout_p=problem.dropout_p,
        **views,
    )


def _reference_options(problem: Problem, operands: Operands) -> dict[str, Any]:
    """Return the arguments of the oracle but out and gradients; packed arrays have three axes."""
    views = _views(problem, operands)
    del views["out"]
    if problem.packed:
        views |= {name: views[name][0] for name in ("q", "k", "v")}
    return views | {
        "mask": All(problem.band, *views.pop("masks", ())),
        "alignment": problem.band.alignment,
        "softmax_scale": problem.scale,
        "softcap": problem.softcap,
        "dropout_p": problem.dropout_p,
    }


def _run_reference(problem: Problem, operands: Operands, lse: np.ndarray | None) -> None:
    out = host_view(operands.out)
    values, sums = reference.attention(**_reference_options(problem, operands))
    with np.errstate(over="ignore"):  # a value beyond the range of its array is infinite there
        out[...] = values.astype(out.dtype)
        if lse is not None:
            lse[...] = sums


def _run_reference_backward(problem: Problem, operands: Operands, backward: Backward) -> None:
    options = _reference_options(problem, operands)
    for name in ("dout", "dlse"):
        x = getattr(backward, name)
        options[name] = None if x is None else host_view(x)[0] if problem.packed else host_view(x)
    if backward.dbias is not None:  # summed over what the bias repeats
        own = tuple(slice(size) for size in backward.dbias.shape)
        options["attn_bias"] = options["attn_bias"][own]
    gradients = reference.attention_backward(**options)
    with np.errstate(over="ignore"):
        for name, values in gradients._asdict().items():
            if (x := getattr(backward, name)) is not None:
                host_view(x)[...] = values.astype(host_dtype(x.dtype))


FORWARD_SM90 = Kernel(
    name=_forward_sm90.NAME,
    op="forward",
    arch=range(90, 91),
    needs=(
        f"{', '.join(_forward_sm90.DTYPES)}; head dims <= {MAX_HEAD_DIM} of one class, rows of "
        "whole 16 bytes; every option; memory that TMA can address"
    ),
    unsupported=_forward_sm90.refusal,
    config=_forward_sm90.config,
    launch=_forward_sm90.launch,
)

FORWARD_SM80 = Kernel(
    name=_forward_sm80.NAME,
    op="forward",
    arch=range(80, 1000),
    needs=f"{', '.join(_forward_sm80.DTYPES)}; head dims <= {MAX_HEAD_DIM}; every option",
    unsupported=_forward_sm80.refusal,
    config=_forward_sm80.config,
    launch=_forward_sm80.launch,
)

CPU = Kernel(
    name="cpu",
    op="forward",
    arch=None,
    needs=f"arrays in host memory; {', '.join(HOST_DTYPES)}; every option",
    unsupported=_host_dtypes,
    run=_run_cpu,
)

REFERENCE = Kernel(
    name="reference",
    op="forward",
    arch=None,
    needs="to be named; arrays in host memory; every option; slow, in fp64",
    unsupported=_host_dtypes,
    automatic=False,
    run=_run_reference,
)

BACKWARD_SM90 = Kernel(
    name=_backward_sm90.NAME,
    op="backward",
    arch=range(90, 91),
    needs=(
        f"{', '.join(_backward_sm90.DTYPES)}; head dims <= {MAX_HEAD_DIM}, rows of whole 16 bytes; "
        "bands, lengths, sinks; queries and keys; memory that TMA can address"
    ),
    unsupported=_backward_sm90.refusal,
    config=_backward_sm90.config,
    steps=_backward_sm90.steps,
)

BACKWARD_SM80 = Kernel(
    name=_backward_sm80.NAME,
    op="backward",
    arch=range(80, 1000),
    needs=f"{', '.join(_backward_sm80.DTYPES)}; head dims <= {MAX_HEAD_DIM}; every option",
    unsupported=_backward_sm80.refusal,
    config=_backward_sm80.config,
    steps=_backward_sm80.steps,
)

CPU_BACKWARD = Kernel(
    name="cpu",
    op="backward",
    arch=None,
    needs=f"arrays in host memory; {', '.join(FLOATS)}; every option; always deterministic",
    unsupported=_host_floats,
    run=_run_cpu_backward,
)

REFERENCE_BACKWARD = Kernel(
    name="reference",
    op="backward",
    arch=None,
    needs=f"to be named; arrays in host memory; {', '.join(FLOATS)}; every option; slow, in fp64",
    unsupported=_host_floats,
    automatic=False,
    run=_run_reference_backward,
)

KERNELS = (
    FORWARD_SM90, FORWARD_SM80, CPU, REFERENCE, BACKWARD_SM90, BACKWARD_SM80, CPU_BACKWARD,
    REFERENCE_BACKWARD,
)  # fmt: skip
HOST_KERNELS = tuple(dict.fromkeys(kernel.name for kernel in KERNELS if kernel.arch is None))
