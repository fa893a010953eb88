"""Time implementations against each other: results checked first, then in turn, round by round.

Clocks and power drift, and whoever follows one that draws little power is faster, so a single order
would favour somebody: every round times everyone once, the order rotates and turns around, and
medians over the rounds count. `rounds_us` keeps each round's time, from
which the ratio of two implementations is taken round by round.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from . import gradients
from .case import Case
from .peers import Peer
from .results import OWN, PLAIN
from .runner import Arrays, Runner, Unfit, cupyflash
from .truth import Truth

Row = dict[str, Any]
Progress = Callable[[str], None]
Build = Callable[[Case, Arrays, str], Runner]

PREHEAT_S = 0.3  # a card out of an idle gap runs its first kernels faster than the steady state


@dataclass(frozen=True)
class Group:
    """Cases that are timed by the same implementations."""

    cases: tuple[Case, ...]
    peers: tuple[Peer, ...] = ()
    device: str = "cuda"
    kernel: str | None = None
    frameworks: tuple[str, ...] = ("",)  # whose arrays cupyflash is given; "" is the peers' own
    plain: bool = False  # whether our kernel without the case's modifier is timed too
    backward: bool = False  # whether gradients are computed, of torch tensors
    passes: bool = False  # whether they are, and the forward pass is timed with them

    @property
    def name(self) -> str:
        """What is timed, as the results files say it."""
        return "fwd+bwd" if self.passes else "bwd" if self.backward else "fwd"


@dataclass(frozen=True)
class Effort:
    """How long to measure: rounds, and seconds per implementation and round."""

    rounds: int = 5
    budget_s: float = 0.1
    preheat_s: float = PREHEAT_S


@dataclass
class Entry:
    """One implementation on one case: what it is, and what has been measured of it."""

    impl: str
    case: Case
    build: Build
    runner: Runner | None = None
    replay: Callable[[], Any] | None = None
    max_error: float | None = None
    error: str | None = None
    notes: list[str] = field(default_factory=list)
    kernel_rounds: list[float] = field(default_factory=list)
    call_rounds: list[float] = field(default_factory=list)
    extra_bytes: int | None = None


def run(
    suite: str,
    groups: Iterable[Group],
    effort: Effort,
    progress: Progress,
    until: float = math.inf,
) -> Iterator[list[Row]]:
    """Measure every case of every group, and yield the rows of each for a results file.

    None is begun once `time.perf_counter` is beyond `until`.
    """
    for group in groups:
        for case in group.cases:
            if time.perf_counter() > until:
                progress(f"{case}: left out, the time is up")
                continue
            progress(str(case))
            yield [{"suite": suite, **row} for row in measure(case, group, effort)]


def measure(case: Case, group: Group, effort: Effort) -> list[Row]:
    """Check and time one case with cupyflash and every peer of the group."""
    arrays = case.shared_inputs()
    entries = entries_of(case, group)
    truths = {entry.case: truth_of(entry.case, arrays, group) for entry in entries}
    for entry in entries:
        attempt(entry, functools.partial(start, entry, arrays, group.device, truths[entry.case]))
        if group.passes:
            attempt(entry, functools.partial(weigh, entry))
    if group.device == "cuda":
        preheat(entries, effort.preheat_s)
    for turn in range(effort.rounds):
        for entry in ordered(entries, turn):
            attempt(entry, functools.partial(time_once, entry, effort.budget_s))
    return [row_of(case, entry, group.name) for entry in entries]


def ordered(entries: list[Entry], turn: int) -> list[Entry]:
    """Return everyone in the order of a round: two rounds begin at each, one backwards.

    Nobody follows the same one in both.
    """
    shift = turn // 2 % max(1, len(entries))
    rotated = entries[shift:] + entries[:shift]
    return rotated[::-1] if turn % 2 else rotated


def truth_of(case: Case, arrays: Arrays, group: Group) -> Truth | gradients.GradientTruth:
    """Return what results of a case are held against."""
    if group.name != "fwd":
        return gradients.GradientTruth(case, arrays, group.device)
    return Truth(case, arrays)


def entries_of(case: Case, group: Group) -> list[Entry]:
    """Return everyone who is timed on a case."""
    if group.name != "fwd":
        return backward_entries(case, group)
    own = functools.partial(cupyflash, kernel=group.kernel)
    entries = [
        Entry(OWN, case, functools.partial(own, framework=framework))
        for framework in group.frameworks
    ]
    if group.plain:
        plain = dataclasses.replace(case, mask="causal", modifier="")
        entries.append(Entry(PLAIN, plain, own))
    return entries + [Entry(peer.name, case, peer.runner) for peer in group.peers]


def backward_entries(case: Case, group: Group) -> list[Entry]:
    """Return everyone whose backward pass, or both of whose passes, are timed on a case."""
    if group.device == "cuda":
        gradients.release()
    own: Build = functools.partial(gradients.own, kernel=group.kernel)
    of_peer = gradients.of_peer
    if group.passes:
        own, of_peer = gradients.own_passes, gradients.of_passes
    entries = [Entry(OWN, case, own)]
    if group.plain:
        entries.append(Entry(PLAIN, dataclasses.replace(case, modifier=""), own))
    others = [
        Entry(peer.name, case, functools.partial(of_peer, peer.runner)) for peer in group.peers
    ]
    return entries + others


def attempt(entry: Entry, step: Callable[[], None]) -> None:
    """Run one step of an implementation; a failure becomes its row's error, never ours."""
    if entry.error is not None:
        return
    try:
        step()
    except Unfit as reason:
        entry.error = f"unfit: {reason}"
    except Exception as failure:
        first = (str(failure).strip().splitlines() or [""])[0]
        entry.error = f"{type(failure).__name__}: {first}"


