"""Forward on the caller's stream: nothing elsewhere, no waiting, memory that lives (GPU)."""

from types import SimpleNamespace
from typing import Any

import gpu
import numpy as np
import pytest
from harness import GPU_KERNELS, attend, judge, run, same_bits

pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("kernel", GPU_KERNELS)]
SHAPE = (1, 64, 2, 64)
ROUNDS = range(1, 9)


class Foreign:
    """A stream of another library, seen through the CUDA stream protocol."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.stream.ptr)


def make_stream(cp: Any, kind: str) -> Any:
    side = cp.cuda.Stream(non_blocking=True)
    return {
        "non_blocking": side,
        "blocking": cp.cuda.Stream(),
        "null": cp.cuda.Stream.null,
        "per_thread": cp.cuda.Stream.ptds,
        "external": cp.cuda.Stream.from_external(Foreign(side)),
    }[kind]


KINDS = ("non_blocking", "blocking", "null", "per_thread", "external")


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_are_read_after_they_were_written(cp: Any, kernel: str, kind: str) -> None:
    stream = make_stream(cp, kind)
    with stream:
        q, k, v = (cp.zeros(SHAPE, np.float16) for _ in "qkv")
        attend(kernel, q, k, v)
        outs = []
        for number in ROUNDS:
            gpu.spin(5)
            for x in (q, k, v):
                x.fill(number)
            outs.append(attend(kernel, q, k, v))
        results = [out.get() for out in outs]
    for number, result in zip(ROUNDS, results, strict=True):
        assert (result == number).all(), number


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_returns_before_its_stream_is_done(cp: Any, kernel: str, kind: str) -> None:
    stream = make_stream(cp, kind)
    with stream:
        x = cp.ones((*SHAPE[:3], 128), np.float16)[..., ::2]  # copied first, on the same stream
        attend(kernel, x, x, x)
        stream.synchronize()
        gpu.spin(400)
        out = attend(kernel, x, x, x)
        assert not stream.done
        assert (out.get() == 1).all()


def test_the_innermost_stream_is_taken(cp: Any, kernel: str) -> None:
    outer, inner = (cp.cuda.Stream(non_blocking=True) for _ in range(2))
    x = cp.ones(SHAPE, np.float16)
    out = cp.empty(SHAPE, np.float16)  # given, so that no allocation can wait for the device
    attend(kernel, x, x, x, out=out)
    cp.cuda.Device().synchronize()
    with outer:
        with inner:
            gpu.spin(200)
            attend(kernel, x, x, x, out=out)
            assert not inner.done
            assert outer.done
        inner.synchronize()
        gpu.spin(200)
        attend(kernel, x, x, x, out=out)
        assert not outer.done
        assert inner.done
        outer.synchronize()
    assert (out.get() == 1).all()


def test_scratch_outlives_its_last_reference(cp: Any, kernel: str) -> None:
    ours, theirs = (cp.cuda.Stream(non_blocking=True) for _ in range(2))
    wide = (*SHAPE[:3], 128)
    outs = []
    for number in range(200):
        with ours:
            x = cp.empty(wide, np.float16)
            x.fill(number % 50)
            outs.append(attend(kernel, x[..., ::2], x[..., 1::2], x[..., ::2]))
            del x
        with theirs:
            for _ in range(4):
                cp.empty(wide, np.float16).fill(np.nan)
    with ours:
        results = [out.get() for out in outs]
    for number, result in enumerate(results):
        assert (result == number % 50).all(), number


@pytest.mark.frameworks
def test_torch_inputs_are_read_after_they_were_written(torch_cuda: Any, kernel: str) -> None:
    torch = torch_cuda
    for side in (torch.cuda.Stream(), torch.cuda.default_stream()):
        raw = SimpleNamespace(ptr=side.cuda_stream)
        with torch.cuda.stream(side):
            q, k, v = (torch.zeros(SHAPE, dtype=torch.bfloat16, device="cuda") for _ in "qkv")
            attend(kernel, q, k, v)
            outs = []
            for number in ROUNDS:
                gpu.spin(5, raw)
                for x in (q, k, v):
                    x.fill_(number)
                outs.append(attend(kernel, q, k, v))
            results = [out.float().cpu().numpy() for out in outs]
        for number, result in zip(ROUNDS, results, strict=True):
            assert (result == number).all(), number


@pytest.mark.frameworks
def test_torch_is_not_synchronised(torch_cuda: Any, kernel: str) -> None:
    torch = torch_cuda
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        x = torch.ones((*SHAPE[:3], 128), dtype=torch.float16, device="cuda")[..., ::2]
        attend(kernel, x, x, x)
        side.synchronize()
        gpu.spin(400, SimpleNamespace(ptr=side.cuda_stream))
        out = attend(kernel, x, x, x)
        assert not side.query()
        assert bool((out == 1).all())


@pytest.mark.frameworks
def test_torch_scratch_outlives_its_last_reference(torch_cuda: Any, kernel: str) -> None:
    torch = torch_cuda
    ours, theirs = torch.cuda.Stream(), torch.cuda.Stream()
    wide = (*SHAPE[:3], 128)
    outs = []
    for number in range(200):
        with torch.cuda.stream(ours):
            x = torch.full(wide, number % 50, dtype=torch.float16, device="cuda")
            outs.append(attend(kernel, x[..., ::2], x[..., 1::2], x[..., ::2]))
            del x
        with torch.cuda.stream(theirs):
            for _ in range(4):
                torch.full(wide, float("nan"), dtype=torch.float16, device="cuda")
    with torch.cuda.stream(ours):
        results = torch.stack(outs).cpu().numpy()
    for number, result in enumerate(results):
        assert (result == number % 50).all(), number


@pytest.mark.frameworks
def test_torch_and_cupy_agree_bit_for_bit(torch_cuda: Any, kernel: str) -> None:
    torch = torch_cuda
    rng = np.random.default_rng(1)
    arrays = [rng.standard_normal((2, 70, 3, 80)).astype(np.float16) for _ in "qkv"]
    expected = run(kernel, *arrays, causal=True)
    judge(expected, *arrays, causal=True)
    tensors = [torch.from_numpy(x).cuda() for x in arrays]
    out, lse = attend(kernel, *tensors, causal=True, return_lse=True)
    assert same_bits(out.cpu().numpy(), expected[0])
    assert same_bits(lse.cpu().numpy(), expected[1])
