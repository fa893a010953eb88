"""PyTorch's part in a call: gradients, autocast, transforms, graphs. Thin, over both passes' calls.

`eager` makes a call PyTorch's own, `functions` has it as a function of autograd and `operators` as
one of the dispatcher, over the same `record`; `graph` is what torch.compile traces.
"""

import sys

from . import operators
from .eager import attention, cast
from .graph import attach

__all__ = ["attention", "cast"]

attach()
if hasattr(sys.modules.get("torch"), "library"):  # a saved graph may ask for them
    operators.operators()
