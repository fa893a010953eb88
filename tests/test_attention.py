"""The public function on arrays in host memory: the oracle, the frameworks, the errors."""

import math
import threading
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupyflash
from cupyflash import InvalidArgument, InvalidType, UnsupportedProblem, _accuracy, attention

DTYPES = ["float16", "bfloat16", "float32", "float64"]
SHAPES = {"q": (2, 131, 4, 24), "k": (2, 150, 2, 24), "v": (2, 150, 2, 16)}


def draw(rng: np.random.Generator, dtype: str = "float32", **shapes: Any) -> list[np.ndarray]:
    return [rng.standard_normal(shape).astype(dtype) for shape in ({**SHAPES, **shapes}).values()]


def modifiers(rng: np.random.Generator) -> dict[str, dict[str, Any]]:
    """Return one set of options for each feature of the contract."""
    return {
        "full": {},
        "causal": {"causal": True},
        "top_left": {"causal": True, "alignment": "top_left"},
        "window": {"window_size": (5, 3)},
        "one_side": {"window_size": (None, 2), "alignment": "top_left"},
        "scale": {"softmax_scale": -0.2},
        "softcap": {"softcap": 0.7},
        "alibi": {"alibi_slopes": rng.random((2, 4), np.float32), "causal": True},
        "bias": {"attn_bias": rng.standard_normal((4, 1, 150)).astype(np.float32)},
        "mask": {"attn_mask": rng.random((2, 1, 131, 150)) < 0.6},
        "lengths": {"seqused_q": np.array([3, 131]), "seqused_k": [150, 9], "causal": True},
        "sink": {"learnable_sink": np.linspace(-1, 1, 4, dtype=np.float32)},
        "dropout": {"dropout_p": 0.3, "rng_state": (5, 6)},
    }


