"""The oracle against the contract spelled out with scalars, and against closed forms."""

import math
from typing import Any

import numpy as np
import pytest

from cupyflash import _packed, _philox, reference
from cupyflash.errors import InvalidArgument, InvalidType
from cupyflash.masks import Band, PrefixLM, Segments

INF, NAN = math.inf, math.nan
ROUNDING = {"rtol": 1e-12, "atol": 1e-12}  # two computations of one formula, both in fp64


def same(actual: Any, expected: Any) -> None:
    np.testing.assert_allclose(actual, expected, **ROUNDING)


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def by_scalars(q: np.ndarray, k: np.ndarray, v: np.ndarray, h: int = 0, **o: Any) -> Any:
    """Return (out, lse) of one sequence and one head, (S, D) each, one scalar at a time."""
    (len_q, dim), len_k, dim_v = q.shape, len(k), v.shape[1]
    diagonal = 0 if o.get("alignment") == "top_left" else len_k - len_q
    left, right = o.get("window_size", (-1, -1))
    out, lse = np.zeros((len_q, dim_v)), np.full(len_q, -INF)
    for i in range(len_q):
        s = {}
        for j in range(len_k):
            score = sum(q[i, c] * k[j, c] for c in range(dim)) * o.get("scale", dim**-0.5)
            if o.get("softcap"):
                score = o["softcap"] * math.tanh(score / o["softcap"])
            score -= o.get("slope", 0.0) * abs(i + diagonal - j)
            score += o["bias"][i, j] if "bias" in o else 0.0
            hidden = (
                (o.get("causal") and j > i + diagonal)
                or (left not in (-1, None) and j < i + diagonal - left)
                or (right not in (-1, None) and j > i + diagonal + right)
                or ("mask" in o and not o["mask"][i, j])
            )
            if not hidden:
                s[j] = score
        total = sum(math.exp(x) for x in s.values()) + math.exp(o.get("sink", -INF))
        lse[i] = math.log(total) if total else -INF
        for j, score in s.items():
            factor = o["dropout"][i, j] if "dropout" in o else 1.0
            out[i] += math.exp(score - lse[i]) * factor * v[j]
    return out, lse


BANDS = [
    {},
    {"causal": True},
    {"causal": True, "alignment": "top_left"},
    {"window_size": (2, 1)},
    {"window_size": (None, 0)},
    {"window_size": (0, -1), "alignment": "top_left"},
    {"window_size": (3, 4), "causal": True},
    {"window_size": (2**80, 2**80)},
]


