"""The adapters' records of arrays: NumPy, CuPy without a GPU, and fake foreign exporters."""

import gc
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from exporters import CudaExporter, DlpackExporter, capsule_name

from cupyflash._array import (
    HOST,
    ITEMSIZES,
    Array,
    adapter_of,
    check_together,
    contiguous_strides,
    device_guard,
    foreign,
    gpu,
    host,
    normal_strides,
)
from cupyflash.errors import InvalidArgument, InvalidType


def record(x: Any) -> Array:
    return adapter_of(x, "q").array(x, "q")


def address(x: np.ndarray) -> int:
    return x.__array_interface__["data"][0]


def strided(shape: tuple[int, ...], strides: tuple[int, ...]) -> np.ndarray:
    """An array with these strides in bytes, whatever they are: nothing may read it."""
    return np.lib.stride_tricks.as_strided(np.zeros(1 << 12, np.float32), shape, strides)


# NumPy


@pytest.mark.parametrize("name", ITEMSIZES)
def test_a_numpy_array_is_read_in_place(name: str) -> None:
    x = np.zeros((2, 3, 4, 8), getattr(ml_dtypes, name, name))
    assert record(x) == Array(
        address(x), (2, 3, 4, 8), (96, 32, 8, 1), name, HOST, "numpy", False, x
    )


def test_views_keep_their_strides_and_offset() -> None:
    base = np.zeros((3, 5, 4, 16), np.float16)
    x = base[1:, ::-2, :, 3:11].transpose(0, 2, 1, 3)
    got = record(x)
    assert got.pointer == address(base) + 2 * (320 + 4 * 64 + 3)
    assert got.shape == (2, 4, 3, 8)
    assert got.strides == (320, 16, -128, 1)
    assert record(base[..., ::-1]).strides[-1] == -1
    assert record(np.broadcast_to(base[:1, :1, :, :1], base.shape)).strides == (0, 0, 16, 0)


@pytest.mark.parametrize("odd", [4, 0, 12, 1 << 42, -4, 3])
def test_strides_of_size_one_do_not_count(odd: int) -> None:
    assert record(strided((2, 1, 3, 8), (96, odd, 32, 4))).strides == (24, 24, 8, 1)
    assert record(strided((2, 3, 8, 1), (96, 32, 4, odd))).strides == (24, 8, 1, 1)
    assert record(strided((1, 1), (odd, odd))).strides == (1, 1)


def test_arrays_without_elements_are_contiguous() -> None:
    for shape in [(0, 3, 4, 8), (2, 0, 4, 8), (2, 3, 0, 8), (2, 3, 4, 0)]:
        got = record(np.zeros(shape, np.float32)[::-1])
        assert (got.shape, got.strides) == (shape, contiguous_strides(shape))
    assert record(np.zeros((), np.float32)).strides == ()


def test_normal_strides_of_a_contiguous_array_are_the_contiguous_ones() -> None:
    for shape in [(), (1,), (5,), (2, 1, 3), (1, 1, 7), (3, 0, 2)]:
        odd = tuple(
            s if n > 1 else 77 for n, s in zip(shape, contiguous_strides(shape), strict=True)
        )
        assert normal_strides(shape, odd) == contiguous_strides(shape)


def test_readonly_arrays_are_taken_and_marked() -> None:
    x = np.zeros((2, 3), np.float32)
    writable = adapter_of(x, "q").facts(x)
    x.flags.writeable = False
    assert record(x).readonly
    assert adapter_of(x, "q").facts(x) != writable


@pytest.mark.parametrize(
    "x",
    [
        np.zeros((2, 3), np.complex64),
        np.zeros((2, 3), ">f4"),
        np.zeros((2, 3), ">i8"),
        np.zeros((2, 3), np.longdouble),
        np.zeros((2, 3), object),
        np.zeros((2, 3), [("a", "f4")]),
        np.zeros((2, 3), "M8[s]"),
        np.zeros((2, 3), "U4"),
        np.zeros((2, 3), "V2"),
        np.zeros((2, 3), ml_dtypes.float8_e4m3fnuz),
        np.zeros((2, 3), ml_dtypes.int4),
        np.zeros((2, 3), np.dtype(ml_dtypes.bfloat16).newbyteorder()),
    ],
    ids=lambda x: x.dtype.str,
)
def test_other_element_types_are_refused(x: np.ndarray) -> None:
    with pytest.raises(InvalidType, match=r"^`q` has elements of type .*: expected .*convert it$"):
        record(x)


