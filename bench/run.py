"""Run the named suites and write ``bench/results/<card>-<date>-<suite>.json``.

    python bench/run.py generic host                             # on a GPU
    python bench/run.py hopper --without fa4                     # on a Hopper GPU
    python bench/run.py hopper --rows "D128 causal" --peers fa3  # a part of it
    python bench/run.py hopper --rows fp8                        # its 8-bit rows
    python bench/run.py modifiers varlen --budget 300            # what 300 seconds suffice for
    python bench/run.py paper deterministic                      # both passes; fixed sums
    python bench/run.py cpu                                      # anywhere

The file is written after each problem, so that an interrupted run keeps what it has. That of a part
is named ``<suite>-part``, and replaces no whole one. Peers that are absent or fail are told, and
the others go on. ``modifiers`` times one problem with each score modifier and mask, beside our own
plain kernel in the same turns; ``varlen`` packed sequences.
"""

import dataclasses
import math
import time
from pathlib import Path
from typing import Any

import click

from cupyflash import CupyflashError
from cupyflash._bench import results, sweep
from cupyflash._bench.run import Effort
from cupyflash._bench.suites import EFFORTS, narrowed, suites

BEGIN = time.perf_counter()
RESULTS = Path(__file__).resolve().parent / "results"
FOLDER = click.Path(exists=True, file_okay=False, writable=True, path_type=Path)


@click.command()
@click.argument("names", nargs=-1, required=True, type=click.Choice(sorted(suites())))
@click.option("--rows", default="", help="Only problems whose text this expression is found in.")
@click.option("--peers", default="", help="Comma list: only these, or none.")
@click.option("--without", default="", help="Comma list of peers to leave out.")
@click.option("--kernel", help="Force one of our kernels.")
@click.option("--rounds", type=click.IntRange(1), help="Rounds, each of everyone in turn.")
@click.option("--turn", type=click.FloatRange(0, min_open=True), help="Seconds per turn.")
@click.option(
    "--budget",
    type=click.FloatRange(0),
    help="Seconds in all: beyond them, counted from the start, no problem is begun.",
)
@click.option("--commit", help="Commit to record, where the tree here has no history.")
@click.option("--out", default=RESULTS, type=FOLDER, help="Folder to write to.")
def main(
    names: tuple[str, ...],
    rounds: int | None,
    turn: float | None,
    budget: float | None,
    commit: str | None,
    out: Path,
    **parts: Any,
) -> None:
    """Measure the suites NAMES, and exit with 1 if cupyflash failed in any."""
    failed, part = False, "-part" if any(parts.values()) else ""
    until = math.inf if budget is None else BEGIN + budget
    going = part if budget is None else "-part"  # until all problems are measured
    for name in names:
        effort = EFFORTS.get(name, Effort())
        effort = dataclasses.replace(
            effort, rounds=rounds or effort.rounds, budget_s=turn or effort.budget_s
        )
        try:
            groups = sweep.installed(narrowed(sweep.named(name), **parts), tell)
            if not groups:
                raise click.UsageError(f"no problem of {name} is found by --rows {parts['rows']}")
            document = sweep.document(
                name,
                groups,
                effort,
                tell,
                commit,
                keep=lambda found, name=name: save(found, out, name + going),
                until=until,
            )
        except CupyflashError as error:
            raise click.ClickException(str(error)) from error
        whole = len(results.problems(document["rows"])) == sum(len(g.cases) for g in groups)
        path = save(document, out, name + (part if whole else going))
        if whole and going != part:
            (out / results.file_name(document["env"], name + going)).unlink(missing_ok=True)
        click.echo(results.markdown(document["rows"]))
        if any("extra_mib" in row for row in document["rows"]):
            click.echo("\n" + results.markdown(document["rows"], "extra_mib"))
        for fault in results.faults(document["rows"]):
            tell(fault)
        tell(str(path))
        failed |= results.own_failed(document["rows"])
    raise SystemExit(int(failed))


def save(document: results.Document, out: Path, suite: str) -> Path:
    """Write a results file, and return its path."""
    path = out / results.file_name(document["env"], suite)
    results.save(document, path)
    return path


def tell(text: str) -> None:
    """Say what is going on, and since when, on stderr."""
    click.echo(f"{time.perf_counter() - BEGIN:5.0f} s  {text}", err=True)


if __name__ == "__main__":
    main()
