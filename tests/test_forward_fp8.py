"""attention_fwd_sm90 with fp8 inputs, on the emulator and on a GPU, against the oracle."""

from typing import Any

import harness
import ml_dtypes
import numpy as np
import pytest
from emulated import needs_compiler
from harness import HOPPER, same_bits
from kits import KITS
from strided import Layout, Strided

import cupyflash
from cupyflash import _accuracy

FORMATS = ("float8_e4m3fn", "float8_e5m2")
SEED = 2  # of the emulator
Given = np.ndarray | Strided

# (len_q, len_k, head_dim, head_dim_v): several tiles of queries and of keys, all ragged; head dims
# of each class, within one, and of two.
SHAPES = (
    (70, 200, 64, 64), (200, 330, 128, 128), (150, 210, 256, 256), (40, 90, 16, 16),
    (70, 100, 96, 96), (70, 100, 192, 192), (33, 70, 64, 128), (33, 70, 192, 128),
    (33, 70, 128, 48),
)  # fmt: skip
BANDS: tuple[dict[str, Any], ...] = (
    {}, {"causal": True}, {"window_size": (60, 9)}, {"causal": True, "alignment": "top_left"},
)  # fmt: skip
NAMES = ("q_descale", "k_descale", "v_descale")


class Emulated:
    """The kernel on the emulator."""

    def __call__(self, *arrays: Given, **options: Any) -> tuple[np.ndarray, np.ndarray]:
        placed = [x.host if isinstance(x, Strided) else x for x in arrays]
        with cupyflash.emulate(seed=SEED):
            out, lse = cupyflash.attention(*placed, kernel=HOPPER, return_lse=True, **options)
        return out, lse


class OnGpu:
    """The kernel on a GPU, by CuPy's arrays."""

    def __init__(self) -> None:
        self.kit = KITS["cupy"]()

    def __call__(self, *arrays: Given, **options: Any) -> tuple[np.ndarray, np.ndarray]:
        placed = [x.device if isinstance(x, Strided) else self.kit.put(x) for x in arrays]
        given = {n: self.kit.put(x) if isinstance(x, np.ndarray) else x for n, x in options.items()}
        out, lse = harness.attend(HOPPER, *placed, return_lse=True, **given)
        return self.kit.get(out), self.kit.get(lse)


@pytest.fixture(
    params=[
        pytest.param("emulator", marks=needs_compiler),
        pytest.param("gpu", marks=pytest.mark.gpu),
    ]
)
def attend(request: pytest.FixtureRequest) -> Any:
    return OnGpu() if request.param == "gpu" else Emulated()


def draw(
    dtype: str = "float8_e4m3fn",
    shape: tuple[int, ...] = SHAPES[0],
    batch: int = 1,
    heads: int = 2,
    heads_k: int = 1,
) -> list[np.ndarray]:
    """Return q, k and v."""
    len_q, len_k, dim, dim_v = shape
    rng = np.random.default_rng(len_q)
    shapes = [
        (batch, len_q, heads, dim), (batch, len_k, heads_k, dim), (batch, len_k, heads_k, dim_v)
    ]  # fmt: skip
    return [rng.standard_normal(shape, np.float32).astype(dtype) for shape in shapes]


def check(attend: Any, *arrays: Given, **options: Any) -> np.ndarray:
    """Hold the kernel against the oracle; return its output."""
    out, lse = attend(*arrays, **options)
    hosts = [x.host if isinstance(x, Strided) else x for x in arrays]
    _accuracy.assert_accurate(out, lse, *hosts, **options)
    return out


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_class_of_head_dims(shape: tuple[int, ...], dtype: str, attend: Any) -> None:
    for causal in (False, True):
        assert check(attend, *draw(dtype, shape), causal=causal).dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("band", BANDS, ids=str)
def test_bands_and_heads(band: dict[str, Any], dtype: str, attend: Any) -> None:
    check(attend, *draw(dtype, (230, 170, 64, 64), 2, 6, 2), **band)
    check(attend, *draw(dtype, (65, 300, 128, 128), 1, 2, 2), **band)


def test_no_keys(attend: Any) -> None:
    for dtype in FORMATS:
        arrays = draw(dtype, (70, 0, 128, 128))
        bias = np.zeros(arrays[1].shape[1], np.float32)
        for options in ({}, {"causal": True, "attn_bias": bias}):
            assert not check(attend, *arrays, **options).any()


def test_rows_that_are_not_contiguous_are_copied(attend: Any) -> None:
    arrays = [np.asfortranarray(x) for x in draw("float8_e4m3fn", (33, 70, 64, 64))]
    check(attend, *arrays, causal=True)


@pytest.mark.parametrize("scale", [0.0, -0.3, 1e-42, 2.0])
def test_any_scale(scale: float, attend: Any) -> None:
    check(attend, *draw(), softmax_scale=scale)


@pytest.mark.parametrize("shape", [(), (2,), (2, 1), (1, 2), (2, 2)], ids=str)
def test_descales_are_broadcast(shape: tuple[int, ...], attend: Any) -> None:
    """FP8-01: each batch entry and head of k has its own, and none is lost or exchanged."""
    rng = np.random.default_rng(1)
    scales = {name: (0.25 + rng.random(shape)).astype(np.float32) for name in NAMES}
    arrays = draw("float8_e5m2", (40, 70, 64, 64), 2, 4, 2)
    out = check(attend, *arrays, causal=True, **scales)
    for name in NAMES:
        if shape:
            turned = {**scales, name: np.ascontiguousarray(np.flip(scales[name]))}
            assert not same_bits(check(attend, *arrays, causal=True, **turned), out)


