"""The dispatch table without a GPU: its choices, refusals and explanations."""

import dataclasses
import re
from typing import Any

import numpy as np
import pytest

import cupyflash
from cupyflash import (
    InvalidArgument,
    InvalidType,
    UnsupportedProblem,
    _kernels,
    _tuning,
    _tuning_sm90,
)
from cupyflash._array import ITEMSIZES
from cupyflash._kernels import KERNELS, rejections, select
from cupyflash._problem import MODIFIERS, Problem
from cupyflash.masks import Band, PrefixLM

SM80, SM90 = "attention_fwd_sm80", "attention_fwd_sm90"


def problem(**changes: Any) -> Problem:
    facts: dict[str, Any] = {
        "dtype": "bfloat16", "batch": 2, "len_q": 1024, "len_k": 2048, "heads_q": 8, "heads_k": 2,
        "head_dim": 128, "head_dim_v": 128, "scale": 0.1, "band": Band(), "arch": 90,
    }  # fmt: skip
    return Problem(**{**facts, **changes})


# The table


def test_names_are_unique_and_of_kernel_files(pytestconfig: pytest.Config) -> None:
    names = [(kernel.op, kernel.name) for kernel in KERNELS]
    assert len(set(names)) == len(names)
    folder = pytestconfig.rootpath / "cuda" / "kernels"
    rows = {kernel.name for kernel in KERNELS if kernel.arch is not None}
    assert rows <= {file.stem for file in folder.glob("*.cu")}


def test_each_row_runs_in_one_place() -> None:
    for kernel in KERNELS:
        on_host = kernel.arch is None
        assert (kernel.run is not None) == on_host
        assert (kernel.config is not None) == (not on_host)
        assert (kernel.launch is not None) == (not on_host and kernel.op == "forward")
        assert (kernel.steps is not None) == (not on_host and kernel.op == "backward")


def test_kernels_lists_the_table_for_people() -> None:
    rows = cupyflash.kernels()
    assert [row.name for row in rows] == [kernel.name for kernel in KERNELS]
    by_name = {row.name: row for row in rows if row.op == "forward"}
    assert by_name[SM80].arch == "8.0 or newer"
    assert by_name[SM90].arch == "9.0"
    assert by_name["cpu"].arch == "host"
    assert {row.op for row in rows} == {"forward", "backward"}
    assert {row.name for row in rows if row.op == "backward"} >= {"reference"}
    assert "head dims <= 256" in by_name[SM80].needs


# The choice


@pytest.mark.parametrize("arch", [80, 86, 89, 90, 100, 103, 120, 121])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_every_gpu_from_ampere_on_has_a_kernel(arch: int, dtype: str) -> None:
    for head_dim in (0, 1, 16, 17, 80, 255, 256):
        chosen = select(problem(arch=arch, dtype=dtype, head_dim=head_dim, head_dim_v=head_dim))
        hopper = arch == 90 and dtype != "float32" and head_dim in (16, 80, 256)
        assert chosen.name == (SM90 if hopper else SM80)


