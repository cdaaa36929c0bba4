"""`linattn report`: read every source, then write one page."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from linattn_cli.output import CliError, Document
from linattn_cli.plotting import check_plot_path
from linattn_cli.runs import write_atomic

SUFFIXES = (".html", ".htm")


def write(sources: Sequence[Path], out: Path, doc: Document, *, title: str) -> None:
    """Write the page of `sources` to `out`, and a row a source to `doc`.

    Raises `CliError` (exit 2) for a source that is no run, sweep or document, which it names; the page is
    written whole or not at all.
    """
    from linattn_cli import report_html, report_sections

    check_plot_path(out, option="--out", suffixes=SUFFIXES)
    seen: set[Path] = set()
    for path in sources:
        if path.resolve() in seen:
            raise CliError(f"{path} is given twice", hint="give each source once")
        seen.add(path.resolve())
    doc.config = {"sources": [str(path) for path in sources], "out": str(out), "title": title}
    sections, runs = [], []
    with doc.progress(len(sources), "report") as bar:
        for path in sources:
            section, run = report_sections.read(path)
            sections.append(section)
            runs += [run] if run is not None else []
            bar.update(1)
    doc.results = [
        {
            "source": section.source,
            "kind": section.kind,
            "title": section.title,
            "status": section.status,
            "panels": len(section.picture.panels) if section.picture else 0,
            "tables": sum(bool(table.rows) for table in section.tables),
        }
        for section in sections
    ]
    if len(runs) > 1:
        sections.insert(0, report_sections.comparison(runs))
    text = report_html.page(title, sections)
    write_atomic(out, text)
    doc.summary = {"report": str(out), "sources": len(sources), "bytes": len(text.encode())}
    doc.note(f"next: open {shlex.quote(str(out))} in any browser; it needs no network")
