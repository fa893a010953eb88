"""Print the markdown table of results files, as README embeds it."""

from pathlib import Path

import click

from cupyflash._bench import results


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--metric", default="", help="tflops, gbps, kernel_us or call_us (by suite).")
def main(files: tuple[Path, ...], metric: str) -> None:
    """Print one table per results file."""
    for path in files:
        document = results.load(path)
        click.echo(f"{results.describe(document['env'])} ({path.name})\n")
        click.echo(results.markdown(document["rows"], metric))


if __name__ == "__main__":
    main()