def test_the_host_has_the_cpu_path() -> None:
    every = problem(arch=None, modifiers=MODIFIERS, head_dim=1000, dtype="float64")
    assert select(every).name == "cpu"
    assert select(every, "reference").name == "reference"
    assert select(every, "cpu").name == "cpu"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"arch": 75}, f"{SM80} needs compute capability 8.0 or newer, this is 7.5"),
        ({"head_dim": 512}, f"{SM80} needs head_dim <= 256, got 512"),
        ({"head_dim_v": 257}, f"{SM80} needs head_dim_v <= 256, got 257"),
        ({"dtype": "float64"}, f"{SM80} takes float16, bfloat16, float32, got float64"),
        ({"dtype": "float8_e4m3fn", "arch": 100}, f"{SM80} takes .*, got float8_e4m3fn"),
        ({"len_k": 2**29 + 1}, f"{SM80} needs lengths up to 536870912, got 536870913"),
        ({"len_q": 2**29, "batch": 2**10}, f"{SM80} launches at most 2147483647 blocks"),
    ],
)
def test_every_row_gives_its_reason(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedProblem, match=words) as caught:
        select(problem(**changes))
    message = str(caught.value)
    assert message.startswith("no kernel for forward: ")
    for kernel in KERNELS:
        if kernel.op == "forward":
            assert f"{kernel.name} " in message
    assert "\n" not in message
    with pytest.raises(UnsupportedProblem, match=words):
        select(problem(**changes), SM80)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"arch": 100}, "needs compute capability 9.0, this is 10.0"),
        ({"dtype": "float32"}, "takes float16, bfloat16, .*e5m2, got float32"),
        ({"dtype": "float8_e5m2", "head_dim": 72}, "needs head_dim from 16 .* of 16, got 72"),
        ({"packed": True, "batch": 0}, "needs a sequence, got none"),
        (
            {"packed": True, "head_dim": 192, "softcap": 1.0, "dropout_p": 0.5},
            "lengths that vary with one of .* at head dims above 128, got 2",
        ),
        ({"head_dim": 0, "head_dim_v": 64}, "needs head_dim from 8 to 256 in steps of 8, got 0"),
        ({"head_dim_v": 60}, "needs head_dim_v from 8 to 256 in steps of 8, got 60"),
        ({"head_dim_v": 264}, "needs head_dim_v from 8 to 256 in steps of 8, got 264"),
        ({"head_dim_v": 64}, r"needs .* of one class \(64, 96, .* 192 and 128, got 128 and 64"),
        ({"head_dim": 200, "head_dim_v": 128}, "of one class .*, got 200 and 128"),
        ({"width": 8}, "multiples of 16 bytes, q, k, v and out have multiples of 8"),
        ({"odd_stride": -256}, "needs strides from 0 to 1099511627760 bytes, got -256"),
        ({"len_k": 2**29 + 1}, "needs lengths up to 536870912, got 536870913"),
        ({"len_q": 2**29, "batch": 2**7}, "computes at most 1073741824 tiles, this needs"),
    ],
)
def test_the_kernel_of_hopper_leaves_the_rest_to_others(
    changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(UnsupportedProblem, match=f"cannot be used: {SM90} .*{words}"):
        select(problem(**changes), SM90)
    assert rejections(problem(**changes))[SM90].startswith(f"{SM90} ")


@pytest.mark.parametrize("dims", [(64, 128), (192, 128), (56, 120), (72, 96), (160, 192)])
def test_the_kernel_of_hopper_takes_pairs_of_classes(dims: tuple[int, int]) -> None:
    assert select(problem(head_dim=dims[0], head_dim_v=dims[1])).name == SM90
    assert select(problem(head_dim=dims[0], head_dim_v=dims[1], batch=0, len_k=0)).name == SM90


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_the_kernel_of_hopper_takes_every_option(dtype: str) -> None:
    options = {
        "softcap": 2.0, "dropout_p": 0.5, "mask": PrefixLM(3), "segment_ids": True, "causal": True,
        **dict.fromkeys(("alibi_slopes", "attn_bias", "attn_mask", "learnable_sink"), True),
    }  # fmt: skip
    sizes = {"len_q": 9, "head_dim": 64, "dtype": dtype, "kernel": SM90}
    assert cupyflash.supports(**sizes, **options)
    for lengths in (("seqused_q",), ("seqused_k",), ("cu_seqlens_q", "cu_seqlens_k")):
        assert cupyflash.supports(**sizes, **options, **dict.fromkeys(lengths, True))


def test_a_row_of_the_wrong_place_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedProblem, match=r"`kernel` is 'cpu'.*these are on a GPU"):
        select(problem(), "cpu")
    with pytest.raises(UnsupportedProblem, match=f"`kernel` is '{SM80}'.*in host memory"):
        select(problem(arch=None), SM80)
    with pytest.raises(InvalidArgument, match=f"one of '{SM90}', '{SM80}', 'cpu', .*got 'fast'"):
        select(problem(), "fast")


