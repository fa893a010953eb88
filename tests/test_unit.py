"""The rendered translation unit, word for word, and what makes two of them differ."""

import re
from dataclasses import dataclass, replace

import pytest

import cupyflash
from cupyflash import _jit
from cupyflash._unit import HEADERS, render
from cupyflash.masks import Band


@dataclass(frozen=True)
class Config:
    t: str = "Bfloat16"
    mask: str = "Band<false, true>"
    head_dim: int = 128
    q_in_registers: bool = True
    params_bytes: int = 184


UNIT = """\
// cupyflash {version}  attention_fwd_sm80  cuda/ digest {digest}
#include "tile/types.cuh"
#include "masks/band.cuh"

struct Config {{
  using T = Bfloat16;
  using Mask = Band<false, true>;
  static constexpr int HEAD_DIM = 128;
  static constexpr bool Q_IN_REGISTERS = true;
  static constexpr int PARAMS_BYTES = 184;
}};

#include "kernels/attention_fwd_sm80.cu"
"""


def test_the_unit_is_one_struct_and_one_include() -> None:
    expected = UNIT.format(version=cupyflash.__version__, digest=_jit.digest()[:16])
    assert render("attention_fwd_sm80", Config()) == expected


def test_every_field_is_a_member_and_changes_the_unit() -> None:
    first = render("attention_fwd_sm80", Config())
    changes = {"t": "Float16", "mask": "Band<true, true>", "head_dim": 64,
               "q_in_registers": False, "params_bytes": 200}  # fmt: skip
    for name, value in changes.items():
        other = render("attention_fwd_sm80", replace(Config(), **{name: value}))
        differing = [
            (a, b) for a, b in zip(first.splitlines(), other.splitlines(), strict=True) if a != b
        ]
        assert len(differing) == 1, name


def test_includes_are_files_of_cuda() -> None:
    assert set(HEADERS.values()) <= set(_jit.sources())


def test_every_type_that_is_named_is_included_once() -> None:
    config = replace(Config(), mask="All<Band<false, true>, Segments<4>, DenseMask>")
    config = replace(config, t="Chain<Softcap, Bias<Float64, 1>>")
    assert re.findall(r'#include "(.*)"', render("attention_fwd_sm80", config)) == [
        "scores/score.cuh",
        "scores/softcap.cuh",
        "scores/bias.cuh",
        "tile/types.cuh",
        "masks/all.cuh",
        "masks/band.cuh",
        "masks/segments.cuh",
        "masks/dense_mask.cuh",
        "kernels/attention_fwd_sm80.cu",
    ]


@pytest.mark.parametrize("left", [None, 3])
@pytest.mark.parametrize("right", [None, 0])
def test_the_mask_of_a_unit_is_that_of_the_problem(left: int | None, right: int | None) -> None:
    unit = render("attention_fwd_sm80", replace(Config(), mask=Band(left, right).cuda_type()))
    flags = f"{str(left is not None).lower()}, {str(right is not None).lower()}"
    assert f"using Mask = Band<{flags}>;" in unit
