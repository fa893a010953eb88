"""A GPU that is none: arrays of a made-up framework, and a kernel that computes on the host.

The kernel decodes the bytes of a launch by the C struct of attention_fwd_sm80 or attention_fwd_sm90
and computes by the CPU path through the pointers and strides that it finds there, so that a wrong
byte is a wrong result. The driver that encodes tensor maps is one whose maps can be read.
"""

import ctypes
import re
from ctypes import c_float, c_int, c_longlong, c_uint, c_ulonglong, c_void_p
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from fake_policies import Reader

from cupyflash import (
    _array,
    _call,
    _cpu,
    _driver,
    _facts,
    _jit,
    _launch,
    _tensor_map,
    _tickets,
    reference,
)
from cupyflash._array import ITEMSIZES, Adapter, Array
from cupyflash._array.base import dtype_name, element_strides
from cupyflash._array.host import empty_strided, host_view

LOG2_E = 1.4426950408889634
DTYPES = {
    "Float16": "float16", "Bfloat16": "bfloat16", "Float32": "float32",
    "Float8E4m3": "float8_e4m3fn", "Float8E5m2": "float8_e5m2",
}  # fmt: skip


class Params(ctypes.Structure):
    """Params of cuda/kernels/attention_fwd_sm80.cu, up to those of the policies."""

    _fields_ = [
        *((name, c_void_p) for name in ("q", "k", "v", "o", "lse")),
        *((f"{x}_{axis}", c_longlong) for x in "qkvo" for axis in ("batch", "row", "head")),
        *((name, c_int) for name in ("batch", "len_q", "len_k", "heads_q", "heads_k")),
        *((name, c_int) for name in ("head_dim", "head_dim_v", "group")),
        ("scale", c_float),
        ("natural_scale", c_float),
    ]


class Map(ctypes.Structure):
    """A tensor map of the fake driver: 128 bytes that say what it was asked for."""

    _fields_ = [
        ("pointer", c_ulonglong),
        ("shape", c_ulonglong * 4),
        ("strides", c_ulonglong * 3),
        ("box", c_uint * 4),
        ("dtype", c_int),
        ("swizzle", c_int),
        ("rest", ctypes.c_char * 40),
    ]


class ParamsSm90(ctypes.Structure):
    """Params of cuda/kernels/attention_fwd_sm90.cu, up to those of the policies."""

    _fields_ = [
        *((name, Map) for name in ("q", "k", "v", "o")),
        *((name, c_void_p) for name in ("out", "lse", "tickets")),
        *((f"o_{axis}", c_longlong) for axis in ("batch", "row", "head")),
        *((f"{x}_descale", c_longlong * 3) for x in "qkv"),
        *((name, c_int) for name in ("batch", "len_q", "len_k", "heads_q", "heads_k")),
        *((name, c_int) for name in ("head_dim_v", "group")),
        ("scale", c_float),
    ]


ALIGNMENTS = {Params: 8, ParamsSm90: 64}  # of the structs of C: a tensor map's is 64


class FakeArray:
    """NumPy memory that claims to be on a CUDA device."""

    def __init__(self, host: np.ndarray, device: int = 0) -> None:
        self.host = host
        self.device = device
        self.shape = host.shape


class FakeAdapter(Adapter):
    """Of `FakeArray`; ``calls`` counts what is asked of it."""

    framework = "fake"

    def __init__(self) -> None:
        self.recording = False
        self.copies = 0
        self.uploads = 0
        self.kept: list[FakeArray] = []
        self.allocated: list[tuple[tuple[int, ...], str]] = []

    def facts(self, x: FakeArray) -> tuple[Any, ...]:
        return (x.host.shape, x.host.strides, x.host.dtype, x.device)

    def pointer(self, x: FakeArray) -> int:
        return x.host.ctypes.data if x.host.size else 0

    def device(self, x: FakeArray) -> int:
        return x.device

    def array(self, x: FakeArray, name: str) -> Array:
        strides = element_strides(x.host.shape, x.host.strides, x.host.itemsize, name)
        return Array(
            self.pointer(x), x.host.shape, strides, dtype_name(x.host.dtype, name), x.device,
            self.framework, not x.host.flags.writeable, x,
        )  # fmt: skip

    def empty_strided(
        self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str, device: int
    ) -> FakeArray:
        self.allocated.append((shape, dtype))
        host = empty_strided(shape, strides, dtype)
        host[...] = 0xFF if dtype == "uint8" else np.nan
        return FakeArray(host, device)

    def upload(self, x: np.ndarray, device: int) -> FakeArray:
        self.uploads += 1
        return FakeArray(x.copy(), device)

    def full(self, value: float, device: int) -> FakeArray:
        return FakeArray(np.full((), value, np.float32), device)

    def stream(self, device: int) -> int:
        return 1000 + device

    def capturing(self, device: int) -> bool:
        return self.recording

    def contiguous_last(self, x: FakeArray) -> FakeArray:
        if x.host.strides[-1] == x.host.itemsize:
            return x
        return self.contiguous(x)

    def contiguous(self, x: FakeArray) -> FakeArray:
        if not x.host.flags.c_contiguous:
            self.copies += 1
            x = FakeArray(np.ascontiguousarray(x.host), x.device)
        return x

    def keep(self, x: FakeArray) -> None:
        self.kept.append(x)


