"""Documents on the emulator: both forward kernels pass over the keys of others, and are right.

Few types of masks, for g++ takes longer than a run.
"""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from emulated import check, needs_compiler, run
from harness import GPU_KERNEL, HOPPER, attend

import cupyflash
from cupyflash import _problem
from cupyflash.masks import Segments

pytestmark = needs_compiler

DIM = 64
BATCH, HEADS = 2, 2


def inputs(len_q: int, len_k: int, batch: int = BATCH) -> tuple[np.ndarray, ...]:
    """Return q of two heads, and k and v of one that they share."""
    rng = np.random.default_rng(5)
    shapes = ((batch, len_q, HEADS, DIM), *[(batch, len_k, 1, DIM)] * 2)
    q, k, v = (rng.standard_normal(shape).astype(np.float16) for shape in shapes)
    return q, k, v


def pieces(*lengths: int, names: Any = None) -> np.ndarray:
    """Return the ids of documents of these lengths, 0, 1, ... or as they are called."""
    names = range(len(lengths)) if names is None else names
    return np.repeat(np.array(names, np.int32), lengths)


# Ends at every place of a tile and a block: beyond the first of two, at its end, one after it.
ENDS = (63, 2, 63, 1, 127, 44)
ANY_ORDER = (7, -9, 40, 3, 12, 2**31 - 1)
KINDS: dict[str, Callable[[], np.ndarray]] = {
    "rising": lambda: np.stack([pieces(*ENDS), pieces(128, 128, 44)]),
    "in any order": lambda: np.stack(
        [pieces(*ENDS, names=ANY_ORDER), pieces(*ENDS[::-1], names=ANY_ORDER[::-1])]
    ),
    "again": lambda: np.stack(
        [pieces(*ENDS, names=(0, 1, 0, 1, 2, 1)), pieces(250, 1, 49, names=(4, 5, 4))]
    ),
    "scattered": lambda: np.random.default_rng(3).integers(0, 3, (2, 300), np.int32),
    "one": lambda: np.array([[4], [5]], np.int32).repeat(300, 1),
}
KERNELS = pytest.mark.parametrize("kernel", [GPU_KERNEL, HOPPER])


@KERNELS
@pytest.mark.parametrize("kind", KINDS)
def test_documents_in_any_order(kernel: str, kind: str) -> None:
    """Each entry of the batch has its own; queries are the last of them."""
    ids = KINDS[kind]()
    mask = Segments(ids[:, 60:], ids)
    check(*inputs(240, 300), kernel=kernel, seeds=(0,), causal=True, mask=mask)


def test_documents_in_8_bits() -> None:
    """Whole blocks of one document, and blocks of several."""
    ids = pieces(30, 560, 90, 20)
    q, k, v = (x.astype(ml_dtypes.float8_e4m3fn) for x in inputs(260, 700, 1))
    mask = Segments(ids[None, 440:], ids[None])
    check(q, k, v, kernel=HOPPER, seeds=(0,), causal=True, mask=mask)


@KERNELS
def test_queries_of_documents_without_keys(kernel: str) -> None:
    """Tiles that see nothing among those that do; every query of one, and some of another."""
    ids = pieces(100, 100, 100)
    queries = np.where(np.arange(300) // 64 % 3 == 1, 9, ids).astype(np.int32)
    mask = Segments(queries, ids)
    out, lse = check(*inputs(300, 300), kernel=kernel, causal=True, mask=mask)
    assert (out[:, queries == 9] == 0).all()
    assert (lse[..., queries == 9] == -np.inf).all()


@KERNELS
def test_documents_within_a_window(kernel: str) -> None:
    mask = Segments(KINDS["rising"]())
    check(*inputs(300, 300), kernel=kernel, seeds=(0,), window_size=(70, 5), mask=mask)


@KERNELS
def test_documents_of_lengths_in_use(kernel: str) -> None:
    options = {"seqused_q": np.array([300, 0, 77]), "seqused_k": np.array([211, 64, 300])}
    ids = np.concatenate([KINDS["rising"](), pieces(60, 10, 230)[None]])
    check(*inputs(300, 300, 3), kernel=kernel, causal=True, mask=Segments(ids), **options)


@KERNELS
def test_documents_of_packed_sequences_longer_than_their_ids(
    kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positions past an array of ids have its last."""
    monkeypatch.setattr(_problem, "_values", lambda array: None)  # as a GPU's are
    q, k, v = (x[0] for x in inputs(300, 300))
    cu = np.array([0, 190, 190, 300])
    mask = Segments(np.stack([pieces(*ENDS[:3]), *[pieces(30, 98)] * 2]))
    options = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "causal": True}
    check(q, k, v, kernel=kernel, seeds=(0,), mask=mask, **options)


def test_results_are_those_of_the_documents_alone() -> None:
    """Also by the bit, where documents begin at whole tiles."""
    lengths = (128, 256, 128)
    ids = pieces(*lengths)
    q, k, v = inputs(512, 512, 1)
    for kernel in (GPU_KERNEL, HOPPER):
        out, _ = run(q, k, v, kernel=kernel, causal=True, segment_ids=ids)
        for first, end in zip((0, 128, 384), np.cumsum(lengths), strict=True):
            part = (x[:, first:end] for x in (q, k, v))
            alone, _ = run(*part, kernel=kernel, causal=True, segment_ids=np.zeros(1, np.int32))
            np.testing.assert_array_equal(out[:, first:end], alone)


def multiplied(kernel: str, arrays: tuple[np.ndarray, ...], **options: Any) -> tuple[int, int]:
    """Return how many products a call issued, and the bytes of its tiles."""
    with cupyflash.emulate() as session:
        attend(kernel, *arrays, **options)
    stats = session.stats[kernel]
    return stats.mma + stats.wgmma, stats.tiles_loaded_bytes


@KERNELS
@pytest.mark.parametrize("names", [(0, 1, 2), (70, -8, 3000)], ids=str)
def test_blocks_of_other_documents_are_left_out(kernel: str, names: tuple[int, ...]) -> None:
    """What is loaded and multiplied for three documents is three times that for one alone."""
    arrays = inputs(768, 768, 1)
    ids = pieces(256, 256, 256, names=names)
    found = multiplied(kernel, arrays, causal=True, segment_ids=ids)
    first = tuple(x[:, :256] for x in arrays)
    alone = multiplied(kernel, first, causal=True, segment_ids=ids[:1])
    assert found == tuple(3 * n for n in alone)
    whole = multiplied(kernel, arrays, causal=True, segment_ids=ids[:1])
    assert whole[0] > 2 * found[0]
    assert whole[1] > 1.8 * found[1]