def test_strides_of_broken_elements_are_refused() -> None:
    packed = np.zeros((4, 8), [("a", "f4"), ("b", "i2")])["a"]
    with pytest.raises(InvalidArgument, match=r"`q` must have strides of whole elements"):
        record(packed)
    assert record(packed[:, :1][:1]).strides == (1, 1)


@pytest.mark.parametrize("x", [None, 1.5, "q", [[1.0, 2.0]], (1, 2), {}, np.float32(1)])
def test_what_is_no_array_is_refused(x: Any) -> None:
    with pytest.raises(InvalidType, match=r"^`q` must be an array of .*, got "):
        adapter_of(x, "q")


def test_subclasses_with_a_meaning_of_their_own_are_refused(tmp_path: Any) -> None:
    masked = np.ma.masked_array(np.zeros((2, 3)), mask=True)
    for x in [masked, np.zeros(3).view(np.recarray)]:
        with pytest.raises(InvalidType, match=r"subclass of numpy\.ndarray"):
            adapter_of(x, "q")
    mapped = np.memmap(tmp_path / "x", np.float32, "w+", shape=(2, 3))
    assert record(mapped).pointer == address(mapped)


def test_facts_tell_apart_whatever_changes_a_plan() -> None:
    x = np.zeros((2, 3, 4, 8), np.float32)
    different = [
        x,
        x.astype(np.float64),
        x.astype(ml_dtypes.bfloat16),
        x.astype(np.float16),
        x[:1],
        x[:, ::-1],
        x.transpose(1, 0, 2, 3),
    ]
    facts = [adapter_of(y, "q").facts(y) for y in different]
    assert len(set(facts)) == len(facts)
    again = np.zeros((2, 3, 4, 8), np.float32)
    assert adapter_of(again, "q").facts(again) == facts[0]


def test_numpy_allocates_in_any_order() -> None:
    adapter = adapter_of(np.zeros(1), "q")
    x = adapter.empty_strided((2, 3, 4, 8), (96, 8, 24, 1), "bfloat16", HOST)
    assert (x.dtype, x.strides) == (ml_dtypes.bfloat16, (192, 16, 48, 2))
    assert record(adapter.empty((2, 0, 5), "float64", HOST)).strides == (0, 5, 1)


def test_numpys_view_of_a_record_shares_its_memory() -> None:
    x = np.arange(24, dtype=np.float32).astype(ml_dtypes.bfloat16).reshape(2, 3, 4)
    for y in [x, x[:, ::-1, 1:], x.transpose(2, 0, 1), np.broadcast_to(x[:1], x.shape)]:
        view = host.host_view(record(y))
        np.testing.assert_array_equal(view, y)
        assert address(view) == address(y)
        assert view.flags.writeable == y.flags.writeable
    assert host.host_view(record(x[:0])).shape == (0, 3, 4)


