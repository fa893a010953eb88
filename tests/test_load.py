"""Cubins to kernels: loaded once for each device, with the shared memory that they ask for."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny import Tiny, in_threads

from cupyflash import _jit
from cupyflash.errors import DeviceUnavailable, UnsupportedProblem

pytest.importorskip("cupy", reason="needs CuPy and NVRTC")

# Loading, against a stand-in for the driver


class Driver:
    """CuPy with two devices that count what is loaded."""

    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8

    class CUDADriverError(RuntimeError):
        pass

    def __init__(self) -> None:
        self.device, self.loads, self.attributes = 0, [], []
        self.error: Exception | None = None
        runtime = SimpleNamespace(CUDARuntimeError=type("CUDARuntimeError", (RuntimeError,), {}))
        function = SimpleNamespace(
            Module=lambda: SimpleNamespace(load=self.load, get_function=self.get)
        )
        self.cuda = SimpleNamespace(
            driver=self, runtime=runtime, function=function, Device=self.select
        )

    def select(self, device: int) -> Any:
        driver = self

        class Guard:
            attributes = {"MaxSharedMemoryPerBlockOptin": 232448}  # noqa: RUF012
            compute_capability = ("90", "103")[device]

            def __enter__(self) -> Any:
                self.previous, driver.device = driver.device, device
                return self

            def __exit__(self, *_: object) -> None:
                driver.device = self.previous

        return Guard()

    def load(self, image: bytes) -> None:
        if self.error:
            raise self.error
        self.loads.append((self.device, image))

    def get(self, symbol: str) -> Any:
        return SimpleNamespace(ptr=100 + self.device, symbol=symbol)

    def funcSetAttribute(self, pointer: int, attribute: int, value: int) -> None:
        self.attributes.append((self.device, pointer, attribute, value))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    stand_in = Driver()
    monkeypatch.setattr(_jit, "import_cupy", lambda: stand_in)
    monkeypatch.setattr(_jit, "_loaded", {})
    return stand_in


def test_a_kernel_is_loaded_once_for_each_device(tiny: Tiny, driver: Driver) -> None:
    cubin = tiny.compile()
    first = _jit.load(cubin, 0, 100_000)
    second = _jit.load(cubin, 1, 100_000)
    for _ in range(1000):
        assert _jit.load(cubin, 0, 100_000) is first
        assert _jit.load(cubin, 1, 100_000) is second
    image = cubin.path.read_bytes()
    assert driver.loads == [(0, image), (1, image)]
    assert driver.attributes == [(0, 100, 8, 100_000), (1, 101, 8, 100_000)]
    assert driver.device == 0


def test_sixteen_threads_load_once(tiny: Tiny, driver: Driver) -> None:
    cubin, functions = tiny.compile(), []
    in_threads(16, lambda: functions.append(_jit.load(cubin, 0, 0)))
    assert len(functions) == 16
    assert len(driver.loads) == 1
    assert len({id(function) for function in functions}) == 1


def test_too_much_shared_memory_is_refused_before_loading(tiny: Tiny, driver: Driver) -> None:
    cubin = tiny.compile()
    cubin = cubin._replace(resources=cubin.resources._replace(shared=16))
    with pytest.raises(UnsupportedProblem, match=r"232449 bytes of shared memory.* 232448"):
        _jit.load(cubin, 0, 232448 - 15)
    assert driver.loads == []
    _jit.load(cubin, 0, 232448 - 16)


def test_a_driver_that_refuses_a_cubin_gets_a_sentence(tiny: Tiny, driver: Driver) -> None:
    driver.error = driver.CUDADriverError("CUDA_ERROR_NO_BINARY_FOR_GPU")
    with pytest.raises(DeviceUnavailable, match=r"sm_80 kernel .*NO_BINARY_FOR_GPU.*cuda12"):
        _jit.load(tiny.compile(), 0, 0)
    assert driver.device == 0
    driver.error = None
    _jit.load(tiny.compile(), 0, 0)  # a failure is not remembered


def test_compute_capabilities_are_one_number(driver: Driver) -> None:
    _jit.compute_capability.cache_clear()
    try:
        assert [_jit.compute_capability(device) for device in (0, 1)] == [90, 103]
    finally:
        _jit.compute_capability.cache_clear()


def test_a_machine_without_a_gpu_says_so(tiny: Tiny) -> None:
    import cupy

    if cupy.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    with pytest.raises(DeviceUnavailable, match="CUDA device 0 cannot be used"):
        _jit.compute_capability(0)
    with pytest.raises(DeviceUnavailable, match="CUDA device 0 cannot load"):
        _jit.load(tiny.compile(), 0, 0)


# Loading, on a GPU

SHARED = """
extern "C" __global__ void touch(int *x, int bytes) {
  extern __shared__ char dynamic[];
  __shared__ int fixed[4];
  dynamic[bytes - 1] = 7;
  fixed[threadIdx.x] = 5;
  __syncthreads();
  x[threadIdx.x] = dynamic[bytes - 1] + fixed[threadIdx.x];
}
"""


@pytest.mark.gpu
@pytest.mark.parametrize("amount", ["49151", "49152", "49153", "all", "one too many"])
def test_every_size_of_shared_memory_launches(tiny: Tiny, amount: str) -> None:
    import cupy
    import numpy as np

    device = cupy.cuda.Device()
    cubin = _jit.compile(SHARED, "touch", f"sm_{_jit.compute_capability(device.id)}")
    assert cubin.resources.shared == 16
    most = device.attributes["MaxSharedMemoryPerBlockOptin"] - 16
    count = int(amount) if amount.isdigit() else most + (amount != "all")
    if count > most:
        with pytest.raises(UnsupportedProblem, match="shared memory"):
            _jit.load(cubin, device.id, count)
        return
    function = _jit.load(cubin, device.id, count)
    x = cupy.zeros(4, cupy.int32)
    function((1,), (4,), (x, np.int32(count)), shared_mem=count)
    assert x.tolist() == [12] * 4


@pytest.mark.gpu
def test_a_loaded_kernel_runs_from_an_odd_path(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import cupy

    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", str(tmp_path / "ü b"))
    device = cupy.cuda.Device().id
    function = _jit.load(tiny.compile(f"sm_{_jit.compute_capability(device)}"), device, 0)
    x = cupy.arange(4, dtype=cupy.float32)
    for _ in range(1000):
        _jit.load(tiny.compile(f"sm_{_jit.compute_capability(device)}"), device, 0)
    function((1,), (4,), (x,))
    assert x.tolist() == [3, 4, 5, 6]


@pytest.mark.gpu
def test_a_kernel_loads_on_every_device(tiny: Tiny) -> None:
    import cupy

    before = cupy.cuda.runtime.getDevice()
    for device in range(cupy.cuda.runtime.getDeviceCount()):
        function = _jit.load(tiny.compile(f"sm_{_jit.compute_capability(device)}"), device, 0)
        with cupy.cuda.Device(device):
            x = cupy.zeros(2, cupy.float32)
            function((1,), (2,), (x,))
            assert x.tolist() == [3, 3]
    assert cupy.cuda.runtime.getDevice() == before
