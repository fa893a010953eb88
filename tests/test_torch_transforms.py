"""Attention inside transforms of functions: torch.func.grad, vmap and what they compose to."""

from collections.abc import Callable
from typing import Any

import pytest

import cupyflash
from cupyflash import InvalidArgument, UnsupportedProblem

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.frameworks

attention, varlen = cupyflash.attention, cupyflash.attention_varlen
grad, vmap = torch.func.grad, torch.func.vmap

SIZE = 3  # samples


def normal(*shape: int, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def three(*shape: int) -> list[Any]:
    return [normal(*(shape or (2, 5, 2, 4)), seed=seed) for seed in range(3)]


def close(found: Any, expected: Any) -> None:
    """Assert that results of the same calls in other batches are equal, but for rounding."""
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)


def looped(function: Callable[..., Any], dims: tuple[int | None, ...], arguments: Any) -> Any:
    """What vmap means."""
    samples = [
        function(
            *(
                x if dim is None else x.select(dim, n)
                for x, dim in zip(arguments, dims, strict=True)
            )
        )
        for n in range(SIZE)
    ]
    if torch.is_tensor(samples[0]):
        return torch.stack(samples)
    return tuple(map(torch.stack, zip(*samples, strict=True)))


def loss(q: Any, k: Any, v: Any, **options: Any) -> Any:
    out, lse = attention(q, k, v, return_lse=True, **options)
    return out.square().sum() + lse.sum()


def test_grad_is_the_gradient_of_autograd() -> None:
    inputs = three()
    wanting = [x.clone().requires_grad_() for x in inputs]
    found = grad(loss, argnums=(0, 1, 2))(*inputs, causal=True)
    assert all(map(torch.equal, found, torch.autograd.grad(loss(*wanting, causal=True), wanting)))
    out, pullback = torch.func.vjp(lambda *x: attention(*x), *inputs)
    expected, theirs = cupyflash.attention_vjp(*inputs)
    assert torch.equal(out, expected)
    assert all(map(torch.equal, pullback(out), theirs(out)))


@pytest.mark.parametrize(
    "dims",
    [(0, 0, 0), (0, None, None), (None, 0, None), (None, None, 0), (2, 4, None), (3, 0, 1)],
    ids=str,
)
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_samples_of_any_inputs(dims: tuple[int | None, ...], layout: str) -> None:
    inputs = [
        x if dim is None else torch.stack([x, 2 * x, -x], dim)
        for x, dim in zip(three(2, 4, 4, 3), dims, strict=True)
    ]

    def call(q: Any, k: Any, v: Any) -> Any:
        return attention(q, k, v, layout=layout, return_lse=True)

    close(vmap(call, dims)(*inputs), looped(call, dims, inputs))
    gradient = grad(loss, argnums=(0, 1, 2))
    close(vmap(gradient, dims)(*inputs), looped(gradient, dims, inputs))

    def total(*inputs: Any) -> Any:
        return vmap(loss, dims)(*inputs).sum()

    wanting = [x.clone().requires_grad_() for x in inputs]
    expected = torch.autograd.grad(looped(loss, dims, wanting).sum(), wanting)
    close(grad(total, argnums=(0, 1, 2))(*inputs), expected)
    close(torch.autograd.grad(total(*wanting), wanting), expected)


def test_samples_of_samples() -> None:
    inputs = three(2, SIZE, 2, 5, 2, 4)
    found = vmap(vmap(grad(loss)), in_dims=(0, 0, 0))(*inputs)
    for n in range(2):
        close(found[n], looped(grad(loss), (0, 0, 0), [x[n] for x in inputs]))


