"""The statistics that the backward kernels read, on the emulator, against NumPy."""

import math
import struct
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from cases import Case, Modified
from emulated import ARCH, needs_compiler
from harness import hosted, same_bits, strided
from strided import ROWWISE, Layout, Strided

from cupyflash import _backward_delta, _emulator
from cupyflash._array import Array, adapter_of
from cupyflash._emulator import build
from cupyflash._emulator.memory import Memory
from cupyflash._problem import Operands, describe

pytestmark = needs_compiler

COLUMNS = 32  # of the accumulator
SEEDS = (0, 2)


class Statistics(NamedTuple):
    """What the kernel writes, by head and stat row."""

    lse: np.ndarray
    delta: np.ndarray
    dq: np.ndarray
    added: np.ndarray


class Inputs(NamedTuple):
    """What it reads."""

    out: Strided
    dout: Strided
    lse: np.ndarray
    dlse: Strided | None


def record(x: Any) -> Array:
    x = x.host if isinstance(x, Strided) else x
    return adapter_of(x, "x").array(x, "x")


def inputs(case: Case, memory: tuple[str | Layout, str | Layout], dlse: bool = True) -> Inputs:
    """Draw them for a case; every seventh row sees no key."""
    rng = np.random.default_rng(5)
    packed = isinstance(case, Modified) and case.packed is not None
    rows = (case.len_q, case.heads_q, case.head_dim_v)
    shape = rows if packed else (case.batch, *rows)
    out, dout = (
        Strided.of(rng.standard_normal(shape).astype(case.dtype), layout) for layout in memory
    )
    sums = (case.heads_q, case.len_q) if packed else (case.batch, case.heads_q, case.len_q)
    lse = (5 * rng.standard_normal(sums)).astype(np.float32)
    lse[..., ::7] = -np.inf
    turned = rng.standard_normal(sums[::-1]).astype(np.float32)  # rows outermost
    layout = Layout(tuple(np.cumprod([1, *sums[:-1]]).tolist()))
    return Inputs(out, dout, lse, Strided.of(turned.T, layout) if dlse else None)


def run(case: Case, given: Inputs, seed: int, zeroes: bool = True) -> Statistics:
    """Run the kernel on the emulator."""
    options = hosted(case.options)
    named = {name: options.pop(name) for name in list(options) if name in Operands._fields}
    arrays = dict(zip("qkv", case.arrays(), strict=True)) | named | {"out": given.out}
    problem, operands = describe(
        {name: record(x) for name, x in arrays.items()}, arch=ARCH, **options
    )
    heads, rows = _backward_delta.stat_heads(problem), _backward_delta.stat_rows(problem)
    # One more is that of the next block, which a grid without blocks leaves alone.
    counters = heads * rows // _backward_delta.ADDED_ROWS + (heads * rows > 0)
    made = Statistics(
        np.empty((heads, rows), np.float32),
        np.empty((heads, rows), np.float32),
        np.empty((heads, rows, COLUMNS), np.float32),
        np.empty(counters, np.uint32),
    )
    entry = (None,) if problem.packed else ()
    with Memory(build.runtime()) as memory:
        read = {
            name: memory.read(name, x)
            for name, x in operands._asdict().items()
            if isinstance(x, Array)
        }
        dout, lse, dlse = (
            None if x is None else memory.read(name, record(strided(x).host[entry]))
            for name, x in zip(("dout", "lse", "dlse"), given[1:], strict=True)
        )
        at = [memory.written(name, record(x)).pointer for name, x in made._asdict().items()]
        launch = _backward_delta.launch(
            replace(problem, width=math.gcd(problem.width, widest(given.dout))),
            operands._replace(**read),
            SimpleNamespace(out=read["out"], dout=dout, lse=lse, dlse=dlse),
            lse=at[0],
            delta=at[1],
            dq=at[2] if zeroes else None,
            dq_columns=COLUMNS,
            added=at[3] if zeroes else None,
        )
        params = bytearray(launch.params)
        for offset, address in launch.scratch:
            struct.pack_into("<Q", params, offset, address)
        if launch.grid[0]:
            _emulator.run(replace(launch, params=bytes(params)), seed)
        memory.collect()
    return made


def widest(x: Strided) -> int:
    """Return the bytes of the widest access that all rows of an array allow."""
    return math.gcd(16, *(abs(n) for n in (x.offset, *x.strides[:-1])))


