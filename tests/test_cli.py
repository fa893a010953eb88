"""The command line: what goes where, exit codes, and machine-readable answers."""

import importlib.util
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
import rich.console
from click.testing import CliRunner

from cupyflash import __version__, _cache, _console, _jit
from cupyflash._bench import environment, sweep
from cupyflash._bench.case import Case
from cupyflash._bench.run import Group
from cupyflash._kernels import KERNELS
from cupyflash.cli import main

COMMANDS = sorted(main.commands)
TINY = ["--len-q", "16", "--heads", "1", "--head-dim", "8", "--rounds", "1", "--budget", "0.0001"]


RESULT = Path(__file__).parents[1] / "bench" / "results" / "h200-2026-11-29-host.json"


def run(*arguments: str) -> Any:
    return CliRunner().invoke(main, list(arguments))


def leaves(group: click.Group, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = []
    for name, command in group.commands.items():
        inner = isinstance(command, click.Group)
        found += leaves(command, (*path, name)) if inner else [(*path, name)]
    return found


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "gpu_present", lambda: False)


def test_the_promised_commands_are_there() -> None:
    promised = {"info", "list", "explain", "show", "check", "bench", "compile", "cache"}
    assert promised <= set(COMMANDS)
    assert {("cache", name) for name in ("path", "list", "clear")} <= set(leaves(main))


@pytest.mark.parametrize("command", leaves(main), ids=" ".join)
def test_every_command_and_option_says_what_it_is(command: tuple[str, ...]) -> None:
    found: Any = main
    for name in command:
        found = found.commands[name]
    assert found.help.splitlines()[0].endswith(".")
    done = run(*command, "--help")
    assert done.exit_code == 0
    assert done.stdout.startswith("Usage:")


def test_help_and_version_import_no_framework() -> None:
    code = (
        "import sys\n"
        "from click.testing import CliRunner\n"
        "from cupyflash.cli import main\n"
        f"for words in {[[*c, '--help'] for c in leaves(main)]} + [['--help'], ['--version']]:\n"
        "    assert CliRunner().invoke(main, words).exit_code == 0, words\n"
        "print({'cupy', 'torch', 'jax'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_version_is_the_packages() -> None:
    assert __version__ in run("--version").stdout


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    "words",
    [
        ["nothing"],
        ["list", "--no-such-option"],
        ["bench", "--len-q", "1k"],
        ["bench", "--mask", "diagonal"],
        ["bench", "--mask", "window:-5,0", *TINY],
        ["bench", "--dtype", "int8"],
        ["bench", "--batch", "-1"],
        ["bench", "--vs", "fa9"],
        ["bench", "--suite", "fast"],
        ["bench", "--kernel", "fast"],
        ["bench", "-o", "xml"],
        ["bench", "--metric", "foo"],
        ["bench", "--rounds", "0"],
        ["bench", "--budget", "-1"],
        ["bench", "--budget", "0"],
        ["bench", "--tokens", "0"],
        ["bench", "--suite", "cpu", "--dtype", "fp32"],
        ["bench", "--suite", "cpu", "--vs", "none"],
        ["bench", "--suite", "cpu", "--device", "cpu"],
        ["bench", "--tokens", "64", "--batch", "2"],
        ["bench", "--render", str(RESULT), "--suite", "cpu"],
        ["bench", "--render", str(RESULT), "--rounds", "2"],
        ["bench", "--render", str(RESULT.parent)],
        ["bench", "--render", __file__],
        ["bench", "--save", "no/such/folder/x.json"],
        ["bench", "--save", str(RESULT.parent)],
        ["show"],
        ["show", "--arch", "hopper"],
        ["compile"],
        ["check", "--kernel", "fast"],
    ],
    ids=" ".join,
)
def test_a_usage_error_exits_with_2_and_a_sentence(words: list[str]) -> None:
    done = run(*words)
    assert done.exit_code == 2, done.output
    assert "Error: " in done.stderr
    assert "Traceback" not in done.output


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    "words",
    [
        ["bench", "--device", "cuda", *TINY],
        ["bench", "--suite", "generic"],
        ["check", "--kernel", "attention_fwd_sm80"],
        ["show", "--arch", "sm_90", "--head-dim", "512"],
        ["show", "--arch", "sm_90", "--dtype", "fp64"],
    ],
    ids=" ".join,
)
def test_what_cannot_be_done_here_exits_with_1_and_a_sentence(words: list[str]) -> None:
    done = run(*words)
    assert done.exit_code == 1, done.output
    assert done.stderr.startswith("Error: ")
    assert done.stdout == ""


