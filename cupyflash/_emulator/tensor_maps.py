"""Tensor maps for the emulated TMA: what the driver's cuTensorMapEncodeTiled is for a GPU."""

from .._tensor_map import TensorMap, encode_by
from . import build

__all__ = ["encode"]


def encode(tensor: TensorMap) -> bytes:
    """Return the bytes of a map, for a kernel on the emulator.

    Raises
    ------
    InvalidArgument
        No map can describe the tensor.
    """
    return encode_by(_write, tensor)


def _write(*arguments: object) -> None:
    refused = build.runtime().emu_tensor_map(*arguments)
    assert not refused, refused.decode()  # `encode_by` has checked the same
