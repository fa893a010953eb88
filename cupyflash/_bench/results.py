"""Results files: one shape for every tool, and the tables that are made of them.

A file is ``{"env": {...}, "rows": [...]}``, the fields of a row as in `run.row_of`. Rows of one
problem in one file were timed in one run, so their times may be divided.
"""

from __future__ import annotations

import csv
import io
import json
import re
import statistics
from pathlib import Path
from typing import Any

from rich.table import Table

from ..errors import InvalidArgument
from .case import both

Row = dict[str, Any]
Document = dict[str, Any]

PROBLEM = (
    "suite",
    "pass",
    "dtype",
    "batch",
    "len_q",
    "len_k",
    "heads_q",
    "heads_k",
    "head_dim",
    "head_dim_v",
    "mask",
)
FIELDS = {*PROBLEM, "impl", "options", "kernel_us", "call_us", "tflops", "gbps", "rounds_us"}
OWN = "cupyflash"
PLAIN = "plain"  # cupyflash without the modifier of a case, beside it
TITLES = {"tflops": "TFLOP/s", "gbps": "GB/s", "extra_mib": "MiB beside the inputs, at the most"}
CAPTION = "vs best peer: the median over the rounds of the peer's time over ours in one round"


def save(document: Document, path: Path) -> None:
    """Write a results file, into a folder that is there."""
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def load(path: Path) -> Document:
    """Read a results file."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        known = isinstance(document["env"], dict) and all(
            row.keys() >= FIELDS for row in document["rows"]
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        known = False
    if not known:
        raise InvalidArgument(f"`{path}` must be a results file with env and rows: name another")
    return document


def file_name(env: dict[str, Any], suite: str) -> str:
    """Return ``<card>-<date>-<suite>.json``."""
    card = env.get("gpu") or "cpu"
    slug = re.sub(r"[^a-z0-9]+", "-", card.lower().replace("nvidia", "")).strip("-")
    return f"{slug}-{env['date'][:10]}-{suite}.json"


# --- one line per problem, one column per implementation ---


def column(row: Row) -> str:
    """Return a row's column: the implementation, and whose arrays it was given."""
    framework = row["options"].get("framework")
    return f"{row['impl']} ({framework})" if framework else row["impl"]


def variant(row: Row) -> str:
    """Return what a row has beyond a dense problem's mask; older files have nothing."""
    return row.get("variant", "")


def problems(rows: list[Row]) -> list[dict[str, Row]]:
    """Group rows by problem, each a dict from column to row, in the order of the file."""
    groups: dict[tuple, dict[str, Row]] = {}
    for row in rows:
        key = (*(row[name] for name in PROBLEM), variant(row))
        groups.setdefault(key, {})[column(row)] = row
    return list(groups.values())


def columns(rows: list[Row]) -> list[str]:
    """Return every column, cupyflash's first."""
    names = list(dict.fromkeys(column(row) for row in rows))
    return sorted(names, key=lambda name: not name.startswith(OWN))


def ratio(own: Row, peer: Row) -> float | None:
    """Return how many times faster cupyflash was, the median over the rounds of one run."""
    pairs = list(zip(own["rounds_us"], peer["rounds_us"], strict=False))
    return statistics.median(theirs / ours for ours, theirs in pairs) if pairs else None


def best_ratio(group: dict[str, Row]) -> tuple[float, str] | None:
    """Return the ratio to the fastest peer that ran the problem, and its name."""
    ran = [row for row in group.values() if row["rounds_us"]]
    own = [row for row in ran if row["impl"] == OWN]
    peers = [row for row in ran if row["impl"] not in (OWN, PLAIN) and "error" not in row]
    if not own or not peers:
        return None
    found = [(value, peer["impl"]) for peer in peers if (value := ratio(own[0], peer)) is not None]
    return min(found)


def over_plain(group: dict[str, Row]) -> str:
    """Return our time over that of our kernel without the modifier; a dash where unknown."""
    own, plain = (
        next((row for row in group.values() if row["impl"] == name and "error" not in row), None)
        for name in (OWN, PLAIN)
    )
    value = ratio(plain, own) if own and plain else None
    return "-" if value is None else f"{value:.2f}"


