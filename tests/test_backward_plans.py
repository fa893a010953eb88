"""Backward calls on a GPU that is none: plans and their replay, copies, captures, scratch."""

import json
import struct
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from fake_backward import NAME, FakeBackward, install_backward
from fake_gpu import FakeArray, Guard, Map
from test_replay import EVERY, NAMES, modifiers, put

import cupyflash
from cupyflash import (
    DeviceUnavailable,
    InvalidArgument,
    InvalidType,
    UnsupportedProblem,
    _backward,
    _explain,
    _jit,
    _kernels,
)
from cupyflash._array import HOST
from cupyflash._bench import units
from cupyflash._launch import Launch, Steps
from cupyflash._steps import bind_steps
from cupyflash._tensor_map import BYTES, TensorMap
from cupyflash.cli import main
from cupyflash.masks import PrefixLM


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeBackward:
    return install_backward(monkeypatch)


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each call on the GPU that was not replayed."""
    calls: list[int] = []
    describe = _backward.describe_backward

    def counted(records: Any, **options: Any) -> Any:
        if options["arch"] is not None:
            calls.append(0)
        return describe(records, **options)

    monkeypatch.setattr(_backward, "describe_backward", counted)
    return calls


def draw(rng: np.random.Generator, packed: bool = False, **options: Any) -> list[np.ndarray]:
    """Draw dout, q, k and v, and compute out and lse."""
    batch = () if packed else (2,)
    shapes = (*batch, 9, 4, 8), (*batch, 9, 4, 8), (*batch, 13, 2, 8), (*batch, 13, 2, 8)
    dout, q, k, v = (rng.standard_normal(shape).astype(np.float16) for shape in shapes)
    function = cupyflash.attention_varlen if packed else cupyflash.attention
    out, lse = function(q, k, v, return_lse=True, **options)
    return [dout, q, k, v, out, lse]


def check(arrays: list[np.ndarray], options: dict[str, Any], **on_host: Any) -> Any:
    """Compare a call on the GPU with the oracle's on the host: the kernel is the oracle."""
    placed = {name: put(x) for name, x in options.items()}
    results = cupyflash.attention_backward(*map(put, arrays), **placed, **on_host)
    expected = cupyflash.attention_backward(*arrays, **options, **on_host, kernel="reference")
    for name, gradient, x in zip(results._fields, results, expected, strict=True):
        assert (gradient is None) == (x is None), name
        if x is not None:
            np.testing.assert_allclose(
                gradient.host.astype(float), x.astype(float), rtol=2e-3, atol=1e-6, err_msg=name
            )
            assert gradient.host.dtype == x.dtype
            assert gradient.host.strides == x.strides
    return results


# Plans


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("names", [*([name] for name in NAMES), EVERY, []], ids="-".join)
def test_a_call_is_replayed_on_new_arrays(
    names: list[str],
    mapped: bool,
    monkeypatch: pytest.MonkeyPatch,
    described: list[int],
    rng: np.random.Generator,
) -> None:
    fake = install_backward(monkeypatch, mapped=mapped)
    cold = []
    for _ in range(3):
        options: dict[str, Any] = {}
        for name in names:
            options |= modifiers(rng)[name]
        arrays = draw(rng, **options)
        described.clear()
        check(arrays, options)
        cold.append(len(described))
    assert cold in ([1, 0, 0], [2, 0, 0])  # twice, where lengths were copied first
    assert len(fake.gpu.compiled) == 2
    assert [launch.step for launch in fake.launches] == [0, 1] * 3
    assert {launch.stream for launch in fake.launches} == {1000}


def test_the_gradient_of_the_lse_is_handed_on_by_the_scratch(
    fake: FakeBackward, rng: np.random.Generator
) -> None:
    for _ in range(2):
        arrays = draw(rng)
        dlse = rng.standard_normal((2, 4, 9), np.float32)
        check(arrays, {"dlse": dlse})
        check(arrays, {"dlse": np.broadcast_to(dlse[:1, :, :1], dlse.shape)})
        check(arrays, {})
    sizes = {shape for shape, dtype in fake.gpu.adapter.allocated if dtype == "uint8"}
    assert sizes == {(512 + 8 * 2 * 4 * 9 + 255,)}


