"""Plans of calls with modifiers: a warm call finds new arrays and states in their places."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from fake_gpu import FakeArray, FakeGpu, install

import cupyflash
from cupyflash import InvalidArgument, InvalidType, _call, _explain, _kernels
from cupyflash.masks import Band, Mask, PrefixLM, Segments

ROWS = {80: "attention_fwd_sm80", 90: "attention_fwd_sm90"}  # by capability: the best kernel


@pytest.fixture(params=ROWS)
def fake(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[FakeGpu]:
    gpu = install(monkeypatch)
    gpu.capability = request.param
    yield gpu
    assert all(f"kernels/{ROWS[gpu.capability]}.cu" in launch.unit for launch in gpu.launches)


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each call that was not replayed."""
    calls: list[int] = []
    describe = _call.describe
    monkeypatch.setattr(
        _call, "describe", lambda *args, **options: calls.append(0) or describe(*args, **options)
    )
    return calls


def put(x: Any) -> Any:
    """Put arrays, also those of a mask or a pair, on the GPU."""
    if isinstance(x, Mask):
        return x.bound(*map(put, x.arrays))
    if isinstance(x, tuple):
        return tuple(map(put, x))
    return FakeArray(x) if isinstance(x, np.ndarray) else x


def check(function: Any, arrays: list[np.ndarray], options: dict[str, Any], **on_host: Any) -> None:
    """Compare a call on the GPU with the same on the CPU."""
    placed = {name: put(x) for name, x in options.items()}
    out, lse = function(*map(put, arrays), return_lse=True, **placed, **on_host)
    expected, sums = function(*arrays, return_lse=True, **options, **on_host)
    np.testing.assert_allclose(out.host.astype(float), expected.astype(float), rtol=1e-2, atol=2e-3)
    np.testing.assert_allclose(lse.host, sums, rtol=1e-5, atol=1e-5)


def draw(rng: np.random.Generator, packed: bool = False) -> list[np.ndarray]:
    batch = () if packed else (2,)
    shapes = (*batch, 9, 4, 8), (*batch, 13, 2, 8), (*batch, 13, 2, 8)
    return [rng.standard_normal(shape).astype(np.float16) for shape in shapes]


def modifiers(rng: np.random.Generator) -> dict[str, dict[str, Any]]:
    """New arrays of each modifier."""

    def state(kind: Any, count: int) -> np.ndarray:
        return rng.integers(0, 2**31, count).astype(kind)

    return {
        "softcap": {"softcap": 1.5},
        "alibi": {"alibi_slopes": rng.random(4, np.float32)},
        "alibi_of_batch": {"alibi_slopes": rng.random((2, 4), np.float32), "alignment": "top_left"},
        "bias": {"attn_bias": rng.standard_normal((4, 1, 13))},
        "bias16": {"attn_bias": rng.standard_normal((2, 1, 9, 13)).astype(np.float16)},
        "mask": {"attn_mask": rng.random((9, 13)) < 0.6},
        "used": {"seqused_q": rng.integers(0, 10, 2), "seqused_k": rng.integers(0, 14, 2)},
        "used_k": {"seqused_k": rng.integers(0, 14, 2).astype(np.uint8)},
        "sink": {"learnable_sink": rng.standard_normal(4).astype(np.float32)},
        "pair": {"dropout_p": 0.4, "rng_state": tuple(map(int, rng.integers(0, 2**62, 2)))},
        "state": {"dropout_p": 0.4, "rng_state": state(np.int64, 2)},
        "state32": {"dropout_p": 0.4, "rng_state": state(np.uint32, 4)},
        "prefix": {"mask": PrefixLM(rng.integers(0, 9, 2).astype(np.int16))},
        "band": {"mask": Band(2, 3, "top_left"), "window_size": (4, 1)},
        "segments": {"segment_ids": (rng.integers(0, 2, (2, 9)), rng.integers(0, 2, (1, 13)))},
    }


NAMES = list(modifiers(np.random.default_rng(0)))
EVERY = ["softcap", "alibi", "bias", "mask", "used", "sink", "state", "prefix", "segments"]


