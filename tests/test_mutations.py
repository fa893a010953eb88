"""The emulator is held against faults planted in the real sources: it has to show every one."""

from pathlib import Path

import pytest
from emulated import SEEDS, needs_compiler, run
from mutations import ALL, PROBLEMS, WRONG, Mutation

import cupyflash
from cupyflash import _accuracy, _jit, _tuning
from cupyflash._emulator import build

pytestmark = needs_compiler


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


def reported(problem: str, seed: int) -> str:
    """Run a problem; return what the emulator or the oracle says about it, or nothing."""
    case = PROBLEMS[problem]
    q, k, v = case.arrays()
    try:
        out, lse = run(q, k, v, seed=seed, **case.options)
    except cupyflash.KernelFault as fault:
        return str(fault)
    verdict = _accuracy.verdict(out, lse, q.host, k.host, v.host, **case.options)
    return "" if verdict.ok else f"{WRONG}: {verdict.message}"


@pytest.fixture(autouse=True)
def few_heads_share_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let even small problems have more than one group of heads."""
    monkeypatch.setattr(_tuning, "heads_per_group", lambda *sizes: 3)


@pytest.mark.parametrize("problem", PROBLEMS)
def test_without_a_fault_nothing_is_reported(problem: str) -> None:
    assert [reported(problem, seed) for seed in SEEDS] == ["" for _ in SEEDS]


@pytest.mark.parametrize("mutation", ALL, ids=lambda mutation: mutation.name)
def test_a_fault_is_reported(
    mutation: Mutation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build.runtime()  # from the cache of all tests
    sources = planted(mutation, tmp_path / "cuda")
    monkeypatch.setenv("CUPYFLASH_CUDA_DIR", str(sources))
    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", str(tmp_path / "cache"))
    reports = (reported(mutation.problem, seed) for seed in SEEDS)
    first = next(filter(None, reports), "nothing, whatever the seed")
    assert mutation.report in first


def test_mutations_have_names_of_their_own() -> None:
    assert len({mutation.name for mutation in ALL}) == len(ALL)
    assert {mutation.problem for mutation in ALL} == set(PROBLEMS)
