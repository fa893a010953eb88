"""Modifiers, masks and packed sequences of the generic kernel on the emulator, against the oracle.

Tiny problems, for a unit takes g++ longer than its run; test_forward_modifiers.py has larger ones.
"""

from typing import Any

import numpy as np
import pytest
from cases import DTYPES, MODIFIERS, Modified, _set
from emulated import check, every_other_at_night, needs_compiler, run
from harness import same_bits

import cupyflash
from cupyflash import _problem
from cupyflash.masks import PrefixLM, Segments

pytestmark = needs_compiler

ARCH = 80
LOWEST = float(np.finfo(np.float32).min)
HEADS = {"heads_q": 4, "heads_k": 2}
# And one whose array ends with the element of an even column.
ALONE = tuple(
    Modified(39, len_k, 16, 16, "float16", 2, **HEADS, causal=True, modifiers=(name,), label=label)
    for len_k, name, label in (
        *((70, name, "alone") for name in MODIFIERS),
        (71, "bias_of_odd_rows", "odd"),
    )
)


def _draw(rng: np.random.Generator, index: int) -> Modified:
    """Draw a set of modifiers, on dense arrays, on lengths in use or on packed sequences."""
    names = _set(rng)
    while len(names) < 2:
        names = _set(rng)
    used = [name for name in names if name.startswith("used")]
    facts: dict[str, Any] = {
        **HEADS,
        "dtype": DTYPES[index % 3],
        "causal": index % 2 == 0,
        "softmax_scale": (None, None, -0.3)[index % 5 % 3],
        "label": f"mixed{index:02}",
    }
    dims = ((16, 16), (7, 24), (32, 20))[index % 3]
    if index % 3 == 2:
        lengths = ((70, 20), (0, 9), (3, 0), (45, 66))
        return Modified.varlen(lengths, *dims, **facts, modifiers=names, tail=index % 2 * 5)
    if index % 3 == 1 and not used:
        names = (*names, "used_q", "used_k")
    return Modified(53, 70, *dims, batch=3, **facts, modifiers=names)


MIXED = tuple(_draw(rng, n) for rng in [np.random.default_rng(80)] for n in range(12))


def inputs(*shape: int, len_k: int = 70, dtype: Any = np.float16) -> list[np.ndarray]:
    """Draw q, k and v; the shape is q's."""
    rng = np.random.default_rng(3)
    shapes = (shape, *[(shape[0], len_k, *shape[2:])] * 2)
    return [rng.standard_normal(s).astype(dtype) for s in shapes]


@pytest.mark.parametrize("case", ALONE, ids=lambda case: f"{case.label}-{case.modifiers[0]}")
def test_each_alone(case: Modified) -> None:
    check(*case.arrays(), arch=ARCH, seeds=(0, 2), **case.options)


@pytest.mark.parametrize("case", every_other_at_night(MIXED), ids=lambda case: case.id)
def test_several_together(case: Modified) -> None:
    check(*case.arrays(), arch=ARCH, seeds=(0, 3), **case.options)


# Values that hurt


def test_the_lowest_bias_hides_nothing() -> None:
    """A row of it alone is a mean, and beside others it has no weight."""
    q, k, v = inputs(1, 40, 1, 16)
    bias = np.where(np.arange(70) < np.arange(40)[:, None], 0, LOWEST).astype(np.float32)
    bias[7] = LOWEST
    bias[8] = -LOWEST
    out, lse = check(q, k, v, attn_bias=bias, arch=ARCH, seeds=(0,))
    even = run(q * 0, k, v, attn_bias=bias * 0, arch=ARCH)[0]
    assert same_bits(out[0, 7:9], np.broadcast_to(even[0, 0], out[0, 7:9].shape))
    assert (lse[0, 0, 7], lse[0, 0, 8]) == (LOWEST, -LOWEST)


