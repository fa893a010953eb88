"""Items of work that threads take from one queue, with BLAS held to one thread meanwhile.

Threads whose order matters wait for their turn.
"""

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from ._blas import one_blas_thread

__all__ = ["Turns", "spread", "threads_for"]

PRODUCTS_PER_THREAD = 1 << 24  # about 0.5 ms, where to start a thread takes 0.1 ms
MAX_THREADS = 64  # OpenBLAS as NumPy builds it has buffers for so many callers


@contextlib.contextmanager
def threads_for(products: int) -> Iterator[int]:
    """Hold BLAS to one thread; the value is how many threads pay for so many multiplications."""
    with one_blas_thread as threads:
        yield max(1, min(threads, MAX_THREADS, products // PRODUCTS_PER_THREAD))


def spread(
    items: Iterable[Any],
    start: Callable[[], Callable[[Any], None]],
    threads: int,
    stop: Callable[[], None] = lambda: None,
) -> None:
    """Do every item once; they are begun in order.

    Parameters
    ----------
    items : iterable
        The pieces of work.
    start : callable
        Called by each thread: returns what it does with an item.
    threads : int
        How many threads there are, this one included.
    stop : callable
        Called where an error or an interrupt ends a thread: lets those go that wait for it.
    """
    queue = deque(items)

    def work() -> None:
        # A small ufunc buffer: with a larger one NumPy copies the broadcast operand of every tile.
        with np.errstate(all="ignore"):
            np.setbufsize(16)
            do = start()
            try:
                while True:
                    try:
                        item = queue.popleft()
                    except IndexError:
                        return
                    do(item)
            except BaseException:
                end()
                raise

    def end() -> None:
        queue.clear()
        stop()

    if threads == 1:
        return work()
    with ThreadPoolExecutor(threads - 1, "cupyflash") as pool:
        helpers = []
        # No thread can be had while the interpreter ends, or beyond a limit: fewer do the work.
        with contextlib.suppress(RuntimeError):
            for _ in range(threads - 1):
                helpers.append(pool.submit(work))
        try:
            work()
            for helper in helpers:
                helper.result()
        finally:
            end()  # an interrupt here stops the other threads too


class Turns:
    """Threads that wait for their turn at something: for a number in a list, which counts up."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._stopped = False

    def wait(self, numbers: list[int], at: int, turn: int) -> bool:
        """Return when it is the turn's: True, or False where all waiting was stopped."""
        if numbers[at] != turn:
            with self._changed:
                self._changed.wait_for(lambda: self._stopped or numbers[at] == turn)
        return numbers[at] == turn

    def end(self, numbers: list[int], at: int) -> None:
        """Let the next one go on."""
        with self._changed:
            numbers[at] += 1
            self._changed.notify_all()

    def stop(self) -> None:
        """Let all go that wait."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
