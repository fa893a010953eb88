"""What only JAX has: tracers, transformations, arrays that nobody may write."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cases import MODIFIED, Modified
from harness import hosted, judge
from kits import Kit, opened

import cupyflash
from cupyflash import InvalidArgument, InvalidType, UnsupportedProblem
from cupyflash._array import jax_arrays
from cupyflash.masks import All, Band, Mask, PrefixLM, Segments

jax = pytest.importorskip("jax")
pytestmark = pytest.mark.frameworks


@pytest.fixture(params=["jax", pytest.param("jax_cuda", marks=pytest.mark.gpu)])
def kit(request: pytest.FixtureRequest) -> Iterator[Kit]:
    with opened(request.param) as kit:
        yield kit


@pytest.fixture
def host() -> Iterator[Kit]:
    with opened("jax") as kit:
        yield kit


def inputs(*lead: int, batch: int = 2, dtype: Any = np.float16) -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    shapes = [(batch, 5, 4, 16), (batch, 9, 2, 16), (batch, 9, 2, 8)]
    return [rng.standard_normal((*lead, *shape)).astype(dtype) for shape in shapes]


def attend(*arrays: Any, **options: Any) -> Any:
    return cupyflash.attention(*arrays, causal=True, return_lse=True, **options)


def check(kit: Kit, result: Any, arrays: list[np.ndarray], **options: Any) -> None:
    judge(tuple(map(kit.get, result)), *arrays, **{"causal": True, **options})


# jit


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_under_jit(kit: Kit, dtype: str) -> None:
    arrays = inputs(batch=16, dtype=getattr(ml_dtypes, dtype, dtype))
    compiled = jax.jit(attend)
    for _ in range(3):
        check(kit, compiled(*map(kit.put, arrays)), arrays)


MASKS = {
    "prefix": lambda put: PrefixLM(put(np.array([3, 0]))),
    "one prefix for all": lambda put: PrefixLM(4),
    "segments": lambda put: Segments(put(np.array([[0, 0, 1, 1, 2]] * 2)), put(np.arange(9) // 3)),
    "all": lambda put: PrefixLM(put(np.array([3, 0])), "top_left") & Band(left=2) & PrefixLM(7),
}


@pytest.mark.parametrize("make", MASKS.values(), ids=MASKS)
def test_masks_are_arguments_of_jit(host: Kit, make: Any) -> None:
    """One compiled function serves other arrays of the same mask, and not another mask."""
    arrays = inputs()
    traced = []

    @jax.jit
    def f(q: Any, k: Any, v: Any, mask: Mask) -> Any:
        traced.append(mask)
        return attend(q, k, v, mask=mask)

    for mask in (make(host.put), jax.tree.map(lambda x: x + 1, make(host.put))):
        plain = jax.tree.map(np.asarray, mask)
        check(host, f(*map(host.put, arrays), mask), arrays, mask=plain)
    assert len(traced) == 1
    check(host, f(*map(host.put, arrays), Band(left=1)), arrays, mask=Band(left=1))
    assert len(traced) == 2


def test_masks_are_mapped(host: Kit) -> None:
    arrays = inputs(3)
    prefix = np.array([[1, 2], [9, 0], [4, 4]])
    mask = PrefixLM(host.put(prefix)) & Band(right=1)
    results = jax.vmap(lambda q, k, v, mask: attend(q, k, v, mask=mask))(
        *map(host.put, arrays), mask
    )
    for i in range(3):
        one = jax.tree.map(lambda x, i=i: x[i], results)
        check(host, one, [x[i] for x in arrays], mask=PrefixLM(prefix[i]) & Band(right=1))


@pytest.mark.parametrize("make", MASKS.values(), ids=MASKS)
def test_masks_come_out_of_transformations_as_they_went_in(host: Kit, make: Any) -> None:
    mask = make(host.put)
    again = jax.jit(lambda mask: mask)(mask)
    assert type(again) is type(mask)
    assert again == mask
    for part, other in zip(mask.parts, again.parts, strict=True):
        for x, y in zip(part.arrays, other.arrays, strict=True):
            np.testing.assert_array_equal(x, y)


def test_under_jit_between_other_operations(kit: Kit) -> None:
    q, k, v = inputs()
    layers = jax.jit(lambda q, k, v: attend(q * 2, k + 1, v)[0] * 2)
    doubled = kit.get(layers(*map(kit.put, (q, k, v))))
    straight = attend(*map(kit.put, (q * 2, k + 1, v)))
    np.testing.assert_array_equal(doubled, 2 * kit.get(straight[0]))
    check(kit, straight, [q * 2, k + 1, v])


def test_in_a_loop_of_jax(kit: Kit) -> None:
    q, k, v = (kit.put(x) for x in inputs(batch=1))
    k, v = k[..., :8], v

    def step(x: Any, _: Any) -> Any:
        return cupyflash.attention(x, k, v), None

    scanned, _ = jax.lax.scan(step, q[..., :8], length=4)
    expected = q[..., :8]
    for _ in range(4):
        expected = cupyflash.attention(expected, k, v)
    np.testing.assert_array_equal(kit.get(scanned), kit.get(expected))


def test_many_operations_replay(kit: Kit) -> None:
    arrays = inputs()
    one = kit.put(np.eye(16, dtype=np.float16))

    @jax.jit
    def f(q: Any, k: Any, v: Any) -> Any:
        k, v = k * 1.5, v * 0.5
        for _ in range(4):  # on a GPU enough of them for XLA to make a CUDA graph
            q = cupyflash.attention(q, k, k) + q @ one
        return cupyflash.attention(q, k, v)

    for shift in (0, 1):
        put = [kit.put(x + np.float16(shift)) for x in arrays]
        with jax.disable_jit():
            expected = kit.get(f(*put))
        for _ in range(4):
            np.testing.assert_array_equal(kit.get(f(*put)), expected)


def test_layouts(kit: Kit) -> None:
    arrays = inputs()
    turned = [kit.put(x.transpose(0, 2, 1, 3).copy()) for x in arrays]
    out, lse = jax.jit(lambda *a: attend(*a, layout="bhsd"))(*turned)
    check(kit, (out.transpose(0, 2, 1, 3), lse), arrays)


def test_one_trace_serves_many_calls(kit: Kit) -> None:
    traces = []

    @jax.jit
    def f(*arrays: Any) -> Any:
        traces.append(arrays)
        return attend(*arrays)

    for seed in range(3):
        f(*(kit.put(x + seed) for x in inputs()))
    assert len(traces) == 1


def test_an_input_may_be_donated(kit: Kit) -> None:
    q, k, _ = inputs()
    donating = jax.jit(lambda q, k: cupyflash.attention(q, k, k), donate_argnums=0)
    out = kit.get(donating(kit.put(q), kit.put(k)))
    expected = cupyflash.attention(*map(kit.put, (q, k, k)))
    np.testing.assert_array_equal(out, kit.get(expected))


def test_inputs_of_an_asynchronous_computation(kit: Kit) -> None:
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 50, lambda _, y: y @ y * 0 + x, x))
    for step in range(4):
        big = slow(kit.put(np.full((256, 256), step, np.float32)))
        q = big[:2, :160].reshape(2, 5, 2, 16).astype(np.float16)
        out = cupyflash.attention(q, q, q)
        np.testing.assert_array_equal(kit.get(out), step)


# vmap


def test_under_vmap(kit: Kit) -> None:
    arrays = inputs(3)
    out, lse = jax.vmap(attend)(*map(kit.put, arrays))
    assert (out.shape, lse.shape) == ((3, 2, 5, 4, 8), (3, 2, 4, 5))
    for i in range(3):
        check(kit, (out[i], lse[i]), [x[i] for x in arrays])


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("mapped", ["q", "k", "v", "qk", "kv"])
def test_under_vmap_of_some(kit: Kit, mapped: str, batch: int) -> None:
    many, one = inputs(3, batch=batch), inputs(batch=batch)
    arrays = [m if name in mapped else o for name, m, o in zip("qkv", many, one, strict=True)]
    axes = tuple(0 if name in mapped else None for name in "qkv")
    out, lse = jax.jit(jax.vmap(attend, axes))(*map(kit.put, arrays))
    for i in range(3):
        items = [x if axis is None else x[i] for x, axis in zip(arrays, axes, strict=True)]
        check(kit, (out[i], lse[i]), items)


def test_under_nested_vmap(kit: Kit) -> None:
    q, k, v = inputs(3, 2)
    k = k[0]
    f = jax.vmap(jax.vmap(attend), (0, None, 0))
    out, lse = f(*map(kit.put, (q, k, v)))
    assert out.shape == (3, 2, 2, 5, 4, 8)
    for i in range(3):
        for j in range(2):
            check(kit, (out[i, j], lse[i, j]), [q[i, j], k[j], v[i, j]])


def test_other_axes_may_be_mapped(kit: Kit) -> None:
    q, k, v = inputs(3)
    f = jax.vmap(attend, (4, 1, 0), (2, 0))
    out, lse = f(*map(kit.put, (np.moveaxis(q, 0, 4), np.moveaxis(k, 0, 1), v)))
    for i in range(3):
        check(kit, (out[:, :, i], lse[i]), [q[i], k[i], v[i]])


def test_nothing_mapped_is_nothing_computed(kit: Kit) -> None:
    out, lse = jax.vmap(attend)(*(kit.put(x[:0]) for x in inputs(3)))
    assert (out.shape, lse.shape) == ((0, 2, 5, 4, 8), (0, 2, 4, 5))


# Arguments


def test_an_output_is_refused(host: Kit) -> None:
    q, k, v = map(host.put, inputs())
    for out in (q[..., :8], np.zeros((2, 5, 4, 8), np.float32)):
        with pytest.raises(InvalidArgument, match="`out` must be None for JAX arrays"):
            cupyflash.attention(q, k, v, out=out)


def test_errors_come_while_tracing(host: Kit) -> None:
    q, k, v = map(host.put, inputs())
    with pytest.raises(InvalidArgument, match="`v` of shape"):
        jax.jit(cupyflash.attention)(q, k, v[:, :4])
    with pytest.raises(InvalidType, match="`softmax_scale` is a JAX tracer"):
        jax.jit(lambda s: cupyflash.attention(q, k, v, softmax_scale=s))(0.5)
    with pytest.raises(InvalidArgument, match="`kernel` must be None or one of"):
        jax.jit(lambda q: cupyflash.attention(q, k, v, kernel="none"))(q)
    with pytest.raises(UnsupportedProblem, match="takes arrays on a GPU"):
        jax.jit(lambda q: cupyflash.attention(q, k, v, kernel="attention_fwd_sm80"))(q)
    with pytest.raises(InvalidType, match="`q` has elements of type"):
        cupyflash.attention(jax.random.key(0), k, v)
    with pytest.raises(InvalidType, match="`k` is a JAX tracer"):
        jax.jit(lambda k: cupyflash.attention(np.asarray(q), k, k))(k)
    with pytest.raises(InvalidArgument, match="`q` is sharded over 2 devices"):
        jax_arrays.device_of(SimpleNamespace(devices=lambda: {1, 2}), "q")
    tpu = SimpleNamespace(platform="tpu")
    with pytest.raises(InvalidType, match="`q` must be on the CPU or on an NVIDIA GPU"):
        jax_arrays.ordinal(tpu, "q")


MODIFIERS = {
    "softcap": 3.0,
    "attn_bias": np.linspace(-1, 1, 90, dtype=np.float32).reshape(2, 1, 5, 9),
    "attn_mask": np.arange(45).reshape(5, 9) % 4 > 0,
    "alibi_slopes": np.array([0.5, 0.25, 0.125, 0.1], np.float32),
    "learnable_sink": np.array([0.0, 1.0, -1.0, -np.inf], np.float32),
    "seqused_k": np.array([4, 9], np.int32),
    "seqused_q": np.array([5, 3], np.int32),
}


def test_modifiers_are_operands(kit: Kit) -> None:
    arrays = inputs()
    scalars = {"softcap": MODIFIERS["softcap"]}
    extras = {name: x for name, x in MODIFIERS.items() if name not in scalars}
    put = {name: kit.put(x) for name, x in extras.items()}
    check(kit, attend(*map(kit.put, arrays), **put, **scalars), arrays, **MODIFIERS)
    compiled = jax.jit(lambda a, extras: attend(*a, **extras, **scalars))
    check(kit, compiled([*map(kit.put, arrays)], put), arrays, **MODIFIERS)


def test_modifiers_under_vmap(kit: Kit) -> None:
    arrays = inputs(3)
    bias = np.stack([MODIFIERS["attn_bias"] * i for i in range(3)])
    mask = kit.put(MODIFIERS["attn_mask"])
    f = jax.vmap(lambda q, k, v, bias: attend(q, k, v, attn_bias=bias, attn_mask=mask))
    out, lse = f(*map(kit.put, arrays), kit.put(bias))
    for i in range(3):
        items = [x[i] for x in arrays]
        options = {"attn_bias": bias[i], "attn_mask": MODIFIERS["attn_mask"]}
        check(kit, (out[i], lse[i]), items, **options)


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("attn_bias", np.array([0, -1, 2], np.float32)),
        ("attn_mask", np.array([True, False, True])),
        ("mask", np.array([0, 4, 9], np.int32)),
    ],
)
def test_an_operand_of_no_dimension_under_vmap(kit: Kit, name: str, numbers: np.ndarray) -> None:
    arrays = inputs()
    wrap = PrefixLM if name == "mask" else lambda x: x
    f = jax.vmap(lambda x: attend(*map(kit.put, arrays), **{name: wrap(x)}))
    out, lse = f(kit.put(numbers))
    for i, number in enumerate(numbers):
        check(kit, (out[i], lse[i]), arrays, **{name: wrap(number)})


def test_lengths_are_clamped_where_nobody_may_read_them(kit: Kit) -> None:
    arrays = inputs()
    compiled = jax.jit(lambda a, lengths: attend(*a, seqused_k=lengths))
    wild = kit.put(np.array([-5, 1000], np.int32))
    out, lse = compiled([*map(kit.put, arrays)], wild)
    check(kit, (out, lse), arrays, seqused_k=np.array([0, 9]))
    with pytest.raises(InvalidArgument, match=r"`seqused_k\[1\]` must be from 0"):
        attend(*map(kit.put, arrays), seqused_k=np.array([4, 1000]))
    plain = attend(*map(kit.put, arrays), seqused_k=[4, 9])
    check(kit, plain, arrays, seqused_k=np.array([4, 9]))


def test_dropout_takes_its_state_from_the_host_or_from_jax(kit: Kit) -> None:
    arrays = inputs()
    q, k, v = map(kit.put, arrays)
    seed, offset = 0xFEDCBA9876543210, (7 << 32) + 5
    words = np.array([0x76543210, 0xFEDCBA98, 5, 7], np.uint32)
    options = {"dropout_p": 0.3, "rng_state": (seed, offset)}
    out = attend(q, k, v, **options)
    check(kit, out, arrays, **options)
    compiled = jax.jit(lambda state: attend(q, k, v, dropout_p=0.3, rng_state=state))
    np.testing.assert_array_equal(kit.get(compiled(kit.put(words))[0]), kit.get(out[0]))
    with pytest.raises(InvalidType, match="`rng_state` must be int64 or uint64"):
        compiled(kit.put(np.zeros(3, np.uint32)))
    with pytest.raises(InvalidArgument, match="`rng_state` is None"):
        attend(q, k, v, dropout_p=0.3)


def test_double_precision(host: Kit) -> None:
    with jax.enable_x64(True):
        arrays = inputs(dtype=np.float64)
        out, lse = jax.jit(attend)(*map(host.put, arrays))
    assert out.dtype == lse.dtype == np.float64
    ref, ref_lse = cupyflash.reference.attention(*arrays, causal=True)
    np.testing.assert_allclose(host.get(out), ref, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(host.get(lse), ref_lse, rtol=1e-12)


# Masks and packed sequences


def placed(kit: Kit, options: dict[str, Any]) -> dict[str, Any]:
    """Return options with arrays of JAX; 64-bit integers stay NumPy's."""

    def place(x: Any) -> Any:
        if isinstance(x, Mask):
            return All(*(part.bound(*map(place, part.arrays)) for part in x.parts))
        wide = not isinstance(x, np.ndarray) or x.dtype in (np.int64, np.uint64)
        return x if wide else kit.put(x)

    return {name: place(x) for name, x in hosted(options).items()}


