"""Forward kernels at masks with a known answer: which keys a row sees, at the edges of tiles."""

from typing import Any

import numpy as np
import pytest
from harness import HOPPER, KERNELS, check, run, same_bits

from cupyflash.masks import Band

pytestmark = pytest.mark.parametrize("kernel", KERNELS)


def seen(kernel: str, len_q: int, len_k: int, **options: Any) -> np.ndarray:
    """Return which keys each row gave weight to, and assert that the weights are equal.

    q = 0 makes all scores equal, and one-hot rows of V turn the output into the weights.
    """
    dim, dim_v = 16, len_k
    if kernel == HOPPER:  # it takes multiples of 8, and few pairs that are not equal
        dim = dim_v = -(-len_k // 8) * 8
    q = np.zeros((1, len_q, 1, dim), np.float16)
    k = np.ones((1, len_k, 1, dim), np.float16)
    v = np.eye(len_k, dim_v, dtype=np.float16).reshape(1, len_k, 1, dim_v)
    out, lse = run(kernel, q, k, v, **options)
    assert not out[..., len_k:].any()
    weights = out[0, :, 0, :len_k]
    mask = weights > 0
    counts = mask.sum(axis=1, keepdims=True)
    assert same_bits(weights, (mask / np.maximum(counts, 1)).astype(np.float16))
    assert (np.isneginf(lse[0, 0]) == (counts[:, 0] == 0)).all()
    return mask


@pytest.mark.parametrize("alignment", ["bottom_right", "top_left"])
@pytest.mark.parametrize("len_q", [1, 2, 15, 16, 17, 31, 33, 47, 49, 63, 64, 65, 70])
def test_every_left_side_against_every_tile(kernel: str, len_q: int, alignment: str) -> None:
    for len_k in (64, 72):
        for left in (*range(0, 71, 3), 15, 16, 31, 32, 63, 64):
            band = Band.of(True, (left, 0), alignment)
            options = {"causal": True, "window_size": (left, 0), "alignment": alignment}
            mask = seen(kernel, len_q, len_k, **options)
            assert (mask == band.dense(len_q, len_k)).all(), (len_k, left)


@pytest.mark.parametrize("len_q", [1, 16, 17, 64, 65, 129])
def test_every_right_side_against_every_tile(kernel: str, len_q: int) -> None:
    for right in (*range(0, 130, 8), 15, 17, 31, 33, 63, 65, 127, 129):
        band = Band.of(False, (-1, right), "bottom_right")
        mask = seen(kernel, len_q, 128, window_size=(-1, right))
        assert (mask == band.dense(len_q, 128)).all(), right


def test_a_window_of_eight_over_twelve_keys(kernel: str) -> None:
    mask = seen(kernel, 4, 12, causal=True, window_size=(7, 0))
    spans = [(row.argmax(), row.sum()) for row in mask]
    assert spans == [(1, 8), (2, 8), (3, 8), (4, 8)]


def test_a_window_of_nothing_but_oneself_copies_v(kernel: str) -> None:
    rng = np.random.default_rng(1)
    for length in (4, 130):
        q, k, v = (rng.standard_normal((1, length, 2, 64)).astype(np.float16) for _ in "qkv")
        out, _ = check(kernel, q, k, v, window_size=(0, 0))
        assert same_bits(out, v)


def test_a_window_to_the_left_does_not_leak_the_future(kernel: str) -> None:
    rng = np.random.default_rng(2)
    q, k = (rng.standard_normal((1, 16, 1, 64)).astype(np.float16) for _ in "qk")
    v = np.zeros((1, 16, 1, 64), np.float16)
    v[:, 9:] = 1e4
    out, _ = run(kernel, q, k, v, window_size=(4, 0))
    assert not out[:, :9].any()
    assert out[:, 9:].all()


@pytest.mark.parametrize(
    ("window_size", "same_as"),
    [
        ((-1, 200), (-1, -1)),
        ((None, None), (-1, -1)),
        ((2**31 - 1, 2**31 - 1), (-1, -1)),
        ((2**31, 2**31), (-1, -1)),
        ((2**63, 2**70), (-1, -1)),
        ((2**40, 0), (-1, 0)),
        ((0, 2**40), (0, -1)),
    ],
    ids=str,
)
@pytest.mark.parametrize(("len_q", "len_k"), [(10, 4), (4, 10), (130, 70)])
def test_sides_wider_than_the_keys_are_unbounded(
    kernel: str, len_q: int, len_k: int, window_size: Any, same_as: tuple[int, int]
) -> None:
    assert (
        seen(kernel, len_q, len_k, window_size=window_size)
        == seen(kernel, len_q, len_k, window_size=same_as)
    ).all()


def test_a_window_narrows_a_causal_mask_and_never_widens_it(kernel: str) -> None:
    causal = seen(kernel, 70, 70, causal=True)
    assert (seen(kernel, 70, 70, causal=True, window_size=(-1, 30)) == causal).all()
    narrow = seen(kernel, 70, 70, causal=True, window_size=(5, 30))
    assert (narrow == causal & seen(kernel, 70, 70, window_size=(5, -1))).all()


def test_alignments_agree_where_lengths_are_equal(kernel: str) -> None:
    for options in ({"causal": True}, {"window_size": (9, 3)}):
        bottom = seen(kernel, 65, 65, alignment="bottom_right", **options)
        assert (bottom == seen(kernel, 65, 65, alignment="top_left", **options)).all()


@pytest.mark.parametrize(("len_q", "len_k"), [(256, 128), (128, 256), (200, 70)])
def test_both_alignments_of_a_causal_mask(kernel: str, len_q: int, len_k: int) -> None:
    rows, keys = np.ogrid[:len_q, :len_k]
    bottom = seen(kernel, len_q, len_k, causal=True)
    assert (bottom == (keys <= rows + len_k - len_q)).all()
    top = seen(kernel, len_q, len_k, causal=True, alignment="top_left")
    assert (top == (keys <= rows)).all()