def test_list_is_the_dispatch_table() -> None:
    shown = run("list")
    assert shown.exit_code == 0
    for row in KERNELS:
        assert row.name in shown.stdout
    assert [row["name"] for row in json.loads(run("list", "--json").stdout)] == [
        row.name for row in KERNELS
    ]


def test_info_sees_a_driver_without_cupy(monkeypatch) -> None:
    told = {"name": "NVIDIA H200", "compute_cap": "9.0", "driver_version": "580.1"}
    monkeypatch.setattr(environment, "gpu_present", lambda: False)
    monkeypatch.setattr(environment, "smi", lambda names: {n: told[n] for n in names if n in told})
    answer = json.loads(run("info", "--json").stdout)
    assert (answer["gpu"], answer["arch"], answer["driver"]) == ("NVIDIA H200", "sm_90", "580.1")


def test_info_says_what_is_here(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", str(tmp_path))
    answer = json.loads(run("info", "--json").stdout)
    assert answer["cupyflash"] == __version__
    assert answer["cache"] == str(tmp_path)
    assert answer["cached_kernels"] == 0
    assert {"gpu", "driver", "cuda", "nvrtc", "torch", "jax", "cupy"} <= set(answer)
    shown = run("info")
    assert "nvrtc" in shown.stdout
    assert str(tmp_path) in shown.stdout


# --- explain, show, compile, cache ---


def test_explain_needs_no_gpu() -> None:
    done = run("explain", "--arch", "sm_90", "--mask", "causal", "--head-dim", "128")
    assert done.exit_code == 0
    assert "attention_fwd_sm90" in done.stdout
    answer = json.loads(run("explain", "--arch", "sm_90", "--json").stdout)
    assert answer["kernel"] == "attention_fwd_sm90"


@pytest.mark.usefixtures("no_gpu")
def test_explain_without_a_gpu_speaks_of_the_cpu_path() -> None:
    assert json.loads(run("explain", "--json").stdout)["kernel"] == "cpu"


@pytest.mark.parametrize("arch", ["90", "sm_90", "sm_90a"])
def test_an_architecture_has_two_names(arch: str) -> None:
    done = json.loads(run("explain", "--arch", arch, "--json").stdout)
    assert done["problem"]["arch"] == 90


@pytest.mark.parametrize(
    ("words", "chosen"),
    [
        ("--softcap 30", {"score": "Softcap"}),
        ("--alibi --bias", {"score": "Chain<Alibi, Bias<Float16, 2>>"}),
        ("--dropout 0.1 --bool-mask", {"dropout": "Dropout", "mask": "DenseMask"}),
        ("--sink", {"sink": "Sink<Float16>"}),
        ("--prefix", {"mask": "PrefixLM"}),
        ("--segments --mask causal", {"mask": "All<Band<false, true>, Segments<4>>"}),
        ("--packed", {"sequences": "Packed"}),
        ("--used", {"sequences": "Used"}),
        ("--backward --deterministic", {"deterministic": True}),
    ],
)
def test_a_problem_may_have_what_attention_may(words: str, chosen: dict[str, Any]) -> None:
    config = json.loads(run("explain", "--arch", "90", *words.split(), "--json").stdout)["config"]
    assert chosen.items() <= config.items()


def test_options_of_gradients_or_of_one_problem_are_refused_elsewhere() -> None:
    done = run("explain", "--arch", "90", "--deterministic")
    assert done.exit_code == 2
    assert "--backward" in done.output
    done = run("compile", "--arch", "90", "--all", "--sink")
    assert done.exit_code == 2
    assert "learnable_sink" in done.output


def test_explain_says_why_nothing_fits() -> None:
    done = run("explain", "--arch", "sm_90", "--head-dim", "512")
    assert done.exit_code == 1
    assert "attention_fwd_sm80" in done.stdout + done.stderr
    assert "256" in done.stdout + done.stderr


@pytest.fixture
def kernels() -> None:
    pytest.importorskip("cupy", reason="needs CuPy and NVRTC")


@pytest.mark.usefixtures("kernels")
def test_show_prints_the_unit_and_what_it_takes() -> None:
    words = ["show", "--arch", "sm_80", "--head-dim", "64", "--mask", "causal"]
    done = run(*words)
    assert done.exit_code == 0, done.output
    assert "struct Config {" in done.stdout
    assert '#include "kernels/attention_fwd_sm80.cu"' in done.stdout
    assert "registers" in done.stdout
    answer = json.loads(run(*words, "--json").stdout)
    assert answer["unit"] in done.stdout
    assert answer["resources"]["registers"] > 0
    assert answer["resources"]["dynamic_shared"] > 0


@pytest.mark.usefixtures("kernels")
def test_what_a_problem_has_beyond_its_band_is_compiled() -> None:
    words = ["--arch", "80", "--head-dim", "64", "--sink", "--softcap", "30"]
    assert "using Score = Softcap;" in run("show", *words).stdout
    (row,) = json.loads(run("compile", *words, "--json").stdout)
    assert (row["spill_stores"], row["log"]) == (0, "")


@pytest.mark.usefixtures("kernels")
def test_compile_fills_the_cache_for_several_architectures() -> None:
    words = ["compile", "--arch", "sm_80,sm_90", "--head-dim", "64", "--mask", "causal"]
    rows = json.loads(run(*words, "--json").stdout)
    assert [(row["arch"], row["spill_stores"], row["log"]) for row in rows] == [
        ("sm_80", 0, ""),
        ("sm_90a", 0, ""),
    ]
    assert run(*words).stdout == "2 kernels are in the cache\n"
    assert "registers" in run(*words, "--stats").stdout
    listed = json.loads(run("cache", "list", "--json").stdout)
    assert {"sm_80", "sm_90a"} <= {row["arch"] for row in listed}


@pytest.mark.usefixtures("kernels")
def test_all_means_every_class_of_a_kernel(monkeypatch) -> None:
    from cupyflash._bench import units

    compiled = []
    monkeypatch.setattr(units.Unit, "compile", lambda unit: compiled.append(unit) or ROW)
    assert run("compile", "--arch", "sm_80", "--all").exit_code == 0
    cases = [unit.case for unit in compiled]
    seen = {(case.dtype, (case.head_dim, case.head_dim_v), case.mask) for case in cases}
    assert {(dtype, dims) for dtype, dims, _ in seen} == set(
        itertools.product(("bf16", "fp16", "fp32"), units.DIMS)
    )
    assert {mask for _, _, mask in seen} == set(units.MASKS)
    assert len({unit.launch.unit for unit in compiled}) == len(compiled)


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tables go to a terminal of 80 columns."""

    def console(*args: Any, **options: Any) -> Any:
        fixed = {"width": 80, "force_terminal": True, "color_system": None}
        return rich.console.Console(*args, **options, **fixed)

    monkeypatch.setattr(_console, "Console", console)


@pytest.mark.usefixtures("kernels", "narrow")
@pytest.mark.parametrize("words", [["compile", "--arch", "80,sm_90", "--stats"], ["cache", "list"]])
def test_tables_of_kernels_fit_80_columns(words: list[str]) -> None:
    mask = ["--head-dim", "192", "--head-dim-v", "128", "--mask", "window:128,128"]
    assert run("compile", "--arch", "80", *mask).exit_code == 0
    done = run(*words, *(mask if words[0] == "compile" else []))
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    # Of a cell that is cut or folded the whole would be missing.
    names = ["threads", "shared"] if words[0] == "compile" else ["entry", "arch"]
    header = next(line for line in lines if "registers" in line)
    assert {"registers", "spilled", *names} <= set(header.split())
    assert "…" not in done.stdout
    whole = r"window:128,128" if words[0] == "compile" else r"attention_fwd_sm80-[0-9a-f]{16}"
    assert re.search(whole, done.stdout)


@pytest.mark.usefixtures("narrow")
def test_the_cache_of_every_kernel_fits_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [f"{Path(name).stem}-{0:016x}" for name in _jit.sources() if name.endswith(".cu")]
    used = _jit.Resources(255, 8, 8, 8, 0, 2.345, "13.5")
    found = [_jit.Cubin(Path(name) / "kernel.cubin", "", "sm_120", "", used) for name in entries]
    monkeypatch.setattr(_jit, "cache_entries", lambda: found)
    done = run("cache", "list")
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert [name for name in entries if name not in done.stdout] == []


@pytest.mark.usefixtures("kernels")
@pytest.mark.filterwarnings("ignore:the kernel cache:RuntimeWarning")
def test_compile_does_not_call_kernels_kept_that_are_not(monkeypatch, tmp_path: Path) -> None:
    from cupyflash._bench import units

    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setattr(units.Unit, "compile", lambda unit: _cache.directory() and ROW)
    done = run("compile", "--arch", "sm_80")
    assert done.exit_code == 1
    assert done.stdout == ""
    assert "1 kernels were compiled and none is kept" in done.stderr


ROW = {
    "kernel": "k", "arch": "sm_80", "dtype": "bf16", "head_dim": 64, "log": "", "spill_stores": 0,
    "spill_loads": 0,
}  # fmt: skip


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("fault", [{"log": "warning"}, {"spill_loads": 4}])
def test_a_remark_or_a_spill_fails_the_compile(monkeypatch, fault: dict) -> None:
    from cupyflash._bench import units

    monkeypatch.setattr(units.Unit, "compile", lambda unit: ROW | fault)
    done = run("compile", "--arch", "sm_80")
    assert done.exit_code == 1
    assert done.stderr.startswith("k sm_80 64: ")


def test_cache_path_list_and_clear(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", str(tmp_path))
    assert run("cache", "path").stdout.strip() == str(tmp_path)
    assert json.loads(run("cache", "list", "--json").stdout) == []
    done = run("cache", "list")
    assert (done.exit_code, done.stdout) == (0, "")
    assert run("cache", "clear").stdout == f"removed 0 kernels from {tmp_path}\n"


# --- bench ---

BENCH = ["bench", "--device", "cpu", "--vs", "none", "--dtype", "fp32", *TINY]


def test_bench_sweeps_the_product_of_its_lists() -> None:
    done = run(*BENCH, "--mask", "full,window:4,0", "--batch", "1,2", "-o", "json")
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)["rows"]
    assert [(row["mask"], row["batch"]) for row in rows] == [
        ("full", 1), ("full", 2), ("window:4,0", 1), ("window:4,0", 2),
    ]  # fmt: skip
    assert {row["impl"] for row in rows} == {"cupyflash"}
    assert done.stderr == ""


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_bare_bench_is_short_where_calls_are_long(monkeypatch, device: str) -> None:
    measured: list[Case] = []
    monkeypatch.setattr(environment, "gpu_present", lambda: device == "cuda")

    def document(name: str, groups: Any, *_: Any) -> dict[str, Any]:
        measured.extend(case for group in groups for case in group.cases)
        return {"rows": []}

    monkeypatch.setattr(sweep, "document", document)
    assert run("bench", "-o", "jsonl").exit_code == 0
    assert {(c.dtype, c.len_q, c.heads_q) for c in measured} == {
        "cuda": {("bf16", 1024, 16), ("bf16", 4096, 16)},
        "cpu": {("fp32", 256, 8), ("fp32", 1024, 8)},
    }[device]


@pytest.mark.parametrize(
    "fault", [{"rows": [{}]}, {"rows": [3]}, {"env": 3}, {"rows": None}], ids=str
)
def test_a_results_file_of_another_shape_is_refused(tmp_path: Path, fault: dict) -> None:
    path = tmp_path / "results.json"
    path.write_text(json.dumps(json.loads(RESULT.read_text()) | fault))
    done = run("bench", "--render", str(path))
    assert done.exit_code == 2
    assert "must be a results file" in done.stderr


@pytest.mark.parametrize("form", ["table", "md"])
def test_a_table_says_what_its_ratio_is(form: str) -> None:
    shown = " ".join(run("bench", "--render", str(RESULT), "-o", form).stdout.split())
    assert "the median over the rounds of the peer's time over ours in one round" in shown


def test_bench_lets_the_batch_follow_from_the_tokens() -> None:
    done = run(*BENCH, "--len-q", "8,16", "--tokens", "32", "--mask", "full", "-o", "json")
    rows = json.loads(done.stdout)["rows"]
    assert [(row["len_q"], row["batch"]) for row in rows] == [(8, 4), (16, 2)]


@pytest.mark.parametrize("form", ["table", "md", "jsonl", "csv"])
def test_bench_answers_in_every_form(form: str) -> None:
    done = run(*BENCH, "--mask", "causal", "-o", form)
    assert done.exit_code == 0, done.output
    assert "causal" in done.stdout
    if form == "jsonl":
        assert [json.loads(line)["mask"] for line in done.stdout.splitlines()] == ["causal"]
    if form == "csv":
        assert len(done.stdout.splitlines()) == 2


def test_bench_saves_and_renders_results(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    first = run(*BENCH, "--mask", "causal", "--save", str(path), "-o", "md")
    assert first.exit_code == 0, first.output
    again = run("bench", "--render", str(path), "-o", "md")
    assert again.stdout == first.stdout
    assert set(json.loads(path.read_text())) == {"env", "rows"}


def test_a_wrong_result_of_ours_fails_the_bench(monkeypatch) -> None:
    from cupyflash import _cpu

    monkeypatch.setattr(_cpu, "attention", lambda q, k, v, out, lse, **_: out.fill(3))
    done = run(*BENCH, "--mask", "causal", "-o", "json")
    assert done.exit_code == 1
    assert "wrong:" in done.stderr
    assert json.loads(done.stdout)["rows"][0]["kernel_us"] is None


def script(name: str) -> Any:
    """Load a script of ``bench/`` as a module."""
    path = Path(__file__).resolve().parents[1] / "bench" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"bench_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_scripts_of_bench_write_and_print_a_results_file(monkeypatch, tmp_path: Path) -> None:
    case = Case("fp32", 1, 16, 16, 1, 1, 8, 8, "causal")
    monkeypatch.setattr(sweep, "named", lambda name: (Group((case,), (), "cpu"),))
    words = ["cpu", "--rounds", "1", "--turn", "0.0001", "--out", str(tmp_path)]
    done = CliRunner().invoke(script("run").main, [*words, "--commit", "abc"])
    assert done.exit_code == 0, done.output
    (path,) = tmp_path.glob("*-cpu.json")
    document = json.loads(path.read_text())
    assert document["env"]["commit"] == "abc"
    assert {row["suite"] for row in document["rows"]} == {"cpu"}
    shown = CliRunner().invoke(script("table").main, [str(path)])
    assert path.name in shown.stdout
    assert "| fwd | fp32 | 1 | 16 | 1 | 8 | causal |" in shown.stdout