@pytest.mark.parametrize("hosted", [False, True])
def test_packed_sequences_are_replayed(
    hosted: bool, fake: FakeBackward, described: list[int], rng: np.random.Generator
) -> None:
    cold = []
    for bounds in ([0, 3, 9], [0, 0, 8], [0, 9, 9]):
        cu_q, cu_k = np.array(bounds), np.array([0, 6, 13], np.int32)
        bias = rng.standard_normal((2, 1, 9, 13)).astype(np.float16)
        options = {"causal": True, "attn_bias": bias, "seqused_k": np.array([5, 2])}
        given = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
        arrays = draw(rng, packed=True, **options, **given)
        described.clear()
        on_host = {"cu_seqlens_q": cu_q.tolist(), "cu_seqlens_k": cu_k} if hosted else {}
        check(arrays, options | ({} if hosted else given), **on_host)
        cold.append(len(described))
    assert cold[1:] == [0, 0]
    assert fake.gpu.adapter.uploads == (6 if hosted else 0)


def test_facts_that_differ_never_share_a_plan(
    fake: FakeBackward, described: list[int], rng: np.random.Generator
) -> None:
    arrays = draw(rng)
    bias = rng.standard_normal((2, 4, 9, 13)).astype(np.float32)
    calls: list[dict[str, Any]] = [
        {},
        {"causal": True},
        {"softmax_scale": 0.5},
        {"deterministic": True},
        {"window_size": (3, 3)},
        {"attn_bias": bias},
        {"attn_bias": bias[:1]},
        {"attn_bias": bias[0, 0]},
        {"attn_bias": bias[:, :, ::-1]},
        {"attn_bias": bias.astype(np.float64)},
        {"learnable_sink": bias[0, :, 0, 0]},
        {"seqused_k": np.array([3, 4])},
        {"seqused_q": np.array([3, 4])},
        {"dropout_p": 0.5, "rng_state": np.array([3, 4])},
        {"dropout_p": 0.5, "rng_state": (3, 4)},
        {"dropout_p": 0.25, "rng_state": (3, 4)},
        {"dlse": arrays[5]},
        {"mask": PrefixLM(np.array([3, 4]))},
        {"mask": PrefixLM(np.array([3, 4]), "top_left")},
    ]
    for _ in range(2):
        described.clear()
        for options in calls:
            check(arrays, options)
    assert not described
    for n, x in enumerate(arrays):  # another order in memory is another plan
        if x.ndim == 4:
            turned = np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2)
            check([*arrays[:n], turned, *arrays[n + 1 :]], {})
    assert len(described) == 5


def test_an_argument_of_a_wrong_type_meets_no_plan(
    fake: FakeBackward, rng: np.random.Generator
) -> None:
    arrays = [put(x) for x in draw(rng)]
    for _ in range(2):
        cupyflash.attention_backward(*arrays, deterministic=True, causal=True)
        with pytest.raises(InvalidType, match=r"^`deterministic` must be a bool"):
            cupyflash.attention_backward(*arrays, deterministic=1, causal=True)
        with pytest.raises(InvalidType, match=r"^`causal` must be a bool"):
            cupyflash.attention_backward(*arrays, deterministic=True, causal=1)
        with pytest.raises(InvalidArgument, match=r"^`lse` is a numpy array in host memory"):
            cupyflash.attention_backward(*arrays[:5], arrays[5].host, causal=True)
        with pytest.raises(InvalidArgument, match=r"^`k` is a fake array on CUDA device 1"):
            cupyflash.attention_backward(*arrays[:2], FakeArray(arrays[2].host, 1), *arrays[3:])


def test_a_kernel_that_hides_an_address_is_not_replayed(
    fake: FakeBackward, described: list[int], rng: np.random.Generator
) -> None:
    """It would find the planned call's array there."""
    fake.forgotten = {"lse"}
    for _ in range(2):
        check(draw(rng), {})
    assert len(described) == 2


