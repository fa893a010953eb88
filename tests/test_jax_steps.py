"""JAX on a GPU that is none: kernels that are loaded while it traces, and run on XLA's buffers."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_backward import NAME, SUMS, FakeBackward, install_backward
from fake_gpu import Guard
from gradients import seeds_of
from harness import same_bits
from kits import Kit, opened
from test_interop_jax import placed
from test_replay import EVERY, NAMES, draw, modifiers

import cupyflash
from cupyflash import Gradients, UnsupportedProblem, _kernels
from cupyflash._array import HOST
from cupyflash._problem import forms

jax = pytest.importorskip("jax")
pytestmark = pytest.mark.frameworks

from cupyflash import _jax  # noqa: E402
from cupyflash._jax import program, run  # noqa: E402

STREAM = 77
BESIDE = ("attn_bias", "learnable_sink")  # what has gradients beside q, k and v


@pytest.fixture
def kit() -> Iterator[Kit]:
    with opened("jax") as kit:
        yield kit


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, kit: Kit) -> Iterator[FakeBackward]:
    """Put a GPU in the place of JAX's CPU, whose buffers the host can read."""
    fake = install_backward(monkeypatch)
    buffer, compute = run._buffer, run.compute

    def with_stream(call: Any, context: Any, *rest: Any) -> None:
        compute(call, SimpleNamespace(stream=STREAM), *rest)

    monkeypatch.setattr(_jax, "_devices", lambda arrays: [0])
    monkeypatch.setattr(_jax, "device_of", lambda x, name: 0)
    monkeypatch.setattr(run, "_buffer", lambda x: buffer(x)._replace(device=0, framework="jax"))
    monkeypatch.setattr(run, "device_guard", Guard)
    monkeypatch.setattr(program, "compute", with_stream)
    caches: list[Any] = [program._forward, program._backward]
    caches += [run.bound_of, run.steps_of, run.row_of, run.takes]
    for cache in caches:
        cache.cache_clear()
    yield fake
    for cache in caches:
        cache.cache_clear()


def options_of(names: list[str], rng: np.random.Generator) -> dict[str, Any]:
    """Draw modifiers, of the dtypes that JAX has."""
    options: dict[str, Any] = {}
    for name in names:
        options |= modifiers(rng)[name]
    if options.get("attn_bias") is not None and options["attn_bias"].dtype == np.float64:
        options["attn_bias"] = options["attn_bias"].astype(np.float32)
    return options


def pull(q: Any, k: Any, v: Any, dout: Any, dlse: Any, beside: Any, **options: Any) -> Any:
    """Return the gradients of a call, by JAX, of all that has one."""
    packed = "cu_seqlens_q" in options
    function = cupyflash.attention_varlen if packed else cupyflash.attention
    f = lambda q, k, v, beside: function(q, k, v, return_lse=True, **options, **beside)  # noqa: E731
    return jax.vjp(f, q, k, v, beside)[1]((dout, dlse))


def compare(
    results: Any, arrays: list[np.ndarray], dout: Any, dlse: Any, **options: Any
) -> Gradients:
    """Compare with the oracle's gradients on the host: the kernel is the oracle."""
    dq, dk, dv, beside = results
    _, pullback = cupyflash.attention_vjp(*arrays, **options, kernel="reference")
    expected = pullback(dout, dlse)
    found = Gradients(dq, dk, dv, *(beside.get(name) for name in BESIDE))
    for name, x, y in zip(Gradients._fields, found, expected, strict=True):
        assert (x is None) == (y is None), name
        if x is not None:
            x = np.asarray(x)
            assert (x.shape, x.dtype) == (y.shape, y.dtype), name
            # The scale of the scores is one of fp32 in Params.
            np.testing.assert_allclose(
                x.astype(float), y.astype(float), rtol=2e-3, atol=1e-6, err_msg=name
            )
    return found