def cell(row: Row | None, metric: str, unit: float) -> str:
    """Return one number of a table; a dash where there is none."""
    if row is None or row.get("error") or row.get(metric) is None:
        return "-"
    value = row[metric] * unit
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def grid(rows: list[Row], metric: str = "") -> tuple[str, list[str], list[list[str]]]:
    """Return title, header and lines of the table of one metric (``tflops``, ``call_us``, ...)."""
    metric = metric or ("call_us" if rows and rows[0]["suite"] == "host" else "tflops")
    unit, title = 1.0, TITLES.get(metric, metric)
    known = [row["tflops"] for row in rows if row["tflops"] is not None]
    if metric == "tflops" and known and max(known) < 1:
        unit, title = 1e3, "GFLOP/s"
    names = columns(rows)
    varied, compared = any(map(variant, rows)), any(row["impl"] == PLAIN for row in rows)
    header = ["pass", "dtype", "B", "S", "H", "D", "mask", *["with"] * varied, *names]
    header += [*["x plain"] * compared, "vs best peer"]
    lines = []
    for group in problems(rows):
        row = next(iter(group.values()))
        best = best_ratio(group)
        lines.append(
            [
                row["pass"],
                row["dtype"],
                str(row["batch"]),
                both(row["len_q"], row["len_k"], "x"),
                both(row["heads_q"], row["heads_k"], "/"),
                both(row["head_dim"], row["head_dim_v"], "/"),
                row["mask"],
                *[variant(row)] * varied,
                *(cell(group.get(name), metric, unit) for name in names),
                *[over_plain(group)] * compared,
                f"{best[0]:.2f} ({best[1]})" if best else "-",
            ]
        )
    return title, header, lines


def rich_table(rows: list[Row], metric: str = "") -> Table:
    """Return the table for a terminal."""
    title, header, lines = grid(rows, metric)
    table = Table(title=title, caption=CAPTION)
    for name in header:
        table.add_column(
            name, justify="left" if name in ("pass", "dtype", "mask", "with") else "right"
        )
    for line in lines:
        table.add_row(*line)
    return table


def markdown(rows: list[Row], metric: str = "") -> str:
    """Return the table for a page."""
    title, header, lines = grid(rows, metric)
    body = [header, ["---"] * len(header), *lines]
    return f"{title}; {CAPTION}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in body)


def csv_text(rows: list[Row]) -> str:
    """Return the rows as comma-separated values, nested fields as JSON."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow(
            {k: json.dumps(v) if isinstance(v, (dict, list)) else v for k, v in row.items()}
        )
    return text.getvalue().rstrip("\n")


def text(document: Document, form: str, metric: str = "") -> str:
    """Return a document as ``md``, ``json``, ``jsonl`` or ``csv``."""
    rows = document["rows"]
    if form == "json":
        return json.dumps(document, indent=1)
    if form == "jsonl":
        return "\n".join(json.dumps(row) for row in rows)
    return csv_text(rows) if form == "csv" else markdown(rows, metric)


def own_failed(rows: list[Row]) -> bool:
    """Whether cupyflash itself failed in any row."""
    return any(row["impl"] in (OWN, PLAIN) and "error" in row for row in rows)


def faults(rows: list[Row]) -> list[str]:
    """Return a sentence per row that did not go well, whoever's it is."""
    return [
        f"{column(row)} {row['dtype']} S{row['len_q']} D{row['head_dim']} {row['mask']}"
        f"{' ' if variant(row) else ''}{variant(row)}: {text}"
        for row in rows
        if (text := row.get("error") or row.get("note"))
    ]


def describe(env: dict[str, Any]) -> str:
    """Return one line on where and with what the results were made."""
    parts = [env.get("gpu") or env.get("cpu") or "unknown machine"]
    for name in ("driver", "nvrtc", "cupy", "torch", "numpy"):
        if env.get(name):
            parts.append(f"{name} {env[name]}")
    parts.append(env["date"][:10])
    if env.get("commit"):
        parts.append(f"commit {env['commit'][:12]}")
    return ", ".join(parts)
