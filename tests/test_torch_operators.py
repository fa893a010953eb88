"""The operators of PyTorch's dispatcher: what modes, traces and fake tensors see of a call."""

import functools
import io
import sys
from typing import Any

import pytest
from harness import run_child
from torch_calls import IDS, OPTIONS, inputs, inputs_for, same_results

import cupyflash
from cupyflash import InvalidType, UnsupportedProblem
from cupyflash.masks import Band

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.frameworks

attention, varlen = cupyflash.attention, cupyflash.attention_varlen


def named(graph: Any) -> list[str]:
    """The names of our operators in a graph, in order."""
    targets = [str(node.target) for node in graph.nodes]
    return [x.split(".")[1] for x in targets if x.startswith("cupyflash.")]


def recorded(name: str) -> tuple[Any, Any]:
    """The arguments that a call with options reaches the operator with."""
    from torch.utils._python_dispatch import TorchDispatchMode

    calls = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if function.namespace == "cupyflash":
                calls.append((args, kwargs or {}))
            return function(*args, **kwargs or {})

    q, k, v = inputs_for(name)
    with Recorder(), torch.no_grad():
        attention(q, k, v, **OPTIONS[name]())
    (call,) = calls
    return call


@pytest.mark.parametrize("name", OPTIONS)
def test_the_operator_is_what_pytorch_asks_of_one(name: str) -> None:
    args, kwargs = recorded(name)
    torch.library.opcheck(torch.ops.cupyflash.attention.default, args, kwargs)
    out, lse = torch.ops.cupyflash.attention(*args, **kwargs)
    detached = [x.detach() if isinstance(x, torch.Tensor) else x for x in args]
    results = (torch.randn_like(out), torch.randn_like(lse), out.detach(), lse.detach())
    backward = torch.ops.cupyflash.attention_backward.default
    lists = "test_schema", "test_faketensor", "test_autograd_registration"
    torch.library.opcheck(backward, (*results, False, False, *detached), kwargs, test_utils=lists)


def test_the_operator_with_bias_and_sink_is_too() -> None:
    q, k, v = inputs()
    bias, sink = torch.randn(2, 1, 9, requires_grad=True), torch.zeros(2, requires_grad=True)
    options = {"attn_bias": bias, "learnable_sink": sink}
    torch.library.opcheck(torch.ops.cupyflash.attention.default, (q, k, v), options)
    with torch.no_grad():
        out, lse = torch.ops.cupyflash.attention(q, k, v, **options)
        arguments = (out, None, out, lse, True, True, q, k, v)
        lists = "test_schema", "test_faketensor", "test_autograd_registration"
        operator = torch.ops.cupyflash.attention_backward.default
        torch.library.opcheck(operator, arguments, options, test_utils=lists)
        found = operator(*arguments, **options)
    assert [x.shape for x in found] == [x.shape for x in (q, k, v, bias, sink)]


@pytest.mark.parametrize("name", OPTIONS)
def test_a_call_is_one_operator_where_a_mode_watches(name: str) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watcher(TorchDispatchMode):
        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(str(function))
            return function(*args, **kwargs or {})

    seen: list[str] = []

    def watched(*arrays: Any) -> Any:
        with Watcher():
            return attention(*arrays, return_lse=True, **OPTIONS[name]())

    def plain(*arrays: Any) -> Any:
        return attention(*arrays, return_lse=True, **OPTIONS[name]())

    same_results(watched, plain, *inputs_for(name))
    assert seen.count("cupyflash.attention.default") == 1