def test_each_operation_has_rows_of_its_own() -> None:
    backward = problem(op="backward", arch=None)
    assert select(backward, "reference").op == "backward"
    assert select(problem(arch=None), "reference").op == "forward"
    with pytest.raises(InvalidArgument, match=f"one of .*'reference', got '{SM80}'"):
        select(backward, SM80)
    assert SM80 not in rejections(backward)
    with pytest.raises(UnsupportedProblem, match=r"^no kernel for \w+: "):
        select(problem(op="append"))


def test_rejections_are_those_that_would_not_be_chosen() -> None:
    assert set(rejections(problem())) == {"cpu", "reference"}
    on_host = rejections(problem(arch=None))
    assert set(on_host) == {SM80, SM90, "reference"}
    assert on_host["reference"] == "reference runs only when it is named"


# What selects a unit


@pytest.mark.parametrize("name", [SM80, SM90])
def test_lengths_batch_heads_and_scalars_change_no_configuration(name: str) -> None:
    kernel = select(problem(), name)
    assert kernel.config is not None
    first = kernel.config(problem())
    for changes in (
        {"batch": 70000}, {"len_q": 1}, {"len_k": 5}, {"heads_q": 2}, {"heads_k": 1},
        {"scale": 3.0}, {"band": Band(alignment="top_left")},
    ):  # fmt: skip
        assert kernel.config(problem(**changes)) == first
    assert kernel.config(problem(head_dim=120)) == first
    bounded = problem(band=Band(5, 7))
    assert kernel.config(bounded) == kernel.config(problem(band=Band(9, 0)))
    for changes in (
        {"band": Band(5, 7)}, {"band": Band(None, 0)}, {"dtype": "float16"},
        {"head_dim": 64, "head_dim_v": 64},
    ):  # fmt: skip
        assert kernel.config(problem(**changes)) != first
    assert (kernel.config(problem(scale=0.0)) != first) == (name == SM80)
    assert (kernel.config(problem(width=4)) != first) == (name == SM80)
    assert kernel.config(problem(scale=-1.0)) == kernel.config(problem(scale=0.0))


def test_configurations_fit_their_class() -> None:
    kernel = select(problem(), SM80)
    assert kernel.config is not None
    for head_dim in range(257):
        config = kernel.config(problem(head_dim=head_dim, head_dim_v=256 - head_dim))
        assert config.head_dim >= max(head_dim, 1)
        assert config.head_dim_v >= max(256 - head_dim, 1)
        assert config.head_dim % 16 == config.head_dim_v % 16 == 0


