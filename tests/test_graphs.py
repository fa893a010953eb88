"""Forward inside CUDA graph captures, of CuPy and of torch (GPU)."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from harness import GPU_KERNELS, attend, judge, run_child, same_bits

pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("kernel", GPU_KERNELS)]
SHAPE = (2, 100, 3, 64)

# The first call of a process inside a capture says what to do and leaves the process whole; once
# that is done, the same call is captured.
COLD = """
import sys
from contextlib import contextmanager
import numpy as np
import cupyflash
from cupyflash.errors import CupyflashError

framework, kernel = sys.argv[1:]

def cold(q, capture, fetch):
    with capture():
        try:
            cupyflash.attention(q, q, q, kernel=kernel)
        except CupyflashError as error:
            print("refused:", error)
    cupyflash.warmup(q, q, q, kernel=kernel)
    with capture() as replay:
        out = cupyflash.attention(q, q, q, kernel=kernel)
    q.fill(2) if hasattr(q, "fill") else q.fill_(2)
    replay[0]()
    assert (fetch(out) == 2).all()
    print("replayed")

def with_cupy():
    import cupy
    stream = cupy.cuda.Stream(non_blocking=True)

    @contextmanager
    def capture():
        replay = []
        stream.begin_capture()
        try:
            yield replay
        finally:
            replay.append(stream.end_capture().launch)

    with stream:
        cold(cupy.ones((1, 20, 1, 24), np.float16), capture, lambda x: x.get())

def with_torch():
    import torch
    q = torch.ones((1, 20, 1, 24), dtype=torch.float16, device="cuda")
    other = torch.zeros(1, device="cuda")

    @contextmanager
    def capture():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            other.add_(1)  # torch warns of a graph of no nodes
            yield [graph.replay]

    cold(q, capture, lambda x: x.cpu().numpy())

globals()[framework]()
"""


@contextmanager
def capture(stream: Any) -> Iterator[list[Any]]:
    """Record what CuPy's stream is given; the list holds the graph afterwards."""
    graphs: list[Any] = []
    stream.begin_capture()
    try:
        yield graphs
    finally:
        graphs.append(stream.end_capture())


def draw(seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(SHAPE).astype(np.float16) for _ in "qkv"]


@pytest.mark.parametrize("given", [False, True], ids=["fresh_output", "given_output"])
def test_a_captured_call_replays_on_new_values(cp: Any, kernel: str, given: bool) -> None:
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        arrays = [cp.asarray(x) for x in draw(0)]
        options = {"out": cp.empty(SHAPE, np.float16)} if given else {}
        attend(kernel, *arrays, causal=True, return_lse=True, **options)
        with capture(stream) as graphs:
            out, lse = attend(kernel, *arrays, causal=True, return_lse=True, **options)
        for seed in range(1, 4):
            values = draw(seed)
            for x, value in zip(arrays, values, strict=True):
                x.set(value)
            out.fill(np.nan)
            lse.fill(np.nan)
            graphs[0].launch(stream)
            judge((out.get(), lse.get()), *values, causal=True)


def test_a_copied_input_is_copied_at_every_replay(cp: Any, kernel: str) -> None:
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        wide = cp.zeros((*SHAPE[:3], 128), np.float16)
        x = wide[..., ::2]
        attend(kernel, x, x, x)
        with capture(stream) as graphs:
            out = attend(kernel, x, x, x)
        for number in (1, 2, 3):
            wide.fill(number)
            graphs[0].launch(stream)
            assert (out.get() == number).all()


def test_graphs_of_two_streams_and_eager_calls_do_not_disturb_each_other(
    cp: Any, kernel: str
) -> None:
    recorded = []
    for seed in range(2):
        stream = cp.cuda.Stream(non_blocking=True)
        with stream:
            arrays = [cp.asarray(x) for x in draw(seed)]
            expected = [x.get() for x in attend(kernel, *arrays, return_lse=True)]
            with capture(stream) as graphs:
                results = attend(kernel, *arrays, return_lse=True)
        recorded.append((stream, arrays, graphs[0], results, expected))
    for _ in range(3):
        for stream, arrays, graph, results, expected in recorded:
            with stream:
                big = cp.zeros((2, 2000, 3, 64), np.float16)
                attend(kernel, big, big, big)
                attend(kernel, *arrays)
                graph.launch(stream)
                for result, right in zip(results, expected, strict=True):
                    assert same_bits(result.get(), right)


@pytest.mark.frameworks
def test_torch_captures_and_replays(torch_cuda: Any, kernel: str) -> None:
    torch = torch_cuda
    tensors = [torch.from_numpy(x).cuda() for x in draw(0)]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        attend(kernel, *tensors, causal=True)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = attend(kernel, *tensors, causal=True, return_lse=True)
    for seed in range(1, 4):
        values = draw(seed)
        for x, value in zip(tensors, values, strict=True):
            x.copy_(torch.from_numpy(value))
        out.fill_(float("nan"))
        graph.replay()
        judge((out.cpu().numpy(), lse.cpu().numpy()), *values, causal=True)


@pytest.mark.parametrize(
    "framework", ["with_cupy", pytest.param("with_torch", marks=pytest.mark.frameworks)]
)
def test_a_cold_call_inside_a_capture_says_what_to_do(cp: Any, kernel: str, framework: str) -> None:
    if framework == "with_torch":
        pytest.importorskip("torch")
    x = cp.ones((1, 20, 1, 24), np.float16)
    attend(kernel, x, x, x)  # skips where this GPU is not the kernel's
    child = run_child(sys.executable, "-c", COLD, framework, kernel, timeout=120)
    assert child.returncode == 0, child.stdout
    assert "refused: " in child.stdout
    assert "cupyflash.warmup" in child.stdout
    assert "replayed" in child.stdout
