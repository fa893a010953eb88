"""The adapters' records of arrays: NumPy, CuPy without a GPU, and fake foreign exporters."""

import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from exporters import install_fake_cuda

from cupyflash._array import (
    HOST,
    ITEMSIZES,
    Array,
    adapter_of,
    base,
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

    assert adapter_of(Half(), "q").elsewhere


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
    assert adapter.contiguous_last(x) is adapter.contiguous(x) is x


def test_what_a_captured_graph_uses_is_kept(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    monkeypatch.setattr(base, "_kept", kept)
    x = cupy_array(cupy, (2,), np.float32)
    adapter_of(x, "q").keep(x)
    assert kept[0] is x
    torch = pytest.importorskip("torch")  # whose graphs keep their memory themselves
    adapter_of(torch.zeros(2), "q").keep(torch.zeros(2))
    assert len(kept) == 1


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


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    return install_fake_cuda(monkeypatch)


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
