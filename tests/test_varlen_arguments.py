"""Packed sequences and masks: what a call becomes, and the sentence that a wrong argument gets."""

import re
from typing import Any

import numpy as np
import pytest
from exporters import DlpackExporter

import cupyflash
from cupyflash import InvalidArgument, InvalidType, _explain
from cupyflash._array import HOST, Array, adapter_of
from cupyflash._problem import Operands, Problem, describe, forms
from cupyflash.masks import All, Band, PrefixLM, Segments

CU_Q, CU_K = [0, 4, 4, 9], [0, 6, 13, 13]


def draw(**changes: Any) -> dict[str, Any]:
    """Return three packed sequences of 4 heads and 2, with arguments exchanged or added."""
    rng = np.random.default_rng(0)
    arrays = {
        name: rng.standard_normal(shape).astype(np.float32)
        for name, shape in (("q", (9, 4, 8)), ("k", (13, 2, 8)), ("v", (13, 2, 6)))
    }
    return {**arrays, "cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K, **changes}


def describe_packed(**changes: Any) -> tuple[Problem, Operands]:
    arguments = draw(**changes)
    masks, arrays = forms(arguments.pop("mask", None))
    records = {}
    for name, x in (arguments | arrays).items():
        x = np.asarray(x) if isinstance(x, list) else x
        records[name] = x if isinstance(x, Array) else adapter_of(x, name).array(x, name)
    return describe(records, arch=None, masks=masks)


# What a call becomes


def test_packed_rows_are_one_batch_entry() -> None:
    problem, operands = describe_packed()
    assert (problem.batch, problem.len_q, problem.len_k) == (3, 9, 13)
    assert problem.packed
    assert problem.modifiers == ("cu_seqlens_q", "cu_seqlens_k")
    assert [x.shape for x in operands[:4]] == [
        (1, 9, 4, 8),
        (1, 13, 2, 8),
        (1, 13, 2, 6),
        (1, 9, 4, 6),
    ]
    assert operands.cu_seqlens_k.shape == (4,)


def test_no_sequence_is_not_no_row() -> None:
    """Rows that no sequence has are written all the same."""
    assert not describe_packed(cu_seqlens_q=[0], cu_seqlens_k=[0])[0].empty
    assert describe_packed(q=np.zeros((0, 4, 8), np.float32), cu_seqlens_q=[0] * 4)[0].empty
    out, lse = cupyflash.attention_varlen(
        **draw(cu_seqlens_q=[0], cu_seqlens_k=[0]), return_lse=True
    )
    assert not out.any()
    assert np.isneginf(lse).all()


def test_the_output_is_like_q() -> None:
    out, lse = cupyflash.attention_varlen(**draw(), return_lse=True)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == ((9, 4, 6), "f4", (4, 9), "f4")
    across = np.ascontiguousarray(draw()["q"].transpose(1, 0, 2)).transpose(1, 0, 2)
    turned = cupyflash.attention_varlen(**draw(q=across, v=draw()["k"]))
    assert turned.strides == across.strides
    given = np.zeros((9, 4, 6), np.float32)
    assert cupyflash.attention_varlen(**draw(), out=given) is given
    assert np.array_equal(given, out)


@pytest.mark.parametrize("kind", [list, tuple, np.array, lambda x: np.array(x, np.uint16)])
def test_bounds_may_be_of_any_kind(kind: Any) -> None:
    expected = cupyflash.attention_varlen(**draw())
    out = cupyflash.attention_varlen(**draw(cu_seqlens_q=kind(CU_Q), cu_seqlens_k=kind(CU_K)))
    assert np.array_equal(out, expected)
    wide = np.repeat(np.array(CU_Q), 2)[::2]
    assert np.array_equal(cupyflash.attention_varlen(**draw(cu_seqlens_q=wide)), expected)


@pytest.mark.parametrize("most", [0, 1, 4, 2**40])
def test_hints_change_nothing(most: int) -> None:
    expected = cupyflash.attention_varlen(**draw())
    out = cupyflash.attention_varlen(**draw(), max_seqlen_q=most, max_seqlen_k=np.int64(most))
    assert np.array_equal(out, expected)


def test_bias_and_masks_are_by_position() -> None:
    bias = np.zeros((1, 4, 5, 7), np.float16)
    problem, operands = describe_packed(
        attn_bias=bias, attn_mask=np.ones((9, 1), bool), mask=Segments(np.zeros((3, 7), int))
    )
    assert operands.attn_bias.shape == (3, 4, 5, 7)
    assert operands.attn_bias.strides[0] == 0
    assert operands.attn_mask.shape == (3, 4, 9, 1)
    assert problem.masks == (Segments(None),)
    assert [x.shape for x in operands.masks[0]] == [(3, 7), (3, 7)]


def test_sizes_of_a_bias_are_not_known_where_bounds_lie_on_a_gpu() -> None:
    def placed(x: Any, name: str) -> Array:
        array = adapter_of(x, name).array(x, name)
        return array._replace(device=0, framework="cupy")

    arguments = draw(attn_bias=np.zeros((1, 1), np.float32), attn_mask=np.ones((2, 3), bool))
    records = {name: placed(np.asarray(x), name) for name, x in arguments.items()}
    _, operands = describe(records, arch=80)
    assert operands.attn_mask.shape[2:] == (2, 3)
    records["attn_mask"] = records["attn_mask"]._replace(shape=(0, 3), strides=(3, 1))
    with pytest.raises(InvalidArgument, match="`attn_mask` has 0 queries: it needs one for each"):
        describe(records, arch=80)


def test_lengths_in_use_are_what_a_bias_must_reach() -> None:
    bias = np.zeros((2, 7), np.float32)
    with pytest.raises(InvalidArgument, match="`attn_bias` has 2 queries and the longest"):
        describe_packed(attn_bias=bias)
    describe_packed(attn_bias=bias, seqused_q=[2, 0, 2])


# Wrong arguments


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"cu_seqlens_q": [0, 4, 3, 9]}, InvalidArgument, "`cu_seqlens_q` must not decrease, got"),
        ({"cu_seqlens_q": [0, 4, 4, 10]}, InvalidArgument, "`cu_seqlens_q[3]` must be from 0 to t"),
        ({"cu_seqlens_k": [0, 4, 4, 14]}, InvalidArgument, "total_k = 13, got 14"),
        ({"cu_seqlens_k": [1, 4, 4, 13]}, InvalidArgument, "`cu_seqlens_k[0]` must be 0, got 1"),
        ({"cu_seqlens_k": [-1, 4, 4, 13]}, InvalidArgument, "`cu_seqlens_k[0]`"),
        ({"cu_seqlens_k": [0, 13]}, InvalidArgument, "`cu_seqlens_k` of shape (2,) has batch + 1"),
        ({"cu_seqlens_q": []}, InvalidArgument, "`cu_seqlens_q` must have shape (batch + 1,), got"),
        ({"cu_seqlens_q": np.zeros((2, 2), int)}, InvalidArgument, "must have shape (batch + 1,)"),
        ({"cu_seqlens_q": [0.0, 9.0]}, InvalidType, "`cu_seqlens_q` has dtype float64"),
        ({"cu_seqlens_q": [[0], [1, 2]]}, InvalidType, "`cu_seqlens_q` must hold"),
        ({"cu_seqlens_q": None}, InvalidType, "`cu_seqlens_q` must be an array"),
        ({"cu_seqlens_q": 9}, InvalidType, "`cu_seqlens_q` must be an array"),
        ({"q": np.zeros((1, 9, 4, 8), np.float32)}, InvalidArgument, "(total_q, heads_q, head_dim"),
        ({"v": np.zeros((12, 2, 6), np.float32)}, InvalidArgument, "has total_k 12 and `k` has 13"),
        ({"k": np.zeros((13, 3, 8), np.float32)}, InvalidArgument, "`v`"),
        ({"out": np.zeros((9, 4, 8), np.float32)}, InvalidArgument, "head_dim_v 8"),
        ({"out": np.zeros((9, 4, 12), np.float32)[..., ::2]}, InvalidArgument, "contiguous last"),
        ({"seqused_q": [4, 1, 5]}, InvalidArgument, "`seqused_q[1]` must be from 0 to the length"),
        ({"seqused_k": [4, 1]}, InvalidArgument, "`seqused_k` of shape (2,) has batch 2"),
        ({"alibi_slopes": np.zeros((1, 4), np.float32)}, InvalidArgument, "`alibi_slopes`"),
        ({"attn_bias": np.zeros((4, 7), np.float32)}, InvalidArgument, "has 4 queries and the lon"),
        ({"attn_mask": np.ones((5, 6), bool)}, InvalidArgument, "`attn_mask` has 6 keys and the l"),
        ({"attn_bias": np.zeros((2, 1, 5, 7), np.float32)}, InvalidArgument, "`attn_bias` must br"),
        ({"mask": Segments(np.zeros((3, 5), int))}, InvalidArgument, "`mask.q` has 5 keys"),
        ({"mask": PrefixLM([1, 2])}, InvalidArgument, "`mask.prefix` must broadcast to (batch,) ="),
        ({"max_seqlen_q": 1.5}, InvalidType, "`max_seqlen_q` must be an integer, got 1.5"),
        ({"max_seqlen_q": True}, InvalidType, "`max_seqlen_q` must be an integer, got True"),
        ({"max_seqlen_k": -1}, InvalidArgument, "`max_seqlen_k` must be a length from 0 on"),
        ({"kernel": "flash"}, InvalidArgument, "`kernel` must be None or one of"),
    ],
    ids=lambda x: str(x)[:40] if isinstance(x, dict) else "",
)  # fmt: skip
def test_wrong_arguments(changes: dict[str, Any], error: type, words: str) -> None:
    with pytest.raises(error, match=re.escape(words)):
        cupyflash.attention_varlen(**draw(**changes))