def test_tiles_of_hopper_fit_its_shared_memory() -> None:
    tables = (
        ("bfloat16", _tuning_sm90.HALF),
        ("bfloat16", _tuning_sm90.HALF_MODIFIED),
        ("bfloat16", _tuning_sm90.HALF_HEAVY),
        ("float8_e4m3fn", _tuning_sm90.EIGHT),
        ("float8_e4m3fn", _tuning_sm90.EIGHT_HEAVY),
    )
    for dtype, table in tables:
        for dims, tiles in table.items():
            shared = _tuning_sm90.shared_bytes(dtype, dims[0], dims[1], tiles)
            assert shared + _tuning_sm90.KEPT <= _tuning.shared_limit(90)
            assert tiles.block_k % (32 // ITEMSIZES[dtype]) == 0  # of a product
            assert 2 <= tiles.consumers <= 4
            assert (tiles.landings > 0) == (ITEMSIZES[dtype] == 1)
            assert dims[:2] in table


@pytest.mark.parametrize(
    ("length", "options", "block_k", "consumers"),
    [
        (512, {}, 64, 4),
        (4096, {"causal": True}, 64, 4),
        (8192, {"causal": True}, 64, 4),
        (8192, {}, 128, 3),
        (512, {"causal": True, "alibi_slopes": True}, 64, 3),
        (1024, {"causal": True, "alibi_slopes": True}, 128, 3),
    ],
)
def test_tiles_of_hopper_go_by_length_mask_and_modifiers(
    length: int, options: dict[str, Any], block_k: int, consumers: int
) -> None:
    given = {"len_q": length, "heads_q": 2, "head_dim": 64, "dtype": "bfloat16", "arch": 90}
    said = cupyflash.explain(**given, **options)
    assert f"BLOCK_K = {block_k};" in said.launch.unit
    assert f"CONSUMERS = {consumers};" in said.launch.unit


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("dims", [(16, 16), (64, 128), (192, 128), (96, 96), (256, 16)])
def test_the_kernel_of_hopper_takes_any_pair_of_head_dims_of_fp8(
    dtype: str, dims: tuple[int, int]
) -> None:
    given = problem(dtype=dtype, head_dim=dims[0], head_dim_v=dims[1])
    config = select(given).config(given)  # type: ignore[misc]
    assert config.head_dim >= dims[0]
    assert config.head_dim_v >= dims[1]
    assert config.t == {"float8_e4m3fn": "Float8E4m3", "float8_e5m2": "Float8E5m2"}[dtype]


# Explanations


def test_explain_from_sizes_needs_no_gpu() -> None:
    said = cupyflash.explain(len_q=2048, head_dim=128, heads_q=16, heads_k=4, causal=True, arch=80)
    assert said.kernel == SM80
    assert said.problem.heads_k == 4
    assert said.problem.len_k == 2048
    assert said.launch is not None
    assert said.launch.arch == "sm_80"
    assert said.launch.shared_bytes == said.config["smem_bytes"]
    page = str(said)
    assert "kernel: attention_fwd_sm80" in page
    assert "causal" in page
    assert "compute capability 8.0" in page
    assert "cpu takes arrays in host memory" in page
    assert 5 < len(page.splitlines()) < 30


def test_explain_of_a_persistent_kernel() -> None:
    said = cupyflash.explain(len_q=2048, head_dim=128, heads_q=16, causal=True)
    assert said.kernel == SM90
    assert said.launch is not None
    assert said.launch.arch == "sm_90a"
    tiles = -(-2048 // 192) * 16
    assert f"{tiles} tiles, a block a multiprocessor, of 512 threads, sm_90a" in str(said)


def test_explain_tells_registers_where_nvrtc_is() -> None:
    pytest.importorskip("cupy")
    said = cupyflash.explain(len_q=64, head_dim=64)
    assert said.note is None
    assert said.resources is not None
    assert 0 < said.resources.registers <= 255
    assert f"registers  {said.resources.registers} a thread" in str(said)


def test_explain_without_nvrtc_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*arguments: Any) -> None:
        raise cupyflash.DeviceUnavailable("NVRTC cannot be loaded")

    monkeypatch.setattr("cupyflash._jit.compile", missing)
    said = cupyflash.explain(len_q=64, head_dim=64)
    assert said.kernel == SM90
    assert said.resources is None
    assert "NVRTC cannot be loaded" in str(said)


def test_explain_of_no_kernel_has_every_reason() -> None:
    said = cupyflash.explain(len_q=64, head_dim=300, softcap=2.0)
    assert said.kernel is None
    assert set(said.rejected) == {kernel.name for kernel in KERNELS if kernel.op == "forward"}
    assert "kernel: none" in str(said)
    assert "with softcap" in str(said)
    assert "head_dim <= 256, got 300" in str(said)


def test_explain_of_host_arrays() -> None:
    x = np.zeros((2, 9, 4, 32), np.float16)
    said = cupyflash.explain(x, x, x, causal=True, attn_mask=np.ones((9, 9), bool))
    assert said.kernel == "cpu"
    assert said.launch is None
    assert said.problem.modifiers == ("attn_mask",)
    assert "host memory" in str(said)
    assert cupyflash.explain(len_q=3, head_dim=8, arch=None).kernel == "cpu"
    assert cupyflash.explain(x, x, x, kernel="reference").kernel == "reference"


def test_explain_in_both_layouts() -> None:
    arrays = [np.zeros(shape, np.float16) for shape in ((2, 4, 9, 32), (2, 2, 5, 32), (2, 2, 5, 8))]
    said = cupyflash.explain(*arrays, layout="bhsd").problem
    assert (said.heads_q, said.len_q, said.heads_k, said.len_k) == (4, 9, 2, 5)
    sizes = {"batch": 2, "len_q": 9, "len_k": 5, "heads_q": 4, "heads_k": 2, "head_dim": 32,
             "head_dim_v": 8, "dtype": np.float16, "arch": None}  # fmt: skip
    assert cupyflash.explain(**sizes, layout="bhsd").problem == said
    assert cupyflash.explain(**sizes).problem == said


def test_true_stands_for_an_optional_array() -> None:
    optional = {
        "alibi_slopes": True, "attn_bias": True, "attn_mask": True, "seqused_q": True,
        "seqused_k": True, "learnable_sink": True,
    }  # fmt: skip
    said = cupyflash.explain(
        len_q=5, len_k=7, heads_q=4, head_dim=8, arch=None, softcap=1.0, dropout_p=0.5, **optional
    )
    expected = {*optional, "softcap", "dropout_p"}
    assert said.problem.modifiers == tuple(name for name in MODIFIERS if name in expected)
    assert said.kernel == "cpu"


def test_supports_is_explain_in_one_bit() -> None:
    assert cupyflash.supports(len_q=9, head_dim=256)
    assert not cupyflash.supports(len_q=9, head_dim=257)
    assert cupyflash.supports(len_q=9, head_dim=257, arch=None)
    assert not cupyflash.supports(len_q=9, head_dim=64, arch=75)
    assert not cupyflash.supports(len_q=9, head_dim=64, kernel="cpu")
    assert cupyflash.supports(len_q=9, head_dim=64, attn_bias=True)
    assert not cupyflash.supports(len_q=9, head_dim=64, attn_bias=True, dtype="float64")
    x = np.zeros((1, 3, 2, 8), np.float64)
    assert cupyflash.supports(x, x, x, causal=True)
    assert not cupyflash.supports(x, x, x, kernel=SM80)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({}, InvalidArgument, "`len_q` must be an integer from 0 on, got None"),
        ({"len_q": 5}, InvalidArgument, "`head_dim` must be an integer.*got None"),
        ({"len_q": -5, "head_dim": 8}, InvalidArgument, "`len_q` .*-5"),
        ({"len_q": 5.0, "head_dim": 8}, InvalidArgument, "`len_q` .*5.0"),
        ({"len_q": 5, "head_dim": 8, "arch": "hopper"}, InvalidArgument, "`arch` .*'hopper'"),
        ({"len_q": 5, "head_dim": 8, "arch": 9.0}, InvalidArgument, r"`arch` .*9\.0"),
        ({"len_q": 5, "head_dim": 8, "dtype": "bf16"}, InvalidType, "`dtype` .*e5m2, got 'bf16'"),
        ({"len_q": 5, "head_dim": 8, "dtype": None}, InvalidType, "`dtype` .*None"),
        ({"len_q": 5, "head_dim": 8, "dtype": "int32"}, InvalidType, "`q` has dtype int32"),
        ({"len_q": 5, "head_dim": 8, "causual": True}, InvalidType, "`causual` is no option"),
        ({"len_q": 5, "head_dim": 8, "heads_q": 3, "heads_k": 2}, InvalidArgument, "multiple of"),
        ({"len_q": 5, "head_dim": 8, "window_size": (-2, 0)}, InvalidArgument, "`window_size`"),
        ({"len_q": 5, "head_dim": 8, "kernel": "x"}, InvalidArgument, "`kernel` must be None"),
        ({"len_q": 5, "head_dim": 8, "layout": "sbhd"}, InvalidArgument, "`layout`"),
        ({"q": np.zeros((1, 2, 3, 4))}, InvalidType, "`k` must be an array"),
        (
            {"len_q": 5, "head_dim": 8, "attn_bias": np.zeros((5, 5))},
            InvalidArgument,
            "^`attn_bias` must be True or None .*, got ndarray: pass that, or all arrays$",
        ),
        ({"len_q": 5, "head_dim": 8, "out": True}, InvalidArgument, "^`out` must be None .*bool"),
    ],
)
@pytest.mark.parametrize("function", [cupyflash.explain, cupyflash.supports])
def test_wrong_arguments_raise(
    function: Any, arguments: dict[str, Any], error: type, words: str
) -> None:
    with pytest.raises(error, match=words):
        function(**arguments)