def start(
    entry: Entry, arrays: Arrays, device: str, truth: Truth | gradients.GradientTruth
) -> None:
    """Build, call once, compare with the oracle, and capture."""
    entry.runner = runner = entry.build(entry.case, arrays, device)
    with runner.context():
        result = runner.call()
        runner.clock.sync(result)
        entry.max_error, wrong = truth.compare(runner.view(result), own_numbers=runner.own_numbers)
        if wrong and entry.impl in (OWN, PLAIN):
            entry.error = wrong
            return
        if wrong:
            entry.notes.append(wrong)
        try:
            entry.replay = runner.clock.prepare(runner.call)
        except Exception as failure:
            entry.notes.append(f"not captured: {type(failure).__name__}: {failure}"[:200])


def weigh(entry: Entry) -> None:
    """Measure what memory a call takes beside its inputs."""
    runner = entry.runner
    assert runner is not None
    with runner.context():
        entry.extra_bytes = runner.clock.extra_bytes(runner.call)


def time_once(entry: Entry, budget_s: float) -> None:
    """Add one round of kernel and call times."""
    runner = entry.runner
    assert runner is not None
    with runner.context():
        if entry.replay is not None:
            entry.kernel_rounds.append(runner.clock.kernel_us(entry.replay, budget_s))
        entry.call_rounds.append(runner.clock.call_us(runner.call, budget_s))


def preheat(entries: list[Entry], seconds: float) -> None:
    """Keep the card busy with everyone's calls until its clocks have settled."""
    end = time.perf_counter() + seconds
    ready = [entry.runner for entry in entries if entry.error is None and entry.runner]
    while ready and time.perf_counter() < end:
        for runner in ready:
            with contextlib.suppress(Exception), runner.context():
                runner.clock.sync(runner.call())


def row_of(case: Case, entry: Entry, name: str = "fwd") -> Row:
    """Return the row of a results file: rates are of what the entry computed."""
    kernel_us = median(entry.kernel_rounds)
    call_us = median(entry.call_rounds)
    best_us = kernel_us if kernel_us is not None else call_us
    flops = entry.case.flops() * gradients.FLOPS[name]
    row: Row = {
        "pass": name,
        "impl": entry.impl,
        "kernel": entry.runner.kernel if entry.runner else None,
        "dtype": case.dtype,
        "batch": case.batch,
        "len_q": case.len_q,
        "len_k": case.len_k,
        "heads_q": case.heads_q,
        "heads_k": case.heads_k,
        "head_dim": case.head_dim,
        "head_dim_v": case.head_dim_v,
        "mask": case.mask,
        "variant": case.variant,
        "options": entry.runner.options if entry.runner else {},
        "kernel_us": kernel_us,
        "call_us": call_us,
        "tflops": flops / best_us / 1e6 if best_us else None,
        "gbps": entry.case.bytes() / best_us / 1e3 if best_us and name == "fwd" else None,
        "max_error": entry.max_error,
        "rounds_us": entry.kernel_rounds or entry.call_rounds,
    }
    if case.lengths:
        row["lengths"] = list(case.lengths)
    if entry.extra_bytes is not None:
        row["extra_mib"] = entry.extra_bytes / 2**20
    if entry.error or entry.notes:
        row["error" if entry.error else "note"] = entry.error or "; ".join(entry.notes)
    return row


def median(values: list[float]) -> float | None:
    """Return the median, or None of nothing."""
    return statistics.median(values) if values else None
