"""Every framework's arrays through the public function: its own come back, nothing is copied."""

import sys
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from exporters import DlpackExporter
from harness import judge
from kits import Seen, opened, params

import cupyflash
from cupyflash import InvalidArgument, InvalidType

EVERYWHERE = pytest.mark.parametrize("name", params())
WRITABLE = pytest.mark.parametrize("name", params("numpy", "torch", "cupy", "torch_cuda"))


def inputs(
    dtype: Any = np.float16,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = [(2, 33, 4, 16), (2, 70, 2, 16), (2, 70, 2, 16)]
    q, k, v = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
    return q, k, v


@EVERYWHERE
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_callers_kind_of_array_comes_back(name: str, dtype: str) -> None:
    arrays = inputs(getattr(ml_dtypes, dtype, dtype))
    with opened(name) as kit:
        out, lse = cupyflash.attention(*map(kit.put, arrays), causal=True, return_lse=True)
        assert isinstance(out, kit.kind)
        assert isinstance(lse, kit.kind)
        judge((kit.get(out), kit.get(lse)), *arrays, causal=True)
        alone = cupyflash.attention(*map(kit.put, arrays), causal=True)
        np.testing.assert_array_equal(kit.get(alone), kit.get(out))


@pytest.mark.parametrize("name", params("numpy", "torch"))
def test_float64_is_for_the_host(name: str) -> None:
    arrays = inputs(np.float64)
    with opened(name) as kit:
        out, lse = cupyflash.attention(*map(kit.put, arrays), return_lse=True)
        assert kit.get(out).dtype == kit.get(lse).dtype == np.float64
        ref, ref_lse = cupyflash.reference.attention(*arrays)
        np.testing.assert_allclose(kit.get(out), ref, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(kit.get(lse), ref_lse, rtol=1e-12)


@EVERYWHERE
def test_the_kernel_reads_and_writes_in_place(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(name) as kit:
        arrays = [kit.put(x) for x in inputs()]
        seen = Seen(monkeypatch)
        for run in ("cold", "warm"):
            out, lse = cupyflash.attention(*arrays, return_lse=True)
            kit.get(out)  # JAX computes when it likes to
            if run == "cold" or not name.startswith("jax"):  # which may replay a CUDA graph
                assert seen.calls == [tuple(kit.address(x) for x in (*arrays, out, lse))]
            seen.calls.clear()


@WRITABLE
def test_views_are_read_in_place(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    wide = rng.standard_normal((2, 9, 3, 4, 24)).astype(np.float16)
    with opened(name) as kit:
        base = kit.put(wide)
        views = [x[:, 1:, i, :, 3:19] for i, x in enumerate([base] * 3)]
        seen = Seen(monkeypatch)
        out, lse = cupyflash.attention(*views, return_lse=True)
        assert seen.calls[0][:3] == tuple(map(kit.address, views))
        judge((kit.get(out), kit.get(lse)), *(wide[:, 1:, i, :, 3:19] for i in range(3)))


@WRITABLE
def test_a_transposed_view_comes_back_in_its_order(name: str) -> None:
    q, k, v = (x.transpose(0, 2, 1, 3) for x in inputs())
    with opened(name) as kit:
        out = cupyflash.attention(*map(kit.put, (q, k, v)), layout="bhsd")
        assert tuple(out.shape) == q.shape
        assert kit.get(out).transpose(0, 2, 1, 3).flags.c_contiguous
        straight = cupyflash.attention(*(kit.put(x.copy()) for x in (q, k, v)), layout="bhsd")
        assert kit.get(straight).flags.c_contiguous
        np.testing.assert_array_equal(kit.get(out), kit.get(straight))


@WRITABLE
def test_columns_apart_are_right(name: str) -> None:
    rng = np.random.default_rng(2)
    wide = rng.standard_normal((2, 9, 4, 33)).astype(np.float16)
    with opened(name) as kit:
        spread = kit.put(wide)[..., 1::2]
        out, lse = cupyflash.attention(spread, spread, spread, return_lse=True)
        assert kit.get(out).flags.c_contiguous
        judge((kit.get(out), kit.get(lse)), *[wide[..., 1::2]] * 3)


@WRITABLE
def test_an_output_is_written_and_returned(name: str) -> None:
    arrays = inputs()
    with opened(name) as kit:
        q, k, v = map(kit.put, arrays)
        out = kit.put(np.full(arrays[0].shape, np.nan, np.float16))
        for _ in range(2):
            result, lse = cupyflash.attention(q, k, v, out=out, return_lse=True)
            assert result is out
            judge((kit.get(out), kit.get(lse)), *arrays)
        with pytest.raises(InvalidArgument, match="`out` must not overlap `q`"):
            cupyflash.attention(q, q, q, out=q)


@EVERYWHERE
@pytest.mark.parametrize("empty", ["batch", "len_q", "len_k", "heads", "dim"])
def test_empty_dimensions(name: str, empty: str) -> None:
    sizes = {"batch": 2, "len_q": 3, "len_k": 5, "heads": 4, "dim": 8, empty: 0}
    batch, heads, dim = sizes["batch"], sizes["heads"], sizes["dim"]
    q = np.ones((batch, sizes["len_q"], heads, dim), np.float32)
    k = np.ones((batch, sizes["len_k"], heads, dim), np.float32)
    v = np.ones((batch, sizes["len_k"], heads, 6), np.float32)
    with opened(name) as kit:
        out, lse = cupyflash.attention(*map(kit.put, (q, k, v)), return_lse=True)
        assert tuple(out.shape) == (batch, sizes["len_q"], heads, 6)
        assert tuple(lse.shape) == (batch, heads, sizes["len_q"])
        expected = 0 if empty == "len_k" else 1
        np.testing.assert_array_equal(kit.get(out), expected)
        if empty == "len_k":
            np.testing.assert_array_equal(kit.get(lse), -np.inf)


PAIRS = [
    ("numpy", "torch", pytest.mark.frameworks),
    ("torch", "jax", pytest.mark.frameworks),
    ("jax", "numpy", pytest.mark.frameworks),
    ("numpy", "cupy", pytest.mark.gpu),
    ("torch", "torch_cuda", pytest.mark.gpu),
    ("cupy", "torch_cuda", pytest.mark.gpu),
    ("cupy", "jax_cuda", pytest.mark.gpu),
    ("jax", "jax_cuda", pytest.mark.gpu),
]


@pytest.mark.parametrize("swapped", [False, True], ids=["", "swapped"])
@pytest.mark.parametrize(("a", "b"), [pytest.param(a, b, marks=mark) for a, b, mark in PAIRS])
def test_frameworks_and_devices_do_not_mix(a: str, b: str, swapped: bool) -> None:
    if swapped:
        a, b = b, a
    with opened(a) as first, opened(b) as second:
        q, k, v = inputs()
        mixed = first.put(q), first.put(k), second.put(v)
        words = r"^`v` is a \w+ array .* and `q` is a \w+ array .*: pass arrays of one framework"
        with pytest.raises(InvalidArgument, match=words):
            cupyflash.attention(*mixed)


@EVERYWHERE
def test_integers_and_complex_numbers_are_refused(name: str) -> None:
    with opened(name) as kit:
        for dtype in (np.int32, np.uint8, np.complex64, np.bool_):
            x = kit.put(np.ones((1, 2, 1, 8), dtype))
            with pytest.raises(InvalidType, match="`q` has "):
                cupyflash.attention(x, x, x)


def test_readonly_arrays_are_inputs_and_no_outputs() -> None:
    arrays = inputs()
    for x in arrays:
        x.flags.writeable = False
    out, lse = cupyflash.attention(*arrays, return_lse=True)
    judge((out, lse), *arrays)
    fixed = np.zeros_like(arrays[0])
    fixed.flags.writeable = False
    with pytest.raises(InvalidArgument, match="`out` is read-only"):
        cupyflash.attention(*arrays, out=fixed)


# Unknown libraries


@pytest.mark.parametrize("version", [None, (1, 0), (1, 1)])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_dlpack_exporters_are_taken(version: Any, dtype: str) -> None:
    arrays = inputs(getattr(ml_dtypes, dtype, dtype))
    exporters = [DlpackExporter(x, version=version, readonly=version is not None) for x in arrays]
    out, lse = cupyflash.attention(*exporters, return_lse=True, causal=True)
    judge((out, lse), *arrays, causal=True)
    assert [x.deleted for x in exporters] == [1, 1, 1]


def test_dlpack_exporters_may_be_written_to() -> None:
    arrays = inputs()
    out = DlpackExporter(np.full(arrays[0].shape, np.nan, np.float16))
    result, lse = cupyflash.attention(*map(DlpackExporter, arrays), out=out, return_lse=True)
    assert result is out
    judge((out.x, lse), *arrays)
    fixed = DlpackExporter(out.x, readonly=True)
    with pytest.raises(InvalidArgument, match="`out` is read-only"):
        cupyflash.attention(*map(DlpackExporter, arrays), out=fixed)


def test_a_library_with_from_dlpack_gets_its_own_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type("Tensor", (DlpackExporter,), {"__module__": "tensors.core"})
    monkeypatch.setitem(sys.modules, "tensors", SimpleNamespace(from_dlpack=kind))
    out, lse = cupyflash.attention(*map(kind, inputs()), return_lse=True)
    assert type(out) is type(lse) is kind
    judge((out.x, lse.x), *inputs())


def test_an_exporter_does_not_mix_with_numpy() -> None:
    q, k, v = inputs()
    with pytest.raises(InvalidArgument, match=r"`k` is a numpy array .* and `q` is a dlpack array"):
        cupyflash.attention(DlpackExporter(q), k, v)
    with pytest.raises(InvalidArgument, match=r"`v` is a dlpack array .* and `q` is a numpy array"):
        cupyflash.attention(q, k, DlpackExporter(v))


class Wrapped:
    """A CuPy array as another library would export it."""

    def __init__(self, x: Any, stream: Any = None) -> None:
        self.x, self.stream, self.streams = x, stream, []


class Dlpack(Wrapped):
    def __dlpack_device__(self) -> Any:
        return self.x.__dlpack_device__()

    def __dlpack__(self, **arguments: Any) -> Any:
        self.streams.append(arguments["stream"])
        return self.x.__dlpack__(**arguments)


class Interface(Wrapped):
    @property
    def __cuda_array_interface__(self) -> Any:
        return {**self.x.__cuda_array_interface__, "version": 3, "stream": self.stream}


@pytest.mark.gpu
@pytest.mark.parametrize("wrap", [Dlpack, Interface])
def test_exporters_on_a_gpu_are_taken(wrap: type[Wrapped]) -> None:
    arrays = inputs()
    with opened("cupy") as kit:
        own = [kit.put(x) for x in arrays]
        out, lse = cupyflash.attention(*map(wrap, own), return_lse=True)
        assert isinstance(out, kit.kind)
        judge((kit.get(out), kit.get(lse)), *arrays)
        spread = kit.put(np.repeat(arrays[0], 2, axis=-1))[..., ::2]
        apart = cupyflash.attention(wrap(spread), *map(wrap, own[1:]))
        np.testing.assert_array_equal(kit.get(apart), kit.get(out))


@pytest.mark.gpu
def test_exporters_are_told_the_current_stream() -> None:
    with opened("cupy") as kit:
        import cupy

        own = [Dlpack(kit.put(x)) for x in inputs()]
        cupyflash.attention(*own)
        side = cupy.cuda.Stream(non_blocking=True)
        with side:
            cupyflash.attention(*own)
        side.synchronize()
        assert [x.streams for x in own] == [[1, side.ptr]] * 3


@pytest.mark.gpu
def test_the_stream_of_an_interface_is_waited_for() -> None:
    import cupy
    import gpu

    with opened("cupy") as kit:
        arrays = inputs()
        own = [kit.put(x) for x in arrays]
        late = cupy.zeros_like(own[2])
        producer, consumer = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
        cupyflash.attention(*map(Interface, own))  # compiled by now
        cupy.cuda.Device().synchronize()
        with producer:
            gpu.spin(50, producer)
            late[...] = own[2]
        with consumer:
            q, k = map(Interface, own[:2])
            out = cupyflash.attention(q, k, Interface(late, producer.ptr))
            assert not consumer.done
        consumer.synchronize()
        np.testing.assert_array_equal(kit.get(out), kit.get(cupyflash.attention(*own)))
