"""What launches did, counted by the runtime."""

import ctypes
import dataclasses
from dataclasses import dataclass

__all__ = ["Counters", "Stats"]


@dataclass(frozen=True)
class Stats:
    """What the launches of a kernel did, summed over their blocks.

    Parameters
    ----------
    tiles_loaded_bytes : int
        Bytes that copies put into shared memory, their zero fill included.
    global_read_bytes, global_written_bytes : int
        Bytes read from global memory, and written there, by loads, stores, sums and copies.
    mma, ldmatrix : int
        Matrix products, and loads of matrix fragments, of a warp.
    cp_async : int
        Asynchronous copies of one thread.
    barriers : int
        Barriers of a block, each once for all its threads.
    switches : int
        From one emulated thread to another.
    shuffles : int
        Shuffles and votes of a warp.
    blocks : int
        Blocks that ran.
    tma, bulk : int
        Tensor copies, and copies of contiguous bytes, to and from shared memory.
    wgmma : int
        Matrix products of a warpgroup.
    launches : int
        Launches that these are the sums of.
    """

    tiles_loaded_bytes: int = 0
    global_read_bytes: int = 0
    global_written_bytes: int = 0
    mma: int = 0
    ldmatrix: int = 0
    cp_async: int = 0
    barriers: int = 0
    switches: int = 0
    shuffles: int = 0
    blocks: int = 0
    tma: int = 0
    bulk: int = 0
    wgmma: int = 0
    launches: int = 0

    @classmethod
    def of(cls, counters: "Counters") -> "Stats":
        """Return the counters of one launch."""
        return cls(**{name: getattr(counters, name) for name in COUNTED} | {"launches": 1})

    def __add__(self, other: "Stats") -> "Stats":
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Stats(*(a + b for a, b in pairs))


COUNTED = tuple(field.name for field in dataclasses.fields(Stats))[:-1]


class Counters(ctypes.Structure):
    """``struct EmuStats`` of cpp/abi.h: the fields of `Stats` but the last, in their order."""

    _fields_ = [(name, ctypes.c_ulonglong) for name in COUNTED]
