"""What the commands share: their options, tables for people, JSON for machines, a progress bar."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from .errors import CupyflashError, InvalidArgument, InvalidType

WIDE = 160  # columns of a table that goes to a file


class Group(click.Group):
    """A group whose commands end with a sentence on stderr where cupyflash raises one."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; our own errors become exit codes."""
        try:
            return super().invoke(ctx)
        except (InvalidArgument, InvalidType) as error:
            raise click.UsageError(str(error)) from error
        except CupyflashError as error:
            raise click.ClickException(str(error)) from error


def table(content: Table) -> None:
    """Print a table to stdout, wide where nobody folds it."""
    console = Console()
    if not console.is_terminal:
        console.width = WIDE
    console.print(content)


def facts(values: dict[str, Any]) -> Table:
    """Return names and values as a table."""
    lines = Table(show_header=False, box=None)
    for name, value in values.items():
        lines.add_row(f"[bold]{name}", "-" if value in (None, "", {}, []) else escape(str(value)))
    return lines


def grid(rows: list[dict[str, Any]], title: str | None = None) -> Table:
    """Return one row or more of the same fields as a table."""
    title = title and escape(title)
    style: dict[str, Any] = {"box": SIMPLE_HEAD, "collapse_padding": True, "pad_edge": False}
    lines = Table(title=title, title_justify="left", **style)
    for name, value in rows[0].items():
        lines.add_column(name, justify="left" if isinstance(value, str) else "right")
    for row in rows:
        lines.add_row(*(escape(str(value)) for value in row.values()))
    return lines


def emit(value: Any) -> None:
    """Print JSON to stdout."""
    click.echo(json.dumps(value, indent=1, default=str))


