"""JAX arrays and tracers: recognised here, served by ``_jax`` through buffers that XLA owns."""

from typing import Any

import numpy as np

from ..errors import InvalidArgument, InvalidType
from .base import HOST, Adapter, Array, contiguous_strides, dtype_name


class JaxAdapter(Adapter):
    """Immutable arrays: always C-contiguous, and never an output."""

    framework = "jax"

    def facts(self, x: Any) -> tuple[Any, ...]:
        return (x.shape, x.dtype)

    def pointer(self, x: Any) -> int:
        return 0 if is_tracer(x) else int(x.unsafe_buffer_pointer())

    def array(self, x: Any, name: str) -> Array:
        # Extended types (PRNG keys) are no NumPy dtype.
        kind = x.dtype if isinstance(x.dtype, np.dtype) else np.dtype(object)
        dtype = dtype_name(kind, name)
        return Array(
            pointer=self.pointer(x) if x.size else 0,
            shape=x.shape,
            strides=contiguous_strides(x.shape),
            dtype=dtype,
            device=HOST if is_tracer(x) else _ordinal(x, name),
            framework=self.framework,
            readonly=True,
            owner=x,
        )

    def host(self, x: Any) -> np.ndarray:
        return np.asarray(x)


def is_tracer(x: Any) -> bool:
    """Whether a JAX value stands for an array that does not exist yet (under jit, grad, vmap)."""
    return not hasattr(x, "addressable_shards")


def _ordinal(x: Any, name: str) -> int:
    """Return the CUDA ordinal of a JAX array, or HOST."""
    devices = x.devices()
    if len(devices) != 1:
        raise InvalidArgument(
            f"`{name}` is sharded over {len(devices)} devices: call inside jax.shard_map"
        )
    (device,) = devices
    if device.platform == "cpu":
        return HOST
    if device.platform not in ("gpu", "cuda"):
        raise InvalidType(
            f"`{name}` must be on the CPU or on an NVIDIA GPU, got {device.platform}: move it"
        )
    return int(device.local_hardware_id)
