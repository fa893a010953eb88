"""The host's side of cuda/kernels/attention_fwd_sm80.cu: what it takes, its launch."""

from . import _modifiers, _unit
from ._forward import (
    MAX_HEAD_DIM,
    has_positive_scale,
    heads_per_group,
    refuse_dtype,
    refuse_lengths,
    tiles,
)
from ._launch import FORWARD_BYTES, Launch, pack_forward
from ._problem import Operands, Problem
from ._tuning import ForwardSm80, forward_sm80

__all__ = ["DTYPES", "NAME", "config", "launch", "refusal"]

NAME = "attention_fwd_sm80"
DTYPES: tuple[str, ...] = ("float16", "bfloat16", "float32")
MAX_BLOCKS = 2**31 - 1  # CUDA C++ Programming Guide, Compute Capabilities: x-dimension of a grid


def refusal(problem: Problem) -> str | None:
    """Return why the kernel does not take a problem, as the rest of a sentence, or None."""
    for name in ("head_dim", "head_dim_v"):
        if (dim := getattr(problem, name)) > MAX_HEAD_DIM:
            return f"needs {name} <= {MAX_HEAD_DIM}, got {dim}"
    reason = refuse_dtype(problem, DTYPES) or refuse_lengths(problem)
    if reason:
        return reason
    if (count := tiles(problem, config(problem).block_q)) > MAX_BLOCKS:
        return f"launches at most {MAX_BLOCKS} blocks, this needs {count}"
    return None


def config(problem: Problem) -> ForwardSm80:
    """Return the configuration that the unit of a problem is rendered from."""
    assert problem.arch is not None
    policies = _modifiers.policies(problem)
    return forward_sm80(
        problem.dtype,
        problem.head_dim,
        problem.head_dim_v,
        problem.arch,
        policies=policies,
        width=problem.width,
        positive_scale=has_positive_scale(problem),
        params_bytes=FORWARD_BYTES + policies.params_bytes,
    )


def launch(problem: Problem, operands: Operands, lse: int = 0) -> Launch:
    """Return the launch of a problem; ``lse`` is a pointer or 0."""
    chosen = config(problem)
    return Launch(
        unit=_unit.render(NAME, chosen),
        symbol=NAME,
        arch=f"sm_{problem.arch}",
        grid=(tiles(problem, chosen.block_q), 1, 1),
        block=(chosen.threads, 1, 1),
        shared_bytes=chosen.smem_bytes,
        params=pack_forward(problem, operands, lse, heads_per_group(problem)),
        places=_modifiers.places(problem, operands, FORWARD_BYTES),
    )
