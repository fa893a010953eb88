"""Units to cubins: keys, NVRTC's log, architectures, and what is said when something is missing."""

import shutil
import struct
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny import HEADER, UNIT, Tiny

from cupyflash import _jit, _nvrtc
from cupyflash.errors import CompileFailed, DeviceUnavailable, InvalidArgument, UnsupportedProblem

pytest.importorskip("cupy", reason="needs CuPy and NVRTC")

# One process's view of one compile


def test_a_unit_becomes_a_whole_cubin_with_its_resources(tiny: Tiny) -> None:
    cubin = tiny.compile()
    assert cubin[1:4] == ("add", "sm_80", "")
    image = cubin.path.read_bytes()
    (headers,), (count,) = struct.unpack_from("<Q", image, 32), struct.unpack_from("<H", image, 56)
    assert len(image) == headers + 56 * count  # to the last byte of the last program header
    assert image.startswith(b"\x7fELF")
    assert b"add" in image
    resources = cubin.resources
    assert 0 < resources.registers <= 255
    assert resources[1:5] == (0, 0, 0, 0)
    assert resources.seconds > 0
    assert resources.nvrtc_version == _jit.nvrtc_version()
    folder = cubin.path.parent
    assert folder.parent == tiny.cache
    assert folder.name.startswith("add-")
    assert {path.name for path in folder.iterdir()} == {
        "unit.cu",
        "kernel.cubin",
        "log.txt",
        "meta.json",
    }
    assert (folder / "unit.cu").read_text() == UNIT


def test_the_last_byte_of_a_cubin_is_restored_once(tiny: Tiny) -> None:
    image = tiny.compile().path.read_bytes()
    assert _nvrtc._whole(image[:-1]) == image
    assert _nvrtc._whole(image) == image


def test_the_same_unit_is_compiled_once(tiny: Tiny) -> None:
    first = tiny.compile()
    assert tiny.compile() == first
    assert len(tiny.runs) == 1


