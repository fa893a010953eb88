"""Which configuration of a kernel is the fastest here: candidates compiled, checked, and timed.

A tile table is made of the winners. All candidates of a problem are compiled first, as many at a
time as there are cores; one that spills or draws a remark of the compiler is not timed. Everyone is
timed in turn as in `run`, and after `TRIALS` rounds the fastest alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import statistics
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

from .. import _jit, _kernels
from .._call import PLANS
from ..errors import CompileFailed
from .case import Case
from .results import OWN
from .run import Effort, Entry, attempt, ordered, preheat, row_of, start
from .runner import cupyflash
from .truth import Truth

Config = Any  # the frozen dataclass that a kernel's unit is rendered from
Row = dict[str, Any]

TRIALS = 2  # rounds that everyone is in
FINALISTS = 6


def fastest(
    case: Case, kernel: _kernels.Kernel, configs: Iterable[Config], effort: Effort
) -> list[Row]:
    """Return a row of results for each configuration: the winner first, those refused last.

    Parameters
    ----------
    case, kernel
        What is computed, and by what.
    configs
        The candidates, of which the rows name what differs from the first.
    effort
        Rounds, and seconds per candidate and round.
    """
    found = compiled(case, kernel, configs)
    base = next(iter(found))
    build = functools.partial(cupyflash, kernel=kernel.name)
    entries = {config: Entry(OWN, case, build) for config in found}
    arrays = case.shared_inputs()
    truth = Truth(case, arrays)
    for config, entry in entries.items():
        used = found[config]
        if isinstance(used, str):
            entry.error = used
            continue
        with using(kernel, config):  # the graph that it is captured in keeps it
            attempt(entry, functools.partial(start, entry, arrays, "cuda", truth))
    race(list(entries.values()), effort)
    rows = [
        {
            "suite": "tune",
            **row_of(case, entry),
            "config": differences(config, base),
            "registers": getattr(found[config], "registers", None),
        }
        for config, entry in entries.items()
    ]
    return sorted(rows, key=rank)


def compiled(
    case: Case, kernel: _kernels.Kernel, configs: Iterable[Config]
) -> dict[Config, _jit.Resources | str]:
    """Return, for each configuration, what its code takes, or why it is not worth timing."""
    assert kernel.launch is not None
    problem, operands, *_ = case.request(_jit.compute_capability(0))
    launches = {}
    for config in configs:
        with using(kernel, config):
            launches[config] = kernel.launch(problem, operands)

    def judge(launch: Any) -> _jit.Resources | str:
        try:
            cubin = _jit.compile(launch.unit, launch.symbol, launch.arch)
        except CompileFailed as failure:
            return f"does not compile: {str(failure).splitlines()[-1]}"
        used = cubin.resources
        spilled = used.spill_stores + used.spill_loads
        return cubin.log or (f"spills {spilled} bytes" if spilled else used)

    with ThreadPoolExecutor() as pool:
        return dict(zip(launches, pool.map(judge, launches.values()), strict=True))


@contextlib.contextmanager
def using(kernel: _kernels.Kernel, config: Config) -> Iterator[None]:
    """Let a kernel have this configuration inside, whatever the problem; no plan outlives it."""
    assert kernel.config is not None
    PLANS.clear()
    try:
        # The launch looks it up in the module of both.
        where = f"{kernel.config.__module__}.{kernel.config.__name__}"
        with mock.patch(where, return_value=config):
            yield
    finally:
        PLANS.clear()


def race(entries: list[Entry], effort: Effort) -> None:
    """Time everyone in turn, and after some rounds the fastest alone."""
    running = [entry for entry in entries if entry.error is None and entry.replay is not None]
    preheat(running, effort.preheat_s)
    for turn in range(effort.rounds):
        if turn == TRIALS:
            running = [entry for entry in running if entry.error is None]
            running.sort(key=lambda entry: statistics.median(entry.kernel_rounds))
            del running[FINALISTS:]
        for entry in ordered(running, turn):
            attempt(entry, functools.partial(time_kernel, entry, effort.budget_s))


def time_kernel(entry: Entry, budget_s: float) -> None:
    """Add one round of kernel time."""
    assert entry.runner is not None
    assert entry.replay is not None
    entry.kernel_rounds.append(entry.runner.clock.kernel_us(entry.replay, budget_s))


def differences(config: Config, base: Config) -> dict[str, Any]:
    """Return the fields, by name, in which a configuration differs from another."""
    values, others = dataclasses.asdict(config), dataclasses.asdict(base)
    return {name: value for name, value in values.items() if value != others[name]}


def rank(row: Row) -> tuple[bool, int, float]:
    """Return the key of a row's place: who ran more rounds was faster in the first ones."""
    return "error" in row, -len(row["rounds_us"]), row["kernel_us"] or 0.0


def lines(rows: list[Row], count: int = 5) -> Iterator[str]:
    """Yield the fastest rows and the refused ones, a line each."""
    for row in [row for row in rows if "error" not in row][:count]:
        fields = " ".join(f"{name}={value}" for name, value in row["config"].items())
        speed = f"{row['kernel_us']:9.1f} us {row['tflops']:7.1f} TFLOP/s"
        yield f"{speed}  {row['registers']} registers  {fields or 'as it is'}"
    for row in rows:
        if "error" in row:
            fields = " ".join(f"{name}={value}" for name, value in row["config"].items())
            yield f"  refused: {fields or 'as it is'}: {row['error']}"