def test_recognising_numpy_imports_no_framework() -> None:
    code = (
        "import sys, numpy\n"
        "from cupyflash._array import adapter_of\n"
        "x = numpy.zeros((2, 3))\n"
        "adapter_of(x, 'q').array(x, 'q')\n"
        "print({'cupy', 'torch', 'jax'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_a_framework_that_is_half_imported_is_no_obstacle(monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "jax", SimpleNamespace())

    class Half:
        __dlpack__ = __dlpack_device__ = None

    assert adapter_of(Half(), "q").foreign


def test_threads_may_meet_a_type_at_once() -> None:
    class Foreign:
        __dlpack__ = __dlpack_device__ = None

    barrier, found = threading.Barrier(16), []

    def ask() -> None:
        barrier.wait()
        found.append(adapter_of(Foreign(), "q"))

    threads = [threading.Thread(target=ask) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 16
    assert len(set(map(id, found))) == 1


# DLPack


def admitted(x: Any) -> Array:
    return adapter_of(x, "q").admit(x, "q")


@pytest.mark.parametrize("version", [None, (1, 0), (1, 1), (1, 9)])
@pytest.mark.parametrize("name", ITEMSIZES)
def test_capsules_are_read_in_place(version: Any, name: str) -> None:
    x = np.zeros((2, 3, 4, 8), getattr(ml_dtypes, name, name))[:, ::-1]
    got = admitted(DlpackExporter(x, version=version))
    assert got[:-1] == (address(x), x.shape, (96, -32, 8, 1), name, HOST, "dlpack", False)


@pytest.mark.parametrize("version", [None, (1, 1)])
def test_a_capsule_is_consumed_and_its_tensor_freed_once(version: Any) -> None:
    exporter = DlpackExporter(np.arange(6, dtype=np.float32).reshape(2, 3), version=version)
    got = admitted(exporter)
    view = host.host_view(got)
    assert capsule_name(exporter.capsules[0]).startswith("used_dltensor")
    del got
    gc.collect()
    assert exporter.deleted == 0
    np.testing.assert_array_equal(view, exporter.x)
    del view
    gc.collect()
    assert exporter.deleted == 1


def test_the_deleter_may_be_null() -> None:
    exporter = DlpackExporter(np.zeros((2, 3), np.float32))
    capsule = exporter.__dlpack__()
    exporter._alive[-3].deleter = None
    exporter.__dlpack__ = None  # type: ignore[method-assign]
    foreign.dlpack.consume(capsule, "q")
    gc.collect()
    assert exporter.deleted == 0


def test_a_capsule_cannot_be_consumed_twice() -> None:
    exporter = DlpackExporter(np.zeros((2, 3), np.float32))
    got = admitted(exporter)
    exporter._capsule = lambda: exporter.capsules[0]  # type: ignore[method-assign]
    with pytest.raises(InvalidType, match="fresh DLPack capsule"):
        admitted(exporter)
    assert exporter.deleted == 0
    del got
    assert exporter.deleted == 1


def test_many_round_trips_free_all() -> None:
    exporter = DlpackExporter(np.zeros((2, 3), np.float32))
    for _ in range(1000):
        admitted(exporter)
    assert exporter.deleted == 1000


@pytest.mark.parametrize("error", [BufferError, TypeError, ValueError])
def test_a_refusal_to_export_names_the_argument(error: type) -> None:
    class Refuses(DlpackExporter):
        def __dlpack__(self, **arguments: Any) -> Any:
            raise error("not today")

    with pytest.raises(InvalidType, match="`q` refuses to be exported through DLPack: not today"):
        admitted(Refuses(np.zeros(3)))


@pytest.mark.parametrize(
    "fields",
    [
        {"lanes": 2},
        {"code": 5, "bits": 64},  # complex
        {"code": 3, "bits": 64},  # opaque
        {"code": 2, "bits": 8},
        {"code": 11, "bits": 8},  # float8_e4m3fnuz
        {"code": 17, "bits": 4},  # float4_e2m1fn
    ],
    ids=str,
)
def test_other_element_types_of_capsules_are_refused(fields: dict[str, int]) -> None:
    exporter = DlpackExporter(np.zeros((2, 3), np.float32), **fields)
    with pytest.raises(InvalidType, match="`q` must have a real element type"):
        admitted(exporter)
    gc.collect()
    assert exporter.deleted == 1


def test_a_later_major_version_is_freed_unread() -> None:
    exporter = DlpackExporter(np.zeros((2, 3), np.float32), version=(2, 0))
    with pytest.raises(InvalidType, match="`q` must export DLPack version 1, got 2"):
        admitted(exporter)
    gc.collect()
    assert exporter.deleted == 1


def test_fields_of_a_capsule_are_honoured() -> None:
    x = np.zeros((2, 3, 8), np.float32)
    assert admitted(DlpackExporter(x, byte_offset=32)).pointer == address(x) + 32
    assert admitted(DlpackExporter(x, strides=None)).strides == (24, 8, 1)
    assert admitted(DlpackExporter(x, readonly=True)).readonly
    assert not admitted(DlpackExporter(x)).readonly
    odd = DlpackExporter(np.zeros((2, 1, 8), np.float32), strides=(8, 1 << 40, 1))
    assert admitted(odd).strides == (8, 8, 1)
    assert admitted(DlpackExporter(np.zeros((), np.float32))).shape == ()
    empty = admitted(DlpackExporter(np.zeros((0, 8), np.float32), data=None, byte_offset=64))
    assert (empty.pointer, empty.strides) == (0, (8, 1))


def test_an_exporter_on_the_host_gets_no_stream() -> None:
    exporter = DlpackExporter(np.zeros(3, np.float32))
    admitted(exporter)
    assert exporter.calls == [{"max_version": (1, 1)}]
    legacy = DlpackExporter(np.zeros(3, np.float32), version=None)
    admitted(legacy)
    assert legacy.calls == [{"max_version": (1, 1)}, {}]
    pinned = DlpackExporter(np.zeros(3, np.float32), device=(3, 0))
    assert admitted(pinned).device == HOST


@pytest.fixture
def fake_cuda(monkeypatch: Any) -> SimpleNamespace:
    """A CUDA runtime that only remembers: the current device, and stream ``100 + device``."""
    state = SimpleNamespace(device=0, moves=[], waits=[], stream=lambda device: 100 + device)

    def set_device(device: int) -> None:
        state.device = device
        state.moves.append(device)

    runtime = SimpleNamespace(getDevice=lambda: state.device, setDevice=set_device)
    monkeypatch.setattr(gpu, "_runtime", lambda: runtime)
    monkeypatch.setattr(foreign.ForeignAdapter, "stream", lambda self, d: state.stream(d))
    monkeypatch.setattr(foreign, "_device_of", lambda pointer: pointer >> 32)
    monkeypatch.setattr(foreign, "_wait_for", lambda *streams: state.waits.append(streams))
    return state


@pytest.mark.parametrize(("handle", "told"), [(0, 1), (1, 1), (2, 2), (0x55, 0x55)])
@pytest.mark.parametrize("kind", [2, 13])
def test_an_exporter_on_a_gpu_is_told_the_launch_stream(
    fake_cuda: SimpleNamespace, handle: int, told: int, kind: int
) -> None:
    fake_cuda.stream = lambda device: handle
    exporter = DlpackExporter(np.zeros(3, np.float32), device=(kind, 1))
    assert admitted(exporter).device == 1
    assert exporter.calls == [{"max_version": (1, 1), "stream": told}]
    # Some exporters refuse unless their device is current.
    assert fake_cuda.moves == [1, 0]


@pytest.mark.parametrize("kind", [4, 7, 8, 10, 14])
def test_other_devices_are_refused(kind: int) -> None:
    with pytest.raises(InvalidType, match=f"got DLPack device type {kind}"):
        admitted(DlpackExporter(np.zeros(3, np.float32), device=(kind, 0)))


# __cuda_array_interface__


def test_interfaces_are_read_in_place(fake_cuda: SimpleNamespace) -> None:
    x = CudaExporter(shape=(2, 3, 8), typestr="<f2", data=(1 << 32, False))
    assert admitted(x) == Array(1 << 32, (2, 3, 8), (24, 8, 1), "float16", 1, "dlpack", False, x)
    y = CudaExporter(
        shape=(2, 3, 8), typestr="<f4", data=(3 << 32, True), strides=(4, 64, -8), stream=5
    )
    assert admitted(y)[:-1] == (
        3 << 32, (2, 3, 8), (1, 16, -2), "float32", 3, "dlpack", True
    )  # fmt: skip
    assert fake_cuda.waits == [(5, 103, 3)]
    empty = CudaExporter(shape=(0, 8), typestr="<f4", data=(0, False))
    assert admitted(empty).pointer == 0
    none = CudaExporter(shape=(0, 8), typestr="<f4", data=(None, False))
    assert admitted(none).pointer == 0


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_interfaces_carry_types_that_have_no_type_string(
    fake_cuda: SimpleNamespace, name: str
) -> None:
    dtype = np.dtype(getattr(ml_dtypes, name))
    x = CudaExporter(dtype, shape=(2, 8), typestr=dtype.str, data=(64, False))
    assert admitted(x).dtype == name
    raw = CudaExporter(shape=(2, 8), typestr=f"|V{dtype.itemsize}", data=(64, False))
    with pytest.raises(InvalidType, match="`q` has elements of type"):
        admitted(raw)


@pytest.mark.parametrize("typestr", [">f4", "<c8", "|O8", "<M8[s]", "nonsense"])
def test_other_element_types_of_interfaces_are_refused(typestr: str) -> None:
    with pytest.raises(InvalidType, match="`q` has elements of type"):
        admitted(CudaExporter(shape=(2,), typestr=typestr, data=(64, False)))


def test_interfaces_with_a_mask_are_refused(fake_cuda: SimpleNamespace) -> None:
    with pytest.raises(InvalidType, match="`q` has a mask"):
        admitted(CudaExporter(shape=(2,), typestr="<f4", data=(64, False), mask=object()))


@pytest.mark.parametrize(("producer", "consumer"), [(1, 0), (1, 1), (2, 2), (7, 7)])
def test_a_stream_need_not_wait_for_itself(producer: int, consumer: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(foreign, "import_cupy", lambda: pytest.fail("an event was made"))
    foreign._wait_for(producer, consumer, 0)


def test_another_stream_is_waited_for_without_the_host(
    fake_cuda: SimpleNamespace, monkeypatch: Any
) -> None:
    monkeypatch.undo()
    order: list[Any] = []

    class Stream:
        def __init__(self, handle: int) -> None:
            self.record = lambda event: order.append(("record", handle, event))
            self.wait_event = lambda event: order.append(("wait", handle, event))

        @classmethod
        def from_external(cls, stream: Any) -> "Stream":
            version, handle = stream.__cuda_stream__()
            assert version == 0
            return cls(handle)

    cuda = SimpleNamespace(Stream=Stream, Event=lambda disable_timing: "event")
    monkeypatch.setattr(foreign, "import_cupy", lambda: SimpleNamespace(cuda=cuda))
    runtime = SimpleNamespace(getDevice=lambda: 0, setDevice=order.append)
    monkeypatch.setattr(gpu, "_runtime", lambda: runtime)
    foreign._wait_for(9, 7, 0)
    assert order == [("record", 9, "event"), ("wait", 7, "event")]


# Results for foreign callers


def test_results_go_back_through_the_library_of_the_caller(monkeypatch: Any) -> None:
    kind = type("Tensor", (DlpackExporter,), {"__module__": "some_library.core"})
    adapter = adapter_of(kind(np.zeros(3, np.float32)), "q")
    out = adapter.empty((2, 3), "float32", HOST)
    assert (out.shape, out.strides, out.device) == ((2, 3), (3, 1), HOST)
    assert adapter.array(out, "out") is out
    result = adapter.deliver(out)
    assert isinstance(result, np.ndarray)
    assert address(result) == out.pointer

    library = SimpleNamespace(from_dlpack=lambda x: ("theirs", x))
    monkeypatch.setitem(sys.modules, "some_library", library)
    assert adapter.deliver(out) == ("theirs", result)

    def refuse(x: Any) -> None:
        raise BufferError("no bfloat16 here")

    library.from_dlpack = refuse
    assert adapter.deliver(out) is result


# CuPy, without a GPU: arrays over addresses that nobody reads


@pytest.fixture
def cupy() -> Any:
    return pytest.importorskip("cupy")


def cupy_array(cupy: Any, shape: tuple[int, ...], dtype: Any, **options: Any) -> Any:
    memory = cupy.cuda.UnownedMemory(1 << 40, 1 << 20, None, 0)
    pointer = cupy.cuda.MemoryPointer(memory, options.pop("offset", 0))
    return cupy.ndarray(shape, dtype, pointer, **options)


@pytest.mark.parametrize("name", ITEMSIZES)
def test_a_cupy_array_is_read_in_place(cupy: Any, name: str) -> None:
    x = cupy_array(cupy, (2, 3, 4, 8), np.dtype(getattr(ml_dtypes, name, name)), offset=64)
    adapter = adapter_of(x, "q")
    assert record(x)[:-1] == (
        (1 << 40) + 64, (2, 3, 4, 8), (96, 32, 8, 1), name, 0, "cupy", False
    )  # fmt: skip
    assert adapter.pointer(x) == record(x).pointer
    assert hash(adapter.facts(x)) == hash(adapter.facts(x.view()))
    assert adapter.facts(x) != adapter.facts(x[:, ::-1])
    assert adapter.contiguous_last(x) is x


def test_cupy_views_keep_their_strides(cupy: Any) -> None:
    x = cupy_array(cupy, (2, 3, 4, 8), np.float32).transpose(0, 2, 1, 3)[:, ::-1, :1]
    assert record(x).strides == (96, -8, 8, 1)
    assert record(x).pointer == (1 << 40) + 3 * 8 * 4
    one = cupy_array(cupy, (2, 8), np.float32, strides=(32, 4))[:, :1]
    assert adapter_of(one, "q").contiguous_last(one) is one


def test_other_cupy_arrays_are_refused(cupy: Any) -> None:
    with pytest.raises(InvalidType, match="`q` has elements of type complex64"):
        record(cupy_array(cupy, (2, 3), np.complex64))
    subclass = type("Sub", (cupy.ndarray,), {})
    x = subclass((2,), np.float32, cupy_array(cupy, (2,), np.float32).data)
    with pytest.raises(InvalidType, match=r"subclass of cupy\.ndarray"):
        adapter_of(x, "q")


def test_cupy_allocates_in_one_step_of_the_callers_allocator(cupy: Any) -> None:
    asked: list[int] = []
    memory = cupy_array(cupy, (1,), np.uint8).data

    def allocate(size: int) -> Any:
        asked.append(size)
        return memory

    adapter = adapter_of(cupy_array(cupy, (2,), np.float32), "q")
    with cupy.cuda.using_allocator(allocate):
        x = adapter.empty_strided((2, 3, 4, 8), (96, 8, 24, 1), "bfloat16", 0)
        y = adapter.empty((0, 8), "float32", 0)
    assert asked == [2 * 192, 0]
    assert (x.shape, x.strides, x.dtype) == ((2, 3, 4, 8), (192, 16, 48, 2), ml_dtypes.bfloat16)
    assert y.shape == (0, 8)


def test_a_foreign_array_as_cupy_sees_it(cupy: Any) -> None:
    x = Array((1 << 40) + 28, (2, 8), (16, -1), "bfloat16", 0, "dlpack", False, object())
    view = foreign._cupy_view(x)
    assert (view.data.ptr, view.strides) == (x.pointer, (32, -2))
    assert view.data.mem.ptr == x.pointer - 14
    assert view.data.mem.size == 14 + 32 + 2


# The current device


def test_the_guard_moves_and_restores(fake_cuda: SimpleNamespace) -> None:
    with device_guard(0):
        pass
    assert fake_cuda.moves == []
    with device_guard(2):
        assert fake_cuda.device == 2
        with device_guard(1):
            assert fake_cuda.device == 1
        assert fake_cuda.device == 2
    assert fake_cuda.device == 0
    with pytest.raises(KeyError), device_guard(3):
        raise KeyError
    assert fake_cuda.device == 0
    with device_guard(0):
        fake_cuda.device = 5  # by what ran inside
    assert fake_cuda.device == 0


def test_the_guard_leaves_host_memory_alone(monkeypatch: Any) -> None:
    monkeypatch.setattr(gpu, "_runtime", lambda: pytest.fail("no device is needed"))
    with device_guard(HOST):
        pass


# Together


def test_arrays_of_one_framework_and_device_go_together() -> None:
    x = record(np.zeros((2, 3), np.float32))
    check_together([("q", x), ("k", x._replace(dtype="float16")), ("v", x)])
    for other in [{"framework": "torch"}, {"device": 1}, {"framework": "torch", "device": 0}]:
        with pytest.raises(InvalidArgument, match=r"^`v` is .* and `q` is a numpy array in host"):
            check_together([("q", x), ("k", x), ("v", x._replace(**other))])
