"""The examples, as a user runs them on a CPU."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
# Twenty steps in fp32 leave losses apart by some 2^-24; a gradient that is wrong by a percent moves
# them by more than this.
APART = 1e-5


@pytest.mark.frameworks
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_training_follows_the_frameworks_own_attention(framework: str) -> None:
    pytest.importorskip(framework)
    done = subprocess.run(
        [sys.executable, EXAMPLES / f"char_transformer_{framework}.py", "--smoke"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = re.search(r"apart by at most (\S+)", done.stdout)
    assert found, done.stdout
    assert float(found[1]) < APART
    first, *_, before, last = map(float, re.findall(r"ours step +\d+ loss ([\d.]+)", done.stdout))
    assert (before + last) / 2 < first - 0.8, "it learns which characters are frequent"
