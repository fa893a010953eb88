"""The kernels of this folder compile for a Hopper GPU, so that a run on one finds them good."""

import importlib
from pathlib import Path

import pytest
from machine import ARCH, Kernel, compiled

pytest.importorskip("cupy", reason="needs CuPy and NVRTC")


def kernels() -> dict[str, Kernel]:
    """Return the kernels of all tests of this folder, by their names."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("test_ptx_*.py")):
        if path != Path(__file__):
            members = vars(importlib.import_module(path.stem))
            lists = {f"{i}": kernel for i, kernel in enumerate(members.get("KERNELS", []))}
            for name, member in (members | lists).items():
                if isinstance(member, Kernel):
                    found[f"{path.stem}-{name}"] = member
    return found


@pytest.mark.parametrize("kernel", [pytest.param(k, id=name) for name, k in kernels().items()])
def test_nvrtc_has_nothing_to_remark(kernel: Kernel) -> None:
    assert compiled(kernel.unit, ARCH).symbol in kernel.unit
