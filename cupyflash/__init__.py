"""cupyflash: exact, IO-aware attention for any DLPack array."""

__version__ = "0.1.0"

from . import masks, reference
from ._attention import (
    attention,
    attention_varlen,
    emulate,
    explain,
    kernels,
    show_versions,
    supports,
    warmup,
)
from ._philox import dropout_mask
from .errors import (
    CompileFailed,
    CupyflashError,
    DeviceUnavailable,
    InvalidArgument,
    InvalidType,
    KernelFault,
    UnsupportedProblem,
)

__all__ = [
    "CompileFailed",
    "CupyflashError",
    "DeviceUnavailable",
    "InvalidArgument",
    "InvalidType",
    "KernelFault",
    "UnsupportedProblem",
    "__version__",
    "attention",
    "attention_varlen",
    "dropout_mask",
    "emulate",
    "explain",
    "kernels",
    "masks",
    "reference",
    "show_versions",
    "supports",
    "warmup",
]
