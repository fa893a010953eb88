"""Wrong arguments of every public function: one sentence that names the argument, never less."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cupyflash
from cupyflash import CupyflashError, InvalidArgument, InvalidType, reference

Q = np.ones((2, 3, 4, 8), np.float32)
K = np.ones((2, 5, 2, 8), np.float32)
SIZES = {"len_q": 4, "head_dim": 8}
STATE = (1, 2)


@pytest.mark.parametrize(
    "options",
    [
        {"return_lse": "no"},
        {"return_lse": 1},
        {"return_lse": None},
        {"return_lse": np.array([True, False])},
        {"kernel": np.array(["cpu", "reference"])},
        {"kernel": ["cpu"]},
        {"kernel": b"cpu"},
        {"kernel": Q},
        {"seqused_k": [[1], [2, 3]]},
        {"seqused_k": [None, 1]},
        {"seqused_k": ["a", "b"]},
        {"seqused_k": []},
        {"rng_state": (True, False)},
        {"rng_state": {1: 2, 3: 4}},
    ],
    ids=str,
)
@pytest.mark.parametrize("function", [cupyflash.attention, cupyflash.explain, cupyflash.supports])
def test_options(function: Callable[..., Any], options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(CupyflashError, match=rf"^`{name}"):
        function(Q, K, K, dropout_p=0.5, **{"rng_state": STATE, **options})


def test_no_array_but_its_class() -> None:
    with pytest.raises(InvalidType, match=r"^`q` must be an array"):
        cupyflash.attention(np.ndarray, K, K)


def test_no_lengths_of_no_batch() -> None:
    out = cupyflash.attention(Q[:0], K[:0], K[:0], seqused_q=[], seqused_k=())
    assert out.shape == (0, 3, 4, 8)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("softcap", [1e-46, 5e-324, 1e-310, 1e-38])
def test_the_smallest_softcap_makes_all_scores_equal(softcap: float, dtype: str) -> None:
    q, k = Q.astype(dtype), K.astype(dtype)
    v = np.arange(K.size).reshape(K.shape).astype(dtype)
    for scores in (0, 1):
        out = cupyflash.attention(q * scores, k, v, softcap=softcap)
        np.testing.assert_allclose(out[0, 0, 0].astype(float), v[0, :, 0].mean(axis=0))


def test_the_reference_kernel_writes_infinities_without_a_warning() -> None:
    bias = np.full((1, 1, 1, 1), 1e300)
    _, lse = cupyflash.attention(Q, K, K, attn_bias=bias, return_lse=True, kernel="reference")
    assert np.isposinf(lse).all()


# explain, supports, warmup


@pytest.mark.parametrize("state", [True, (0, 0), [3, 4], np.array([1, 2])], ids=str)
def test_a_state_of_any_form_may_be_explained(state: Any) -> None:
    assert cupyflash.supports(**SIZES, arch=None, dtype="float32", dropout_p=0.5, rng_state=state)
    assert cupyflash.explain(Q, K, K, dropout_p=0.5, rng_state=state).kernel == "cpu"


def test_sizes_beyond_any_memory() -> None:
    with pytest.raises(InvalidArgument, match=r"^`k` of shape .* larger than any memory"):
        cupyflash.explain(len_q=1, len_k=2**29, heads_q=2**30, head_dim=256)


@pytest.mark.parametrize("device", [-1, True, "0", [0], 1.5, None], ids=repr)
def test_the_device_of_warmup(device: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"^`device`"):
        cupyflash.warmup(device=device, **SIZES)


# dropout_mask


@pytest.mark.parametrize("p", [None, "0.5", "x", True, np.nan, 2, [0.5, 0.5]], ids=repr)
def test_the_probability_of_a_mask(p: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"^`p` must be from 0 to 1, got "):
        cupyflash.dropout_mask(STATE, p, (1, 1, 2, 2))


@pytest.mark.parametrize(
    "shape", [None, 5, "abcd", (1, 2, 2), (1, 1, -2, 2), (1, 1, 2.0, 2), (1, 1, 1, 2, 2)], ids=repr
)
def test_the_shape_of_a_mask(shape: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"^`shape`"):
        cupyflash.dropout_mask(STATE, 0.5, shape)


@pytest.mark.parametrize("state", [None, {1: 2, 3: 4}, {5, 6}, (True, False), "ab", (1.0, 2)])
def test_the_state_of_a_mask(state: Any) -> None:
    with pytest.raises(InvalidType, match=r"^`rng_state`"):
        cupyflash.dropout_mask(state, 0.5, (1, 1, 2, 2))


# The oracle


def test_gradients_of_a_wrong_shape() -> None:
    with pytest.raises(InvalidArgument, match=r"^`dout` must have shape \(2, 3, 4, 8\), got"):
        reference.attention_backward(Q[:1], Q, K, K)
    with pytest.raises(InvalidArgument, match=r"^`dlse` must have shape \(2, 4, 3\), got"):
        reference.attention_backward(Q, Q, K, K, dlse=np.zeros((2, 3, 4)))


RAGGED = [[1], [2, 3]]


@pytest.mark.parametrize(
    "options",
    [
        {"scale": 1.0},
        {"layout": np.array(["bshd", "bhsd"])},
        {"alignment": np.array(["top_left", "x"])},
        {"softmax_scale": "x"},
        {"softmax_scale": np.nan},
        {"window_size": 5},
        {"window_size": (1, 2, 3)},
        {"window_size": ("a", 1)},
        {"alibi_slopes": RAGGED},
        {"alibi_slopes": ["a", "b", "c", "d"]},
        {"attn_bias": "x"},
        {"attn_bias": RAGGED},
        {"attn_bias": 1j},
        {"attn_mask": RAGGED},
        {"attn_mask": 1},
        {"learnable_sink": [None] * 4},
        {"seqused_q": 3},
        {"seqused_q": [1.5, 2]},
        {"seqused_k": ["a", "b"]},
        {"seqused_k": [[1, 2]]},
        {"seqused_k": RAGGED},
        {"q_descale": "x"},
        {"v_descale": np.ones(3)},
        {"causal": None},
        {"causal": np.array([True, False])},
        {"window_size": (True, False)},
        {"window_size": (1.5, 2)},
        {"window_size": (-2, 0)},
        {"softcap": True},
        {"softcap": -1},
        {"softmax_scale": [1]},
        {"dropout_p": "x"},
        {"dropout_p": 0.5},
        {"dropout_p": 0.5, "rng_state": ("a", "b")},
    ],
    ids=str,
)
def test_options_of_the_oracle(options: dict[str, Any]) -> None:
    name = "rng_state" if options.get("dropout_p") == 0.5 else next(iter(options))
    with pytest.raises(CupyflashError, match=rf"^`{name}"):
        reference.attention(Q, K, K, **options)


@pytest.mark.parametrize("x", ["x", None, RAGGED, Q.astype(int), Q * 1j, Q.astype(str)], ids=type)
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_arrays_of_the_oracle(name: str, x: Any) -> None:
    with pytest.raises(InvalidType, match=rf"^`{name}` must be an array of floating-point"):
        reference.attention(**{"q": Q, "k": K, "v": K, name: x})


@pytest.mark.parametrize("lengths", [4, ["a", "b"], [0, 2.5], [[0, 3]], RAGGED, None], ids=str)
def test_lengths_of_the_oracle(lengths: Any) -> None:
    with pytest.raises(CupyflashError, match=r"^`cu_seqlens_q`"):
        reference.attention_varlen(Q[0], K[0], K[0], lengths, [0, 5])


@pytest.mark.parametrize("x", ["x", RAGGED, Q[:1], Q.astype(str)], ids=type)
@pytest.mark.parametrize("name", ["dout", "dlse"])
def test_gradients_of_the_oracle(name: str, x: Any) -> None:
    with pytest.raises(CupyflashError, match=rf"^`{name}` must"):
        reference.attention_backward(**{"dout": Q, "q": Q, "k": K, "v": K, name: x})


def test_no_window_of_the_oracle_has_two_names() -> None:
    expected, _ = reference.attention(Q, K, K, window_size=(-1, None))
    np.testing.assert_array_equal(reference.attention(Q, K, K, window_size=None)[0], expected)


def test_a_dtype_of_the_oracle() -> None:
    with pytest.raises(InvalidType, match=r"^`dtype` must be"):
        reference.output_dtype("x")


# Messages in a user's words

WRONG = (
    Q, np.zeros((30, 30)), "x" * 500, "a\nb", [1] * 200, [Q, 3], 10**400, -(10**5000),
    {str(n): n for n in range(40)},
)  # fmt: skip
CALLS: dict[str, Callable[..., Any]] = {
    "attention": lambda **x: cupyflash.attention(Q, K, K, rng_state=STATE, **x),
    "supports": lambda **x: cupyflash.supports(**SIZES | {"arch": None, "dtype": "float32"} | x),
    "reference": lambda **x: reference.attention(Q, K, K, rng_state=STATE, **x),
    "dropout_mask": lambda **x: cupyflash.dropout_mask(
        **{"rng_state": STATE, "p": 0.5, "shape": (1, 1, 1, 1)} | x
    ),
    "emulate": lambda **x: cupyflash.emulate(**x),
}
MODES = ("softmax_scale", "softcap", "alignment", "layout", "window_size", "dropout_p", "seqused_k")
NAMES = {
    "attention": (*MODES, "causal", "kernel", "segment_ids"),
    "supports": (*MODES, "dtype", "arch", "kernel", "max_seqlen_q"),
    "reference": MODES,
    "dropout_mask": ("rng_state", "p", "shape"),
    "emulate": ("arch",),
}


@pytest.mark.parametrize(
    ("function", "name"), [(function, name) for function in NAMES for name in NAMES[function]]
)
def test_a_wrong_value_is_told_in_one_line(function: str, name: str) -> None:
    messages = []
    for value in WRONG:
        try:
            CALLS[function](**{name: value})
        except CupyflashError as error:
            messages.append(str(error))
    assert messages
    for message in messages:
        assert message.startswith(f"`{name}")
        assert "\n" not in message
        assert len(message) < 400


def test_a_list_of_two_arrays_is_no_pair() -> None:
    ids = [np.zeros((2, 3), int), np.zeros((2, 5), int)]
    with pytest.raises(InvalidType, match=r"^`segment_ids` must hold .*, for a pair a tuple$"):
        cupyflash.attention(Q, K, K, segment_ids=ids)
    assert cupyflash.attention(Q, K, K, segment_ids=tuple(ids)).shape == Q.shape


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            {"softmax_scale": np.ones(3)},
            r"of shape \(3,\) in host memory: pass a float$",
        ),
        ({"alibi_slopes": [1.0] * 4}, "got list: convert it, as numpy.asarray does$"),
        ({"alibi_slopes": np.ones(4)}, "has dtype float64: expected float32, convert it$"),
        ({"k": None}, "got None$"),
    ],
)
def test_messages(arguments: dict[str, Any], words: str) -> None:
    (name,) = arguments
    with pytest.raises(InvalidType, match=f"^`{name}` .*{words}"):
        cupyflash.attention(**{"q": Q, "k": K, "v": K, **arguments})


@pytest.mark.parametrize("arch", ["hopper", "sm_", 9.0, True, None, 0], ids=repr)
def test_the_architecture_of_the_emulator(arch: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"^`arch` must be a compute capability"):
        cupyflash.emulate(arch=arch)


@pytest.mark.parametrize("seed", ["1", 1.5, None, [1]], ids=repr)
def test_the_seed_of_the_emulator(seed: Any) -> None:
    with pytest.raises(InvalidType, match=r"^`seed` must be an integer"):
        cupyflash.emulate(seed=seed)
