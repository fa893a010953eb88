"""The emulator itself: how it is asked for, built and read, what it counts and what it reports."""

import ctypes
import itertools
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import Case
from emulated import arrays, needs_compiler, run, tiny
from harness import GPU_KERNEL, same_bits

import cupyflash
from cupyflash import _cache, _emulator, _jit, _kernels, _launch
from cupyflash._array import HOST, Array
from cupyflash._emulator import build, device
from cupyflash._emulator.memory import Memory
from cupyflash._emulator.stats import COUNTED
from cupyflash._launch import Launch
from cupyflash.masks import Band

ROOT = Path(__file__).resolve().parents[1]


# How it is asked for


def test_without_a_compiler_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    build.compiler.cache_clear()
    with (
        pytest.raises(cupyflash.DeviceUnavailable, match=r"with g\+\+, which is not on the PATH"),
        cupyflash.emulate(),
    ):
        pass
    monkeypatch.undo()
    build.compiler.cache_clear()


@needs_compiler
def test_it_is_on_only_inside_and_inside_of_its_thread() -> None:
    q, k, v = arrays(1, 3, 1, 16)
    names: list[str] = []

    def refused() -> None:
        with pytest.raises(cupyflash.UnsupportedProblem, match="takes arrays on a GPU"):
            cupyflash.attention(q, k, v, kernel=GPU_KERNEL)
        names.append("refused")

    refused()
    with cupyflash.emulate():
        thread = threading.Thread(target=refused)
        thread.start()
        thread.join()
    refused()
    assert names == ["refused"] * 3


@needs_compiler
def test_sessions_nest_and_count_their_own_launches() -> None:
    q, k, v = arrays(1, 3, 1, 16)
    with cupyflash.emulate() as outer:
        cupyflash.attention(q, k, v, kernel=GPU_KERNEL)
        with cupyflash.emulate(seed=2) as inner:
            cupyflash.attention(q, k, v, kernel=GPU_KERNEL)
            cupyflash.attention(q, k, v, kernel=GPU_KERNEL)
        cupyflash.attention(q, k, v, kernel=GPU_KERNEL)
    assert outer.stats[GPU_KERNEL].launches == inner.stats[GPU_KERNEL].launches == 2
    assert outer.stats[GPU_KERNEL].mma == inner.stats[GPU_KERNEL].mma > 0


@needs_compiler
def test_kernels_of_the_host_are_taken_where_they_are_named() -> None:
    q, k, v = arrays(1, 3, 1, 16)
    with cupyflash.emulate() as session:
        for name in ("cpu", "reference"):
            inside = cupyflash.attention(q, k, v, kernel=name)
            assert same_bits(inside, run(q, k, v, kernel=name)[0])
    assert session.stats == {}


@needs_compiler
def test_what_no_kernel_takes_is_refused_with_every_reason() -> None:
    q, k, v = arrays(1, 3, 1, 16)
    with cupyflash.emulate():
        with pytest.raises(cupyflash.UnsupportedProblem, match="head_dim <= 256, got 257"):
            cupyflash.attention(*(np.zeros((1, 3, 1, 257), np.float16) for _ in "qkv"))
        with pytest.raises(cupyflash.UnsupportedProblem, match="got float64"):
            cupyflash.attention(*(x.astype(np.float64) for x in (q, k, v)))
    with (
        cupyflash.emulate(arch=75),
        pytest.raises(cupyflash.UnsupportedProblem, match=r"needs compute capability 8\.0"),
    ):
        cupyflash.attention(q, k, v, kernel=GPU_KERNEL)


@needs_compiler
@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_seed_has_64_bits(seed: int) -> None:
    with (
        pytest.raises(cupyflash.InvalidArgument, match="`seed` must be from 0"),
        cupyflash.emulate(seed=seed),
    ):
        pass


@needs_compiler
def test_an_address_that_a_gpu_refuses_is_refused() -> None:
    q, k, v = arrays(1, 3, 1, 16)
    storage = np.zeros(q.nbytes + 1, np.uint8)
    odd = storage[1:].view(q.dtype).reshape(q.shape)
    with cupyflash.emulate(), pytest.raises(cupyflash.InvalidArgument, match="pass an aligned"):
        cupyflash.attention(odd, k, v, kernel=GPU_KERNEL)


# That it runs what a GPU runs


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """What the emulator is given to run, which it then runs."""
    seen: list[Launch] = []

    def spy(launch: Launch, seed: int) -> _emulator.Stats:
        seen.append(launch)
        return _emulator.run(launch, seed)

    monkeypatch.setattr(device, "run", spy)
    return seen


