"""The public surface: names, signatures, docstrings, and an import that costs little."""

import ast
import inspect
import re
import subprocess
import sys
import types

import pytest

import cupyflash

FRAMEWORKS = ("cupy", "torch", "jax", "jaxlib")

# What may be passed by position: arrays and what a sentence puts first. All else is by keyword.
POSITIONAL = {
    "attention": ["q", "k", "v"],
    "attention_backward": ["dout", "q", "k", "v", "out", "lse"],
    "attention_varlen": ["q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"],
    "dropout_mask": ["rng_state", "p", "shape"],
    "emulate": [],
    "kernels": [],
    "show_versions": [],
}

FUNCTIONS = sorted(
    name for name in cupyflash.__all__ if inspect.isfunction(getattr(cupyflash, name))
)


def fresh(code: str) -> str:
    """Run ``code`` in a new interpreter and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_all_is_what_can_be_seen() -> None:
    # In a new interpreter: tests of private modules add attributes to the package in this one.
    seen = ast.literal_eval(
        fresh(
            "import cupyflash, types\n"
            "print([name for name, value in vars(cupyflash).items() if not name.startswith('_')\n"
            "       and (name in cupyflash.__all__ or not isinstance(value, types.ModuleType))])"
        )
    )
    assert sorted([*seen, "__version__"]) == sorted(cupyflash.__all__)
    assert len(set(cupyflash.__all__)) == len(cupyflash.__all__)


def test_the_promised_names_are_there() -> None:
    promised = {
        "attention", "attention_varlen", "attention_backward", "attention_vjp", "Gradients",
        "explain", "supports", "kernels", "warmup", "dropout_mask", "reference", "masks", "emulate",
        "show_versions", "__version__",
        "CompileFailed", "CupyflashError", "DeviceUnavailable", "InvalidArgument", "InvalidType",
        "KernelFault", "UnsupportedProblem",
    }  # fmt: skip
    assert promised <= set(cupyflash.__all__)
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+|rc\d+)?", cupyflash.__version__)


def test_each_exception_is_also_the_built_in_one() -> None:
    pairs = {
        "InvalidArgument": ValueError,
        "InvalidType": TypeError,
        "UnsupportedProblem": NotImplementedError,
        "DeviceUnavailable": RuntimeError,
        "CompileFailed": RuntimeError,
        "KernelFault": RuntimeError,
    }
    for name, built_in in pairs.items():
        assert issubclass(getattr(cupyflash, name), cupyflash.CupyflashError)
        assert issubclass(getattr(cupyflash, name), built_in)


def test_attention_has_the_signature_of_the_contract() -> None:
    signature = inspect.signature(cupyflash.attention)
    defaults = {
        name: parameter.default
        for name, parameter in signature.parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    assert defaults == {
        "softmax_scale": None, "causal": False, "window_size": (-1, -1),
        "alignment": "bottom_right", "softcap": 0.0, "alibi_slopes": None, "attn_bias": None,
        "attn_mask": None, "mask": None, "segment_ids": None, "seqused_q": None,
        "seqused_k": None, "learnable_sink": None, "dropout_p": 0.0, "rng_state": None,
        "q_descale": None, "k_descale": None, "v_descale": None, "layout": "bshd",
        "return_lse": False, "out": None, "deterministic": False, "kernel": None,
    }  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_all_after_the_arrays_is_keyword_only(name: str) -> None:
    signature = inspect.signature(getattr(cupyflash, name))
    by_position = [
        parameter.name
        for parameter in signature.parameters.values()
        if parameter.kind in {parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD}
    ]
    assert by_position == POSITIONAL.get(name, ["q", "k", "v"])
    assert all(
        parameter.annotation is not parameter.empty for parameter in signature.parameters.values()
    ), f"{name} has a parameter without a type"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_docstrings_have_the_numpydoc_sections(name: str) -> None:
    function = getattr(cupyflash, name)
    text = inspect.getdoc(function) or ""
    signature = inspect.signature(function)
    summary, _, rest = text.partition("\n")
    assert summary.endswith("."), f"{name}: the first line is one sentence"
    assert rest.startswith("\n") or not rest, f"{name}: a blank line follows the first"
    sections = dict(
        re.findall(r"^(\w[\w ]*)\n-{3,}\n(.*?)(?=^\w[\w ]*\n-{3,}\n|\Z)", text, re.M | re.S)
    )
    if signature.return_annotation not in {None, "None"}:
        assert "Returns" in sections, f"{name} does not say what it returns"
    if not signature.parameters:
        return
    assert "Parameters" in sections, f"{name} does not document its parameters"
    heads = re.findall(r"^(\*{0,2}\w[\w, *]*?)(?: *:.*)?$", sections["Parameters"], re.M)
    documented = {part.strip().lstrip("*") for head in heads for part in head.split(",")}
    assert set(signature.parameters) <= documented, (
        f"{name} leaves out {sorted(set(signature.parameters) - documented)}"
    )


def test_public_modules_have_an_all_of_their_own() -> None:
    for name in cupyflash.__all__:
        value = getattr(cupyflash, name)
        if isinstance(value, types.ModuleType):
            assert all(hasattr(value, entry) for entry in value.__all__)


def test_import_brings_no_framework() -> None:
    loaded = fresh(f"import cupyflash, sys\nprint({{*{FRAMEWORKS}}} & sys.modules.keys())")
    assert loaded.strip() == "set()"


def test_help_brings_no_framework() -> None:
    printed = fresh(
        "import sys\n"
        "sys.argv = ['cupyflash', '--help']\n"
        "from cupyflash.cli import main\n"
        "try:\n"
        "    main()\n"
        "except SystemExit as stop:\n"
        "    assert not stop.code, stop\n"
        f"print({{*{FRAMEWORKS}}} & sys.modules.keys())"
    )
    assert printed.startswith("Usage:")
    assert printed.splitlines()[-1] == "set()"


def test_a_call_on_numpy_brings_no_framework() -> None:
    loaded = fresh(
        "import cupyflash, numpy, sys\n"
        "x = numpy.ones((1, 3, 2, 8), numpy.float32)\n"
        "assert cupyflash.attention(x, x, x, causal=True).shape == x.shape\n"
        f"print({{*{FRAMEWORKS}, 'cupyflash._emulator'}} & sys.modules.keys())"
    )
    assert loaded.strip() == "set()"
