"""Run the named suites and write ``bench/results/<card>-<date>-<suite>.json``.

    python bench/run.py generic host          # on a GPU
    python bench/run.py cpu                   # anywhere

A finished suite is written at once, so that an interrupted run keeps what it has.
"""

from pathlib import Path

import click

from cupyflash._bench import results, sweep
from cupyflash._bench.run import Effort
from cupyflash._bench.suites import suites

RESULTS = Path(__file__).resolve().parent / "results"


@click.command()
@click.argument("names", nargs=-1, required=True, type=click.Choice(sorted(suites())))
@click.option("--rounds", default=5, show_default=True, help="Rounds, each of everyone in turn.")
@click.option("--budget", default=0.1, show_default=True, help="Seconds per round and column.")
@click.option("--commit", help="Commit to record, where the tree here has no history.")
@click.option("--out", default=RESULTS, type=click.Path(path_type=Path), help="Folder to write to.")
def main(names: tuple[str, ...], rounds: int, budget: float, commit: str | None, out: Path) -> None:
    """Measure the suites NAMES, and exit with 1 if cupyflash failed in any."""
    failed = False
    for name in names:
        effort = Effort(rounds, budget)
        document = sweep.document(name, sweep.named(name), effort, tell, commit)
        path = out / results.file_name(document["env"], name)
        results.save(document, path)
        click.echo(results.markdown(document["rows"]))
        for fault in results.faults(document["rows"]):
            tell(fault)
        tell(str(path))
        failed |= results.own_failed(document["rows"])
    raise SystemExit(int(failed))


def tell(text: str) -> None:
    """Say what is going on, on stderr."""
    click.echo(text, err=True)


if __name__ == "__main__":
    main()
