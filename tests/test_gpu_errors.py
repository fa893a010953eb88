"""What a GPU call refuses, in which words, and that a refusal leaves everything as it was (GPU)."""

from typing import Any

import numpy as np
import pytest
from harness import GPU_KERNEL, GPU_KERNELS, HOPPER, attend, judge

import cupyflash
from cupyflash.errors import InvalidArgument, InvalidType, UnsupportedProblem

pytestmark = pytest.mark.gpu


@pytest.fixture
def cp() -> Any:
    import cupy

    return cupy


def ones(cp: Any, *shape: int, dtype: Any = np.float16) -> Any:
    return cp.ones(shape, dtype)


@pytest.mark.parametrize("kernel", [None, *GPU_KERNELS])
@pytest.mark.parametrize("dim", [257, 512, 1024])
def test_a_head_dim_beyond_the_limit(cp: Any, dim: int, kernel: str | None) -> None:
    x = ones(cp, 1, 17, 1, dim)
    named = kernel or GPU_KERNEL
    with pytest.raises(UnsupportedProblem, match=rf"{named}.*head_dim.*256.*{dim}"):
        cupyflash.attention(x, x, x, kernel=kernel)


@pytest.mark.parametrize("dim", [257, 512])
def test_a_value_dim_beyond_the_limit(cp: Any, dim: int) -> None:
    x, v = ones(cp, 1, 17, 1, 64), ones(cp, 1, 17, 1, dim)
    with pytest.raises(UnsupportedProblem, match=rf"{GPU_KERNEL}.*head_dim_v.*256.*{dim}"):
        cupyflash.attention(x, x, v)


@pytest.mark.parametrize(
    ("heads_q", "heads_k"), [(33, 2), (3, 2), (4, 0), (2, 4)], ids=lambda n: str(n)
)
def test_heads_that_do_not_divide(cp: Any, heads_q: int, heads_k: int) -> None:
    q, k = ones(cp, 1, 8, heads_q, 64), ones(cp, 1, 8, heads_k, 64)
    out = cp.full((1, 8, heads_q, 64), 7, np.float16)
    with pytest.raises(InvalidArgument, match=rf"`k` has {heads_k} heads and `q` has {heads_q}"):
        cupyflash.attention(q, k, k, out=out)
    assert (out == 7).all()


def test_different_heads_of_k_and_v(cp: Any) -> None:
    q, k, v = (ones(cp, 2, 16, heads, 32) for heads in (8, 4, 2))
    with pytest.raises(InvalidArgument, match=r"`v`.*heads_k 2.*4"):
        cupyflash.attention(q, k, v)


def test_float64_belongs_to_the_host(cp: Any) -> None:
    x = ones(cp, 1, 8, 1, 64, dtype=np.float64)
    with pytest.raises(UnsupportedProblem, match=rf"{GPU_KERNEL}.*float64"):
        cupyflash.attention(x, x, x)


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
def test_a_kernel_of_the_host_is_no_kernel_of_the_gpu(cp: Any, kernel: str) -> None:
    x = ones(cp, 1, 8, 1, 64)
    with pytest.raises(UnsupportedProblem, match=rf"{kernel}.*host memory.*GPU"):
        cupyflash.attention(x, x, x, kernel=kernel)


@pytest.mark.parametrize("kernel", GPU_KERNELS)
def test_a_kernel_of_the_gpu_is_no_kernel_of_the_host(kernel: str) -> None:
    x = np.ones((1, 8, 1, 64), np.float16)
    with pytest.raises(UnsupportedProblem, match=rf"{kernel}.*GPU.*host memory"):
        cupyflash.attention(x, x, x, kernel=kernel)


