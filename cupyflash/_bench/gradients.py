"""Backward passes: their builders from forward ones, and what their results are held against.

What is timed is what turns dO into dQ, dK and dV, after one forward pass, or both passes together.
Everybody is given torch tensors; a peer's backward is what `torch.autograd.grad` runs on the graph
that its forward left.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import ml_dtypes

from .. import _attention
from .._gradients import attention_backward
from .case import DTYPES, Case
from .runner import (
    Arrays,
    Runner,
    cupyflash,
    first,
    kernel_name,
    normal_torch,
    torch_arrays,
    torch_clock,
    torch_operand,
)

# Over those of a forward pass: a backward pass has five products where that has two.
FLOPS = {"fwd": 1.0, "bwd": 2.5, "fwd+bwd": 3.5}
SEED = 2029  # of dO


def seed_gradient(case: Case, device: str) -> Any:
    """Return dO, standard normal."""
    return normal_torch(case.dtype, case.out_shape, SEED, device)


def own(case: Case, arrays: Arrays, device: str, *, kernel: str | None = None) -> Runner:
    """Build cupyflash's own backward call."""
    q, k, v = torch_arrays(arrays, device)
    dout = seed_gradient(case, device)
    arguments = case.arguments(functools.partial(torch_operand, device=device))
    out, lse = _attention.attention(q, k, v, return_lse=True, **arguments)
    call = functools.partial(
        attention_backward, dout, q, k, v, out, lse, **arguments, kernel=kernel
    )
    return Runner(
        call,
        torch_clock(device),
        lambda found: tuple(x for x in found if x is not None),
        options={"framework": "torch"},
        kernel=kernel_name((q, k, v), {**arguments, "kernel": kernel, "backward": True}),
    )


@functools.cache
def side_stream() -> Any:
    """Return a stream for forward passes.

    Autograd runs a backward pass on the stream of its forward one, which must not be the default
    stream where a graph is captured. Leaves are of the same stream: what goes from one stream to
    another is not freed before the host has waited.
    """
    torch: Any = importlib.import_module("torch")
    return torch.cuda.Stream()


def release() -> None:
    """Give back what earlier cases have left: each capture has had a stream with memory."""
    torch: Any = importlib.import_module("torch")
    torch.cuda.empty_cache()


def of_peer(
    build: Callable[[Case, Arrays, str], Runner], case: Case, arrays: Arrays, device: str
) -> Runner:
    """Build a peer's backward call from its forward one."""
    torch: Any = importlib.import_module("torch")

    def side() -> Any:
        """Enter the stream of the forward pass, where there are streams."""
        return torch.cuda.stream(side_stream()) if device == "cuda" else contextlib.nullcontext()

    if device == "cuda":
        torch.cuda.synchronize()
    with side(), torch_arrays.differentiable() as leaves:
        forward = build(case, arrays, device)

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        with side(), forward.context():
            yield

    with context():
        result = forward.call()
    view = forward.view
    out, dout = first(result), seed_gradient(case, device)
    if tuple(out.shape) != case.out_shape:  # heads first
        dout = dout.transpose(1, 2)
    assert tuple(view(result).shape) == case.out_shape
    call = functools.partial(torch.autograd.grad, out, leaves, dout, retain_graph=True)
    return Runner(call, forward.clock, tuple, context)


def own_passes(case: Case, arrays: Arrays, device: str) -> Runner:
    """Build our forward and backward pass as autograd runs them."""
    built = of_passes(functools.partial(cupyflash, framework="torch"), case, arrays, device)
    arguments = case.arguments(functools.partial(torch_operand, device=device))
    backward = kernel_name(tuple(torch_arrays(arrays, device)), {**arguments, "backward": True})
    return dataclasses.replace(built, kernel=f"{built.kernel}, {backward}")


def of_passes(
    build: Callable[[Case, Arrays, str], Runner], case: Case, arrays: Arrays, device: str
) -> Runner:
    """Build a forward and a backward pass, one after the other, from a forward call."""
    torch: Any = importlib.import_module("torch")
    with torch_arrays.differentiable() as leaves:
        forward = build(case, arrays, device)
    dout = seed_gradient(case, device)
    with forward.context():
        result = forward.call()
    if tuple(first(result).shape) != case.out_shape:  # heads first
        dout = dout.transpose(1, 2)
    assert tuple(forward.view(result).shape) == case.out_shape

    def call() -> Any:
        return torch.autograd.grad(first(forward.call()), leaves, dout)

    return dataclasses.replace(forward, call=call, view=tuple)


