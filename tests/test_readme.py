"""The README's Python examples run as they are printed; links between documents lead somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")

MARKS = {
    "cupy": [pytest.mark.gpu],
    "torch": [pytest.mark.frameworks],
    "jax": [pytest.mark.frameworks],
    "numpy": [],
}


def framework_of(code: str) -> str:
    """The framework that an example is about: the first of these that it imports."""
    return next(name for name in MARKS if re.search(rf"^import {name}\b", code, re.MULTILINE))


BLOCKS = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
EXAMPLES = [
    pytest.param(code, name, id=f"{number}-{name}", marks=MARKS[name])
    for number, code in enumerate(BLOCKS)
    for name in [framework_of(code)]
]


def test_each_framework_has_an_example() -> None:
    assert {example.values[1] for example in EXAMPLES} == set(MARKS)


@pytest.mark.parametrize(("code", "framework"), EXAMPLES)
def test_example_runs(code: str, framework: str) -> None:
    pytest.importorskip(framework)
    assert len(code.splitlines()) <= 12, "an example of the README is short"
    exec(compile(code, "README.md", "exec"), {"__name__": "example"})


@pytest.mark.parametrize(
    "document",
    sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("cuda/*.md")]),
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_links_lead_to_files(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        if "://" not in target:
            assert (document.parent / target).exists(), f"{document.name} links to {target}"