@pytest.mark.parametrize(
    "given",
    [{"len_q": 3}, {"batch": 1}, {"arch": 90}, {"arch": None}, {"dtype": "float32"}],
    ids=str,
)
@pytest.mark.parametrize("function", [cupyflash.explain, cupyflash.supports, cupyflash.warmup])
def test_sizes_beside_arrays_are_refused(function: Any, given: dict[str, Any]) -> None:
    (name,) = given
    x = np.zeros((1, 3, 2, 8), np.float32)
    with pytest.raises(InvalidArgument, match=f"^`{name}` is a property of q, k and v"):
        function(x, x, x, **given)


def test_warmup_refuses_what_it_would_not_heed() -> None:
    x = np.zeros((1, 3, 2, 8), np.float32)
    with pytest.raises(InvalidArgument, match=r"^`device` is a property of q, k and v"):
        cupyflash.warmup(x, x, x, device=3)
    with pytest.raises(InvalidArgument, match=r"^`arch` is that of the device"):
        cupyflash.warmup(len_q=3, head_dim=8, arch=80)


@pytest.mark.parametrize("arch", [80, "sm_80", "80", np.int64(80)], ids=repr)
def test_an_architecture_has_a_number_and_a_name(arch: Any) -> None:
    assert cupyflash.explain(len_q=5, head_dim=8, arch=arch).problem.arch == 80


