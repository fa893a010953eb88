"""From a configuration to the translation unit that NVRTC compiles: one struct, one include.

Each field of the configuration becomes a member of ``struct Config``: a string names a type
(``mask`` is ``Mask``), anything else is a constant (``head_dim`` is ``HEAD_DIM``).
"""

import dataclasses
import functools
import re
from typing import Any

from . import __version__, _jit, _modifiers, masks

__all__ = ["render"]

# Where a type is defined: the unit includes it before the struct that names it.
HEADERS = {
    **dict.fromkeys(("Float16", "Bfloat16", "Float32", "Float64"), "tile/types.cuh"),
    **dict.fromkeys(("Float8E4m3", "Float8E5m2"), "tile/fp8.cuh"),
    **dict.fromkeys(("RowOrder", "ThreadOrder", "LaneOrder"), "tile/sums.cuh"),
    **{mask.__name__: mask.header for mask in masks.ALL},
    **_modifiers.HEADERS,
}
TYPES = re.compile(r"\b[A-Z]\w*")  # true and false are arguments of templates, and no types


@functools.lru_cache(maxsize=256)
def render(symbol: str, config: Any) -> str:
    """Return the translation unit of a kernel for a configuration.

    Parameters
    ----------
    symbol : str
        The kernel's name, which is its file's.
    config : frozen dataclass
        The fields of the kernel's ``Config`` in lower case.
    """
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    types = {name: value for name, value in values.items() if isinstance(value, str)}
    headers = dict.fromkeys(HEADERS[x] for value in types.values() for x in TYPES.findall(value))
    lines = [
        f"// cupyflash {__version__}  {symbol}  cuda/ digest {_jit.digest()[:16]}",
        *(f'#include "{header}"' for header in headers),
        "",
        "struct Config {",
        *(f"  {_member(name, value)}" for name, value in values.items()),
        "};",
        "",
        f'#include "kernels/{symbol}.cu"',
    ]
    return "\n".join(lines) + "\n"


def _member(name: str, value: Any) -> str:
    if isinstance(value, str):
        member = name.title().replace("_", "")
        outer = "::" if member == value.partition("<")[0] else ""  # of a type of the same name
        return f"using {member} = {outer}{value};"
    if isinstance(value, bool):
        return f"static constexpr bool {name.upper()} = {str(value).lower()};"
    return f"static constexpr int {name.upper()} = {value};"
