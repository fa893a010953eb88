"""PyTorch tensors, on the CPU and on CUDA devices; torch is found in ``sys.modules``."""

import pkgutil
import sys
from collections.abc import Iterable
from typing import Any

import numpy as np

from ..errors import InvalidArgument, InvalidType
from .base import HOST, ITEMSIZES, Adapter, Array, normal_strides, unknown_dtype


class Dynamo:
    """What torch.compile does to the package: once `hide` has run it traces `TRACED` alone."""

    TRACED = ("_attention", "masks", "_torch.graph", "_torch.words", "_bench")
    hidden = False

    @classmethod
    def hide(cls) -> None:
        """Have Dynamo run the others as they are: it would trace NumPy code and raw pointers."""
        if cls.hidden:
            return
        if add := getattr(sys.modules.get("torch._dynamo.trace_rules"), "add", None):
            package, _, _ = __name__.partition(".")
            opened = {name.partition(".")[0] for name in cls.TRACED if "." in name}
            for prefix in ("", *(f"{name}." for name in opened)):
                folder = sys.modules[f"{package}.{prefix}".rstrip(".")]
                names = {prefix + module.name for module in pkgutil.iter_modules(folder.__path__)}
                for name in names - {*cls.TRACED} - opened:
                    add(f"{package}.{name}")
            cls.hidden = True


class TorchAdapter(Adapter):
    """Plain tensors and parameters."""

    framework = "torch"

    def __init__(self) -> None:
        torch: Any = sys.modules["torch"]
        self.plain = (torch.Tensor, torch.nn.Parameter)
        self._torch = torch
        self._dtypes = {n: getattr(torch, n) for n in ITEMSIZES if hasattr(torch, n)}
        self._names = {dtype: n for n, dtype in self._dtypes.items()}
        self._grad_enabled = torch.is_grad_enabled
        self._tracing = getattr(torch._C, "_is_tracing", torch.jit.is_tracing)
        forward_ad, modes = torch.autograd.forward_ad, torch.utils._python_dispatch
        autocast = torch.is_autocast_enabled  # of CUDA, as are warm calls
        self.present = lambda: (
            autocast() or modes._is_in_torch_dispatch_mode or forward_ad._current_level >= 0
        )
        # What PyTorch's own compiled code asks; the public way makes a Stream object each time.
        raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
        public = lambda device: torch.cuda.current_stream(device).cuda_stream  # noqa: E731
        self.stream = raw or public  # type: ignore[method-assign]

    def facts(self, x: Any) -> tuple[Any, ...]:
        wanted = x.requires_grad and self._grad_enabled()
        try:
            return (x.shape, x.stride(), x.dtype, x.device, wanted, x.is_neg())
        except RuntimeError:  # sparse and nested tensors: equal to nothing, so `array` judges them
            return (object(),)

    def pointer(self, x: Any) -> int:
        try:
            return x.data_ptr() or self._null(x)
        except RuntimeError as error:  # inside torch.func.vmap and torch.func.grad
            raise InvalidType(f"a tensor without memory to read ({error}): pass a plain one") from (
                error
            )

    def _null(self, x: Any) -> int:
        if x.numel():
            raise InvalidType(f"a tensor on {x.device} without memory to read: pass a plain one")
        return 0

    def device(self, x: Any) -> int:
        return x.get_device()  # -1 for the CPU

    def array(self, x: Any, name: str) -> Array:
        self._check_kind(x, name)
        if x.dtype not in self._names:
            raise unknown_dtype(str(x.dtype), name)
        shape = tuple(x.shape)
        try:
            pointer = self.pointer(x)
        except InvalidType as error:
            raise InvalidType(f"`{name}` is {error}") from error
        return Array(
            pointer=pointer,
            shape=shape,
            strides=normal_strides(shape, x.stride()),
            dtype=self._names[x.dtype],
            device=x.get_device(),  # -1 for the CPU
            framework=self.framework,
            readonly=False,
            owner=x,
        )

    def _check_kind(self, x: Any, name: str) -> None:
        """Refuse what is a tensor without being strided memory of the CPU or a CUDA device."""
        if self._torch._C._functorch.is_functorch_wrapped_tensor(x):
            raise InvalidType(
                f"`{name}` is a tensor inside a torch.func transform, which cupyflash does not "
                "support yet: call it outside of the transform"
            )
        if x.is_nested or x.layout is not self._torch.strided:
            raise InvalidType(
                f"`{name}` must be a strided tensor, got "
                f"{'a nested one' if x.is_nested else x.layout}: convert it (to_dense, pad)"
            )
        if x.device.type not in ("cpu", "cuda") or (x.is_cuda and self._torch.version.hip):
            raise InvalidType(
                f"`{name}` must be on the CPU or on an NVIDIA GPU, got device "
                f"{'hip' if x.is_cuda else x.device}: move it"
            )
        if x.is_neg():
            raise InvalidArgument(
                f"`{name}` is a lazily negated view (its negative bit is set): "
                f"pass `{name}.resolve_neg()`"
            )

    def empty_strided(
        self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str, device: int
    ) -> Any:
        if self._tracing():
            raise InvalidType(
                "`q` is traced by torch.jit.trace, which would record neither the computation nor "
                "its result: trace what surrounds it"
            )
        where = "cpu" if device == HOST else device
        return self._torch.empty_strided(shape, strides, dtype=self._dtypes[dtype], device=where)

    def full(self, value: float, device: int) -> Any:
        where = "cpu" if device == HOST else device
        return self._torch.full((), value, dtype=self._torch.float32, device=where)

    def upload(self, x: np.ndarray, device: int) -> Any:
        # From pageable memory of its own: the driver has taken the bytes when this returns.
        return self._torch.from_numpy(x.copy()).to(device, non_blocking=True)

    def contiguous_last(self, x: Any) -> Any:
        return x.contiguous() if x.shape[-1] > 1 and x.stride(-1) != 1 else x

    def contiguous(self, x: Any) -> Any:
        return x.contiguous()

    def keep(self, x: Any) -> None:
        """Leave the memory to the pool of the graph, which PyTorch keeps for as long as that."""

    def capturing(self, device: int) -> bool:
        return bool(self._torch.cuda.is_current_stream_capturing())

    def draw(self, x: Any) -> Any:
        return self._torch.randint(2**63 - 1, (2,), device=x.device)

    def grad_needed(self, x: Any) -> bool:
        return bool(x.requires_grad and self._grad_enabled())

    def steps_in(self, arrays: Iterable[Any]) -> bool:
        torch = self._torch
        if torch._C._are_functorch_transforms_active() or torch.is_autocast_enabled("cpu"):
            return True
        tensors = [x for x in arrays if isinstance(x, torch.Tensor)]
        if any(type(x) not in self.plain for x in tensors):
            return True
        return self._grad_enabled() and any(x.requires_grad for x in tensors)

    def of_subclass(self, kind: Any) -> Adapter | None:
        standard = self._torch._C._disabled_torch_dispatch_impl
        return None if kind.__torch_dispatch__ is standard else DispatchedAdapter()


class DispatchedAdapter(TorchAdapter):
    """Tensors of a class that sees each operator for itself: fake ones, DTensor.

    `_torch` hands them a call as one operator; nothing else can be done with them.
    """

    elsewhere = True

    def array(self, x: Any, name: str) -> Array:
        raise InvalidType(
            f"`{name}` is a {type(x).__module__}.{type(x).__qualname__}, whose memory only "
            "operators of PyTorch see: pass a plain torch.Tensor"
        )

    def admit(self, x: Any, name: str) -> Any:
        return self.array(x, name)