@pytest.mark.parametrize("names", [*([name] for name in NAMES), EVERY, []], ids="-".join)
def test_kernels_are_loaded_while_tracing_and_take_new_buffers(
    names: list[str], fake: FakeBackward, kit: Kit, rng: np.random.Generator
) -> None:
    options = options_of(names, rng)
    beside = {name: options[name] for name in BESIDE if name in options}
    fixed = {name: x for name, x in placed(kit, options).items() if name not in beside}
    compiled = jax.jit(lambda *arrays: pull(*arrays, **fixed))
    traced = 0
    for _ in range(3):
        arrays = draw(rng)
        seeds = seeds_of(arrays[0], arrays[2])
        beside = {name: rng.standard_normal(x.shape).astype(x.dtype) for name, x in beside.items()}
        there = {name: kit.put(x) for name, x in beside.items()}
        operands = [*map(kit.put, (*arrays, *seeds)), there]
        if not traced:
            compiled.lower(*operands)
            traced = len(fake.gpu.loaded)
            assert not fake.launches
        results = compiled(*operands)
        compare(results, arrays, *seeds, **options | beside)
    assert len(fake.gpu.loaded) == traced
    assert [launch.step for launch in fake.launches] == [0, 1] * 3
    assert {launch.stream for launch in (*fake.launches, *fake.gpu.launches)} == {STREAM}
    assert {*Guard.entered} == {0}


def test_packed_sequences(fake: FakeBackward, kit: Kit, rng: np.random.Generator) -> None:
    arrays = draw(rng, packed=True)
    seeds = seeds_of(arrays[0], arrays[2])
    ends = [np.array(x, np.int32) for x in ([0, 3, 9], [0, 6, 13])]
    bias = rng.standard_normal((2, 1, 9, 13)).astype(np.float16)
    f = jax.jit(lambda *x: pull(*x[:5], {"attn_bias": x[5]}, cu_seqlens_q=x[6], cu_seqlens_k=x[7]))
    results = f(*map(kit.put, (*arrays, *seeds, bias, *ends)))
    options = {"cu_seqlens_q": ends[0], "cu_seqlens_k": ends[1], "attn_bias": bias}
    compare(results, arrays, *seeds, **options)


ROWS = [row for row in _kernels.KERNELS if row.op == "backward" and row.arch is not None]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
@pytest.mark.parametrize("names", [[], *([name] for name in NAMES), EVERY], ids="-".join)
def test_the_rows_of_the_table_find_what_they_need(
    names: list[str],
    row: Any,
    fake: FakeBackward,
    kit: Kit,
    monkeypatch: pytest.MonkeyPatch,
    rng: np.random.Generator,
) -> None:
    """Addresses by their names, and scratch."""
    bound: list[Any] = []
    bind = run.bind_steps
    monkeypatch.setattr(run, "bind_steps", lambda *x: bound.append(bind(*x)) or bound[-1])
    others = [x for x in _kernels.KERNELS[1:] if x.op != "backward" or x is row]
    monkeypatch.setattr(_kernels, "KERNELS", (*others,))
    fake.gpu.capability = row.arch.start
    options = options_of(names, rng)
    beside = {name: kit.put(options[name]) for name in BESIDE if name in options}
    fixed = {name: x for name, x in placed(kit, options).items() if name not in beside}
    arrays = draw(rng)
    call = lambda *x: pull(*x, **fixed)  # noqa: E731
    try:
        jax.jit(call).lower(*map(kit.put, (*arrays, *seeds_of(arrays[0], arrays[2]))), beside)
    except UnsupportedProblem as refusal:
        pytest.skip(str(refusal))
    assert row.name in {symbol for _, symbol, _ in fake.gpu.compiled}
    given = {"q", "k", "v", "dout", "out", "lse", "dlse", "dq", "dk", "dv"}
    given |= {"dbias"} if "attn_bias" in options else set()
    given |= {"dsink"} if "learnable_sink" in options else set()
    _, own = forms(options.get("mask"), options.get("segment_ids"))
    for steps in bound:
        assert steps.places <= given | options.keys() | own.keys()
        assert steps.scratch > 0


