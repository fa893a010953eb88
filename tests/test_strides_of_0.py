"""Arrays that repeat along a dimension, which Hopper's kernels read by a stride of 0."""

from typing import Any

import numpy as np
import pytest
from emulated import needs_compiler
from gradients import judge
from harness import HOPPER, fetch, same_bits

import cupyflash
from cupyflash import Gradients, _backward_sm90

BACKWARD = _backward_sm90.NAME
PLACES = [
    pytest.param("cpu", marks=needs_compiler, id="emulator"),
    pytest.param("gpu", marks=pytest.mark.gpu),
]
AXES = {"batch": 0, "rows": 1, "heads": 2}


def draw(dim: int, **repeats: int) -> list[np.ndarray]:
    """Draw q, k, v and dout, one of them the same along an axis."""
    rng = np.random.default_rng(dim)
    arrays = [rng.standard_normal((2, n, 2, dim)).astype(np.float16) for n in (70, 140, 140, 70)]
    for n, name in enumerate(("q", "k", "v", "dout")):
        if name in repeats:
            first = arrays[n].take([0], axis=repeats[name])
            arrays[n] = np.broadcast_to(first, arrays[n].shape)
    return arrays


def there(place: str, x: np.ndarray) -> Any:
    """Put an array somewhere as it lies in memory."""
    if place == "cpu":
        return x
    import cupy

    index = tuple(slice(1 if stride == 0 else None) for stride in x.strides)
    return cupy.broadcast_to(cupy.asarray(x[index]), x.shape)


def forward(place: str, q: Any, k: Any, v: Any) -> Any:
    """Call the kernel, on the emulator or on a GPU."""
    if place == "gpu":
        if not cupyflash.supports(q.copy(), k.copy(), v.copy(), kernel=HOPPER):
            pytest.skip("not a GPU of Hopper")
        return cupyflash.attention(q, k, v, causal=True, return_lse=True, kernel=HOPPER)
    with cupyflash.emulate(seed=1):
        return cupyflash.attention(q, k, v, causal=True, return_lse=True, kernel=HOPPER)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_the_output_is_that_of_copies(name: str, axis: str, place: str) -> None:
    q, k, v, _ = (there(place, x) for x in draw(64, **{name: AXES[axis]}))
    found = forward(place, q, k, v)
    expected = forward(place, q.copy(), k.copy(), v.copy())
    for x, y in zip(found, expected, strict=True):
        assert same_bits(fetch(place, x)[0], fetch(place, y)[0])


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
def test_gradients_are_those_of_copies(name: str, axis: str, dim: int, place: str) -> None:
    if place == "cpu" and dim != 64 and name in ("k", "v"):
        pytest.skip("as on a GPU: this is for the time that CI has")
    host = draw(dim, **{name: AXES[axis]})
    arrays = [there(place, x) for x in host]
    q, k, v, dout = arrays
    out, lse = cupyflash.attention(q, k, v, causal=True, return_lse=True)
    found = []
    for given in (arrays, [x.copy() for x in arrays]):
        q, k, v, dout = given
        call: dict[str, Any] = {"causal": True, "kernel": BACKWARD}
        if place == "gpu":
            if not cupyflash.supports(*(x.copy() for x in (q, k, v)), backward=True, **call):
                pytest.skip("not a GPU of Hopper")
            grads = cupyflash.attention_backward(dout, q, k, v, out, lse, **call)
        else:
            with cupyflash.emulate(seed=2):
                grads = cupyflash.attention_backward(dout, q, k, v, out, lse, **call)
        found.append([fetch(place, x)[0] for x in grads[:3]])
    judge(Gradients(*found[0], None, None), *host, None, causal=True)
    assert same_bits(found[0][1], found[1][1])
    assert same_bits(found[0][2], found[1][2])
