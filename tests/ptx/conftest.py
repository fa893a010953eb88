"""The machines that every test of this folder runs on."""

import os

import pytest
from emulated import needs_compiler
from machine import Emulator, Gpu, Machine

# Asynchronous operations as late as they may be, at random and at once; threads at random, by rank
# of their warps and last in first out.
SEEDS = (0, 7, 10)


@pytest.fixture(
    params=[
        pytest.param("gpu", marks=pytest.mark.gpu),
        *(pytest.param(seed, marks=needs_compiler, id=f"emulator-{seed}") for seed in SEEDS),
    ]
)
def machine(request: pytest.FixtureRequest) -> Machine:
    """Return a GPU, or the emulator with one of the seeds."""
    if request.param != "gpu":
        return Emulator(request.param)
    capture = request.config.pluginmanager.getplugin("capturemanager")

    def report(text: str) -> None:
        with capture.global_and_fixture_disabled():
            os.write(2, f"\n{text}\n".encode())

    return Gpu(report)
