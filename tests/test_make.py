"""The Makefile refuses what would leave a broken environment behind."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize("given", [True, False])
def test_no_environment_is_made_with_an_old_python(tmp_path: Path, given: bool) -> None:
    old = tmp_path / "old-python"
    old.write_text("#!/bin/sh\nexit 1\n")  # to the question whether it is new enough
    old.chmod(0o755)
    venv, python = tmp_path / "venv", old if given else ""
    done = subprocess.run(
        ["make", "check", f"VENV={venv}", f"PYTHON={python}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert f"Python 3.11 or newer is needed, and '{python}' is none" in done.stderr
    assert not venv.exists()
