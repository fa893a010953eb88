"""The CPU path by itself: every modifier against the oracle, its tiles, threads and memory."""

import math
import subprocess
import sys
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from drawn import DTYPES, MODIFIERS, SMALL, attend, bfloat16, inputs, normal, problems
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strided import Strided

from cupyflash import _blas, _cpu, _online, _threads, _tiles
from cupyflash._accuracy import assert_accurate
from cupyflash.masks import Band, PrefixLM, Segments

Result = tuple[np.ndarray, np.ndarray]


@pytest.fixture(params=["small tiles", "tiles"])
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test with the real tiles and with tiles so small that a small problem has many."""
    if request.param == "small tiles":
        for name, size in SMALL.items():
            monkeypatch.setattr(_online, name, size)


def check(q: np.ndarray, k: np.ndarray, v: np.ndarray, **options: Any) -> Result:
    """Hold the CPU path against the oracle; return (out, lse)."""
    result = attend(q, k, v, **options)
    assert_accurate(*result, q, k, v, **options)
    return result


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("modifier", MODIFIERS)
def test_modifier(modifier: str, dtype: np.dtype, rng: np.random.Generator) -> None:
    check(*inputs(rng, dtype=dtype), **MODIFIERS[modifier](rng))


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("sink", [math.nan, math.inf, -math.inf, 1e30, -1e30], ids=str)
@pytest.mark.parametrize("hidden", ["by the mask", "by lengths"])
def test_a_sink_of_any_value_leaves_rows_without_keys_alone(
    sink: float, hidden: str, rng: np.random.Generator
) -> None:
    operands = inputs(rng)
    mask = np.ones((37, 53), bool)
    mask[3:9] = mask[20] = False
    options = {"attn_mask": mask} if hidden == "by the mask" else {"seqused_k": np.int32([0, 53])}
    out, lse = check(*operands, learnable_sink=np.full(4, sink, np.float32), **options)
    blind = (slice(None), slice(3, 9)) if hidden == "by the mask" else (0,)
    assert (out[blind] == 0).all()
    np.testing.assert_array_equal(np.moveaxis(lse, 1, 2)[blind], np.float32(sink))


@pytest.mark.usefixtures("tiles", "threads")
@pytest.mark.parametrize("modifier", MODIFIERS)
def test_modifier_in_threads(modifier: str, rng: np.random.Generator) -> None:
    operands, options = inputs(rng), MODIFIERS[modifier](rng)
    first = check(*operands, **options)
    for x, y in zip(first, attend(*operands, **options), strict=True):
        assert x.tobytes() == y.tobytes(), "a repeated call gave other bits"


@settings(
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=250,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(problem=problems(), few=st.sampled_from([0, 512]))
def test_random_problem(
    problem: tuple[list[Strided], dict[str, Any]], few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays, options = problem
    with monkeypatch.context() as patch:
        # Many small tiles round more often than the bound of a few fp32 elements allows.
        if arrays[0].dtype != np.float32:
            patch.setattr(_online, "BLOCK_Q", 16)
            patch.setattr(_online, "BLOCK_K", 24)
            patch.setattr(_tiles, "FEW_KEYS", few)
            patch.setattr(_tiles, "AMORTIZED", 8)
        check(*(x.host for x in arrays), **options)


# Values that attention kernels have been seen to get wrong.


def filled(shape: tuple[int, ...], value: float, dtype: Any) -> np.ndarray:
    return np.full(shape, value, dtype)


@pytest.mark.parametrize("len_k", [1, 2, 65, 1500])
def test_huge_scores(len_k: int) -> None:
    x = filled((1, len_k, 1, 64), 133120.0, bfloat16)
    out, lse = check(x[:, :1], x, x)
    assert (out == x[:, :1]).all()
    assert (lse == np.float32(133120.0**2 * 8)).all()


def test_scores_beyond_float16() -> None:
    q = filled((1, 2, 1, 64), 350, np.float16)
    v = np.float16([1, 2, 4]).reshape(1, 3, 1, 1)
    out, _ = attend(q, filled((1, 3, 1, 64), 350, np.float16), v)
    assert (out == np.float16(7 / 3)).all()


@pytest.mark.parametrize(
    ("dtype", "largest"),
    [("float16", 65504), (bfloat16, 3e38), ("float32", 3e38)],
    ids=str,
)
def test_sums_of_huge_values_do_not_overflow(
    dtype: Any, largest: float, rng: np.random.Generator
) -> None:
    q, k, v = inputs(rng, 40, 1030, dtype=dtype)
    v = (largest * rng.uniform(0.5, 1, v.shape)).astype(dtype)
    check(q, k[:, :500], v[:, :500])
    out, _ = attend(q, k, v)
    assert np.isfinite(out).all()


@pytest.mark.usefixtures("tiles")
def test_very_negative_scores() -> None:
    q, k = filled((1, 3, 2, 128), 64, bfloat16), filled((1, 70, 2, 128), -64, bfloat16)
    out, _ = check(q, k, filled((1, 70, 2, 5), 1, bfloat16))
    assert (out == 1).all()


def test_softcap_comes_before_the_bias() -> None:
    zeros, bias = np.zeros((1, 4, 1, 2), np.float32), np.float32([0, 0, 10, 0])
    v = np.eye(4, dtype=np.float32)[None, :, None]
    out, _ = check(zeros, zeros, v, softcap=1.0, attn_bias=bias)
    assert (out[0, :, 0, 2] > 0.999).all(), "e^10 / (e^10 + 3), and not e / (e + 3)"


@pytest.mark.usefixtures("tiles")
def test_the_lowest_finite_bias_hides_nothing(rng: np.random.Generator) -> None:
    q, k, v = inputs(rng)
    lowest = np.full((37, 53), np.finfo(np.float32).min, np.float32)
    lowest[3, 20:] = 0
    check(q, k, v, attn_bias=lowest)
    check(
        *(x.astype(bfloat16) for x in (q, k, v)),
        attn_bias=np.float32([0, -1e4, -3e38] * 17 + [0, 0]),
    )


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_hidden_does_not_matter(value: float, rng: np.random.Generator) -> None:
    """Neither k under a mask, nor k and v beyond a length or outside of the band."""
    q, k, v = inputs(rng)
    mask = np.arange(53) % 7 != 3
    for hidden, poison_v, options in (
        (~mask, False, {"attn_mask": mask}),
        (np.arange(53) >= 30, True, {"seqused_k": np.int32([30, 30])}),
        (np.arange(53) >= 37, True, {"causal": True, "alignment": "top_left"}),
        (np.arange(53) < 10, True, {"window_size": (6, -1)}),
    ):
        clean = attend(q, k, v, **options)
        bad_k, bad_v = k.copy(), v.copy()
        bad_k[:, hidden] = value
        if poison_v:
            bad_v[:, hidden] = value
        for x, y in zip(clean, attend(q, bad_k, bad_v, **options), strict=True):
            assert x.tobytes() == y.tobytes()


@pytest.mark.usefixtures("tiles")
def test_nan_in_a_query_stays_in_its_row(rng: np.random.Generator) -> None:
    q, k, v = inputs(rng)
    clean, clean_lse = attend(q, k, v)
    q[1, 20, 2, 3] = np.nan
    out, lse = attend(q, k, v)
    assert np.isnan(out[1, 20, 2]).all()
    assert np.isnan(lse[1, 2, 20])
    out[1, 20, 2], lse[1, 2, 20] = clean[1, 20, 2], clean_lse[1, 2, 20]
    assert out.tobytes() == clean.tobytes()
    assert lse.tobytes() == clean_lse.tobytes()


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["q", "k", "v", "sink"])
def test_non_finite_inputs(name: str, value: float, rng: np.random.Generator) -> None:
    q, k, v = inputs(rng)
    sink = normal(rng, 4)
    {"q": q, "k": k, "v": v, "sink": sink}[name][1, ...] = value
    check(q, k, v, learnable_sink=sink)


@pytest.mark.usefixtures("tiles")
def test_rows_beyond_the_length_are_blank_and_those_without_keys_are_empty(
    rng: np.random.Generator,
) -> None:
    q, k, v = inputs(rng)
    q[0, 5:] = k[0, 2:] = v[0, 2:] = k[1] = v[1] = np.nan
    used = {"seqused_q": np.int32([5, 37]), "seqused_k": np.int32([2, 0])}
    out, lse = attend(q, k, v, causal=True, **used)
    assert np.isfinite(out).all()
    assert (out[0, :3] == 0).all(), "rows 0 to 2 stand before the first key"
    assert (out[0, 3:5] != 0).all()
    assert (out[0, 5:] == 0).all()
    assert (out[1] == 0).all()
    assert (np.isneginf(lse[0]) == (np.arange(37) < 3) | (np.arange(37) >= 5)).all()
    assert np.isneginf(lse[1]).all()
    sink = np.float32([1, 2, 3, 4])
    _, lse = attend(q, k, v, causal=True, learnable_sink=sink, **used)
    assert (lse[0, :, :3] == sink[:, None]).all()
    assert np.isneginf(lse[0, :, 5:]).all()
    assert (lse[1] == sink[:, None]).all()


@pytest.mark.parametrize("axis", ["batch", "len_q", "len_k", "heads", "dim", "dim_v"])
def test_empty_dimension(axis: str, rng: np.random.Generator) -> None:
    sizes = {"batch": 2, "len_q": 3, "len_k": 4, "heads": 4, "dim": 5, "dim_v": 6, axis: 0}
    arrays = inputs(rng, **sizes, heads_k=0 if axis == "heads" else 2)
    for options in ({}, {"causal": True}):
        out, lse = attend(*arrays, **options)
        assert_accurate(out, lse, *arrays, **options)


def test_mean_of_v_where_the_queries_have_no_columns() -> None:
    v = np.arange(4, dtype=np.float32).reshape(1, 4, 1, 1)
    out, _ = check(np.zeros((1, 2, 1, 0), np.float32), np.zeros((1, 4, 1, 0), np.float32), v)
    assert (out == 1.5).all()


def test_unaligned_and_read_only_inputs(rng: np.random.Generator) -> None:
    arrays = inputs(rng)
    shifted = [
        np.frombuffer(b"x" + x.tobytes(), x.dtype, x.size, offset=1).reshape(x.shape)
        for x in arrays
    ]
    for x, y in zip(attend(*arrays), attend(*shifted), strict=True):
        assert x.tobytes() == y.tobytes()


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("layout", ["heads_first", "reversed_rows", "every_other_column"])
def test_outputs_of_any_strides(layout: str, rng: np.random.Generator) -> None:
    q, k, v = inputs(rng)
    out = Strided.output((2, 37, 4, 12), np.float32, layout)
    around, held = ~out.inside, out.storage.copy()
    lse = np.empty((2, 37, 4), np.float32).swapaxes(1, 2)
    _cpu.attention(q, k, v, out.host, lse, band=Band(), scale=0.2)
    assert (out.storage[around] == held[around]).all(), "written outside of the output"
    assert_accurate(np.ascontiguousarray(out.host), lse, q, k, v, softmax_scale=0.2)


def test_lse_is_optional(rng: np.random.Generator) -> None:
    q, k, v = inputs(rng)
    out = np.empty((2, 37, 4, 12), np.float32)
    _cpu.attention(q, k, v, out, None, band=Band(), scale=0.2, seqused_q=np.int32([3, 37]))
    assert_accurate(out, None, q, k, v, softmax_scale=0.2, seqused_q=[3, 37])


@pytest.mark.parametrize(("batch", "heads"), [(70000, 1), (1, 70000)])
def test_many_batch_entries_or_heads(batch: int, heads: int, rng: np.random.Generator) -> None:
    q, k, v = (normal(rng, batch, 1, heads, 4) for _ in "qkv")
    assert (attend(q, k, v)[0] == v).all()
    used = np.arange(batch, dtype=np.int32) % 2
    out, lse = attend(q, k, v, seqused_k=used)
    assert (out == v * used[:, None, None, None]).all()
    assert (np.isneginf(lse[:, 0, 0]) == (used == 0)).all()


@pytest.mark.parametrize("option", ["nothing", "causal", "alibi", "window", "everything"])
def test_tiles_of_the_real_size(option: str, rng: np.random.Generator) -> None:
    options = {
        "nothing": {},
        "causal": {"causal": True},
        "alibi": {"alibi_slopes": np.float32([0.01, 0.3])},
        "window": {"window_size": (1500, 300)},
        "everything": {
            "causal": True,
            "softcap": 3.0,
            "attn_bias": normal(rng, 2, 1, 2300),
            "attn_mask": rng.random((600, 2300)) < 0.9,
            "learnable_sink": np.float32([1, 2]),
            "dropout_p": 0.1,
            "rng_state": (1, 2),
        },
    }[option]
    check(*inputs(rng, 600, 2300, batch=1, heads=2, heads_k=1, dim=64, dim_v=64), **options)


@pytest.mark.parametrize("option", ["prefix", "segments", "both"])
def test_tiles_that_masks_hide_are_skipped(
    option: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_online, "BLOCK_Q", 16)
    monkeypatch.setattr(_online, "BLOCK_K", 16)
    ids = np.repeat(np.arange(4), 16)
    mask, tiles = {
        "prefix": (PrefixLM(np.array([32, 0])), (2 + 2 + 3 + 4) + (1 + 2 + 3 + 4)),
        "segments": (Segments(ids), 2 * 4),
        "both": (Segments(ids, ids[::-1]) & PrefixLM(0), 2 * 2),
    }[option]
    given: list[Any] = []
    update = _online._update
    monkeypatch.setattr(
        _online,
        "_update",
        lambda call, tile, *rest: (given.append(tile), update(call, tile, *rest)),
    )
    operands = inputs(rng, 64, 64, heads=1, heads_k=1)
    monkeypatch.setattr(_cpu, "SHORT", 64)
    check(*operands, mask=mask)
    assert sum((tile.heads[0].stop - tile.heads[0].start) for tile in given) == tiles


# Memory, warnings, threads.


def test_memory_is_linear_in_the_length() -> None:
    length = 32768
    rng = np.random.default_rng(0)
    q, k, v = (normal(rng, 1, length, 1, 64) for _ in "qkv")
    out, lse = np.empty_like(q), np.empty((1, 1, length), np.float32)
    keys = np.broadcast_to(rng.random(length) < 0.9, (1, 1, length, length))
    bias = np.broadcast_to(normal(rng, length), (1, 1, length, length))
    tracemalloc.start()
    try:
        _cpu.attention(
            q, k, v, out, lse, band=Band(256, 0), scale=0.125, attn_mask=keys, attn_bias=bias
        )
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2 * q.nbytes, f"{peak / 2**20:.1f} MiB beside {q.nbytes / 2**20:.1f} of q"
    rows = slice(length - 100, length)
    seen = slice(length - 400, length)
    assert_accurate(
        *(out[:, rows], lse[:, :, rows]),
        *(q[:, rows], k[:, seen], v[:, seen]),
        window_size=(256, 0),
        attn_mask=keys[0, 0, :1, seen],
        attn_bias=bias[0, 0, :1, seen],
    )


def test_no_warning_and_no_floating_point_error(rng: np.random.Generator) -> None:
    q, k, v = inputs(rng)
    halves = inputs(rng, dtype=np.float16)
    q[0, 0], k[0, 0], v[0, 0], v[1, 1] = 1e30, 1e30, np.inf, np.nan
    with np.errstate(all="raise"):
        size = np.getbufsize()
        attend(q, k, v, causal=True, softcap=1e-3, attn_mask=np.zeros((37, 53), bool))
        attend(*halves, softmax_scale=1e4)
        attend(q, k, v, seqused_k=np.int32([0, 3]), learnable_sink=np.float32([np.inf] * 4))
        assert np.geterr()["over"] == "raise"
        assert np.getbufsize() == size


def test_small_problems_start_no_thread(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_threads, "ThreadPoolExecutor", None)
    attend(*inputs(rng, 200, 200))


@pytest.mark.usefixtures("threads")
def test_an_error_in_a_thread_is_raised_and_the_limit_restored(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = limits()
    monkeypatch.setattr(_online, "attend", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        attend(*inputs(rng))
    assert limits() == before


@pytest.mark.usefixtures("threads")
def test_concurrent_calls(rng: np.random.Generator) -> None:
    before = limits()
    calls = [(inputs(rng, 100 + n, 80 + 3 * n), {"causal": n % 2 == 0}) for n in range(6)]
    expected = [attend(*arrays, **options) for arrays, options in calls]
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda n: attend(*calls[n % 6][0], **calls[n % 6][1]), range(48)))
    for n, result in enumerate(results):
        for x, y in zip(result, expected[n % 6], strict=True):
            assert x.tobytes() == y.tobytes()
    assert limits() == before


def limits() -> list[int]:
    return [blas.get_num_threads() for blas in _blas._libraries()]


class Library:
    """A BLAS library that counts how often its limit is set."""

    def __init__(self) -> None:
        self.threads, self.settings = 8, 0

    def get_num_threads(self) -> int:
        return self.threads

    def set_num_threads(self, threads: int) -> None:
        self.threads, self.settings = threads, self.settings + 1


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    library = Library()
    monkeypatch.setattr(_blas, "_libraries", lambda: [library])
    return library


def test_the_last_caller_restores_the_limit(library: Library) -> None:
    limiter = _blas.OneBlasThread()
    first, second = limiter, limiter
    assert first.__enter__() == 8
    assert library.threads == 1
    assert second.__enter__() == 8, "a second caller may start as many threads as the first"
    first.__exit__()
    assert library.threads == 1, "the first caller must not restore it under the second"
    second.__exit__()
    assert library.threads == 8
    library.threads = 3  # changed from outside between two calls
    with limiter as threads:
        assert threads == 3
    assert library.threads == 3
    assert library.settings == 4


def test_a_forked_child_leaves_for_its_parent(library: Library) -> None:
    limiter = _blas.OneBlasThread()
    limiter.__enter__()
    limiter._lock.acquire()  # by a thread that the child does not have
    limiter.after_fork()
    assert library.threads == 8
    with limiter:
        assert library.threads == 1
    assert library.threads == 8


def test_a_big_call_at_exit_needs_no_new_threads() -> None:
    code = (
        "import atexit, contextlib, numpy as np, cupyflash\n"
        "from cupyflash import _threads\n"
        "_threads.PRODUCTS_PER_THREAD = 1\n"
        "_threads.one_blas_thread = contextlib.nullcontext(4)\n"
        "x = np.ones((1, 300, 4, 16), np.float32)\n"
        "atexit.register(lambda: print(cupyflash.attention(x, x, x).shape))\n"
    )
    child = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(child, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("(1, 300, 4, 16)\n", "")


@pytest.mark.usefixtures("threads")
def test_a_limit_on_threads_slows_a_call_and_does_not_fail_it(
    monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    def refused(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    operands = inputs(rng)
    expected, _ = attend(*operands)
    monkeypatch.setattr(threading.Thread, "start", refused)
    out, _ = attend(*operands)
    assert out.tobytes() == expected.tobytes()


def test_many_threads_enter_and_leave(library: Library) -> None:
    limiter = _blas.OneBlasThread()
    start = threading.Barrier(8)

    def visit(_: int) -> bool:
        start.wait()
        held = True
        for _ in range(200):
            with limiter:
                held &= library.threads == 1
        return held

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(visit, range(8)))
    assert library.threads == 8