def test_only_the_gradients_that_are_wanted(fake: FakeBackward, rng: np.random.Generator) -> None:
    options = {"attn_bias": rng.standard_normal((9, 13)), "learnable_sink": np.ones(4)}
    arrays = draw(rng, **options)
    names = ("dout", "q", "k", "v", "out", "lse")
    given = {name: put(x) for name, x in zip(names, arrays, strict=True)}
    given |= {name: put(x) for name, x in options.items()}
    scalars = None, False, (-1, -1), "bottom_right", 0.0, 0.0, "bshd", False, None
    expected = cupyflash.attention_backward(
        *map(put, arrays), **{k: put(v) for k, v in options.items()}
    )
    for wanted in ((), ("dbias",), ("dsink",), ("dbias", "dsink")):
        for _ in range(2):
            grads = _backward.call(given, scalars, wanted=wanted)
            for name in ("dbias", "dsink"):
                assert (getattr(grads, name) is not None) == (name in wanted)
                if name in wanted:
                    same = getattr(grads, name).host == getattr(expected, name).host
                    assert same.all()


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize(
    "optional",
    ["", "attn_bias", "attn_mask", "alibi_slopes", "seqused_q", "seqused_k", "learnable_sink",
     "segment_ids", "cu_seqlens_q", "dropout_p"],
)  # fmt: skip
def test_what_a_kernel_takes_has_a_place(arch: int, optional: str) -> None:
    """Otherwise every such call would be described and packed anew."""
    options: dict[str, Any] = {optional: 0.5 if optional == "dropout_p" else True}
    options.pop("", None)
    if optional == "cu_seqlens_q":
        options["cu_seqlens_k"] = True
    problem, operands, *_, backward = _explain.resolve(
        (None, None, None), *_explain.split({"len_q": 64, "head_dim": 64, "arch": arch,
        "dtype": "float16", "backward": True, **options})
    )  # fmt: skip
    wanted = {"attn_bias": {"dbias"}, "learnable_sink": {"dsink"}}.get(optional, set())
    expected = {"q", "k", "v", "dout", "out", "lse", "dq", "dk", "dv", *options, *wanted}
    if optional == "dropout_p":
        expected = expected - {"dropout_p"} | {"rng_state"}
    if optional == "segment_ids":
        expected = expected - {"segment_ids"} | {0, 1}
    for kernel in _kernels.KERNELS:
        if kernel.op == "backward" and kernel.steps and kernel.refusal(problem) is None:
            assert backward is not None
            launches = kernel.steps(problem, operands, backward).launches
            assert expected <= {name for x in launches for name, _ in x.places}, kernel.name


# Copies


@pytest.mark.parametrize("name", ["dout", "q", "k", "v", "out", "lse"])
def test_what_is_not_contiguous_is_copied_once(
    name: str, fake: FakeBackward, described: list[int], rng: np.random.Generator
) -> None:
    place = ["dout", "q", "k", "v", "out", "lse"].index(name)
    cold = []
    for n in range(1, 4):
        arrays = draw(rng)
        arrays[place] = np.repeat(arrays[place], 2, axis=-1)[..., ::2]
        described.clear()
        check(arrays, {"causal": True})
        cold.append(len(described))
        assert fake.gpu.adapter.copies == n
    assert cold == [2, 0, 0]


def test_a_gradient_of_zero_strides_is_copied_where_its_rows_are(
    fake: FakeBackward, rng: np.random.Generator
) -> None:
    arrays = draw(rng)
    for dout, copies in (
        (np.broadcast_to(np.float16(1), arrays[0].shape), 1),
        (np.broadcast_to(arrays[0][:1, :1, :1], arrays[0].shape), 0),
    ):
        fake.gpu.adapter.copies = 0
        check([dout, *arrays[1:]], {})
        assert fake.gpu.adapter.copies == copies


def test_other_alignments_are_other_plans(
    fake: FakeBackward, described: list[int], rng: np.random.Generator
) -> None:
    arrays = draw(rng)
    odd = np.zeros(arrays[0].size + 1, np.float16)[1:].reshape(arrays[0].shape)
    odd[...] = arrays[0]
    seen: list[int] = []
    steps = fake.row.steps
    object.__setattr__(fake.row, "steps", lambda p, o, b: seen.append(p.width) or steps(p, o, b))
    for dout in (arrays[0], odd, arrays[0], odd):
        check([dout, *arrays[1:]], {})
    assert seen == [16, 2]


def test_lengths_of_the_host_are_checked_and_copied_in_every_call(
    fake: FakeBackward, rng: np.random.Generator
) -> None:
    arrays = draw(rng)
    used = np.array([4, 9])
    for _ in range(3):
        placed = cupyflash.attention_backward(*map(put, arrays), seqused_k=used)
        expected = cupyflash.attention_backward(*arrays, seqused_k=used, kernel="reference")
        np.testing.assert_allclose(placed.dk.host, expected.dk, atol=1e-3)
        with pytest.raises(InvalidArgument, match=r"^`seqused_k\[1\]` must be from 0 to len_k"):
            cupyflash.attention_backward(*map(put, arrays), seqused_k=[1, 14])
        used -= 1
    assert fake.gpu.adapter.uploads == 3


