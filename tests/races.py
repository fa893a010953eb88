"""Emulated kernels under ThreadSanitizer, in a process of its own: ``races.py WHAT``.

``clean KERNEL`` runs problems of a generic kernel and of those around it, ``clean tiny`` kernels of
a few lines, and prints which. ``fault KERNEL NAME FOLDER`` runs the problem of a mutation, planted
in a copy of the sources in that folder, and ``unordered NAME`` a kernel of a few lines without what
orders it. The sanitizer writes what it finds to stderr. Its library has to be loaded before
Python's: LD_PRELOAD says so to this process, not to those that it starts.
"""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import dbias
import gradients
import mutations_dbias
import pytest
from cases import SMOKE
from emulated import numbers, run, tiny
from harness import GPU_KERNEL
from test_mutations import SUITES, planted, prepare

import cupyflash
from cupyflash import _backward_sm80, _emulator

SEEDS = (0, 1, 3)  # threads at random, first in first out, by rank of their warps
FAULTS: dict[str, Any] = {
    kernel: SUITES[kernel].faults for kernel in (GPU_KERNEL, _backward_sm80.NAME)
} | {dbias.NAME: mutations_dbias}
PROBLEMS: dict[str, dict[str, Any]] = {kernel: faults.PROBLEMS for kernel, faults in FAULTS.items()}
PROBLEMS[GPU_KERNEL] = {case.id: case for case in SMOKE} | PROBLEMS[GPU_KERNEL]
# Two blocks may write a row there: with the same bits, or with those of one of its sequences.
del PROBLEMS[GPU_KERNEL]["bounds that fall"]
THREADS = 64  # of a block of a tiny kernel


class Order(NamedTuple):
    """What a kernel of a few lines does, with a place for what orders it, and what does not."""

    body: str
    by: str
    not_by: str = ""
    blocks: int = 1


PRODUCE = "if (i < 32) { shared[i] = i; %s } else { "
CONSUME = " p.x[i] = shared[63 - i]; }"
ORDERS = {
    "a barrier": Order("shared[i] = i; %s p.x[i] = shared[63 - i];", "ptx::barrier();"),
    "a barrier of a warp": Order(
        "shared[i] = i; %s p.x[i] = shared[i ^ 1];",
        "ptx::warp_barrier();",
        "ptx::shfl_xor(0.f, 1);",
    ),
    "the second of two barriers": Order(
        "shared[i] = i; ptx::barrier(); p.x[i] = shared[63 - i]; %s shared[i] = 0;",
        "ptx::barrier();",
    ),
    "a named barrier": Order(
        PRODUCE % "ptx::named_barrier_arrive(1, 64);" + "%s" + CONSUME,
        "ptx::named_barrier_sync(1, 64);",
        "ptx::named_barrier_arrive(1, 64);",
    ),
    "an mbarrier": Order(
        "const u32 full = ptx::smem_address(shared + 128);"
        "if (i == 0) ptx::mbarrier_init(full, 32);"
        "ptx::barrier();" + PRODUCE % "ptx::mbarrier_arrive(full);" + "%s" + CONSUME,
        "ptx::mbarrier_wait(full, 0);",
    ),
    "a number of global memory": Order(
        "if (blockIdx.x == 0) { p.x[i] = i; ptx::barrier(); if (i == 0) %s; }"
        "else { if (i == 0) ptx::acquire_when(p.counts, 1); ptx::barrier(); p.x[63 - i] += 1; }",
        "ptx::release_add(p.counts, 1)",
        "ptx::atomic_add(p.counts, 1)",
        blocks=2,
    ),
    "a place of one's own": Order("p.x[64 * %s + i] = 1;", "blockIdx.x", "0", blocks=2),
}


def run_tiny(order: Order, by: str) -> None:
    headers = '#include "ptx/group.cuh"\n#include "ptx/mbarrier.cuh"\n'
    with numbers(THREADS * order.blocks) as given:
        launch = tiny(order.body % by, given.params, order.blocks)
        _emulator.run(replace(launch, unit=headers + launch.unit), seed=0)


def compute(kernel: str, problem: str, seed: int) -> None:
    case = PROBLEMS[kernel][problem]
    if kernel == dbias.NAME:
        dbias.emulated(*case, seed)
    elif kernel == GPU_KERNEL:
        run(*case.arrays(), kernel=kernel, seed=seed, **case.options)
    else:
        gradients.emulated(kernel, case, seed, **FAULTS[kernel].OPTIONS.get(problem, {}))


def clean(kernel: str) -> None:
    if kernel == "tiny":
        for name, order in ORDERS.items():
            run_tiny(order, order.by)
            print(name)
        return
    for name in PROBLEMS[kernel]:
        for seed in SEEDS:
            compute(kernel, name, seed)
        print(name)


def unordered(name: str) -> None:
    run_tiny(ORDERS[name], ORDERS[name].not_by)


def fault(kernel: str, name: str, folder: str) -> None:
    (mutation,) = (m for m in FAULTS[kernel].ALL if m.name == name)
    os.environ["CUPYFLASH_CUDA_DIR"] = str(planted(mutation, Path(folder)))
    for seed in SEEDS:
        try:
            compute(kernel, mutation.problem, seed)
        except cupyflash.KernelFault as fault:
            print(fault)


if __name__ == "__main__":
    del os.environ["LD_PRELOAD"]
    with pytest.MonkeyPatch.context() as patch:
        prepare(patch)
        {"clean": clean, "unordered": unordered, "fault": fault}[sys.argv[1]](*sys.argv[2:])
