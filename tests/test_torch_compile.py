"""Attention inside code that torch.compile compiles: one operator of the graph, for any length."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from torch_calls import IDS, OPTIONS, inputs, inputs_for, same_results

import cupyflash
from cupyflash import InvalidArgument, InvalidType, UnsupportedProblem
from cupyflash.masks import Band, PrefixLM, Segments

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore")]

attention, varlen = cupyflash.attention, cupyflash.attention_varlen


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Have Dynamo forget what other tests compiled."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Compiled:
    """A function compiled whole, and its graphs."""

    def __init__(self, function: Callable[..., Any], whole: bool = True) -> None:
        self.graphs: list[Any] = []
        self.backward: list[Any] = []
        self.call = torch.compile(function, backend=self.backend, fullgraph=whole)

    def backend(self, graph: Any, examples: Any) -> Any:
        from torch._dynamo.backends.common import aot_autograd

        self.graphs.append(graph)

        def keep(graph: Any, _: Any) -> Any:
            self.backward.append(graph)
            return graph.forward

        return aot_autograd(fw_compiler=lambda graph, _: graph.forward, bw_compiler=keep)(
            graph, examples
        )

    def calls(self) -> list[int]:
        """How many of our calls each graph has."""
        return [
            sum("cupyflash.attention" in str(node.target) for node in graph.graph.nodes)
            for graph in self.graphs
        ]


def check(function: Callable[..., Any], *arrays: Any) -> Compiled:
    """Assert that a function is compiled whole and computes the same; return what was made."""
    compiled = Compiled(function)
    same_results(compiled.call, function, *arrays)
    return compiled


@pytest.mark.parametrize("name", OPTIONS)
def test_a_call_stays_in_the_graph(name: str) -> None:
    options = OPTIONS[name]()

    def block(q: Any, k: Any, v: Any) -> Any:
        return attention(2 * q, k, v, **options) + 1

    assert check(block, *inputs_for(name)).calls() == [1]


@pytest.mark.parametrize("name", ["band", "number", "masks", "seqused"])
def test_arguments_may_be_made_there(name: str) -> None:
    def block(q: Any, k: Any, v: Any, ids: Any) -> Any:
        made = {
            "band": {"mask": Band(2, None)},
            "number": {"mask": PrefixLM(3)},
            "masks": {"mask": PrefixLM([1, 4]) & Segments(ids), "segment_ids": (ids, ids + 0)},
            "seqused": {"seqused_k": np.array([3, 9]), "seqused_q": [2, 9]},
        }[name]
        return attention(q, k, v, return_lse=True, **made)

    assert check(block, *inputs(), IDS).calls() == [1]


def test_bias_and_sink_are_differentiated() -> None:
    bias, sink = torch.randn(2, 1, 9, requires_grad=True), torch.zeros(2, requires_grad=True)

    def block(q: Any, k: Any, v: Any, bias: Any, sink: Any) -> Any:
        return attention(q, k, v, attn_bias=bias, learnable_sink=sink, causal=True)

    compiled = check(block, *inputs(), bias, sink)
    assert compiled.calls() == [1]
    (graph,) = compiled.backward
    (node,) = [x for x in graph.graph.nodes if "attention_backward" in str(x.target)]
    assert node.args[1] is None  # an lse that nothing depends on has no gradient


def test_the_function_itself_is_compiled() -> None:
    compiled = check(attention, *inputs())
    assert compiled.calls() == [1]
    assert torch.equal(compiled.call(*inputs(), window_size=None), attention(*inputs()))


def test_packed_sequences_stay_in_the_graph() -> None:
    q, k, v = inputs(9, 2, 8)
    ends = torch.tensor([0, 2, 9])

    def block(q: Any, k: Any, v: Any, ends: Any) -> Any:
        mask = PrefixLM(torch.tensor([1, 3]))
        options = {"mask": mask, "max_seqlen_q": 7, "max_seqlen_k": 7, "return_lse": True}
        return varlen(q, k, v, ends, [0, 2, 9], **options)

    assert check(block, q, k, v, ends).calls() == [1]


def test_autocast_inside_and_outside() -> None:
    def inside(q: Any, k: Any, v: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return attention(q, k, v)

    assert check(inside, *inputs()).calls() == [1]
    assert inside(*inputs()).dtype == torch.bfloat16
    compiled = Compiled(lambda *x: attention(*x))
    with torch.autocast("cpu", torch.float16):
        assert compiled.call(*inputs()).dtype == torch.float16
    assert compiled.call(*inputs()).dtype == torch.float32


def test_dropout_is_drawn_anew_by_each_call() -> None:
    compiled = Compiled(lambda *x: attention(*x, dropout_p=0.5))
    first, second = compiled.call(*inputs()), compiled.call(*inputs())
    assert not torch.equal(first, second)


SHAPES: dict[str, tuple[Callable[[int], list[Any]], Callable[..., Any], int]] = {
    "dense": (lambda n: [*inputs(2, n, 2, 8)], lambda *x: attention(*x, causal=True), 1),
    "heads first": (lambda n: [*inputs(2, 2, n, 8)], lambda *x: attention(*x, layout="bhsd"), 2),
    "transposed": (
        lambda n: [*inputs(2, n, 2, 8)],
        lambda *x: attention(*(y.transpose(1, 2) for y in x), layout="bhsd"),
        1,
    ),
    "fused": (
        lambda n: [torch.stack(inputs(2, n, 2, 8), 2).detach().requires_grad_()],
        lambda x: attention(*x.unbind(2), window_size=(5, 0)),
        1,
    ),
    "fewer columns": (
        lambda n: [*inputs(2, n, 2, 8)],
        lambda q, k, v: attention(*(x.mT.contiguous().mT for x in (q, k)), v[..., :5]),
        1,
    ),
    "packed": (
        lambda n: [*inputs(n + 9, 2, 8)],
        lambda q, k, v: varlen(q, k, v, *[torch.tensor([0, 2, 9])] * 2, max_seqlen_q=len(q)),
        0,
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_one_graph_serves_every_length(name: str) -> None:
    make, function, axis = SHAPES[name]
    compiled = Compiled(function)
    for length in (128, 196, 257, 3, 64):
        arrays = make(length)
        for x in arrays:
            torch._dynamo.mark_dynamic(x, axis)
        same_results(compiled.call, function, *arrays)
        assert len(compiled.graphs) == 1
    for length in (1, 0, 300):  # of which PyTorch makes graphs of their own
        same_results(compiled.call, function, *make(length))


def test_one_graph_serves_every_window() -> None:
    def block(q: Any, k: Any, v: Any, width: int) -> Any:
        return attention(q, k, v, window_size=(width, None), mask=Band(None, width + 1))

    compiled = Compiled(block)
    for width in (2, 3, 4, 5, 6):
        assert torch.equal(compiled.call(*inputs(), width), block(*inputs(), width))
    assert len(compiled.graphs) == 2  # of the first, and of all others


def test_samples_of_vmap_stay_in_the_graph() -> None:
    arrays = inputs(3, 2, 9, 2, 8)
    function = torch.vmap(lambda *x: attention(*x, causal=True))
    assert check(function, *arrays).calls() == [1]


# What leaves the graph


def leaves(function: Callable[..., Any], *arrays: Any, reason: str) -> None:
    """Assert that a function computes the same, in parts, and why."""
    from torch._dynamo.exc import Unsupported

    assert torch.equal(Compiled(function, whole=False).call(*arrays), function(*arrays))
    torch._dynamo.reset()
    with pytest.raises(Unsupported, match=rf"cupyflash leaves the graph: {reason}"):
        Compiled(function).call(*arrays)


def test_an_output_of_the_callers_leaves_the_graph() -> None:
    out = torch.empty(2, 9, 2, 8)
    arrays = [x.detach() for x in inputs()]
    leaves(lambda *x: attention(*x, out=out) + 1, *arrays, reason="`out` is written")


def test_derivatives_of_torch_func_leave_the_graph() -> None:
    def block(q: Any, k: Any, v: Any) -> Any:
        return torch.func.grad(lambda q: attention(q, k, v).square().sum())(q) + 1

    leaves(block, *(x.detach() for x in inputs()), reason=r"torch\.func differentiates it")


def test_scalars_of_other_types_leave_the_graph() -> None:
    arrays = [x.detach() for x in inputs()]
    scale = torch.tensor(0.5)
    leaves(lambda *x: attention(*x, softmax_scale=scale), *arrays, reason="`softmax_scale` must be")


def test_arrays_of_numpy_leave_the_graph() -> None:
    arrays = [x.detach().numpy() for x in inputs()]
    compiled = Compiled(lambda *x: cupyflash.attention(*x), whole=False)
    np.testing.assert_array_equal(compiled.call(*arrays), attention(*arrays))


def test_functions_of_gradients_leave_the_graph() -> None:
    def block(q: Any, k: Any, v: Any) -> Any:
        out, pullback = cupyflash.attention_vjp(q, k, v, causal=True)
        return pullback(out).dq + 1

    arrays = [x.detach() for x in inputs()]
    compiled = Compiled(block, whole=False)
    assert torch.equal(compiled.call(*arrays), block(*arrays))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"causal": 1}, InvalidType, "`causal` must be a bool"),
        ({"layout": "x"}, InvalidArgument, "`layout` must be 'bshd' or 'bhsd'"),
        ({"window_size": (1, -3)}, InvalidArgument, "`window_size` must not hold values below -1"),
        ({"window_size": 3}, InvalidArgument, "`window_size` must be a pair"),
        ({"mask": 3}, InvalidType, "`mask` must be a mask"),
        ({"kernel": "none"}, InvalidArgument, "`kernel` must be None or one of"),
        ({"learnable_sink": torch.zeros(3)}, InvalidArgument, "`learnable_sink` of shape"),
        ({"dropout_p": 2.0, "rng_state": (1, 2)}, InvalidArgument, "`dropout_p` must be a prob"),
        (
            {"alibi_slopes": torch.ones(2, requires_grad=True)},
            UnsupportedProblem,
            "`alibi_slopes` requires a gradient",
        ),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_wrong_arguments_are_named_as_always(
    options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=f"^{words}"):
        Compiled(lambda *x: attention(*x, **options) + 1, whole=False).call(*inputs())


@pytest.mark.nightly
def test_inductor_calls_the_operator() -> None:
    def block(q: Any, k: Any, v: Any) -> Any:
        return (attention(2 * q, k, v.transpose(1, 2).contiguous().transpose(1, 2)) + 1).sin()

    compiled = torch.compile(block, fullgraph=True, dynamic=True)
    for length in (9, 40):
        arrays = inputs(2, length, 2, 8)
        found = torch.autograd.grad(compiled(*arrays).sum(), arrays)
        expected = torch.autograd.grad(block(*arrays).sum(), arrays)
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(x, y)