FEATURES = sorted(modifiers(np.random.default_rng(0)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("feature", FEATURES)
def test_every_option_against_the_oracle(
    feature: str, dtype: str, rng: np.random.Generator
) -> None:
    q, k, v = draw(rng, dtype)
    options = modifiers(rng)[feature]
    out, lse = attention(q, k, v, return_lse=True, **options)
    assert out.dtype == dtype
    assert out.shape == (2, 131, 4, 16)
    assert lse.dtype == (np.float64 if dtype == "float64" else np.float32)
    assert lse.shape == (2, 4, 131)
    _accuracy.assert_accurate(out, lse, q, k, v, **options)


def test_all_options_together(rng: np.random.Generator) -> None:
    q, k, v = draw(rng)
    options: dict[str, Any] = {}
    for feature in modifiers(rng).values():
        options |= feature
    out, lse = attention(q, k, v, return_lse=True, **options)
    _accuracy.assert_accurate(out, lse, q, k, v, **options)


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
def test_a_kernel_may_be_named(kernel: str, rng: np.random.Generator) -> None:
    q, k, v = draw(rng, "bfloat16")
    options = {"softcap": 2.0, "attn_mask": rng.random((131, 150)) < 0.5, "causal": True}
    out, lse = attention(q, k, v, kernel=kernel, return_lse=True, **options)
    assert out.dtype == ml_dtypes.bfloat16
    _accuracy.assert_accurate(out, lse, q, k, v, **options)


def test_layouts_agree_without_copies(rng: np.random.Generator) -> None:
    arrays = draw(rng)
    out, lse = attention(*arrays, causal=True, return_lse=True)
    turned = [x.transpose(0, 2, 1, 3) for x in arrays]
    other, sums = attention(*turned, causal=True, return_lse=True, layout="bhsd")
    assert np.array_equal(other, out.transpose(0, 2, 1, 3))
    assert np.array_equal(sums, lse)
    assert other.strides == out.transpose(0, 2, 1, 3).strides


def test_bias_and_mask_have_the_same_shape_in_both_layouts(rng: np.random.Generator) -> None:
    arrays = draw(rng)
    options = {
        "attn_bias": rng.standard_normal((2, 4, 131, 150)),
        "attn_mask": rng.random((4, 131, 150)) < 0.8,
    }
    out = attention(*arrays, **options)
    turned = [x.transpose(0, 2, 1, 3) for x in arrays]
    assert np.array_equal(attention(*turned, layout="bhsd", **options), out.transpose(0, 2, 1, 3))


def test_out_is_written_and_returned(rng: np.random.Generator) -> None:
    arrays = draw(rng)
    buffer = np.full((2, 131, 4, 20), np.nan, np.float32)
    out = buffer[..., 2:18]
    assert attention(*arrays, out=out) is out
    assert np.array_equal(out, attention(*arrays))
    assert np.isnan(buffer[..., :2]).all()
    assert np.isnan(buffer[..., 18:]).all()
    result = attention(*arrays, out=out, return_lse=True)
    assert result[0] is out


def test_inputs_may_be_read_only_strided_and_broadcast(rng: np.random.Generator) -> None:
    q, k, v = draw(rng)
    expected = attention(q, k, v, causal=True)
    for x in (q, k, v):
        x.flags.writeable = False
    assert np.array_equal(attention(q, k, v, causal=True), expected)
    wide = np.full((2, 150, 2, 48), np.nan, np.float32)
    wide[..., ::2] = k
    assert np.array_equal(attention(q, wide[..., ::2], v, causal=True), expected)
    backwards = np.ascontiguousarray(k[:, ::-1, :, ::-1])
    assert np.array_equal(attention(q, backwards[:, ::-1, :, ::-1], v, causal=True), expected)
    one = np.broadcast_to(k[:1, :, :1], k.shape)
    assert np.array_equal(attention(q, one, v), attention(q, one.copy(), v))


@pytest.mark.parametrize(
    "shapes",
    [
        {"q": (0, 5, 2, 4), "k": (0, 3, 2, 4), "v": (0, 3, 2, 4)},
        {"q": (2, 0, 2, 4), "k": (2, 3, 2, 4), "v": (2, 3, 2, 4)},
        {"q": (2, 5, 0, 4), "k": (2, 3, 0, 4), "v": (2, 3, 0, 4)},
        {"q": (2, 5, 0, 4), "k": (2, 3, 2, 4), "v": (2, 3, 2, 4)},
        {"q": (2, 5, 2, 4), "k": (2, 0, 2, 4), "v": (2, 0, 2, 4)},
        {"q": (2, 5, 2, 0), "k": (2, 3, 2, 0), "v": (2, 3, 2, 4)},
        {"q": (2, 5, 2, 4), "k": (2, 3, 2, 4), "v": (2, 3, 2, 0)},
        {"q": (0, 0, 0, 0), "k": (0, 0, 0, 0), "v": (0, 0, 0, 0)},
    ],
    ids=lambda shapes: str(shapes["q"]) + str(shapes["k"]),
)
@pytest.mark.parametrize("kernel", [None, "reference"])
def test_empty_dimensions(
    shapes: dict[str, Any], kernel: str | None, rng: np.random.Generator
) -> None:
    q, k, v = draw(rng, **shapes)
    batch, len_q, heads, head_dim_v = *q.shape[:3], v.shape[3]
    out, lse = attention(q, k, v, return_lse=True, causal=True, kernel=kernel)
    assert out.shape == (batch, len_q, heads, head_dim_v)
    assert lse.shape == (batch, heads, len_q)
    if k.shape[1] == 0:
        assert not out.any()
        assert np.isneginf(lse).all()


def test_no_head_dim_is_the_mean_of_the_values() -> None:
    q, v = np.zeros((1, 1, 1, 0), np.float32), np.arange(4, dtype=np.float32).reshape(1, 4, 1, 1)
    out, lse = attention(q, np.zeros((1, 4, 1, 0), np.float32), v, return_lse=True)
    assert out.item() == 1.5
    assert lse.item() == pytest.approx(math.log(4), abs=1e-6)


def test_rows_that_see_no_key_are_zero_and_written(rng: np.random.Generator) -> None:
    q, k, v = draw(rng, q=(1, 9, 1, 8), k=(1, 4, 1, 8), v=(1, 4, 1, 8))
    out = np.full((1, 9, 1, 8), np.nan, np.float32)
    _, lse = attention(q, k, v, causal=True, out=out, return_lse=True)
    assert not out[:, :5].any()
    assert np.isneginf(lse[..., :5]).all()
    assert np.isfinite(lse[..., 5:]).all()


def test_the_head_dim_has_no_limit_on_the_host(rng: np.random.Generator) -> None:
    q, k, v = draw(rng, q=(1, 3, 1, 600), k=(1, 4, 1, 600), v=(1, 4, 1, 300))
    out, lse = attention(q, k, v, return_lse=True)
    _accuracy.assert_accurate(out, lse, q, k, v)


def test_threads_get_the_same_bits(rng: np.random.Generator) -> None:
    arrays = draw(rng)
    expected = attention(*arrays, causal=True)
    results: list[np.ndarray] = []

    def work() -> None:
        results.extend(attention(*arrays, causal=True) for _ in range(5))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 40
    assert all(np.array_equal(result, expected) for result in results)


def test_dropout_follows_the_public_mask() -> None:
    """With equal scores and one-hot values, the output's columns are the mask, scaled."""
    q, k = np.zeros((2, 5, 3, 4), np.float32), np.zeros((2, 7, 3, 4), np.float32)
    v = np.broadcast_to(np.eye(7, dtype=np.float32)[None, :, None], (2, 7, 3, 7))
    out = attention(q, k, v, dropout_p=0.5, rng_state=(11, 3))
    mask = cupyflash.dropout_mask((11, 3), 0.5, (2, 3, 5, 7))
    assert np.array_equal(out.transpose(0, 2, 1, 3) != 0, mask)
    assert out[out != 0] == pytest.approx(2 / 7)


# Errors


ARRAYS = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"q": [[1.0]]}, InvalidType, "`q` must be an array"),
        ({"k": None}, InvalidType, "`k` must be an array"),
        ({"v": "v"}, InvalidType, "`v` must be an array"),
        ({"q": np.zeros(3, "S4")}, InvalidType, "`q`"),
        ({"q": np.zeros((2, 131, 4, 24), complex)}, InvalidType, "`q`.*complex"),
        ({"k": np.zeros((2, 150, 2, 24), ">f4")}, InvalidType, "`k`.*>f4"),
        ({"k": np.zeros((2, 150, 4, 24), np.float32)}, InvalidArgument, "`v` .*heads_k 2"),
        ({"attn_mask": [[True]]}, InvalidType, "`attn_mask` must be an array"),
        ({"attn_bias": 1.0}, InvalidType, "`attn_bias` must be an array"),
        ({"out": np.zeros((2, 131, 4, 24), np.float32)}, InvalidArgument, "`out`"),
        ({"out": [0]}, InvalidType, "`out` must be an array"),
        ({"seqused_k": [151, 0]}, InvalidArgument, r"`seqused_k\[0\]` .*150, got 151"),
        ({"seqused_k": [1.5, 0]}, InvalidType, "`seqused_k` has dtype float64"),
        ({"seqused_k": [1]}, InvalidArgument, "`seqused_k` .*batch 1"),
        ({"rng_state": "seed", "dropout_p": 0.1}, InvalidType, "`rng_state`"),
        ({"kernel": "fast"}, InvalidArgument, "`kernel` must be None or one of 'att.*got 'fast'"),
        ({"kernel": 3}, InvalidArgument, "`kernel` .*got 3"),
        (
            {"kernel": "attention_fwd_sm80"},
            UnsupportedProblem,
            "attention_fwd_sm80 takes arrays on a GPU, these are in host memory",
        ),
        ({"softmax_scale": float("nan")}, InvalidArgument, "`softmax_scale` must be finite"),
        ({"causal": None}, InvalidType, "`causal` must be a bool"),
    ],
)
def test_errors(changes: dict[str, Any], error: type, words: str) -> None:
    arguments = {**ARRAYS, **changes}
    with pytest.raises(error, match=words):
        attention(**arguments)


