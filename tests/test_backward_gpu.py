"""Gradients on the caller's stream, in captured graphs, from the caller's allocator (GPU)."""

import gc
import sys
from typing import Any

import gpu
import numpy as np
import pytest
from gradients import ON_GPU, judge
from harness import run_child, same_bits
from test_graphs import capture
from test_streams import KINDS, make_stream

import cupyflash
from cupyflash import Gradients, UnsupportedProblem

pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("kernel", ON_GPU)]
SHAPE = (2, 200, 4, 64)
OPTIONS: dict[str, Any] = {"causal": True, "window_size": (150, 0)}

COLD = """
import sys
import cupy, numpy as np
import cupyflash
from cupyflash.errors import CupyflashError

kernel = sys.argv[1]
stream = cupy.cuda.Stream(non_blocking=True)
with stream:
    x = cupy.ones((1, 32, 1, 64), np.float16)
    out, lse = cupyflash.attention(x, x, x, return_lse=True)
    call = lambda: cupyflash.attention_backward(x, x, x, x, out, lse, kernel=kernel)
    stream.begin_capture()
    try:
        call()
    except CupyflashError as error:
        print("refused:", error)
    finally:
        stream.end_capture()
    cupyflash.warmup(x, x, x, kernel=kernel, backward=True)
    stream.begin_capture()
    grads = call()
    graph = stream.end_capture()
    graph.launch(stream)
    assert (grads.dv.get() == 1).all()
    print("replayed")
"""


def draw(seed: int) -> list[np.ndarray]:
    """Draw dout, q, k and v."""
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(SHAPE).astype(np.float16) for _ in range(4)]


def backward(kernel: str, *arrays: Any, **options: Any) -> Gradients:
    """Call a kernel by name; what it refuses is skipped, with its words."""
    try:
        return cupyflash.attention_backward(*arrays, kernel=kernel, **options)
    except UnsupportedProblem as refusal:
        pytest.skip(str(refusal))


def placed(cp: Any, values: list[np.ndarray], **options: Any) -> list[Any]:
    """Return dout, q, k, v, and out and lse of them, on the GPU."""
    dout, q, k, v = map(cp.asarray, values)
    return [dout, q, k, v, *cupyflash.attention(q, k, v, return_lse=True, **options)]


def judged(grads: Gradients, values: list[np.ndarray], **options: Any) -> None:
    """Hold gradients of the GPU against the oracle."""
    dout, q, k, v = values
    host = Gradients(*(None if x is None else gpu.fetch(x) for x in grads))
    judge(host, q, k, v, dout, None, **options)


def test_a_captured_step_replays_on_new_values(cp: Any, kernel: str) -> None:
    """Its scratch is no memory of others, however much they allocate meanwhile."""
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        arrays = [cp.asarray(x) for x in draw(0)]

        def step() -> Any:
            results = cupyflash.attention(*arrays[1:], return_lse=True, **OPTIONS)
            return results, backward(kernel, *arrays, *results, **OPTIONS)

        step()
        with capture(stream) as graphs:
            _results, grads = step()  # the graph needs both
        others = [cp.full(size, np.nan, np.float16) for size in (2**n for n in range(8, 22))]
        for seed in range(1, 4):
            values = draw(seed)
            for x, value in zip(arrays, values, strict=True):
                x.set(value)
            for x in grads[:3]:
                x.fill(np.nan)
            graphs[0].launch(stream)
            judged(grads, values, **OPTIONS)
        assert all(bool(cp.isnan(x).all()) for x in others)


def test_a_captured_copy_is_made_at_every_replay(cp: Any, kernel: str) -> None:
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        values = draw(0)
        arrays = placed(cp, values)
        wide = cp.zeros((*SHAPE[:3], 128), np.float16)
        dout = wide[..., ::2]
        backward(kernel, dout, *arrays[1:])
        with capture(stream) as graphs:
            grads = backward(kernel, dout, *arrays[1:])
        others = [cp.full(size, np.nan, np.float16) for size in (2**n for n in range(8, 22))]
        for seed in range(1, 3):
            values[0] = draw(seed)[0]
            wide[..., ::2] = cp.asarray(values[0])
            graphs[0].launch(stream)
            judged(grads, values)
        assert all(bool(cp.isnan(x).all()) for x in others)