JAX_CASES = [case for case in MODIFIED if "bias_fp64" not in case.modifiers][::5]


@pytest.mark.parametrize("case", JAX_CASES, ids=lambda case: case.id)
def test_case(kit: Kit, case: Modified) -> None:
    arrays, options = [x.host for x in case.arrays()], case.options
    function = cupyflash.attention if case.packed is None else cupyflash.attention_varlen
    result = function(*map(kit.put, arrays), **placed(kit, options), return_lse=True)
    judge(tuple(map(kit.get, result)), *arrays, **options)


def packed_inputs(*lead: int) -> list[np.ndarray]:
    q, k, v = inputs(*lead, batch=1)
    return [x.reshape(*lead, *x.shape[-3:]) for x in (q, k, v)]


def varlen(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, **options: Any) -> Any:
    return cupyflash.attention_varlen(q, k, v, cu_q, cu_k, causal=True, return_lse=True, **options)


ENDS = np.array([0, 2, 2, 4], np.int32), np.array([0, 5, 7, 9], np.int32)


def test_packed_sequences_under_jit(kit: Kit) -> None:
    arrays = packed_inputs()
    compiled = jax.jit(varlen)
    for ends in (ENDS, (ENDS[0] // 2, ENDS[1] // 3)):
        options = {"cu_seqlens_q": ends[0], "cu_seqlens_k": ends[1]}
        for function in (varlen, compiled):
            result = function(*map(kit.put, arrays), *map(kit.put, ends))
            check(kit, result, arrays, **options)
    assert compiled._cache_size() == 1
    used = kit.put(np.array([1, 0, 2], np.int32))
    result = compiled(*map(kit.put, arrays), *map(kit.put, ENDS), seqused_q=used)
    options = {"cu_seqlens_q": ENDS[0], "cu_seqlens_k": ENDS[1], "seqused_q": np.array(used)}
    check(kit, result, arrays, **options)


@pytest.mark.parametrize(
    "wild",
    [
        [0, 2, 1000, 1000],
        [-7, -3, 2, 5],
        [1, 2, 3, 4],
        [0, 5, 3, 2],
        [2**31 - 1, -(2**31), 2**31 - 1, 0],
        [4, 2, 9, 9],
    ],
    ids=str,
)
def test_no_value_of_lengths_leads_out_of_the_arrays(kit: Kit, wild: list[int]) -> None:
    arrays = packed_inputs()
    ends = np.array(wild, np.int32)
    bias = np.ones((1, 1, 2, 3), np.float32)  # fewer positions than a sequence may have
    for options in ({}, {"seqused_k": np.array([-1, 2**30, 3], np.int32)}):
        result = jax.jit(varlen)(*map(kit.put, (*arrays, ends, ends)), **placed(kit, options))
        sequences = {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
        check(kit, result, arrays, **sequences, **options)
        result = jax.jit(varlen)(
            *map(kit.put, (*arrays, ends, ends)), **placed(kit, options), attn_bias=kit.put(bias)
        )
        if next(iter(result[0].devices())).platform == "gpu":  # beyond its end a bias has any value
            assert np.isfinite(kit.get(result[0])).all()
        else:
            full = np.ones((1, 1, 9, 9), np.float32)
            check(kit, result, arrays, **sequences, **options, attn_bias=full)


def test_packed_sequences_under_vmap(kit: Kit) -> None:
    arrays = packed_inputs(3)
    ends = np.stack([ENDS[0], ENDS[0] // 2, [0, 0, 0, 5]]).astype(np.int32)
    out, lse = jax.vmap(varlen)(*map(kit.put, (*arrays, ends)), kit.put(np.stack([ENDS[1]] * 3)))
    for i in range(3):
        options = {"cu_seqlens_q": ends[i], "cu_seqlens_k": ENDS[1]}
        check(kit, (out[i], lse[i]), [x[i] for x in arrays], **options)
    some = jax.jit(jax.vmap(varlen, (0, None, 0, None, None)))
    q, k, v = arrays
    out, lse = some(*map(kit.put, (q, k[0], v, *ENDS)))
    for i in range(3):
        options = {"cu_seqlens_q": ENDS[0], "cu_seqlens_k": ENDS[1]}
        check(kit, (out[i], lse[i]), [q[i], k[0], v[i]], **options)


def test_arrays_of_masks_are_operands(kit: Kit) -> None:
    arrays = inputs()
    prefix = np.array([3, 9], np.int32)
    ids = np.array([[0, 0, 1, 1, 1], [0, 1, 1, 2, 2]]), np.array([[0] * 4 + [1] * 5, [1] * 9])

    def masked(a: Any, prefix: Any, ids_q: Any, ids_k: Any) -> Any:
        return cupyflash.attention(
            *a, mask=PrefixLM(prefix) & Segments(ids_q, ids_k), return_lse=True
        )

    operands = [kit.put(x.astype(np.int32)) for x in (prefix, *ids)]
    for function in (masked, jax.jit(masked)):
        result = function([*map(kit.put, arrays)], *operands)
        check(kit, result, arrays, mask=PrefixLM(prefix) & Segments(*ids), causal=False)
    result = masked([*map(kit.put, arrays)], prefix, *ids)  # lengths of the host beside them
    check(kit, result, arrays, mask=PrefixLM(prefix) & Segments(*ids), causal=False)


def test_segments_under_vmap(kit: Kit) -> None:
    arrays = [x[..., :1, :] if n else x for n, x in enumerate(inputs(3))]
    ids = np.sort(np.random.default_rng(0).integers(0, 3, (3, 2, 9)).astype(np.int32))
    f = jax.vmap(lambda q, k, v, i: attend(q, k, v, segment_ids=(i[:, :5], i)))
    out, lse = f(*map(kit.put, arrays), kit.put(ids))
    for i in range(3):
        mask = Segments(ids[i][:, :5], ids[i])
        check(kit, (out[i], lse[i]), [x[i] for x in arrays], mask=mask)


def test_a_band_as_a_mask(kit: Kit) -> None:
    arrays = inputs()
    for band in (Band(2, -1), Band(None, 3, "top_left"), Band(-1, None)):
        result = jax.jit(lambda *a, band=band: attend(*a, mask=band))(*map(kit.put, arrays))
        check(kit, result, arrays, mask=band)


def test_integers_that_jax_cannot_hold_are_refused(host: Kit) -> None:
    q, k, v = map(host.put, inputs())
    with pytest.raises(InvalidArgument, match=r"`mask\.prefix` holds values beyond int32"):
        attend(q, k, v, mask=PrefixLM(2**40))
    with jax.enable_x64(True):
        out = cupyflash.attention(q, k, v, mask=PrefixLM(2**40))
    np.testing.assert_array_equal(host.get(out), host.get(cupyflash.attention(q, k, v)))


def test_a_key_is_refused_with_what_to_pass(kit: Kit) -> None:
    q, k, v = map(kit.put, inputs())
    key = jax.random.key(3)
    with pytest.raises(InvalidType, match=r"^`rng_state` has .*: pass .* jax\.random\.key_data"):
        attend(q, k, v, dropout_p=0.5, rng_state=key)
    state = jax.random.key_data(key)
    drawn = attend(q, k, v, dropout_p=0.5, rng_state=state)
    same = attend(q, k, v, dropout_p=0.5, rng_state=tuple(np.asarray(state).tolist()))
    for x, y in zip(drawn, same, strict=True):
        np.testing.assert_array_equal(kit.get(x), kit.get(y))


@pytest.mark.parametrize("state", [5, "ab", True], ids=repr)
def test_what_is_no_state_is_refused(kit: Kit, state: Any) -> None:
    q, k, v = map(kit.put, inputs())
    with pytest.raises(InvalidType, match=r"^`rng_state` must be two integers \(seed, offset\)"):
        attend(q, k, v, dropout_p=0.5, rng_state=state)


# On a GPU


@pytest.mark.gpu
def test_arrays_of_the_host_beside_a_gpu() -> None:
    arrays = inputs()
    with opened("jax_cuda"), opened("jax") as host:
        check(host, attend(*map(host.put, arrays)), arrays)
    with opened("jax_cuda"):
        # Committed to the host, though JAX says so only when it runs.
        put = [jax.device_put(x, jax.devices("cpu")[0]) for x in arrays]
        out, lse = jax.jit(attend)(*put)
        assert {d.platform for d in out.devices()} == {"cpu"}
        judge((np.asarray(out), np.asarray(lse)), *arrays, causal=True)


def test_lengths_and_states_of_another_library(kit: Kit) -> None:
    torch = pytest.importorskip("torch")
    arrays = inputs()
    options = {"seqused_k": np.array([3, 7]), "dropout_p": 0.5, "rng_state": np.array([1, 2])}
    others = {name: torch.tensor(x) if name != "dropout_p" else x for name, x in options.items()}
    check(kit, attend(*map(kit.put, arrays), **others), arrays, **options)
