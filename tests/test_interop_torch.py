"""What only PyTorch has: subclasses, tensors without memory, lazy views, generators."""

from typing import Any

import numpy as np
import pytest
from cases import MODIFIED, Modified
from harness import hosted, judge
from kits import KITS, opened
from kits import params as kits

import cupyflash
from cupyflash import InvalidArgument, InvalidType
from cupyflash._array import adapter_of
from cupyflash.masks import All, Mask, Segments

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.frameworks

SHAPE = (2, 5, 2, 8)


def tensor(*shape: int, **options: Any) -> Any:
    return torch.ones(shape or SHAPE, **options)


def attend(q: Any) -> Any:
    return cupyflash.attention(q, tensor(), tensor())


def test_records_of_tensors() -> None:
    x = tensor(2, 5, 2, 16, dtype=torch.bfloat16)[:, 1:, :, 3:11]
    got = adapter_of(x, "q").array(x, "q")
    assert got[:-1] == (
        x.data_ptr(), (2, 4, 2, 8), (160, 32, 16, 1), "bfloat16", -1, "torch", False
    )  # fmt: skip
    assert type(got.shape) is type(got.strides) is tuple
    one = tensor(2, 5).as_strided((2, 1, 5), (5, 1 << 40, 1))
    assert adapter_of(one, "q").array(one, "q").strides == (5, 5, 1)


def test_facts_tell_apart_whatever_changes_a_plan() -> None:
    x = tensor()
    meta, lazy = torch.empty(SHAPE, device="meta"), torch._neg_view(x)
    different = [
        x, x.half(), x.bfloat16(), x[:1], x.transpose(1, 2), x[..., ::2], x.expand(2, 5, 2, 8),
        tensor(requires_grad=True), meta, lazy, x.to_sparse(),
    ]  # fmt: skip
    facts = [adapter_of(y, "q").facts(y) for y in different]
    assert len(set(facts)) == len(facts) - 1  # expand changed nothing
    assert adapter_of(x, "q").facts(tensor()) == facts[0]
    with torch.no_grad():
        assert adapter_of(x, "q").facts(different[7]) == facts[0]


def test_allocation_in_any_order() -> None:
    adapter = adapter_of(tensor(), "q")
    x = adapter.empty_strided((2, 3, 4, 8), (96, 8, 24, 1), "bfloat16", -1)
    assert (x.dtype, x.stride(), x.device.type) == (torch.bfloat16, (96, 8, 24, 1), "cpu")


def test_parameters_are_tensors() -> None:
    q = torch.nn.Parameter(tensor())
    with torch.no_grad():
        out = attend(q)
    assert type(out) is torch.Tensor
    frozen = torch.nn.Parameter(tensor(), requires_grad=False)
    torch.testing.assert_close(attend(frozen), out)


def test_subclasses_are_refused() -> None:
    class Special(torch.Tensor):
        pass

    for x in [tensor().as_subclass(Special), torch.nn.parameter.UninitializedParameter()]:
        with pytest.raises(InvalidType, match=r"`q` is a .*, a subclass of torch\.Tensor"):
            attend(x)


def test_tensors_without_memory_are_refused() -> None:
    attend(tensor())  # a plan of the same facts, as far as they can be the same
    with pytest.raises(InvalidType, match="`q` must be on the CPU or on an NVIDIA GPU, got device"):
        attend(torch.empty(SHAPE, device="meta"))
    with pytest.raises(InvalidType, match="`q` must be a strided tensor"):
        attend(tensor().to_sparse())
    with pytest.raises(InvalidType, match="without memory to read"):
        attend(torch._efficientzerotensor(SHAPE))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused() -> None:
    with pytest.raises(InvalidType, match="`q` must be a strided tensor, got a nested one"):
        attend(torch.nested.nested_tensor([tensor(5, 2, 8), tensor(3, 2, 8)]))


def test_lazy_views_are_refused() -> None:
    attend(tensor())
    with pytest.raises(InvalidArgument, match=r"pass `q\.resolve_neg\(\)`"):
        attend(torch._neg_view(tensor()))
    imaginary = tensor(*SHAPE[:3], 1, dtype=torch.complex64).conj().imag
    with pytest.raises(InvalidArgument, match=r"pass `q\.resolve_neg\(\)`"):
        cupyflash.attention(imaginary, imaginary, imaginary)
    x = imaginary.resolve_neg()
    assert cupyflash.attention(x, x, x).shape == x.shape
    with pytest.raises(InvalidType, match=r"`q` has elements of type torch\.complex64"):
        attend(tensor(dtype=torch.complex64).conj())


@pytest.mark.parametrize("dtype", ["int32", "uint8", "bool", "complex64", "float8_e4m3fnuz"])
def test_other_dtypes_are_refused(dtype: str) -> None:
    x = tensor().to(getattr(torch, dtype))
    with pytest.raises(InvalidType, match="`q` has "):
        cupyflash.attention(x, x, x)


def test_quantised_tensors_are_refused() -> None:
    with pytest.warns():
        x = torch.quantize_per_tensor(tensor(), 0.1, 0, torch.quint8)
    with pytest.raises(InvalidType, match=r"`q` has elements of type torch\.quint8"):
        attend(x)


def test_modifiers_may_be_tensors() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(SHAPE).astype(np.float32) for _ in range(3))
    options = {
        "attn_mask": rng.random((2, 1, 5, 5)) < 0.7,
        "attn_bias": rng.standard_normal((2, 5, 5)).astype(np.float32),
        "alibi_slopes": rng.random(2).astype(np.float32),
        "learnable_sink": rng.standard_normal(2).astype(np.float32),
        "seqused_k": np.array([3, 5], np.int32),
    }
    kit = KITS["torch"]()
    tensors = {name: kit.put(x) for name, x in options.items()}
    out, lse = cupyflash.attention(*map(kit.put, (q, k, v)), return_lse=True, **tensors)
    judge((kit.get(out), kit.get(lse)), q, k, v, **options)
    with pytest.raises(InvalidArgument, match=r"`attn_bias` is a numpy array"):
        cupyflash.attention(*map(kit.put, (q, k, v)), attn_bias=options["attn_bias"])