@pytest.mark.frameworks
def test_torch_captures_and_replays(torch_cuda: Any, kernel: str) -> None:
    torch = torch_cuda
    tensors = [torch.from_numpy(x).cuda() for x in draw(0)]

    def step() -> Gradients:
        out, lse = cupyflash.attention(*tensors[1:], return_lse=True, **OPTIONS)
        return backward(kernel, *tensors, out, lse, **OPTIONS)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grads = step()
    others = [torch.full((2**n,), float("nan"), device="cuda") for n in range(8, 22)]
    for seed in range(1, 4):
        values = draw(seed)
        for x, value in zip(tensors, values, strict=True):
            x.copy_(torch.from_numpy(value))
        for x in grads[:3]:
            x.fill_(float("nan"))
        graph.replay()
        dout, q, k, v = values
        host = Gradients(*(None if x is None else x.cpu().numpy() for x in grads))
        judge(host, q, k, v, dout, None, **OPTIONS)
    assert all(bool(x.isnan().all()) for x in others)


def test_a_cold_call_inside_a_capture_says_what_to_do(cp: Any, kernel: str) -> None:
    x = cp.ones((1, 32, 1, 64), np.float16)
    out, lse = cupyflash.attention(x, x, x, return_lse=True)
    backward(kernel, x, x, x, x, out, lse)  # skips where this GPU is not the kernel's
    child = run_child(sys.executable, "-c", COLD, kernel, timeout=120)
    assert child.returncode == 0, child.stdout
    assert "refused: " in child.stdout
    assert "cupyflash.warmup" in child.stdout
    assert "replayed" in child.stdout


@pytest.mark.parametrize("kind", KINDS)
def test_work_is_in_order_on_the_callers_stream(cp: Any, kernel: str, kind: str) -> None:
    stream = make_stream(cp, kind)
    with stream:
        arrays = placed(cp, draw(0))
        expected = backward(kernel, *arrays)
        dout = cp.zeros(SHAPE, np.float16)
        backward(kernel, dout, *arrays[1:])
        stream.synchronize()
        gpu.spin(400)
        dout[...] = arrays[0]
        grads = backward(kernel, dout, *arrays[1:])
        assert not stream.done  # nothing waited
        dout.fill(np.nan)  # after the call has read it
        assert same_bits(gpu.fetch(grads.dk), gpu.fetch(expected.dk))
        assert same_bits(gpu.fetch(grads.dv), gpu.fetch(expected.dv))


def test_memory_comes_from_the_callers_allocator_and_goes_back(cp: Any, kernel: str) -> None:
    arrays = placed(cp, draw(0))
    backward(kernel, *arrays)
    asked: list[int] = []

    def allocate(size: int) -> Any:
        asked.append(size)
        return gpu.poisoned(size)

    with cp.cuda.using_allocator(allocate):
        grads = backward(kernel, *arrays)
    assert asked[:3] == [x.nbytes for x in grads[:3]]
    assert len(asked) == 4  # and the scratch
    del grads
    gc.collect()  # what earlier tests left in cycles, which the calls below would have collected
    pool = cp.get_default_memory_pool()
    before = pool.used_bytes()
    for _ in range(200):
        backward(kernel, *arrays)
        backward(kernel, cp.broadcast_to(arrays[0][:1, :1], SHAPE), *arrays[1:])
    assert pool.used_bytes() == before


def test_lengths_of_the_host_and_any_strides(cp: Any, kernel: str) -> None:
    values = draw(3)
    dout, q, k, v, *_ = arrays = placed(cp, values, seqused_k=[200, 77])
    used = {"seqused_k": [200, 77]}
    judged(backward(kernel, *arrays, **used), values, seqused_k=np.array([200, 77]))
    turned = [cp.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in (dout, q, k, v)]
    grads = backward(kernel, *turned, *arrays[4:], **used)
    judged(grads, values, seqused_k=np.array([200, 77]))
    assert [x.strides for x in grads[:3]] == [x.strides for x in turned[1:]]
    spread = cp.zeros((2, 4, 400), np.float32)[..., ::2]
    spread[...] = arrays[5]
    judged(backward(kernel, *arrays[:5], spread, **used), values, seqused_k=np.array([200, 77]))
    values[0] = np.broadcast_to(np.float16(1), SHAPE)
    ones = cp.broadcast_to(cp.ones((), np.float16), SHAPE)
    judged(backward(kernel, ones, *arrays[1:], **used), values, seqused_k=np.array([200, 77]))