# Captures, streams, devices


def test_a_capture_takes_a_call_that_is_loaded(
    fake: FakeBackward, rng: np.random.Generator
) -> None:
    adapter = fake.gpu.adapter
    arrays = [put(x) for x in draw(rng)]
    adapter.recording = True
    with pytest.raises(DeviceUnavailable, match=rf"^{NAME} is not loaded yet"):
        cupyflash.attention_backward(*arrays)
    adapter.recording = False
    cupyflash.attention_backward(*arrays)
    assert not adapter.kept
    adapter.recording = True
    cupyflash.attention_backward(*arrays)
    assert [x.shape for x in adapter.kept] == [(512 + 8 * 72 + 255,)]
    with pytest.raises(InvalidArgument, match=r"^`seqused_k` is in host memory.*capture"):
        cupyflash.attention_backward(*arrays, seqused_k=[1, 2])


def test_a_capture_keeps_copies(fake: FakeBackward, rng: np.random.Generator) -> None:
    adapter = fake.gpu.adapter
    arrays = [put(x) for x in draw(rng)]
    spread = FakeArray(np.repeat(arrays[0].host, 2, axis=-1)[..., ::2])
    cupyflash.attention_backward(spread, *arrays[1:])
    adapter.recording = True
    cupyflash.attention_backward(spread, *arrays[1:])
    assert len(adapter.kept) == 2
    q = FakeArray(np.repeat(arrays[1].host, 2, axis=-1)[..., ::2])
    adapter.recording = False
    cupyflash.attention(q, *arrays[2:4])
    adapter.recording, adapter.kept = True, []
    cupyflash.attention(q, *arrays[2:4])
    assert any(x.shape == q.shape for x in adapter.kept)


def test_work_goes_to_the_device_and_its_stream(
    fake: FakeBackward, rng: np.random.Generator
) -> None:
    arrays = [FakeArray(x, 3) for x in draw(rng)]
    for _ in range(2):
        Guard.entered.clear()
        grads = cupyflash.attention_backward(*arrays)
        assert {*Guard.entered} == {3}
        assert grads.dq.device == 3
    assert {launch.stream for launch in fake.launches} == {1003}


def test_launches_without_blocks_are_left_out(fake: FakeBackward, rng: np.random.Generator) -> None:
    fake.without_blocks = {0, 1}
    arrays = [put(x) for x in draw(rng)]
    for _ in range(2):
        grads = cupyflash.attention_backward(*arrays)
    assert not fake.launches
    assert not fake.gpu.loaded
    assert "uint8" not in {dtype for _, dtype in fake.gpu.adapter.allocated}
    assert np.isnan(grads.dq.host).all()


# What is refused


def test_every_reason_is_given(fake: FakeBackward, monkeypatch: pytest.MonkeyPatch) -> None:
    x = put(np.zeros((1, 2, 1, 264), np.float16))
    lse = put(np.zeros((1, 1, 2), np.float32))
    with pytest.raises(UnsupportedProblem, match=f"^no kernel for backward: {NAME} refuses; "):
        cupyflash.attention_backward(x, x, x, x, x, lse)
    monkeypatch.setattr(_jit, "compute_capability", lambda device: 75)
    with pytest.raises(UnsupportedProblem, match=r"needs compute capability 8.0 or newer"):
        cupyflash.attention_backward(x, x, x, x, x, lse)
    with pytest.raises(UnsupportedProblem, match=r"^`kernel` is 'reference', which cannot be used"):
        cupyflash.attention_backward(x, x, x, x, x, lse, kernel="reference")