@pytest.mark.parametrize("name", kits("torch", "torch_cuda"))
@pytest.mark.parametrize("case", MODIFIED[1::5], ids=lambda case: case.id)
def test_case(name: str, case: Modified) -> None:
    arrays, options = [x.host for x in case.arrays()], case.options
    with opened(name) as kit:

        def place(x: Any) -> Any:
            if isinstance(x, Mask):
                return All(*(part.bound(*map(place, part.arrays)) for part in x.parts))
            return kit.put(x) if isinstance(x, np.ndarray) else x

        tensors = {name: place(x) for name, x in hosted(options).items()}
        function = cupyflash.attention if case.packed is None else cupyflash.attention_varlen
        result = function(*map(kit.put, arrays), **tensors, return_lse=True)
        judge(tuple(map(kit.get, result)), *arrays, **options)


def test_packed_attention_draws_its_dropout() -> None:
    q, ends = torch.ones(40, 2, 8), torch.tensor([0, 10, 40])
    drawn = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        drawn.append(cupyflash.attention_varlen(q, q, q, ends, ends, dropout_p=0.5))
    assert torch.equal(*drawn[:2])
    assert not torch.equal(*drawn[1:])


def test_segments_of_another_library_are_taken() -> None:
    q = torch.randn(2, 9, 2, 8)
    ids = np.array([[0] * 4 + [1] * 5, [2] * 9])
    expected = cupyflash.attention(q, q, q, mask=Segments(torch.from_numpy(ids)))
    for given in (ids, ids.tolist(), torch.from_numpy(ids).to(torch.uint8)):
        assert torch.equal(cupyflash.attention(q, q, q, segment_ids=given), expected)


# On a GPU


@pytest.fixture
def cuda() -> Any:
    return KITS["torch_cuda"]()


@pytest.mark.gpu
def test_the_raw_stream_is_the_current_one(cuda: Any) -> None:
    adapter = adapter_of(cuda.put(np.ones(3, np.float32)), "q")
    assert adapter.stream(0) == torch.cuda.current_stream(0).cuda_stream
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        assert adapter.stream(0) == side.cuda_stream != 0
        assert not adapter.capturing(0)


@pytest.mark.gpu
def test_a_capture_is_noticed(cuda: Any) -> None:
    x = cuda.put(np.ones(3, np.float32))
    adapter = adapter_of(x, "q")
    x += 1  # loads torch's kernel, which a capture may not do
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        assert adapter.capturing(0)
        x += 1
    assert not adapter.capturing(0)


@pytest.mark.gpu
def test_lazy_views_are_refused_on_a_gpu_too(cuda: Any) -> None:
    x = cuda.put(np.ones(SHAPE, np.float32))
    cupyflash.attention(x, x, x)
    with pytest.raises(InvalidArgument, match="resolve_neg"):
        cupyflash.attention(torch._neg_view(x), x, x)


@pytest.mark.gpu
def test_nothing_is_allocated_beside_torch(cuda: Any) -> None:
    import cupy

    q = cuda.put(np.ones((2, 64, 4, 64), np.float16))
    spread = cuda.put(np.ones((2, 64, 4, 128), np.float16))[..., ::2]
    cupyflash.attention(q, q, q)
    used = cupy.get_default_memory_pool().total_bytes()
    cupyflash.attention(spread, q, q, return_lse=True)
    assert cupy.get_default_memory_pool().total_bytes() == used


@pytest.mark.filterwarnings("ignore")
def test_a_recording_that_would_lack_the_computation_is_refused() -> None:
    with pytest.raises(InvalidType, match=r"torch\.jit\.trace"):
        torch.jit.trace(attend, (tensor(),))


def test_a_tensor_that_lost_its_memory_is_named() -> None:
    k = tensor()
    k.untyped_storage().resize_(0)
    with pytest.raises(InvalidType, match=r"^`k` is a tensor on cpu without memory"):
        cupyflash.attention(tensor(), k, tensor())


def test_dropout_draws_its_state_from_torchs_generator() -> None:
    q = torch.ones(1, 40, 2, 8)

    def drawn(seed: int, **options: Any) -> Any:
        torch.manual_seed(seed)
        first = cupyflash.attention(q, q, q, dropout_p=0.5, **options)
        return first, cupyflash.attention(q, q, q, dropout_p=0.5, **options)

    first, second = drawn(3)
    assert not torch.equal(first, second)
    assert all(map(torch.equal, drawn(3), (first, second)))
    assert not torch.equal(drawn(4)[0], first)
    assert torch.equal(*drawn(3, rng_state=(1, 2)))


def test_no_state_is_drawn_where_nothing_is_dropped() -> None:
    q = torch.ones(1, 4, 2, 8)
    before = torch.get_rng_state()
    for p in (0.0, 0, 1e-9, np.float32(0)):
        cupyflash.attention(q, q, q, dropout_p=p)
    cupyflash.attention(q, q, q, dropout_p=0.5, rng_state=(1, 2))
    assert torch.equal(torch.get_rng_state(), before)


def test_dropout_of_others_needs_a_state() -> None:
    x = np.ones((1, 4, 2, 8), np.float32)
    with pytest.raises(InvalidArgument, match=r"^`rng_state` is None and `dropout_p` is not 0"):
        cupyflash.attention(x, x, x, dropout_p=0.5)
