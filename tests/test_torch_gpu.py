"""What PyTorch's training needs of a GPU: streams, graphs, generators, memory, warm plans."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
from gradients import judge, seeds_of
from kits import KITS

import cupyflash
from cupyflash import Gradients, _backward, _call

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

# The same bits of every gradient, so that they can be compared.
attention = functools.partial(cupyflash.attention, deterministic=True)


@pytest.fixture(autouse=True)
def cuda() -> Any:
    return KITS["torch_cuda"]()


def inputs(*shape: int, seed: int = 0, dtype: Any = torch.bfloat16) -> list[Any]:
    generator = torch.Generator("cuda").manual_seed(seed)
    draw = functools.partial(torch.randn, device="cuda", dtype=dtype, generator=generator)
    return [draw(shape or (2, 200, 4, 64)).requires_grad_() for _ in range(3)]


def differentiated(function: Any, arrays: Any) -> list[Any]:
    """Return the output and the gradients of a function."""
    out = function(*arrays)
    return [out.detach(), *torch.autograd.grad(out.float().square().sum(), arrays)]


def causal(q: Any, k: Any, v: Any) -> Any:
    return attention(2 * q, k, v, causal=True)


def test_both_passes_run_on_the_current_stream() -> None:
    static = inputs()
    differentiated(causal, static)  # loads the kernels
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    for seed in range(1, 9):
        arrays = [x.detach() for x in inputs(seed=seed)]
        expected = differentiated(causal, [x.clone().requires_grad_() for x in arrays])
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)
            with torch.no_grad():
                for x, y in zip(static, arrays, strict=True):
                    x.copy_(y)
            found = differentiated(causal, static)
        side.synchronize()
        assert all(map(torch.equal, found, expected))


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # the maker of graphs' own
def test_both_passes_are_graphed() -> None:
    differentiated(causal, inputs())  # loads the kernels
    sample = inputs()
    graphed = torch.cuda.make_graphed_callables(causal, tuple(sample))
    for seed in (1, 2, 3):
        arrays = inputs(seed=seed)
        found, expected = differentiated(graphed, arrays), differentiated(causal, arrays)
        assert all(map(torch.equal, found, expected))


def test_a_whole_step_is_captured() -> None:
    static = inputs()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        differentiated(causal, static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = differentiated(causal, static)
    for seed in (1, 2):
        arrays = inputs(seed=seed)
        with torch.no_grad():
            for x, y in zip(static, arrays, strict=True):
                x.copy_(y)
        differentiated(causal, inputs(3, 500, 4, 64))  # other scratch, in other memory
        graph.replay()
        assert all(map(torch.equal, found, differentiated(causal, arrays)))


def test_replays_of_a_graph_drop_other_weights() -> None:
    q, k, v = (x.detach() for x in inputs())
    cupyflash.attention(q, k, v, dropout_p=0.5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = cupyflash.attention(q, k, v, dropout_p=0.5)
    graph.replay()
    first = out.clone()
    graph.replay()
    assert not torch.equal(first, out)


def test_both_passes_drop_the_same_weights() -> None:
    arrays = inputs()
    torch.manual_seed(3)
    found = differentiated(lambda *x: attention(*x, dropout_p=0.5), arrays)
    torch.manual_seed(3)
    state = torch.randint(2**63 - 1, (2,), device="cuda")
    expected = differentiated(lambda *x: attention(*x, dropout_p=0.5, rng_state=state), arrays)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_drop_the_same_weights_again(reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    def block(q: Any, k: Any, v: Any) -> Any:
        return attention(2 * q, k, v, dropout_p=0.5)

    found = []
    for function in (block, functools.partial(checkpoint, block, use_reentrant=reentrant)):
        torch.manual_seed(0)
        arrays = inputs()
        function(*arrays).float().square().sum().backward()
        found.append([x.grad for x in arrays])
    assert all(map(torch.equal, *found))


def test_autocast() -> None:
    arrays = inputs(dtype=torch.float32)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cuda", dtype):
            found = differentiated(attention, arrays)
            with torch.no_grad():
                assert torch.equal(attention(*arrays), found[0])
        assert [x.dtype for x in found] == [dtype] + [torch.float32] * 3
        lower = [x.detach().to(dtype).requires_grad_() for x in arrays]
        expected = differentiated(attention, lower)
        assert all(torch.equal(x, y.to(x.dtype)) for x, y in zip(found, expected, strict=True))


def test_warm_calls_replay_plans_also_with_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    sink = torch.nn.Parameter(torch.zeros(4, device="cuda"))
    slopes = torch.nn.Parameter(torch.ones(4, device="cuda"), requires_grad=False)
    q, *rest = inputs()
    query = torch.nn.Parameter(q.detach())

    def call(q: Any, k: Any, v: Any) -> Any:
        return cupyflash.attention(q, k, v, learnable_sink=sink, alibi_slopes=slopes)

    def never(*arguments: Any) -> Any:
        raise AssertionError("a plan is made again")

    for _ in range(2):
        for first in (q, query):
            differentiated(call, [first, *rest])
            with torch.no_grad():
                call(first, *rest)
        for module in (_call, _backward):
            monkeypatch.setattr(module, "_cold", never)


def test_modes_without_gradients_record_nothing() -> None:
    arrays = inputs()
    expected = cupyflash.attention(*arrays)
    assert expected.requires_grad
    for _ in range(2):  # without a plan and with one
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                out = cupyflash.attention(*arrays)
            assert torch.equal(out, expected)
            assert not out.requires_grad


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)], ids=str)
def test_deterministic_algorithms_repeat_every_bit(heads: tuple[int, int]) -> None:
    arrays = [torch.cat([x] * 3, 1)[:, :, :n].detach().requires_grad_()
              for x, n in zip(inputs(), (heads[0], heads[1], heads[1]), strict=True)]  # fmt: skip
    torch.use_deterministic_algorithms(True)
    try:
        runs = []
        for _ in range(10):
            out = cupyflash.attention(*arrays, causal=True)
            runs.append(torch.autograd.grad(out.float().square().sum(), arrays))
    finally:
        torch.use_deterministic_algorithms(False)
    asked = torch.autograd.grad(attention(*arrays, causal=True).float().square().sum(), arrays)
    for other in (*runs[1:], asked):
        assert all(map(torch.equal, runs[0], other))


def test_the_graph_may_be_used_again() -> None:
    arrays = inputs()
    loss = causal(*arrays).float().square().sum()
    first = torch.autograd.grad(loss, arrays, retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(loss, arrays)))


@pytest.mark.parametrize("wanted", ["q", "k", "v", "attn_bias", "learnable_sink"])
def test_one_argument_alone_wants_a_gradient(wanted: str) -> None:
    bias = torch.randn(4, 1, 200, device="cuda") if wanted == "attn_bias" else None
    named = dict(zip("qkv", inputs(), strict=True)) | {
        "learnable_sink": torch.zeros(4, device="cuda")
    }
    named |= {} if bias is None else {"attn_bias": bias}
    alone = {name: x.detach().requires_grad_(name == wanted) for name, x in named.items()}
    together = {name: x.detach().requires_grad_() for name, x in named.items()}
    found = []
    for given in (alone, together):
        attention(**given, causal=True).float().square().sum().backward()
        found.append(given[wanted].grad)
    assert torch.equal(*found)
    assert [name for name, x in alone.items() if x.grad is not None] == [wanted]


# Of arrays (batch, length, heads, dim): views of the same values.
VIEWS: dict[str, Callable[[Any], Any]] = {
    "contiguous": lambda x: x,
    "heads first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "length first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "columns first": lambda x: x.mT.contiguous().mT,
    "every other": lambda x: torch.stack([x, x + 1], -1)[..., 0],
    "fused": lambda x: torch.stack([x, x + 1], 2)[:, :, 0],
}
# And of values that repeat.
REPEATS: dict[str, Callable[[Any], Any]] = {
    "one head": lambda x: x[:, :, :1].expand(x.shape),
    "one row": lambda x: x[:, :1].expand(x.shape),
    "one entry": lambda x: x[:1].expand(x.shape),
    "one number": lambda x: x[:1, :1, :1, :1].expand(x.shape),
}


def held(arrays: Any, dout: Any, **options: Any) -> None:
    """Hold the gradients of half-precision tensors, which are views, against the oracle."""
    leaves = [x.detach().requires_grad_() for x in arrays]
    found = torch.autograd.grad(cupyflash.attention(*leaves, **options), leaves, dout)
    host = [x.detach().cpu().numpy() for x in (*found, *arrays, dout)]
    judge(Gradients(*host[:3], None, None), *host[3:], None, **options)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("view", [*VIEWS, *REPEATS])
def test_inputs_and_incoming_gradients_of_any_strides(view: str, deterministic: bool) -> None:
    make = (VIEWS | REPEATS)[view]
    plain = [x.detach() for x in inputs(dtype=torch.float16)]
    q, _, v = (x.cpu().numpy() for x in plain)
    dout = torch.from_numpy(seeds_of(q, v)[0]).cuda()
    options = {"causal": True, "deterministic": deterministic}
    held(plain, make(dout), **options)
    held([plain[0], *map(make, plain[1:])], dout, **options)
    held([make(plain[0]), *plain[1:]], dout, **options)


def test_a_sum_is_differentiated() -> None:
    arrays = [x.detach().requires_grad_() for x in inputs(dtype=torch.float16)]
    out = cupyflash.attention(*arrays, causal=True)
    found = torch.autograd.grad(out.sum(), arrays)  # a gradient without strides
    host = [x.detach().cpu().numpy() for x in (*found, *arrays, torch.ones_like(out))]
    judge(Gradients(*host[:3], None, None), *host[3:], None, causal=True)


def test_scaled_losses_of_mixed_precision() -> None:
    arrays = inputs(dtype=torch.float32)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**8)
    optimizer = torch.optim.SGD(arrays, lr=1.0)
    before = [x.detach().clone() for x in arrays]
    with torch.autocast("cuda", torch.float16):
        out = attention(*arrays, causal=True)
    scaler.scale(out.float().mean()).backward()
    scaled = [x.grad.clone() for x in arrays]
    scaler.step(optimizer)
    for x, old, gradient in zip(arrays, before, scaled, strict=True):
        assert gradient.isfinite().all()
        assert gradient.any()
        assert torch.equal(x, old - gradient / 2.0**8)


def test_memory_is_linear_in_the_length() -> None:
    length = 65536
    arrays = inputs(1, length, 1, 64)
    differentiated(causal, arrays)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    differentiated(causal, arrays)
    used = torch.cuda.max_memory_allocated() - before
    assert used < length * length / 8, "even the bits of a matrix of scores take more"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_inductor(mode: str) -> None:
    torch._dynamo.reset()

    def block(q: Any, k: Any, v: Any) -> Any:
        return attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), layout="bhsd")

    compiled = torch.compile(block, fullgraph=True, dynamic=mode == "default", mode=mode)
    for length in (200, 200, 200, 300):
        arrays = inputs(2, length, 4, 64)
        torch.compiler.cudagraph_mark_step_begin()
        found = [x.clone() for x in differentiated(compiled, arrays)]
        assert all(map(torch.equal, found, differentiated(block, arrays)))


def test_the_operators_are_what_pytorch_asks_of_them() -> None:
    operators = torch.ops.cupyflash
    q, k, v = inputs(2, 70, 4, 64)
    options = {"causal": True, "rng_state": torch.tensor([1, 2], device="cuda"), "dropout_p": 0.1}
    lists = "test_schema", "test_faketensor", "test_autograd_registration"
    torch.library.opcheck(operators.attention.default, (q, k, v), options, test_utils=lists)
    arrays = [x.detach() for x in (q, k, v)]
    out, lse = operators.attention(*arrays, **options)
    rest = options | {"deterministic": True}
    given = (out, None, out, lse, False, False, *arrays)
    torch.library.opcheck(operators.attention_backward.default, given, rest, test_utils=lists)