def test_every_part_of_the_key_counts(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = {tiny.compile().path, tiny.compile("sm_90").path, tiny.compile("sm_90a").path}
    paths.add(_jit.compile(UNIT + "// a remark\n", "add", "sm_80").path)
    monkeypatch.setattr(_jit, "SCHEMA", _jit.SCHEMA + 1)
    paths.add(tiny.compile().path)
    monkeypatch.setattr(_nvrtc, "nvrtc_version", lambda: "99.0")
    monkeypatch.setattr(_jit, "nvrtc_version", lambda: "99.0")
    paths.add(tiny.compile().path)
    assert len(paths) == len(tiny.runs) == 6


def test_debug_adds_line_information_to_another_entry(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = tiny.compile()
    monkeypatch.setenv("CUPYFLASH_DEBUG", "1")
    debug = tiny.compile()
    assert b".debug_line" in debug.path.read_bytes()
    assert b".debug_line" not in plain.path.read_bytes()
    monkeypatch.setenv("CUPYFLASH_DEBUG", "0")
    assert tiny.compile().path == plain.path


@pytest.mark.parametrize("name", ["device.cuh", "tile/step.cuh", "kernels/add.cu"])
def test_an_edit_of_any_source_recompiles(tiny: Tiny, name: str) -> None:
    before, digest = tiny.compile(), _jit.digest()
    path = tiny.cuda / name
    path.write_text(path.read_text() + "// edited\n")
    assert _jit.digest() != digest
    assert tiny.compile().path != before.path
    path.write_text(path.read_text().replace("// edited\n", ""))
    assert tiny.compile().path == before.path
    assert len(tiny.runs) == 2


def test_an_edit_changes_what_is_compiled(tiny: Tiny) -> None:
    before = tiny.compile().path.read_bytes()
    (tiny.cuda / "tile/step.cuh").write_text(HEADER.replace("1", "2"))
    assert tiny.compile().path.read_bytes() != before


def test_only_the_text_of_sources_counts(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = tiny.compile()
    (tiny.cuda / "README.md").write_text("edited")
    copy = shutil.copytree(tiny.cuda, tmp_path / "elsewhere")
    crlf = (copy / "device.cuh").read_bytes().replace(b"\n", b"\r\n")
    (copy / "device.cuh").write_bytes(crlf)
    monkeypatch.setenv("CUPYFLASH_CUDA_DIR", str(copy))
    assert tiny.compile() == before
    assert len(tiny.runs) == 1
    assert set(_jit.sources()) == {"device.cuh", "tile/step.cuh", "kernels/add.cu"}


def test_the_sources_of_the_package_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUPYFLASH_CUDA_DIR", raising=False)
    files = _jit.sources()
    assert "device.cuh" in files
    assert any(name.startswith("kernels/") for name in files)


def test_a_folder_without_sources_is_refused(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUPYFLASH_CUDA_DIR", str(tmp_path))
    with pytest.raises(InvalidArgument, match=r"`CUPYFLASH_CUDA_DIR` must be .* got "):
        tiny.compile()


def test_the_working_directory_is_not_searched(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stray.cuh").write_text("")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CompileFailed, match=r"stray\.cuh"):
        _jit.compile('#include "stray.cuh"\n' + UNIT, "add", "sm_80")


def test_text_beyond_ascii_compiles(tiny: Tiny) -> None:
    cubin = _jit.compile("// é, 注意, \N{GREEK SMALL LETTER SIGMA}\n" + UNIT, "add", "sm_80")
    assert cubin.log == ""


# What NVRTC says


def test_resources_add_up_what_ptxas_reports(tiny: Tiny) -> None:
    unit = """
__device__ __noinline__ float gather(float *x, int n) {
  float w[300];
  for (int i = 0; i < n; i++) w[i * 7 % 300] = x[i];
  return w[n] + w[n / 2];
}
extern "C" __global__ void small(float *x) { x[0] = 1; }
extern "C" __global__ void __launch_bounds__(1024, 2) big(float *x, int n) {
  __shared__ float s[256];
  s[threadIdx.x % 256] = x[threadIdx.x];
  __syncthreads();
  float w[128];
  for (int j = 0; j < n; j++) {
#pragma unroll
    for (int i = 0; i < 128; i++) w[i] = (j ? w[i] : 0) * x[i * 77 + j] + x[i * 3 + j];
  }
  for (int i = 0; i < 128; i++) x[threadIdx.x + i] = w[i] + gather(x, n) + s[n];
}
"""
    resources = _jit.compile(unit, "big", "sm_80").resources
    assert resources.registers == 32
    assert resources.shared == 1024
    assert resources.stack >= 1200
    assert resources.spill_stores > 0
    assert resources.spill_loads > 0


@pytest.mark.parametrize(
    ("text", "remark"),
    [
        ("#pragma unrol\n", "#161-D"),
        ("__device__ inline void unused() { int z; }\n", "#177-D"),
    ],
)
def test_warnings_are_in_the_log_and_only_they(tiny: Tiny, text: str, remark: str) -> None:
    cubin = _jit.compile(text + UNIT, "add", "sm_80")
    assert remark in cubin.log
    assert "unit.cu(1)" in cubin.log
    assert "ptxas" not in cubin.log
    assert tiny.compile().log == ""


def test_serialised_wgmma_is_in_the_log(tiny: Tiny) -> None:
    unit = """
__device__ void gemm(float (&d)[4], unsigned long long a) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, 1, 0;"
               "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16"
               "{%0,%1,%2,%3}, %4, %4, p, 1, 1, 0, 0; }"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(a));
}
extern "C" __global__ void serial(float *x, unsigned long long a) {
  float d[4] = {0, 0, 0, 0};
  asm volatile("wgmma.fence.sync.aligned;");
  gemm(d, a);
  d[0] += 1;
  gemm(d, a);
  asm volatile("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;");
  for (int i = 0; i < 4; i++) x[threadIdx.x * 4 + i] = d[i];
}
"""
    cubin = _jit.compile(unit, "serial", "sm_90a")
    assert "(C75" in cubin.log
    assert "Used" not in cubin.log
    assert cubin.resources.registers > 0


def test_a_broken_unit_names_the_log_and_keeps_the_unit(tiny: Tiny) -> None:
    (tiny.cuda / "tile/step.cuh").write_text("int STEP = oops;\n")
    for _ in range(2):  # a failure is not remembered
        with pytest.raises(
            CompileFailed, match=r'tile/step\.cuh\(1\): error: identifier "oops"'
        ) as e:
            tiny.compile()
    assert len(tiny.runs) == 2
    (kept,) = tiny.cache.glob("*.failed")
    assert str(kept / "unit.cu") in str(e.value)
    assert (kept / "unit.cu").read_text() == UNIT
    assert "oops" in (kept / "log.txt").read_text()
    assert _jit.cache_entries() == []
    (tiny.cuda / "tile/step.cuh").write_text(HEADER)
    assert tiny.compile().log == ""


def test_a_unit_without_its_kernel_is_refused(tiny: Tiny) -> None:
    with pytest.raises(CompileFailed, match=r"`sub` is not among its kernels"):
        _jit.compile(UNIT, "sub", "sm_80")


# Architectures and missing software


@pytest.mark.parametrize(
    ("arch", "said"),
    [
        ("sm_99", "compute capability 9.9 is unknown to NVRTC"),
        ("sm_999", "compute capability 99.9 is unknown to NVRTC"),
        ("sm_75", "compute capability 7.5 is too old"),
    ],
)
def test_an_unfit_architecture_gets_a_sentence(tiny: Tiny, arch: str, said: str) -> None:
    with pytest.raises(UnsupportedProblem) as caught:
        tiny.compile(arch)
    message = str(caught.value)
    assert said in message
    assert f"NVRTC {_jit.nvrtc_version()}" in message
    assert "8.0, 8.6" in message
    assert "7.5," not in message
    assert "\n" not in message
    assert tiny.runs == []


@pytest.mark.parametrize("arch", ["90", "compute_90", "sm_90x", "", "sm_9"])
def test_a_misspelt_architecture_is_refused(tiny: Tiny, arch: str) -> None:
    with pytest.raises(InvalidArgument, match="`arch` must be like"):
        tiny.compile(arch)


def test_supported_architectures_start_at_ampere() -> None:
    archs = _jit.supported_archs()
    assert archs == tuple(sorted(archs))
    assert archs[0] == 80
    assert {80, 86, 89, 90} <= set(archs)


def test_missing_cupy_says_what_to_install(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(DeviceUnavailable, match=r'pip install "cupyflash\[cuda13\]"'):
        tiny.compile()


def test_missing_nvrtc_says_what_to_install(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    import cupy

    def no_library() -> None:
        raise RuntimeError("libnvrtc.so not found")

    monkeypatch.setattr(cupy.cuda, "nvrtc", SimpleNamespace(getVersion=no_library))
    with pytest.raises(DeviceUnavailable, match=r'not found.*pip install "cupyflash\[cuda13\]"'):
        tiny.compile()
