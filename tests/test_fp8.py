"""fp8 inputs and what they are multiplied by: arguments, frameworks, and the paths of the host."""

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from kits import Kit, opened, params

import cupyflash
from cupyflash import InvalidArgument, InvalidType, UnsupportedProblem, _accuracy, reference

E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
FORMATS = (E4M3, E5M2)
BATCH, HEADS, HEADS_K = 2, 4, 2
NAMES = ("q_descale", "k_descale", "v_descale")


def draw(dtype: Any = E4M3, len_q: int = 30, len_k: int = 40, dim: int = 32) -> list[np.ndarray]:
    """Return q, k and v in fp8."""
    rng = np.random.default_rng(5)
    shapes = [(BATCH, len_q, HEADS, dim), *[(BATCH, len_k, HEADS_K, dim)] * 2]
    return [rng.standard_normal(shape, np.float32).astype(dtype) for shape in shapes]


def descales(*shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Return descales, each number of which is another, of the q, k and v that have a shape."""
    rng = np.random.default_rng(6)
    return {
        name: (0.5 + rng.random(shape)).astype(np.float32)
        for name, shape in zip(NAMES, shapes, strict=False)
    }


EVERY = descales(*[(BATCH, HEADS_K)] * 3)


def check(arrays: list[np.ndarray], **options: Any) -> np.ndarray:
    """Hold a call on the host against the oracle; return its output."""
    out, lse = cupyflash.attention(*arrays, return_lse=True, **options)
    options.pop("kernel", None)
    _accuracy.assert_accurate(out, lse, *arrays, **options)
    return out


@pytest.fixture(params=params())
def kit(request: pytest.FixtureRequest) -> Iterator[Kit]:
    with opened(request.param) as kit:
        yield kit


# The host


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("scales", [{}, EVERY], ids=["alone", "descaled"])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (9, 3)}], ids=str)
def test_the_host_computes_fp8(
    dtype: Any, scales: dict[str, Any], options: dict[str, Any], kernel: str
) -> None:
    out = check(draw(dtype), kernel=kernel, **options, **scales)
    assert out.dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize("dtype", FORMATS)
def test_every_modifier_goes_with_fp8(dtype: Any, rng: np.random.Generator) -> None:
    check(
        draw(dtype),
        **EVERY,
        softcap=3.0,
        alibi_slopes=np.full(HEADS, 0.1, np.float32),
        attn_bias=rng.standard_normal((HEADS, 30, 40), np.float32),
        attn_mask=rng.random((BATCH, 1, 30, 40)) < 0.7,
        seqused_k=np.array([40, 7]),
        learnable_sink=np.zeros(HEADS, np.float32),
        dropout_p=0.2,
        rng_state=(3, 4),
    )


@pytest.mark.parametrize("dtype", FORMATS)
def test_packed_sequences_of_equal_lengths(dtype: Any) -> None:
    q, k, v = (x.reshape(-1, *x.shape[2:]) for x in draw(dtype))
    bounds = np.array([0, 20, 40, 60]), np.array([0, 25, 50, 75])
    out, lse = cupyflash.attention_varlen(q, k, v, *bounds, return_lse=True)
    names = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), bounds, strict=True))
    _accuracy.assert_accurate(out, lse, q, k, v, **names)


@pytest.mark.parametrize(
    "shape", [(), (1,), (HEADS_K,), (BATCH, 1), (1, HEADS_K), (1, 1), (BATCH, HEADS_K)], ids=str
)
def test_descales_are_broadcast(shape: tuple[int, ...]) -> None:
    scales = descales(shape, shape, shape)
    out = check(draw(), **scales)
    wide = {name: np.broadcast_to(x, (BATCH, HEADS_K)) for name, x in scales.items()}
    assert np.array_equal(out, cupyflash.attention(*draw(), **wide))
    copied = {name: x.copy()[::-1, ::-1] for name, x in wide.items()}
    turned = {name: np.ascontiguousarray(x) for name, x in copied.items()}
    assert np.array_equal(
        cupyflash.attention(*draw(), **copied), cupyflash.attention(*draw(), **turned)
    )


@pytest.mark.parametrize("number", [2, 0.5, np.float32(3), np.float64(0.25), ml_dtypes.bfloat16(2)])
def test_a_number_is_an_array_of_one(number: Any) -> None:
    out = check(draw(), q_descale=number, k_descale=number, v_descale=number)
    one = np.full((), number, np.float32)
    same = cupyflash.attention(*draw(), q_descale=one, k_descale=one, v_descale=one)
    assert np.array_equal(out, same)


@pytest.mark.parametrize("name", NAMES)
def test_no_descale_is_lost_or_exchanged(name: str) -> None:
    """FP8-01: the scale of the report, and scales that all differ."""
    small = check(draw(), k_descale=np.float32(0.0109), v_descale=np.float32(0.0109))
    assert 0 < np.abs(small.astype(float)).max() < 0.05
    out = check(draw(), **EVERY)
    for axis in (0, 1):
        turned = {**EVERY, name: np.flip(EVERY[name], axis)}
        assert not np.array_equal(check(draw(), **turned), out)


def test_v_is_multiplied_and_not_divided() -> None:
    """FP8-02: uniform weights of ones."""
    q, k, v = (np.zeros_like(x) for x in draw())
    v[...] = 1
    assert (check([q, k, v], v_descale=4.0) == 4).all()


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf, 1e39, np.float32("nan")])
@pytest.mark.parametrize("name", NAMES)
def test_a_number_must_be_finite(name: str, number: Any) -> None:
    """FP8-04."""
    with pytest.raises(InvalidArgument, match=f"`{name}` must be finite"):
        cupyflash.attention(*draw(), **{name: number})


def test_any_value_of_an_array_multiplies() -> None:
    """FP8-04: zero, negative and what is no number, each in the heads that it belongs to."""
    assert not check(draw(), v_descale=np.float32(0)[None]).any()
    negative = check(draw(), q_descale=np.float32(-1)[None])
    assert np.array_equal(negative, check(draw(), softmax_scale=-(32**-0.5)))
    for name in NAMES:
        for value in (np.nan, np.inf):
            scale = np.array([1, value], np.float32)
            out = cupyflash.attention(*draw(), **{name: scale}).astype(float)
            assert np.isfinite(out[:, :, :2]).all()
            assert not np.isfinite(out[:, :, 2:]).any()


def test_a_huge_descale_of_zeros_is_no_nan() -> None:
    """FP8-04: the product of the scales is infinite, that with q is 0."""
    q, k, v = draw()
    huge = np.full(1, np.finfo(np.float32).max)
    check([np.zeros_like(q), k, v], q_descale=huge, softmax_scale=2.0)


def test_long_uniform_rows_sum_to_one() -> None:
    """FP8-05: weights of 1/4096, below the smallest number of e4m3."""
    q, k, v = draw(len_q=3, len_k=4096, dim=16)
    ones = [q, np.zeros_like(k), np.ones_like(v)]
    assert (check(ones) == 1).all()
    assert (reference.plain(*ones)[0] == 1).all()


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
@pytest.mark.parametrize("kernel", ["cpu", "reference"])
def test_what_lies_beyond_a_length_is_never_read(byte: int, kernel: str) -> None:
    """FP8-06: a page of 16 rows of which 5 are in use."""
    q, k, v = draw(len_k=16)
    for x in (k, v):
        x[:, 5:].view(np.uint8)[...] = byte
    used = cupyflash.attention(q, k, v, seqused_k=[5, 5], kernel=kernel)
    assert np.array_equal(used, check([q, k[:, :5], v[:, :5]], kernel=kernel))


def test_plain_rounds_weights_where_the_largest_is_256() -> None:
    q, v = np.ones((1, 1, 1, 16), E4M3), np.eye(2, 16)[None, :, None].astype(E5M2)
    k = np.zeros((1, 2, 1, 16), E4M3)
    k[0, 1, 0, 0] = -8.0
    out, _ = reference.plain(q.astype(E5M2), k.astype(E5M2), v, softmax_scale=1.0)
    expected = np.float32(256 * np.exp(-8.0)).astype(E4M3).astype(float) / 256
    share = 1 / (1 + np.exp(-8.0))
    np.testing.assert_allclose(out[0, 0, 0, :2].astype(float), [share, share * expected], rtol=4e-3)


def test_plain_rounds_weights_before_dropout() -> None:
    """The largest weight of a row may be one that is dropped."""
    q, k = np.zeros((1, 16, 1, 16), E5M2), np.zeros((1, 2, 1, 16), E5M2)
    q[...], k[0, 0, 0, 0] = 1, 16
    v = np.eye(2, 16)[None, :, None].astype(E5M2)
    options = {"softmax_scale": 1.0, "dropout_p": 0.5, "rng_state": (1, 2)}
    out, _ = reference.plain(q, k, v, **options)
    kept = cupyflash.dropout_mask((1, 2), 0.5, (1, 1, 16, 2))[0, 0]
    assert (kept == [False, True]).all(axis=1).any()
    np.testing.assert_array_equal(out[0, :, 0, :2].astype(float), kept * [2.0, 0.0])


# Arguments


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"q": np.float16}, InvalidType, "`k` has dtype float8_e4m3fn and `q` float16: convert"),
        ({"k": E5M2}, InvalidType, "`k` has dtype float8_e5m2 and `q` float8_e4m3fn: convert one"),
        ({"q": np.uint8}, InvalidType, "`q` has dtype uint8: view the bits .* float8_e4m3fn or fl"),
        ({"v": np.int8}, InvalidType, "`v` has dtype int8: view the bits of fp8 numbers as"),
        ({"q": ml_dtypes.float8_e4m3fnuz}, InvalidType, "`q` has elements of type float8_e4m3fnuz"),
        ({"v_descale": np.ones(3, "f4")}, InvalidArgument, r"`v_descale` must broadcast to \(batc"),
        ({"q_descale": np.ones((2, 4), "f4")}, InvalidArgument, r"heads_k\) = \(2, 2\), got .*4\)"),
        ({"k_descale": np.ones((1, 2, 2), "f4")}, InvalidArgument, "`k_descale` must broadcast to"),
        ({"q_descale": np.ones(2)}, InvalidType, "`q_descale` has dtype float64: expected float32"),
        ({"k_descale": np.ones(2, int)}, InvalidType, "`k_descale` has dtype int64: expected floa"),
        ({"v_descale": "2"}, InvalidType, "`v_descale` must be a real number, got '2'"),
        ({"v_descale": [1.0, 2.0]}, InvalidType, "`v_descale` must be a real number"),
        ({"v_descale": True}, InvalidType, "`v_descale` must be a real number, got True"),
        ({"out": np.zeros((2, 30, 4, 32), E4M3)}, InvalidType, "`out` has dtype .*expected bfloat"),
        ({"kernel": "attention_fwd_sm80"}, UnsupportedProblem, "takes arrays on a GPU"),
    ],
)  # fmt: skip
def test_wrong_arguments(changes: dict[str, Any], error: type, words: str) -> None:
    arguments: dict[str, Any] = dict(zip("qkv", draw(), strict=True))
    for name, value in changes.items():
        cast = name in arguments
        arguments[name] = arguments[name].astype(np.float32).astype(value) if cast else value
    with pytest.raises(error, match=words) as caught:
        cupyflash.attention(**arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [2.0, np.ones(1, np.float32)], ids=["number", "array"])
def test_descales_are_only_for_fp8(name: str, value: Any) -> None:
    arrays = [x.astype(np.float16) for x in draw()]
    with pytest.raises(InvalidArgument, match=f"`{name}` is only for fp8 inputs, these are float1"):
        cupyflash.attention(*arrays, **{name: value})


def test_out_is_bfloat16_and_apart_from_the_descales() -> None:
    memory = np.zeros((2, 30, 4, 32), ml_dtypes.bfloat16)
    assert cupyflash.attention(*draw(), out=memory) is memory
    inside = memory.view(np.float32)[0, 0, 0, :1]
    with pytest.raises(InvalidArgument, match="`out` must not overlap `q_descale`"):
        cupyflash.attention(*draw(), q_descale=inside, out=memory)


@pytest.mark.parametrize("value", [True, 2.0, np.ones(2, np.float32)], ids=["any", "2", "array"])
def test_a_call_with_descales_can_be_talked_about(value: Any) -> None:
    sizes = {"len_q": 100, "head_dim": 64, "heads_q": 4, "heads_k": 2, "dtype": "float8_e5m2"}
    if isinstance(value, np.ndarray):
        said = cupyflash.explain(*draw(), k_descale=value)
        assert said.kernel == "cpu"
        wider = {name: x.astype(np.float16) for name, x in zip("qkv", draw(), strict=True)}
    else:
        wider = {**sizes, "dtype": "float16"}
        said = cupyflash.explain(**sizes, k_descale=value)
        assert said.kernel == "attention_fwd_sm90"
        assert "float8_e5m2" in str(said)
        assert not cupyflash.supports(**sizes, arch=100, k_descale=value)
    with pytest.raises(InvalidArgument, match="`k_descale` is only for fp8 inputs"):
        cupyflash.explain(**wider, k_descale=value)


# Frameworks


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("scales", ["none", "numbers", "arrays", "both"])
def test_every_framework_has_fp8(kit: Kit, dtype: Any, scales: str) -> None:
    arrays = draw(dtype)
    host: dict[str, Any] = {
        "none": {},
        "numbers": {"q_descale": 0.5, "v_descale": 3.0},
        "arrays": EVERY,
        "both": {"q_descale": 0.5, "k_descale": EVERY["k_descale"][0]},
    }[scales]
    given = {name: kit.put(x) if isinstance(x, np.ndarray) else x for name, x in host.items()}
    if not cupyflash.supports(*map(kit.put, arrays)):
        pytest.skip("no kernel for fp8 on this GPU")
    for _ in range(2):
        out, lse = cupyflash.attention(*map(kit.put, arrays), return_lse=True, **given)
        assert type(out) is type(kit.put(arrays[0]))
        _accuracy.assert_accurate(kit.get(out), kit.get(lse), *arrays, **host)


@pytest.mark.frameworks
def test_jax_traces_and_maps_descales() -> None:
    jax = pytest.importorskip("jax")
    arrays, scale = draw(), EVERY["v_descale"]
    attend = lambda q, k, v, x: cupyflash.attention(q, k, v, v_descale=x, k_descale=0.5)  # noqa: E731
    expected = cupyflash.attention(*arrays, v_descale=scale, k_descale=0.5)
    with jax.default_device(jax.devices("cpu")[0]):
        assert np.array_equal(jax.jit(attend)(*arrays, scale), expected)
        items = [x[:, None] for x in (*arrays, scale)]
        mapped = jax.jit(jax.vmap(attend))(*items)
        assert np.array_equal(np.asarray(mapped)[:, 0], expected)
        shared = jax.vmap(attend, (0, 0, 0, None))(*items[:3], scale[0, 0])
        single = cupyflash.attention(*arrays, v_descale=scale[:1, :1], k_descale=0.5)
        assert np.array_equal(np.asarray(shared)[:, 0], single)


@pytest.mark.parametrize("dim", [31, 33, 257])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_rows_of_odd_bytes_are_refused_with_reasons(dtype: str, dim: int) -> None:
    """A stride of one array is no misaligned address of another."""
    sizes = {"batch": 1, "len_q": 40, "len_k": 40, "heads_q": 2, "heads_k": 2}
    answer = cupyflash.explain(**sizes, head_dim=dim, head_dim_v=dim, dtype=dtype, arch=90)
    assert answer.kernel is None
    assert "needs head_dim from 16 to 256" in answer.rejected["attention_fwd_sm90"]


@pytest.mark.parametrize("shape", [(2, 0, 2, 64), (0, 5, 2, 64), (2, 5, 0, 64)])
def test_empty_calls_are_supported(shape: tuple[int, ...]) -> None:
    names = ("batch", "len_q", "heads_q", "head_dim")
    sizes = dict(zip(names, shape, strict=True)) | {"len_k": 5, "heads_k": min(shape[2], 2)}
    assert cupyflash.supports(**sizes, dtype="float8_e4m3fn", arch=90)
