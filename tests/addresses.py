"""Emulated kernels under AddressSanitizer, in a process of its own: ``addresses.py WHAT``.

``attend`` and ``differentiate KERNEL`` run problems with several seeds and hold them against the
oracle; ``fault`` writes past an array of a thread, to see whether the sanitizer looks. Its library
has to be loaded before Python's: LD_PRELOAD says so to this process, not to those that it starts.
"""

import os
import sys

del os.environ["LD_PRELOAD"]

from typing import Any

import dbias
import gradients
import mutations_bwd_sm80
import mutations_bwd_sm90
import mutations_dbias
from cases import SMOKE
from emulated import check, numbers

from cupyflash import _backward_sm80, _backward_sm90
from cupyflash._emulator import build

SEEDS = tuple(range(0, 12, 2))
HOPPER = SMOKE[:2]  # which its own kernel takes
FAULTS: dict[str, Any] = {
    _backward_sm80.NAME: mutations_bwd_sm80,
    _backward_sm90.NAME: mutations_bwd_sm90,
    dbias.NAME: mutations_dbias,
}


def differentiate(kernel: str) -> None:
    faults = FAULTS[kernel]
    for name, case in faults.PROBLEMS.items():
        for seed in SEEDS:
            if kernel == dbias.NAME:
                dbias.judge_case(case[0], dbias.emulated(*case, seed))
            else:
                options = faults.OPTIONS.get(name, {})
                grads = gradients.emulated(kernel, case, seed, **options)
                gradients.judge_case(case, grads)
        print(name)


def attend() -> None:
    for case in SMOKE:
        check(*case.arrays(), seeds=SEEDS, **case.options)
        print(case.id)
    for case in HOPPER:
        check(*case.arrays(), seeds=SEEDS, kernel="attention_fwd_sm90", **case.options)
        print(f"{case.id} on sm_90")


def fault() -> None:
    with numbers() as given:
        given.run("float a[4]; a[p.n] = 1; a[p.n - 1] = 2; p.x[i % 4] = a[p.n - 1];")


if __name__ == "__main__":
    build.WATCHED = ("-fsanitize=address",)  # of units; the runtime stays plain
    {"attend": attend, "differentiate": differentiate, "fault": fault}[sys.argv[1]](*sys.argv[2:])
