"""Gradients of PyTorch tensors, by autograd, where what it does is of consequence."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cases import ALONE, EDGES, MIXED, SMOKE, VARLEN, Case
from gradients import judge, seeds_of
from harness import hosted
from kits import opened
from kits import params as kits

import cupyflash
from cupyflash import Gradients, InvalidArgument, UnsupportedProblem, _backward
from cupyflash._call import SCALARS
from cupyflash.masks import All, Mask, PrefixLM

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.frameworks

attention, varlen = cupyflash.attention, cupyflash.attention_varlen
frameworks = pytest.mark.parametrize("name", kits("torch", "torch_cuda"))
CASES = (*SMOKE[::2], *EDGES[::3], *ALONE[::4], *MIXED[::20], *VARLEN[::12])


def normal(
    *shape: int, dtype: Any = torch.float32, seed: int = 0, requires_grad: bool = False
) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=dtype, generator=generator, requires_grad=requires_grad)


def three(*shape: int, **options: Any) -> list[Any]:
    return [normal(*(shape or (2, 6, 2, 8)), seed=seed, **options) for seed in range(3)]


def differentiated(name: str, q: Any, k: Any, v: Any, dlse: bool = True, **options: Any) -> Any:
    """Return the gradients of a call in NumPy, by autograd, with dout and dlse, and these."""
    layout = options.get("layout", "bshd")
    dout, of_lse = seeds_of(q, v, layout)
    with opened(name) as kit:

        def place(x: Any) -> Any:
            if isinstance(x, Mask):
                return All(*(part.bound(*map(place, part.arrays)) for part in x.parts))
            return kit.put(x) if isinstance(x, np.ndarray) and x.ndim else x

        tensors = {n: place(x) for n, x in ({"q": q, "k": k, "v": v} | options).items()}
        inputs = ["q", "k", "v", "attn_bias", "learnable_sink"]
        wanted = [tensors[n].requires_grad_() for n in inputs if n in tensors]
        function = varlen if "cu_seqlens_q" in options else attention
        out, lse = function(**tensors, return_lse=True)
        assert out.requires_grad
        results, given = ([out, lse], [dout, of_lse]) if dlse else ([out], [dout])
        found = torch.autograd.grad(results, wanted, [kit.put(x) for x in given])
        for x, gradient in zip(wanted, found, strict=True):
            assert gradient.device == x.device
        named = dict(zip([n for n in inputs if n in tensors], map(kit.get, found), strict=True))
    return Gradients(*map(named.get, inputs)), dout, of_lse if dlse else None


@frameworks
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_case(name: str, case: Case) -> None:
    arrays, options = [x.host for x in case.arrays()], hosted(case.options)
    found, dout, dlse = differentiated(name, *arrays, **options)
    judge(found, *arrays, dout, dlse, **options)


@frameworks
def test_an_output_alone_is_differentiated(name: str) -> None:
    arrays = [x.detach().numpy() for x in three()]
    found, dout, _ = differentiated(name, *arrays, dlse=False, causal=True)
    judge(found, *arrays, dout, None, causal=True)


OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "causal": lambda: {"causal": True, "softmax_scale": 0.7},
    "window": lambda: {"window_size": (2, 1), "alignment": "top_left"},
    "softcap": lambda: {"softcap": 1.5},
    "dropout": lambda: {"dropout_p": 0.3, "rng_state": (7, 3)},
    "alibi": lambda: {"alibi_slopes": torch.tensor([0.5, 0.1])},
    "seqused": lambda: {"seqused_k": torch.tensor([2, 4]), "seqused_q": [3, 1]},
    "prefix": lambda: {"mask": PrefixLM(np.array([1, 2]))},
    "segments": lambda: {"segment_ids": (torch.tensor([0, 0, 1]), torch.tensor([0, 1, 1, 0]))},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_finite_differences(name: str) -> None:
    shapes = [(2, 3, 2, 3), (2, 4, 1, 3), (2, 4, 1, 2), (2, 1, 3, 4), (2,)]
    inputs = [
        normal(*shape, dtype=torch.float64, seed=seed, requires_grad=True)
        for seed, shape in enumerate(shapes)
    ]
    options = OPTIONS[name]()

    def call(q: Any, k: Any, v: Any, bias: Any, sink: Any) -> Any:
        call = {"attn_bias": bias, "learnable_sink": sink, **options}
        out, lse = attention(q, k, v, return_lse=True, **call)
        return out, torch.where(lse.isinf(), 0, lse)  # of queries that are not in use

    assert torch.autograd.gradcheck(call, inputs)


def test_finite_differences_of_packed_sequences() -> None:
    inputs = three(5, 2, 3, dtype=torch.float64, requires_grad=True)
    ends = [torch.tensor([0, 2, 2, 4]), [0, 1, 3, 5]]
    assert torch.autograd.gradcheck(lambda *x: varlen(*x, *ends, softcap=2.0), inputs)


def test_gradients_are_those_of_pytorchs_own_attention() -> None:
    inputs = [normal(2, heads, 6, 8, seed=heads, requires_grad=True) for heads in (4, 2, 2)]
    bias, dout = normal(4, 6, 6, requires_grad=True), normal(2, 4, 6, 8, seed=9)
    found = torch.autograd.grad(
        attention(*inputs, attn_bias=bias, layout="bhsd"), [*inputs, bias], dout
    )
    twins = [x.detach().double().requires_grad_() for x in (*inputs, bias)]
    theirs = torch.nn.functional.scaled_dot_product_attention(
        *twins[:3], attn_mask=twins[3], enable_gqa=True
    )
    expected = torch.autograd.grad(theirs, twins, dout.double())
    arrays = [x.detach().numpy() for x in (*inputs, dout)]
    for gradients in (found, expected):  # one rule for both: that of the oracle in fp64
        numbers = [x.float().numpy() for x in gradients]
        judge(
            Gradients(*numbers, None), *arrays, None, attn_bias=bias.detach().numpy(), layout="bhsd"
        )


# Who wants a gradient


@pytest.mark.parametrize("wanted", ["q", "k", "v", "attn_bias", "learnable_sink"])
def test_one_argument_alone_wants_a_gradient(wanted: str) -> None:
    values = dict(zip(("q", "k", "v"), three(1, 64, 1, 16), strict=True))
    values |= {"attn_bias": normal(1, 1, 64, 64, seed=4), "learnable_sink": normal(1, seed=5)}
    everything = {name: x.clone().requires_grad_() for name, x in values.items()}
    dout = normal(1, 64, 1, 16, seed=6)
    expected = torch.autograd.grad(attention(**everything), list(everything.values()), dout)
    alone = values[wanted].clone().requires_grad_()
    attention(**values | {wanted: alone}).backward(dout)
    assert torch.equal(alone.grad, expected[list(values).index(wanted)])
    assert all(x.grad is None for x in values.values())


def test_nothing_is_recorded_where_nothing_wants_a_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from cupyflash._torch import functions

    def never(transformed: bool) -> Any:
        raise AssertionError("a function of autograd is made")

    expected = attention(*three())
    monkeypatch.setattr("cupyflash._torch.eager.function", never)
    wanting = three(requires_grad=True)
    assert torch.equal(attention(*three()), expected)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            out = attention(*wanting)
        assert torch.equal(out, expected)
        assert not out.requires_grad
    with pytest.raises(AssertionError):
        attention(*wanting)
    assert functions.function(False) is not functions.function(True)


def test_parameters_are_differentiated() -> None:
    q, sink = torch.nn.Parameter(normal(1, 4, 2, 8)), torch.nn.Parameter(torch.zeros(2))
    attention(q, *three(1, 4, 2, 8)[1:], learnable_sink=sink).sum().backward()
    assert q.grad.abs().sum() > 0
    assert sink.grad.abs().sum() > 0


def test_a_gradient_through_the_lse_alone() -> None:
    q, k, v = three(1, 4, 1, 8, dtype=torch.float64, requires_grad=True)
    _, lse = attention(q, k, v, return_lse=True)
    dq, dk, dv = torch.autograd.grad(lse.sum(), (q, k, v))
    p = torch.softmax(q[0, :, 0] @ k[0, :, 0].T / 8**0.5, -1)
    torch.testing.assert_close(dq[0, :, 0], p @ k[0, :, 0] / 8**0.5, rtol=0, atol=1e-14)
    torch.testing.assert_close(dk[0, :, 0], p.T @ q[0, :, 0] / 8**0.5, rtol=0, atol=1e-14)
    assert not dv.any()


def test_an_lse_without_a_gradient_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[set[str]] = []
    call = _backward.call

    def spy(arrays: dict[str, Any], *rest: Any) -> Gradients:
        seen.append({*arrays})
        return call(arrays, *rest)

    monkeypatch.setattr(_backward, "call", spy)
    inputs = three(requires_grad=True)
    out, lse = attention(*inputs, return_lse=True)
    out.sum().backward(retain_graph=True)
    (out.sum() + lse.sum()).backward(retain_graph=True)
    assert ["dlse" in names for names in seen] == [False, True]


@pytest.mark.parametrize(
    "name", ["alibi_slopes", "softmax_scale", "softcap", "dropout_p", "q_descale"]
)
def test_gradients_that_do_not_exist_are_refused(name: str) -> None:
    values = {"alibi_slopes": torch.ones(2), "q_descale": torch.ones(1, 2)}
    option = values.get(name, torch.tensor(0.5)).requires_grad_()
    options: dict[str, Any] = {name: option, "rng_state": (1, 2)}
    for inputs in (three(), three(requires_grad=True)):
        with pytest.raises(UnsupportedProblem, match=f"^`{name}` requires a gradient"):
            attention(*inputs, **options)
    if name != "q_descale":
        with torch.no_grad():
            attention(*three(), **options)


def test_eight_bits_have_no_gradients() -> None:
    inputs = [x.to(torch.float8_e4m3fn).requires_grad_() for x in three()]
    with pytest.raises(UnsupportedProblem, match="`q` has dtype float8_e4m3fn, of which no grad"):
        attention(*inputs)
    assert not cupyflash.supports(*inputs)
    with torch.no_grad():
        assert attention(*inputs).dtype == torch.bfloat16


def test_an_output_of_the_callers_is_no_result_of_autograd() -> None:
    inputs, out = three(requires_grad=True), torch.empty(2, 6, 2, 8)
    with pytest.raises(InvalidArgument, match=r"^`out` must be None where PyTorch differentiates"):
        attention(*inputs, out=out)
    with torch.no_grad():
        assert attention(*inputs, out=out) is out
    with pytest.raises(UnsupportedProblem, match=r"^`out` requires a gradient"):
        attention(*three(), out=out.requires_grad_())


def test_support_of_gradients() -> None:
    q, k, v = three()
    for name, shape in {"attn_bias": (6, 6), "learnable_sink": (2,)}.items():
        assert cupyflash.supports(q, k, v, **{name: torch.zeros(shape, requires_grad=True)})
    assert cupyflash.supports(q.requires_grad_(), k, v)
    assert not cupyflash.supports(q, k, v, alibi_slopes=torch.ones(2, requires_grad=True))


# Memory: of inputs, of the gradient that comes in, and what is kept


@pytest.mark.parametrize("axes", [(0, 2, 1, 3), (1, 0, 2, 3), (2, 0, 1, 3), (0, 1, 3, 2)], ids=str)
def test_transposed_inputs(axes: tuple[int, ...]) -> None:
    back = np.argsort(axes).tolist()
    plain = three(requires_grad=True)
    dout = normal(2, 6, 2, 8, seed=5)
    attention(*plain).backward(dout)
    inputs = [x.detach().permute(axes).contiguous().permute(back).requires_grad_() for x in plain]
    attention(*inputs).backward(dout)
    assert [x.stride() for x in inputs] != [x.stride() for x in plain]
    assert all(torch.equal(x.grad, y.grad) for x, y in zip(inputs, plain, strict=True))


def test_expanded_keys_gather_the_gradients_of_their_heads() -> None:
    q, k = normal(1, 16, 4, 32, dtype=torch.float64), normal(1, 16, 1, 32, dtype=torch.float64)
    v = normal(1, 16, 1, 32, seed=3, dtype=torch.float64)
    found = []
    for expand in (False, True):
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        spread = [x.expand(1, 16, 4, 32) if expand else x for x in inputs[1:]]
        attention(inputs[0], *spread, causal=True).square().sum().backward()
        found.append([x.grad for x in inputs])
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-13)


STRIDES: dict[str, Callable[[Any], Any]] = {
    "one number": lambda x: x[:1, :1, :1, :1].expand(x.shape),
    "one row": lambda x: x[:, :1].expand(x.shape),
    "columns first": lambda x: x.mT.contiguous().mT,
    "heads first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "every other": lambda x: torch.stack([x, x + 1], -1)[..., 0],
    "negated": lambda x: torch._neg_view(-x),
}


@pytest.mark.parametrize("strides", STRIDES)
def test_gradients_that_come_in_with_any_strides(strides: str) -> None:
    dout = STRIDES[strides](normal(2, 6, 2, 8, seed=7))
    dlse = STRIDES[strides](normal(2, 6, 2, 1, seed=8))[..., 0].mT
    found = []
    for given in ((dout, dlse), (dout.resolve_neg().clone(), dlse.resolve_neg().clone())):
        inputs = three(requires_grad=True)
        found.append(torch.autograd.grad(attention(*inputs, return_lse=True), inputs, given))
    assert all(map(torch.equal, *found))


def test_the_graph_may_be_used_again() -> None:
    inputs = three(requires_grad=True)
    out = attention(*inputs)
    first = torch.autograd.grad(out.sum(), inputs, retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(out.sum(), inputs)))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(out.sum(), inputs)


def test_gradients_are_not_differentiated_again() -> None:
    inputs = three(requires_grad=True)
    found = torch.autograd.grad(attention(*inputs).square().sum(), inputs, create_graph=True)
    plain = torch.autograd.grad(attention(*inputs).square().sum(), inputs)
    assert all(map(torch.equal, found, plain))
    with pytest.raises(UnsupportedProblem, match=r"^attention has no second derivatives: "):
        found[0].sum().backward()


def test_what_changes_in_place_is_noticed() -> None:
    for index in range(3):
        inputs = [x.clone() for x in three(requires_grad=True)]
        out = attention(*inputs)
        inputs[index].data.zero_()  # unseen, by contract of .data
        with torch.no_grad():
            inputs[index].zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
    out = attention(*three(requires_grad=True))
    out.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_arguments_of_the_host_may_change_before_the_backward_pass() -> None:
    found = []
    for change in (False, True):
        ends, used, window = np.array([0, 2, 6]), [2, 1], [1, 0]
        prefix, state = np.array([1, 2]), np.array([5, 6])
        scale = torch.tensor(0.3)
        inputs = three(6, 2, 8, requires_grad=True)
        out = varlen(
            *inputs, ends, ends, seqused_k=used, window_size=window, mask=PrefixLM(prefix),
            softmax_scale=scale, dropout_p=0.25, rng_state=state,
        )  # fmt: skip
        if change:
            for x in (ends, prefix, state):
                x[:] = 0
            used[:], window[:] = [0, 0], [0, 0]
            scale.zero_()
        found.append(torch.autograd.grad(out.sum(), inputs))
    assert all(map(torch.equal, *found))
    assert found[0][0].any()


# What PyTorch has beside: determinism, dropout, autocast, checkpoints


def test_determinism_is_what_pytorch_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    call = _backward.call

    def spy(arrays: Any, scalars: tuple[Any, ...], *rest: Any) -> Gradients:
        seen.append(scalars[SCALARS.index("deterministic")])
        return call(arrays, scalars, *rest)

    monkeypatch.setattr(_backward, "call", spy)
    for own, always in [(False, False), (True, False), (False, True)]:
        out = attention(*three(requires_grad=True), deterministic=own)
        torch.use_deterministic_algorithms(always)
        try:
            out.sum().backward()
        finally:
            torch.use_deterministic_algorithms(False)
    assert seen == [False, True, True]


def test_the_kernel_serves_both_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for kernel in ("cpu", "reference"):
        inputs = three(dtype=torch.float64, requires_grad=True)
        out = attention(*inputs, kernel=kernel)
        assert "Attention" in out.grad_fn.name()
        found.append(torch.autograd.grad(out.square().sum(), inputs))
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-13)


def test_both_passes_drop_the_same_weights() -> None:
    inputs = three(1, 40, 2, 8, requires_grad=True)
    torch.manual_seed(3)
    drawn = attention(*inputs, dropout_p=0.5)
    torch.manual_seed(3)
    state = tuple(torch.randint(2**63 - 1, (2,)).tolist())
    told = attention(*inputs, dropout_p=0.5, rng_state=state)
    assert torch.equal(drawn, told)
    found = [torch.autograd.grad(out.sum(), inputs) for out in (drawn, told)]
    assert all(map(torch.equal, *found))
    arrays = [x.detach().numpy() for x in inputs]
    numbers = Gradients(*(x.numpy() for x in found[0]), None, None)
    ones = np.ones((1, 40, 2, 8), np.float32)
    judge(numbers, *arrays, ones, None, dropout_p=0.5, rng_state=state)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_drop_the_same_weights_again(reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    found = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        inputs = three(1, 40, 2, 8, requires_grad=True)

        def block(q: Any, k: Any, v: Any) -> Any:
            return attention(2 * q, k, v, dropout_p=0.5).square()

        if checkpointed:
            out = checkpoint(block, *inputs, use_reentrant=reentrant, preserve_rng_state=True)
        else:
            out = block(*inputs)
        torch.rand(5)  # another state when the backward pass computes the block again
        out.sum().backward()
        found.append((out.detach(), *(x.grad for x in inputs)))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_as_pytorchs_own_attention_does_it(dtype: Any) -> None:
    q, k, v = three(2, 2, 6, 8)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    bias = normal(6, 6).requires_grad_()
    with torch.autocast("cpu", dtype):
        inputs = [q.requires_grad_(), k.to(dtype).requires_grad_(), v.half().requires_grad_()]
        out = attention(*inputs, layout="bhsd", attn_bias=bias)
        assert out.dtype == sdpa(*inputs).dtype == dtype
        with torch.no_grad():
            again = attention(*inputs, layout="bhsd", attn_bias=bias)
        wide = [x.detach().double() for x in inputs]
        assert attention(*wide, layout="bhsd").dtype == sdpa(*wide).dtype == torch.float64
    assert torch.equal(out, again)
    lower = [x.detach().to(dtype).requires_grad_() for x in inputs]
    assert torch.equal(out, attention(*lower, layout="bhsd", attn_bias=bias))
    found = torch.autograd.grad(out.sum(), [*inputs, bias])
    expected = torch.autograd.grad(
        attention(*lower, layout="bhsd", attn_bias=bias).sum(), [*lower, bias]
    )
    for x, gradient, low in zip([*inputs, bias], found, expected, strict=True):
        assert gradient.dtype == x.dtype
        assert torch.equal(gradient, low.to(x.dtype))
    with torch.autocast("cpu", dtype, enabled=False):
        assert attention(q, q, q).dtype == torch.float32


def test_autocast_of_attention_vjp() -> None:
    q, k, v = three(2, 2, 6, 8)
    inputs = [q, k.bfloat16(), v.half()]
    with torch.autocast("cpu", torch.bfloat16):
        out, pullback = cupyflash.attention_vjp(*inputs, causal=True)
        inside = pullback(out)
    outside = pullback(out)
    lower = [x.bfloat16() for x in inputs]
    expected, pull = cupyflash.attention_vjp(*lower, causal=True)
    assert torch.equal(out, expected)
    for x, found, again, low in zip(inputs, inside, outside, pull(expected), strict=False):
        assert found.dtype == again.dtype == x.dtype
        assert torch.equal(found, again)
        assert torch.equal(found, low.to(x.dtype))


def test_autocast_of_packed_sequences() -> None:
    q, ends = normal(6, 2, 8, requires_grad=True), [0, 2, 6]
    with torch.autocast("cpu", torch.bfloat16):
        out = varlen(q, q, q.half(), ends, ends)
    out.sum().backward()
    assert (out.dtype, q.grad.dtype) == (torch.bfloat16, torch.float32)