LAYOUTS: dict[str, Any] = {
    "dense": lambda q, k, v: (q, k, v),
    "heads first": lambda *x: tuple(y.transpose(1, 2).contiguous().transpose(1, 2) for y in x),
    "length first": lambda *x: tuple(y.transpose(0, 1).contiguous().transpose(0, 1) for y in x),
    "fused": lambda q, k, v: torch.stack([q, k, v], 2).unbind(2),
    "columns first": lambda *x: tuple(y.mT.contiguous().mT for y in x),
    "every other": lambda *x: tuple(torch.stack([y, y], -1)[..., 0] for y in x),
    "expanded": lambda q, k, v: (q, k[:, :1].expand(q.shape), v[:1].expand(q.shape)),
    "fewer columns": lambda q, k, v: (q, k, v[..., :5]),
    "one row": lambda q, k, v: tuple(x[:, :1] for x in (q, k, v)),
    "one batch": lambda *x: tuple(y[:1].transpose(1, 2).contiguous().transpose(1, 2) for y in x),
    "no row": lambda q, k, v: tuple(x[:, :0] for x in (q, k, v)),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_results_without_memory_are_like_those_with(layout: str, dtype: Any) -> None:
    from torch._subclasses import FakeTensorMode

    arrays = [x.detach() for x in LAYOUTS[layout](*inputs(dtype=dtype))]
    assert arrays[0].dim() == 4
    bias, sink = torch.zeros(1, 2, 1).transpose(0, 1), torch.zeros(2)
    given = [*arrays, bias, sink]

    def results(*given: Any) -> list[Any]:
        wanting = [x.detach().requires_grad_() for x in given]
        out, lse = attention(
            *wanting[:3], attn_bias=wanting[3], learnable_sink=wanting[4], return_lse=True
        )
        return [out, lse, *torch.autograd.grad(out.sum(), wanting)]

    with FakeTensorMode() as mode:
        fakes = results(*map(mode.from_tensor, given))
    for fake, real in zip(fakes, results(*given), strict=True):
        assert (fake.shape, fake.dtype, fake.device) == (real.shape, real.dtype, real.device)
        assert [s for s, n in zip(fake.stride(), fake.shape, strict=True) if n > 1] == [
            s for s, n in zip(real.stride(), real.shape, strict=True) if n > 1
        ] or not real.numel()


def test_packed_results_without_memory() -> None:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        q, ends = torch.empty(9, 2, 8, requires_grad=True), torch.empty(3, dtype=torch.int32)
        out, lse = varlen(q, q, q[..., :5], ends, [0, 2, 9], return_lse=True, dropout_p=0.5)
        out.sum().backward()
    assert (out.shape, lse.shape, q.grad.shape) == ((9, 2, 5), (2, 9), (9, 2, 8))
    eight = torch.float8_e4m3fn
    with FakeTensorMode():
        q = torch.empty(1, 9, 2, 8, dtype=eight)
        assert attention(q, q, q, q_descale=0.5).dtype == torch.bfloat16


def test_eight_bits_and_their_factors_reach_the_operator() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    q, k, v = (x.detach().to(torch.float8_e5m2) for x in inputs())

    def call(q: Any, k: Any, v: Any) -> Any:
        return attention(q, k, v, q_descale=0.5, v_descale=torch.tensor([[2.0], [3.0]]))

    graph = make_fx(call)(q, k, v)
    assert named(graph.graph) == ["attention"]
    assert torch.equal(graph(q, k, v), call(q, k, v))


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_traces_hold_both_passes(mode: str) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    arrays = [*(x.detach() for x in inputs()), IDS]

    def gradient(q: Any, k: Any, v: Any, ids: Any) -> Any:
        def loss(q: Any) -> Any:
            return attention(q, k, v, causal=True, segment_ids=ids).square().sum()

        return torch.func.grad(loss)(q)

    graph = make_fx(gradient, tracing_mode=mode)(*arrays)
    assert named(graph.graph) == ["attention", "attention_backward"]
    others = [x + 1 for x in arrays]
    assert torch.equal(graph(*others), gradient(*others))


def test_transforms_of_functions_that_write() -> None:
    arrays = [x.detach() for x in inputs()]
    found = torch.func.functionalize(attention)(*arrays)
    assert torch.equal(found, attention(*arrays))


def test_many_gradients_at_once() -> None:
    inputs_ = [x.detach().double()[:1, :4].requires_grad_() for x in inputs()]
    assert torch.autograd.gradcheck(
        functools.partial(attention, return_lse=True), inputs_, check_batched_grad=True
    )

    def call(q: Any) -> Any:
        return attention(q, *inputs_[1:], attn_mask=torch.ones(4, 4, dtype=torch.bool).tril())

    jacobian = torch.autograd.functional.jacobian
    one, many = (jacobian(call, inputs_[0], vectorize=x) for x in (False, True))
    assert torch.equal(one, many)


def test_the_operator_under_vmap() -> None:
    operators = torch.ops.cupyflash
    arrays = [x.detach() for x in inputs(3, 2, 9, 2, 8)]
    ids = torch.arange(27).reshape(3, 9) // 4

    def forward(q: Any, k: Any, v: Any, ids: Any) -> Any:
        return operators.attention(q, k, v, causal=True, masks="segment_ids", mask_arrays=[ids] * 2)

    def backward(dout: Any, *arguments: Any) -> Any:
        *arrays, ids = arguments
        out, lse = forward(*arguments)
        rest = {"causal": True, "masks": "segment_ids", "mask_arrays": [ids] * 2}
        return operators.attention_backward(dout, None, out, lse, False, False, *arrays, **rest)[:3]

    for function, given in ((forward, [*arrays, ids]), (backward, [arrays[0], *arrays, ids])):
        for dims in ((0,) * len(given), (0,) * (len(given) - 1) + (None,)):
            shared = [x if dim == 0 else x[0] for x, dim in zip(given, dims, strict=True)]
            found = torch.vmap(function, dims)(*shared)
            samples = [
                function(*(x if dim is None else x[n] for x, dim in zip(shared, dims, strict=True)))
                for n in range(3)
            ]
            for x, expected in zip(found, zip(*samples, strict=True), strict=True):
                assert torch.equal(x, torch.stack(expected))


def test_checkpoints_may_keep_what_the_operator_returned() -> None:
    from torch.utils.checkpoint import (
        CheckpointPolicy,
        checkpoint,
        create_selective_checkpoint_contexts,
    )

    kept = []

    def policy(context: Any, operator: Any, *rest: Any, **options: Any) -> Any:
        if operator is torch.ops.cupyflash.attention.default:
            kept.append(context.is_recompute)
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    def block(*arrays: Any) -> Any:
        return attention(*arrays, causal=True).sin()

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)

    def checkpointed(*arrays: Any) -> Any:
        return checkpoint(block, *arrays, use_reentrant=False, context_fn=contexts)

    same_results(checkpointed, block, *inputs())
    assert kept[0] is False


