"""JAX's callback as on a GPU: buffers that nobody reads, launches that are recorded."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from exporters import DlpackExporter

import cupyflash
from cupyflash import _jit, _kernels, _launch, _modifiers
from cupyflash._array import dlpack, gpu
from cupyflash.masks import PrefixLM, Segments

jax = pytest.importorskip("jax")
pytestmark = pytest.mark.frameworks

from cupyflash import _jax  # noqa: E402
from cupyflash._jax import run  # noqa: E402


class Buffer(DlpackExporter):
    """A C-contiguous buffer of XLA's on CUDA device 1, at an address that nobody reads.

    As of JAX 0.10 ``__cuda_array_interface__`` raises for 8-bit floats.
    """

    def __init__(self, address: int, shape: tuple[int, ...], dtype: Any = np.float16) -> None:
        x = np.empty(shape, dtype)
        super().__init__(x, version=None, device=(2, 1), data=address, strides=None)
        self.shape, self.dtype, self._address = shape, x.dtype, address

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if self.dtype.itemsize == 1:
            raise NotImplementedError(f"Unimplemented primitive type {self.dtype}")
        return {"data": (self._address, False)}


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What device 1 would be given while device 0 is current: (params, device, stream)."""
    given: list[Any] = []
    state = SimpleNamespace(device=0)
    runtime = SimpleNamespace(
        getDevice=lambda: state.device, setDevice=lambda d: setattr(state, "device", d)
    )

    def load(launch: Any, device: int, **_: Any) -> Any:
        return lambda params, stream: given.append((params, state.device, stream))

    def launch(problem: Any, operands: Any) -> Any:
        params = _launch.pack_forward(problem, operands, 0, 1)
        start = _launch.POINTERS.size + _launch.FORWARD.size
        places = _modifiers.places(problem, operands, start)
        return _launch.Launch(
            *("", "fake", "sm_90", (1, 1, 1), (32, 1, 1), 0, params), places=places
        )

    row = _kernels.Kernel(
        "fake", "forward", range(80, 130), "", lambda problem: None, launch=launch
    )
    monkeypatch.setattr(_kernels, "KERNELS", (row,))
    monkeypatch.setattr(_launch, "load", load)
    monkeypatch.setattr(gpu, "_runtime", lambda: runtime)
    monkeypatch.setattr(_jit, "compute_capability", lambda device: 90)
    monkeypatch.setattr(_jax, "device_of", lambda x, name: 1)
    caches = run.bound_of, run.row_of, run.takes
    for cache in caches:
        cache.cache_clear()
    yield given
    for cache in caches:
        cache.cache_clear()


def callback(
    monkeypatch: pytest.MonkeyPatch,
    leads: list[tuple[int, ...]],
    batch: int = 2,
    shift: int = 0,
    dtype: Any = np.float16,
) -> tuple[list[int], list[Any]]:
    """Trace one call on device 1, call it back, and return the addresses of its buffers."""
    calls: list[Any] = []
    monkeypatch.setattr(_jax, "attend", lambda call, *_: calls.append(call) or (0, 0))
    shapes = [(batch, 5, 4, 16), (batch, 9, 2, 16), (batch, 9, 2, 8)]
    host = jax.devices("cpu")[0]
    arrays = [jax.device_put(np.zeros(shape, dtype), host) for shape in shapes]
    cupyflash.attention(*arrays, return_lse=True)
    mapped = np.broadcast_shapes(*leads)
    addresses = [(i + 1 << 20) + shift for i in range(5)]
    inputs = [
        Buffer(address, (*lead, *shape), dtype)
        for address, lead, shape in zip(addresses, leads, shapes, strict=False)
    ]
    results = (
        Buffer(addresses[3], (*mapped, batch, 5, 4, 8), calls[0].problem.output_dtype),
        Buffer(addresses[4], (*mapped, batch, 4, 5), np.float32),
    )
    run.compute(calls[0], SimpleNamespace(stream=77), results, *inputs)
    return addresses, calls


def test_the_callback_launches_on_xlas_buffers_and_stream(
    monkeypatch: pytest.MonkeyPatch, launches: list[Any]
) -> None:
    addresses, calls = callback(monkeypatch, [(), (), ()])
    ((params, device, stream),) = launches
    assert _launch.POINTERS.unpack_from(params) == tuple(addresses)
    assert (device, stream) == (1, 77)
    assert calls[0].problem.arch == 90
    assert calls[0].problem.width == 16
    assert run.bound_of.cache_info().hits == 1  # loaded while tracing


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2])
@pytest.mark.parametrize("lead", [(), (3,)])
def test_the_callback_takes_fp8(
    monkeypatch: pytest.MonkeyPatch, launches: list[Any], lead: tuple[int, ...], dtype: Any
) -> None:
    addresses, _ = callback(monkeypatch, [lead] * 3, dtype=dtype)
    ((params, *_),) = launches
    assert _launch.POINTERS.unpack_from(params) == tuple(addresses)