def several(rng: np.random.Generator, count: int, batch: int) -> list[np.ndarray]:
    """Draw q, k, v, dout and dlse of several items."""
    items = []
    for _ in range(count):
        arrays = [x[:batch] for x in draw(rng)]
        items.append([*arrays, *(rng.standard_normal(x.shape).astype(x.dtype)
                                 for x in seeds_of(arrays[0], arrays[2]))])  # fmt: skip
    return [np.stack(x) for x in zip(*items, strict=True)]


NAMED = ("q", "k", "v", "dout", "dlse")


def few_entries(problem: Any) -> str | None:
    """Why a kernel does not take the entries of many items at once, or None."""
    return None if problem.batch <= 2 else f"takes 2 entries, got {problem.batch}"


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize(
    ("batch", "mapped", "launches"),
    [
        (2, NAMED, (1, 3)),  # the items join the batch
        (1, NAMED, (1, 3)),
        (1, ("q", "dout", "dlse"), (1, 3)),  # as does what all items share, by a stride of 0
        (1, ("k",), (1, 3)),
        (1, ("dout",), (3, 3)),  # not the log-sum-exp, which kernels read as contiguous
        (2, ("q", "dout", "dlse"), (3, 3)),  # not where it has a batch itself
    ],
    ids=str,
)
def test_what_vmap_adds_joins_the_batch_where_strides_allow_it(
    batch: int,
    mapped: tuple[str, ...],
    launches: tuple[int, int],
    few: bool,
    fake: FakeBackward,
    kit: Kit,
    rng: np.random.Generator,
) -> None:
    given = [
        x if name in mapped else x[0] for name, x in zip(NAMED, several(rng, 3, batch), strict=True)
    ]
    axes = [0 if name in mapped else None for name in NAMED]
    if few:
        object.__setattr__(fake.row, "unsupported", few_entries)
    f = jax.jit(jax.vmap(lambda *x: pull(*x, {}), axes))
    results = f(*map(kit.put, given))
    assert len(fake.launches) == 2 * launches[few]
    for i in range(3):
        item = [x if axis is None else x[i] for x, axis in zip(given, axes, strict=True)]
        compare((*(x[i] for x in results[:3]), {}), item[:3], *item[3:])


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("mapped", ["q", "k", "qkv"])
def test_items_run_by_the_kernel_of_the_trace(
    arch: int, mapped: str, fake: FakeBackward, kit: Kit, rng: np.random.Generator
) -> None:
    fake.gpu.capability = arch
    many = [rng.standard_normal((3, 1, n, 2, 16)).astype(np.float16) for n in (9, 13, 13)]
    given = [x if name in mapped else x[0] for name, x in zip("qkv", many, strict=True)]
    axes = [0 if name in mapped else None for name in "qkv"]
    compiled = jax.jit(jax.vmap(lambda *x: cupyflash.attention(*x, causal=True), axes))
    compiled.lower(*map(kit.put, given))
    (loaded,) = fake.gpu.loaded
    out = np.asarray(compiled(*map(kit.put, given)))
    assert fake.gpu.loaded == [loaded]
    assert f"attention_fwd_sm{arch}" in {symbol for _, symbol, _ in fake.gpu.compiled}
    assert len(fake.gpu.launches) == 1
    for i in range(3):
        item = [x if axis is None else x[i] for x, axis in zip(given, axes, strict=True)]
        assert same_bits(out[i], cupyflash.attention(*item, causal=True))


def test_a_kernel_by_name_is_given_what_it_takes(
    fake: FakeBackward, kit: Kit, rng: np.random.Generator
) -> None:
    object.__setattr__(fake.row, "unsupported", few_entries)
    q, k, v, douts, dlses = several(rng, 3, 1)
    arrays = [q[0], k[0], v[0]]
    outs, lses = (np.stack([x] * 3) for x in cupyflash.attention(*arrays, return_lse=True))

    def f(dout: Any, out: Any, lse: Any, dlse: Any) -> Gradients:
        there = (kit.put(x) for x in arrays)
        return cupyflash.attention_backward(dout, *there, out, lse, dlse=dlse, kernel=NAME)

    grads = jax.vmap(f)(*map(kit.put, (douts, outs, lses, dlses)))
    assert len(fake.launches) == 6
    for i in range(3):
        compare((*(x[i] for x in grads[:3]), {}), arrays, douts[i], dlses[i])