@contextlib.contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """Show a bar on stderr where that is a terminal; yield what is told each step as it starts."""
    bar = Progress(
        BarColumn(20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    with bar:
        task = bar.add_task("", total=total)
        yield lambda text: bar.update(task, advance=1, description=text)


as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


class Sizes(click.ParamType):
    """A comma list of sizes."""

    name = "sizes"

    def convert(self, value: Any, param: Any, ctx: Any) -> list[int]:
        """Parse the list."""
        if isinstance(value, list):
            return value
        try:
            return [int(part) for part in value.split(",")]
        except ValueError:
            self.fail(f"{value!r} is not a comma list of integers", param, ctx)


DTYPES = "Also fp16, fp32, fp64, e4m3, e5m2."


# Flags of what a problem may have beyond its sizes and band, and the arguments they stand for.
FLAGS: dict[str, tuple[str, ...]] = {
    "alibi": ("alibi_slopes",),
    "bias": ("attn_bias",),
    "bool_mask": ("attn_mask",),
    "sink": ("learnable_sink",),
    "segments": ("segment_ids",),
    "used": ("seqused_q", "seqused_k"),
    "packed": ("cu_seqlens_q", "cu_seqlens_k"),
}


def extras_of(options: dict[str, Any]) -> dict[str, Any]:
    """Take the options that are arguments of `cupyflash.explain` beyond a case's from others."""
    from .masks import PrefixLM

    softcap, dropout = options.pop("softcap"), options.pop("dropout")
    extras: dict[str, Any] = {"backward": options.pop("backward")}
    extras |= {"softcap": softcap} if softcap is not None else {}
    extras |= {"dropout_p": dropout} if dropout is not None else {}
    for flag, names in FLAGS.items():
        extras |= dict.fromkeys(names, True) if options.pop(flag) else {}
    if options.pop("prefix"):
        extras["mask"] = PrefixLM(True)
    if options.pop("deterministic"):
        if not extras["backward"]:
            raise click.UsageError("--deterministic is of gradients: add --backward")
        extras["deterministic"] = True
    return extras


def problem_options(command: Any) -> Any:
    """Add the options that describe one problem.

    They arrive as its `Case`, and as `extras`, the arguments of `cupyflash.explain` beyond it.
    """

    @functools.wraps(command)
    def wrapped(
        dtype: str, len_k: int | None, heads_k: int | None, head_dim_v: int | None, **options: Any
    ) -> Any:
        from ._bench.case import Case, short_dtype

        sizes = {name: options.pop(name) for name in ("batch", "len_q", "mask", "alignment")}
        heads, head_dim = options.pop("heads"), options.pop("head_dim")
        case = Case(
            dtype=short_dtype(dtype),
            len_k=sizes["len_q"] if len_k is None else len_k,
            heads_q=heads,
            heads_k=heads if heads_k is None else heads_k,
            head_dim=head_dim,
            head_dim_v=head_dim if head_dim_v is None else head_dim_v,
            **sizes,
        )
        return command(case=case, extras=extras_of(options), **options)

    for option in reversed(
        (
            click.option("--dtype", default="bf16", show_default=True, help=DTYPES),
            click.option("--batch", default=1, show_default=True),
            click.option("--len-q", default=1024, show_default=True),
            click.option("--len-k", type=int, help="By default as --len-q."),
            click.option("--heads", default=16, show_default=True),
            click.option("--heads-k", type=int, help="By default as --heads."),
            click.option("--head-dim", default=128, show_default=True),
            click.option("--head-dim-v", type=int, help="By default as --head-dim."),
            click.option("--mask", default="full", show_default=True, help="causal, window:L,R."),
            click.option("--alignment", default="bottom_right", show_default=True),
            click.option("--backward", is_flag=True, help="Of the gradients."),
            click.option("--softcap", type=float, help="Of the scores."),
            click.option("--dropout", type=float, help="A probability."),
            click.option("--alibi", is_flag=True, help="With ALiBi slopes."),
            click.option("--bias", is_flag=True, help="With a bias."),
            click.option("--bool-mask", is_flag=True, help="With a bool mask."),
            click.option("--sink", is_flag=True, help="With a learnable sink."),
            click.option("--prefix", is_flag=True, help="With a prefix that all queries see."),
            click.option("--segments", is_flag=True, help="With segment ids."),
            click.option("--used", is_flag=True, help="With lengths in use."),
            click.option("--packed", is_flag=True, help="Packed: --len-q are all their rows."),
            click.option("--deterministic", is_flag=True, help="Sums in a fixed order."),
        )
    ):
        wrapped = option(wrapped)
    return wrapped


# --- the options of `bench` ---

FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
METRIC = click.Choice(["tflops", "gbps", "kernel_us", "call_us"])


class NewFile(click.Path):
    """A file to write at the end of a long run: what would fail then fails at once."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Check the folder, which nobody makes."""
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if not os.access(path.parent, os.W_OK) or not path.parent.is_dir():
            self.fail(f"{str(path.parent)!r} is no folder that can be written to", param, ctx)
        return path


NEW_FILE = NewFile(dir_okay=False, writable=True, path_type=Path)


def lists(on_gpu: str, on_cpu: str) -> str:
    """Return the help of a comma list whose default depends on the device."""
    return f"Comma list; by default {on_gpu}, on the CPU {on_cpu}."


def effort_options(command: Any) -> Any:
    """Add how long to measure."""
    rounds = click.option(
        "--rounds",
        type=click.IntRange(1),
        default=5,
        show_default=True,
        help="Rounds, each of everyone in turn.",
    )
    budget = click.option(
        "--budget",
        type=click.FloatRange(0, min_open=True),
        default=0.1,
        show_default=True,
        help="Seconds per round and column.",
    )
    return rounds(budget(command))


def refuse_beside(option: str, names: Collection[str]) -> None:
    """Refuse options of these names beside one that leaves them without a meaning."""
    context = click.get_current_context()
    for name in names:
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE and name != option:
            flag = f"--{name.replace('_', '-')}"
            raise click.UsageError(f"{flag} has no meaning beside --{option}: leave one out")