def test_numbers_multiply_and_do_not_divide(attend: Any) -> None:
    """FP8-02."""
    q, k, v = (np.zeros_like(x) for x in draw())
    v[...] = 1
    assert (check(attend, q, k, v, v_descale=4.0) == 4).all()
    check(attend, *draw(), q_descale=0.5, k_descale=-3.0, v_descale=0.0109)


def test_what_is_no_number_stays_in_its_heads(attend: Any) -> None:
    """FP8-04."""
    arrays = draw(batch=1, heads=4, heads_k=2)
    for name in NAMES:
        for value in (np.nan, 0.0, -1.0):
            out, lse = attend(*arrays, **{name: np.array([1, value], np.float32)})
            assert np.isfinite(out[:, :, :2].astype(float)).all()
            assert np.isfinite(lse[:, :2]).all()
            assert np.isnan(out[:, :, 2:].astype(float)).all() == np.isnan(value)


@pytest.mark.parametrize("dtype", FORMATS)
def test_long_uniform_rows_sum_to_one(dtype: str, attend: Any) -> None:
    """FP8-05: weights of 1/4096, below the smallest number of e4m3."""
    q, k, v = draw(dtype, (3, 4096, 64, 64), heads=1)
    assert (check(attend, q, np.zeros_like(k), np.ones_like(v)) == 1).all()


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_nan_around_the_arrays_is_never_read(byte: int, attend: Any) -> None:
    """FP8-06: pages of 16 rows of which 5 are in use, columns and heads between those of others."""
    q, k, v = draw("float8_e4m3fn", (20, 5, 64, 48), 2, 2, 2)
    layouts = (Layout((16 * 160, 160, 80, 1)), Layout((16 * 160, 160, 64, 1)))
    paged = [Strided.of(x, layout) for x, layout in zip((k, v), layouts, strict=True)]
    for x in paged:
        x.storage[~x.inside] = byte
    out, lse = attend(q, *paged)
    expected, sums = attend(q, k, v)
    assert same_bits(np.ascontiguousarray(out), np.ascontiguousarray(expected))
    assert same_bits(lse, sums)


def test_keys_of_nan_are_masked_away(attend: Any) -> None:
    q, k, v = draw(shape=(40, 200, 64, 64))
    expected, _ = attend(q, k, v, causal=True, alignment="top_left")
    k[:, 60:] = np.nan
    out, _ = attend(q, k, v, causal=True, alignment="top_left")
    assert same_bits(out, expected)


@pytest.mark.parametrize("memory", ["heads_first", "fused_qkv", "length_first"])
def test_rows_may_lie_anywhere(memory: str, attend: Any) -> None:
    arrays = draw(shape=(50, 90, 64, 64), batch=2, heads=2, heads_k=2)
    check(attend, *(Strided.of(x, memory) for x in arrays), causal=True)


@needs_compiler
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256)], ids=str)
def test_every_seed_gives_the_same_bits(dims: tuple[int, int]) -> None:
    """Threads and copies in every order: 8-bit V goes through a warp that transposes it."""
    arrays = draw("float8_e4m3fn", (150, 260, *dims), 1, 4, 2)
    results = []
    for seed in (0, 2, 3, 8):
        with cupyflash.emulate(seed=seed):
            results.append(cupyflash.attention(*arrays, causal=True, kernel=HOPPER))
    assert all(same_bits(result, results[0]) for result in results)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_long_rows(dtype: str, dim: int) -> None:
    """Sums of many products, which tensor cores make in few bits."""
    attend = OnGpu()
    arrays = draw(dtype, (500, 8192, dim, dim), 1, 2, 1)
    for causal in (False, True):
        check(attend, *arrays, causal=causal)


def test_many_keys_of_one_score(attend: Any) -> None:
    """Equal weights are rounded alike: at the maximum they are powers of 2, and not rounded."""
    q, k, v = draw("float8_e4m3fn", (1, 129, 64, 64), 1, 1, 1)
    q[...], k[...], v[...] = 1, 0, 1.125
    k[0, :128, 0, 0] = 0.375
    out, _ = attend(q, k, v, softmax_scale=1.0)
    assert (out == np.float32(1.125)).all()


def numbers(x: float) -> np.ndarray:
    return np.full((1, 1), x, np.float32)


@pytest.mark.parametrize(
    ("scale", "q_descale", "k_descale"),
    [(1e20, 1e19, 1e-37), (1e-20, 1e-19, 1e37), (1.0, 1e20, 1e20), (-1.0, 1e20, 1e20)],
)
def test_products_of_scales(scale: float, q_descale: float, k_descale: float, attend: Any) -> None:
    """What overflows or vanishes on the way to a product is not lost, nor are scores of 0."""
    q, k, v = draw("float8_e4m3fn", (1, 50, 64, 64), 1, 1, 1)
    if abs(scale) == 1.0:
        q[...] = 0
    check(
        attend, q, k, v, softmax_scale=scale,
        q_descale=numbers(q_descale), k_descale=numbers(k_descale),
    )  # fmt: skip


def test_a_small_descale_of_v(attend: Any) -> None:
    q, k, v = draw("float8_e4m3fn", (1, 300, 64, 64), 1, 1, 1)
    check(attend, q, k, v, v_descale=numbers(1e-35))


@pytest.mark.parametrize("dtype", FORMATS)
def test_rows_of_all_sizes(dtype: str, attend: Any) -> None:
    q, k, v = draw(dtype, (200, 300, 64, 64), 1, 2, 1)
    sizes = np.logspace(-3, 1, 200, dtype=np.float32)[:, None, None]
    check(attend, (q.astype(np.float32) * sizes).astype(dtype), k, v, causal=True)
