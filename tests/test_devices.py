"""Forward on arrays of a device that is not the current one (two GPUs)."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from harness import GPU_KERNELS, attend, judge

import cupyflash
from cupyflash.errors import InvalidArgument

pytestmark = pytest.mark.gpu
both = pytest.mark.parametrize("kernel", GPU_KERNELS)


@pytest.fixture
def cp() -> Any:
    import cupy

    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    return cupy


def draw(seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((1, 70, 2, 128)).astype(np.float16) for _ in "qkv"]


def attend_on(cp: Any, kernel: str, device: int, seed: int) -> None:
    """Call on arrays of one device while the thread's device is another."""
    values = draw(seed)
    with cp.cuda.Device(device):
        arrays = [cp.asarray(x) for x in values]
    current = cp.cuda.Device().id
    out, lse = attend(kernel, *arrays, causal=True, return_lse=True)
    assert cp.cuda.Device().id == current
    assert out.device.id == lse.device.id == device
    with cp.cuda.Device(device):
        judge((out.get(), lse.get()), *values, causal=True)


@both
def test_each_device_in_turn(cp: Any, kernel: str) -> None:
    for seed, device in enumerate((0, 1, 0, 1)):
        attend_on(cp, kernel, device, seed)


@both
def test_a_thread_for_each_device(cp: Any, kernel: str) -> None:
    def work(device: int) -> None:
        for seed in range(50):
            attend_on(cp, kernel, device, seed)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, (0, 1)))


@both
def test_the_stream_of_the_arrays_device_is_taken(cp: Any, kernel: str) -> None:
    import gpu

    with cp.cuda.Device(1):
        stream = cp.cuda.Stream(non_blocking=True)
        x = cp.ones((1, 64, 2, 64), np.float16)
        out = cp.empty_like(x)
        attend(kernel, x, x, x, out=out)
        cp.cuda.Device().synchronize()
        with stream:
            gpu.spin(200)
            attend(kernel, x, x, x, out=out)
            assert not stream.done
            assert cp.cuda.Stream.null.done
            stream.synchronize()
        assert (out.get() == 1).all()


def test_arrays_of_two_devices_are_refused(cp: Any) -> None:
    q, k, v = draw(1)
    with cp.cuda.Device(0):
        q = cp.asarray(q)
    with cp.cuda.Device(1):
        k, v = cp.asarray(k), cp.asarray(v)
    with pytest.raises(InvalidArgument, match=r"`k` .*1.*`q` .*0|`q` .*0.*`k` .*1"):
        cupyflash.attention(q, k, v)


@both
@pytest.mark.frameworks
def test_torch_tensors_of_the_other_device(cp: Any, kernel: str) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.device_count() < 2:
        pytest.skip("this build of torch sees fewer than two GPUs")
    values = draw(2)
    tensors = [torch.from_numpy(x).to("cuda:1") for x in values]
    with torch.cuda.device(0):
        out, lse = attend(kernel, *tensors, return_lse=True)
        assert torch.cuda.current_device() == 0
    assert out.device == lse.device == tensors[0].device
    judge((out.cpu().numpy(), lse.cpu().numpy()), *values)