def test_scores_that_overflow_in_base_2() -> None:
    q, k, v = inputs(1, 33, 1, 16, dtype="bfloat16")
    q[:], k[:] = 0, 0
    q[0, :, 0, 0] = 1e19 * np.resize([1, -1, 0.5], 33)
    k[0, :, 0, 0] = 1e19 * np.resize([1, -1, 0.3, -0.7], 70)
    for scale in (3.0, -3.0, 1e-37, 0.0):
        check(q, k, v, softmax_scale=scale, arch=ARCH, seeds=(0,))
        for cap in (5e37, 1.7e38):
            check(q, k, v, softmax_scale=scale, softcap=cap, arch=ARCH, seeds=(0,))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_rows_that_a_bias_or_a_mask_empties(dtype: str) -> None:
    """A sink is all that they see; where it is -inf they are empty."""
    q, k, v = inputs(1, 40, 3, 16, dtype=dtype)
    bias = np.zeros((40, 70), np.float16)
    bias[3], bias[4, ::2] = -np.inf, -np.inf
    seen = np.ones((3, 40, 1), np.bool_)
    seen[:, 5] = False
    sink = np.array([-np.inf, 2, 1e4], np.float32)
    out, lse = check(
        q, k, v, attn_bias=bias, attn_mask=seen, learnable_sink=sink, arch=ARCH, seeds=(0,)
    )
    for row in (3, 5):
        assert not out[0, row].any()
        assert (lse[0, :, row] == sink).all()
    assert not out[0, :, 2].any()


def test_a_sink_of_any_size() -> None:
    q, k, v = inputs(1, 40, 7, 16)
    sink = np.array([3e38, -3e38, 0, np.nan, -0.0, np.inf, 88.5], np.float32)
    check(q, k, v, learnable_sink=sink, causal=True, arch=ARCH, seeds=(0,))
    few = inputs(1, 70, 7, 16, len_k=40)  # 30 rows see none of them
    out, lse = check(*few, learnable_sink=sink, causal=True, arch=ARCH, seeds=(0,))
    assert not out[0, :30].any()
    np.testing.assert_array_equal(lse[0, :, :30], np.broadcast_to(sink[:, None], (7, 30)))


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_what_lies_beyond_the_lengths_in_use_never_matters(poison: float) -> None:
    q, k, v = inputs(3, 40, 2, 16)
    options: dict[str, Any] = {
        "seqused_q": np.array([33, 0, 40]),
        "seqused_k": np.array([66, 70, 0]),
        "attn_mask": np.ones((40, 70), np.bool_),
    }
    options["attn_mask"][:, ::3] = False
    out, lse = check(q, k, v, **options, arch=ARCH, seeds=(0,))
    for batch, (n, m) in enumerate(zip(options["seqused_q"], options["seqused_k"], strict=True)):
        assert not out[batch, n:].any()
        assert np.isneginf(lse[batch, :, n:]).all()
        q[batch, n:] = k[batch, m:] = v[batch, m:] = poison
    again, lse_again = run(q, k, v, **options, arch=ARCH)
    assert same_bits(again, out)
    assert same_bits(lse_again, lse)


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the host not check lengths, as it cannot check those of a device."""
    monkeypatch.setattr(_problem, "_values", lambda array: None)


def packed(rng: np.random.Generator, total_q: int, total_k: int, dim: int = 16) -> Any:
    """Draw q of four heads, k and v of two."""
    shapes = ((total_q, 4, dim), (total_k, 2, dim), (total_k, 2, dim))
    return [rng.standard_normal(shape).astype(np.float16) for shape in shapes]


# Boundaries of tiles of 128 rows in every place, rows before and after, and none at all.
LENGTHS = (
    (0, [70, 90], [40, 10], 0),
    (3, [127, 128, 129, 0, 0, 1], [9, 70, 1, 3, 0, 20], 5),
    (130, [1, 1, 0, 2], [5, 0, 5, 70], 126),
    (0, [2] * 40, [3] * 40, 300),
    (0, [], [], 9),
    (0, [300], [70], 0),
    (0, [0], [0], 0),
)


@pytest.mark.parametrize(("before", "lens_q", "lens_k", "after"), LENGTHS, ids=str)
def test_packed_sequences(
    before: int, lens_q: list[int], lens_k: list[int], after: int, unread: None
) -> None:
    """With NaN in every row that is no sequence's."""
    cu_q, cu_k = (np.cumsum([before, *lengths]) for lengths in (lens_q, lens_k))
    total_q, total_k = cu_q[-1] + after, cu_k[-1] + after
    q, k, v = packed(np.random.default_rng(4), total_q, total_k)
    q[:before] = k[:before] = v[:before] = np.nan
    q[cu_q[-1] :] = k[cu_k[-1] :] = v[cu_k[-1] :] = np.nan
    options = {"cu_seqlens_q": cu_q.astype(np.int32), "cu_seqlens_k": cu_k}
    check(q, k, v, **options, causal=True, arch=ARCH, seeds=(0, 2))


