"""A call under torch.vmap: its samples become entries of one batch where that means the same."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

from .._problem_backward import EXTRA

__all__ = ["mapped"]

# What has one entry for each of the batch, as its first axis, in either layout.
ENTRIES = ("q", "k", "v", "out", "lse", "dout", "dlse")
# What may be shared by all entries of a batch, and how many axes it has where it is not.
SHARED = {
    "attn_bias": 4, "attn_mask": 4, "alibi_slopes": 2, "learnable_sink": 2, "rng_state": 2,
}  # fmt: skip


def mapped(
    apply: Callable[..., tuple[Any, ...]],
    call: Any,
    names: Sequence[str],
    arrays: Sequence[Any],
    dims: Sequence[int | None],
    size: int,
    wanted: Collection[str] = (),
) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """Return what a function makes of the arrays of each sample, and the axes of the samples.

    Parameters
    ----------
    apply : callable
        The function, of a dense call or a packed one, or of its gradients.
    call : Call
        The call without its tensors.
    names, arrays, dims : sequence
        Of each array its name, itself, and its axis of samples or None.
    size : int
        How many samples there are.
    wanted : collection of str
        The gradients that the function returns, if it does.
    """
    given = list(zip(names, arrays, dims, strict=True))
    own = all(name in ENTRIES or (dim is None and _is_shared(name, x)) for name, x, dim in given)
    # The bits of dropout and the sums over the batch are those of a sample.
    apart = call.scalars["dropout_p"] or not {*EXTRA}.isdisjoint(wanted)
    if size and own and not apart and call.others.keys() <= {"rng_state"}:
        folded = [_folded(x, dim, size) if name in ENTRIES else x for name, x, dim in given]
        results = tuple(x.unflatten(0, (size, -1)) for x in apply(*folded))
    else:
        samples = [apply(*(_sample(x, dim, n) for _, x, dim in given)) for n in range(size or 1)]
        results = tuple(_stacked(x)[:size] for x in zip(*samples, strict=True))
    return results, (0,) * len(results)


def _is_shared(name: str, x: Any) -> bool:
    """Whether all entries of a batch have the same of an array, without samples."""
    return name in SHARED and (x.dim() < SHARED[name] or (name.startswith("attn") and len(x) == 1))


def _folded(x: Any, dim: int | None, size: int) -> Any:
    """Return an array with the samples' entries as its first axis, one sample after the other."""
    if x is None:
        return None
    samples = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    return samples.flatten(0, 1)


def _sample(x: Any, dim: int | None, n: int) -> Any:
    """Return an array of one sample; zeros where there are no samples at all."""
    if dim is None:
        return x
    if x.shape[dim] == 0:
        return x.new_zeros((*x.shape[:dim], *x.shape[dim + 1 :]))
    return x.select(dim, n)


def _stacked(samples: tuple[Any, ...]) -> Any:
    import torch

    return torch.stack(samples)
