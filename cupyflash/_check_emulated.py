"""`cupyflash check --emulate`: the kernels of a GPU on its emulator, and what each one moved."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from rich.table import Table

from . import _check, _emulator, _kernels
from ._array import ITEMSIZES
from ._bench.case import Case
from .errors import InvalidArgument

ARCH = 90  # the compute capability that the emulator stands for
SEED = 0


def chosen(name: str | None) -> list[str]:
    """Return the kernels to check, all that such a GPU runs or the one named; g++ must be there."""
    _emulator.compiler()
    names = [
        kernel.name
        for kernel in _kernels.KERNELS
        if kernel.op == "forward" and kernel.arch is not None and ARCH in kernel.arch
    ]
    if name is None:
        return names
    if name not in names:
        raise InvalidArgument(
            f"`kernel` must be one of {', '.join(names)} with --emulate, got {name!r}"
        )
    return [name]


def run(kernels: list[str], quick: bool, step: Callable[[str], None]) -> list[_check.Outcome]:
    """Run every case on every kernel named; `step` is told before each."""
    return _check.run(kernels, quick, step, measure)


def measure(case: Case, inputs: _check.Inputs, kernel: str) -> dict[str, Any]:
    """Compare one case with the oracle; return its fields of an `Outcome`, and what was moved."""
    call, host, _ = _check.prepare(inputs, kernel, True)
    with _emulator.session(SEED, ARCH) as session:
        fields = _check.judge(inputs, *(host(x) for x in call()))
    stats = session.stats.get(kernel, _emulator.Stats())
    return fields | {"moved": key_blocks(case, kernel, stats) | dataclasses.asdict(stats)}


def key_blocks(case: Case, kernel: str, stats: _emulator.Stats) -> dict[str, int | None]:
    """Return how many key blocks were loaded, and how many there are to the tiles of queries.

    A tile of queries and a key block are loaded whole, zeros past the ends of the arrays included;
    what goes by plain loads (elements of an odd alignment) is not counted, and None.
    """
    problem = case.request(ARCH).problem
    row = next(row for row in _kernels.KERNELS if row.name == kernel)
    assert row.config is not None
    config, itemsize = row.config(problem), ITEMSIZES[problem.dtype]
    every = stats.blocks * -(-problem.len_k // config.block_k)
    if not stats.tiles_loaded_bytes:
        return {"key_blocks_loaded": None if stats.blocks else 0, "key_blocks": every}
    queries = stats.blocks * config.block_q * config.head_dim * itemsize
    one = config.block_k * (config.head_dim + config.head_dim_v) * itemsize
    return {
        "key_blocks_loaded": (stats.tiles_loaded_bytes - queries) // one,
        "key_blocks": every,
    }


def report(outcomes: list[_check.Outcome]) -> Table:
    """Return the outcomes as a table for a terminal."""
    lines = Table("check", "case", "kernel", title="kernels on the emulator against the oracle")
    names = ("max error", "of bound", "key blocks", "loaded", "bytes read", "mma", "result")
    for name in names:
        lines.add_column(name, justify="left" if name == "result" else "right")
    for o in outcomes:
        moved = o.moved or {}
        lines.add_row(
            o.check,
            o.case,
            o.kernel,
            *(_check.number(value) for value in (o.error, o.bound_ratio)),
            *(
                count(moved.get(name))
                for name in ("key_blocks", "key_blocks_loaded", "global_read_bytes", "mma")
            ),
            f"[{_check.COLOURS[o.status]}]{o.status}[/]",
        )
    return lines


def count(value: int | None) -> str:
    """Return a counter for people."""
    return "" if value is None else f"{value:,}"


def summary(outcomes: list[_check.Outcome]) -> list[str]:
    """Return one sentence per kernel, and another of what it moved."""
    lines = []
    for line, kernel in zip(
        _check.summary(outcomes), dict.fromkeys(o.kernel for o in outcomes), strict=True
    ):
        moved = [o.moved for o in outcomes if o.kernel == kernel and o.moved]
        known = [m for m in moved if m["key_blocks_loaded"] is not None]
        loaded, every, read, mma = (
            sum(m[name] or 0 for m in known)
            for name in ("key_blocks_loaded", "key_blocks", "global_read_bytes", "mma")
        )
        lines += [
            line,
            f"{kernel}: {loaded:,} of {every:,} key blocks loaded, the masks skip the others; "
            f"{read:,} bytes read from global memory; {mma:,} matrix products",
        ]
    return lines