def test_items_have_scratch_of_their_own(
    fake: FakeBackward, kit: Kit, rng: np.random.Generator
) -> None:
    many = several(rng, 3, 2)
    biases = rng.standard_normal((3, 4, 9, 13)).astype(np.float32)
    f = jax.jit(jax.vmap(lambda *x: pull(*x[:5], {"attn_bias": x[5]})))
    results = f(*map(kit.put, (*many, biases)))
    for i in range(3):
        item = [x[i] for x in many]
        beside = {"attn_bias": results[3]["attn_bias"][i]}
        own = (*(x[i] for x in results[:3]), beside)
        compare(own, item[:3], *item[3:], attn_bias=biases[i])
    bases = [launch.words["scratch"] - SUMS for launch in fake.launches]
    assert bases[::2] == bases[1::2]
    assert all(base % 256 == 0 for base in bases)
    assert np.diff(np.unique(bases)).min() >= SUMS + 8 * 2 * 4 * 9


def test_items_of_odd_bytes_are_planned_as_they_lie(
    fake: FakeBackward, kit: Kit, rng: np.random.Generator
) -> None:
    widths: list[int] = []
    steps = fake.row.steps
    object.__setattr__(fake.row, "steps", lambda p, o, b: widths.append(p.width) or steps(p, o, b))
    many = [x[:, :, :, :1] for x in several(rng, 3, 2)[:3]]
    many = [x[..., :3] if n == 2 else x for n, x in enumerate(many)]
    seeds = [
        np.stack(x) for x in zip(*(seeds_of(many[0][0], many[2][0]) for _ in "123"), strict=True)
    ]
    sinks = rng.standard_normal((3, 1)).astype(np.float32)  # so that items do not join the batch
    f = jax.vmap(lambda *x: pull(*x[:5], {"learnable_sink": x[5]}))
    results = f(*map(kit.put, (*many, *seeds, sinks)))
    for i in range(3):
        beside = {"learnable_sink": results[3]["learnable_sink"][i]}
        own = (*(x[i] for x in results[:3]), beside)
        item = [x[i] for x in (*many, *seeds)]
        compare(own, item[:3], *item[3:], learnable_sink=sinks[i])
    assert {*widths} == {2}


def test_a_call_traced_for_the_host_has_scratch_for_a_gpu(
    fake: FakeBackward, kit: Kit, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    """Arrays that are committed to a GPU while the host is JAX's default device."""
    monkeypatch.setattr(_jax, "_devices", lambda arrays: [HOST, 0])
    arrays = draw(rng)
    seeds = seeds_of(arrays[0], arrays[2])
    compiled = jax.jit(lambda *x: pull(*x, {}))
    compiled.lower(*map(kit.put, (*arrays, *seeds)))
    assert not fake.gpu.loaded
    compare(compiled(*map(kit.put, (*arrays, *seeds))), arrays, *seeds)
    assert len(fake.launches) == 2


def test_what_no_kernel_differentiates_is_refused_before_the_forward_pass(
    fake: FakeBackward, kit: Kit, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    object.__setattr__(fake.row, "unsupported", lambda problem: "refuses")
    monkeypatch.setattr(_kernels, "KERNELS", (fake.row, *[
        row for row in _kernels.KERNELS if row.op == "forward"
    ]))  # fmt: skip
    q, k, v = map(kit.put, draw(rng))
    assert cupyflash.attention(q, k, v).shape == q.shape
    launches = len(fake.gpu.launches)
    with pytest.raises(UnsupportedProblem, match=r"^no kernel for backward: .* refuses"):
        jax.vjp(cupyflash.attention, q, k, v)
    assert len(fake.gpu.launches) == launches