@pytest.mark.parametrize("place", [*range(6)])
def test_numbers_and_vectors_in_the_place_of_arrays(
    place: int, fake: FakeBackward, rng: np.random.Generator
) -> None:
    name = ("dout", "q", "k", "v", "out", "lse")[place]
    arrays: list[Any] = [put(x) for x in draw(rng)]
    for wrong in (np.zeros((), np.float16), np.zeros(7, np.float16)[::2]):
        for wrapped in (wrong, FakeArray(wrong)):
            for own in ({"kernel": "reference"}, {}):
                given = [*arrays[:place], wrapped, *arrays[place + 1 :]]
                with pytest.raises((InvalidArgument, InvalidType), match=r"^`\w+` "):
                    cupyflash.attention_backward(*given, **own)
    with pytest.raises(InvalidType, match=rf"^`{name}` must be an array"):
        cupyflash.attention_backward(*arrays[:place], 1.0, *arrays[place + 1 :])


def test_arrays_of_other_places_and_addresses(fake: FakeBackward, rng: np.random.Generator) -> None:
    arrays = draw(rng)
    placed: list[Any] = [put(x) for x in arrays]
    with pytest.raises(InvalidArgument, match=r"^`dout` is a numpy array in host memory and `q`"):
        cupyflash.attention_backward(arrays[0], *placed[1:])
    with pytest.raises(InvalidArgument, match=r"^`lse` is a fake array on CUDA device 2 and `q`"):
        cupyflash.attention_backward(*placed[:5], FakeArray(arrays[5], 2))
    with pytest.raises(InvalidArgument, match=r"^`attn_bias` is a numpy array in host memory"):
        cupyflash.attention_backward(*placed, attn_bias=np.zeros((9, 13), np.float16))
    for place, name in enumerate(("dout", "q", "k", "v", "out", "lse")):
        odd = np.zeros(arrays[place].nbytes + 1, np.uint8)[1:].view(arrays[place].dtype)
        given = [*placed[:place], FakeArray(odd.reshape(arrays[place].shape)), *placed[place + 1 :]]
        with pytest.raises(InvalidArgument, match=rf"^`{name}` starts at address .* aligned"):
            cupyflash.attention_backward(*given)
        with pytest.raises(InvalidArgument, match=rf"^`{name}` starts at address"):
            cupyflash.attention_backward(*given)  # and no plan was kept


@pytest.mark.parametrize("wrong", [1, "yes", None], ids=repr)
@pytest.mark.parametrize("function", [cupyflash.explain, cupyflash.supports, cupyflash.warmup])
def test_backward_is_a_bool(function: Any, wrong: Any, fake: FakeBackward) -> None:
    with pytest.raises(InvalidType, match=r"^`backward` must be a bool, got"):
        function(**SIZES, backward=wrong)


def test_nothing_of_the_host_is_planned(fake: FakeBackward, rng: np.random.Generator) -> None:
    cupyflash.attention_backward(*draw(rng))
    assert not len(_backward.PLANS)
    assert not fake.launches
    assert HOST not in Guard.entered


def test_arrays_of_masks_and_scratch_may_have_tensor_maps(
    fake: FakeBackward, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bytes] = []
    loaded = lambda grid, block, args, shared, stream: seen.append(args[0].tobytes())  # noqa: E731
    monkeypatch.setattr(_jit, "load", lambda cubin, device, shared_bytes: loaded)
    tensor = TensorMap(0, "float32", (64, 32, 1, 1), (256, 8192, 8192), (32, 32, 1, 1), 128)
    launch = Launch(
        "unit", "symbol", "sm_90", (1, 1, 1), (32, 1, 1), 0, bytes(2 * BYTES + 32),
        maps=((0, tensor), (BYTES, tensor)), places=((0, 0), ("state", 2 * BYTES)),
        scratch=((BYTES, 1024), (2 * BYTES + 24, 512)),
    )  # fmt: skip
    bound = bind_steps(Steps(2048, (launch, replace(launch, grid=(0, 1, 1)))), 0, ["ids"])
    assert bound.places == {"ids", "state"}
    bound({"ids": (4096,), "state": (0, 5, 6)}, 65536 + 16, 7)
    (params,) = seen
    addresses = [Map.from_buffer_copy(params, at).pointer for at in (0, BYTES)]
    assert addresses == [4096, 65536 + 256 + 1024]
    assert struct.unpack_from("<4Q", params, 2 * BYTES) == (0, 5, 6, 65536 + 256 + 512)


# What a call would do


SIZES = {"batch": 2, "len_q": 9, "len_k": 13, "heads_q": 4, "heads_k": 2, "head_dim": 8}