@needs_compiler
def test_unit_grid_and_params_are_those_of_a_gpu(launches: list[Launch]) -> None:
    case = Case(70, 90, 40, 24, "float16", 3, 4, 2, causal=True)
    q, k, v = (x.host for x in case.arrays())
    cases = {"q": q, "k": k, "v": v}
    with cupyflash.emulate(arch=86):
        cupyflash.attention(q, k, v, kernel=GPU_KERNEL, **case.options)
    (launch,) = launches
    sizes = {"batch": 3, "len_q": 70, "len_k": 90, "heads_q": 4, "heads_k": 2}
    expected = cupyflash.explain(
        **sizes, head_dim=40, head_dim_v=24, dtype="float16", arch=86, causal=True
    ).launch
    assert launch.unit == expected.unit
    assert (launch.grid, launch.block, launch.shared_bytes, launch.arch) == (
        expected.grid, expected.block, expected.shared_bytes, "sm_86"
    )  # fmt: skip
    pointers = _launch.POINTERS
    assert launch.params[pointers.size :] == expected.params[pointers.size :]
    for x, pointer in zip(cases.values(), pointers.unpack_from(launch.params), strict=False):
        assert pointer % 16 == x.__array_interface__["data"][0] % 16


@needs_compiler
def test_nothing_is_launched_where_there_is_no_block(launches: list[Launch]) -> None:
    q, k, v = arrays(1, 3, 1, 16)
    with cupyflash.emulate() as session:
        assert cupyflash.attention(q[:, :0], k, v, kernel=GPU_KERNEL).shape == (1, 0, 1, 16)
    assert launches == []
    assert session.stats == {}


# Guarded memory


@needs_compiler
@pytest.mark.parametrize("name", ["k", "out"])
def test_a_write_beside_the_output_is_reported(name: str) -> None:
    rows = np.zeros((2, 8), np.float32)[:, :4]  # between two rows there are 16 bytes
    array = Array(rows.ctypes.data, (2, 4), (8, 1), "float32", HOST, "numpy", False, rows)
    with Memory(build.runtime()) as memory:
        twin = (memory.written if name == "out" else memory.read)(name, array)
        memory.collect()
        ctypes.memset(twin.pointer + (16 if name == "out" else 3), 1, 2)
        with pytest.raises(cupyflash.KernelFault, match=rf"^2 bytes were written .* `{name}`"):
            memory.collect()


@needs_compiler
def test_a_twin_spans_the_bytes_of_its_array_and_holds_its_values() -> None:
    storage = np.arange(200, dtype=np.float16)
    view = np.lib.stride_tricks.as_strided(storage[13:], (3, 4, 2), (-8 + 40, 0, 2))
    array = Array(view.ctypes.data, (3, 4, 2), (16, 0, 1), "float16", HOST, "numpy", False, view)
    with Memory(build.runtime()) as memory:
        twin = memory.read("q", array)
        assert twin.pointer % 16 == view.ctypes.data % 16
        assert (twin.shape, twin.strides) == (array.shape, array.strides)
        at = (ctypes.c_uint16 * 34).from_address(twin.pointer)
        values = np.frombuffer(at, np.float16)
        assert (values[[0, 1, 16, 17, 32, 33]] == view[:, 0].ravel()).all()
        assert np.isnan(values[2:16]).all()
        assert np.isnan(values[18:32]).all()


# What it counts


def tile_rows(band: Band, case: Case, begin: int, rows: int, block_k: int) -> tuple[int, int]:
    """Return the key blocks that rows of Q see, and how many keys these blocks hold."""
    first, end = band.keys(begin, min(begin + rows, case.len_q), case.len_q, case.len_k)
    if end <= first:
        return 0, 0
    low, high = first // block_k, (end - 1) // block_k
    return high - low + 1, min((high + 1) * block_k, case.len_k) - low * block_k


BANDS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (70, 20)},
    "top left": {"window_size": (-1, 0), "alignment": "top_left"},
}