def test_the_callback_folds_what_is_mapped_into_the_batch(
    monkeypatch: pytest.MonkeyPatch, launches: list[Any]
) -> None:
    addresses, _ = callback(monkeypatch, [(3, 2), (3, 2), (3, 2)])
    callback(monkeypatch, [(3,), (1,), (3,)], batch=1)
    (many, *_), (shared, *_) = launches
    assert _launch.POINTERS.unpack_from(many) == tuple(addresses)
    strides = _launch.FORWARD.unpack_from(many, _launch.POINTERS.size)
    assert strides[:4] + strides[12:13] == (320, 64, 16, 288, 12)
    strides = _launch.FORWARD.unpack_from(shared, _launch.POINTERS.size)
    assert strides[:4] + strides[12:13] == (320, 64, 16, 0, 3)


def test_the_callback_takes_items_apart_that_do_not_fold(
    monkeypatch: pytest.MonkeyPatch, launches: list[Any]
) -> None:
    (q, k, v, out, lse), _ = callback(monkeypatch, [(2, 3), (1, 3), (1, 1)])
    sizes = [1280, 1152, 576, 640, 160]  # bytes of an item
    expected = [
        (q + n * sizes[0], k + j * sizes[1], v, out + n * sizes[3], lse + n * sizes[4])
        for n, (_, j) in enumerate(np.ndindex(2, 3))
    ]
    assert [_launch.POINTERS.unpack_from(params) for params, *_ in launches] == expected


@pytest.mark.parametrize("packed", [False, True])
def test_the_callback_puts_addresses_of_modifiers_in_their_places(
    monkeypatch: pytest.MonkeyPatch, launches: list[Any], packed: bool
) -> None:
    calls: list[Any] = []
    given: list[tuple[Any, ...]] = []
    monkeypatch.setattr(_jax, "attend", lambda call, *x: (calls.append(call), given.append(x)))
    q, k, v = (jax.numpy.zeros((9, 2, 16), np.float16) for _ in "qkv")
    options: dict[str, Any] = {
        "attn_bias": jax.numpy.zeros((2, 1, 9, 9), np.float16),
        "seqused_k": np.array([4, 3]),
        "mask": PrefixLM(3) & Segments(jax.numpy.zeros((2, 9), np.int16)),
        "dropout_p": 0.5,
        "rng_state": (7, 8),
    }
    if packed:
        ends = jax.numpy.zeros(3, np.int32), np.array([0, 4, 9])
        cupyflash.attention_varlen(q, k, v, *ends, **options)
    else:
        cupyflash.attention(*(jax.numpy.stack([x, x]) for x in (q, k, v)), **options)
    names = [spec.name for spec in calls[0].operands]
    for turn in (1, 2):
        addresses = {name: turn << 32 | n << 20 for n, name in enumerate((*names, "out"))}
        buffers = {
            name: Buffer(addresses[name], x.shape, np.dtype(x.dtype))
            for name, x in zip(names, given[0], strict=True)
        }
        out = Buffer(addresses["out"], given[0][0].shape)
        run.compute(calls[0], SimpleNamespace(stream=77), (out,), *buffers.values())
        params, device, stream = launches[-1]
        assert (device, stream) == (1, 77)
        records = {name: run._buffer(x) for name, x in buffers.items()}
        _, places = run.bound_of(calls[0], run.views_of(calls[0], records), 1)
        assert {name for name, _ in places} == {*names} - {"q", "k", "v"}
        for name, at in places:
            assert int.from_bytes(params[at : at + 8], "little") == addresses[name], name
    assert run.bound_of.cache_info().misses == 1  # loaded while tracing


def test_the_callback_notices_odd_addresses(
    monkeypatch: pytest.MonkeyPatch, launches: list[Any]
) -> None:
    widths: list[int] = []
    pack = _launch.pack_forward

    def record(problem: Any, *rest: Any) -> bytes:
        widths.append(problem.width)
        return pack(problem, *rest)

    monkeypatch.setattr(_launch, "pack_forward", record)
    callback(monkeypatch, [(), (), ()], shift=4)
    assert widths == [16, 4]


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "bfloat16", "float32", "bool"])
def test_xlas_own_buffers_say_where_they_are(dtype: str) -> None:
    """What is read on a GPU, of buffers in host memory, whose address NumPy knows too."""
    from jax.experimental.buffer_callback import buffer_callback

    seen: list[tuple[int, int]] = []

    def look(context: Any, result: Any, buffer: Any) -> None:
        address = np.asarray(buffer).__array_interface__["data"][0]
        seen.append((dlpack.address(buffer.__dlpack__()), address))

    result = jax.ShapeDtypeStruct((2,), np.float32)
    with jax.default_device(jax.devices("cpu")[0]):
        jax.block_until_ready(jax.jit(buffer_callback(look, result))(np.ones((2, 3), dtype)))
    ((address, expected),) = seen
    assert address == expected != 0
