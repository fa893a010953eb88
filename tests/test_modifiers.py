"""The bytes of Params that the policies of a call are passed in, and their types."""

import itertools
import struct
from typing import Any

import numpy as np
import pytest

from cupyflash._array import Array, adapter_of
from cupyflash._modifiers import pack, places, policies
from cupyflash._problem import INTEGERS, Operands, Problem, describe, forms
from cupyflash.masks import Band, PrefixLM, Segments


def described(
    mask: Any = None, segment_ids: Any = None, options: dict[str, Any] | None = None, **arrays: Any
) -> tuple[Problem, Operands]:
    """Describe a call of B2 Sq5 Sk7 H4 Hk2 D8, or of two packed sequences, with these arrays."""
    masks, extras = forms(mask, segment_ids)
    lengths = () if "cu_seqlens_q" in arrays else (2,)
    plain = {
        "q": np.zeros((*lengths, 5, 4, 8), np.float16),
        "k": np.zeros((*lengths, 7, 2, 8), np.float16),
        "v": np.zeros((*lengths, 7, 2, 8), np.float16),
    }
    records: dict[str, Array] = {
        name: adapter_of(x, name).array(x, name) for name, x in (plain | arrays | extras).items()
    }
    return describe(records, arch=None, masks=masks, **(options or {}))


MODIFIERS: dict[str, dict[str, Any]] = {
    "softcap": {"options": {"softcap": 2.0}},
    "alibi": {"alibi_slopes": np.ones((2, 4), np.float32)},
    "bias": {"attn_bias": np.ones((4, 1, 7), np.float64)},
    "mask": {"attn_mask": np.ones((5, 7), bool)},
    "prefix": {"mask": PrefixLM(np.array([3, 4], np.uint8)) & Band(left=2)},
    "segments": {"segment_ids": (np.zeros((2, 5), np.int16), np.zeros((1, 7), np.int16))},
    "causal": {"options": {"causal": True}},
    "sink": {"learnable_sink": np.ones(4, np.float16)},
    "dropout": {"options": {"dropout_p": 0.25, "rng_state": (1, 2)}},
    "used": {"seqused_k": np.array([3, 1])},
    "packed": {"cu_seqlens_q": np.array([0, 2, 5]), "cu_seqlens_k": np.array([0, 3, 7])},
}