def test_what_hopper_refuses_is_computed_by_the_kernel_of_every_gpu(cp: Any) -> None:
    x = ones(cp, 1, 8, 1, 64)
    attend(HOPPER, x, x, x)  # skips where this GPU is not the kernel's
    rows = cp.ones((1, 8, 1, 65), np.float16)[..., 1:]
    for arrays, words in (
        ([ones(cp, 1, 8, 1, 60)] * 3, "head_dim .* steps of 8, got 60"),
        ([ones(cp, 1, 8, 1, 64, dtype=np.float32)] * 3, "got float32"),
        ([x, x, ones(cp, 1, 8, 1, 256)], "one class"),
        ([rows, x, x], "multiples of 16 bytes"),
        ([x[:, ::-1], x, x], "needs strides from 0 .* got -128"),
    ):
        with pytest.raises(UnsupportedProblem, match=rf"{HOPPER} .*{words}"):
            cupyflash.attention(*arrays, kernel=HOPPER)
        assert cupyflash.explain(*arrays).kernel == GPU_KERNEL
        cupyflash.warmup(*arrays)
        out = cupyflash.attention(*arrays)
        assert (out == 1).all()
    assert cupyflash.explain(x, x, x).kernel == HOPPER
    assert cupyflash.supports(x, x, x, kernel=HOPPER)
    assert not cupyflash.supports(rows, x, x, kernel=HOPPER)


@pytest.mark.parametrize("host", ["q", "k", "v"])
def test_host_and_gpu_do_not_mix(cp: Any, host: str) -> None:
    arrays = {name: ones(cp, 1, 8, 1, 64) for name in "qkv"}
    arrays[host] = arrays[host].get()
    with pytest.raises(InvalidArgument, match=r"numpy array.* cupy|cupy array.* numpy"):
        cupyflash.attention(**arrays)


def test_an_output_of_the_host(cp: Any) -> None:
    x = ones(cp, 1, 8, 1, 64)
    with pytest.raises(InvalidArgument, match="`out` is a numpy array"):
        cupyflash.attention(x, x, x, out=np.empty((1, 8, 1, 64), np.float16))


def test_an_output_of_another_dtype(cp: Any) -> None:
    x = ones(cp, 1, 8, 1, 64)
    with pytest.raises(InvalidType, match="`out` has dtype float32"):
        cupyflash.attention(x, x, x, out=cp.empty((1, 8, 1, 64), np.float32))


def test_an_overlapping_output_is_seen_on_a_warm_call_too(cp: Any) -> None:
    memory = cp.ones(4 * 8 * 64, np.float16)
    x, y, z = (memory[i * 512 : (i + 1) * 512].reshape(1, 8, 1, 64) for i in range(3))
    for _ in range(2):
        cupyflash.attention(x, x, x, out=z)  # the same facts as below, but for the addresses
    half = memory[256:768].reshape(1, 8, 1, 64)
    for arrays, out in (((x, y, y), x), ((x, x, y), y), ((x, x, x), half)):
        with pytest.raises(InvalidArgument, match="`out` must not overlap"):
            cupyflash.attention(*arrays, out=out)
    assert (memory == 1).all()


def test_an_address_within_an_element(cp: Any) -> None:
    raw = cp.zeros(2 * 8 * 64 + 2, np.uint8)
    odd = cp.ndarray((1, 8, 1, 64), np.float16, raw.data + 1)
    x = ones(cp, 1, 8, 1, 64)
    with pytest.raises(InvalidArgument, match="`k` starts at address"):
        cupyflash.attention(x, odd, x)


def test_a_call_after_a_refusal_is_right(cp: Any) -> None:
    x = ones(cp, 1, 8, 1, 64)
    with pytest.raises(InvalidArgument, match="`window_size`"):
        cupyflash.attention(x, x, x, window_size=(-1, -3))
    assert (cupyflash.attention(x, x, x) == 1).all()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("softcap", 5.0),
        ("alibi_slopes", np.ones(2, np.float32)),
        ("attn_bias", np.zeros((8, 8), np.float16)),
        ("attn_mask", np.ones((8, 8), np.bool_)),
        ("learnable_sink", np.zeros(2, np.float32)),
    ],
)
def test_an_option_is_computed_or_refused_by_name(cp: Any, name: str, value: Any) -> None:
    rng = np.random.default_rng(1)
    arrays = [rng.standard_normal((1, 8, 2, 64)).astype(np.float16) for _ in "qkv"]
    option = {name: cp.asarray(value) if isinstance(value, np.ndarray) else value}
    on_gpu = [cp.asarray(x) for x in arrays]
    if cupyflash.supports(*on_gpu, **option):
        out, lse = cupyflash.attention(*on_gpu, return_lse=True, **option)
        judge((out.get(), lse.get()), *arrays, **{name: value})
        return
    with pytest.raises(UnsupportedProblem, match=rf"{GPU_KERNEL}.*`?{name}`?"):
        cupyflash.attention(*on_gpu, **option)
