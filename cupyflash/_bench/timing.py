"""Clocks: how long a call takes on the device (`kernel_us`) and with its Python (`call_us`).

On a GPU, kernel time is CUDA-graph replay between two events with the L2 cache flushed before
each, so that neither Python nor a launch is in it. Call time is the wall time per call of a loop
that synchronises once, at its end: the host's cost where the problem is tiny, else the device's
time. On a CPU both are wall times.
"""

from __future__ import annotations

import statistics
import time
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

Call = Callable[[], Any]

FLUSH_BYTES = 256 << 20  # several L2 caches, and long enough to hide the host's launches
MIN_CALLS, MAX_REPLAYS, MAX_CALLS = 3, 200, 2000


def calls_in(budget_s: float, estimate_s: float, most: int) -> int:
    """Return how many calls of the estimated length fill the budget, within limits."""
    return max(MIN_CALLS, min(most, int(budget_s / max(estimate_s, 1e-9))))


class HostClock:
    """Wall times of calls that compute on the CPU."""

    def sync(self, result: Any = None) -> None:
        """Wait for what was submitted; a host call has ended when it returns."""

    def prepare(self, call: Call) -> Call | None:
        """Return what `kernel_us` times: on the host, the call itself."""
        return call

    def kernel_us(self, prepared: Call, budget_s: float) -> float:
        """Return the median time of one call in microseconds."""
        count = calls_in(budget_s, self.once_s(prepared), MAX_REPLAYS)
        return statistics.median(self.once_s(prepared) for _ in range(count)) * 1e6

    def call_us(self, call: Call, budget_s: float) -> float:
        """Return the time per call of a loop that is synchronised only at its end."""
        count = calls_in(budget_s, self.once_s(call), MAX_CALLS)
        result = None
        for _ in range(count // 2):  # a host that has waited is slow at first
            result = call()
        self.sync(result)
        begin = time.perf_counter()
        for _ in range(count):
            result = call()
        self.sync(result)
        return (time.perf_counter() - begin) / count * 1e6

    def extra_bytes(self, call: Call) -> int | None:
        """Return the most memory that a call has beside what there was; None where nobody knows."""
        return None

    def once_s(self, call: Call) -> float:
        """Return the seconds of one call and of the wait for it."""
        begin = time.perf_counter()
        self.sync(call())
        return time.perf_counter() - begin


class JaxClock(HostClock):
    """Wall times of JAX calls, which run on streams of their own: no kernel time."""

    def sync(self, result: Any = None) -> None:
        """Wait for a JAX array."""
        if result is not None:
            result.block_until_ready()

    def prepare(self, call: Call) -> Call | None:
        """Return None: XLA's streams cannot be captured from outside."""
        return None


class GpuClock(HostClock):
    """Events around graph replays; a framework gives the events, the capture and the flush."""

    def prepare(self, call: Call) -> Call | None:
        """Capture one call into a CUDA graph and return its replay."""
        self.sync(call())  # compiles, loads and allocates before the capture
        return self.capture(call)

    def kernel_us(self, prepared: Call, budget_s: float) -> float:
        """Return the median device time of the replayed call, the L2 cache flushed each time."""
        count = calls_in(budget_s, self.once_s(prepared), MAX_REPLAYS)
        pairs = [(self.event(), self.event()) for _ in range(count)]
        for begin, end in pairs:
            self.flush()
            begin.record()
            prepared()
            end.record()
        self.sync()
        return statistics.median(self.elapsed_us(begin, end) for begin, end in pairs)

    @abstractmethod
    def capture(self, call: Call) -> Call:
        """Capture one call on a side stream; the replay goes to the current one."""

    @abstractmethod
    def event(self) -> Any:
        """Return a fresh timing event."""

    @abstractmethod
    def elapsed_us(self, begin: Any, end: Any) -> float:
        """Return the microseconds between two recorded events."""

    @abstractmethod
    def flush(self) -> None:
        """Overwrite the L2 cache."""


class TorchClock(GpuClock):
    """CUDA events and graphs of PyTorch."""

    def __init__(self) -> None:
        import torch

        self.cuda = torch.cuda
        self.buffer = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")

    def sync(self, result: Any = None) -> None:
        """Wait for the device."""
        self.cuda.synchronize()

    def extra_bytes(self, call: Call) -> int:
        """Return the most memory that a call has of torch's allocator, its results included."""
        self.sync()
        before = self.cuda.memory_allocated()
        self.cuda.reset_peak_memory_stats()
        self.sync(call())
        return self.cuda.max_memory_allocated() - before

    def capture(self, call: Call) -> Call:
        """Capture one call after a warm-up on a side stream; the graph's pool keeps the output.

        Not by `torch.cuda.graph`, which collects garbage and empties the allocator's cache: that
        takes longer than the measurement.
        """
        side, graph = self.cuda.Stream(), self.cuda.CUDAGraph()
        with self.cuda.stream(side):
            call()
            self.cuda.synchronize()
            graph.capture_begin()
            try:
                call()
            finally:
                graph.capture_end()
        return graph.replay

    def event(self) -> Any:
        """Return a fresh timing event."""
        return self.cuda.Event(enable_timing=True)

    def elapsed_us(self, begin: Any, end: Any) -> float:
        """Return the microseconds between two recorded events."""
        return begin.elapsed_time(end) * 1e3

    def flush(self) -> None:
        """Overwrite the L2 cache."""
        self.buffer.zero_()


class CupyClock(GpuClock):
    """CUDA events and graphs of CuPy."""

    def __init__(self) -> None:
        import cupy

        self.cupy = cupy
        self.buffer = cupy.empty(FLUSH_BYTES, dtype=cupy.int8)

    def sync(self, result: Any = None) -> None:
        """Wait for the device."""
        self.cupy.cuda.Device().synchronize()

    def capture(self, call: Call) -> Call:
        """Capture one call after a warm-up on the capturing stream, whose pool it fills."""
        stream = self.cupy.cuda.Stream(non_blocking=True)
        with stream:
            call()
            stream.synchronize()
            stream.begin_capture()
            try:
                output = call()
            finally:
                graph = stream.end_capture()

        def replay() -> Any:
            graph.launch()
            return output  # held here, so that nobody else is given the memory that it writes

        return replay

    def event(self) -> Any:
        """Return a fresh timing event."""
        return self.cupy.cuda.Event()

    def elapsed_us(self, begin: Any, end: Any) -> float:
        """Return the microseconds between two recorded events."""
        return self.cupy.cuda.get_elapsed_time(begin, end) * 1e3

    def flush(self) -> None:
        """Overwrite the L2 cache."""
        self.buffer.fill(0)
