"""A row of the dispatch table that computes a bias's gradient alone, held against the oracle."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from cases import Case
from gradients import seeds_of
from harness import Operand, fetch, hosted, placed, strided

import cupyflash
from cupyflash import _accuracy, _backward_dbias, _backward_delta, _kernels
from cupyflash._kernels import Kernel
from cupyflash._launch import Steps
from cupyflash._problem import Operands, Problem
from cupyflash._problem_backward import Backward

NAME = _backward_dbias.NAME


def steps(problem: Problem, operands: Operands, backward: Backward) -> Steps:
    """Make the statistics, then dbias; the other gradients are not written."""
    rows = 4 * _backward_delta.stat_heads(problem) * _backward_delta.stat_rows(problem)
    statistics = _backward_delta.launch(problem, operands, backward, lse=0, delta=rows)
    scratch, launches = _backward_dbias.launches(
        problem, operands, backward, delta=rows, scratch_offset=2 * rows
    )
    return Steps(2 * rows + scratch, (statistics, *launches))


ROW = Kernel(
    name=NAME,
    op="backward",
    arch=range(80, 1000),
    needs="a bias",
    unsupported=lambda problem: None if "dbias" in problem.wanted else "computes dbias alone",
    steps=steps,
)


@contextmanager
def row() -> Iterator[None]:
    """Have the row in the table."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_kernels, "KERNELS", (*_kernels.KERNELS, ROW))
        yield


def run(
    q: Operand,
    k: Operand,
    v: Operand,
    dout: Operand,
    dlse: Operand | None,
    *,
    place: str = "cpu",
    seed: int = 0,
    arch: int = 90,
    results: Any = None,
    **options: Any,
) -> np.ndarray:
    """Return dbias of the kernel on a GPU, or on the emulator where the place is "cpu".

    Parameters
    ----------
    q, k, v, dout, dlse : array or Strided
        Inputs.
    place : {"cpu", "gpu"}
        Where the arrays lie.
    seed, arch : int
        Of the emulator.
    results : tuple of array, optional
        out and lse; by default those of a forward pass there.
    **options
        Of the call.
    """
    there = placed(place, options)
    arrays = [strided(x).on(place) for x in (q, k, v)]
    dout, dlse = (None if x is None else strided(x).on(place) for x in (dout, dlse))
    function = cupyflash.attention_varlen if "cu_seqlens_q" in options else cupyflash.attention
    out, lse = results or function(*arrays, return_lse=True, **there)
    with row():
        if place == "cpu":
            with cupyflash.emulate(seed=seed, arch=arch):
                return cupyflash.attention_backward(
                    dout, *arrays, out, lse, dlse=dlse, kernel=NAME, **there
                ).dbias
        grads = cupyflash.attention_backward(
            dout, *arrays, out, lse, dlse=dlse, kernel=NAME, **there
        )
    return fetch(place, grads.dbias)[0]


def emulated(case: Case, blocks: int, seed: int) -> np.ndarray:
    """Return dbias of a case on the emulator, its sums divided among so many blocks."""
    q, k, v = case.arrays()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_backward_dbias, "BLOCKS", blocks)
        return run(q, k, v, *seeds_of(q.host, v.host), seed=seed, **case.options)


def judge_case(case: Case, dbias: np.ndarray) -> None:
    """Hold dbias of a case against the oracle."""
    q, k, v = case.arrays()
    judge(dbias, q, k, v, *seeds_of(q.host, v.host), **case.options)


def judge(
    dbias: np.ndarray, q: Operand, k: Operand, v: Operand, dout: Any, dlse: Any, **options: Any
) -> None:
    """Assert that dbias has the bias's shape and dtype and obeys the accuracy rule."""
    options = hosted(options)
    bias = options["attn_bias"]
    assert (dbias.shape, dbias.dtype) == (bias.shape, bias.dtype)
    arrays = (strided(x).host for x in (dout, q, k, v))
    grads = (None, None, None, dbias, None)
    dlse = None if dlse is None else strided(dlse).host
    verdict = _accuracy.gradients_verdict(grads, *arrays, dlse=dlse, **options)
    assert verdict.ok, verdict.message


def check(q: Operand, k: Operand, v: Operand, **options: Any) -> np.ndarray:
    """Draw dout and dlse, run the kernel, hold dbias against the oracle and return it."""
    where = {name: options.pop(name) for name in ("place", "seed", "arch") if name in options}
    layout = options.get("layout", "bshd")
    dout, dlse = seeds_of(strided(q).host, strided(v).host, layout)
    dbias = run(q, k, v, dout, dlse, **where, **options)
    judge(dbias, q, k, v, dout, dlse, **options)
    return dbias
