"""From a call on a GPU to the bytes of a launch, without a GPU: packing, plans, loading."""

import ctypes
import dataclasses
import itertools
import struct
import threading
from typing import Any

import numpy as np
import pytest
from fake_gpu import (
    LOG2_E,
    TICKETS,
    FakeArray,
    FakeGpu,
    Guard,
    Params,
    ParamsSm90,
    install,
)

import cupyflash
from cupyflash import (
    DeviceUnavailable,
    InvalidArgument,
    InvalidType,
    UnsupportedProblem,
    _call,
    _forward_sm90,
    _launch,
)
from cupyflash._tensor_map import TensorMap
from cupyflash.masks import Band

SHAPES = {"q": (2, 21, 6, 24), "k": (2, 33, 2, 24), "v": (2, 33, 2, 16)}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    return install(monkeypatch)


@pytest.fixture
def hopper(fake: FakeGpu) -> FakeGpu:
    fake.capability = 90
    return fake


def draw(rng: np.random.Generator, dtype: Any = "float16", **shapes: Any) -> list[np.ndarray]:
    return [rng.standard_normal(shape).astype(dtype) for shape in ({**SHAPES, **shapes}).values()]


def attention(*arrays: np.ndarray, device: int = 0, **options: Any) -> Any:
    """Call attention on the fake GPU and return NumPy arrays."""
    on_gpu = [FakeArray(x, device) for x in arrays]
    if "out" in options:
        options["out"] = FakeArray(options["out"], device)
    result = cupyflash.attention(*on_gpu, **options)
    if options.get("return_lse"):
        return result[0].host, result[1].host
    return result.host


# Params


def test_the_struct_has_the_layout_of_c() -> None:
    assert ctypes.sizeof(Params) == _launch.FORWARD_BYTES == 176
    assert Params.q_batch.offset == _launch.POINTERS.size == 40
    assert Params.batch.offset == 40 + 12 * 8
    assert Params.scale.offset == 168


def test_every_field_of_params(fake: FakeGpu, rng: np.random.Generator) -> None:
    q, k, v = draw(rng)
    out = np.zeros((2, 21, 6, 20), np.float16)[..., 4:]
    attention(q, k, v, causal=True, window_size=(5, 9), softmax_scale=0.3, out=out)
    (launch,) = fake.launches
    p = launch.p
    for name, x in {"q": q, "k": k, "v": v, "o": out}.items():
        assert getattr(p, name) == x.ctypes.data
        strides = [getattr(p, f"{name}_{axis}") for axis in ("batch", "row", "head")]
        assert strides == [x.strides[axis] // 2 for axis in (0, 1, 2)]
    assert p.lse is None
    assert (p.batch, p.len_q, p.len_k, p.heads_q, p.heads_k) == (2, 21, 33, 6, 2)
    assert (p.head_dim, p.head_dim_v) == (24, 16)
    assert 1 <= p.group <= 12
    assert p.scale == np.float32(0.3 * LOG2_E)
    assert launch.options["band"] == Band(5, 0)
    assert "using Mask = Band<true, true>;" in launch.unit
    assert launch.stream == 1000


def test_huge_sizes_and_strides_are_packed_whole(fake: FakeGpu) -> None:
    """Nothing is read: the kernel of this launch is replaced."""
    row = 3_000_000_000
    x = np.lib.stride_tricks.as_strided(np.zeros(1, np.float16), (3, 1, 1, 1), (2 * row, 2, 2, 2))
    problem, operands = cupyflash._problem.describe(
        {name: fake.adapter.array(FakeArray(x), name) for name in "qkv"},
        arch=90,
        window_size=(2**70, 10**30),
    )
    params = _launch.pack_forward(problem, operands, 0, 1)
    p = Params.from_buffer_copy(params)
    assert (p.q_batch, p.k_batch, p.v_batch) == (row, row, row)
    assert struct.unpack_from("<3i", params, ctypes.sizeof(Params)) == (1, 1, 1)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"causal": True, "alignment": "top_left"},
        {"window_size": (3, 8)},
        {"window_size": (None, 2**40)},
        {"window_size": (0, -1), "softmax_scale": -0.3},
        {"softmax_scale": 0},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_launch_computes_attention(
    options: dict[str, Any],
    dtype: str,
    fake: FakeGpu,
    rng: np.random.Generator,
) -> None:
    arrays = draw(rng, dtype)
    out, lse = attention(*arrays, return_lse=True, **options)
    expected, sums = cupyflash.attention(*arrays, return_lse=True, kernel="reference", **options)
    assert out.dtype == dtype
    np.testing.assert_allclose(out.astype(float), expected.astype(float), rtol=1e-2, atol=1e-3)
    np.testing.assert_allclose(lse, sums, rtol=1e-5, atol=1e-5)


