"""From what a user asks of `cupyflash bench` to a results document."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from .. import _jit, _kernels
from ..errors import DeviceUnavailable, InvalidArgument
from . import environment
from .case import Case, short_dtype, split_masks
from .limits import limits
from .peers import choose
from .run import Effort, Group, run
from .suites import suites
from .units import units_of

Tell = Callable[[str], None]


# The lists that are not given. On a CPU a call takes as long as hundreds on a GPU.
DEFAULTS: dict[str, dict[str, Any]] = {
    "cuda": {"dtype": "bf16", "len_q": [1024, 4096], "heads": [16]},
    "cpu": {"dtype": "fp32", "len_q": [256, 1024], "heads": [8]},
}


@dataclass(frozen=True)
class Sweep:
    """The options of `cupyflash bench`: a named suite, or every combination of the lists.

    The lists that are None are those of `DEFAULTS`.
    """

    suite: str | None
    dtype: str | None
    batch: list[int]
    tokens: int | None
    len_q: list[int] | None
    len_k: list[int] | None
    heads: list[int] | None
    heads_k: list[int] | None
    head_dim: list[int]
    head_dim_v: list[int] | None
    mask: str
    vs: str
    kernel: str | None
    device: str
    rounds: int
    budget: float

    def groups(self) -> tuple[Group, ...]:
        """Return what is to be measured."""
        if self.suite is not None:
            return named(self.suite)
        device = self.device
        if device == "auto":
            device = "cuda" if environment.gpu_present() else "cpu"
        require(device)
        names = [kernel.name for kernel in _kernels.KERNELS if kernel.op == "forward"]
        if self.kernel is not None and self.kernel not in names:
            raise InvalidArgument(
                f"`kernel` must be one of {', '.join(names)}, got {self.kernel!r}"
            )
        return (Group(self.cases(device), tuple(choose(self.vs, device)), device, self.kernel),)

    def cases(self, device: str) -> tuple[Case, ...]:
        """Return every combination of the lists; None follows its other half."""
        follow = [None]
        chosen = {name: getattr(self, name) or value for name, value in DEFAULTS[device].items()}
        combinations: Iterator[tuple[Any, ...]] = itertools.product(
            [short_dtype(name) for name in chosen["dtype"].split(",")],
            chosen["heads"],
            self.heads_k or follow,
            self.head_dim,
            self.head_dim_v or follow,
            chosen["len_q"],
            self.len_k or follow,
            split_masks(self.mask),
            self.batch if self.tokens is None else follow,
        )
        return tuple(
            Case(
                dtype,
                max(1, (self.tokens or 0) // max(len_q, 1)) if batch is None else batch,
                len_q,
                len_q if len_k is None else len_k,
                heads,
                heads if heads_k is None else heads_k,
                dim,
                dim if dim_v is None else dim_v,
                mask,
            )
            for dtype, heads, heads_k, dim, dim_v, len_q, len_k, mask, batch in combinations
        )

    def effort(self) -> Effort:
        """Return how long to measure."""
        return Effort(self.rounds, self.budget)


def named(suite: str) -> tuple[Group, ...]:
    """Return the groups of a suite by its name."""
    known = suites()
    if suite not in known:
        raise InvalidArgument(f"`suite` must be one of {', '.join(known)}, got {suite!r}")
    return known[suite]


def require(device: str) -> None:
    """Raise where a sweep on this device cannot run."""
    if device == "cuda" and not environment.gpu_present():
        raise DeviceUnavailable("this sweep needs a GPU and CuPy: use --device cpu or --suite cpu")


def document(
    suite: str,
    groups: tuple[Group, ...],
    effort: Effort,
    tell: Tell,
    commit: str | None = None,
    keep: Callable[[dict[str, Any]], None] = lambda document: None,
    until: float = math.inf,
) -> dict[str, Any]:
    """Measure, and return the results with all that they depend on.

    Parameters
    ----------
    suite
        The name that the rows carry.
    groups, effort
        What to measure, and for how long.
    tell
        Is told each case before it starts.
    commit
        The commit to record, where the tree has no history of its own.
    keep
        Is given what there is after each case, so that an interrupted run leaves something.
    until
        When `time.perf_counter` says this, no further case begins.
    """
    on_gpu = any(group.device == "cuda" for group in groups)
    for group in groups:
        require(group.device)
    env = environment.environment()
    env["commit"] = commit or env["commit"]
    env["limits"] = limits() if on_gpu else {}
    compile_ahead(groups)
    rows: list[dict[str, Any]] = []
    for found in run(suite, groups, effort, tell, until):
        rows += found
        keep({"env": env, "rows": rows})
    return {"env": env | {"clocks_after": environment.clocks()}, "rows": rows}


# The kernels of a pass, of which a group may force one.
OF_PASS = {
    name: {kernel.name for kernel in _kernels.KERNELS if kernel.op == op}
    for name, op in (("fwd", "forward"), ("bwd", "backward"))
}


def compile_ahead(groups: tuple[Group, ...]) -> None:
    """Compile what the cases of a GPU need, all at once: NVRTC takes a thread for each."""
    wanted = [
        (case, group.kernel, passes)
        for group in groups
        if group.device == "cuda"
        for case in group.cases
        for passes in (["fwd", "bwd"] if group.name != "fwd" else ["fwd"])
    ]
    if not wanted:
        return
    arch = str(_jit.compute_capability(0))

    def compile_one(case: Case, kernel: str | None, name: str) -> None:
        with contextlib.suppress(Exception):  # which the case itself will meet and report
            forced = kernel if kernel in OF_PASS[name] else None
            for unit in units_of(case, arch, forced, {"backward": name == "bwd"}):
                unit.compile()

    with ThreadPoolExecutor() as pool:
        list(pool.map(compile_one, *zip(*wanted, strict=True)))


def installed(groups: tuple[Group, ...], tell: Tell) -> tuple[Group, ...]:
    """Return the groups without the peers that are not there, each of which is told."""
    peers = {peer.name: peer for group in groups for peer in group.peers}
    device = {peer.name: group.device for group in groups for peer in group.peers}
    absent = [name for name, peer in peers.items() if not peer.installed(device[name])]
    for name in absent:
        tell(f"{name} is not installed: it is left out")
    return tuple(
        dataclasses.replace(group, peers=tuple(p for p in group.peers if p.name not in absent))
        for group in groups
    )