def test_nothing_is_written_before_an_error() -> None:
    out = np.full((2, 131, 4, 16), np.nan, np.float32)
    with pytest.raises(InvalidArgument):
        attention(**ARRAYS, out=out, window_size=(-5, 0))
    assert np.isnan(out).all()


# Frameworks


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


@pytest.mark.frameworks
@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_in_torch_out(dtype: str, torch: Any, rng: np.random.Generator) -> None:
    arrays = draw(rng, "float32" if dtype == "bfloat16" else dtype)
    tensors = [torch.from_numpy(x).to(getattr(torch, dtype)) for x in arrays]
    out, lse = attention(*tensors, causal=True, return_lse=True)
    assert out.dtype == tensors[0].dtype
    assert out.is_contiguous()
    hosts = [x.double().numpy().astype(dtype) for x in tensors]
    assert np.array_equal(out.double().numpy(), attention(*hosts, causal=True).astype(float))
    assert lse.dtype == (torch.float64 if dtype == "float64" else torch.float32)


@pytest.mark.frameworks
def test_torch_heads_first_comes_back_heads_first(torch: Any, rng: np.random.Generator) -> None:
    tensors = [torch.from_numpy(x).transpose(1, 2) for x in draw(rng)]
    out = attention(*tensors, layout="bhsd")
    assert out.shape == (2, 4, 131, 16)
    assert out.transpose(1, 2).is_contiguous()