TICKETS = 0x7000  # the address of the counter of tiles of a stream, less its handle


class FakeKernel:
    """A loaded function: what `cupy.cuda.function.Function` is to a launch."""

    def __init__(self, unit: str, shared_bytes: int, launches: list[SimpleNamespace]) -> None:
        self.unit = unit
        self.shared_bytes = shared_bytes
        self.launches = launches

    def __call__(
        self, grid: Any, block: Any, args: Any, shared_mem: int = 0, stream: Any = None
    ) -> None:
        (argument,) = args
        assert type(argument) is np.void  # by value
        params = argument.tobytes()
        assert shared_mem == self.shared_bytes
        struct: Any = ParamsSm90 if "attention_fwd_sm90" in self.unit else Params
        p = struct.from_buffer_copy(params)
        sizes = {name: getattr(p, name) for name in ("batch", "len_q", "len_k", "heads_q")}
        policies = Reader(self.unit, params[ctypes.sizeof(struct) :], sizes)
        assert policies.rest == bytes(-(len(params) - len(policies.rest)) % ALIGNMENTS[struct])
        options = policies.options | self.descales(p)
        self.launches.append(
            SimpleNamespace(
                grid=grid, block=block, shared=shared_mem, stream=stream.ptr, unit=self.unit, p=p,
                options=options, bytes=len(params),
            )
        )  # fmt: skip
        dtype = DTYPES[re.search(r"using T = (\w+);", self.unit)[1]]
        self.compute(p, dtype, options)

    def compute(self, p: Any, dtype: str, options: dict[str, Any]) -> None:
        """Compute by the CPU path with what the policies in Params say."""
        batch = 1 if "cu_seqlens_q" in options else p.batch
        lse = None
        if p.lse:
            shape = (batch, p.heads_q, p.len_q)
            strides = _array.contiguous_strides(shape)
            lse = host_view(Array(p.lse, shape, strides, "float32", -1, "", False, None))
        q, k, v, out = (self.view(p, x, dtype, batch) for x in "qkvo")
        _cpu.attention(q, k, v, out, lse, scale=self.scale(p), **options)

    def scale(self, p: Any) -> float:
        """The scale of the scores; Params have it in base 2 where nothing else acts on them."""
        if isinstance(p, Params):
            assert p.scale == pytest.approx(p.natural_scale * LOG2_E, rel=1e-6)
            return p.natural_scale
        return p.scale / LOG2_E if "using Score = Identity;" in self.unit else p.scale

    def descales(self, p: Any) -> dict[str, np.ndarray]:
        """What the operands are multiplied by."""
        found = {}
        for name in ("q_descale", "k_descale", "v_descale"):
            pointer, *strides = getattr(p, name, (0, 0, 0))
            if pointer:
                shape = (p.batch, p.heads_k)
                array = Array(pointer, shape, tuple(strides), "float32", -1, "fake", False, None)
                found[name] = host_view(array)
        return found

    def view(self, p: Any, x: str, dtype: str, batch: int) -> np.ndarray:
        """The operand that the parameters describe."""
        if isinstance(p, ParamsSm90):
            return self.mapped(p, x, dtype, batch)
        length, heads = (p.len_q, p.heads_q) if x in "qo" else (p.len_k, p.heads_k)
        shape = (batch, length, heads, p.head_dim if x in "qk" else p.head_dim_v)
        strides = tuple(getattr(p, f"{x}_{axis}") for axis in ("batch", "row", "head"))
        return host_view(
            Array(getattr(p, x) or 0, shape, (*strides, 1), dtype, -1, "fake", False, None)
        )

    def mapped(self, p: ParamsSm90, x: str, dtype: str, batch: int) -> np.ndarray:
        tensor = getattr(p, x)
        if not any(tensor.shape):  # a map of nothing
            dim = p.q.shape[0] if x == "k" else p.head_dim_v
            return np.zeros((batch, 0, p.heads_k, dim), _array.host_dtype(dtype))
        block_k = int(re.search(r"BLOCK_K = (\d+);", self.unit)[1])
        dtype = str(reference.output_dtype(_array.host_dtype(dtype))) if x == "o" else dtype
        itemsize = ITEMSIZES[dtype]
        assert list(tensor.box) == [128 // itemsize, {"q": 64, "o": 16}.get(x, block_k), 1, 1]
        assert (tensor.dtype, tensor.swizzle) == (_tensor_map.DTYPES[dtype], 3)
        length, heads = (p.len_q, p.heads_q) if x in "qo" else (p.len_k, p.heads_k)
        assert list(tensor.shape[1:]) == [length, heads, batch]
        row, head, entry = (stride // itemsize for stride in tensor.strides)
        if x == "o":
            assert tensor.shape[0] == p.head_dim_v
            assert tensor.pointer == p.out
            used = {"batch": entry, "row": row, "head": head}
            sizes = {"batch": batch, "row": p.len_q, "head": p.heads_q}
            for axis, stride in used.items():
                assert sizes[axis] == 1 or getattr(p, f"o_{axis}") == stride
        shape = (batch, length, heads, tensor.shape[0])
        strides = (entry, row, head, 1)
        return host_view(Array(tensor.pointer, shape, strides, dtype, -1, "fake", False, None))


def encode_tiled(
    room: Any, dtype: int, rank: int, pointer: int, shape: Any, strides: Any, box: Any, steps: Any,
    interleave: int, swizzle: int, promotion: int, outside: int,
) -> int:  # fmt: skip
    """Stands for cuTensorMapEncodeTiled."""
    ctypes.memset(room, 0, ctypes.sizeof(Map))
    tensor = Map.from_address(ctypes.cast(room, c_void_p).value or 0)
    tensor.pointer, tensor.dtype, tensor.swizzle = pointer, dtype, swizzle
    tensor.shape[:], tensor.strides[:], tensor.box[:] = shape, strides, box
    return 0


class Guard:
    """Stands for `device_guard`: remembers the devices that were made current."""

    entered: ClassVar[list[int]] = []

    def __init__(self, device: int) -> None:
        self.device = device

    def __enter__(self) -> None:
        self.entered.append(self.device)

    def __exit__(self, *error: object) -> None: ...


class FakeGpu:
    """What the tests see: the launches so far, and how often a unit was compiled and loaded."""

    def __init__(self) -> None:
        self.adapter = FakeAdapter()
        self.capability = 80
        self.launches: list[SimpleNamespace] = []
        self.compiled: list[tuple[str, str, str]] = []
        self.loaded: list[tuple[str, int, int]] = []

    def compile(self, unit: str, symbol: str, arch: str) -> SimpleNamespace:
        self.compiled.append((unit, symbol, arch))
        return SimpleNamespace(unit=unit)

    def load(self, cubin: SimpleNamespace, device: int, shared_bytes: int) -> FakeKernel:
        self.loaded.append((cubin.unit, device, shared_bytes))
        return FakeKernel(cubin.unit, shared_bytes, self.launches)


def install(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """Put a `FakeGpu` in the place of NVRTC, the loader and the device."""
    gpu = FakeGpu()
    monkeypatch.setitem(_array._adapters, FakeArray, gpu.adapter)
    monkeypatch.setattr(_jit, "compile", gpu.compile)
    monkeypatch.setattr(_jit, "load", gpu.load)
    monkeypatch.setattr(_jit, "compute_capability", lambda device: gpu.capability)
    monkeypatch.setattr(_jit, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(_driver, "function", {"cuTensorMapEncodeTiled": encode_tiled}.__getitem__)
    monkeypatch.setattr(_tickets, "of", lambda function, device: lambda stream: TICKETS + stream)
    for module in (_call, _facts):
        monkeypatch.setattr(module, "device_guard", Guard)
    monkeypatch.setattr(_launch, "_functions", {})
    monkeypatch.setattr(Guard, "entered", [])
    monkeypatch.setattr(_call, "PLANS", type(_call.PLANS)(64))
    return gpu