@pytest.mark.parametrize("names", [*([name] for name in NAMES), EVERY], ids="-".join)
def test_a_call_with_modifiers_is_replayed_on_new_arrays(
    names: list[str], fake: FakeGpu, described: list[int], rng: np.random.Generator
) -> None:
    """The CPU path checks each call too, by a description of its own."""
    cold = []
    for _ in range(3):
        options: dict[str, Any] = {}
        for name in names:
            options |= modifiers(rng)[name]
        described.clear()
        check(cupyflash.attention, draw(rng), options)
        cold.append(len(described) - 1)
    assert cold[0] in (1, 2)
    assert cold[1:] == [0, 0]
    assert len(fake.compiled) == 1


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_fp8_with_modifiers_is_replayed(
    dtype: str, described: list[int], monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    fake = install(monkeypatch)
    fake.capability = 90
    descale = rng.random(2, np.float32)
    for _ in range(3):
        options: dict[str, Any] = {"v_descale": descale}
        for name in EVERY:
            options |= modifiers(rng)[name] if name != "used" else {}
        described.clear()
        arrays = [np.repeat(x, 2, axis=3).astype(dtype) for x in draw(rng)]
        check(cupyflash.attention, arrays, options)
    assert len(described) == 1
    assert len(fake.launches) == 3
    assert "kernels/attention_fwd_sm90.cu" in fake.launches[0].unit


@pytest.mark.parametrize("hosted", [False, True])
def test_packed_sequences_are_replayed(
    hosted: bool, fake: FakeGpu, described: list[int], rng: np.random.Generator
) -> None:
    cold = []
    for bounds in ([0, 3, 9], [0, 0, 8], [0, 9, 9]):
        cu_q, cu_k = np.array(bounds), np.array([0, 6, 13], np.int32)
        bias = rng.standard_normal((2, 1, 9, 13)).astype(np.float16)
        ids = Segments(rng.integers(0, 2, (1, 9)), rng.integers(0, 2, (2, 13)))
        options = {"causal": True, "attn_bias": bias, "mask": ids, "seqused_k": np.array([5, 2])}
        described.clear()
        bounds_on = {} if hosted else {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
        on_host = {"cu_seqlens_q": cu_q.tolist(), "cu_seqlens_k": cu_k} if hosted else {}
        check(cupyflash.attention_varlen, draw(rng, packed=True), options | bounds_on, **on_host)
        cold.append(len(described) - 1)
    assert cold[1:] == [0, 0]
    assert fake.adapter.uploads == (6 if hosted else 0)


def test_no_length_of_the_gpu_is_read_or_trusted(fake: FakeGpu, rng: np.random.Generator) -> None:
    """The kernel clips what no check has seen; here the CPU path does."""
    q, k, v = map(put, draw(rng, packed=True))
    for bounds in ([0, 3, 9], [-5, 40, 2], [9, 3, 0]):
        cu = put(np.array(bounds))
        out = cupyflash.attention_varlen(q, k, v, cu, put(np.array([0, 6, 13])))
        assert np.isfinite(out.host).all()


def test_values_of_the_host_are_checked_in_every_call(
    fake: FakeGpu, rng: np.random.Generator
) -> None:
    arrays = [put(x) for x in draw(rng, packed=True)]
    bias = put(np.zeros((5, 7), np.float16))
    good = ([0, 4, 9], [0, 6, 13])
    for _ in range(2):
        cupyflash.attention_varlen(*arrays, *good, attn_bias=bias)
        with pytest.raises(InvalidArgument, match=r"`cu_seqlens_q\[2\]`.*total_q = 9, got 10"):
            cupyflash.attention_varlen(*arrays, [0, 4, 10], good[1], attn_bias=bias)
        with pytest.raises(InvalidArgument, match="`cu_seqlens_k` must not decrease"):
            cupyflash.attention_varlen(*arrays, good[0], [0, 7, 6], attn_bias=bias)
        with pytest.raises(
            InvalidArgument, match=r"`attn_bias` has 5 queries and the longest .* 6"
        ):
            cupyflash.attention_varlen(*arrays, [0, 3, 9], good[1], attn_bias=bias)
    assert len(fake.launches) == 2


def test_lengths_of_the_host_are_copied_before_they_change(
    fake: FakeGpu, rng: np.random.Generator
) -> None:
    q, k, v = draw(rng)
    used = np.array([4, 9])
    for _ in range(3):
        out = cupyflash.attention(put(q), put(k), put(v), seqused_k=used).host
        expected = cupyflash.attention(q, k, v, seqused_k=used)
        np.testing.assert_allclose(out.astype(float), expected.astype(float), atol=2e-3)
        used -= 1
    assert fake.adapter.uploads == 3


@pytest.mark.parametrize("warm", [False, True])
def test_a_capture_copies_nothing_from_the_host(
    warm: bool, fake: FakeGpu, rng: np.random.Generator
) -> None:
    arrays = [put(x) for x in draw(rng)]
    used = put(np.array([3, 4]))
    if warm:
        cupyflash.attention(*arrays, seqused_k=[3, 4])
    cupyflash.attention(*arrays, seqused_k=used)
    fake.adapter.recording = True
    with pytest.raises(InvalidArgument, match=r"`seqused_k` is in host memory.*capture.*device 0"):
        cupyflash.attention(*arrays, seqused_k=[3, 4])
    cupyflash.attention(*arrays, seqused_k=used)


def test_facts_of_modifiers_that_differ_never_share_a_plan(
    fake: FakeGpu, rng: np.random.Generator
) -> None:
    arrays = draw(rng)
    bias = rng.standard_normal((2, 4, 9, 13)).astype(np.float32)
    slopes = rng.random((2, 4), np.float32)
    calls: list[dict[str, Any]] = [
        {"attn_bias": bias},
        {"attn_bias": bias[:1]},
        {"attn_bias": bias[:, :, ::-1]},
        {"attn_bias": bias.astype(np.float64)},
        {"attn_bias": bias, "causal": True},
        {"alibi_slopes": slopes},
        {"alibi_slopes": slopes[0]},
        {"mask": PrefixLM(np.array([3, 4]))},
        {"mask": PrefixLM(np.array([3, 4]), "top_left")},
        {"mask": Segments(np.zeros((2, 9), int), np.arange(26).reshape(2, 13) % 2)},
        {"seqused_k": np.array([3, 4])},
        {"seqused_q": np.array([3, 4])},
        {"seqused_q": np.array([3, 4], np.uint16)},
        {"dropout_p": 0.5, "rng_state": np.array([3, 4])},
        {"dropout_p": 0.5, "rng_state": (3, 4)},
        {"dropout_p": 0.25, "rng_state": (3, 4)},
    ]
    for _ in range(2):
        for options in calls:
            check(cupyflash.attention, arrays, options)


def test_a_given_output_is_kept_apart_from_modifiers(
    fake: FakeGpu, rng: np.random.Generator
) -> None:
    q, k, v = map(put, draw(rng))
    room = np.zeros((2, 9, 4, 16), np.float16)
    bias = put(rng.standard_normal((9, 13)).astype(np.float16))
    apart, across = FakeArray(room[..., :8]), FakeArray(room.reshape(-1)[: 9 * 13].reshape(9, 13))
    for _ in range(2):
        assert cupyflash.attention(q, k, v, attn_bias=bias, out=apart) is apart
        with pytest.raises(InvalidArgument, match="`out` must not overlap `attn_bias`"):
            cupyflash.attention(q, k, v, attn_bias=across, out=apart)


def test_a_given_output_is_kept_apart_from_the_state_of_dropout(
    fake: FakeGpu, rng: np.random.Generator
) -> None:
    q, k, v = map(put, draw(rng))
    out = FakeArray(np.zeros((2, 9, 4, 8), np.float16))
    apart, across = (
        FakeArray(np.array([3, 4])),
        FakeArray(out.host.reshape(-1)[:8].view(np.int64)),
    )
    for _ in range(2):
        assert cupyflash.attention(q, k, v, dropout_p=0.5, rng_state=apart, out=out) is out
        with pytest.raises(InvalidArgument, match="`out` must not overlap `rng_state`"):
            cupyflash.attention(q, k, v, dropout_p=0.5, rng_state=across, out=out)


@pytest.mark.parametrize(
    ("state", "error", "words"),
    [
        (np.zeros(3, np.int64), InvalidType, r"`rng_state` must be.*got int64 of shape \(3,\)"),
        (np.zeros(2, np.int32), InvalidType, "`rng_state` must be.*got int32"),
        (np.zeros(4, np.int64)[::2], InvalidArgument, "`rng_state` must be contiguous"),
    ],
    ids=str,
)
def test_wrong_states_on_the_gpu(
    state: np.ndarray, error: type, words: str, fake: FakeGpu, rng: np.random.Generator
) -> None:
    with pytest.raises(error, match=words):
        cupyflash.attention(*map(put, draw(rng)), dropout_p=0.5, rng_state=put(state))


def test_elements_that_no_gpu_can_read_are_refused(fake: FakeGpu, rng: np.random.Generator) -> None:
    arrays = [put(x) for x in draw(rng)]
    odd = np.zeros(9 * 13 * 4 + 1, np.uint8)[1:].view(np.float32).reshape(9, 13)
    even = np.zeros((9, 13), np.float32)
    cupyflash.attention(*arrays, attn_bias=put(even))
    with pytest.raises(InvalidArgument, match="`attn_bias` starts at address"):
        cupyflash.attention(*arrays, attn_bias=put(odd))


@pytest.mark.parametrize("arch", ROWS)
@pytest.mark.parametrize(
    "optional",
    ["attn_bias", "attn_mask", "alibi_slopes", "seqused_q", "seqused_k", "learnable_sink",
     "segment_ids", "cu_seqlens_q"],
)  # fmt: skip
def test_what_a_kernel_takes_has_a_place(arch: int, optional: str) -> None:
    """Otherwise every such call would be described and packed anew."""
    options = {optional: True}
    if optional == "cu_seqlens_q":
        options["cu_seqlens_k"] = True
    request = _explain.resolve(
        (None, None, None), *_explain.split({"len_q": 64, "head_dim": 64, "arch": arch,
        "dtype": "float16", "dropout_p": 0.5, **options})
    )  # fmt: skip
    taken = []
    for kernel in _kernels.KERNELS:
        if kernel.launch is None or kernel.refusal(request.problem) is not None:
            continue
        places = dict(kernel.launch(request.problem, request.operands).places)
        names = [0, 1] if optional == "segment_ids" else list(options)
        assert {*names, "rng_state"} <= places.keys(), kernel.name
        taken.append(kernel.name)
    assert ROWS[arch] in taken
