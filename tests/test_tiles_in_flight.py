"""Launches of a persistent kernel at one time: each draws tiles from a counter of its own (GPU)."""

from typing import Any, NamedTuple

import gpu
import pytest
from cases import Case
from harness import HOPPER, Result, attend, check, same_bits

from cupyflash import _tickets

pytestmark = pytest.mark.gpu
# More tiles than a GPU has multiprocessors, fewer, and one.
CASES = tuple(
    Case(len_q, 300, 64, 64, "float16", heads_q=heads, causal=causal, label="flight")
    for len_q, heads, causal in ((400, 150, False), (400, 90, True), (400, 20, True), (64, 1, True))
)


class Work(NamedTuple):
    """One problem on the GPU, and its result when it runs alone, which is right."""

    arrays: tuple[Any, ...]
    options: dict[str, Any]
    expected: Result

    @classmethod
    def of(cls, case: Case) -> "Work":
        arrays = case.arrays()
        expected = check(HOPPER, *arrays, **case.options)
        return cls(tuple(x.device for x in arrays), case.options, expected)

    def attend(self) -> tuple[Any, Any]:
        return attend(HOPPER, *self.arrays, return_lse=True, **self.options)

    def judge(self, result: tuple[Any, Any]) -> None:
        for name, x, right in zip(("out", "lse"), result, self.expected, strict=True):
            assert same_bits(gpu.fetch(x), right), name


def hold(cp: Any, streams: list[Any], milliseconds: float) -> None:
    """Let what the streams are given from here on start at one time, so much later."""
    gate = cp.cuda.Stream(non_blocking=True)
    with gate:
        gpu.spin(milliseconds)
    for stream in streams:
        stream.wait_event(gate.record())


def make_streams(cp: Any, count: int) -> list[Any]:
    cp.cuda.Device().synchronize()  # what is computed on the current stream is there
    return [cp.cuda.Stream(non_blocking=True) for _ in range(count)]


def capture(stream: Any, work: Work) -> tuple[Any, tuple[Any, Any]]:
    """Return a graph of one call, and where its results go."""
    with stream:
        work.attend()
        stream.begin_capture()
        try:
            result = work.attend()
        finally:
            graph = stream.end_capture()
    return graph, result


def test_streams_that_launch_at_one_time(cp: Any) -> None:
    works = [Work.of(case) for case in CASES * 2]
    streams = make_streams(cp, len(works))
    hold(cp, streams, 20)
    results = []
    for _ in range(10):
        for stream, work in zip(streams, works, strict=True):
            with stream:
                results.append((work, work.attend()))
    cp.cuda.Device().synchronize()
    for work, result in results:
        work.judge(result)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_a_graph_replayed_many_times(cp: Any, case: Case) -> None:
    work, (stream,) = Work.of(case), make_streams(cp, 1)
    graph, result = capture(stream, work)
    for _ in range(50):
        with stream:
            for x in result:
                x.view("u1").fill(255)
        for _ in range(4):
            graph.launch(stream)
        stream.synchronize()
        work.judge(result)


def test_two_graphs_on_two_streams_at_one_time(cp: Any) -> None:
    works = [Work.of(case) for case in CASES[:2]]
    streams = make_streams(cp, 2)
    recorded = [capture(*pair) for pair in zip(streams, works, strict=True)]
    for _ in range(10):
        hold(cp, streams, 2)
        for _ in range(5):
            for stream, (graph, _) in zip(streams, recorded, strict=True):
                graph.launch(stream)
        cp.cuda.Device().synchronize()
        for work, (_, result) in zip(works, recorded, strict=True):
            work.judge(result)


def test_branches_of_one_graph(cp: Any) -> None:
    first, second = (Work.of(case) for case in CASES[:2])
    stream, side = make_streams(cp, 2)
    with stream:
        first.attend()
    with side:
        second.attend()
    with stream:
        stream.begin_capture()
        try:
            side.wait_event(stream.record())
            results = [first.attend()]
            with side:
                results.append(second.attend())
            stream.wait_event(side.record())
        finally:
            graph = stream.end_capture()
    for _ in range(20):
        graph.launch(stream)
        stream.synchronize()
        first.judge(results[0])
        second.judge(results[1])


def test_a_graph_and_eager_launches_of_its_stream(cp: Any) -> None:
    first, second = (Work.of(case) for case in CASES[:2])
    (stream,) = make_streams(cp, 1)
    graph, result = capture(stream, first)
    with stream:
        for _ in range(10):
            eager = second.attend()
            graph.launch(stream)
            again = first.attend()
            stream.synchronize()
            second.judge(eager)
            first.judge(again)
            first.judge(result)


def test_launches_beyond_the_slots_take_tiles_in_turn(
    cp: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    works = [Work.of(case) for case in CASES]
    monkeypatch.setattr(_tickets.Slots, "_next", lambda slots: None)
    streams = make_streams(cp, len(works))
    results = []
    for stream, work in zip(streams, works, strict=True):
        with stream:
            results.append(work.attend())
        assert _tickets._slots[cp.cuda.Device().id].of(stream.ptr) is None
    graph, captured = capture(streams[0], works[0])
    graph.launch(streams[0])
    cp.cuda.Device().synchronize()
    works[0].judge(captured)
    for work, result in zip(works, results, strict=True):
        work.judge(result)