def test_any_memory_is_passed_in_place(fake: FakeGpu, rng: np.random.Generator) -> None:
    q, k, v = draw(rng)
    expected = attention(q, k, v, causal=True)
    for axes in itertools.permutations(range(3)):
        back = (*(axes.index(axis) for axis in range(3)), 3)
        moved = [np.ascontiguousarray(x.transpose(*axes, 3)).transpose(back) for x in (q, k, v)]
        assert np.array_equal(attention(*moved, causal=True), expected)
    flipped = [np.ascontiguousarray(x[:, ::-1])[:, ::-1] for x in (q, k, v)]
    assert np.array_equal(attention(*flipped, causal=True), expected)
    gaps = [np.pad(x, ((0, 0), (0, 0), (1, 1), (3, 5)))[:, :, 1:-1, 3:-5] for x in (q, k, v)]
    assert np.array_equal(attention(*gaps, causal=True), expected)
    turned = [x.transpose(0, 2, 1, 3) for x in (q, k, v)]
    heads_first = attention(*turned, causal=True, layout="bhsd")
    assert np.array_equal(heads_first.transpose(0, 2, 1, 3), expected)
    assert heads_first.strides == expected.transpose(0, 2, 1, 3).strides
    assert fake.adapter.copies == 0


def test_a_last_stride_other_than_1_is_copied_once(
    fake: FakeGpu,
    rng: np.random.Generator,
) -> None:
    q, k, v = draw(rng)
    expected = attention(q, k, v)
    wide = np.repeat(k, 2, axis=3)[..., ::2]
    backwards = np.ascontiguousarray(v[..., ::-1])[..., ::-1]
    flat = np.broadcast_to(v[..., :1], v.shape)
    assert np.array_equal(attention(q, wide, v), expected)
    assert fake.adapter.copies == 1
    assert np.array_equal(attention(q, wide, backwards), expected)
    assert fake.adapter.copies == 3
    assert np.array_equal(attention(q, k, flat), attention(q, k, flat.copy()))
    assert fake.adapter.copies == 4


def test_the_kernel_is_chosen_for_the_copies(hopper: FakeGpu, rng: np.random.Generator) -> None:
    arrays = draw(rng, "float8_e4m3fn", q=(2, 21, 6, 32), k=(2, 33, 2, 32), v=(2, 33, 2, 16))
    turned = [np.asfortranarray(x) for x in arrays]
    placed = [FakeArray(x) for x in turned]
    assert cupyflash.supports(*placed)
    cupyflash.warmup(*placed)
    assert hopper.adapter.copies == 0
    expected = attention(*arrays)
    assert np.array_equal(attention(*turned), expected)
    assert np.array_equal(attention(*turned, kernel="attention_fwd_sm90"), expected)
    assert hopper.adapter.copies == 6
    assert [symbol for _, symbol, _ in hopper.compiled] == ["attention_fwd_sm90"]
    odd = [np.asfortranarray(np.ones((1, 9, 1, 72), "float8_e4m3fn"))] * 3
    with pytest.raises(UnsupportedProblem, match="in steps of 16, got 72"):
        attention(*odd)
    assert hopper.adapter.copies == 6


# The unit and the grid


@pytest.mark.parametrize(("offset", "width"), [(0, 16), (4, 8), (2, 4), (1, 2)])
def test_the_alignment_of_pointers_chooses_the_width(
    offset: int,
    width: int,
    fake: FakeGpu,
    rng: np.random.Generator,
) -> None:
    arrays = draw(rng, v=(2, 33, 2, 24))
    buffer = np.zeros(arrays[1].size + 32, np.float16)
    start = (-buffer.ctypes.data % 16) // 2 + offset
    arrays[1] = buffer[start:][: arrays[1].size].reshape(arrays[1].shape)
    for x in (0, 2):
        room = np.zeros(arrays[x].size + 8, np.float16)
        first = (-room.ctypes.data % 16) // 2
        room = room[first:][: arrays[x].size].reshape(arrays[x].shape)
        room[...] = arrays[x]
        arrays[x] = room
    attention(*arrays)
    assert f"WIDTH = {width};" in fake.launches[-1].unit