def test_no_window_has_two_names() -> None:
    sizes: dict[str, Any] = {"len_q": 5, "head_dim": 8, "arch": None}
    said = cupyflash.explain(**sizes, window_size=None).problem
    assert said == cupyflash.explain(**sizes, window_size=(None, -1)).problem


@pytest.mark.frameworks
def test_dtypes_of_frameworks_are_understood() -> None:
    torch = pytest.importorskip("torch")
    said = cupyflash.explain(len_q=5, head_dim=8, dtype=torch.float16, arch=None)
    assert said.problem.dtype == "float16"


def test_warmup_of_the_host_has_nothing_to_do() -> None:
    x = np.zeros((1, 3, 2, 8), np.float32)
    cupyflash.warmup(x, x, x)


def test_show_versions_names_what_matters(capsys: pytest.CaptureFixture[str]) -> None:
    cupyflash.show_versions()
    lines = capsys.readouterr().out.splitlines()
    shown = dict(re.split(r"\s{2,}", line, maxsplit=1) for line in lines)
    assert shown["cupyflash"] == cupyflash.__version__
    assert shown["numpy"] == np.__version__
    assert {"python", "cupy", "nvrtc", "gpu", "torch", "jax"} <= shown.keys()


def test_a_new_row_is_seen_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    first = KERNELS[0]
    row = dataclasses.replace(first, name="attention_fwd_new", arch=range(90, 91))
    monkeypatch.setattr(_kernels, "KERNELS", (row, *KERNELS))
    assert select(problem()).name == "attention_fwd_new"
    assert select(problem(arch=80)).name == SM80
    assert rejections(problem(arch=80))["attention_fwd_new"] == (
        "attention_fwd_new needs compute capability 9.0, this is 8.0"
    )
    assert cupyflash.kernels()[0].arch == "9.0"
