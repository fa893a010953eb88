"""What the adapter of a framework offers, and the plain record that it makes of an array."""

import abc
import functools
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, NamedTuple

import ml_dtypes
import numpy as np

from ..errors import InvalidArgument, InvalidType

# Every element type that an array may have, by its name in NumPy and ml_dtypes: its bytes.
ITEMSIZES = {
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "bool": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8,
    "uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8,
}  # fmt: skip
HOST = -1  # the "device" of host memory


_kept: list[Any] = []  # see Adapter.keep


class Array(NamedTuple):
    """An array as kernels see it; ``owner`` keeps its memory alive.

    ``strides`` count elements and are normalised (see ``normal_strides``); ``device`` is a CUDA
    ordinal or ``HOST``; ``pointer`` may be 0 where there is no element.
    """

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: int
    framework: str
    readonly: bool
    owner: object


class Adapter(abc.ABC):
    """The bridge to one framework; ``adapter_of`` finds it.

    The methods that a warm call uses (``facts``, ``pointer``, ``device``, ``stream``,
    ``empty_strided``) check nothing; ``array`` checks all, and has run once for every value of
    ``facts`` that has a plan.
    """

    framework: ClassVar[str]
    elsewhere: bool = False  # calls go by the framework, or arrays by `admit` and `deliver`
    plain: tuple[type, ...] = ()  # the classes that are taken; empty: all that are recognised
    draw: Callable[[Any], Any] | None = None  # a random state, by the generator of x's device
    # Whether the framework has a part in any call that is made now; `steps_in` asks the rest.
    present: Callable[[], bool] | None = None

    @abc.abstractmethod
    def facts(self, x: Any) -> tuple[Any, ...]:
        """Return all that a plan depends on except the pointer, hashable and cheap."""

    @abc.abstractmethod
    def pointer(self, x: Any) -> int:
        """Return the address of the first element."""

    def device(self, x: Any) -> int:
        """Return the CUDA ordinal of the device that ``x`` is on, or ``HOST``."""
        raise NotImplementedError

    @abc.abstractmethod
    def array(self, x: Any, name: str) -> Array:
        """Return the checked record of ``x``; errors call it ``name``."""

    def empty_strided(
        self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str, device: int
    ) -> Any:
        """Allocate by the caller's allocator; ``device`` must be current (``device_guard``)."""
        raise NotImplementedError

    def empty(self, shape: tuple[int, ...], dtype: str, device: int) -> Any:
        """Allocate a C-contiguous array as ``empty_strided`` does."""
        return self.empty_strided(shape, contiguous_strides(shape), dtype, device)

    def full(self, value: float, device: int) -> Any:
        """Allocate a float32 array of one element and no dimension, filled on the caller's stream.

        ``device`` must be current.
        """
        raise NotImplementedError

    def upload(self, x: np.ndarray, device: int) -> Any:
        """Copy integers of host memory to a device, which must be current, on the caller's stream.

        The host does not wait, and may change ``x`` at once.
        """
        raise NotImplementedError

    def contiguous_last(self, x: Any) -> Any:
        """Return ``x``, or one copy on the caller's stream if its last stride is not 1."""
        raise NotImplementedError

    def contiguous(self, x: Any) -> Any:
        """Return ``x``, or one copy on the caller's stream if it is not C-contiguous."""
        raise NotImplementedError

    def keep(self, x: Any) -> None:
        """Keep the memory of an array that a captured graph uses whenever it runs.

        A graph does not say when it ends: the memory is kept until the process does.
        """
        _kept.append(x)

    def stream(self, device: int) -> int:
        """Return the raw handle of the caller's current stream on a device (0: the default)."""
        raise NotImplementedError

    def capturing(self, device: int) -> bool:
        """Whether the caller's current stream records a CUDA graph."""
        return False

    def grad_needed(self, x: Any) -> bool:
        """Whether the framework would differentiate through ``x`` here."""
        return False

    def steps_in(self, arrays: Iterable[Any]) -> bool:
        """Whether the framework must make this call its own: it would differentiate or map it."""
        return False

    def of_subclass(self, kind: Any) -> "Adapter | None":
        """Return the adapter of a class of arrays that is not ``plain``; None: it is refused."""
        return None

    def admit(self, x: Any, name: str) -> Any:
        """Turn an argument into what the other methods take: a foreign exporter into an Array."""
        return x

    def deliver(self, x: Any) -> Any:
        """Turn a result of ``empty_strided`` into what the caller gets."""
        return x


@functools.cache
def host_dtype(name: str) -> np.dtype:
    """Return the NumPy dtype of an element type."""
    return np.dtype(getattr(ml_dtypes, name, name))


def dtype_name(dtype: np.dtype, name: str) -> str:
    """Return the name of a NumPy dtype; InvalidType if it is none of ``ITEMSIZES``."""
    known = _names().get(dtype)
    if known is None:
        raise unknown_dtype(dtype.name if dtype.isnative else dtype.str, name)
    return known


@functools.cache
def _names() -> dict[np.dtype, str]:
    # A look-up here takes a hundredth of the time of dtype.name.
    return {host_dtype(name): name for name in ITEMSIZES}


def unknown_dtype(dtype: str, name: str) -> InvalidType:
    """Return the error for an element type that no path takes."""
    return InvalidType(
        f"`{name}` has elements of type {dtype}: expected real numbers in the machine's byte order "
        f"({', '.join(ITEMSIZES)}), convert it"
    )


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides, in elements, of a C-contiguous array."""
    strides, size = [], 1
    for length in reversed(shape):
        strides.append(size)
        size *= length
    return tuple(reversed(strides))


def normal_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Replace the strides that are never used by those that a C-contiguous array would have.

    Those are the strides of dimensions of length 1 (exporters give anything for them), and all
    strides of an array without elements.
    """
    if 0 in shape:
        return contiguous_strides(shape)
    normal, inner = [], 1
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        normal.append(inner if length == 1 else stride)
        inner = normal[-1] * length
    return tuple(reversed(normal))


def element_strides(
    shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int, name: str
) -> tuple[int, ...]:
    """Return normalised strides in elements from strides in bytes."""
    # Rounding down is harmless where a dimension has length 1: its stride is replaced.
    normal = normal_strides(shape, tuple(stride // itemsize for stride in strides))
    used = 0 not in shape
    if any(used and n > 1 and s % itemsize for n, s in zip(shape, strides, strict=True)):
        raise InvalidArgument(
            f"`{name}` must have strides of whole elements, got {strides} bytes for elements of "
            f"{itemsize}: pass a copy"
        )
    return normal


def check_together(arrays: Iterable[tuple[str, Array]]) -> None:
    """Raise InvalidArgument unless all arrays are of one framework and on one device."""
    (first, x), *others = arrays
    for name, y in others:
        if (y.framework, y.device) != (x.framework, x.device):
            raise InvalidArgument(
                f"`{name}` is {_place(y)} and `{first}` is {_place(x)}: "
                "pass arrays of one framework on one device"
            )


def _place(x: Array) -> str:
    where = "in host memory" if x.device == HOST else f"on cuda:{x.device}"
    return f"a {x.framework} array {where}"