@needs_compiler
@pytest.mark.parametrize("name", BANDS)
@pytest.mark.parametrize(("dim", "dtype"), [(64, "float16"), (128, "bfloat16"), (64, "float32")])
def test_the_counters_obey_the_formulas(name: str, dim: int, dtype: str) -> None:
    case = Case(251, 300, dim, dim, dtype, 1, 4, 2, **BANDS[name])
    q, k, v = (x.host for x in case.arrays())
    sizes = {"len_q": 251, "len_k": 300, "heads_q": 4, "heads_k": 2, "head_dim": dim}
    config = cupyflash.explain(**sizes, dtype=dtype, kernel=GPU_KERNEL, **BANDS[name]).config
    block_q, block_k = config["warps"] * config["m_tiles"] * 16, config["block_k"]
    warp_q, itemsize = config["m_tiles"] * 16, q.itemsize
    band = Band.of(case.causal, case.window_size, case.alignment)

    with cupyflash.emulate() as session:
        cupyflash.attention(q, k, v, kernel=GPU_KERNEL, **case.options)
    stats = session.stats[GPU_KERNEL]

    assert stats.global_written_bytes == 4 * 251 * dim * itemsize
    tiles = [tile_rows(band, case, i, block_q, block_k) for i in range(0, 251, block_q)]
    blocks, keys = (4 * sum(part) for part in zip(*tiles, strict=True))
    assert stats.blocks == 4 * len(tiles)
    assert stats.global_read_bytes == (4 * 251 + 2 * keys) * dim * itemsize
    loaded = stats.blocks * block_q + 2 * blocks * block_k
    assert stats.tiles_loaded_bytes == loaded * dim * itemsize

    seen = [tile_rows(band, case, i, warp_q, block_k)[0] for i in range(0, 251, warp_q)]
    products = 6 if dtype == "float32" else 1  # of bfloat16 planes
    one = 2 * (warp_q // 16) * (block_k // 8) * (dim // 16) * products  # S = Q K^T and P V
    assert stats.mma == 4 * sum(seen) * one
    if name in ("causal", "window") and len(tiles) > 1:  # the masks save what they should
        full = 4 * len(tiles) * -(-300 // block_k)
        assert blocks < 0.9 * full


@needs_compiler
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("dims", [(1, 1), (7, 5), (2, 6), (20, 12), (33, 40)], ids=str)
def test_accesses_of_any_width_are_counted(dims: tuple[int, int], dtype: str) -> None:
    """One tile of queries reads each array once, whatever instructions its rows allow."""
    case = Case(33, 40, *dims, dtype, 2, 4, 2, window_size=(20, 3))
    q, k, v = (x.host for x in case.arrays())
    with cupyflash.emulate() as session:
        out, lse = cupyflash.attention(q, k, v, kernel=GPU_KERNEL, return_lse=True, **case.options)
    stats = session.stats[GPU_KERNEL]
    assert stats.global_read_bytes == q.nbytes + 2 * (k.nbytes + v.nbytes)  # by two heads of Q
    assert stats.global_written_bytes == out.nbytes + lse.nbytes


@needs_compiler
def test_a_window_reads_no_more_of_longer_sequences() -> None:
    """Per query: the IO of a window does not depend on the length, that of full attention does."""
    read = {}
    for options in ({}, {"window_size": (30, 0)}):
        for length in (256, 512):
            q, k, v = arrays(1, length, 1, 16)
            with cupyflash.emulate() as session:
                cupyflash.attention(q, k, v, kernel=GPU_KERNEL, **options)
            read[bool(options), length] = session.stats[GPU_KERNEL].global_read_bytes / length
    assert read[True, 512] <= 1.1 * read[True, 256]
    assert read[False, 512] > 1.5 * read[False, 256]


def test_the_counters_are_those_of_the_runtime() -> None:
    header = (build.TWINS / "abi.h").read_text("utf-8")
    body = re.search(r"struct EmuStats \{(.*?)\};", header, re.S)[1]
    names = re.findall(r"unsigned long long (\w+);", body)
    assert tuple(names) == COUNTED


# Seeds


@needs_compiler
def test_a_seed_repeats_all_that_happens_and_another_changes_the_order() -> None:
    q, k, v = arrays(1, 150, 2, 32)
    seen = []
    for seed in (5, 5, 6, 7):
        with cupyflash.emulate(seed=seed) as session:
            out = cupyflash.attention(q, k, v, kernel=GPU_KERNEL, causal=True)
        seen.append((out.tobytes(), session.stats[GPU_KERNEL]))
    assert seen[0] == seen[1]
    assert len({out for out, _ in seen}) == 1
    assert len({stats.switches for _, stats in seen}) > 1


@needs_compiler
def test_threads_may_emulate_at_once() -> None:
    q, k, v = arrays(1, 40, 2, 16)
    expected = run(q, k, v)
    results: list[Any] = [None] * 4

    def work(i: int) -> None:
        results[i] = run(q, k, v, seed=i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        assert same_bits(result[0], expected[0])


# The build


@needs_compiler
def test_an_edit_of_what_a_unit_includes_is_compiled_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(ROOT / "cuda", tmp_path / "cuda")
    softmax, other = (tmp_path / "cuda" / "tile" / f"{name}.cuh" for name in ("softmax", "ring"))
    softmax.write_text(f"{softmax.read_text()}// of this test\n")
    monkeypatch.setenv("CUPYFLASH_CUDA_DIR", str(tmp_path / "cuda"))
    build.runtime()
    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", str(tmp_path / "cache"))
    q, k, v = arrays(1, 3, 1, 16)
    right = run(q, k, v)
    again = run(q, k, v)
    assert same_bits(right[0], again[0])
    other.write_text(f"{other.read_text()}// which this kernel has no use for\n")
    assert same_bits(right[0], run(q, k, v)[0])
    assert len(_cache.entries()) == 1
    softmax.write_text(softmax.read_text().replace("ptx::lg2(", "2 * ptx::lg2("))
    wrong = run(q, k, v)
    assert len(_cache.entries()) == 2
    assert not same_bits(wrong[1], right[1])
    assert _jit.cache_entries() == [], "these are no cubins"


@needs_compiler
def test_a_source_that_does_not_compile_is_kept_with_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build.runtime()
    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(cupyflash.CompileFailed, match="nonsense") as caught:
        _emulator.run(tiny("nonsense;", b""), 0)
    (kept,) = (tmp_path / "cache").glob("*.failed")
    assert str(kept) in str(caught.value)
    assert "nonsense" in (kept / "unit.cpp").read_text()


@needs_compiler
def test_no_path_of_this_machine_is_in_a_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build.runtime()
    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(AssertionError, match="Params of 24 bytes, 3 were packed"):
        _emulator.run(tiny("", b"abc"), 0)
    (entry,) = _cache.entries()
    library = entry.files[build.LIBRARY]
    for path in (ROOT, tmp_path, Path.home(), Path("/tmp/")):
        assert str(path).encode() + b"/" not in library
    assert b"unit.cpp" in library


def test_importing_the_package_brings_no_emulator() -> None:
    code = "import cupyflash, sys; print('cupyflash._emulator' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == "False"


# The twins of cuda/ptx

Signature = tuple[str, str, tuple[str, ...]]  # template, return type and name, parameters


def signatures(path: Path) -> list[Signature]:
    """Return the functions that a header of ptx/ defines for kernels, also by its own macros."""
    own = re.sub(r"#(include|pragma) [^\n]*", "", path.read_text(encoding="utf-8"))
    text = subprocess.run(
        [build.compiler().path, "-E", "-P", "-x", "c++", "-"],
        input=own, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    found = []
    for match in re.finditer(r"(?:template\s*<([^>]*)>\s*)?\bDEVICE\s+([^(;{]+)\(", text):
        end, depth, parameters = match.end(), 1, [""]
        while depth:
            letter = text[end]
            depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(letter, 0)
            if letter == "," and depth == 1:
                parameters.append("")
            elif depth:
                parameters[-1] += letter
            end += 1
        plain = tuple(" ".join(parameter.split()) for parameter in parameters if parameter.strip())
        found.append((" ".join((match[1] or "").split()), " ".join(match[2].split()), plain))
    return found


def without_place(twin: Signature) -> Signature:
    """Return what a caller of a twin writes: the last parameter, the line, has a default."""
    template, name, parameters = twin
    place = parameters[-1:] and re.fullmatch(
        r"emu::Loc( loc)? = emu::Loc::here\(\)", parameters[-1]
    )
    return template, name, parameters[:-1] if place else parameters


HEADERS = sorted((ROOT / "cuda" / "ptx").glob("*.cuh"))


@needs_compiler
@pytest.mark.parametrize("header", HEADERS, ids=lambda path: path.name)
def test_every_instruction_has_a_twin_of_its_signature(header: Path) -> None:
    real = signatures(header)
    assert real
    twins = [without_place(twin) for twin in signatures(build.TWINS / "ptx" / header.name)]
    assert sorted(twins) == sorted(real)


@needs_compiler
def test_wgmma_has_every_width_with_either_a() -> None:
    header = ROOT / "cuda" / "ptx" / "wgmma_shapes.cuh"
    found = []
    for _, name, (d, a, *_) in signatures(header):
        columns = re.fullmatch(r"float ?\(&d\)\[(\d+) / 2\]", d)
        assert columns, d
        found.append((name.removeprefix("void wgmma_"), int(columns[1]), "[4]" in a))
    kinds = ("bf16", "f16", "e4m3", "e5m2", "e4m3_e5m2")
    every = itertools.product(kinds, range(16, 257, 16), (False, True))
    assert sorted(found) == sorted(every)


def test_a_rows_launch_takes_what_the_emulator_gives() -> None:
    """Every row of a GPU has a launch, and its configuration names what `check --emulate` reads."""
    for kernel in _kernels.KERNELS:
        launches = kernel.launch if kernel.op == "forward" else kernel.steps
        assert (launches is None) == (kernel.arch is None)
        assert (kernel.config is None) == (kernel.arch is None)