def expected(case: Case, given: Inputs) -> list[tuple[tuple[Any, ...], slice, np.ndarray, Any]]:
    """Return, for each head of a sequence: its stat rows in use, lse and delta."""
    packed = isinstance(case, Modified) and case.packed is not None
    used = hosted(case.options).get("seqused_q")
    found = []
    scale = 1 if case.dtype == "float32" else math.log2(math.e)
    begin = 0
    lengths = case.lens_q if isinstance(case, Modified) else (case.len_q,) * case.batch
    for b, length in enumerate(lengths):
        first = (begin + 128 * b) // 128 * 128 if packed else 0
        rows = slice(begin, begin + (length if used is None else int(used[b])))
        for h in range(case.heads_q):
            entry = () if packed else (b,)
            o, do = (x.host[entry][rows, h].astype(np.float64) for x in (given.out, given.dout))
            lse = given.lse[entry][h, rows].astype(np.float64)
            delta = (o * do).sum(axis=-1)
            if given.dlse is not None:
                delta = delta - given.dlse.host[entry][h, rows]
            blind = lse == -np.inf
            head = h if packed else b * case.heads_q + h
            found.append((
                head,
                slice(first, first + len(lse)),
                np.where(blind, np.inf, lse * scale),
                np.where(blind, 0, delta),
            ))  # fmt: skip
        begin += length if packed else 0
    return found


def check(case: Case, *, zeroes: bool = True, dlse: bool = True, memory: Any = None) -> None:
    given = inputs(case, memory or ("packed", "packed"), dlse)
    made = run(case, given, SEEDS[0], zeroes)
    inside = np.zeros(made.delta.shape, np.bool_)
    for head, rows, lse, delta in expected(case, given):
        assert not inside[head, rows].any()  # sequences share no row
        inside[head, rows] = True
        # A sum of so many products, each rounded once, and their sum in any order.
        np.testing.assert_allclose(made.lse[head, rows], lse, rtol=2**-22)
        terms = 2**-23 * (case.head_dim_v + 2) * 16
        np.testing.assert_allclose(made.delta[head, rows], delta, rtol=0, atol=terms)
    assert (made.lse[~inside] == np.inf).all()
    assert (made.delta[~inside] == 0).all()
    if zeroes:
        assert not made.dq.any()
        assert not made.added.any()
    else:
        assert np.isnan(made.dq).all()
    again = run(case, given, SEEDS[1], zeroes)
    assert all(same_bits(a, b) for a, b in zip(made, again, strict=True))


DENSE = (
    Case(70, 5, 64, 64, batch=2, heads_q=3, heads_k=3, label="classes"),
    *(Case(130, 5, 16, n, "float16", label="classes") for n in (16, 32, 96, 128, 192, 256)),
    *(Case(3, 5, 16, n, "float32", label="classes") for n in (16, 64, 96, 256)),
    Case(1, 5, 16, 7, "float16", label="odd"),
    Case(129, 5, 16, 33, "bfloat16", label="odd"),
    Case(129, 5, 16, 33, "float32", label="odd"),
    Case(5, 5, 16, 0, "float16", label="no_column"),
    Case(0, 5, 16, 16, "float16", label="no_query"),
)
VARYING = (
    Modified(150, 5, 16, 32, "float16", batch=5, heads_q=2, heads_k=2, modifiers=("used_q",)),
    Modified.varlen(
        ((70, 1), (0, 3), (1, 4), (128, 0), (300, 9), (57, 1)), 16, 32, "float16", heads_q=2,
        heads_k=2, tail=150,
    ),
    Modified.varlen(((7, 7),) * 40, 16, 16, "float32", modifiers=("used_q",)),
    Modified.varlen((), 16, 16, "float16", tail=2),
)  # fmt: skip


@pytest.mark.parametrize("case", DENSE + VARYING, ids=lambda case: case.id)
def test_statistics(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("memory", [*ROWWISE, "one_row", "one_vector"])
def test_any_strides(memory: str) -> None:
    case = Case(50, 5, 16, 40, "float16", batch=2, heads_q=2, heads_k=2)
    check(case, memory=("packed", memory), dlse=False)
    if memory in ROWWISE:
        check(case, memory=(memory, "heads_first"))


def test_the_accumulator_may_be_left_alone() -> None:
    check(Case(50, 5, 16, 40, "float16"), zeroes=False)


def test_what_rows_beyond_those_in_use_hold_does_not_matter() -> None:
    case = Modified(150, 5, 16, 32, "float16", batch=3, modifiers=("used_q",))
    given = inputs(case, ("packed", "packed"))
    for b, n in enumerate(case.options["seqused_q"]):
        given.out.host[b, n:] = given.dout.host[b, n:] = np.nan
        given.lse[b, :, n:] = np.nan
    clean = inputs(case, ("packed", "packed"))
    one, other = run(case, given, SEEDS[0]), run(case, clean, SEEDS[0])
    assert all(same_bits(a, b) for a, b in zip(one, other, strict=True))


def test_huge_and_undefined_sums_stay_what_they_are() -> None:
    case = Case(4, 5, 16, 16, "float16")
    given = inputs(case, ("packed", "packed"))
    given.lse[0, 0] = np.nan, 3e38, -3e38, np.inf
    made = run(case, given, SEEDS[0])
    largest = np.finfo(np.float32).max
    np.testing.assert_array_equal(made.lse[0, :4], np.float32([np.nan, largest, -largest, largest]))
