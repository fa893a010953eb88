"""What is no tensor as operators of PyTorch take it, and masks as words with arrays and integers.

``PrefixLM(alignment='top_left') & Band(left=_, right=None, alignment='top_left')`` has one array
and one integer; ``segment_ids`` is the mask that comes by that argument. torch.compile traces
`tensor`, `word` and `arguments`.
"""

import ast
import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .. import masks as policies
from .._problem import DESCALES, Form, forms

__all__ = ["ARGUMENTS", "SEGMENTS", "arguments", "read", "tensor", "word", "write"]

ARGUMENTS = ("masks", "mask_arrays", "mask_integers")  # of an operator
SEGMENTS = "segment_ids"


def tensor(name: str, x: Any, device: Any) -> Any:
    """Return an argument that is no tensor as one; a random state is a pair of integers."""
    import torch

    if name == "rng_state":
        return torch.tensor([n - 2**64 if n >= 2**63 else n for n in x])  # as int64
    if name in DESCALES:
        return torch.full((), x, dtype=torch.float32, device=device)
    return torch.as_tensor(x)


def word(mask: Any, integers: list[Any]) -> str:
    """Return a mask's word, and append its integers to those of the others."""
    fields = []
    for field in dataclasses.fields(mask):
        if field.name not in mask.shapes:
            x = getattr(mask, field.name)
            if isinstance(x, int):
                integers.append(x)
            fields.append(f"{field.name}=_" if isinstance(x, int) else f"{field.name}={x!r}")
    return f"{type(mask).__name__}({', '.join(fields)})"


def write(masks: Iterable[Form], arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return the masks of a call as arguments of an operator."""
    integers: list[Any] = []
    written = [
        SEGMENTS if form.argument == SEGMENTS else word(form.mask, integers) for form in masks
    ]
    return arguments(written, [arrays[name] for form in masks for name in form.names], integers)


def arguments(written: list[str], arrays: list[Any], integers: list[Any]) -> dict[str, Any]:
    """Return words, arrays and integers as arguments of an operator, without those of none."""
    values = (" & ".join(written), arrays, integers)
    return {name: x for name, x in zip(ARGUMENTS, values, strict=True) if x}


def read(
    written: str, arrays: Sequence[Any] | None, integers: Sequence[int] | None
) -> tuple[tuple[Form, ...], dict[str, Any]]:
    """Return masks and their arrays by name, as `forms` does."""
    if not written:
        return (), {}
    rest, numbers = iter(arrays or ()), iter(integers or ())
    parts: list[policies.Mask] = []
    segments = None
    for kind, fields in _parsed(written):
        if kind is None:
            segments = (next(rest), next(rest))
        else:
            given = {name: next(numbers) if x is ... else x for name, x in fields.items()}
            parts.append(kind(**given, **{name: next(rest) for name in kind.shapes}))
    return forms(policies.All(*parts) if parts else None, segments)


@functools.lru_cache(maxsize=256)
def _parsed(written: str) -> tuple[tuple[type[policies.Mask] | None, dict[str, Any]], ...]:
    """Return of each word the class, None for SEGMENTS, and its fields: ... is an integer."""
    known = {kind.__name__: kind for kind in policies.ALL}
    found: list[Any] = []
    for part in written.split(" & "):
        tree: Any = ast.parse(part, mode="eval").body
        if part == SEGMENTS:
            found.append((None, {}))
            continue
        values = {field.arg: field.value for field in tree.keywords}
        fields = {
            name: ... if isinstance(x, ast.Name) else ast.literal_eval(x)
            for name, x in values.items()
        }
        found.append((known[tree.func.id], fields))
    return tuple(found)
