"""Print the markdown table of results files, as README embeds it."""

from pathlib import Path

import click

from cupyflash._bench import results
from cupyflash._console import FILE, METRIC


@click.command()
@click.argument("files", nargs=-1, required=True, type=FILE)
@click.option("--metric", type=METRIC, help="By default by suite.")
def main(files: tuple[Path, ...], metric: str | None) -> None:
    """Print one table per results file."""
    for path in files:
        document = results.load(path)
        click.echo(f"{results.describe(document['env'])} ({path.name})\n")
        click.echo(results.markdown(document["rows"], metric or ""))


if __name__ == "__main__":
    main()
