"""The translation units that the dispatch table would compile, and what their code takes."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from .. import _jit, _kernels
from .._launch import Launch
from .._scalars import architecture
from .._tuning import HEAD_DIMS, UNEQUAL
from .case import Case, both

DIMS = (*((dim, dim) for dim in HEAD_DIMS), *sorted(UNEQUAL))  # of q and k, and of v
DTYPES = ("bf16", "fp16", "fp32", "e4m3", "e5m2")
MASKS = ("full", "causal", "window:128,-1", "window:128,128")  # which sides have a bound


@dataclass(frozen=True)
class Unit:
    """The launch of one case, of which the unit and its code are of interest here."""

    case: Case
    launch: Launch

    def compile(self) -> dict[str, Any]:
        """Compile, or find in the cache, and return what the code takes."""
        launch = self.launch
        cubin = _jit.compile(launch.unit, launch.symbol, launch.arch)
        return {
            "kernel": launch.symbol,
            "arch": launch.arch,
            "dtype": self.case.dtype,
            "head_dim": self.case.head_dim,
            "head_dim_v": self.case.head_dim_v,
            "mask": self.case.mask,
            "threads": launch.block[0],
            "dynamic_shared": launch.shared_bytes,
            **cubin.resources._asdict(),
            "log": cubin.log,
        }


def units_of(
    case: Case, arch: str, kernel: str | None = None, extras: dict[str, Any] | None = None
) -> list[Unit]:
    """Return the units that a problem is computed by on an architecture: first the kernel's own.

    `extras` are arguments of `cupyflash.explain` beyond the case's.

    Raises
    ------
    UnsupportedProblem
        No kernel, or not the one named, takes the problem there.
    """
    request = case.request(architecture(arch), **(extras or {}))
    row = _kernels.select(request.problem, kernel)
    launches = row.launches(request.problem, request.operands, request.backward)
    assert launches, "rows of the host take no problem of a GPU"
    main = row.main(launches)
    return [Unit(case, launch) for launch in (main, *(x for x in launches if x is not main))]


def every(arch: str, kernel: str | None = None) -> list[Unit]:
    """Return each unit of an architecture: every pass, dtype, pair of head dims and mask.

    Parameters
    ----------
    arch
        Like ``sm_90``.
    kernel
        One kernel's only.
    """
    units: dict[str, Unit] = {}
    for dtype, dims, mask, backward in itertools.product(DTYPES, DIMS, MASKS, (False, True)):
        case = Case(dtype, 1, 4096, 4096, 16, 16, *dims, mask)
        request = case.request(architecture(arch), backward=backward)
        for row in _kernels.KERNELS:
            if row.op != request.problem.op or row.refusal(request.problem) is not None:
                continue
            if kernel in (None, row.name):
                for launch in row.launches(request.problem, request.operands, request.backward):
                    units.setdefault(launch.unit, Unit(case, launch))
    return list(units.values())


def statistics(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return compiled units as tables for people, by the title that their units share."""
    tables: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        title = f"{row['kernel']}, {row['arch']}, NVRTC {row['nvrtc_version']}"
        tables.setdefault(title, []).append(
            {
                "dtype": row["dtype"],
                "D": both(row["head_dim"], row["head_dim_v"], "/"),
                "mask": row["mask"],
                "threads": row["threads"],
                "registers": row["registers"],
                "spilled": row["spill_stores"] + row["spill_loads"],
                "shared": row["dynamic_shared"] + row["shared"],
                "s": round(row["seconds"], 1),
            }
        )
    return tables
