"""Each framework as tests use it: arrays in, arrays out, addresses."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest


class Kit(NamedTuple):
    """One framework on one kind of device."""

    put: Callable[[np.ndarray], Any]  # its array of the same values and order of dimensions
    get: Callable[[Any], np.ndarray]
    address: Callable[[Any], int]
    kind: type


def _numpy() -> Kit:
    def address(x: np.ndarray) -> int:
        return x.__array_interface__["data"][0]

    return Kit(lambda x: x.copy("K"), np.asarray, address, np.ndarray)


def _torch(device: str) -> Kit:
    torch = pytest.importorskip("torch")
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("this build of torch has no CUDA")

    def put(x: np.ndarray) -> Any:
        x = x.copy("K")
        if hasattr(ml_dtypes, x.dtype.name):
            bits = torch.from_numpy(x.view(f"i{x.itemsize}"))
            return bits.view(getattr(torch, x.dtype.name)).to(device)
        return torch.from_numpy(x).to(device)

    def get(x: Any) -> np.ndarray:
        x = x.detach().cpu()
        if x.dtype is torch.bfloat16:
            return x.view(torch.int16).numpy().view("bfloat16")
        return x.numpy()

    return Kit(put, get, lambda x: x.data_ptr(), torch.Tensor)


def _jax(platform: str) -> Kit:
    jax = pytest.importorskip("jax")
    try:
        device = jax.devices(platform)[0]
    except RuntimeError:
        pytest.skip(f"this build of JAX has no {platform}")
    return Kit(
        lambda x: jax.device_put(x, device),
        np.asarray,
        lambda x: x.unsafe_buffer_pointer(),
        jax.Array,
    )


def _cupy() -> Kit:
    cupy = pytest.importorskip("cupy")
    import gpu

    def put(x: np.ndarray) -> Any:
        # As integers and in the order of memory: that CuPy copies whatever the dtype.
        order = np.argsort([-s for s in x.strides], kind="stable").tolist()
        raw = cupy.asarray(x.transpose(order).view(f"u{min(x.itemsize, 8)}"))
        return raw.view(x.dtype).transpose(np.argsort(order).tolist())

    return Kit(put, gpu.fetch, lambda x: x.data.ptr, cupy.ndarray)


KITS: dict[str, Callable[[], Kit]] = {
    "numpy": _numpy,
    "torch": lambda: _torch("cpu"),
    "jax": lambda: _jax("cpu"),
    "cupy": _cupy,
    "torch_cuda": lambda: _torch("cuda"),
    "jax_cuda": lambda: _jax("cuda"),
}
MARKS = {
    "numpy": (),
    "torch": (pytest.mark.frameworks,),
    "jax": (pytest.mark.frameworks,),
}


def params(*names: str) -> list[Any]:
    """The kits as parameters, each with its marks."""
    return [pytest.param(name, marks=MARKS.get(name, (pytest.mark.gpu,))) for name in names or KITS]


@contextlib.contextmanager
def opened(name: str) -> Iterator[Kit]:
    """A kit; JAX's traced arrays are on its device too."""
    kit = KITS[name]()
    with contextlib.ExitStack() as stack:
        if name.startswith("jax"):
            import jax

            stack.enter_context(jax.default_device(jax.devices(name[4:] or "cpu")[0]))
        yield kit


class Seen:
    """The addresses (q, k, v, out, lse) that kernels were given, newest last."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from cupyflash import _cpu, _launch

        self.calls: list[tuple[int, ...]] = []
        run = _cpu.attention

        def on_host(q: Any, k: Any, v: Any, out: Any, lse: Any, **options: Any) -> None:
            arrays = [q, k, v, out, *([] if lse is None else [lse])]
            self.calls.append(tuple(x.__array_interface__["data"][0] for x in arrays))
            run(q=q, k=k, v=v, out=out, lse=lse, **options)

        def on_gpu(launch: Any) -> Any:
            def call(bound: Any, *arguments: int) -> None:
                self.calls.append(arguments[:5])
                launch(bound, *arguments)

            return call

        monkeypatch.setattr(_cpu, "attention", on_host)
        for kind in (_launch.Bound, _launch.BoundMaps):
            monkeypatch.setattr(kind, "__call__", on_gpu(kind.__call__))