@pytest.mark.frameworks
def test_frameworks_do_not_mix(torch: Any) -> None:
    x = torch.zeros(1, 3, 2, 8)
    with pytest.raises(InvalidArgument, match=r"`k` is a numpy array .* and `q` is a torch array"):
        attention(x, x.numpy(), x)
    with pytest.raises(
        InvalidArgument, match="`v` is a torch array in host memory and `q` is a numpy"
    ):
        attention(x.numpy(), x.numpy(), x)


@pytest.mark.frameworks
def test_scalars_of_torch(torch: Any, rng: np.random.Generator) -> None:
    arrays = draw(rng)
    scale = torch.tensor(0.3, dtype=torch.float64)
    assert np.array_equal(
        attention(*arrays, softmax_scale=scale), attention(*arrays, softmax_scale=0.3)
    )
    with pytest.raises(InvalidType, match="`softmax_scale` must be a real number"):
        attention(*arrays, softmax_scale=torch.zeros(1))


class Exporter:
    """An array of an unknown library: DLPack is all that it has."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack__(self, **arguments: Any) -> Any:
        return self.array.__dlpack__(**arguments)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()


def test_an_unknown_library_gets_numpy_arrays_back(rng: np.random.Generator) -> None:
    arrays = draw(rng)
    exported = [Exporter(x) for x in arrays]
    expected, sums = attention(*arrays, causal=True, return_lse=True)
    out, lse = attention(*exported, causal=True, return_lse=True)
    assert np.array_equal(np.asarray(out), expected)
    assert np.array_equal(np.asarray(lse), sums)
    given = Exporter(np.full((2, 131, 4, 16), np.nan, np.float32))
    assert attention(*exported, causal=True, out=given) is given
    assert np.array_equal(given.array, expected)
    mask = rng.random((131, 150)) < 0.5
    out = attention(*exported, attn_mask=Exporter(mask), seqused_k=[3, 9])
    assert np.array_equal(np.asarray(out), attention(*arrays, attn_mask=mask, seqused_k=[3, 9]))