@dataclass
class GradientTruth:
    """Gradients of the first head of keys and its queries in fp64, computed by torch.

    And that of a bias, which is of all heads.
    """

    case: Case
    arrays: Arrays
    device: str = "cuda"

    def __post_init__(self) -> None:
        assert self.case.features <= {"deterministic", "bias"}

    def computed(self, *, rounded: bool) -> tuple[Any, ...]:
        """Return dq, dk, dv and dbias, if any; rounded as accuracy is defined by, or exact."""
        torch: Any = importlib.import_module("torch")
        case, group = self.case, self.case.heads_q // self.case.heads_k
        q, k, v = torch_arrays(self.arrays, self.device)
        dout = seed_gradient(case, self.device)
        kind = torch.float32 if rounded else torch.float64

        dtype = q.dtype

        def stored(x: Any) -> Any:
            return x.to(dtype).to(kind) if rounded else x

        scale = case.head_dim**-0.5
        hidden, bias = self._hidden(), self._bias()
        dq: list[Any] = []
        dk, dv, dbias = 0, 0, 0
        heads = [(b, h) for b in range(case.batch) for h in range(case.heads_q)]
        for b, h in heads if bias is not None else heads[:group]:
            mine, down = q[b, :, h].to(kind), dout[b, :, h].to(kind)
            keys, values = (x[b, :, h // group].to(kind) for x in (k, v))
            scores = scale * (mine @ keys.T)
            if bias is not None:
                scores += bias
            if hidden is not None:
                scores.masked_fill_(hidden, -torch.inf)
            p = scores.softmax(-1)
            out = stored(stored(p) @ values)
            dp = down @ values.T
            dp -= (down * out).sum(-1, keepdim=True)
            slopes = stored(dp.mul_(p))
            if bias is not None:
                dbias += slopes
            if (b, h) in heads[:group]:
                dq.append(scale * (slopes @ keys))
                dk += scale * (slopes.T @ mine)
                dv += stored(p).T @ down
        several = (torch.stack(dq), dk, dv, *[dbias] * (bias is not None))
        return tuple(map(stored, several))

    def _bias(self) -> Any:
        bias = self.case.modified.arguments(self.case, lambda x: x).get("attn_bias")
        return None if bias is None else torch_operand(bias[0, 0], self.device)

    def _hidden(self) -> Any:
        torch: Any = importlib.import_module("torch")
        if self.case.mask == "full":
            return None
        seen = self.case.band.dense(self.case.len_q, self.case.len_k)
        return torch.from_numpy(~seen).to(self.device)

    @cached_property
    def parts(self) -> list[tuple[str, Any, float]]:
        """Each gradient: its name, what it should be, and how far off it may be."""
        torch: Any = importlib.import_module("torch")
        tf32, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, False
        unit = float(ml_dtypes.finfo(DTYPES[self.case.dtype]).eps) / 2
        try:
            exact, plain = (self.computed(rounded=rounded) for rounded in (False, True))
        finally:
            torch.backends.cuda.matmul.allow_tf32 = tf32
        return [
            (name, ref, float(2 * (near - ref).abs().max() + unit * ref.abs().max()))
            for name, ref, near in zip(("dq", "dk", "dv", "dbias"), exact, plain, strict=False)
        ]

    def compare(self, found: Any, *, own_numbers: bool = False) -> tuple[float | None, str]:
        """Return the largest error of the first head's gradients, and what is wrong, or nothing."""
        assert not own_numbers, "no suite drops weights of a backward pass"
        group = self.case.heads_q // self.case.heads_k
        errors, wrong = [], ""
        shapes = dict(zip(("dq", "dk", "dv"), self.case.shapes, strict=True))
        for (name, ref, bound), gradient in zip(self.parts, found, strict=True):
            if tuple(gradient.shape) != shapes.get(name, (1, 1, *ref.shape)):
                return None, f"wrong: {name} of shape {tuple(gradient.shape)}"
            here = gradient[0, 0] if name == "dbias" else gradient[0, :, 0]
            if name == "dq":
                here = gradient[0, :, :group].transpose(0, 1)
            error = float((here.double() - ref).abs().max())
            errors.append(error)
            if not error <= bound and not wrong:
                wrong = f"wrong: {name} is off by {error:.3g}, more than {bound:.3g}"
        return max(errors), wrong
