"""`cupyflash check --emulate`: the kernels of a GPU on its emulator, and what each one moved."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from rich.table import Table

from . import (
    _backward_sm80,
    _backward_sm90,
    _check,
    _emulator,
    _forward_sm90,
    _kernels,
    _tuning_sm90,
)
from ._array import ITEMSIZES
from ._bench.case import Case
from ._kernels import Kernel
from ._problem import DESCALES, Problem
from .errors import InvalidArgument, shown

ARCH = 90  # the compute capability that the emulator stands for
SEED = 0
# The options that leave tiles as the case alone has them.
PLAIN = {"causal", "window_size", "alignment", "softmax_scale", *DESCALES}
COPIED = 4  # bytes of the narrowest access that is an asynchronous copy
STATISTICS_BYTES = 8  # of a query: its LSE and delta in fp32
UNCOUNTED: dict[str, int | None] = {"tiles_loaded": None, "tiles_skipped": None}
COLUMNS = {  # what is shown of an `Outcome.moved`
    "tiles_loaded": "tiles loaded",
    "tiles_skipped": "tiles skipped by the mask",
    "global_read_bytes": "bytes read",
    "products": "matrix products",
}


def chosen(name: str | None) -> list[Kernel]:
    """Return the kernels to check, all that such a GPU runs or the one named; g++ must be there."""
    _emulator.compiler()
    kernels = [
        kernel for kernel in _kernels.KERNELS if kernel.arch is not None and ARCH in kernel.arch
    ]
    found = [kernel for kernel in kernels if name in (None, kernel.name)]
    if not found:
        names = ", ".join(kernel.name for kernel in kernels)
        raise InvalidArgument(f"`kernel` must be one of {names} with --emulate, got {shown(name)}")
    return found


def run(kernels: list[Kernel], quick: bool, step: Callable[[str], None]) -> list[_check.Outcome]:
    """Run every case on every kernel named; `step` is told before each."""
    return _check.run(kernels, quick, step, measure)


def measure(case: Case, inputs: _check.Inputs, kernel: Kernel) -> dict[str, Any]:
    """Compare one case with the oracle; return its fields of an `Outcome`, and what was moved.

    Gradients are of the output and LSE of a forward kernel on the emulator, which is not counted.
    """
    with _emulator.session(SEED, ARCH):
        call, host, _ = _check.prepare(inputs, kernel, True)
    with _emulator.session(SEED, ARCH) as session:
        fields = _check.judge(inputs, kernel, host(call()))
    stats = sum(session.stats.values(), _emulator.Stats())  # of all launches of a backward call
    counters = dataclasses.asdict(stats) | {"products": stats.mma + stats.wgmma}
    counts = UNCOUNTED
    if inputs.options.keys() <= PLAIN:
        count = tiles if kernel.op == "forward" else tiles_of_queries
        counts = count(case, kernel, session.stats)
    return fields | {"moved": counts | counters}


def tiles(
    case: Case, kernel: Kernel, launched: dict[str, _emulator.Stats]
) -> dict[str, int | None]:
    """Return how many tiles of keys (each with its values) were loaded, and how many were skipped.

    A tile is loaded whole, zeros past the ends of the arrays included. What goes by plain loads
    (elements of an odd alignment) is not counted: then the numbers are None.
    """
    stats = launched[kernel.name]
    problem, *_ = case.request(ARCH)
    assert kernel.config is not None
    config = kernel.config(problem)
    sizes = [ITEMSIZES[problem.dtype] * dim for dim in (config.head_dim, config.head_dim_v)]
    if kernel.name == _forward_sm90.NAME:
        sizes = [_tuning_sm90.row_bytes(size) for size in sizes]
    heads, ends = problem.batch * problem.heads_q, problem.len_q
    walks = [
        problem.band.keys(q, min(q + config.block_q, ends), ends, problem.len_k)
        for q in range(0, ends, config.block_q)
    ]
    # The generic kernel loads the queries of every tile, the Hopper kernel those that see a key.
    asked = sum(kernel.name != _forward_sm90.NAME or begin < end for begin, end in walks)
    queries = heads * asked * config.block_q * sizes[0]
    if stats.tiles_loaded_bytes < queries:
        return UNCOUNTED
    loaded = (stats.tiles_loaded_bytes - queries) // (config.block_k * sum(sizes))
    every = heads * len(walks) * -(-problem.len_k // config.block_k)
    return {"tiles_loaded": loaded, "tiles_skipped": every - loaded}


def tiles_of_queries(
    case: Case, kernel: Kernel, launched: dict[str, _emulator.Stats]
) -> dict[str, int | None]:
    """Return the same of a backward kernel, of tiles of queries, each with what dO and LSE it has.

    Its blocks own keys. The generic kernel loads those that some query sees, the Hopper kernel all.
    """
    hopper = kernel.name == _backward_sm90.NAME
    if not hopper and kernel.name != _backward_sm80.NAME:
        return UNCOUNTED
    names = (kernel.name, *[_backward_sm90.WIDE] * hopper)
    stats = sum((launched[name] for name in names if name in launched), _emulator.Stats())
    problem, *_ = case.request(ARCH)
    assert kernel.config is not None
    config = kernel.config(problem)
    if not hopper and config.width < COPIED:
        return UNCOUNTED
    dims = 2 * config.head_dim if hopper else config.head_dim + config.head_dim_v
    row = ITEMSIZES[problem.dtype] * dims
    blocks = -(-problem.len_k // config.block_k)
    walks = [
        problem.band.keys(q, q + 1, problem.len_q, problem.len_k) for q in range(problem.len_q)
    ]
    seen = {k // config.block_k for begin, end in walks for k in range(begin, end)}
    owned = problem.batch * problem.heads_k * (blocks if hopper else len(seen))
    left = stats.tiles_loaded_bytes - owned * config.block_k * row
    if hopper and _backward_sm90.CONVERT not in launched:
        left -= sums_loaded_bytes(problem, config)
    loaded = left // (config.block_q * (row + STATISTICS_BYTES))
    every = problem.batch * problem.heads_q * blocks * -(-problem.len_q // config.block_q)
    return {"tiles_loaded": loaded, "tiles_skipped": every - loaded}


def sums_loaded_bytes(problem: Problem, config: Any) -> int:
    """Return the bytes of sums of dQ that come to a block which makes dQ: those of other keys."""
    ranges = (
        problem.band.keys(q, min(q + config.block_q, problem.len_q), problem.len_q, problem.len_k)
        for q in range(0, problem.len_q, config.block_q)
    )
    several = sum((end - 1) // config.block_k > begin // config.block_k for begin, end in ranges)
    row = problem.batch * problem.heads_q * config.head_dim * ITEMSIZES["float32"]
    return several * config.block_q * row


def report(outcomes: list[_check.Outcome]) -> Table:
    """Return the outcomes as a table for a terminal."""
    lines = Table("check", "case", title="kernels on the emulator against the oracle")
    lines.add_column(
        "kernel", no_wrap=True, min_width=max((len(o.label) for o in outcomes), default=0)
    )
    for name in ("max error", "of bound", *COLUMNS.values(), "result"):
        lines.add_column(name, justify="left" if name == "result" else "right")
    for o in outcomes:
        moved = o.moved or {}
        lines.add_row(
            o.check,
            o.case,
            o.label,
            *(_check.number(value) for value in (o.error, o.bound_ratio)),
            *(count(moved.get(name)) for name in COLUMNS),
            f"[{_check.COLOURS[o.status]}]{o.status}[/]",
        )
    return lines


def count(value: int | None) -> str:
    """Return a counter for people."""
    return "" if value is None else f"{value:,}"


def summary(outcomes: list[_check.Outcome]) -> list[str]:
    """Return one sentence per kernel, and another of what it moved."""
    lines = []
    found = _check.by_kernel(outcomes)
    for line, (label, own) in zip(_check.summary(outcomes), found.items(), strict=True):
        moved = [o.moved for o in own if o.moved]
        sums = {name: sum(counts[name] or 0 for counts in moved) for name in COLUMNS}
        counted = (f"{count(sums[name])} {words}" for name, words in COLUMNS.items())
        lines += [line, f"{label}: {', '.join(counted)}"]
    return lines
