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
from ._gradients import attention_backward, attention_vjp
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
from .reference import Gradients

__all__ = [
    "CompileFailed",
    "CupyflashError",
    "DeviceUnavailable",
    "Gradients",
    "InvalidArgument",
    "InvalidType",
    "KernelFault",
    "UnsupportedProblem",
    "__version__",
    "attention",
    "attention_backward",
    "attention_varlen",
    "attention_vjp",
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
