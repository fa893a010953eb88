"""What the card can do today: a large cuBLAS product and a copy, measured with the results."""

from __future__ import annotations

from .runner import clock, torch_sees_gpu
from .timing import GpuClock

SIDE = 8192
COPY_BYTES = 1 << 30


def limits() -> dict[str, float]:
    """Return bf16 matrix TFLOP/s and copy TB/s (read and write); empty without torch or a GPU."""
    if not torch_sees_gpu():
        return {}
    import torch

    timer = clock("torch")
    assert isinstance(timer, GpuClock)
    a, b = (torch.randn(SIDE, SIDE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    product_us = timer.kernel_us(lambda: torch.mm(a, b), 1.0)
    copy_us = timer.kernel_us(lambda: target.copy_(source), 0.5)
    return {
        "matmul_bf16_tflops": 2 * SIDE**3 / product_us / 1e6,
        "copy_tbps": 2 * COPY_BYTES / copy_us / 1e6,
    }