def test_lengths_in_use_of_packed_sequences() -> None:
    lens, used_q, used_k = [70, 3, 60], np.array([20, 0, 60]), np.array([70, 3, 11])
    cu = np.cumsum([0, *lens])
    q, k, v = packed(np.random.default_rng(5), 133, 133)
    for first, n, m, end in zip(cu[:-1], used_q, used_k, cu[1:], strict=True):
        q[first + n : end] = k[first + m : end] = v[first + m : end] = np.inf
    check(
        q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, seqused_q=used_q, seqused_k=used_k,
        causal=True, arch=ARCH, seeds=(0,),
    )  # fmt: skip


def test_bounds_of_no_sequence_lead_nowhere(unread: None) -> None:
    """Each is clipped where it is read."""
    q, k, v = packed(np.random.default_rng(6), 90, 80)
    options = {
        "cu_seqlens_q": np.array([-7, 40, 40, 2**40]),
        "cu_seqlens_k": np.array([5, 2**62, -1, -(2**62)]),
        "seqused_q": np.array([2**50, 3, 45]),
        "seqused_k": np.array([70, -3, 2**33]),
    }
    check(q, k, v, **options, causal=True, arch=ARCH, seeds=(0,))


@pytest.mark.parametrize("count", [1, 31, 32, 33, 100])
def test_any_number_of_sequences(count: int) -> None:
    rng = np.random.default_rng(count)
    lens = rng.integers(0, 4, count)
    cu = np.cumsum([0, *lens])
    q, k, v = packed(rng, cu[-1], cu[-1])
    check(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True, arch=ARCH, seeds=(0,))


def test_a_packed_sequence_is_its_own_entry_of_a_batch() -> None:
    """Sinks, dropout, slopes, biases and masks are those of the sequence's number."""
    rng = np.random.default_rng(7)
    q, k, v = (rng.standard_normal((3, 40, 2, 16)).astype(np.float16) for _ in "qkv")
    options: dict[str, Any] = {
        "alibi_slopes": rng.random((3, 2), np.float32),
        "attn_bias": rng.standard_normal((3, 1, 40, 40)).astype(np.float16),
        "dropout_p": 0.3,
        "rng_state": (9, 2**63),
        "mask": PrefixLM(np.array([3, 0, 35])) & Segments(np.sort(rng.integers(0, 3, (3, 40)))),
    }
    expected = run(q, k, v, **options, arch=ARCH)
    cu = np.arange(4) * 40
    flat = (x.reshape(120, 2, 16) for x in (q, k, v))
    out, lse = run(*flat, **options, cu_seqlens_q=cu, cu_seqlens_k=cu, arch=ARCH)
    assert same_bits(out.reshape(3, 40, 2, 16), expected[0])
    assert same_bits(lse.reshape(2, 3, 40).swapaxes(0, 1), expected[1])


# Dropout by the bit: all weights are equal, and v is the identity


@pytest.mark.parametrize(
    ("dtype", "dim", "dim_v"),
    [("float16", 64, 64), ("float16", 64, 128), ("float32", 64, 64), ("float32", 192, 192)],
)
def test_which_weights_dropout_keeps(dtype: str, dim: int, dim_v: int) -> None:
    """In fp32 blocks of 16 keys, half of a draw, are among the tiles."""
    q, k = np.zeros((2, 35, 2, dim), dtype), np.zeros((2, dim_v, 2, dim), dtype)
    v = np.broadcast_to(np.eye(dim_v, dtype=dtype)[:, None], (2, dim_v, 2, dim_v))
    state = (2**63 + 5, 77)
    for p in (0.3, 1.0):
        out, lse = run(q, k, v, dropout_p=p, rng_state=state, arch=ARCH)
        kept = cupyflash.dropout_mask(state, p, (2, 2, 35, dim_v))
        np.testing.assert_array_equal(out.transpose(0, 2, 1, 3) != 0, kept)
        np.testing.assert_allclose(lse, np.log(dim_v), rtol=1e-6)


def test_the_mask_of_dropout_is_the_same_for_every_tile() -> None:
    q, k, v = inputs(1, 150, 1, 128, len_k=200)
    options = {"dropout_p": 0.4, "rng_state": (1, 2), "causal": True}
    check(q, k, v, **options, arch=80, seeds=(0,))
    check(q, k, v, **options, arch=120, seeds=(0,))


@pytest.mark.parametrize("dims", [(128, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_everything_together(dtype: str, dims: tuple[int, int]) -> None:
    names = ("softcap", "alibi_batch", "bias_fp64", "mask", "prefix", "segments", "sink_fp16",
             "dropout", "used_q", "used_k")  # fmt: skip
    case = Modified(
        35, 70, *dims, dtype, 2, 2, 1, window_size=(60, 9), modifiers=names, label="everything"
    )
    check(*case.arrays(), arch=ARCH, seeds=(0,), **case.options)
