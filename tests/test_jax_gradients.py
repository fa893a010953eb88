"""Gradients of JAX arrays: by its transformations and by the functions that return them."""

import functools
import itertools
import os
import sys
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cases import MODIFIED, SMOKE, Case
from gradients import judge, seeds_of
from harness import hosted, run_child, same_bits
from kits import Kit, opened
from test_interop_jax import ENDS, MODIFIERS, inputs, packed_inputs, placed

import cupyflash
from cupyflash import Gradients, InvalidArgument, InvalidType, UnsupportedProblem
from cupyflash.masks import PrefixLM, Segments

jax = pytest.importorskip("jax")
pytestmark = pytest.mark.frameworks

from cupyflash._jax import program, run  # noqa: E402

INPUTS = {"dbias": "attn_bias", "dsink": "learnable_sink"}


@pytest.fixture(params=["jax", pytest.param("jax_cuda", marks=pytest.mark.gpu)])
def kit(request: pytest.FixtureRequest) -> Iterator[Kit]:
    with opened(request.param) as kit:
        yield kit


@pytest.fixture
def host() -> Iterator[Kit]:
    with opened("jax") as kit:
        yield kit


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What XLA called back for: the results, of one item each."""
    calls: list[tuple[Any, ...]] = []
    for name in ("_on_host", "_on_gpu"):
        compute = getattr(run, name)

        def record(call: Any, *rest: Any, compute: Any = compute) -> None:
            calls.append(tuple(x.name for x in call.results if x.name != "scratch"))
            compute(call, *rest)

        monkeypatch.setattr(run, name, record)
    return calls


def attend(*arrays: Any, **options: Any) -> Any:
    """Return out and lse of a call, packed where it has sequences."""
    function = cupyflash.attention_varlen if "cu_seqlens_q" in options else cupyflash.attention
    return function(*arrays, return_lse=True, **options)


def differentiated(
    kit: Kit, arrays: list[np.ndarray], dout: Any, dlse: Any, *, wrap: Any = None, **options: Any
) -> Gradients:
    """Return the gradients of a call in NumPy; `wrap` is what its function is wrapped in."""
    there = placed(kit, options)
    names = [name for name in INPUTS.values() if name in options]

    def f(*given: Any) -> Any:
        beside = dict(zip(names, given[3:], strict=True))
        return attend(*given[:3], **{**there, **beside})

    operands = [*map(kit.put, arrays), *(there[name] for name in names)]
    (out, _), pullback = jax.vjp(wrap(f) if wrap else f, *operands)
    zeros = jax.numpy.zeros(seeds_of(arrays[0], arrays[2], options.get("layout", "bshd"))[1].shape)
    given = kit.put(np.asarray(dout, out.dtype)), zeros if dlse is None else kit.put(dlse)
    dq, dk, dv, *others = (kit.get(x) for x in pullback(given))
    found = dict(zip(names, others, strict=True))
    return Gradients(dq, dk, dv, *(found.get(name) for name in INPUTS.values()))


def check(kit: Kit, arrays: list[np.ndarray], **options: Any) -> Gradients:
    """Draw dout and dlse, differentiate, and hold the gradients against the oracle."""
    dout, dlse = seeds_of(arrays[0], arrays[2], options.get("layout", "bshd"))
    own = {name: options.pop(name) for name in ("wrap", "kernel") if name in options}
    results = differentiated(kit, arrays, dout, dlse, **own, **options)
    judge(results, *arrays, dout, dlse, **options)
    return results


# Numbers


CASES = [
    *SMOKE[:4],
    *[case for case in MODIFIED if "bias_fp64" not in case.modifiers][2::7],
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_case(kit: Kit, case: Case) -> None:
    arrays = [x.host for x in case.arrays()]
    check(kit, arrays, **hosted(case.options), wrap=jax.jit)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_every_modifier_together(kit: Kit, dtype: str) -> None:
    """By the oracle on the host: this is about what goes in and comes out."""
    options = {**MODIFIERS, "dropout_p": 0.25, "rng_state": (3, 4), "causal": True}
    kernel = "reference" if kit.put(np.ones(1)).device.platform == "cpu" else None
    check(kit, inputs(dtype=getattr(ml_dtypes, dtype, dtype)), kernel=kernel, **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True, "window_size": (2, 1)},
        {"softcap": 2.0, "alignment": "top_left", "causal": True},
        {"attn_bias": np.linspace(-1, 1, 36).reshape(1, 4, 1, 9)},
        {"learnable_sink": np.array([0.0, 1.0, -1.0, 0.5]), "softmax_scale": 0.3},
        {"dropout_p": 0.25, "rng_state": (7, 0)},
        {"seqused_k": np.array([4, 9], np.int32), "seqused_q": np.array([5, 0], np.int32)},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_finite_differences_in_double_precision(host: Kit, options: dict[str, Any]) -> None:
    from jax.test_util import check_grads

    with jax.enable_x64(True):
        names = [name for name in INPUTS.values() if name in options]
        given = [*inputs(dtype=np.float64), *(options[name] for name in names)]
        operands = [host.put(x) for x in given]

        def f(*given: Any) -> Any:
            out, lse = attend(*given[:3], **options | dict(zip(names, given[3:], strict=True)))
            return out, jax.numpy.where(jax.numpy.isfinite(lse), lse, 0)

        check_grads(f, operands, order=1, modes=["rev"])
        check_grads(jax.jit(f), operands, order=1, modes=["rev"])


def test_a_bias_of_another_dtype_with_huge_negative_numbers(kit: Kit) -> None:
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((2, 24, 4, 32)).astype(ml_dtypes.bfloat16) for _ in "qkv"]
    bias = np.where(rng.random((1, 4, 24, 24)) < 0.3, np.float32(-1e9), np.float32(0))
    grads = check(kit, arrays, attn_bias=bias, wrap=jax.jit)
    assert np.isfinite(grads.dbias).all()
    assert np.any(grads.dbias)
    mask = np.arange(2 * 24).reshape(2, 1, 1, 24) % 3 > 0
    check(kit, arrays, attn_mask=mask, wrap=jax.jit)


# Transformations


def loss(*arrays: Any, **options: Any) -> Any:
    return (
        cupyflash.attention(*arrays, **{"causal": True, **options}).astype(np.float32) ** 2
    ).sum()


@pytest.mark.parametrize("deterministic", [False, True])
def test_every_way_to_a_gradient_gives_the_same(kit: Kit, deterministic: bool) -> None:
    q, k, v = map(kit.put, inputs(batch=1))
    f = functools.partial(loss, deterministic=deterministic)
    ways = {
        "grad": lambda: jax.grad(f, (0, 1, 2))(q, k, v),
        "jit of grad": lambda: jax.jit(jax.grad(f, (0, 1, 2)))(q, k, v),
        "grad of jit": lambda: jax.grad(jax.jit(f), (0, 1, 2))(q, k, v),
        "value_and_grad": lambda: jax.value_and_grad(f, (0, 1, 2))(q, k, v)[1],
        "vjp": lambda: jax.vjp(f, q, k, v)[1](np.float32(1)),
        "checkpoint": lambda: jax.grad(jax.checkpoint(f), (0, 1, 2))(q, k, v),
        "jit of checkpoint": lambda: jax.jit(jax.grad(jax.checkpoint(f), (0, 1, 2)))(q, k, v),
        "of a value of vjp": lambda: jax.grad(lambda *x: jax.vjp(f, *x)[0], (0, 1, 2))(q, k, v),
        "transposed": lambda: jax.linear_transpose(jax.linearize(f, q, k, v)[1], q, k, v)(
            np.float32(1)
        ),
        "without jit": lambda: without_jit(f, q, k, v),
    }
    expected = [kit.get(x) for x in ways["grad"]()]
    assert all(np.isfinite(x).all() and np.any(x) for x in expected)
    for name, way in ways.items():
        for x, y in zip(way(), expected, strict=True):
            assert same_bits(kit.get(x), y), name


def without_jit(f: Any, *arrays: Any) -> Any:
    with jax.disable_jit():
        return jax.grad(f, (0, 1, 2))(*arrays)


@pytest.mark.parametrize("remat", [False, True])
def test_in_loops_of_jax(kit: Kit, remat: bool) -> None:
    q, k, v = (kit.put(x[..., :8]) for x in inputs(batch=1, dtype=np.float32))

    def step(x: Any, _: Any) -> Any:
        out = cupyflash.attention(x, k, v, deterministic=True)
        return out, out[0, 0, 0, 0]

    def scanned(q: Any) -> Any:
        return jax.lax.scan(jax.checkpoint(step) if remat else step, q, length=3)[0].sum()

    def unrolled(q: Any) -> Any:
        for _ in range(3):
            q = step(q, None)[0]
        return q.sum()

    expected = kit.get(jax.grad(unrolled)(q))
    assert same_bits(kit.get(jax.grad(scanned)(q)), expected)
    assert same_bits(kit.get(jax.jit(jax.grad(scanned))(q)), expected)
    items = np.stack([kit.get(q)] * 3)
    many = jax.grad(lambda x: jax.lax.map(lambda q: step(q, None)[0], x).sum())(kit.put(items))
    one = kit.get(jax.grad(lambda q: step(q, None)[0].sum())(q))
    for x in kit.get(many):
        assert same_bits(x, one)


@pytest.mark.parametrize("mapped", [False, True])
def test_many_operations_replay(kit: Kit, mapped: bool) -> None:
    arrays = inputs(batch=1, dtype=np.float32)

    def f(q: Any, k: Any, v: Any) -> Any:
        k, v = k * 1.5, v * 0.5
        for _ in range(3):  # on a GPU enough of them for XLA to make a CUDA graph
            q = cupyflash.attention(q, k, k, deterministic=True) + q * 2
        return cupyflash.attention(q, k, v, deterministic=True).sum()

    gradient = jax.grad(f)  # of sums of two, which are the same in every order
    if mapped:  # keys that items share join a batch by a stride of 0, which is another launch
        gradient = jax.vmap(gradient, (0, None, None))
        arrays[0] = np.stack([arrays[0], arrays[0] * 2])

    def run(compiled: Any, shift: int) -> np.ndarray:
        return kit.get(compiled(*(kit.put(x + np.float32(shift)) for x in arrays)))

    with jax.disable_jit():
        expected = [run(gradient, shift) for shift in (0, 1)]
    assert not np.array_equal(*expected)
    compiled = jax.jit(gradient)
    for _ in range(3):
        for shift in (0, 1):
            assert same_bits(run(compiled, shift), expected[shift])


def test_an_input_may_be_donated(kit: Kit) -> None:
    q, k, v = inputs()
    expected = [kit.get(x) for x in jax.grad(loss, (0, 1, 2))(*map(kit.put, (q, k, v)))]
    donating = jax.jit(jax.grad(loss, (0, 1, 2)), donate_argnums=(0, 1, 2))
    for x, y in zip(donating(*map(kit.put, (q, k, v))), expected, strict=True):
        np.testing.assert_array_equal(kit.get(x), y)


def test_layouts(kit: Kit) -> None:
    arrays = [np.ascontiguousarray(x.transpose(0, 2, 1, 3)) for x in inputs()]
    check(kit, arrays, layout="bhsd", causal=True, wrap=jax.jit)


def test_packed_sequences(kit: Kit) -> None:
    arrays = packed_inputs()
    bounds = {"cu_seqlens_q": ENDS[0], "cu_seqlens_k": ENDS[1]}
    bias = np.linspace(-1, 1, 2 * 5, dtype=np.float32).reshape(1, 1, 2, 5)
    check(kit, arrays, **bounds, attn_bias=bias, causal=True)
    wild = np.array([0, 3, 2**30, -5], np.int32)
    dout, dlse = seeds_of(arrays[0], arrays[2])

    def f(q: Any, k: Any, v: Any, ends: Any) -> Any:
        return attend(q, k, v, cu_seqlens_q=ends, cu_seqlens_k=ends)

    pull = jax.jit(lambda *x: jax.vjp(f, *x)[1]((kit.put(dout), kit.put(dlse)))[:3])
    results = Gradients(*map(kit.get, pull(*map(kit.put, (*arrays, wild)))), None, None)
    judge(results, *arrays, dout, dlse, cu_seqlens_q=wild, cu_seqlens_k=wild)


@pytest.mark.parametrize("shape", [(2, 0, 9), (2, 5, 0), (0, 5, 9)], ids=str)
def test_where_there_is_nothing(kit: Kit, shape: tuple[int, int, int]) -> None:
    batch, len_q, len_k = shape
    arrays = [
        np.ones((batch, n, h, 8), np.float16) for n, h in ((len_q, 4), (len_k, 2), (len_k, 2))
    ]
    for x in check(kit, arrays, causal=True, wrap=jax.jit)[:3]:
        assert not np.any(x)


# What is computed, and for whom


def test_nothing_more_is_computed_than_is_asked_for(
    kit: Kit, computed: list[tuple[Any, ...]]
) -> None:
    q, k, v = map(kit.put, inputs())
    bias, sink = (kit.put(MODIFIERS[name]) for name in INPUTS.values())

    def f(q: Any, bias: Any, sink: Any) -> Any:
        return loss(q, k, v, attn_bias=bias, learnable_sink=sink)

    jax.block_until_ready(jax.jit(f)(q, bias, sink))
    assert computed == [("out",)]
    for wanted, numbers in {
        (): (0,),
        ("dbias",): (1,),
        ("dsink",): (2,),
        ("dbias", "dsink"): (1, 2),
    }.items():
        for wrap in (lambda x: x, jax.jit):
            computed.clear()
            jax.block_until_ready(wrap(jax.grad(f, numbers))(q, bias, sink))
            assert computed == [("out", "lse"), ("dq", "dk", "dv", *wanted)]


def test_a_bias_alone_is_differentiated(kit: Kit) -> None:
    q, k, v = inputs(batch=1, dtype=np.float32)
    bias = np.linspace(-1, 1, 45, dtype=np.float32).reshape(1, 1, 5, 9)
    dout, _ = seeds_of(q, v)
    there = [kit.put(x) for x in (q, k, v)]
    f = lambda bias: (cupyflash.attention(*there, attn_bias=bias) * kit.put(dout)).sum()  # noqa: E731
    for gradient in (jax.grad(f), jax.jit(jax.grad(f)), jax.grad(jax.checkpoint(f))):
        dbias = kit.get(gradient(kit.put(bias)))
        judge(
            differentiated(kit, [q, k, v], dout, None, attn_bias=bias)._replace(dbias=dbias),
            *(q, k, v, dout, None),
            attn_bias=bias,
        )


def test_through_the_lse_alone_and_the_output_alone(
    kit: Kit, computed: list[tuple[Any, ...]]
) -> None:
    arrays = inputs()
    dout, dlse = seeds_of(arrays[0], arrays[2])
    there = [kit.put(x) for x in arrays]
    for seeds, part in (((dout, None), 0), ((0 * dout, dlse), 1)):
        seed = kit.put(seeds[part])
        f = lambda *x, part=part, seed=seed: (  # noqa: E731
            attend(*x, causal=True)[part].astype(np.float32) * seed.astype(np.float32)
        ).sum()
        grads = jax.grad(f, (0, 1, 2))(*there)
        results = Gradients(*map(kit.get, grads), None, None)
        judge(results, *arrays, *seeds, causal=True)
    assert not np.any(results.dv)


def test_other_arguments_have_no_gradient(kit: Kit) -> None:
    q, k, v = map(kit.put, inputs())
    ids = kit.put(np.array([[0] * 4 + [1] * 5, [1] * 9], np.int32))
    mask = kit.put(MODIFIERS["attn_mask"])
    used = kit.put(MODIFIERS["seqused_k"])
    prefix = kit.put(np.array([3, 4], np.int32))
    state = kit.put(np.array([1, 2], np.uint32))

    def f(q: Any, ids: Any, mask: Any, used: Any, prefix: Any, state: Any) -> Any:
        options = {"attn_mask": mask, "seqused_k": used, "mask": PrefixLM(prefix)}
        ids = ids[:, :5], ids
        return loss(q, k, v, segment_ids=ids, dropout_p=0.5, rng_state=state, **options)

    operands = q, ids, mask, used, prefix, state
    _, *others = jax.vjp(f, *operands)[1](np.float32(1))
    _, *wished = jax.jit(jax.grad(f, tuple(range(5)), allow_int=True))(*operands[:5], state)
    for gradients, given in ((others, operands[1:]), (wished, operands[1:5])):
        for gradient, x in zip(gradients, given, strict=True):
            assert gradient.dtype == jax.dtypes.float0
            assert gradient.shape == x.shape


def test_a_stopped_gradient_is_zero(kit: Kit, computed: list[tuple[Any, ...]]) -> None:
    q, k, v = map(kit.put, inputs())
    stopped = jax.grad(lambda q: cupyflash.attention(jax.lax.stop_gradient(q), k, v).sum())
    np.testing.assert_array_equal(kit.get(stopped(q)), 0)
    beside = jax.grad(lambda x: (x * cupyflash.attention(q, k, v).sum()).sum())
    assert np.isfinite(kit.get(beside(q))).all()
    assert computed == [("out",)] * 2


def test_a_kernel_by_name_serves_both_passes_where_it_can(host: Kit) -> None:
    for name in ("reference", "cpu"):
        check(host, inputs(), kernel=name)


def test_calls_of_one_kind_are_compiled_once(kit: Kit) -> None:
    q, k, v = map(kit.put, inputs())
    gradient = jax.grad(lambda *x: loss(*x, softmax_scale=0.125), (0, 1, 2))
    gradient(q, k, v)
    before = program._forward()._cache_size(), program._backward()._cache_size()
    for shift in range(5):
        gradient(q + shift, k, v)
    assert (program._forward()._cache_size(), program._backward()._cache_size()) == before


# vmap


def pulled(q: Any, k: Any, v: Any, dout: Any, dlse: Any) -> Any:
    """Return the gradients of one item."""
    return jax.vjp(functools.partial(attend, causal=True), q, k, v)[1]((dout, dlse))


SUBSETS = [
    "-".join(subset)
    for n in range(1, 5)
    for subset in itertools.combinations(("q", "k", "v", "dout"), n)
]


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("mapped", SUBSETS)
def test_under_vmap_of_some(kit: Kit, mapped: str, batch: int) -> None:
    names = "q", "k", "v", "dout", "dlse"
    chosen = [*mapped.split("-"), *(["dlse"] if "dout" in mapped else [])]
    many, one = inputs(3, batch=batch), inputs(batch=batch)
    seeds = seeds_of(one[0], one[2])
    many += [np.stack([x * (i + 1) for i in range(3)]).astype(x.dtype) for x in seeds]
    given = [m if n in chosen else o for n, m, o in zip(names, many, [*one, *seeds], strict=True)]
    axes = [0 if name in chosen else None for name in names]
    pull = jax.vmap(pulled, axes)
    for wrap in (jax.jit, lambda f: f):
        results = [kit.get(x) for x in wrap(pull)(*map(kit.put, given))]
        for i in range(3):
            item = [x if axis is None else x[i] for x, axis in zip(given, axes, strict=True)]
            judge(Gradients(*(x[i] for x in results), None, None), *item, causal=True)


@pytest.mark.parametrize("mapped", ["q", "k", "bias", "k-v", "q-k-v", "q-v-bias"])
def test_gradients_of_what_is_not_mapped_add_up(kit: Kit, mapped: str) -> None:
    names = "q", "k", "v", "bias"
    one = [*inputs(), np.linspace(-1, 1, 45, dtype=np.float32).reshape(5, 9)]
    many = [*inputs(3), np.stack([one[3] * i for i in range(3)])]
    chosen = mapped.split("-")
    given = [m if n in chosen else o for n, m, o in zip(names, many, one, strict=True)]
    axes = [0 if name in chosen else None for name in names]
    dout, dlse = (kit.put(x) for x in seeds_of(one[0], one[2]))

    def f(*arrays: Any) -> Any:
        q, k, v, bias = arrays
        out, lse = attend(q, k, v, attn_bias=bias, causal=True, deterministic=True)
        return (out.astype(np.float32) * dout).sum() + (lse * dlse).sum()

    there = [kit.put(x) for x in given]
    items = jax.vmap(jax.grad(f, range(4)), axes)(*there)
    for wrap in (lambda f: f, jax.jit):
        summed = wrap(jax.grad(lambda *x: jax.vmap(f, axes)(*x).sum(), range(4)))(*there)
        for x, each, axis in zip(summed, items, axes, strict=True):
            x, each = kit.get(x), kit.get(each).astype(np.float64)
            if axis is not None:
                np.testing.assert_array_equal(x, each)
                continue
            total, sizes = each.sum(axis=0), np.abs(each).sum(axis=0)  # JAX adds in fp32
            unit = float(ml_dtypes.finfo(x.dtype).eps) / 2
            assert (np.abs(x - total) <= unit * np.abs(total) + 3 * 2.0**-24 * sizes).all()


def test_under_nested_vmap(kit: Kit) -> None:
    q, k, v = inputs(3, 2)
    k = k[0]
    dout, dlse = seeds_of(q[0, 0], v[0, 0])
    seeds = kit.put(dout), kit.put(dlse)
    pull = lambda q, k, v: pulled(q, k, v, *seeds)  # noqa: E731
    results = jax.vmap(jax.vmap(pull), (0, None, 0))(*map(kit.put, (q, k, v)))
    results = [kit.get(x) for x in results]
    for i in range(3):
        for j in range(2):
            item = Gradients(*(x[i, j] for x in results), None, None)
            judge(item, q[i, j], k[j], v[i, j], dout, dlse, causal=True)


def test_other_axes_may_be_mapped(kit: Kit) -> None:
    q, k, v = inputs(3)
    dout, dlse = seeds_of(q[0], v[0])
    seeds = kit.put(dout), kit.put(dlse)
    pull = lambda q, k, v: pulled(q, k, v, *seeds)  # noqa: E731
    moved = np.moveaxis(q, 0, 4), np.moveaxis(k, 0, 1), v
    dq, dk, dv = jax.vmap(pull, (4, 1, 0), (2, 0, 1))(*map(kit.put, moved))
    for i in range(3):
        item = kit.get(dq)[:, :, i], kit.get(dk)[i], kit.get(dv)[:, i]
        judge(Gradients(*item, None, None), q[i], k[i], v[i], dout, dlse, causal=True)


def test_what_modifies_scores_under_vmap(kit: Kit) -> None:
    arrays = inputs(3)
    dout, dlse = seeds_of(arrays[0][0], arrays[2][0])
    sinks = np.stack([MODIFIERS["learnable_sink"] + i for i in range(3)])
    used = np.array([[4, 9], [0, 3], [9, 9]], np.int32)
    state = np.array([[1, 2], [3, 4], [5, 6]], np.uint32)
    shared = {"attn_bias": MODIFIERS["attn_bias"], "softcap": 3.0, "dropout_p": 0.25}
    there = placed(kit, shared)

    def pull(q: Any, k: Any, v: Any, sink: Any, used: Any, state: Any) -> Any:
        f = lambda q, k, v, bias, sink: attend(  # noqa: E731
            *(q, k, v),
            **{**there, "attn_bias": bias, "learnable_sink": sink},
            seqused_k=used,
            rng_state=state,
        )
        seeds = kit.put(dout), kit.put(dlse)
        return jax.vjp(f, q, k, v, there["attn_bias"], sink)[1](seeds)

    results = jax.jit(jax.vmap(pull))(*map(kit.put, (*arrays, sinks, used, state)))
    results = [kit.get(x) for x in results]
    for i in range(3):
        own = {
            "learnable_sink": sinks[i],
            "seqused_k": used[i],
            "rng_state": tuple(map(int, state[i])),
        }
        item = Gradients(*(x[i] for x in results))
        judge(item, *(x[i] for x in arrays), dout, dlse, **shared, **own)


def test_a_jacobian_is_a_pullback_of_many_gradients(kit: Kit) -> None:
    q, k, v = (kit.put(x[:, :2, :1]) for x in inputs(batch=1, dtype=np.float32))
    f = lambda q: cupyflash.attention(q, k, v, deterministic=True)  # noqa: E731
    out, pullback = jax.vjp(f, q)
    for jacobian in (jax.jacrev(f)(q), jax.jit(jax.jacrev(f))(q)):
        for index in np.ndindex(out.shape):
            seed = np.zeros(out.shape, np.float32)
            seed[index] = 1
            (row,) = pullback(kit.put(seed))
            np.testing.assert_array_equal(kit.get(jacobian)[index], kit.get(row))


def test_nothing_mapped_is_nothing_computed(kit: Kit) -> None:
    arrays = [kit.put(x[:0]) for x in inputs(3)]
    for x, y in zip(jax.vmap(jax.grad(loss, (0, 1, 2)))(*arrays), arrays, strict=True):
        assert x.shape == y.shape
    _, k, v = (kit.put(x) for x in inputs())
    f = lambda q, k: jax.vmap(lambda q: loss(q, k, v))(q).sum()  # noqa: E731
    np.testing.assert_array_equal(kit.get(jax.grad(f, 1)(arrays[0], k)), 0)


# The functions that return gradients


def test_attention_backward_of_jax_arrays(kit: Kit) -> None:
    q, k, v = inputs()
    dout, dlse = seeds_of(q, v)
    options = {name: MODIFIERS[name] for name in ("attn_bias", "learnable_sink", "softcap")}
    there = placed(kit, options)

    def f(dout: Any, q: Any, k: Any, v: Any, dlse: Any) -> Gradients:
        out, lse = attend(q, k, v, **there)
        return cupyflash.attention_backward(dout, q, k, v, out, lse, dlse=dlse, **there)

    for function in (f, jax.jit(f)):
        results = function(*map(kit.put, (dout, q, k, v, dlse)))
        assert all(isinstance(x, kit.kind) for x in results)
        judge(Gradients(*map(kit.get, results)), q, k, v, dout, dlse, **options)
    many = [np.stack([x, 2 * x]) for x in (dout, dlse)]
    mapped = jax.vmap(f, (0, None, None, None, 0))(*map(kit.put, (many[0], q, k, v, many[1])))
    for i in range(2):
        item = Gradients(*(kit.get(x)[i] for x in mapped))
        judge(item, q, k, v, many[0][i], many[1][i], **options)


@pytest.mark.parametrize("packed", [False, True])
def test_attention_vjp_of_jax_arrays(kit: Kit, packed: bool) -> None:
    arrays = packed_inputs() if packed else inputs()
    options = {"causal": True, "dropout_p": 0.25, "rng_state": (1, 2)}
    if packed:
        options |= {"cu_seqlens_q": ENDS[0].tolist(), "cu_seqlens_k": ENDS[1]}
    dout, dlse = (kit.put(x) for x in seeds_of(arrays[0], arrays[2]))
    (out, lse), pullback = cupyflash.attention_vjp(
        *map(kit.put, arrays), return_lse=True, **options
    )
    assert (out.shape, lse.shape) == (dout.shape, dlse.shape)
    for seeds in ((dout, dlse), (dout, None)):
        results = pullback(*seeds)
        assert results.dbias is results.dsink is None
        found = Gradients(*map(kit.get, results[:3]), None, None)
        given = [None if x is None else kit.get(x) for x in seeds]
        judge(found, *arrays, *given, **options | {"cu_seqlens_q": ENDS[0]} if packed else options)


def test_arrays_of_masks(kit: Kit) -> None:
    arrays = inputs()
    ids = np.array([[0, 0, 1, 1, 1], [0, 1, 1, 2, 2]]), np.array([[0] * 4 + [1] * 5, [1] * 9])
    mask = PrefixLM(np.array([3, 9])) & Segments(*ids)
    check(kit, arrays, mask=mask, wrap=jax.jit)
    narrow = PrefixLM(np.array([3, 9], np.int32)) & Segments(*(x.astype(np.int32) for x in ids))
    check(kit, arrays, mask=narrow, wrap=jax.jit)


# What is refused


def test_what_has_no_derivative_is_refused_with_a_sentence(kit: Kit) -> None:
    q, k, v = map(kit.put, inputs())
    f = lambda q: cupyflash.attention(q, k, v)  # noqa: E731
    once = lambda q: f(q).sum()  # noqa: E731
    many = q[None]

    def scanned(q: Any) -> Any:
        return jax.lax.scan(lambda x, _: (x, f(x)), q, length=2)[1].sum()

    forward_mode = [
        lambda: jax.jvp(f, (q,), (q,)),
        lambda: jax.jit(lambda q: jax.jvp(f, (q,), (q,)))(q),
        lambda: jax.jvp(jax.jit(f), (q,), (q,)),
        lambda: jax.jvp(jax.checkpoint(f), (q,), (q,)),
        lambda: jax.jvp(scanned, (q,), (q,)),
        lambda: jax.linearize(f, q)[1](q),
        lambda: jax.vmap(lambda q: jax.jvp(f, (q,), (q,)))(many),
        lambda: jax.jvp(jax.vmap(f), (many,), (many,)),
        lambda: jax.jacfwd(f)(q),
        lambda: jax.jacfwd(jax.jit(f))(q),
    ]
    twice = [
        lambda: jax.hessian(once)(q),
        lambda: jax.hessian(jax.jit(once))(q),
        lambda: jax.jit(jax.hessian(once))(q),
        lambda: jax.hessian(scanned)(q),
        lambda: jax.hessian(jax.checkpoint(once))(q),
        lambda: jax.grad(lambda q: jax.grad(once)(q).sum())(q),
        lambda: jax.grad(lambda q: jax.grad(jax.jit(once))(q).sum())(q),
        lambda: jax.jacrev(jax.jacrev(once))(q),
        lambda: jax.jvp(jax.grad(once), (q,), (q,)),
        lambda: jax.vmap(jax.hessian(once))(many),
        lambda: jax.grad(lambda q: cupyflash.attention_vjp(q, k, v)[1](f(q)).dq.sum())(q),
    ]
    for attempt in forward_mode:
        with pytest.raises(UnsupportedProblem, match=r"^attention has no derivative in forward"):
            attempt()
    for attempt in twice:
        with pytest.raises(
            UnsupportedProblem, match=r"^(attention has no|the gradients of attention have no) deri"
        ):
            attempt()


def test_gradients_that_nobody_computes_are_refused(kit: Kit) -> None:
    q, k, v = map(kit.put, inputs())
    slopes = kit.put(MODIFIERS["alibi_slopes"])
    f = lambda q, slopes: loss(q, k, v, alibi_slopes=slopes)  # noqa: E731
    for number in (1, (0, 1)):
        with pytest.raises(
            UnsupportedProblem, match=r"^`alibi_slopes` is differentiated.*stop_gradient"
        ):
            jax.grad(f, number)(q, slopes)
    assert np.any(kit.get(jax.grad(f)(q, slopes)))
    stopped = jax.grad(lambda q, x: f(q, jax.lax.stop_gradient(x)), (0, 1))(q, slopes)
    np.testing.assert_array_equal(kit.get(stopped[1]), 0)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_fp8_is_refused_while_tracing(host: Kit, dtype: str) -> None:
    q, k, v = (host.put(x.astype(dtype)) for x in inputs())
    f = lambda q, k, v: cupyflash.attention(q, k, v).astype(np.float32).sum()  # noqa: E731
    out, lse = attend(q, k, v)
    attempts = [
        lambda: jax.vjp(f, q, k, v),
        lambda: jax.grad(lambda x: f(x.astype(dtype), k, v))(host.put(inputs()[0])),
        lambda: cupyflash.attention_backward(out, q, k, v, out, lse),
    ]
    for attempt in attempts:
        with pytest.raises(UnsupportedProblem, match=f"^`q` has dtype {dtype}, of which no grad"):
            attempt()


def test_wrong_arguments_of_attention_backward(host: Kit) -> None:
    q, k, v = map(host.put, inputs())
    out, lse = attend(q, k, v)
    other = np.ones(out.shape, q.dtype)
    for words, changes, error in (
        (r"^`dout` is a numpy array in host memory and `q` is", {0: other}, InvalidArgument),
        (r"^`dout` of shape .* has head_dim_v 4", {0: out[..., :4]}, InvalidArgument),
        (r"^`lse` must be an array", {5: None}, InvalidType),
        (r"^`lse` has dtype float16", {5: lse.astype(np.float16)}, InvalidType),
    ):
        given = [changes.get(n, x) for n, x in enumerate((out, q, k, v, out, lse))]
        for wrap in (lambda f: f, jax.jit):
            if wrap is jax.jit and isinstance(given[0], np.ndarray):
                continue
            with pytest.raises(error, match=words):
                wrap(cupyflash.attention_backward)(*given)
    with pytest.raises(InvalidArgument, match="`kernel` must be None or one of"):
        cupyflash.attention_backward(out, q, k, v, out, lse, kernel="none")


# Several devices


SHARDED = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, PartitionSpec as P
import cupyflash

mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
rng = np.random.default_rng(0)
q, k, v = (jnp.asarray(rng.standard_normal((2, 4, 2, 8)), jnp.float32) for _ in "qkv")
f = lambda q, k, v: cupyflash.attention(q, k, v)
loss = lambda f: lambda *x: (f(*x) ** 2).sum()
expected = jax.grad(loss(f), (0, 1, 2))(q, k, v)
rows = P(None, "x"), P(), P()  # the queries of each device, all keys everywhere
for specs in ((P("x"),) * 3, rows):
    for check in (True, False) if specs[1] else (True,):
        options = {"mesh": mesh, "in_specs": specs, "check_vma": check}
        outside = jax.grad(loss(jax.shard_map(f, out_specs=specs[0], **options)), (0, 1, 2))
        inside = jax.shard_map(jax.grad(loss(f), (0, 1, 2)), out_specs=specs, **options)
        for way in (outside, inside, jax.jit(outside), jax.jit(inside)):
            for x, y in zip(way(q, k, v), expected):
                np.testing.assert_allclose(x, y, atol=1e-6)
print("done")
"""


def test_inside_of_shard_map() -> None:
    """Gradients of what every device has whole are added up over the devices."""
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
    child = run_child(
        sys.executable, "-c", SHARDED, timeout=250, XLA_FLAGS=flags, JAX_PLATFORMS="cpu"
    )
    assert child.stdout.split()[-1:] == ["done"], child.stdout
