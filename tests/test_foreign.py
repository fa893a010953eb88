"""Arrays of unknown libraries: DLPack capsules, CUDA array interfaces, streams and results."""

import gc
import sys
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from exporters import CudaExporter, DlpackExporter, capsule_name, install_fake_cuda

from cupyflash._array import HOST, ITEMSIZES, Array, adapter_of, foreign, gpu, host
from cupyflash.errors import InvalidType


def address(x: np.ndarray) -> int:
    return x.__array_interface__["data"][0]


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    return install_fake_cuda(monkeypatch)


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