def test_metadata_may_lie_on_the_host_and_nowhere_else() -> None:
    def record(name: str, device: int) -> Array:
        x = np.asarray(draw()[name])
        return adapter_of(x, name).array(x, name)._replace(device=device, framework="cupy")

    records = {name: record(name, 1) for name in draw()}
    describe(records | {"cu_seqlens_q": record("cu_seqlens_q", HOST)}, arch=80)
    with pytest.raises(InvalidArgument, match="`cu_seqlens_q` is a cupy array on CUDA device 0"):
        describe(records | {"cu_seqlens_q": record("cu_seqlens_q", 0)}, arch=80)
    del records["cu_seqlens_k"]
    with pytest.raises(InvalidArgument, match="`cu_seqlens_k` is missing beside `cu_seqlens_q`"):
        describe(records, arch=80)


# Masks


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"mask": np.ones((5, 7), bool)}, InvalidType, "`mask` must be a mask of cupyflash.masks,"),
        ({"mask": True}, InvalidType, "`mask` must be a mask of cupyflash.masks, got bool"),
        ({"mask": Band}, InvalidType, "`mask` must be a mask"),
        ({"mask": PrefixLM(np.zeros(3, int))}, InvalidArgument, "`mask.prefix` must broadcast to"),
        ({"mask": PrefixLM(1.5)}, InvalidType, "`mask.prefix` must be an array"),
        ({"mask": PrefixLM(True)}, InvalidType, "`mask.prefix`"),
        ({"mask": Band(0) & PrefixLM("7")}, InvalidType, "`mask.parts[1].prefix`"),
        ({"mask": Band(0) & Segments(np.zeros((2, 6), int))}, InvalidArgument, "`mask.parts[1].q`"),
        ({"segment_ids": np.zeros((2, 5), int)}, InvalidArgument, "(batch, len_k) = (2, 7)"),
        ({"segment_ids": np.zeros((2, 5))}, InvalidType, "`segment_ids` has dtype float64"),
        ({"segment_ids": (1, 2, 3)}, InvalidArgument, "`segment_ids` must be an array or a pair"),
        (
            {"segment_ids": (np.zeros((2, 5), int), np.zeros((2, 5), int))},
            InvalidArgument,
            "`segment_ids[1]` must broadcast to (batch, len_k)",
        ),
        (
            {"segment_ids": (np.zeros((2, 5), "i4"), np.zeros((2, 7), "u4"))},
            InvalidType,
            "`segment_ids[1]` has dtype uint32 and `segment_ids[0]` int32: convert one to the",
        ),
        (
            {"mask": Band(0) & Segments(np.zeros((2, 5), "i4"), np.zeros((2, 7), "i8"))},
            InvalidType,
            "`mask.parts[1].k` has dtype int64 and `mask.parts[1].q` int32: convert one to the",
        ),
    ],
    ids=lambda x: str(x)[:40] if isinstance(x, dict) else "",
)  # fmt: skip
def test_wrong_masks(options: dict[str, Any], error: type, words: str) -> None:
    q, k = np.zeros((2, 5, 4, 8), np.float32), np.zeros((2, 7, 2, 8), np.float32)
    with pytest.raises(error, match=re.escape(words)):
        cupyflash.attention(q, k, k, **options)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: Band(1.5), InvalidType, "`left` must be an integer or None, got float"),
        (lambda: Band(right=True), InvalidType, "`right` must be an integer or None, got bool"),
        (lambda: Band(alignment="top"), InvalidArgument, "`alignment`"),
        (lambda: PrefixLM(3, "top"), InvalidArgument, "`alignment`"),
        (lambda: All(Band(), 3), InvalidType, "`masks` must be masks of cupyflash.masks, got int"),
        (lambda: Band() & np.ones(3), TypeError, "unsupported operand"),
    ],
)
def test_masks_that_cannot_be_made(make: Any, error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        make()


@pytest.mark.parametrize(
    ("mask", "options", "band", "rest"),
    [
        (Band(2, 3), {}, Band(2, 3), ()),
        (Band(2, 3), {"causal": True}, Band(2, 0), ()),
        (Band(2) & Band(1, 5), {"window_size": (4, 4)}, Band(1, 4), ()),
        (Band(2, alignment="top_left"), {}, Band(2, alignment="top_left"), ()),
        (
            Band(2, alignment="top_left"),
            {"causal": True},
            Band(None, 0),
            (Band(2, alignment="top_left"),),
        ),
        (Band(right=-1), {}, Band(right=-1), ()),
        (PrefixLM(3) & Band(2), {"causal": True}, Band(2, 0), (PrefixLM(None),)),
    ],
)
def test_bands_of_one_diagonal_become_one(
    mask: Any, options: dict[str, Any], band: Band, rest: Any
) -> None:
    masks, arrays = forms(mask)
    x = np.zeros((2, 5, 4, 8), np.float32)
    given = {"q": x, "k": x, "v": x, **arrays}
    records = {name: adapter_of(a, name).array(a, name) for name, a in given.items()}
    problem, _ = describe(records, arch=None, masks=masks, **options)
    assert (problem.band, problem.masks) == (band, rest)
    slopes = np.zeros(4, np.float32)
    records["alibi_slopes"] = adapter_of(slopes, "x").array(slopes, "x")
    aligned, _ = describe(records, arch=None, masks=masks, **options)
    assert aligned.band.alignment == "bottom_right"  # which says where the slopes are 0


def test_one_array_of_segments_is_passed_once() -> None:
    ids = np.zeros((2, 5), int)
    for masks, arrays in (forms(segment_ids=ids), forms(Segments(ids)), forms(Segments(ids, ids))):
        assert len(arrays) == 1
        assert len({*masks[0].names}) == 1
    assert len(forms(Segments(ids, ids.copy()))[1]) == 2


def test_a_band_may_end_before_the_diagonal() -> None:
    x = np.random.default_rng(1).standard_normal((1, 5, 1, 4)).astype(np.float32)
    out, lse = cupyflash.attention(x, x, x, mask=Band(right=-1), return_lse=True)
    assert not out[0, 0].any()
    assert np.isneginf(lse[0, 0]).tolist() == [True, False, False, False, False]
    assert np.array_equal(out[0, 1], x[0, 0])
    nothing, _ = cupyflash.attention(x, x, x, mask=Band(right=-(10**30)), return_lse=True)
    assert not nothing.any()


def test_masks_have_names_for_people() -> None:
    said = cupyflash.explain(
        len_q=9, head_dim=64, arch=None, mask=PrefixLM(3), segment_ids=True, causal=True
    )
    assert said.problem.modifiers == ("mask", "segment_ids")
    assert "masks      PrefixLM & Segments" in str(said)
    packed = cupyflash.explain(
        batch=4, len_q=90, len_k=70, head_dim=64, cu_seqlens_q=True, cu_seqlens_k=True, arch=None
    )
    assert packed.problem.packed
    assert "  q    (90, 1, 64)" in str(packed)
    assert "sequences  4" in str(packed)
    arrays = draw()
    from_arrays = cupyflash.explain(**arrays, max_seqlen_q=5, max_seqlen_k=7)
    assert (from_arrays.problem.batch, from_arrays.kernel) == (3, "cpu")
    assert cupyflash.supports(**arrays)
    assert not cupyflash.supports(**arrays, kernel="attention_fwd_sm90")


@pytest.mark.parametrize(
    "options",
    [
        {"mask": PrefixLM(True)},
        {"mask": Segments(True)},
        {"mask": Band(4) & Segments(True) & PrefixLM(True)},
        {"mask": Segments(True), "segment_ids": True},
        {"segment_ids": (True, True)},
    ],
    ids=str,
)
@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
def test_true_stands_for_an_array_of_a_mask_where_sizes_do_for_the_others(
    options: dict[str, Any], packed: bool
) -> None:
    """Queries and keys of different lengths have ids of their own."""
    sizes: dict[str, Any] = {"batch": 3, "len_q": 9, "len_k": 13, "head_dim": 64, "causal": True}
    sizes |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), True) if packed else {}
    request = _explain.resolve((None,) * 3, *_explain.split(sizes | options))
    ids = np.zeros((3, 9), np.int32), np.zeros((3, 13), np.int32)
    prefix = np.zeros(3, np.int32)
    arrays = {Band: (), Segments: ids, PrefixLM: (prefix,)}
    given: dict[str, Any] = {"segment_ids": ids} if "segment_ids" in options else {}
    if mask := options.get("mask"):
        given["mask"] = All(*(part.bound(*arrays[type(part)]) for part in mask.parts))
    expected = _explain.resolve((None,) * 3, *_explain.split(sizes | given))
    assert request.problem == expected.problem
    shapes = [[x.shape for x in own] for own in request.operands.masks]
    assert shapes == [[x.shape for x in own] for own in expected.operands.masks]


def test_true_is_no_array_of_a_mask_beside_arrays() -> None:
    q, k, v = np.random.default_rng(1).standard_normal((3, 1, 5, 1, 4))
    for options in ({"mask": PrefixLM(True)}, {"mask": Segments(True)}, {"segment_ids": True}):
        for call in (cupyflash.attention, cupyflash.explain):
            with pytest.raises(InvalidType, match=r"must be an array of .*, got bool"):
                call(q, k, v, **options)


def test_arrays_of_unknown_libraries_are_metadata_too() -> None:
    arrays = draw()
    expected = cupyflash.attention_varlen(**arrays, mask=PrefixLM([1, 2, 3]))
    foreign = {name: DlpackExporter(np.asarray(x)) for name, x in arrays.items()}
    mask = PrefixLM(DlpackExporter(np.array([1, 2, 3])))
    assert np.array_equal(cupyflash.attention_varlen(**foreign, mask=mask), expected)
    foreign |= {"cu_seqlens_q": CU_Q, "cu_seqlens_k": np.array(CU_K)}
    assert np.array_equal(cupyflash.attention_varlen(**foreign, mask=mask), expected)
