"""The four output formats: table (rich at a terminal, tabulate elsewhere), json, csv and markdown."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import re
import shutil
import sys
import textwrap
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from linattn_cli.output import Document

Row = dict[str, Any]


def render(doc: Document) -> str:
    """The text that a finished document prints to stdout."""
    if doc.fmt == "json":
        return to_json(doc.as_dict()) + "\n"
    if doc.fmt == "csv":
        return _csv(doc.results or ([doc.summary] if doc.summary else []))
    if doc.fmt == "markdown":
        return _blocks(doc, _markdown_table)
    if doc.text is not None:
        return doc.text.rstrip("\n") + "\n"
    at_terminal = sys.stdout.isatty()
    return _blocks(doc, _rich_table if at_terminal else _plain_table, doc.columns)


def _blocks(doc: Document, table: Any, columns: list[str] | None = None) -> str:
    """The tables the command made, else the rows, then the summary as a table of two columns."""
    if doc.tables is not None:
        shown = [(caption, table(rows, column_names(rows)).strip("\n")) for caption, rows in doc.tables if rows]
        return "".join(f"{caption}\n\n{text}\n\n" for caption, text in shown).removesuffix("\n")
    parts = []
    if doc.results:
        chosen = column_names(doc.results)
        parts.append(table(doc.results, [name for name in columns if name in chosen] if columns else chosen))
    if doc.summary:
        rows = [{"summary": key, "value": value} for key, value in doc.summary.items()]
        parts.append(table(rows, ["summary", "value"]))
    return "\n".join(parts)


def to_json(data: Any, *, indent: int | None = 2) -> str:
    """Strict JSON of anything a result holds.

    >>> to_json({"loss": float("nan"), "path": Path("runs/a")}, indent=None)
    '{"loss": null, "loss_is_nan": true, "path": "runs/a"}'
    """
    return json.dumps(jsonable(data), indent=indent, ensure_ascii=False, allow_nan=False)


def jsonable(value: Any) -> Any:
    """Plain JSON data. A float that JSON cannot hold becomes null with a flag beside it.

    `{"loss": nan}` is `{"loss": null, "loss_is_nan": true}`; infinities are flagged `_is_inf` and
    `_is_negative_inf`. For a list the flag says that at least one of its nulls stands for that.

    >>> jsonable({"losses": [1.0, float("inf")]})
    {'losses': [1.0, None], 'losses_is_inf': True}
    """
    if isinstance(value, Enum):
        return jsonable(value.value)
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return _jsonable_mapping(value)
    if isinstance(value, (list, tuple, set, frozenset)):
        return [jsonable(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return jsonable({f.name: getattr(value, f.name) for f in dataclasses.fields(value)})
    if hasattr(value, "model_dump"):  # pydantic
        return jsonable(value.model_dump())
    if hasattr(value, "tolist"):  # numpy arrays and scalars, torch tensors
        return jsonable(value.tolist())
    return str(value)


def _jsonable_mapping(value: Mapping[Any, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for key, item in value.items():
        plain[str(key)] = jsonable(item)
        for flag in sorted(_nonfinite(item)):
            plain[f"{key}_is_{flag}"] = True
    return plain


def _nonfinite(value: Any) -> set[str]:
    """Which of nan, inf, negative_inf a value holds; a nested mapping flags its own."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        return {"nan" if math.isnan(value) else "inf" if value > 0 else "negative_inf"}
    if isinstance(value, (list, tuple, set, frozenset)):
        return {flag for item in value for flag in _nonfinite(item)}
    return set()


def column_names(rows: list[Row]) -> list[str]:
    """Every key of the rows, in order of first appearance.

    >>> column_names([{"a": 1}, {"b": 2, "a": 3}])
    ['a', 'b']
    """
    return list(dict.fromkeys(key for row in rows for key in row))


