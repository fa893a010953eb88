"""Calls of attention, and of its gradients, as JAX keeps them: hashable, without their arrays."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

from .._array import Array, contiguous_strides
from .._problem import Form, Operands, Problem, describe
from .._problem_backward import EXTRA, Backward, describe_backward

INPUTS = {"dq": "q", "dk": "k", "dv": "v"} | EXTRA  # what each gradient is that of
SCRATCH = "scratch"  # the result that launches hand to one another


class Spec(NamedTuple):
    """An array of a call, without the dimensions that ``vmap`` adds."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    def record(self, device: int) -> Array:
        """Return the record of such an array, which is not there yet."""
        strides = contiguous_strides(self.shape)
        return Array(0, self.shape, strides, self.dtype, device, "jax", True, None)


@dataclasses.dataclass(frozen=True)
class Call:
    """All of a call but its arrays: JAX compiles each once."""

    problem: Problem
    operands: tuple[Spec, ...]
    layout: str
    kernel: str | None
    masks: tuple[Form, ...]
    devices: tuple[int, ...]  # where it may run, the likeliest first
    return_lse: bool = False  # forward
    deterministic: bool = False  # of the gradients
    scratch: int = 0  # bytes, backward on a GPU

    def __hash__(self) -> int:
        return self._hash  # once: each callback looks a launch up by its call

    @functools.cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, field.name) for field in dataclasses.fields(self)))

    @property
    def backward(self) -> bool:
        """Whether its results are gradients."""
        return self.problem.op == "backward"

    @functools.cached_property
    def results(self) -> tuple[Spec, ...]:
        """The arrays that XLA allocates."""
        problem, given = self.problem, {spec.name: spec for spec in self.operands}
        if self.backward:
            found = [
                given[of]._replace(name=name)
                for name, of in INPUTS.items()
                if name not in EXTRA or name in problem.wanted
            ]
            return (*found, *([Spec(SCRATCH, (self.scratch,), "uint8")] if self.scratch else []))
        out = Spec("out", (*given["q"].shape[:-1], problem.head_dim_v), problem.output_dtype)
        batch = () if problem.packed else (problem.batch,)
        lse = Spec("lse", (*batch, problem.heads_q, problem.len_q), problem.lse_dtype)
        return (out, lse) if self.return_lse else (out,)

    @functools.cached_property
    def ranks(self) -> dict[str, int]:
        """How many dimensions each array has without those of ``vmap``, in XLA's order."""
        return {spec.name: len(spec.shape) for spec in (*self.operands, *self.results)}

    @functools.cached_property
    def planned(self) -> tuple[str, ...]:
        """The arrays of which launches depend by more than their addresses."""
        return tuple(
            spec.name
            for spec in (*self.operands, *self.results)
            if spec in self.operands or spec.name in INPUTS
        )

    @functools.cached_property
    def numbered(self) -> tuple[str, ...]:
        """The arrays of masks, in the order by which a launch counts them."""
        return tuple(name for form in self.masks for name in form.names)

    def records(self, device: int) -> dict[str, Array]:
        """Return the records of those arrays on a device, where they are not yet."""
        specs = (*self.operands, *self.results)
        return {spec.name: spec.record(device) for spec in specs if spec.name in self.planned}

    def described(
        self, records: Mapping[str, Array], arch: int | None, rng_state: Any
    ) -> tuple[Problem, Operands, Backward | None]:
        """Say what a call on these arrays is, operands and results, of one item or of several."""
        problem = self.problem
        options = {
            "arch": arch,
            "softmax_scale": problem.scale,
            "alignment": problem.band.alignment,
            "softcap": problem.softcap,
            "dropout_p": problem.dropout_p,
            "rng_state": rng_state,
            "layout": self.layout,
            "masks": (Form("mask", problem.band, ()), *self.masks),
        }
        given = {
            spec.name: records[spec.name] for spec in self.operands if spec.name != "rng_state"
        }
        if not self.backward:
            given |= {"out": records["out"]} if "out" in records else {}
            return *describe(given, **options), None
        options |= {"wanted": problem.wanted, "deterministic": self.deterministic}
        problem, operands, backward = describe_backward(given, **options)
        there = {
            name: getattr(backward, name)._replace(pointer=x.pointer, owner=x.owner)
            for name, x in records.items()
            if name in INPUTS
        }
        return problem, operands, backward._replace(**there)
