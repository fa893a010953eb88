"""What a tile table is made from: the problems that stand for its rows, and the configurations.

A configuration is the present one with some fields changed, and those that follow from them.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from .. import _tuning, _tuning_sm90
from .._array import ITEMSIZES
from .._kernels import Kernel
from .case import DTYPES, Case
from .suites import MASKS, TOKENS, WIDTH

Config = Any

# A table's row is of a pair of head dims, a dtype, a mask and a class of lengths.
DIMS = ((64, 64), (96, 96), (128, 128), (192, 192), (256, 256), (192, 128), (64, 128))
LENGTHS = (1024, 8192)  # the representatives of short and long
TUNED_DTYPES = ("bf16", "e4m3", "fp32")

CONSUMER_REGISTERS = {2: 232, 3: 160, 4: 112}  # of a thread, by the warpgroups of a block
WORKING = 24  # registers that a consumer needs beside its tiles, at the least
MAX_STAGES = 6


def problems(kernel: Kernel, arch: int) -> Iterator[Case]:
    """Yield a problem for each row of a kernel's table."""
    for dtype, dims, length, mask in itertools.product(TUNED_DTYPES, DIMS, LENGTHS, MASKS):
        heads = WIDTH // dims[0]
        case = Case(dtype, TOKENS // length, length, length, heads, heads, *dims, mask)
        if kernel.refusal(case.request(arch).problem) is None:
            yield case


def sm90(kernel: Kernel, case: Case, arch: int) -> list[Config]:
    """Return configurations of attention_fwd_sm90.

    Of the numbers of stages only those that leave no room for another one.
    """
    dtype = DTYPES[case.dtype].name

    def complete(config: Config) -> Config:
        tiles = _tuning_sm90.Tiles(**fields(config, _tuning_sm90.Tiles))
        size = _tuning_sm90.shared_bytes(dtype, config.head_dim, config.head_dim_v, tiles)
        return dataclasses.replace(config, smem_bytes=size)

    def fits(config: Config) -> bool:
        # Scores, their packed weights and O of a consumer's threads. Scores of 8 bits are gone when
        # the packed weights are multiplied, of whose product there are parts.
        scores, packed = config.block_k // 2, config.block_k * ITEMSIZES[dtype] // 8
        if ITEMSIZES[dtype] == 1:
            part = config.head_dim_v // 2 // config.parts
            paired = config.consumers == 2 and config.parts > 1
            taken = max(scores, packed + part * (1 + paired)) + config.head_dim_v // 2
        else:
            taken = scores + packed + config.head_dim_v // 2
        return (
            config.smem_bytes <= _tuning.shared_limit(arch)
            and taken + WORKING <= CONSUMER_REGISTERS[config.consumers]
        )

    def wasteful(config: Config) -> bool:
        more = (
            complete(dataclasses.replace(config, **{name: getattr(config, name) + 1}))
            for name in ("k_stages", "v_stages")
        )
        return any(fits(c) and max(c.k_stages, c.v_stages) <= MAX_STAGES for c in more)

    choices = {
        # Of whole products.
        "block_k": range(64, 257 if ITEMSIZES[dtype] == 1 else 177, 32 // ITEMSIZES[dtype]),
        "consumers": (2, 3) if ITEMSIZES[dtype] == 1 else tuple(CONSUMER_REGISTERS),
        "k_stages": range(2, MAX_STAGES + 1),
        "v_stages": range(2, MAX_STAGES + 1),
        "q_buffers": (1, 2),
        "turns": (False, True) if ITEMSIZES[dtype] == 1 else (False,),
    }
    assert kernel.config is not None
    base, *others = variants(kernel.config(case.request(arch).problem), choices, complete)
    return [base, *(config for config in others if fits(config) and not wasteful(config))]


def sm80(kernel: Kernel, case: Case, arch: int) -> list[Config]:
    """Return configurations of attention_fwd_sm80."""
    problem = case.request(arch).problem
    dtype, mask_bytes = DTYPES[case.dtype].name, problem.band.cuda_bytes

    def complete(config: Config) -> Config:
        tiles = _tuning.Tiles(**fields(config, _tuning.Tiles))
        size = _tuning.shared_bytes(dtype, config.head_dim, config.head_dim_v, mask_bytes, tiles)
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
    base, *others = variants(kernel.config(problem), choices, complete)
    limit = _tuning.shared_limit(arch) + 1024
    return [base, *(c for c in others if c.min_blocks * (c.smem_bytes + 1024) <= limit)]


def fields(config: Config, tiles: type) -> dict[str, Any]:
    """Return the fields of a class of tiles that a configuration has."""
    names = (field.name for field in dataclasses.fields(tiles))
    return {name: getattr(config, name) for name in names if hasattr(config, name)}


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


CANDIDATES: dict[str, Callable[[Kernel, Case, int], list[Config]]] = {
    "attention_fwd_sm90": sm90,
    "attention_fwd_sm80": sm80,
}