def cell(value: Any) -> str:
    """One value for people: four significant digits, or as many more as keep what is nearly 1 from reading as 1.

    >>> cell(0.123456), cell(0.99998644), cell(15), cell(98765.4), cell(None), cell(True), cell(2.5e-17)
    ('0.1235', '0.99999', '15', '98765', '-', 'yes', '2.5e-17')
    """
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float):
        if not math.isfinite(value):
            return str(value)
        if 1e4 <= abs(value) < 1e9:
            return f"{value:.0f}"
        digits = 4
        while (text := f"{value:.{digits}g}") in ("1", "-1") and value != round(value):
            digits += 1
        return text
    if isinstance(value, (list, tuple)):
        return ", ".join(cell(item) for item in value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={cell(item)}" for key, item in value.items())
    return str(jsonable(value))


def _csv(rows: list[Row]) -> str:
    columns = column_names(rows)
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    if columns:
        writer.writerow(columns)
    for row in rows:
        writer.writerow([_csv_cell(row.get(name)) for name in columns])
    return buffer.getvalue()


def _csv_cell(value: Any) -> str:
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float):
        return repr(value)  # all digits; nan and inf in the words pandas reads
    plain = jsonable(value)
    if plain is None:
        return ""
    return plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _alignment(rows: list[Row], name: str) -> str:
    values = [row[name] for row in rows if row.get(name) is not None]
    return "right" if values and all(_is_number(value) for value in values) else "left"


def _cells(rows: list[Row], columns: list[str]) -> list[list[str]]:
    return [[cell(row[name]) if name in row else "" for name in columns] for row in rows]


def _tabulate(rows: list[Row], columns: list[str], style: str, body: list[list[str]]) -> str:
    from tabulate import tabulate

    alignments = [_alignment(rows, name) for name in columns]
    return tabulate(body, headers=columns, tablefmt=style, disable_numparse=True, colalign=alignments) + "\n"


def _plain_table(rows: list[Row], columns: list[str]) -> str:
    return _tabulate(rows, columns, "simple", _cells(rows, columns))


def _markdown_table(rows: list[Row], columns: list[str]) -> str:
    body = [[text.replace("|", "\\|") for text in line] for line in _cells(rows, columns)]
    return _tabulate(rows, columns, "github", body)


def _rich_table(rows: list[Row], columns: list[str]) -> str:
    """A table for the terminal's width: text wraps between words, numbers and words never break.

    What cannot fit even so is printed wider, for the terminal to wrap: nothing is cut.
    """
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    body = _cells(rows, columns)
    widths = _column_widths(columns, body, shutil.get_terminal_size().columns)
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for name, width in zip(columns, widths, strict=True):
        justify: Any = _alignment(rows, name)
        table.add_column(Text(_wrapped_name(name, width)), justify=justify, no_wrap=True)
    for line in body:
        # Wrapped here, because rich drops letters where a column is as narrow as its words.
        table.add_row(*(Text(_wrapped_text(text, width)) for text, width in zip(line, widths, strict=True)))
    console = Console(file=io.StringIO(), force_terminal=True, width=sum(widths) + _GAP * len(widths), highlight=False)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


_GAP = 2


def _column_widths(columns: list[str], body: list[list[str]], total: int) -> list[int]:
    """Widths of the columns: the longest cell, or less where the widest must shrink to fit into `total`."""
    widths, least = [], []
    for index, name in enumerate(columns):
        cells = [line[index] for line in body]
        words = max((len(word) for text in cells for word in text.split()), default=0)
        header = max(map(len, _wrapped_name(name, words).split("\n")))
        least.append(max(words, header))
        widths.append(max(header, *map(len, cells)))
    excess = sum(widths) + _GAP * (len(widths) - 1) - total
    while excess > 0:
        spare = [width - low for width, low in zip(widths, least, strict=True)]
        widest = max(range(len(widths)), key=lambda index: (spare[index] > 0, widths[index]))
        if spare[widest] <= 0:
            break
        widths[widest] -= 1
        excess -= 1
    return widths


def _wrapped_text(text: str, width: int) -> str:
    return textwrap.fill(text, max(width, 1), break_long_words=False, break_on_hyphens=False)


def _wrapped_name(name: str, width: int) -> str:
    """A column's name on lines of at most `width` where its underscores allow it.

    >>> _wrapped_name("peak_memory_mib", 7)
    'peak_\\nmemory_\\nmib'
    """
    lines = [""]
    for piece in re.findall(r"[^_]+_?|_", name):
        if lines[-1] and len(lines[-1]) + len(piece) > width:
            lines.append("")
        lines[-1] += piece
    return "\n".join(lines)
