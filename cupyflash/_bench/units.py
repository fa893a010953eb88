"""The translation units that the dispatch table would compile, and what their code takes."""

from __future__ import annotations

import itertools
import re
from dataclasses import asdict, dataclass
from typing import Any

from .. import _jit, _kernels, _unit
from ..errors import InvalidArgument
from .case import Case

HEAD_DIMS = (16, 32, 64, 96, 128, 192, 256)  # the upper end of each class
DTYPES = ("bf16", "fp16", "fp32")
MASKS = ("full", "causal", "window:128,-1", "window:128,128")  # which sides have a bound


@dataclass(frozen=True)
class Unit:
    """One kernel for one class of problems and one architecture."""

    kernel: str
    arch: str  # as NVRTC names it: "sm_90"
    case: Case
    text: str
    config: dict[str, Any]

    def compile(self) -> dict[str, Any]:
        """Compile, or find in the cache, and return what the code takes."""
        cubin = _jit.compile(self.text, self.kernel, self.arch)
        return {
            "kernel": self.kernel,
            "arch": self.arch,
            "dtype": self.case.dtype,
            "head_dim": self.case.head_dim,
            "mask": self.case.mask,
            **cubin.resources._asdict(),
            "dynamic_shared": self.config.get("smem_bytes"),
            "log": cubin.log,
        }


def capability(arch: str) -> int:
    """Return the compute capability (90 for 9.0) of an architecture's name."""
    match = re.fullmatch(r"sm_(\d{2,3})[af]?", arch)
    if match is None:
        raise InvalidArgument(f"`arch` must be like sm_80 or sm_90a, got {arch!r}")
    return int(match[1])


def unit(case: Case, arch: str, kernel: str | None = None) -> Unit:
    """Return the unit that a problem is computed by on an architecture.

    Raises
    ------
    UnsupportedProblem
        No kernel, or not the one named, takes the problem there.
    """
    problem = case.problem(capability(arch))
    return of_row(_kernels.select(problem, kernel), case, arch)


def of_row(row: _kernels.Kernel, case: Case, arch: str) -> Unit:
    """Return the unit of one row of the dispatch table, which takes the problem."""
    assert row.config is not None, "a row of a GPU has a configuration"
    config = row.config(case.problem(capability(arch)))
    return Unit(row.name, arch, case, _unit.render(row.name, config), asdict(config))


def every(arch: str) -> list[Unit]:
    """Return each kernel of an architecture for every dtype, class of head dims and mask, once."""
    units: dict[tuple[str, str], Unit] = {}
    for dtype, dim, mask in itertools.product(DTYPES, HEAD_DIMS, MASKS):
        case = Case(dtype, 1, 4096, 4096, 16, 16, dim, dim, mask)
        problem = case.problem(capability(arch))
        for row in _kernels.KERNELS:
            if row.config is not None and row.refusal(problem) is None:
                found = of_row(row, case, arch)
                units.setdefault((found.kernel, found.text), found)
    return list(units.values())
