"""JAX arrays and tracers: recognised here, served by ``_jax`` through buffers that XLA owns."""

import sys
from typing import Any

import numpy as np

from ..errors import InvalidArgument, InvalidType
from .base import HOST, Adapter, Array, contiguous_strides, dtype_name


class JaxAdapter(Adapter):
    """Immutable arrays: always C-contiguous, and never an output."""

    framework = "jax"
    elsewhere = True

    def facts(self, x: Any) -> tuple[Any, ...]:
        return (x.shape, x.dtype)

    def pointer(self, x: Any) -> int:
        return int(x.unsafe_buffer_pointer()) if x.size else 0

    def array(self, x: Any, name: str) -> Array:
        if is_tracer(x):
            raise InvalidType(
                f"`{name}` is a JAX tracer, whose value is not known yet: pass a number, or JAX "
                "arrays only"
            )
        dtype = element_type(x, name)
        device = device_of(x, name)
        return Array(
            pointer=self.pointer(x),
            shape=x.shape,
            strides=contiguous_strides(x.shape),
            dtype=dtype,
            device=device,
            framework=self.framework,
            readonly=True,
            owner=x,
        )


def is_tracer(x: Any) -> bool:
    """Whether a JAX value stands for an array that does not exist yet (under jit, grad, vmap)."""
    return isinstance(x, sys.modules["jax"].core.Tracer)


def element_type(x: Any, name: str) -> str:
    """Return the name of a JAX array's or tracer's element type."""
    if not isinstance(x.dtype, np.dtype):  # an extended one
        raise InvalidType(
            f"`{name}` has elements of type {x.dtype}, which are no numbers: pass the data of a "
            "key, as jax.random.key_data returns it"
        )
    return dtype_name(x.dtype, name)


def device_of(x: Any, name: str) -> int:
    """Return the CUDA ordinal of a JAX array's device, or HOST."""
    device, *others = x.devices()
    if others:
        raise InvalidArgument(
            f"`{name}` is sharded over {1 + len(others)} devices: call inside jax.shard_map"
        )
    return ordinal(device, name)


def ordinal(device: Any, name: str) -> int:
    """Return the CUDA ordinal of one of JAX's devices, or HOST."""
    if device.platform == "cpu":
        return HOST
    if device.platform not in ("gpu", "cuda") or "rocm" in device.client.platform_version:
        raise InvalidType(f"`{name}` must be on the CPU or on an NVIDIA GPU, got {device}: move it")
    return int(device.local_hardware_id)
