"""Arrays in, arrays out: the frameworks' arrays as plain records, without importing a framework.

``adapter_of(x, name)`` finds the `Adapter` of an array by its type. It knows PyTorch, JAX, CuPy and
NumPy; anything else has to export ``__cuda_array_interface__`` or ``__dlpack__``. Nothing here
copies an array, except where it says so, and nothing synchronises.
"""

import functools
import sys
from typing import Any

from ..errors import InvalidType
from .base import (
    HOST,
    ITEMSIZES,
    Adapter,
    Array,
    check_together,
    contiguous_strides,
    host_dtype,
    normal_strides,
)
from .foreign import ForeignAdapter
from .gpu import CupyAdapter, device_guard
from .host import NumpyAdapter
from .jax_arrays import JaxAdapter
from .torch_arrays import TorchAdapter

__all__ = [
    "HOST",
    "ITEMSIZES",
    "Adapter",
    "Array",
    "adapter_of",
    "check_together",
    "contiguous_strides",
    "device_guard",
    "host_dtype",
    "normal_strides",
]

KNOWN: dict[str, tuple[str, type[Adapter]]] = {  # module -> its class of arrays, our adapter
    "torch": ("Tensor", TorchAdapter),
    "cupy": ("ndarray", CupyAdapter),
    "jax": ("Array", JaxAdapter),
    "numpy": ("ndarray", NumpyAdapter),
}

_adapters: dict[type, Adapter] = {}  # of the types seen so far
_instance = functools.cache(lambda adapter: adapter())


def adapter_of(x: Any, name: str) -> Adapter:
    """Return the adapter of an array's framework.

    Parameters
    ----------
    x : object
        The array.
    name : str
        What errors call it.
    """
    adapter = _adapters.get(type(x))
    return adapter if adapter is not None else _adapters.setdefault(type(x), _find(x, name))


def _find(x: Any, name: str) -> Adapter:
    """Recognise a type that was not seen before: its module is loaded if there is an instance."""
    kind = type(x)
    for module, (base, adapter) in KNOWN.items():
        if isinstance(x, getattr(sys.modules.get(module), base, ())):
            found: Adapter = _instance(adapter)
            if found.plain and kind not in found.plain:
                if other := found.of_subclass(kind):
                    return other
                raise InvalidType(
                    f"`{name}` is a {kind.__module__}.{kind.__qualname__}, a subclass of "
                    f"{module}.{base} whose meaning would be lost: pass a plain {module}.{base}"
                )
            return found
    exports = any(map(functools.partial(hasattr, x), ForeignAdapter.protocols))
    if isinstance(x, Array) or (exports and not isinstance(x, type)):
        return ForeignAdapter(kind)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    got = "None" if x is None else f"{module}{kind.__qualname__}"
    raise InvalidType(
        f"`{name}` must be an array of PyTorch, JAX, CuPy or NumPy, or export "
        f"{' or '.join(ForeignAdapter.protocols)}, got {got}"
        f"{': convert it, as numpy.asarray does' if isinstance(x, list | tuple) else ''}"
    )
