"""What a tile table is made from: the problems that stand for its rows, and the configurations.

A configuration is the present one with some fields changed, and those that follow from them.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from .. import _tuning
from .._kernels import Kernel
from .case import DTYPES, Case
from .suites import MASKS, TOKENS, WIDTH

Config = Any

# A table's row is of a pair of head dims, a dtype, a mask and a class of lengths.
DIMS = ((64, 64), (96, 96), (128, 128), (192, 192), (256, 256), (192, 128), (64, 128))
LENGTHS = (1024, 8192)  # the representatives of short and long
TUNED_DTYPES = ("bf16", "e4m3", "fp32")


def problems(kernel: Kernel, arch: int) -> Iterator[Case]:
    """Yield a problem for each row of a kernel's table."""
    for dtype, dims, length, mask in itertools.product(TUNED_DTYPES, DIMS, LENGTHS, MASKS):
        heads = WIDTH // dims[0]
        case = Case(dtype, TOKENS // length, length, length, heads, heads, *dims, mask)
        if kernel.refusal(case.request(arch).problem) is None:
            yield case


def sm80(kernel: Kernel, case: Case, arch: int) -> list[Config]:
    """Return configurations of attention_fwd_sm80."""
    problem = case.request(arch).problem

    def complete(config: Config) -> Config:
        tiles = {f.name: getattr(config, f.name) for f in dataclasses.fields(_tuning.Tiles)}
        size = _tuning.shared_bytes(
            DTYPES[case.dtype].name,
            config.head_dim,
            config.head_dim_v,
            problem.band.cuda_bytes,
            _tuning.Tiles(**tiles),
        )
        return dataclasses.replace(config, smem_bytes=size)

    single = case.dtype == "fp32"
    choices = {
        "warps": (4, 8),
        "m_tiles": (1, 2),
        "block_k": (16, 32) if single else (32, 48, 64, 96, 128),
        "stages": (1,) if single else (2, 3),
        "min_blocks": (1, 2, 3),
        "q_in_registers": (False,) if single else (False, True),
    }
    assert kernel.config is not None
    found = variants(kernel.config(problem), choices, complete)
    limit = _tuning.shared_limit(arch)
    return [c for c in found if max(1, c.min_blocks) * (c.smem_bytes + 1024) <= limit + 1024]


def variants(
    base: Config, choices: Mapping[str, Iterable[Any]], complete: Callable[[Config], Config]
) -> list[Config]:
    """Return a configuration, and after it every other combination of choices for its fields.

    Parameters
    ----------
    base
        The present configuration.
    choices
        Values by field.
    complete
        Sets the fields that follow from these.
    """
    changed = (
        complete(dataclasses.replace(base, **dict(zip(choices, values, strict=True))))
        for values in itertools.product(*choices.values())
    )
    return list(dict.fromkeys([base, *changed]))


CANDIDATES: dict[str, Callable[[Kernel, Case, int], list[Config]]] = {"attention_fwd_sm80": sm80}