def test_explain_names_every_step(fake: FakeBackward, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*arguments: Any) -> None:
        raise DeviceUnavailable("NVRTC cannot be loaded")

    monkeypatch.setattr(_jit, "compile", missing)
    said = cupyflash.explain(**SIZES, arch=80, backward=True, attn_bias=True, deterministic=True)
    assert (said.kernel, said.config) == (NAME, {"head_dim": 8})
    assert [launch.symbol for launch, _ in said.steps] == [NAME, NAME]
    assert said.launch == said.steps[0][0]
    assert said.problem.wanted == ("dbias",)
    page = str(said)
    for line in (
        "backward, bfloat16, full",
        "gradients  dq, dk, dv, dbias, deterministic",
        f"kernel: {NAME}",
        "note       NVRTC cannot be loaded",
        "others:\n",
        "  reference takes arrays in host memory, these are on a GPU",
    ):
        assert line in page
    assert page.count(f"step       {NAME}") == page.count("launch     3 blocks of 32 threads") == 2


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_explain_and_supports_take_arrays(
    layout: str, fake: FakeBackward, rng: np.random.Generator
) -> None:
    _, q, k, v, *_ = draw(rng)
    if layout == "bhsd":
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    options = {"layout": layout, "backward": True}
    said = cupyflash.explain(q, k, v, **options)
    assert (said.problem.op, said.kernel, said.steps) == ("backward", "cpu", ())
    assert (said.problem.len_q, said.problem.heads_q, said.problem.wanted) == (9, 4, ())
    assert cupyflash.supports(*map(put, (q, k, v)), **options)
    assert not cupyflash.supports(q, k, v, kernel=NAME, **options)
    with pytest.raises(InvalidType, match=r"^`backward` must be a bool, got int"):
        cupyflash.explain(q, k, v, layout=layout, backward=1)


def test_sizes_of_packed_sequences_and_of_dtypes_without_gradients(fake: FakeBackward) -> None:
    packed = {"cu_seqlens_q": True, "cu_seqlens_k": True, "learnable_sink": True}
    said = cupyflash.explain(**SIZES, arch=None, backward=True, **packed)
    assert said.problem.packed
    assert said.problem.wanted == ("dsink",)
    assert not cupyflash.supports(**SIZES, arch=None, dtype="float8_e4m3fn", backward=True)
    assert cupyflash.supports(**SIZES, arch=None, dtype="float8_e4m3fn")


def test_warmup_loads_every_step(fake: FakeBackward, rng: np.random.Generator) -> None:
    arrays = [put(x) for x in draw(rng)]
    cupyflash.warmup(*arrays[1:4], backward=True)
    assert len(fake.gpu.loaded) == 2
    assert not fake.launches
    cupyflash.warmup(**SIZES, backward=True)
    cupyflash.warmup(**SIZES, backward=True, kernel=NAME)
    assert len(fake.gpu.loaded) == 6, "each plan of the fake kernel has units of its own"


def test_the_command_line_speaks_of_gradients(
    fake: FakeBackward, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = []

    def compile(self: units.Unit) -> dict[str, Any]:
        compiled.append(self.launch.unit)
        return dict.fromkeys(("spill_stores", "spill_loads", "log"), 0) | {"unit": "unit"}

    monkeypatch.setattr(units.Unit, "compile", compile)
    monkeypatch.setattr(_jit, "compile", lambda *arguments: SimpleNamespace(resources=None))
    done = CliRunner().invoke(main, ["explain", "--backward", "--arch", "90", "--json"])
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    assert answer["kernel"] == NAME
    assert [step["launch"]["symbol"] for step in answer["steps"]] == [NAME, NAME]
    done = CliRunner().invoke(main, ["show", "--backward", "--arch", "90"])
    assert done.exit_code == 0, done.output
    assert "// fake 1 step 0" in done.stdout
    compiled.clear()
    done = CliRunner().invoke(main, ["compile", "--backward", "--arch", "90"])
    assert done.exit_code == 0, done.output
    assert [unit.split("\n")[0] for unit in compiled] == ["// fake 2 step 0", "// fake 2 step 1"]
    compiled.clear()
    done = CliRunner().invoke(main, ["compile", "--all", "--kernel", NAME, "--arch", "90"])
    assert done.exit_code == 0, done.output
    taken = [dims for dims in units.DIMS if dims[0] <= 256]
    assert len(compiled) == 2 * 5 * len(taken) * len(units.MASKS)
