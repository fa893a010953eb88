"""The command line: each command is a thin call into the package.

Tables go to stdout, progress and faults to stderr; ``--json`` is for machines. A usage error exits
with 2, a failure with 1. CuPy and frameworks are imported by the commands that need them.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click

from . import __version__
from ._console import (
    FILE,
    METRIC,
    NEW_FILE,
    Group,
    Sizes,
    as_json,
    effort_options,
    emit,
    facts,
    grid,
    lists,
    problem_options,
    progress,
    refuse_beside,
    table,
)


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "--version")
def main() -> None:
    """Exact attention on any array: see, check, time and compile its kernels."""


@main.command()
@as_json
def info(as_json: bool) -> None:
    """Show the GPU, the driver, CUDA, NVRTC, the frameworks and the cache."""
    from . import _jit
    from ._bench.environment import environment

    entries = _jit.cache_entries()
    values = environment() | {"cache": _jit.cache_dir(), "cached_kernels": len(entries)}
    emit(values) if as_json else table(facts(values))


def gpu_arch() -> str | None:
    """Return the architecture of the GPU here, as NVRTC names it."""
    from . import _jit
    from ._bench import environment

    return f"sm_{_jit.compute_capability(0)}" if environment.gpu_present() else None


def no_arch() -> str:
    """Refuse to guess an architecture."""
    raise click.UsageError("there is no GPU here: name --arch, like 90 or sm_90")


@main.command("list")
@as_json
def list_(as_json: bool) -> None:
    """List the dispatch table: every kernel, best first, and what it takes."""
    from . import kernels

    rows = [kernel._asdict() for kernel in kernels()]
    emit(rows) if as_json else table(grid(rows))


@main.command()
@problem_options
@click.option("--arch", help="Like 90 or sm_90; by default the GPU here.")
@click.option("--kernel", help="A kernel of `cupyflash list`; by default the best.")
@as_json
def explain(
    case: Any,
    extras: dict[str, Any],
    arch: str | None,
    kernel: str | None,
    as_json: bool,
) -> None:
    """Say which kernel computes a problem and with what resources, and why the others do not.

    Exits with 1 if there is none.
    """
    from . import explain

    sizes = case.sizes(arch or gpu_arch())
    answer = explain(**sizes, **case.options, **extras, kernel=kernel)
    if as_json:
        resources = answer.resources and answer.resources._asdict()
        steps = [
            {"launch": dataclasses.asdict(launch), "resources": used and used._asdict()}
            for launch, used in answer.steps
        ]
        emit(dataclasses.asdict(answer) | {"resources": resources, "steps": steps})
    else:
        click.echo(str(answer))
    raise SystemExit(int(answer.kernel is None))


@main.command()
@problem_options
@click.option("--arch", help="Like 90 or sm_90; by default the GPU here.")
@click.option("--kernel", help="A kernel of `cupyflash list`; by default the best.")
@as_json
def show(
    case: Any,
    extras: dict[str, Any],
    arch: str | None,
    kernel: str | None,
    as_json: bool,
) -> None:
    """Show the translation unit of a problem, its registers and its shared memory."""
    from ._bench import units

    unit, *_ = units.units_of(case, arch or gpu_arch() or no_arch(), kernel, extras)
    used = unit.compile()
    if as_json:
        emit({"unit": unit.launch.unit, "resources": used})
    else:
        click.echo(unit.launch.unit)
        table(facts(used))


@main.command("compile")
@problem_options
@click.option("--arch", help="Comma list, like 80,90; by default the GPU here.")
@click.option(
    "--all", "every", is_flag=True, help="Both passes, every dtype, pair of head dims and mask."
)
@click.option("--kernel", help="A kernel of `cupyflash list`; by default the best.")
@click.option("--stats", is_flag=True, help="Show registers, spills, shared memory, seconds.")
@as_json
def compile_(
    case: Any,
    extras: dict[str, Any],
    arch: str | None,
    every: bool,
    kernel: str | None,
    stats: bool,
    as_json: bool,
) -> None:
    """Compile kernels into the cache; no GPU is needed.

    Exits with 1 if the compiler has a remark or spills a register, or if the cache cannot be used.
    """
    from . import _cache
    from ._bench import units

    if every and (beyond := extras.keys() - {"backward"}):
        raise click.UsageError(f"--all has no {', '.join(sorted(beyond))}: leave one out")
    found = [
        unit
        for name in (arch or gpu_arch() or no_arch()).split(",")
        for unit in (
            units.every(name, kernel) if every else units.units_of(case, name, kernel, extras)
        )
    ]
    rows = []
    with progress(len(found)) as tell:
        for unit in found:
            tell(f"{unit.launch.symbol} {unit.launch.arch} {unit.case}")
            rows.append(unit.compile())
    if as_json:
        emit(rows)
    elif stats:
        for title, lines in units.statistics(rows).items():
            table(grid(lines, title))
    elif not _cache.is_temporary():
        click.echo(f"{len(rows)} kernels are in the cache")
    bad = [row for row in rows if row["log"] or row["spill_stores"] or row["spill_loads"]]
    for row in bad:
        remark = row["log"] or "registers spill"
        click.echo(f"{row['kernel']} {row['arch']} {row['head_dim']}: {remark}", err=True)
    if _cache.is_temporary():
        raise click.ClickException(f"{len(rows)} kernels were compiled and none is kept")
    raise SystemExit(int(bool(bad)))


@main.command()
@click.option("--kernel", help="Check one kernel only.")
@click.option("--quick", is_flag=True, help="Leave out the cases made for their throughput.")
@click.option("--emulate", is_flag=True, help="The quick cases, on an emulated GPU; needs g++.")
@as_json
def check(kernel: str | None, quick: bool, emulate: bool, as_json: bool) -> None:
    """Compare attention and its gradients with the fp64 oracle.

    On the CPU path, and on every kernel of the GPU here.
    With --emulate the CUDA kernels run on the CPU, which takes minutes, and what they moved is
    counted. Exits with 1 if anything fails.
    """
    from . import _check

    place: Any = _check
    if emulate:
        from . import _check_emulated

        place, quick = _check_emulated, True
    kernels = place.chosen(kernel)
    with progress(len(kernels) * len(_check.table(quick))) as tell:
        outcomes = place.run(kernels, quick, tell)
    failed = _check.failures(outcomes)
    if as_json:
        emit({"ok": not failed, "outcomes": [dataclasses.asdict(o) for o in outcomes]})
    else:
        table(place.report(outcomes))
        click.echo("\n".join(place.summary(outcomes)))
    for o in failed:
        click.echo(f"failed: {o.label}: {o.check}, {o.case}: {o.message}", err=True)
    raise SystemExit(int(bool(failed)))


@main.command()
@click.option(
    "--suite",
    help="One of generic, hopper, backward, backward-generic, paper, deterministic, modifiers, "
    "varlen, host, cpu.",
)
@click.option("--render", type=FILE, help="Show a results file.")
@click.option("--dtype", help=lists("bf16", "fp32"))
@click.option("--batch", type=Sizes(), default="1", show_default=True, help="Comma list.")
@click.option("--tokens", type=click.IntRange(1), help="Let batch be this over the length.")
@click.option("--len-q", type=Sizes(), help=lists("1024,4096", "256,1024"))
@click.option("--len-k", type=Sizes(), help="Comma list; by default as --len-q.")
@click.option("--heads", type=Sizes(), help=lists("16", "8"))
@click.option("--heads-k", type=Sizes(), help="Comma list; by default as --heads.")
@click.option("--head-dim", type=Sizes(), default="64,128", show_default=True, help="Comma list.")
@click.option("--head-dim-v", type=Sizes(), help="Comma list; by default as --head-dim.")
@click.option("--mask", default="full,causal", show_default=True, help="Also window:L,R.")
@click.option("--vs", default="auto", show_default=True, help="Peers: auto, all, none or names.")
@click.option("--kernel", help="Force one of our kernels.")
@click.option("--device", type=click.Choice(["auto", "cuda", "cpu"]), default="auto")
@effort_options
@click.option("--metric", type=METRIC, help="By default by suite.")
@click.option("--save", type=NEW_FILE, help="Also write the results file.")
@click.option(
    "-o",
    "--output",
    default="table",
    show_default=True,
    type=click.Choice(["table", "md", "json", "jsonl", "csv"]),
)
def bench(
    output: str, save: Path | None, render: Path | None, metric: str | None, **options: Any
) -> None:
    """Time attention and every importable peer in turn, results checked first.

    Comma lists sweep. Exits with 1 if cupyflash fails anywhere.
    """
    from ._bench import results, sweep

    if render:
        refuse_beside("render", [*options, "save"])
        document = results.load(render)
    else:
        if options["suite"]:
            refuse_beside("suite", options.keys() - {"rounds", "budget"})
        if options["tokens"]:
            refuse_beside("tokens", ["batch"])
        asked = sweep.Sweep(**options)
        groups = asked.groups()
        with progress(sum(len(group.cases) for group in groups)) as tell:
            document = sweep.document(asked.suite or "sweep", groups, asked.effort(), tell)
    if save:
        results.save(document, save)
    rows = document["rows"]
    if output == "table":
        table(results.rich_table(rows, metric or ""))
    else:
        click.echo(results.text(document, output, metric or ""))
    for fault in results.faults(rows):
        click.echo(fault, err=True)
    raise SystemExit(int(results.own_failed(rows)))


@main.group()
def cache() -> None:
    """Look at the compiled kernels on disk."""


@cache.command("path")
def cache_path() -> None:
    """Print the folder."""
    from . import _jit

    click.echo(_jit.cache_dir())


@cache.command("list")
@as_json
def cache_list(as_json: bool) -> None:
    """List the compiled kernels."""
    from . import _jit

    cubins = _jit.cache_entries()
    if as_json:
        emit([cubin_facts(cubin) for cubin in cubins])
    elif cubins:
        table(grid([entry(cubin) for cubin in cubins], str(_jit.cache_dir())))
    else:
        click.echo("no compiled kernels", err=True)


@cache.command("clear")
def cache_clear() -> None:
    """Remove the compiled kernels."""
    from . import _jit

    click.echo(f"removed {_jit.clear_cache()} kernels from {_jit.cache_dir()}")


def cubin_facts(cubin: Any) -> dict[str, Any]:
    """Return a compiled kernel for machines."""
    used = cubin.resources._asdict()
    return {"symbol": cubin.symbol, "arch": cubin.arch, **used, "path": str(cubin.path)}


def entry(cubin: Any) -> dict[str, Any]:
    """Return a compiled kernel as the line of a table."""
    used = cubin.resources
    return {
        "entry": cubin.path.parent.name,
        "arch": cubin.arch,
        "registers": used.registers,
        "spilled": used.spill_stores + used.spill_loads,
        "seconds": used.seconds,
    }
