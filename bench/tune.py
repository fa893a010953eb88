"""Time candidates for the tiles of a kernel, problem by problem, and name the winners.

    python bench/tune.py                               # every row of the Hopper kernel's table
    python bench/tune.py --rows "S8192 .* D128 causal"
    python bench/tune.py --kernel attention_fwd_sm80   # another kernel's

Needs a GPU. The file ``bench/results/<card>-<date>-tune.json`` is written after each problem; its
rows are those of a results file, with the differences from the present configuration.
"""

import re
from pathlib import Path

import click

from cupyflash import CupyflashError, _jit
from cupyflash._bench import environment, results, tune
from cupyflash._bench.candidates import CANDIDATES, problems
from cupyflash._bench.run import Effort
from cupyflash._kernels import KERNELS

RESULTS = Path(__file__).resolve().parent / "results"
FOLDER = click.Path(exists=True, file_okay=False, writable=True, path_type=Path)


@click.command()
@click.option("--kernel", type=click.Choice(list(CANDIDATES)), default=next(iter(CANDIDATES)))
@click.option("--rows", default="", help="Only problems whose text this expression is found in.")
@click.option("--rounds", type=click.IntRange(1), default=6, show_default=True)
@click.option("--turn", type=click.FloatRange(0, min_open=True), default=0.02, show_default=True)
@click.option("--commit", help="Commit to record, where the tree here has no history.")
@click.option("--out", default=RESULTS, type=FOLDER, help="Folder to write to.")
def main(kernel: str, rows: str, rounds: int, turn: float, commit: str | None, out: Path) -> None:
    """Time every candidate, and exit with 1 if none of some problem is right."""
    row = next(row for row in KERNELS if row.name == kernel)
    env = environment.environment()
    env["commit"] = commit or env["commit"]
    path = out / results.file_name(env, "tune")
    found: list[results.Row] = []
    failed = False
    try:
        arch = _jit.compute_capability(0)
        for case in problems(row, arch):
            if re.search(rows, str(case)):
                ranked = tune.fastest(
                    case, row, CANDIDATES[kernel](row, case, arch), Effort(rounds, turn)
                )
                click.echo(str(case))
                click.echo("\n".join(tune.lines(ranked)))
                found += ranked
                failed |= "error" in ranked[0]
                results.save({"env": env, "rows": found}, path)
    except CupyflashError as error:
        raise click.ClickException(str(error)) from error
    click.echo(str(path), err=True)
    raise SystemExit(int(failed))


if __name__ == "__main__":
    main()
