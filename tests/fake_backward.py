"""A backward kernel of a GPU that is none: two launches, which the oracle computes.

The first writes the gradient of the log-sum-exp, or zeros, into the scratch. The second reads it
there, takes q by a tensor map and all else through the addresses in its Params, the policies' among
them, and writes every gradient: so a wrong word is a wrong result.
"""

import itertools
import struct
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from fake_gpu import TICKETS, FakeGpu, Guard, Map, install
from fake_policies import Reader

from cupyflash import _backward, _jit, _kernels, _modifiers, reference
from cupyflash._array import Array
from cupyflash._array.host import host_view
from cupyflash._kernels import Kernel
from cupyflash._launch import Launch, Steps
from cupyflash._problem import Operands, Problem
from cupyflash._problem_backward import Backward
from cupyflash._tensor_map import BYTES, of
from cupyflash.masks import All

NAME = "attention_bwd_fake"
SUMS = 512  # bytes into the scratch
FIRST = ("dlse", "scratch")
SECOND = ("k", "v", "dout", "out", "lse", "dq", "dk", "dv", "dbias", "dsink", "scratch", "tickets")
RESULTS = ("dq", "dk", "dv", "dbias", "dsink")


@dataclass(frozen=True)
class Config:
    """What the kernel is specialised for."""

    head_dim: int


class Planned(NamedTuple):
    """What a unit was planned for."""

    problem: Problem
    operands: Operands
    backward: Backward


class FakeBackward:
    """The row of the kernel, and what its launches were given."""

    def __init__(self, gpu: FakeGpu, mapped: bool = True) -> None:
        self.gpu = gpu
        self.mapped = mapped  # whether the kernel takes a tensor map
        self.launches: list[SimpleNamespace] = []
        self.forgotten: set[str] = set()  # places that the row leaves out
        self.without_blocks: set[int] = set()  # launches whose grid is empty
        self._planned: dict[str, Planned] = {}
        self._numbers = itertools.count()
        self._load = gpu.load
        self.row = Kernel(
            name=NAME,
            op="backward",
            arch=range(80, 1000),
            needs="nothing",
            unsupported=lambda problem: "refuses" if problem.head_dim > 256 else None,
            config=lambda problem: Config(problem.head_dim),
            steps=self.steps,
        )

    def steps(self, problem: Problem, operands: Operands, backward: Backward) -> Steps:
        number, chosen = next(self._numbers), _modifiers.policies(problem)
        policies = "".join(
            f"using {name.title()} = {getattr(chosen, name)};\n"
            for name in ("mask", "score", "dropout", "sink", "sequences")
        )
        arrays = operands._asdict() | backward._asdict()
        launches = []
        for step, names in enumerate((FIRST, SECOND)):
            unit = f"// fake {number} step {step}\n{policies}"
            self._planned[unit] = Planned(problem, operands, backward)
            start = BYTES * step
            places = [
                (name, start + 8 * i)
                for i, name in enumerate(names)
                if name == "tickets" or (name != "scratch" and arrays[name] is not None)
            ]
            params = bytes(start + 8 * len(names))
            maps: Any = ()
            if step:
                places += _modifiers.places(problem, operands, len(params))
                params += _modifiers.pack(problem, operands)
                places.append(("q", 0))
                q = operands.q
                if self.mapped:
                    maps = ((0, of(q, (3, 1, 2, 0), (64, 16, 1, 1), 128)),)
            launches.append(
                Launch(
                    unit=unit,
                    symbol=NAME,
                    arch=f"sm_{problem.arch}",
                    grid=(0 if step in self.without_blocks else 3, 1, 1),
                    block=(32, 1, 1),
                    shared_bytes=64,
                    params=params,
                    maps=maps,
                    places=tuple(x for x in places if x[0] not in self.forgotten),
                    scratch=((start + 8 * names.index("scratch"), SUMS),),
                )
            )
        return Steps(SUMS + 8 * problem.batch * problem.heads_q * problem.len_q, tuple(launches))

    def load(self, cubin: Any, device: int, shared_bytes: int) -> Any:
        if cubin.unit not in self._planned:
            return self._load(cubin, device, shared_bytes)
        self.gpu.loaded.append((cubin.unit, device, shared_bytes))

        def kernel(grid: Any, block: Any, args: Any, shared_mem: int, stream: Any) -> None:
            assert (grid, block, shared_mem) == ((3, 1, 1), (32, 1, 1), shared_bytes)
            (argument,) = args
            self.run(cubin.unit, argument.tobytes(), stream.ptr)

        return kernel

    def run(self, unit: str, params: bytes, stream: int) -> None:
        planned = self._planned[unit]
        step = "step 1" in unit
        start = BYTES * step
        names = SECOND if step else FIRST
        words = dict(zip(names, struct.unpack_from(f"<{len(names)}Q", params, start), strict=True))
        assert (words["scratch"] - SUMS) % 256 == 0
        self.launches.append(SimpleNamespace(step=int(step), stream=stream, words=words))
        backward = planned.backward
        sums = self.at(backward.lse, words["scratch"])
        if not step:
            sums[...] = 0 if backward.dlse is None else self.at(backward.dlse, words["dlse"])
            return
        assert words["tickets"] == TICKETS + stream
        q = struct.unpack_from("<Q", params)[0]
        if self.mapped:
            tensor = Map.from_buffer_copy(params)
            assert tuple(tensor.shape)[:3] == tuple(planned.operands.q.shape[i] for i in (3, 1, 2))
            q = tensor.pointer
        self.differentiate(unit, params[start + 8 * len(SECOND) :], planned, words | {"q": q}, sums)

    def differentiate(
        self, unit: str, policies: bytes, planned: Planned, words: dict[str, int], sums: np.ndarray
    ) -> None:
        problem, operands, backward = planned
        sizes = {name: getattr(problem, name) for name in ("batch", "len_q", "len_k", "heads_q")}
        options = Reader(unit, policies, sizes).options
        band, masks = options.pop("band"), options.pop("masks")
        arrays = {name: self.at(getattr(operands, name), words[name]) for name in ("q", "k", "v")}
        arrays |= {"dout": self.at(backward.dout, words["dout"]), "dlse": sums}
        if problem.packed:
            arrays = {name: x[0] for name, x in arrays.items()}
        if backward.dbias is not None:
            own = tuple(slice(size) for size in backward.dbias.shape)
            options["attn_bias"] = options["attn_bias"][own]
        gradients = reference.attention_backward(
            **arrays,
            **options,
            mask=All(band, *masks),
            alignment=band.alignment,
            softmax_scale=problem.scale,
        )
        for name in RESULTS:
            if (x := getattr(backward, name)) is not None:
                result = self.at(x, words[name])
                result[...] = getattr(gradients, name).astype(result.dtype)

    def at(self, x: Array, pointer: int) -> np.ndarray:
        return host_view(x._replace(pointer=pointer, readonly=False))


def install_backward(monkeypatch: pytest.MonkeyPatch, **options: Any) -> FakeBackward:
    """Put a `FakeGpu` in the place of a GPU, and the row above all others of backward."""
    gpu = install(monkeypatch)
    fake = FakeBackward(gpu, **options)
    monkeypatch.setattr(_jit, "load", fake.load)
    monkeypatch.setattr(_kernels, "KERNELS", (fake.row, *_kernels.KERNELS))
    monkeypatch.setattr(_backward, "PLANS", type(_backward.PLANS)(64))
    monkeypatch.setattr(_backward, "device_guard", Guard)
    return fake