def test_the_grid_covers_every_tile(fake: FakeGpu, rng: np.random.Generator) -> None:
    for len_q, batch in ((1, 1), (64, 2), (129, 3)):
        arrays = draw(rng, q=(batch, len_q, 6, 24), k=(batch, 3, 2, 24), v=(batch, 3, 2, 16))
        attention(*arrays)
        launch = fake.launches[-1]
        constants = dict(
            line.removeprefix("  static constexpr int ").rstrip(";").split(" = ")
            for line in launch.unit.splitlines()
            if line.startswith("  static constexpr int ")
        )
        block_q = int(constants["WARPS"]) * int(constants["M_TILES"]) * 16
        assert launch.grid == (-(-len_q // block_q) * batch * 6, 1, 1)
        assert launch.block == (32 * int(constants["WARPS"]), 1, 1)
        assert launch.shared == int(constants["SMEM_BYTES"])
        assert int(constants["PARAMS_BYTES"]) == launch.bytes
        assert int(constants["HEAD_DIM"]) >= 24


@pytest.mark.parametrize(
    "shapes",
    [
        {"q": (0, 5, 2, 4), "k": (0, 3, 2, 4), "v": (0, 3, 2, 4)},
        {"q": (2, 0, 2, 4), "k": (2, 3, 2, 4), "v": (2, 3, 2, 4)},
        {"q": (2, 5, 0, 4), "k": (2, 3, 0, 4), "v": (2, 3, 0, 4)},
        {"q": (2**33, 0, 1, 4), "k": (2**33, 0, 1, 4), "v": (2**33, 0, 1, 4)},
        {"q": (0, 5, 2**33, 4), "k": (0, 2**33, 1, 4), "v": (0, 2**33, 1, 4)},
    ],
    ids=str,
)
def test_an_empty_grid_is_not_launched(
    shapes: dict[str, Any],
    fake: FakeGpu,
    rng: np.random.Generator,
) -> None:
    q, k, v = draw(rng, **shapes)
    for _ in range(2):
        out, lse = attention(q, k, v, return_lse=True)
        assert out.shape == q.shape
        assert lse.shape == (q.shape[0], q.shape[2], q.shape[1])
    assert not fake.launches
    assert not fake.compiled


def test_no_keys_is_a_launch_that_writes(fake: FakeGpu, rng: np.random.Generator) -> None:
    q, k, v = draw(rng, k=(2, 0, 2, 24), v=(2, 0, 2, 16))
    out, lse = attention(q, k, v, return_lse=True)
    assert not out.any()
    assert np.isneginf(lse).all()
    assert len(fake.launches) == 1


# The kernel of compute capability 9.0


def test_the_struct_of_sm90_has_the_layout_of_c() -> None:
    assert ctypes.sizeof(ParamsSm90) == _forward_sm90.POLICIES_OFFSET == 664
    assert ParamsSm90.out.offset == _launch.MAPS_BYTES == 512
    assert ParamsSm90.o_batch.offset == 512 + _launch.OUTPUTS.size
    assert ParamsSm90.scale.offset == 660


def test_every_field_of_params_of_sm90(hopper: FakeGpu, rng: np.random.Generator) -> None:
    q, k, v = draw(rng)
    out = np.zeros((2, 21, 6, 24), np.float16)[..., 8:]
    attention(q, k, v, causal=True, window_size=(5, 9), softmax_scale=0.3, out=out)
    (launch,) = hopper.launches
    p = launch.p
    for name, x in {"q": q, "k": k, "v": v, "o": out}.items():
        tensor = getattr(p, name)
        assert tensor.pointer == x.ctypes.data
        assert list(tensor.shape) == [x.shape[axis] for axis in (3, 1, 2, 0)]
        assert list(tensor.strides) == [x.strides[axis] for axis in (1, 2, 0)]
    assert (p.out, p.lse) == (out.ctypes.data, None)
    assert p.tickets == TICKETS + launch.stream
    assert not any(p.q_descale[:] + p.k_descale[:] + p.v_descale[:])
    assert (p.batch, p.len_q, p.len_k, p.heads_q, p.heads_k) == (2, 21, 33, 6, 2)
    assert p.head_dim_v == 16
    assert 1 <= p.group <= 12
    assert p.scale == np.float32(0.3 * LOG2_E)
    assert launch.options["band"] == Band(5, 0)
    assert "using Mask = Band<true, true>;" in launch.unit
    assert hopper.compiled[0][1:] == ("attention_fwd_sm90", "sm_90a")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True, "alignment": "top_left"},
        {"window_size": (3, 8)},
        {"window_size": (0, -1), "softmax_scale": -0.3},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_launch_of_sm90_computes_attention(
    options: dict[str, Any], dtype: str, hopper: FakeGpu, rng: np.random.Generator
) -> None:
    arrays = draw(rng, dtype)
    for _ in range(2):
        out, lse = attention(*arrays, return_lse=True, **options)
        expected, sums = cupyflash.attention(
            *arrays, return_lse=True, kernel="reference", **options
        )
        np.testing.assert_allclose(out.astype(float), expected.astype(float), rtol=1e-2, atol=1e-3)
        np.testing.assert_allclose(lse, sums, rtol=1e-5, atol=1e-5)
    assert len(hopper.launches) == 2
    assert len(hopper.compiled) == 1


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("shape", [None, (), (2,), (2, 1), (2, 2)], ids=str)
def test_a_launch_of_sm90_computes_fp8(
    dtype: str, shape: tuple[int, ...] | None, hopper: FakeGpu, rng: np.random.Generator
) -> None:
    arrays = draw(rng, dtype, q=(2, 21, 6, 32), k=(2, 33, 2, 32), v=(2, 33, 2, 16))
    for kinds in ("kv", "qkv", "v"):
        scales: dict[str, Any] = {}
        if shape is not None:
            scales = {
                f"{x}_descale": np.asarray(0.5 + rng.random(shape, np.float32)) for x in kinds
            }
        placed = {name: FakeArray(x) for name, x in scales.items()}
        for _ in range(2):
            out, lse = attention(*arrays, causal=True, return_lse=True, **placed)
            expected, sums = cupyflash.attention(
                *arrays, causal=True, return_lse=True, kernel="reference", **scales
            )
            assert out.dtype == "bfloat16"
            np.testing.assert_allclose(
                out.astype(float), expected.astype(float), rtol=1e-2, atol=1e-3
            )
            np.testing.assert_allclose(lse, sums, rtol=1e-5, atol=1e-5)
    assert len(hopper.compiled) == 1


def test_a_plan_of_fp8_is_of_its_descales(
    hopper: FakeGpu, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = draw(rng, "float8_e4m3fn", q=(2, 21, 6, 32), k=(2, 33, 2, 32), v=(2, 33, 2, 16))
    on_gpu = [FakeArray(x) for x in arrays]
    described = []
    describe = _call.describe
    monkeypatch.setattr(
        _call,
        "describe",
        lambda *args, **options: described.append(0) or describe(*args, **options),
    )
    scale, other = FakeArray(np.ones(2, np.float32)), FakeArray(np.full(2, 3, np.float32))
    cold = cupyflash.attention(*on_gpu, v_descale=scale).host
    scale.host[...] = 2
    warm = cupyflash.attention(*on_gpu, v_descale=scale).host
    assert len(described) == 1
    assert np.array_equal(warm, 2 * cold)
    for changed in (other, FakeArray(other.host[:1])):
        out = cupyflash.attention(*on_gpu, v_descale=changed).host
        np.testing.assert_allclose(out.astype(float), 3 * cold.astype(float), rtol=1e-2)
    assert len(described) == 3
    out = cupyflash.attention(*on_gpu, q_descale=scale, v_descale=scale).host
    assert len(described) == 4
    assert not np.array_equal(out, warm)


def test_numbers_of_fp8_are_put_where_a_kernel_reads_them(
    hopper: FakeGpu, rng: np.random.Generator
) -> None:
    arrays = draw(rng, "float8_e4m3fn", q=(2, 21, 6, 32), k=(2, 33, 2, 32), v=(2, 33, 2, 16))
    for number in (0.5, 3):
        out = attention(*arrays, q_descale=2.0, v_descale=number)
        expected = cupyflash.attention(*arrays, q_descale=2.0, v_descale=number)
        np.testing.assert_allclose(out.astype(float), expected.astype(float), rtol=1e-2, atol=1e-3)


def test_fp8_without_keys(hopper: FakeGpu, rng: np.random.Generator) -> None:
    arrays = draw(rng, "float8_e4m3fn", q=(2, 21, 6, 32), k=(2, 0, 2, 32), v=(2, 0, 2, 16))
    for _ in range(2):  # the second one is warm
        out, lse = attention(*arrays, return_lse=True)
        assert (out == 0).all()
        assert (lse == -np.inf).all()
    assert [symbol for _, symbol, _ in hopper.compiled] == ["attention_fwd_sm90"]


def test_maps_describe_any_order_of_dimensions(hopper: FakeGpu, rng: np.random.Generator) -> None:
    q, k, v = draw(rng)
    expected = attention(q, k, v, causal=True)
    for axes in itertools.permutations(range(3)):
        back = (*(axes.index(axis) for axis in range(3)), 3)
        moved = [np.ascontiguousarray(x.transpose(*axes, 3)).transpose(back) for x in (q, k, v)]
        assert np.array_equal(attention(*moved, causal=True), expected)
    gaps = [np.pad(x, ((0, 0), (0, 0), (1, 1), (8, 16)))[:, :, 1:-1, 8:-16] for x in (q, k, v)]
    assert np.array_equal(attention(*gaps, causal=True), expected)
    turned = [x.transpose(0, 2, 1, 3) for x in (q, k, v)]
    heads_first = attention(*turned, causal=True, layout="bhsd")
    assert np.array_equal(heads_first.transpose(0, 2, 1, 3), expected)
    assert hopper.adapter.copies == 0
    assert {symbol for _, symbol, _ in hopper.compiled} == {"attention_fwd_sm90"}


def test_memory_that_no_map_describes_goes_to_another_kernel(
    hopper: FakeGpu, rng: np.random.Generator
) -> None:
    q, k, v = draw(rng)
    expected = attention(q, k, v)
    for changed in (
        [q, k[:, ::-1].copy()[:, ::-1], v],
        [q, np.pad(k, ((0, 0), (0, 0), (0, 0), (0, 1)))[..., :-1], v],
        [q, np.pad(k, ((0, 0), (0, 0), (0, 0), (4, 4)))[..., 4:-4], v],
    ):
        assert np.array_equal(attention(*changed), expected)
        assert hopper.compiled[-1][1:] == ("attention_fwd_sm80", "sm_90")


def test_a_map_describes_memory_that_repeats(hopper: FakeGpu, rng: np.random.Generator) -> None:
    q, k, v = draw(rng)
    shared = np.broadcast_to(k[:1], k.shape)
    assert np.array_equal(attention(q, shared, v), attention(q, shared.copy(), v))
    assert all("attention_fwd_sm90" in launch.unit for launch in hopper.launches[-2:])


@pytest.mark.parametrize(
    ("step", "odd"), [(2**40 - 16, None), (2**40, 2**40), (-(2**40), -(2**40))]
)
def test_a_stride_that_no_map_holds_is_named(step: int, odd: int | None, fake: FakeGpu) -> None:
    """Nothing is read."""
    x = np.lib.stride_tricks.as_strided(np.zeros(1, np.float16), (3, 1, 1, 8), (step, 2, 2, 2))
    records = {name: fake.adapter.array(FakeArray(x), name) for name in "qkv"}
    problem, _ = cupyflash._problem.describe(records, arch=90)
    assert problem.odd_stride == odd


def test_dimensions_of_size_1_may_have_any_stride(
    hopper: FakeGpu, rng: np.random.Generator
) -> None:
    for shape in itertools.product((1, 2), (1, 5), (1, 2)):
        arrays = draw(rng, **dict.fromkeys("qkv", (*shape, 40)))
        odd = [
            np.lib.stride_tricks.as_strided(
                x, x.shape, [s if n > 1 else 6 for s, n in zip(x.strides, x.shape, strict=True)]
            )
            for x in arrays
        ]
        expected = cupyflash.attention(*arrays)
        np.testing.assert_allclose(
            attention(*odd).astype(float), expected.astype(float), rtol=1e-2, atol=1e-3
        )
    assert {symbol for _, symbol, _ in hopper.compiled} == {"attention_fwd_sm90"}


def test_the_grid_of_sm90_has_no_more_blocks_than_tiles_or_multiprocessors(
    hopper: FakeGpu, rng: np.random.Generator
) -> None:
    for len_q, batch in ((1, 1), (192, 2), (193, 12)):
        arrays = draw(rng, q=(batch, len_q, 6, 24), k=(batch, 3, 2, 24), v=(batch, 3, 2, 16))
        attention(*arrays)
        launch = hopper.launches[-1]
        constants = dict(
            line.removeprefix("  static constexpr int ").rstrip(";").split(" = ")
            for line in launch.unit.splitlines()
            if line.startswith("  static constexpr int ")
        )
        tiles = -(-len_q // (64 * int(constants["CONSUMERS"]))) * batch * 6
        assert launch.grid == (min(132, tiles), 1, 1)
        assert launch.block == (128 * (1 + int(constants["CONSUMERS"])), 1, 1)
        assert launch.shared == int(constants["SMEM_BYTES"])
        assert int(constants["PARAMS_BYTES"]) == launch.bytes


def test_nothing_of_sm90_is_launched_or_encoded_where_there_is_no_query(hopper: FakeGpu) -> None:
    x = np.zeros((2, 0, 2, 64), np.float16)
    for _ in range(2):
        assert attention(x, x, x).shape == x.shape
    assert not hopper.launches
    assert not hopper.compiled


# Plans


def test_a_warm_call_replays_its_plan_on_new_pointers(
    fake: FakeGpu,
    rng: np.random.Generator,
) -> None:
    for _ in range(4):
        q, k, v = (np.array(x) for x in draw(rng))
        out, lse = attention(q, k, v, causal=True, return_lse=True)
        expected, sums = cupyflash.attention(q, k, v, causal=True, return_lse=True)
        np.testing.assert_allclose(out.astype(float), expected.astype(float), atol=2e-3)
        np.testing.assert_allclose(lse, sums, rtol=1e-3)
    assert len(fake.launches) == 4
    assert len(fake.compiled) == len(fake.loaded) == 1


@pytest.mark.parametrize(
    "options",
    [
        {"window_size": (True, True)},
        {"window_size": (1.0, 1.0)},
        {"softcap": False},
        {"dropout_p": False},
        {"softmax_scale": True},
        {"causal": 0},
        {"return_lse": 0},
    ],
    ids=str,
)
def test_a_wrong_type_never_meets_the_plan_of_an_equal_value(
    options: dict[str, Any], fake: FakeGpu, rng: np.random.Generator
) -> None:
    arrays = draw(rng)
    attention(*arrays, window_size=(1, 1), softmax_scale=1)
    with pytest.raises(InvalidType, match=rf"^`{next(iter(options))}`"):
        attention(*arrays, **{"window_size": (1, 1), "softmax_scale": 1, **options})
    assert len(fake.launches) == 1


def test_scalars_and_sizes_share_one_compile(
    fake: FakeGpu,
    rng: np.random.Generator,
) -> None:
    for n in range(1, 40):
        arrays = draw(rng, q=(n % 3 + 1, n, 4, 24), k=(n % 3 + 1, 2 * n, 2, 24),
                      v=(n % 3 + 1, 2 * n, 2, 24))  # fmt: skip
        attention(*arrays, softmax_scale=n / 7, window_size=(n, n + 1))
    assert len(fake.compiled) == 1


def test_facts_that_differ_never_share_a_plan(
    fake: FakeGpu,
    rng: np.random.Generator,
) -> None:
    """Each call is made cold, then all again, warm: the results and units must be the same."""
    q, k, v = draw(rng, v=(2, 33, 2, 24))
    calls: list[tuple[list[np.ndarray], dict[str, Any]]] = [
        ([q, k, v], {}),
        ([q, k, v], {"causal": True}),
        ([q, k, v], {"causal": True, "alignment": "top_left"}),
        ([q, k, v], {"softmax_scale": 1}),
        ([q, k, v], {"softmax_scale": 1.5}),
        ([q, k, v], {"softmax_scale": np.float32(0.1)}),
        ([q, k, v], {"softmax_scale": 0.1}),
        ([q, k, v], {"window_size": (3, 4)}),
        ([q, k, v], {"window_size": (4, 3)}),
        ([q, k[:, :20], v[:, :20]], {}),
        ([q[:, :20], k, v], {}),
        ([q[..., :20], k[..., :20], v], {}),
        ([q, k, v[..., :20]], {}),
        ([q[:, :, :2], k, v], {}),
        ([x.transpose(0, 2, 1, 3) for x in (q, k, v)], {"layout": "bhsd"}),
        ([x.astype(np.float32) for x in (q, k, v)], {}),
    ]
    rounds = []
    for _ in range(2):
        fake.launches.clear()
        results = [attention(*arrays, **options) for arrays, options in calls]
        rounds.append((results, [launch.unit for launch in fake.launches]))
    (cold, cold_units), (warm, warm_units) = rounds
    assert cold_units == warm_units
    for (arrays, options), first, second in zip(calls, cold, warm, strict=True):
        expected = cupyflash.attention(*arrays, **options)
        np.testing.assert_allclose(first.astype(float), expected.astype(float), atol=2e-3)
        assert np.array_equal(first, second)
        assert first.strides == second.strides


def test_a_number_that_means_something_else_is_checked_again(
    fake: FakeGpu,
    rng: np.random.Generator,
) -> None:
    arrays = draw(rng)
    attention(*arrays, softmax_scale=1.0, causal=True)
    with pytest.raises(TypeError, match="`softmax_scale`"):
        attention(*arrays, softmax_scale=True, causal=True)
    with pytest.raises(TypeError, match="`causal`"):
        attention(*arrays, softmax_scale=1.0, causal=1)
    scale = np.array(0.5)
    first = attention(*arrays, softmax_scale=scale)
    scale[...] = 2.0
    assert not np.array_equal(attention(*arrays, softmax_scale=scale), first)


def test_a_list_of_sides_is_as_good_as_a_pair(
    fake: FakeGpu,
    rng: np.random.Generator,
) -> None:
    arrays = draw(rng)
    sides: Any = [3, 4]
    expected = attention(*arrays, window_size=(3, 4))
    assert np.array_equal(attention(*arrays, window_size=sides), expected)


def test_out_is_checked_for_overlap_on_every_call(
    fake: FakeGpu,
    rng: np.random.Generator,
) -> None:
    q, k, v = draw(rng, v=(2, 33, 2, 24))
    buffer = np.zeros(3 * q.size, np.float16)
    buffer[: q.size] = q.ravel()
    q = buffer[: q.size].reshape(q.shape)
    for _ in range(3):
        out = buffer[q.size : 2 * q.size].reshape(q.shape)
        attention(q, k, v, out=out)
        bad = buffer[q.size - 8 : 2 * q.size - 8].reshape(q.shape)
        with pytest.raises(InvalidArgument, match="`out` must not overlap `q`"):
            attention(q, k, v, out=bad)
    fused = np.zeros((2, 21, 6, 48), np.float16)
    fused[..., :24] = q
    for _ in range(2):
        assert attention(fused[..., :24], k, v, out=fused[..., 24:]).shape == q.shape
    np.testing.assert_allclose(
        fused[..., 24:].astype(float), cupyflash.attention(q, k, v).astype(float), atol=2e-3
    )


def test_outputs_come_from_the_callers_allocator(
    fake: FakeGpu,
    rng: np.random.Generator,
) -> None:
    arrays = draw(rng)
    for _ in range(2):
        attention(*arrays)
        attention(*arrays, return_lse=True)
        attention(*arrays, return_lse=True, out=np.zeros((2, 21, 6, 16), np.float16))
    out, lse = ((2, 21, 6, 16), "float16"), ((2, 6, 21), "float32")
    assert fake.adapter.allocated == [out, out, lse, lse] * 2


# Tensor maps, persistent kernels

TENSORS = [
    TensorMap(0, "float16", (64, length, 4, 2), (512, 128, 128), (64, 64, 1, 1), 128)
    for length in (21, 33, 34, 22)
]
TAIL = bytes(range(1, 40))


def encoded(tensor: TensorMap) -> bytes:
    return repr((tensor.pointer, tensor.shape[1])).encode().ljust(128)


@pytest.fixture
def mapped(monkeypatch: pytest.MonkeyPatch) -> tuple[_launch.Launch, list[Any]]:
    """A launch with maps, and (grid, params, stream) of what a device would be given."""
    given: list[Any] = []

    def function(grid: Any, block: Any, args: Any, shared_mem: int, stream: Any) -> None:
        given.append((grid, args[0].tobytes(), stream.ptr))

    monkeypatch.setattr(_launch, "_functions", {("", "sm_90a", 0, 0): function})
    monkeypatch.setattr(_launch, "encode", encoded)
    monkeypatch.setattr("cupyflash._tensor_map.encode", encoded)
    maps = tuple((128 * n, tensor) for n, tensor in enumerate(TENSORS))
    params = bytes(4 * 128 + 3 * 8) + TAIL
    return _launch.Launch("", "f", "sm_90a", (9, 1, 1), (64, 1, 1), 0, params, maps), given


def test_a_warm_call_moves_the_tensor_maps(mapped: tuple[_launch.Launch, list[Any]]) -> None:
    launch, given = mapped
    bound = _launch.bind(launch, 0)
    for q, k, v, out, lse in ((16, 32, 48, 64, 80), (16, 32, 48, 96, 0), (16, 16, 16, 64, 80)):
        bound(q, k, v, out, lse, 7)
        moved = zip(TENSORS, (q, k, v, out), strict=True)
        expected = b"".join(encoded(x._replace(pointer=p)) for x, p in moved)
        outputs = np.array([out, lse, 0], np.uint64).tobytes()
        assert given.pop() == ((9, 1, 1), expected + outputs + TAIL, 7)


def test_tickets_are_those_of_the_stream(
    mapped: tuple[_launch.Launch, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    launch, given = mapped
    monkeypatch.setattr(
        "cupyflash._tickets.of", lambda function, device: lambda stream: 4096 + 8 * stream + device
    )
    bound = _launch.bind(dataclasses.replace(launch, tickets=True), 0)
    for stream in (5, 7):
        bound(16, 16, 16, 32, 48, stream)
        outputs = np.array([32, 48, 4096 + 8 * stream], np.uint64).tobytes()
        assert given.pop()[1][512:] == outputs + TAIL


def test_the_maps_of_a_launch_are_encoded_where_it_runs(
    mapped: tuple[_launch.Launch, list[Any]],
) -> None:
    launch, given = mapped
    ((_, tensor), *_) = launch.maps
    moved = dataclasses.replace(launch, maps=((128, tensor._replace(pointer=4096)),))
    assert launch.params == moved.params
    assert len({launch, moved, dataclasses.replace(moved)}) == 2
    _launch.execute(moved, 0, 7)
    ((_, params, _),) = given
    assert params == bytes(128) + b"(4096, 21)".ljust(128) + launch.params[256:]


def test_a_persistent_kernel_has_one_block_a_multiprocessor_at_most(
    mapped: tuple[_launch.Launch, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    launch, given = mapped
    monkeypatch.setattr(_launch._jit, "multiprocessors", lambda device: 132 + device)
    for persistent, tiles, blocks in ((True, 500, 132), (True, 9, 9), (False, 500, 500)):
        changed = dataclasses.replace(launch, grid=(tiles, 1, 1), persistent=persistent)
        _launch.bind(changed, 0)(16, 16, 16, 16, 0, 7)
        assert given.pop()[0] == (blocks, 1, 1)


# Devices, captures, threads


def test_each_device_loads_and_launches_its_own(
    fake: FakeGpu,
    rng: np.random.Generator,
) -> None:
    arrays = draw(rng)
    for device in (0, 1, 0, 1):
        attention(*arrays, device=device)
    assert [device for _, device, _ in fake.loaded] == [0, 1]
    assert [launch.stream for launch in fake.launches] == [1000, 1001, 1000, 1001]
    assert set(Guard.entered) == {0, 1}


def test_a_cold_call_in_a_capture_is_an_error(
    fake: FakeGpu,
    rng: np.random.Generator,
) -> None:
    arrays = draw(rng)
    fake.adapter.recording = True
    with pytest.raises(DeviceUnavailable, match=r"attention_fwd_sm80 is not loaded.*warmup"):
        attention(*arrays)
    assert not fake.launches
    cupyflash.warmup(*map(FakeArray, arrays))
    attention(*arrays)  # planned for the first time, but loaded
    attention(*arrays, softmax_scale=0.5)
    assert len(fake.launches) == 2
    assert len(fake.compiled) == 1


def test_warmup_from_sizes_serves_other_sizes(
    fake: FakeGpu,
    rng: np.random.Generator,
) -> None:
    cupyflash.warmup(len_q=1, head_dim=24, head_dim_v=16, dtype="float16", causal=True, device=1)
    fake.adapter.recording = True
    attention(*draw(rng), causal=True, device=1)
    assert len(fake.launches) == 1


def test_execute_runs_a_launch_as_it_is(
    fake: FakeGpu,
    rng: np.random.Generator,
) -> None:
    q, k, v = draw(rng)
    out = np.zeros((2, 21, 6, 16), np.float16)
    arrays = {"q": q, "k": k, "v": v, "out": out}
    records = {name: fake.adapter.array(FakeArray(x), name) for name, x in arrays.items()}
    problem, operands = cupyflash._problem.describe(records, arch=90)
    launch = cupyflash._kernels.select(problem).launch(problem, operands)
    assert isinstance(hash(launch), int)
    _launch.execute(launch, 0, 55)
    assert fake.launches[-1].stream == 55
    np.testing.assert_allclose(
        out.astype(float), cupyflash.attention(q, k, v).astype(float), atol=2e-3
    )
    _launch.execute(dataclasses.replace(launch, grid=(0, 1, 1)), 0, 55)
    assert len(fake.launches) == 1


def test_threads_share_plans(fake: FakeGpu, rng: np.random.Generator) -> None:
    problems = [draw(rng, q=(1, n, 2, 24), k=(1, n, 2, 24), v=(1, n, 2, 16)) for n in (3, 5, 8)]
    expected = [attention(*arrays) for arrays in problems]
    wrong: list[int] = []

    def work() -> None:
        for n in range(30):
            result = attention(*problems[n % 3])
            if not np.array_equal(result, expected[n % 3]):
                wrong.append(n)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(fake.compiled) == 1


# Refusals


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kernel": "cpu"}, "cpu takes arrays in host memory, these are on a GPU"),
        ({"kernel": "reference"}, "reference takes arrays in host memory"),
    ],
)
def test_what_the_gpu_does_not_do(
    options: dict[str, Any],
    words: str,
    fake: FakeGpu,
    rng: np.random.Generator,
) -> None:
    with pytest.raises(UnsupportedProblem, match=words):
        attention(*draw(rng), **options)
    assert not fake.launches


def test_refused_dtypes_dims_and_architectures(
    fake: FakeGpu,
    rng: np.random.Generator,
) -> None:
    with pytest.raises(UnsupportedProblem, match="takes float16, bfloat16, float32, got float64"):
        attention(*draw(rng, "float64"))
    wide = draw(rng, q=(1, 17, 1, 512), k=(1, 17, 1, 512), v=(1, 17, 1, 512))
    with pytest.raises(UnsupportedProblem, match=r"head_dim <= 256, got 512"):
        attention(*wide)
    wide = draw(rng, v=(2, 33, 2, 257))
    with pytest.raises(UnsupportedProblem, match=r"head_dim_v <= 256, got 257"):
        attention(*wide)
    fake.capability = 75
    with pytest.raises(UnsupportedProblem, match=r"compute capability 8.0 or newer, this is 7.5"):
        attention(*draw(rng))
    assert not fake.launches
