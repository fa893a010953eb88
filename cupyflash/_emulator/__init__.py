"""The CUDA sources on the CPU: g++ compiles them over twins of ``cuda/ptx``, fibers run them.

Nothing here is imported before `cupyflash.emulate` is called. docs/emulator.md says how it works
and what it cannot see. The runtime and the twins, in C++, are in ``cpp/``.
"""

from .build import compiler
from .device import Session, run, session
from .stats import Stats

__all__ = ["Session", "Stats", "compiler", "run", "session"]
