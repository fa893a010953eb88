"""The one-way rule of docs/design.md: who may import whom, which header may include which."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "cupyflash"
CUDA = ROOT / "cuda"

# The floors of the package, lowest first: a module imports from its own floor or a lower one.
FLOORS = (
    {"errors", "masks", "_philox", "reference", "_packed", "_accuracy"},  # leaves, for anyone
    # compiling (_jit over _nvrtc and _cache), arrays, the driver; they know nothing of attention
    {
        "_jit", "_nvrtc", "_cache", "_array", "_blas", "_driver", "_tensor_map", "_threads",
        "_tickets",
    },
    {
        "_problem", "_problem_backward", "_scalars", "_views", "_plans", "_launch", "_steps",
        "_unit", "_tuning", "_tuning_sm90", "_forward", "_forward_sm80", "_forward_sm90", "_cpu",
        "_cpu_backward", "_modifiers", "_online", "_sequences", "_tile_gradients", "_tiles",
        "_backward_delta", "_backward_dq", "_backward_dsink", "_backward_sm80", "_backward_sm90",
        "_backward_shared", "_sm90", "_tuning_bwd", "_backward_dbias", "_tuning_dbias",
    },
    {"_kernels", "_emulator"},
    {"_jax"},
    {
        "_attention", "_backward", "_call", "_explain", "_facts", "_gradients", "_torch",
        "_versions",
    },
    {"_check", "_check_emulated", "_bench"},
    {"cli", "_console"},
)  # fmt: skip
FLOOR_OF = {module: floor for floor, modules in enumerate(FLOORS) for module in modules}

# What a module may import from outside, beyond the standard library and the base dependencies.
HEAVY = {"cupy", "cupyx", "torch", "jax", "jaxlib", "matplotlib"}

# Folder of cuda/ -> the folders that its files may include ("" is cuda/ itself: device.cuh).
ARROWS = {
    "ptx": {"", "ptx"},
    "masks": {"", "masks", "tile"},
    "scores": {"", "scores", "tile", "ptx"},
    "tile": {"", "tile", "ptx"},
    "roles": {"", "roles", "tile", "masks", "scores", "ptx"},
    "kernels": {"", "roles", "tile", "masks", "scores", "ptx"},
    "": {""},
}


def python_modules() -> list[Path]:
    """Every module of the package that has a floor: ``__init__`` stands above all of them."""
    return sorted(
        path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE or not dunder(path)
    )


def dunder(path: Path) -> bool:
    return path.stem in {"__init__", "__main__"}


def first_level(path: Path) -> str:
    """The module or subpackage that a file belongs to: ``_bench/run.py`` is ``_bench``."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> list[tuple[str, bool]]:
    """Absolute names of a file's imports, and whether each runs when the module is imported."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    late = {
        id(node)
        for scope in ast.walk(tree)
        if isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        or (isinstance(scope, ast.If) and ast.unparse(scope.test).endswith("TYPE_CHECKING"))
        for node in ast.walk(scope)
    }
    package = ("cupyflash", *path.relative_to(PACKAGE).parts[:-1])
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            stem = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{stem}.{alias.name}" for alias in node.names]
        else:
            continue
        found += [(name, id(node) not in late) for name in names]
    return found


def inner(path: Path) -> set[str]:
    """The modules of cupyflash that a file imports, early or late, other than its own package."""
    found = set()
    for name, _ in imports(path):
        top, _, rest = name.partition(".")
        module = rest.partition(".")[0]
        if top != "cupyflash" or module.startswith("__"):
            continue
        # The package itself, and its public functions, are _attention's.
        found.add(module if module in FLOOR_OF or is_module(module) else "_attention")
    return found - {first_level(path)}


def needs(module: str) -> set[str]:
    """What a module or any file of a subpackage imports."""
    return set().union(*(inner(path) for path in python_modules() if first_level(path) == module))


def is_module(name: str) -> bool:
    return (PACKAGE / f"{name}.py").is_file() or (PACKAGE / name / "__init__.py").is_file()


MODULES = [pytest.param(path, id=str(path.relative_to(PACKAGE))) for path in python_modules()]


@pytest.mark.parametrize("path", MODULES)
def test_modules_import_downwards_only(path: Path) -> None:
    module = first_level(path)
    assert module in FLOOR_OF, f"{module} has no floor: give it one in FLOORS and in docs/design.md"
    for other in inner(path):
        assert other in FLOOR_OF, f"{module} imports {other}, which has no floor"
        assert FLOOR_OF[other] <= FLOOR_OF[module], f"{module} imports {other} of a higher floor"


def test_every_floor_names_modules_that_exist() -> None:
    assert FLOOR_OF.keys() == {first_level(path) for path in python_modules()}


def test_imports_have_no_cycle() -> None:
    graph: dict[str, set[str]] = {}
    for path in python_modules():
        graph.setdefault(first_level(path), set()).update(inner(path))
    while graph:
        done = {module for module, needs in graph.items() if not needs & graph.keys()}
        assert done, f"these modules import one another: {sorted(graph)}"
        graph = {module: needs for module, needs in graph.items() if module not in done}


@pytest.mark.parametrize("path", MODULES)
def test_heavy_packages_are_imported_late_and_in_few_places(path: Path) -> None:
    allowed = {
        "_jit": {"cupy"},
        "_nvrtc": {"cupy"},
        "_array": {"cupy"},
        "_launch": {"cupy"},
        "_torch": {"torch"},
        "_jax": {"jax"},
        "_bench": {"cupy", "torch", "jax", "matplotlib"},
        "_check": {"cupy"},
        "cli": {"cupy"},
    }.get(first_level(path), set())
    for name, early in imports(path):
        top = name.split(".")[0]
        if top in HEAVY:
            assert top in allowed, f"{path.name} must not import {name}"
            assert not early, f"{path.name} imports {name} when it is imported itself"


def test_compiling_and_arrays_know_nothing_of_attention() -> None:
    for module in sorted(FLOORS[1]):
        assert needs(module) <= FLOORS[1] | {"errors"}, f"{module} must not know what attention is"


def test_leaves_share_nothing_with_what_they_judge() -> None:
    for module in sorted(FLOORS[0]):
        assert needs(module) <= FLOORS[0], f"{module} is a leaf"


def test_cuda_holds_no_python() -> None:
    # NVIDIA's namespace package has the same name: a .py file here would break `import cupy`.
    assert not [path for path in CUDA.rglob("*") if path.suffix in {".py", ".pyi", ".pth"}]


def code(path: Path) -> str:
    """The text of a CUDA source with its comments blanked."""
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)


SOURCES = [
    pytest.param(path, id=str(path.relative_to(CUDA)))
    for path in sorted(CUDA.rglob("*"))
    if path.suffix in {".cu", ".cuh"}
]


def folder(path: Path) -> str:
    return path.relative_to(CUDA).parts[0] if path.parent != CUDA else ""


@pytest.mark.parametrize("path", SOURCES)
def test_includes_follow_the_arrows(path: Path) -> None:
    for line in re.findall(r"^\s*#\s*include\s+(.*)$", code(path), flags=re.MULTILINE):
        target = re.fullmatch(r'"([^"]+)"\s*', line)
        assert target, f"{path.name} includes {line}: only our own headers, in quotes"
        header = CUDA / target[1]
        assert header.is_file(), f"{path.name} includes {line}, which is no path from cuda/"
        assert header.suffix == ".cuh", f"{path.name} includes {line}: nothing includes a kernel"
        allowed = ARROWS[folder(path)]
        assert folder(header) in allowed, f"{folder(path)}/ must not include {target[1]}"


@pytest.mark.parametrize("path", SOURCES)
def test_instructions_are_named_in_ptx_only(path: Path) -> None:
    text = code(path)
    assert "__CUDA_ARCH__" not in text, "the architecture is chosen by the host, in Config"
    if folder(path) == "ptx":
        assert not re.search(r"(?<!extern )\b__shared__\b", text), "shared memory is dynamic"
        return
    assert not re.search(r"\basm\b", text), "asm belongs to cuda/ptx"
    assert not re.search(r"\b__shared__\b", text), (
        "shared memory comes from the accessor in cuda/ptx"
    )
    calls = set(re.findall(r"\b(__(?!builtin_)\w+)\s*\(", text))
    calls -= {"__launch_bounds__", "__cluster_dims__"}
    assert not calls, f"intrinsics, shuffles and barriers belong to cuda/ptx: {sorted(calls)}"


def test_every_kernel_file_defines_its_own_symbol() -> None:
    kernels = sorted((CUDA / "kernels").glob("*.cu"))
    assert kernels
    for path in kernels:
        entries = re.findall(r"__global__[^;{]*?\b(\w+)\s*\(\s*(?:const\b|__grid)", code(path))
        assert entries == [path.stem], f"{path.name} must define one kernel, named {path.stem}"
