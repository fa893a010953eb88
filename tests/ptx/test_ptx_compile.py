"""The kernels of this folder compile for a Hopper GPU, and try every function of ``cuda/ptx``."""

import importlib
import re
from pathlib import Path

import pytest
from machine import ARCH, Kernel, compiled

from cupyflash import _jit


def kernels() -> dict[str, Kernel]:
    """Return the kernels of all tests of this folder, by their names."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("test_ptx_*.py")):
        if path == Path(__file__):
            continue
        members = vars(importlib.import_module(path.stem))
        members = members | {str(i): kernel for i, kernel in enumerate(members.get("KERNELS", ()))}
        for name, member in members.items():
            if isinstance(member, Kernel):
                found[f"{path.stem}-{name}"] = member
    return found


KERNELS = kernels()


@pytest.mark.parametrize("name", KERNELS)
def test_nvrtc_has_nothing_to_remark(name: str) -> None:
    pytest.importorskip("cupy", reason="needs CuPy and NVRTC")
    assert compiled(KERNELS[name].unit, ARCH).log == ""


def test_every_function_is_tried() -> None:
    headers = "".join(text for name, text in _jit.sources().items() if name.startswith("ptx/"))
    functions = set(re.findall(r"^DEVICE \w+ [*&]?(\w+)\(", headers, re.MULTILINE))
    functions |= set(re.findall(r"CUPYFLASH_WGMMA_(?:8|16)_BITS\((\w+), \"", headers))
    assert {"shared", "tma_load_4d", "wgmma_e4m3_e5m2"} <= functions
    units = "".join(kernel.unit for kernel in KERNELS.values())
    assert not functions - set(re.findall(r"\bptx::(\w+)", units))
