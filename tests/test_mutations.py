"""The emulator is held against faults planted in the real sources: it has to show every one."""

from pathlib import Path
from typing import Any

import mutations
import mutations_sm90
import pytest
from emulated import SEEDS_OF, needs_compiler, run
from harness import GPU_KERNEL, HOPPER, hosted
from mutations import WRONG, Mutation

import cupyflash
from cupyflash import _accuracy, _jit, _problem, _tuning, _tuning_sm90
from cupyflash._emulator import build

pytestmark = needs_compiler

SUITES = {GPU_KERNEL: mutations, HOPPER: mutations_sm90}
# Of the Hopper kernel's, whose units take longest, what only the oracle sees is left to the night.
ALL = [
    pytest.param(
        kernel,
        mutation,
        marks=[pytest.mark.nightly] * (kernel == HOPPER and mutation.report == WRONG),
    )
    for kernel, suite in SUITES.items()
    for mutation in suite.ALL
]


def planted(mutation: Mutation, root: Path) -> Path:
    """Return a copy of the CUDA sources with the fault in it."""
    for name, text in _jit.sources().items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name == mutation.file:
            assert text.count(mutation.old) == 1, f"{name} has changed: rewrite {mutation.old!r}"
            text = text.replace(mutation.old, mutation.new)
        path.write_text(text, encoding="utf-8")
    return root


def reported(kernel: str, problem: str, seed: int) -> str:
    """Run a problem; return what the emulator or the oracle says about it, or nothing."""
    case = SUITES[kernel].PROBLEMS[problem]
    q, k, v = case.arrays()
    try:
        out, lse = run(q, k, v, kernel=kernel, seed=seed, **case.options)
    except cupyflash.KernelFault as fault:
        return str(fault)
    verdict = _accuracy.verdict(out, lse, q.host, k.host, v.host, **hosted(case.options))
    return "" if verdict.ok else f"{WRONG}: {verdict.message}"


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let even small problems have more than one group of heads."""
    build.runtime()  # as all tests have it, from their cache
    monkeypatch.setattr(_tuning, "heads_per_group", lambda *sizes: 3)
    monkeypatch.setattr(_problem, "_values", lambda array: None)  # bounds are as a GPU's: unread


def divide(monkeypatch: pytest.MonkeyPatch, kernel: str, problem: str) -> None:
    """Let a problem have tiles of its own where its suite says so."""
    if kernel == HOPPER and (tiles := mutations_sm90.TILES.get(problem)):
        monkeypatch.setattr(_tuning_sm90, "HALF", {(64, 64): tiles})


@pytest.mark.parametrize(
    ("kernel", "problem"),
    [(kernel, problem) for kernel, suite in SUITES.items() for problem in suite.PROBLEMS],
)
def test_without_a_fault_nothing_is_reported(
    kernel: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    divide(monkeypatch, kernel, problem)
    seeds = SEEDS_OF[kernel]
    assert [reported(kernel, problem, seed) for seed in seeds] == ["" for _ in seeds]


@pytest.mark.parametrize(
    ("kernel", "mutation"),
    ALL,
    ids=lambda value: value.name if isinstance(value, Mutation) else value.rpartition("_")[2],
)
def test_a_fault_is_reported(
    kernel: str, mutation: Mutation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    divide(monkeypatch, kernel, mutation.problem)
    sources = planted(mutation, tmp_path / "cuda")
    monkeypatch.setenv("CUPYFLASH_CUDA_DIR", str(sources))
    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", str(tmp_path / "cache"))
    reports = (reported(kernel, mutation.problem, seed) for seed in SEEDS_OF[kernel])
    first = next(filter(None, reports), "nothing, whatever the seed")
    assert mutation.report in first


@pytest.mark.parametrize("suite", SUITES.values(), ids=SUITES)
def test_mutations_have_names_of_their_own(suite: Any) -> None:
    assert len({mutation.name for mutation in suite.ALL}) == len(suite.ALL)
    assert {mutation.problem for mutation in suite.ALL} == set(suite.PROBLEMS)


@pytest.mark.parametrize("suite", SUITES.values(), ids=SUITES)
def test_faults_have_one_place_in_the_sources(suite: Any) -> None:
    """Also those that only run nightly."""
    sources = _jit.sources()
    lost = [m.name for m in suite.ALL if sources[m.file].count(m.old) != 1]
    assert lost == []
