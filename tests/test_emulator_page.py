"""The examples of docs/emulator.md run as they are printed."""

import re
from pathlib import Path

import pytest
from emulated import needs_compiler

PAGE = Path(__file__).resolve().parents[1] / "docs" / "emulator.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)


@needs_compiler
@pytest.mark.parametrize("code", EXAMPLES, ids=["attention", "kernel"])
def test_example_runs(code: str) -> None:
    exec(compile(code, PAGE.name, "exec"), {"__name__": "example"})