def test_operators_are_differentiated_once_and_by_what_has_gradients() -> None:
    q, k, v = inputs()
    out, _ = torch.ops.cupyflash.attention(q, k, v)
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(UnsupportedProblem, match=r"^attention has no second derivatives"):
        dq.sum().backward()
    slopes = torch.ones(2, requires_grad=True)
    with pytest.raises(UnsupportedProblem, match=r"^`alibi_slopes` requires a gradient"):
        torch.ops.cupyflash.attention(q, k, v, slopes)
    eight = [x.detach().to(torch.float8_e4m3fn).requires_grad_() for x in (q, k, v)]
    with pytest.raises(UnsupportedProblem, match=r"^`q` has dtype float8_e4m3fn"):
        torch.ops.cupyflash.attention(*eight)


def test_what_else_is_done_with_tensors_without_memory_is_refused() -> None:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        q = torch.empty(2, 9, 2, 8)
        out, lse = attention(q, q, q, return_lse=True)
    words = r"^`(dout|q)` is a torch\._subclasses\.fake_tensor\.FakeTensor, whose memory only op"
    with pytest.raises(InvalidType, match=words):
        cupyflash.attention_backward(out, q, q, q, out, lse)
    with pytest.raises(InvalidType, match=words):
        cupyflash.explain(q, q, q)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sink = torch.nn.Parameter(torch.zeros(2))
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, q: Any, k: Any, v: Any, ids: Any) -> Any:
        mask = Band(5, None, alignment="top_left")
        options = {"causal": True, "segment_ids": ids, "mask": mask, "learnable_sink": self.sink}
        return attention(self.linear(q), k, v, **options)


def example(length: int) -> tuple[Any, ...]:
    return *(x.detach() for x in inputs(2, length, 2, 8)), torch.arange(length).expand(2, -1) // 7


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_exported_programs_hold_the_call_for_any_length(strict: bool) -> None:
    model, length = Model(), torch.export.Dim("length", min=2, max=512)
    shapes = ({1: length},) * 4
    program = torch.export.export(model, example(9), dynamic_shapes=shapes, strict=strict)
    assert named(program.graph) == ["attention"]
    for n in (9, 40):
        assert torch.equal(program.module()(*example(n)), model(*example(n)))


@pytest.mark.filterwarnings("ignore")
def test_exported_programs_are_loaded_where_both_are_imported() -> None:
    program, file = torch.export.export(Model(), example(9)), io.BytesIO()
    torch.export.save(program, file)
    code = """
        import io, sys
        import torch
        import cupyflash
        program = torch.export.load(io.BytesIO(bytes.fromhex(sys.argv[1])))
        print([str(x.target) for x in program.graph.nodes if "cupyflash" in str(x.target)])
    """
    lines = "\n".join(line.strip() for line in code.splitlines())
    child = run_child(
        sys.executable, "-W", "ignore", "-c", lines, file.getvalue().hex(), timeout=120
    )
    assert child.returncode == 0, child.stdout
    assert child.stdout.strip().endswith("['cupyflash.attention.default']")


def test_first_calls_at_once_define_the_operators_once() -> None:
    code = """
        import threading
        import cupyflash
        from cupyflash._torch import operators
        import torch
        gate, found = threading.Barrier(8), []
        def run():
            gate.wait()
            found.append(operators.operators().attention.default)
        threads = [threading.Thread(target=run) for _ in range(8)]
        [t.start() for t in threads]
        [t.join() for t in threads]
        print(len(found), len(set(found)))
    """
    lines = "\n".join(line.removeprefix(" " * 8) for line in code.splitlines())
    child = run_child(sys.executable, "-c", lines, timeout=120)
    assert child.stdout.strip() == "8 1", child.stdout
