"""The emulator is held against faults planted in the real sources: it has to show every one."""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import gradients
import mutations
import mutations_bwd_sm80
import mutations_bwd_sm90
import mutations_sm90
import numpy as np
import pytest
from emulated import SEEDS_IN_TURNS, SEEDS_OF, needs_compiler, run
from harness import GPU_KERNEL, HOPPER, hosted, same_bits
from mutations import WRONG, Mutation, edited
from mutations_bwd_sm80 import OTHER_BITS

import cupyflash
from cupyflash import (
    _accuracy,
    _backward_sm80,
    _backward_sm90,
    _jit,
    _problem,
    _tuning,
    _tuning_sm90,
)
from cupyflash._emulator import build

pytestmark = needs_compiler


class Suite(NamedTuple):
    """The faults of a kernel, and the seeds that show them."""

    faults: Any
    seeds: tuple[int, ...]
    backward: bool = False


SUITES = {
    GPU_KERNEL: Suite(mutations, SEEDS_OF[GPU_KERNEL]),
    HOPPER: Suite(mutations_sm90, SEEDS_OF[HOPPER]),
    _backward_sm80.NAME: Suite(mutations_bwd_sm80, SEEDS_OF[GPU_KERNEL], True),
    _backward_sm90.NAME: Suite(mutations_bwd_sm90, SEEDS_IN_TURNS, True),
}
# Of the Hopper kernels', whose units take longest, what only the oracle sees is left to the night.
ALL = [
    pytest.param(
        kernel,
        mutation,
        marks=[pytest.mark.nightly] * (kernel.endswith("_sm90") and mutation.report == WRONG),
    )
    for kernel, suite in SUITES.items()
    for mutation in suite.faults.ALL
]


def planted(mutation: Mutation, root: Path) -> Path:
    """Return a copy of the CUDA sources with the fault in it."""
    return edited(root, [(mutation.file, mutation.old, mutation.new)])


def computed(kernel: str, problem: str, seed: int) -> tuple[_accuracy.Verdict, list[Any]]:
    """Run a problem; return the oracle's verdict, and what has the same bits with every seed."""
    suite = SUITES[kernel]
    case = suite.faults.PROBLEMS[problem]
    if suite.backward:
        options = suite.faults.OPTIONS.get(problem, {})
        with gradients.kept_scratch() as scratch:
            found = gradients.emulated(kernel, case, seed, **options)
        fixed = [found.dk, found.dv, found.dsink]
        fixed += map(np.frombuffer, scratch, [np.uint8]) if options.get("deterministic") else []
        return expected_gradients(kernel, problem).verdict(found), fixed
    q, k, v = case.arrays()
    out, lse = run(q, k, v, kernel=kernel, seed=seed, **case.options)
    options = hosted(case.options)
    return _accuracy.verdict(out, lse, q.host, k.host, v.host, **options), [out, lse]


@functools.cache
def expected_gradients(kernel: str, problem: str) -> _accuracy.ExpectedGradients:
    case = SUITES[kernel].faults.PROBLEMS[problem]
    q, k, v = (x.host for x in case.arrays())
    dout, dlse = gradients.seeds_of(q, v)
    return _accuracy.expected_gradients(dout, q, k, v, dlse=dlse, **hosted(case.options))


def reports(kernel: str, problem: str) -> Iterator[str]:
    """Run a problem with one seed after the other; say what the emulator or the oracle says."""
    first: list[Any] = []
    for seed in SUITES[kernel].seeds:
        try:
            verdict, fixed = computed(kernel, problem, seed)
        except cupyflash.KernelFault as fault:
            yield str(fault)
            continue
        first = first or fixed
        if not verdict.ok:
            yield f"{WRONG}: {verdict.message}"
        elif all(same_bits(a, b) for a, b in zip(first, fixed, strict=True) if a is not None):
            yield ""
        else:
            yield OTHER_BITS


def prepare(patch: pytest.MonkeyPatch) -> None:
    """Let even small problems have more than one group of heads, and bounds stay unread."""
    patch.setattr(_tuning, "heads_per_group", lambda *sizes: 3)
    patch.setattr(_problem, "_values", lambda array: None)  # as a GPU's are


@pytest.fixture(autouse=True)
def prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    build.runtime()  # as all tests have it, from their cache
    prepare(monkeypatch)


def divide(monkeypatch: pytest.MonkeyPatch, kernel: str, problem: str) -> None:
    """Let a problem have tiles, or a form, of its own where its suite says so."""
    if kernel == _backward_sm90.NAME and not problem.startswith("ending"):
        ordered = _backward_sm90._is_faster_in_order
        monkeypatch.setattr(_backward_sm90, "_finishes", lambda problem: False)
        monkeypatch.setattr(
            _backward_sm90,
            "_is_faster_in_order",
            lambda problem: problem.band.bounded and ordered(problem),
        )
    if kernel == HOPPER:
        # Blocks of more keys than a plain problem's, of which the faults were planted.
        monkeypatch.setattr(_tuning_sm90, "HALF", _tuning_sm90.HALF | _tuning_sm90.HALF_MODIFIED)
        if tiles := mutations_sm90.TILES.get(problem):
            table = "EIGHT" if problem.startswith("fp8") else "HALF"
            monkeypatch.setattr(_tuning_sm90, table, {(64, 64): tiles})
            monkeypatch.setattr(_tuning_sm90, "HALF_MODIFIED", {})
            monkeypatch.setattr(_tuning_sm90, "HALF_HEAVY", {(64, 64): tiles})


@pytest.mark.parametrize(
    ("kernel", "problem"),
    [(kernel, problem) for kernel, suite in SUITES.items() for problem in suite.faults.PROBLEMS],
)
def test_without_a_fault_nothing_is_reported(
    kernel: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    divide(monkeypatch, kernel, problem)
    assert not any(reports(kernel, problem))


@pytest.mark.parametrize(
    ("kernel", "mutation"),
    ALL,
    ids=lambda value: value.name if isinstance(value, Mutation) else value.partition("_")[2],
)
def test_a_fault_is_reported(
    kernel: str, mutation: Mutation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    divide(monkeypatch, kernel, mutation.problem)
    sources = planted(mutation, tmp_path / "cuda")
    monkeypatch.setenv("CUPYFLASH_CUDA_DIR", str(sources))
    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", str(tmp_path / "cache"))
    first = next(filter(None, reports(kernel, mutation.problem)), "nothing, whatever the seed")
    assert mutation.report in first


@pytest.mark.parametrize("suite", SUITES.values(), ids=SUITES)
def test_mutations_have_names_of_their_own(suite: Suite) -> None:
    faults = suite.faults
    assert len({mutation.name for mutation in faults.ALL}) == len(faults.ALL)
    assert {mutation.problem for mutation in faults.ALL} == set(faults.PROBLEMS)


@pytest.mark.parametrize("suite", SUITES.values(), ids=SUITES)
def test_faults_have_one_place_in_the_sources(suite: Suite) -> None:
    """Also those that only run nightly."""
    sources = _jit.sources()
    lost = [m.name for m in suite.faults.ALL if sources[m.file].count(m.old) != 1]
    assert lost == []
