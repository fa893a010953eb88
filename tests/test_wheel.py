"""The wheel and the sdist: what they hold; the installed wheel computes attention elsewhere."""

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import cupyflash

ROOT = Path(__file__).resolve().parents[1]

pytest.importorskip("hatchling", reason="the build backend is in the test group")
pytest.importorskip("pip")

ATTENTION = """
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np

import cupyflash

assert Path(cupyflash.__file__).is_relative_to(sys.prefix), cupyflash.__file__
assert version("cupyflash") == cupyflash.__version__
rng = np.random.default_rng(1)
q, k, v = (rng.standard_normal((2, 37, 4, 16)).astype(np.float32) for _ in range(3))
out, lse = cupyflash.attention(q, k, v, causal=True, return_lse=True)
ref, ref_lse = cupyflash.reference.attention(q, k, v, causal=True)
print(max(np.abs(out - ref).max(), np.abs(lse - ref_lse).max()))
"""

SOURCES = """
from pathlib import Path

import cupyflash
from cupyflash import _jit

print(Path(cupyflash.__file__).parent)
print(*sorted(_jit.sources()), sep="\\n")
"""


def run(*command: str | Path, cwd: Path = ROOT, **environment: str) -> str:
    """Run a command and return its standard output; a failure shows what it printed."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    inherited.pop("CUPYFLASH_CUDA_DIR", None)
    done = subprocess.run(
        [*map(str, command)],
        capture_output=True, text=True, check=False, cwd=cwd, env={**inherited, **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(root: Path, target: str, folder: Path) -> Path:
    """Build one artifact of the project at ``root``; there is exactly one."""
    run(sys.executable, "-m", "hatchling", "build", "-t", target, "-d", folder, cwd=root)
    (artifact,) = folder.iterdir()
    return artifact


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from this tree."""
    return build(ROOT, "wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter of a new environment that holds the wheel and borrows its dependencies."""
    home = tmp_path_factory.mktemp("a new home") / "env"
    venv.create(home, with_pip=False, symlinks=os.name != "nt")
    scripts = home / ("Scripts" if os.name == "nt" else "bin")
    python = scripts / "python"
    run(
        sys.executable, "-m", "pip", "--python", python, "install",
        "--quiet", "--no-deps", "--no-index", "--disable-pip-version-check", wheel,
    )  # fmt: skip
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    # A folder named in a .pth file lends its packages; its own .pth files are not read, and so
    # the editable install stays out.
    (Path(site) / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return python


def package_files() -> set[str]:
    """What the wheel must hold, named as in it."""
    package = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "cupyflash").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    cuda = {
        f"cupyflash/{path.relative_to(ROOT).as_posix()}"
        for path in (ROOT / "cuda").rglob("*")
        if path.is_file()
    }
    return package | cuda


def test_wheel_holds_the_package_and_the_sources_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
        metadata = archive.read(f"cupyflash-{cupyflash.__version__}.dist-info/METADATA").decode()
    assert len(names) == len(set(names))
    assert {name for name in names if ".dist-info/" not in name} == package_files()
    assert "cupyflash/py.typed" in names
    assert "cupyflash/cuda/kernels/attention_fwd_sm80.cu" in names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert not [name for name in names if name.endswith(".py") and "/cuda/" in name]
    assert wheel.name.endswith("-py3-none-any.whl")
    assert wheel.stat().st_size < 2**20
    base = [
        line for line in metadata.splitlines()
        if line.startswith("Requires-Dist:") and "extra ==" not in line
    ]  # fmt: skip
    assert not [line for line in base if "cupy" in line or "torch" in line or "jax" in line]


def test_sdist_is_enough_to_build_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    sdist = build(ROOT, "sdist", tmp_path / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (root,) = (path for path in tmp_path.iterdir() if path.name.startswith("cupyflash-"))
    for name in (
        "LICENSE",
        "README.md",
        "CHANGELOG.md",
        "Makefile",
        "tests/conftest.py",
        "docs/design.md",
    ):
        assert (root / name).is_file(), f"the sdist lacks {name}"
    again = build(root, "wheel", tmp_path / "wheel")
    with zipfile.ZipFile(wheel) as first, zipfile.ZipFile(again) as second:
        assert sorted(first.namelist()) == sorted(second.namelist())


def test_installed_wheel_computes_attention_from_another_directory(
    installed: Path, tmp_path: Path
) -> None:
    assert float(run(installed, "-c", ATTENTION, cwd=tmp_path)) < 1e-5


def test_installed_wheel_reads_its_own_cuda_sources(installed: Path, tmp_path: Path) -> None:
    package, *names = run(installed, "-c", SOURCES, cwd=tmp_path).splitlines()
    expected = {
        path.relative_to(ROOT / "cuda").as_posix() for path in (ROOT / "cuda").rglob("*.cu*")
    }
    assert set(names) >= expected
    assert not Path(package).is_relative_to(ROOT)


def test_installed_wheel_brings_the_command(installed: Path, tmp_path: Path) -> None:
    command = installed.parent / "cupyflash"
    assert cupyflash.__version__ in run(command, "--version", cwd=tmp_path)