def merged(names: tuple[str, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {"options": {}}
    for name in names:
        found["options"] |= MODIFIERS[name].get("options", {})
        found |= {key: x for key, x in MODIFIERS[name].items() if key != "options"}
    return found


@pytest.mark.parametrize(
    ("names", "types"),
    [
        ((), ("Band<false, false>", "Identity", "KeepAll", "NoSink", "Dense")),
        (("causal", "mask"), ("All<Band<false, true>, DenseMask>", "Identity")),
        (("mask",), ("DenseMask", "Identity")),
        (("prefix",), ("All<Band<true, false>, PrefixLM>", "Identity")),
        (
            ("segments", "mask", "causal"),
            ("All<Band<false, true>, Segments<2>, DenseMask>", "Identity"),
        ),
        (("softcap",), ("Band<false, false>", "Softcap")),
        (
            ("softcap", "bias", "alibi"),
            ("Band<false, false>", "Chain<Softcap, Alibi, Bias<Float64, 1>>"),
        ),
        (
            ("sink", "dropout", "used"),
            ("Band<false, false>", "Identity", "Dropout", "Sink<Float16>", "Used"),
        ),
        (("packed", "used"), ("Band<false, false>", "Identity", "KeepAll", "NoSink", "Packed")),
    ],
    ids=str,
)
def test_types(names: tuple[str, ...], types: tuple[str, ...]) -> None:
    found = policies(described(**merged(names))[0])
    given = (found.mask, found.score, found.dropout, found.sink, found.sequences)
    assert given[: len(types)] == types


@pytest.mark.parametrize(
    ("bias", "read"),
    [
        (np.zeros((5, 8), np.float16), 2),
        (np.zeros((2, 1, 5, 8), np.float32), 2),
        (np.zeros((5, 8), np.float64), 1),  # a pair is more than addresses are known to be aligned
        (np.zeros((5, 7), np.float16), 1),  # also the last key alone
        (np.zeros((5, 9), np.float16)[:, :8], 1),
        (np.zeros((1, 9), np.float16)[:, :8], 2),  # the stride of one row does not matter
        (np.zeros((5, 10), np.float16)[:, 1:9], 1),
        (np.zeros((5, 10), np.float16)[:, 2:], 2),
        (np.zeros((5, 16), np.float16)[:, ::2], 0),
        (np.zeros((5, 8), np.float16)[:, ::-1], 0),
        (np.zeros((5, 1), np.float16), 0),
        (np.zeros((4, 1, 8), np.float16), 2),
    ],
)
def test_neighbours_are_read_where_all_may_be(bias: np.ndarray, read: int) -> None:
    keys = np.zeros((2, max(bias.shape[-1], 7), 2, 8), np.float16)
    problem, _ = described(attn_bias=bias, k=keys, v=keys)
    assert policies(problem).score.endswith(f", {read}>")


def test_the_size_is_known_without_arrays() -> None:
    for count in (0, 1, 2, 3, len(MODIFIERS)):
        for names in itertools.combinations(MODIFIERS, count):
            problem, operands = described(**merged(names))
            data = pack(problem, operands)
            assert len(data) == policies(problem).params_bytes
            assert len(data) % 8 == 0


def test_every_address_has_a_place() -> None:
    problem, operands = described(**merged(tuple(MODIFIERS)))
    data = pack(problem, operands)
    arrays = itertools.chain(*operands.masks)
    expected: dict[Any, int] = {number: x.pointer for number, x in enumerate(arrays)}
    for name in ("attn_mask", "alibi_slopes", "attn_bias", "learnable_sink", "seqused_k",
                 "cu_seqlens_q", "cu_seqlens_k"):  # fmt: skip
        expected[name] = getattr(operands, name).pointer
    expected["rng_state"] = 0
    found = places(problem, operands, 100)
    assert {key: struct.unpack_from("<Q", data, at - 100)[0] for key, at in found} == expected
    assert len(found) == len(expected) == 11


def test_the_state_of_dropout_is_a_pair_or_an_address() -> None:
    problem, operands = described(options={"dropout_p": 0.25, "rng_state": (2**64 - 1, 7)})
    form = "<3QIf2i"
    start = dict(places(problem, operands, 0))["rng_state"]
    state = struct.unpack_from(form, pack(problem, operands), start)
    assert state == (0, 2**64 - 1, 7, 16384, pytest.approx(4 / 3), 0, 0)
    for dtype, count, words in (("int64", 2, 2), ("uint32", 2, -2), ("uint32", 4, -4)):
        array = Array(4096, (count,), (1,), dtype, 0, "cupy", False, None)
        packed = pack(problem, operands._replace(rng_state=array))
        state = struct.unpack_from(form, packed, start)
        assert state == (4096, 0, 0, 16384, pytest.approx(4 / 3), words, 0)


def test_only_packed_sequences_may_exceed_an_array() -> None:
    bias = {"attn_bias": np.zeros((3, 4), np.float32)}
    problem, operands = described(**MODIFIERS["packed"], **bias)
    at = dict(places(problem, operands, 0))["attn_bias"]
    *_, row, column, rows, columns = struct.unpack_from("<Q4q2i", pack(problem, operands), at)
    assert (row, column, rows, columns) == (4, 1, 3, 4)
    problem, operands = described(attn_bias=np.zeros((5, 7), np.float32))
    at = dict(places(problem, operands, 0))["attn_bias"]
    *_, row, column, rows, columns = struct.unpack_from("<Q4q2i", pack(problem, operands), at)
    assert (row, column, rows, columns) == (7, 1, 0, 0)


def test_segments_are_read_by_batch_and_position() -> None:
    ids = np.zeros((2, 14), np.int8)[:, ::2]
    problem, operands = described(segment_ids=(ids[:, :5], ids))
    data = pack(problem, operands)
    address = ids.ctypes.data
    assert struct.unpack_from("<Q2qQ2q2i", data) == (address, 14, 2, address, 14, 2, 0, 0)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_segments_are_compiled_for_the_width_of_ids(dtype: str) -> None:
    ids = np.zeros((1, 7), dtype)
    problem, _ = described(segment_ids=(ids[:, :5], ids))
    assert policies(problem).mask == f"Segments<{ids.itemsize}>"


def test_a_prefix_of_one_number_serves_all() -> None:
    problem, operands = described(mask=PrefixLM(3, alignment="top_left"))
    (_, stride, width, signed), bottom_right = (
        struct.unpack_from("<Qq2i", pack(problem, operands)),
        0,
    )
    assert (stride, width, signed) == (0, 8, 1)
    assert struct.unpack_from("<2i", pack(problem, operands), 24) == (bottom_right, 0)
    assert problem.masks == (PrefixLM(None, "top_left"),)
    assert Segments(1) == Segments(2)