@pytest.mark.parametrize("lengths", [(4, 4), (3, 7), (7, 3), (1, 5), (5, 1)], ids=str)
@pytest.mark.parametrize("band", BANDS, ids=str)
def test_every_modifier_at_once(band: dict[str, Any], lengths: tuple[int, int]) -> None:
    len_q, len_k = lengths
    q, k, v = normal(1, 2, len_q, 4, 3), normal(2, 2, len_k, 2, 3), normal(3, 2, len_k, 2, 5)
    slopes, bias, sink = normal(4, 2, 4) ** 2, normal(5, 2, 4, len_q, len_k), normal(6, 4)
    bias[0, 1] = -INF
    mask = normal(7, 2, 4, len_q, len_k) > -1
    keep = _philox.dropout_mask((11, 5), 0.25, (2, 4, len_q, len_k))
    out, lse = reference.attention(
        q, k, v, softmax_scale=-0.7, softcap=1.5, alibi_slopes=slopes, attn_bias=bias,
        attn_mask=mask, learnable_sink=sink, dropout_p=0.25, rng_state=(11, 5), **band,
    )  # fmt: skip
    for b, h in np.ndindex(2, 4):
        options = {"scale": -0.7, "softcap": 1.5, "slope": slopes[b, h], "sink": sink[h]}
        options |= {"bias": bias[b, h], "mask": mask[b, h], "dropout": keep[b, h] / 0.75}
        expected = by_scalars(q[b, :, h], k[b, :, h // 2], v[b, :, h // 2], **options, **band)
        same(out[b, :, h], expected[0])
        same(lse[b, h], expected[1])


MODIFIERS = {
    "softcap": 0.8,
    "alibi_slopes": np.array([0.5, 0.25]),
    "attn_bias": normal(8, 4, 6),
    "attn_mask": normal(9, 4, 6) > 0,
    "learnable_sink": np.array([0.5, -INF]),
    "softmax_scale": 0.3,
}
SCALAR_NAMES = {"attn_bias": "bias", "attn_mask": "mask", "softmax_scale": "scale"}


@pytest.mark.parametrize("name", MODIFIERS)
def test_one_modifier_alone(name: str) -> None:
    q, k, v = normal(1, 1, 4, 2, 3), normal(2, 1, 6, 2, 3), normal(3, 1, 6, 2, 2)
    out, lse = reference.attention(q, k, v, **{name: MODIFIERS[name]})
    for h in range(2):
        value = MODIFIERS[name]
        scalar = {"alibi_slopes": "slope", "learnable_sink": "sink"}.get(name)
        option = {scalar: value[h]} if scalar else {SCALAR_NAMES.get(name, name): value}
        expected = by_scalars(q[0, :, h], k[0, :, h], v[0, :, h], **option)
        same(out[0, :, h], expected[0])
        same(lse[0, h], expected[1])


IDS = np.array([[0, 0, 1, 2], [5, 5, 5, 6]]), np.array([[0, 1, 1, 1, 2, 2], [5, 9, 9, 6, 5, 6]])
# Each mask, and whether query i of batch entry b sees key j of 6, with 4 queries.
POLICIES = {
    "prefix": (PrefixLM(2), lambda b, i, j: j < 2 or j <= i + 2),
    "prefixes": (PrefixLM(np.array([0, 5])), lambda b, i, j: j < (0, 5)[b] or j <= i + 2),
    "top_left": (PrefixLM(1, "top_left"), lambda b, i, j: j < 1 or j <= i),
    "segments": (Segments(*IDS), lambda b, i, j: IDS[0][b, i] == IDS[1][b, j]),
    "one row of segments": (
        Segments(IDS[0][:1], IDS[1][0]),
        lambda b, i, j: IDS[0][0, i] == IDS[1][0, j],
    ),
    "band": (Band(1, 0), lambda b, i, j: i + 1 <= j <= i + 2),
    "both": (
        PrefixLM(3) & Segments(*IDS) & Band(left=1),
        lambda b, i, j: (j < 3 or j <= i + 2) and IDS[0][b, i] == IDS[1][b, j] and i + 1 <= j,
    ),
}


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("options", [{}, {"window_size": (4, 1)}], ids=str)
def test_mask_policies(name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    mask, sees = POLICIES[name]
    q, k, v = normal(1, 2, 4, 2, 3), normal(2, 2, 6, 2, 3), normal(3, 2, 6, 2, 2)
    out, lse = reference.attention(q, k, v, mask=mask, **options)
    grads = reference.attention_backward(out, q, k, v, mask=mask, **options)
    dense = np.array([[[sees(b, i, j) for j in range(6)] for i in range(4)] for b in range(2)])
    for b, h in np.ndindex(2, 2):
        expected = by_scalars(q[b, :, h], k[b, :, h], v[b, :, h], mask=dense[b], **options)
        same(out[b, :, h], expected[0])
        same(lse[b, h], expected[1])
    dense = dense[:, None]
    expected_grads = reference.attention_backward(out, q, k, v, attn_mask=dense, **options)
    for grad, expected_grad in zip(grads[:3], expected_grads[:3], strict=True):
        same(grad, expected_grad)
    monkeypatch.setattr(_packed, "ROWS", 3)
    same(reference.attention(q, k, v, mask=mask, **options)[0], out)


def test_masks_of_packed_sequences_are_by_position() -> None:
    q, k, v = normal(1, 9, 2, 4), normal(2, 12, 1, 4), normal(3, 12, 1, 2)
    mask = PrefixLM(np.array([1, 9])) & Segments(IDS[0][:, :4], IDS[1])
    out, lse = reference.attention_varlen(q, k, v, [0, 4, 8], [0, 6, 11], mask=mask)
    for b, (rows, keys) in enumerate(((slice(0, 4), slice(0, 6)), (slice(4, 8), slice(6, 11)))):
        dense = mask.dense(4, keys.stop - keys.start, b)
        alone = reference.attention(q[None, rows], k[None, keys], v[None, keys], attn_mask=dense)
        same(out[rows], alone[0][0])
        same(lse[:, rows], alone[1][0])


# Layouts: each is the same problem as a dense one


def test_heads_before_rows_is_the_same_problem() -> None:
    q, k, v = normal(1, 2, 5, 4, 3), normal(2, 2, 6, 2, 3), normal(3, 2, 6, 2, 7)
    out, lse = reference.attention(q, k, v, causal=True)
    swapped = (x.swapaxes(1, 2) for x in (q, k, v))
    out_bhsd, lse_bhsd = reference.attention(*swapped, causal=True, layout="bhsd")
    same(out_bhsd.swapaxes(1, 2), out)
    same(lse_bhsd, lse)


LENS_Q, LENS_K = [5, 0, 1, 300, 0], [3, 4, 0, 310, 0]
CU_Q, CU_K = np.cumsum([0, *LENS_Q]), np.cumsum([0, *LENS_K])


def test_packed_sequences_are_separate_dense_ones() -> None:
    q, k, v = normal(1, CU_Q[-1] + 2, 2, 4), normal(2, CU_K[-1], 1, 4), normal(3, CU_K[-1], 1, 2)
    bias, slopes = normal(4, 5, 2, 301, 320), normal(5, 5, 2) ** 2
    out, lse = reference.attention_varlen(
        q, k, v, CU_Q, CU_K, causal=True, attn_bias=bias, alibi_slopes=slopes
    )
    assert out.shape == (308, 2, 2)
    assert lse.shape == (2, 308)
    for b, (len_q, len_k) in enumerate(zip(LENS_Q, LENS_K, strict=True)):
        rows, keys = slice(CU_Q[b], CU_Q[b] + len_q), slice(CU_K[b], CU_K[b] + len_k)
        alone, alone_lse = reference.attention(
            q[None, rows], k[None, keys], v[None, keys], causal=True,
            attn_bias=bias[b, :, :len_q, :len_k], alibi_slopes=slopes[b],
        )  # fmt: skip
        same(out[rows], alone[0])
        same(lse[:, rows], alone_lse[0])
    assert not out[306:].any()  # rows in no sequence
    assert (lse[:, 306:] == -INF).all()


def test_used_lengths_cut_the_sequences_and_move_the_diagonal() -> None:
    q, k, v = normal(1, 3, 6, 2, 4), normal(2, 3, 9, 2, 4), normal(3, 3, 9, 2, 4)
    used_q, used_k = [4, 0, 6], np.array([9, 5, 2], np.uint8)
    k[1, 5:], v[2, 2:], q[0, 4:] = NAN, INF, NAN
    options = {"causal": True, "learnable_sink": np.array([0.0, 1.0])}
    out, lse = reference.attention(q, k, v, seqused_q=used_q, seqused_k=used_k, **options)
    for b, (m, n) in enumerate(zip(used_q, used_k, strict=True)):
        alone = reference.attention(q[b, None, :m], k[b, None, :n], v[b, None, :n], **options)
        same(out[b, :m], alone[0][0])
        same(lse[b, :, :m], alone[1][0])
        assert not out[b, m:].any()
        assert (lse[b, :, m:] == -INF).all()


@pytest.mark.parametrize(
    ("cu_seqlens", "spans"),
    [
        ([0, 3, 5], [(0, 3), (3, 2)]),
        ([0, 2**40], [(0, 7)]),  # past the array
        ([-5, 3], [(0, 3)]),
        ([0, 5, 3], [(0, 5), (5, 0)]),  # decreasing
        ([9, 12], [(7, 0)]),
        ([0], []),
    ],
)
def test_lengths_are_clamped_into_the_array(
    cu_seqlens: list[int], spans: list[tuple[int, int]]
) -> None:
    x = np.zeros((7, 1, 1))
    packed = _packed.Packed(x, x, x, {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens})
    assert packed.spans_q == spans
    out, _ = reference.attention_varlen(x, x, x, cu_seqlens, cu_seqlens)
    assert out.shape == x.shape


def test_blocks_of_rows_cannot_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = normal(1, 1, 20, 2, 3), normal(2, 1, 25, 1, 3), normal(3, 1, 25, 1, 3)
    options = {"window_size": (4, 3), "alibi_slopes": np.ones(2), "attn_bias": normal(4, 20, 25)}
    options |= {"dropout_p": 0.3, "rng_state": (1, 1)}
    out, lse = reference.attention(q, k, v, **options)
    grads = reference.attention_backward(out, q, k, v, dlse=lse, **options)[:4]
    monkeypatch.setattr(_packed, "ROWS", 3)
    out_3, lse_3 = reference.attention(q, k, v, **options)
    same(out_3, out)
    same(lse_3, lse)
    for grad, grad_3 in zip(
        grads[:4], reference.attention_backward(out, q, k, v, dlse=lse, **options)[:4], strict=True
    ):
        same(grad_3, grad)


@pytest.mark.parametrize("sizes", [(0, 3, 4, 2), (2, 0, 4, 2), (2, 3, 0, 2), (2, 3, 4, 0)])
def test_empty_dimensions(sizes: tuple[int, int, int, int]) -> None:
    batch, len_q, len_k, heads = sizes
    q, k, v = (
        np.ones((batch, len_q, heads, 4)),
        np.ones((batch, len_k, heads, 4)),
        np.ones((batch, len_k, heads, 5)),
    )
    for layout in ("bshd", "bhsd"):
        arrays = [x.swapaxes(1, 2) if layout == "bhsd" else x for x in (q, k, v)]
        out, lse = reference.attention(*arrays, layout=layout)
        grads = reference.attention_backward(out, *arrays, layout=layout)
        assert out.shape == (*arrays[0].shape[:3], 5)
        assert lse.shape == (batch, heads, len_q)
        assert not out.any()
        assert (lse == -INF).all()
        assert [grad.shape for grad in grads[:3]] == [x.shape for x in arrays]
        assert not any(grad.any() for grad in grads[:3])


def test_broadcast_shapes_of_bias_and_mask() -> None:
    q, k, v = normal(1, 2, 4, 3, 2), normal(2, 2, 5, 3, 2), normal(3, 2, 5, 3, 2)
    for shape in [
        (5,),
        (4, 5),
        (1, 5),
        (4, 1),
        (1, 1, 5),
        (3, 1, 1),
        (2, 1, 1, 5),
        (2, 3, 4, 5),
        (),
    ]:
        bias = normal(4, *shape)
        full = np.broadcast_to(bias, (2, 3, 4, 5))
        same(
            reference.attention(q, k, v, attn_bias=bias)[0],
            reference.attention(q, k, v, attn_bias=full)[0],
        )
        same(
            reference.attention(q, k, v, attn_mask=bias > 0)[0],
            reference.attention(q, k, v, attn_mask=full > 0)[0],
        )
    for shape in [(4,), (3, 5), (4, 6), (2, 1, 5), (3, 1, 1, 5), (1, 2, 3, 4, 5)]:
        with pytest.raises(InvalidArgument, match="`attn_bias` must broadcast"):
            reference.attention(q, k, v, attn_bias=np.zeros(shape))


# Errors


def attention(
    q: tuple[int, ...] = (1, 2, 4, 3),
    k: tuple[int, ...] = (1, 5, 2, 3),
    v: tuple[int, ...] = (1, 5, 2, 6),
    **options: Any,
) -> Any:
    return reference.attention(np.zeros(q), np.zeros(k), np.zeros(v), **options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"q": (1, 2, 33, 3)}, "33: heads of q must be a multiple"),
        ({"q": (1, 2, 1, 3)}, "`k` has 2 heads and `q` has 1"),
        ({"k": (1, 5, 0, 3), "v": (1, 5, 0, 3)}, "`k` has 0 heads and `q` has 4"),
        ({"v": (1, 5, 1, 6)}, "`v` the batch, length and heads of `k`"),
        ({"v": (1, 4, 2, 6)}, "`v` the batch, length and heads of `k`"),
        ({"k": (1, 5, 2, 4)}, "`k` must have the batch and head_dim"),
        ({"k": (2, 5, 2, 3), "v": (2, 5, 2, 3)}, "`k` must have the batch"),
        ({"q": (2, 4, 3)}, "must have 4 dimensions"),
        ({"window_size": (-1, -3)}, "`window_size`"),
        ({"alignment": "left"}, "`alignment`"),
        ({"layout": "sbhd"}, "`layout`"),
        ({"alibi_slopes": np.ones(2)}, "`alibi_slopes` must have shape"),
        ({"learnable_sink": np.ones((1, 4))}, "`learnable_sink` must have shape"),
        ({"seqused_k": [1, 2]}, "`seqused_k` must have 1 entries"),
        ({"cu_seqlens_q": [0, 1]}, "must be given together"),
        ({"dropout_p": 1.5}, "`dropout_p`"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        attention(**arguments)


def test_a_mask_must_be_bool_and_dropout_needs_a_state() -> None:
    with pytest.raises(InvalidType, match="`attn_mask` must be an array of bool"):
        attention(attn_mask=np.zeros((2, 5)))
    with pytest.raises(InvalidType, match=r"`mask` must be one of cupyflash\.masks"):
        attention(mask=np.zeros((2, 5), bool))
    with pytest.raises(InvalidType, match="`rng_state`"):
        attention(dropout_p=0.5)
    with pytest.raises(TypeError, match="softmax_scal"):
        attention(softmax_scal=1.0)