EXTRAS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # those of all, those of samples
    "bias": ({"attn_bias": normal(5, 5)}, {}),
    "bias of entries": ({"attn_bias": normal(2, 1, 5, 1)}, {}),
    "bias of samples": ({}, {"attn_bias": normal(SIZE, 2, 5, 5)}),
    "mask": ({"attn_mask": normal(1, 2, 5, 5) > 0}, {}),
    "sink": ({"learnable_sink": normal(2)}, {}),
    "sink of samples": ({}, {"learnable_sink": normal(SIZE, 2)}),
    "slopes": ({"alibi_slopes": torch.tensor([0.1, 0.5])}, {}),
    "lengths": ({"seqused_k": torch.tensor([3, 5])}, {}),
    "lengths of samples": ({}, {"seqused_k": torch.tensor([[3, 5], [0, 2], [1, 1]])}),
    "lengths of the host": ({"seqused_k": [3, 5]}, {}),
    "prefix": ({"mask": cupyflash.masks.PrefixLM(torch.tensor([2, 4]))}, {}),
    "segments": ({}, {"segment_ids": torch.arange(SIZE * 5).reshape(SIZE, 1, 5) // 4}),
    "dropout": ({"dropout_p": 0.5, "rng_state": (3, 4)}, {}),
    "dropout of samples": (
        {"dropout_p": 0.5},
        {"rng_state": torch.tensor([[3, 4], [5, 6], [7, 8]])},
    ),
}


@pytest.mark.parametrize("name", EXTRAS)
def test_samples_with_other_arguments(name: str) -> None:
    options, mapped = EXTRAS[name]
    arguments = [*three(SIZE, 2, 5, 2, 4), *mapped.values()]

    def call(q: Any, k: Any, v: Any, *own: Any) -> Any:
        return loss(q, k, v, **options, **dict(zip(mapped, own, strict=True)))

    dims = (0,) * len(arguments)
    wanted = tuple(n for n, x in enumerate(arguments) if x.is_floating_point())
    for function in (call, grad(call, argnums=wanted)):
        close(vmap(function, dims)(*arguments), looped(function, dims, arguments))


def test_gradients_of_what_all_samples_share() -> None:
    inputs, bias, sink = three(SIZE, 2, 5, 2, 4), normal(1, 2, 1, 5), normal(2, seed=4)

    def call(bias: Any, sink: Any, q: Any, k: Any, v: Any) -> Any:
        return loss(q, k, v, attn_bias=bias, learnable_sink=sink)

    dims, arguments = (None, None, 0, 0, 0), [bias, sink, *inputs]
    gradient = grad(call, argnums=(0, 1))
    close(vmap(gradient, dims)(*arguments), looped(gradient, dims, arguments))


def test_samples_of_packed_sequences() -> None:
    inputs, ends = three(SIZE, 6, 2, 4), torch.tensor([0, 2, 6])

    def call(q: Any, k: Any, v: Any) -> Any:
        return varlen(q, k, v, ends, ends, causal=True).square().sum()

    for function in (call, grad(call)):
        close(vmap(function)(*inputs), looped(function, (0, 0, 0), inputs))


def test_no_samples() -> None:
    inputs = three(0, 2, 5, 2, 4)
    assert vmap(attention)(*inputs).shape == (0, 2, 5, 2, 4)
    assert vmap(grad(loss))(*inputs).shape == (0, 2, 5, 2, 4)
    sinks = normal(0, 2)
    out = vmap(lambda q, k, v, sink: attention(q, k, v, learnable_sink=sink))(*inputs, sinks)
    assert out.shape == (0, 2, 5, 2, 4)


def test_samples_draw_their_dropout_as_vmap_is_told() -> None:
    inputs = [torch.ones(SIZE, 1, 40, 2, 8)] * 3

    def call(q: Any, k: Any, v: Any) -> Any:
        return attention(q, k, v, dropout_p=0.5)

    torch.manual_seed(0)
    same, different = (vmap(call, randomness=x)(*inputs) for x in ("same", "different"))
    assert torch.equal(same[0], same[1])
    assert not torch.equal(different[0], different[1])
    with pytest.raises(RuntimeError, match="randomness"):
        vmap(call)(*inputs)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_what_has_no_derivative_says_so() -> None:
    q, k, v = three()
    forward = r"^attention has no derivative in forward mode"
    with pytest.raises(UnsupportedProblem, match=forward):
        torch.func.jvp(attention, (q, k, v), (q, k, v))
    with pytest.raises(UnsupportedProblem, match=forward):
        torch.func.hessian(loss)(q, k, v)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, k)
        with pytest.raises(UnsupportedProblem, match=forward):
            attention(dual, k, v)
        with pytest.raises(UnsupportedProblem, match=forward):
            attention(
                q,
                k,
                v,
                attn_bias=torch.autograd.forward_ad.make_dual(q[0, :, 0, :1], v[0, :, 0, :1]),
            )
        assert torch.equal(attention(q, k, v), attention(*three()))
    with pytest.raises(UnsupportedProblem, match=r"^attention has no second derivatives"):
        grad(lambda q: grad(loss)(q, k, v).sum())(q)
    with pytest.raises(UnsupportedProblem, match=r"^`alibi_slopes` requires a gradient"):
        grad(lambda slopes: loss(q, k, v, alibi_slopes=slopes))(torch.ones(2))


def test_no_output_is_given_to_a_transform() -> None:
    q, out = normal(SIZE, 1, 5, 2, 4), torch.empty(SIZE, 1, 5, 2, 4, dtype=torch.float64)
    with pytest.raises(InvalidArgument, match=r"^`out` must be None where PyTorch"):
        vmap(lambda q, out: attention(q, q, q, out=out))(q, out)
