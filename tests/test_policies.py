"""The policies of cuda/masks, compiled for the host, against their Python twins."""

import itertools
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from cupyflash.masks import Band

ROOT = Path(__file__).resolve().parents[1]
BLOCK = 3  # of policies.cpp
SIDES = (None, 0, 1, 4, 2**31 - 1)
LENGTHS = ((1, 1), (7, 7), (5, 11), (11, 5), (8, 1), (1, 8))
PROBLEMS = [
    (Band(left, right, alignment), len_q, len_k)
    for left, right in itertools.product(SIDES, SIDES)
    for alignment in ("bottom_right", "top_left")
    for len_q, len_k in LENGTHS
]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """What the C++ policy says to every problem."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a host compiler of C++20")
    program = tmp_path_factory.mktemp("policies") / "policies"
    source = ROOT / "tests" / "policies.cpp"
    subprocess.run(
        [compiler, "-std=c++20", "-Wall", "-Wextra", "-Werror", "-fsanitize=undefined",
         "-fno-sanitize-recover", "-I", ROOT / "cuda", source, "-o", program],
        check=True,
    )  # fmt: skip
    lines = [
        (int(band.left is not None), int(band.right is not None),
         *band.operands(len_q, len_k), len_q, len_k)
        for band, len_q, len_k in PROBLEMS
    ]  # fmt: skip
    text = "\n".join(" ".join(map(str, line)) for line in lines)
    done = subprocess.run([program], input=text, capture_output=True, text=True, check=True)
    return [[int(word) for word in line.split()] for line in done.stdout.splitlines()]


def test_every_question_is_answered_as_the_twin_would(answers: list[list[int]]) -> None:
    assert len(answers) == len(PROBLEMS)
    for (band, len_q, len_k), answer in zip(PROBLEMS, answers, strict=True):
        words = iter(answer)
        dense = band.dense(len_q, len_k)
        keep = np.fromiter(itertools.islice(words, dense.size), bool).reshape(dense.shape)
        np.testing.assert_array_equal(keep, dense, err_msg=f"keep of {band}, {len_q} x {len_k}")
        for q, k in itertools.product(range(0, len_q, BLOCK), range(0, len_k, BLOCK)):
            begin, end, first, last, whole = itertools.islice(words, 5)
            about = f"{band}, {len_q} x {len_k}, block ({q}, {k})"
            rows, columns = dense[q : q + BLOCK], dense[:, k : k + BLOCK]
            assert begin >= 0, about
            assert end <= len_k, about
            assert first >= 0, about
            assert last <= len_q, about
            assert_range(np.flatnonzero(rows.any(axis=0)), begin, end, f"keys of {about}")
            assert_range(np.flatnonzero(columns.any(axis=1)), first, last, f"queries of {about}")
            assert whole == rows[:, k : k + BLOCK].all(), f"whole of {about}"
        assert next(words, None) is None


def assert_range(seen: np.ndarray, begin: int, end: int, about: str) -> None:
    """Assert that a range is just as wide as what is seen; one that sees nothing is empty."""
    if seen.size:
        assert (begin, end) == (seen[0], seen[-1] + 1), about
    else:
        assert end <= begin, about
