"""NumPy's BLAS held to one thread while callers with threads of their own are inside.

The limit belongs to the process, so there is one holder with a count of its callers: the first one
saves the limit and sets it, the last one restores it.
"""

import functools
import os
import threading
from typing import Any

from threadpoolctl import ThreadpoolController

__all__ = ["one_blas_thread"]


class OneBlasThread:
    """The context manager of this module; it is `one_blas_thread`, never a second one."""

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        self._lock = threading.Lock()
        self._callers = 0
        self._limits: list[tuple[Any, int]] = []

    def __enter__(self) -> int:
        """Return how many threads BLAS may have outside: so many the caller may start itself."""
        with self._lock:
            if self._callers == 0:
                self._limits = [(blas, blas.get_num_threads()) for blas in _libraries()]
                for blas, _ in self._limits:
                    blas.set_num_threads(1)
            self._callers += 1
            threads = [threads for _, threads in self._limits]
            return max(threads) if threads else os.cpu_count() or 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._callers -= 1
            if self._callers == 0:
                self._restore()

    def _restore(self) -> None:
        for blas, threads in self._limits:
            blas.set_num_threads(threads)

    def after_fork(self) -> None:
        """Leave on behalf of the parent's callers: their threads do not live in the child."""
        if self._callers:
            self._restore()
        self._start()


@functools.cache
def _libraries() -> list[Any]:
    """Return the BLAS libraries in this process; to look for them takes 0.3 ms, a limit 6 us."""
    return ThreadpoolController().select(user_api="blas").lib_controllers


one_blas_thread = OneBlasThread()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=one_blas_thread.after_fork)
