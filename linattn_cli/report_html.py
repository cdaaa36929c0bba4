"""The page of `linattn report`: HTML without scripts, fonts or anything else from outside.

Everything that comes from a source goes through `escape`, and the page forbids itself to load or run anything.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from linattn_cli import __version__, plotting
from linattn_cli.render import cell, column_names
from linattn_cli.report_sections import Section, Table

STYLE = """
:root { color-scheme: light; --ink: #1b1b1f; --soft: #55555d; --line: #d9d9de; --wash: #f5f5f7; --link: #0050a0; }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem clamp(0.8rem, 3vw, 2rem) 4rem; max-width: 76rem; color: var(--ink);
  background: #fff; font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 0.3rem; }
h2 { font-size: 1.3rem; line-height: 1.25; margin: 0 0 0.2rem; }
h3 { font-size: 1rem; margin: 1.4rem 0 0.4rem; }
h1, h2, h3, p, dd, li, summary { overflow-wrap: anywhere; }
td { overflow-wrap: break-word; }
a { color: var(--link); }
p.meta, figcaption { color: var(--soft); font-size: 0.875rem; margin: 0.2rem 0 0; }
nav ol { padding-left: 1.3rem; }
nav span { color: var(--soft); font-size: 0.875rem; margin-left: 0.4rem; }
section { border-top: 2px solid var(--ink); margin-top: 2.5rem; padding-top: 0.9rem; }
.status { display: inline-block; border: 1px solid currentColor; border-radius: 0.3rem; padding: 0 0.4rem;
  font-size: 0.8rem; font-weight: 600; }
.status.ok { color: #05664b; }
.status.bad { color: #a63a00; }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(8.5rem, 1fr)); gap: 0.6rem; margin: 1rem 0; }
dl div { background: var(--wash); border-radius: 0.4rem; padding: 0.5rem 0.7rem; }
dt { color: var(--soft); font-size: 0.78rem; overflow-wrap: anywhere; }
dd { margin: 0; font-size: 1.15rem; font-weight: 600; font-variant-numeric: tabular-nums; }
.pictures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr));
  gap: 1.2rem; margin-top: 1rem; }
figure { margin: 0; min-width: 0; }
figure h4 { margin: 0 0 0.2rem; font-size: 0.95rem; }
svg { display: block; width: 100%; height: auto; max-width: 42rem; }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: 0.4rem; }
.scroll:focus-visible { outline: 2px solid var(--link); }
table { border-collapse: collapse; font-size: 0.85rem; font-variant-numeric: tabular-nums; min-width: 100%; }
th, td { padding: 0.3rem 0.6rem; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line); }
th { background: var(--wash); white-space: nowrap; }
tr:last-child td { border-bottom: 0; }
td { min-width: 3.5rem; max-width: 28rem; }
.number { text-align: right; white-space: nowrap; }
pre { background: var(--wash); border-radius: 0.4rem; padding: 0.7rem 0.9rem; margin: 0.4rem 0; font-size: 0.82rem;
  line-height: 1.45; white-space: pre-wrap; overflow-wrap: anywhere; }
details { margin: 0.7rem 0; }
summary { cursor: pointer; font-weight: 600; }
.notes { border-left: 4px solid #a63a00; padding: 0.1rem 0 0.1rem 0.9rem; margin: 0.9rem 0; }
.notes p { margin: 0.3rem 0; }
@media print { body { max-width: none; font-size: 11px; } section, figure, tr { break-inside: avoid-page; }
  section { break-inside: auto; } .scroll { overflow: visible; } details::details-content { content-visibility: visible;
  height: auto; } }
"""

# The page may hold its own style and nothing else: whatever a source smuggled in could neither load nor run.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def page(title: str, sections: Sequence[Section]) -> str:
    """The whole page."""
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{escape(POLICY)}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta name="generator" content="linattn {escape(__version__)}">',
            '<link rel="icon" href="data:,">',
            f"<title>{escape(title)}</title>",
            f"<style>{STYLE}</style>",
            "</head>",
            "<body>",
            f"<header><h1>{escape(title)}</h1>",
            f'<p class="meta">linattn {escape(__version__)}, {time.strftime("%Y-%m-%d %H:%M %Z")}</p></header>',
            *_contents(sections),
            "<main>",
            *(line for number, section in enumerate(sections, start=1) for line in _section(section, number)),
            "</main>",
            "</body>",
            "</html>",
            "",
        ]
    )


def _contents(sections: Sequence[Section]) -> Iterator[str]:
    if len(sections) > 1:
        yield '<nav aria-label="Contents"><ol>'
        for number, section in enumerate(sections, start=1):
            where = f"<span>{escape(section.kind)}, {escape(section.source)}</span>"
            yield f'<li><a href="#s{number}">{escape(section.title)}</a> {where}</li>'
        yield "</ol></nav>"


def _section(section: Section, number: int) -> Iterator[str]:
    yield f'<section id="s{number}" aria-labelledby="h{number}">'
    yield f'<h2 id="h{number}">{escape(section.title)}</h2>'
    kind = "ok" if section.status == "finished" else "bad"
    status = f'<span class="status {kind}">{escape(section.status)}</span>'
    yield f'<p class="meta">{escape(section.kind)} · {escape(section.source)} · {status}</p>'
    if section.notes:
        yield '<div class="notes">' + "".join(f"<p>{escape(note)}</p>" for note in section.notes) + "</div>"
    if section.figures:
        figures = (f"<div><dt>{escape(k)}</dt><dd>{escape(cell(v))}</dd></div>" for k, v in section.figures.items())
        yield "<dl>" + "".join(figures) + "</dl>"
    if section.picture is not None:
        yield '<div class="pictures">'
        for title, svg in plotting.svgs(section.picture, f"s{number}"):
            yield f"<figure><h4>{escape(title)}</h4>{svg}</figure>"
        yield f'</div><p class="meta">{escape(section.picture.caption)}</p>'
    for table in section.tables:
        yield from _table(table)
    if section.commands:
        yield "<h3>To do it again</h3>"
        yield from (f"<pre><code>{escape(command)}</code></pre>" for command in section.commands)
    if section.settings:
        yield f"<details><summary>Configuration</summary><pre>{escape(section.settings)}</pre></details>"
    if section.env:
        rows = [{"environment": key, "value": value} for key, value in section.env.items() if value is not None]
        yield from _table(Table("Environment", rows, folded=True))
    yield "</section>"


def _table(table: Table) -> Iterator[str]:
    if not table.rows:
        return
    caption = escape(table.caption)
    yield f"<details><summary>{caption}</summary>" if table.folded else f"<h3>{caption}</h3>"
    names = column_names(list(table.rows))
    numeric = {name for name in names if _is_numeric([row.get(name) for row in table.rows])}

    def tag(kind: str, name: str, text: str) -> str:
        attribute = ' class="number"' if name in numeric else ""
        scope = ' scope="col"' if kind == "th" else ""
        return f"<{kind}{scope}{attribute}>{escape(text)}</{kind}>"

    # A table that scrolls must be reachable by keyboard, and then it needs a name.
    yield f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(table.caption, quote=True)}"><table>'
    yield "<thead><tr>" + "".join(tag("th", name, name) for name in names) + "</tr></thead><tbody>"
    for row in table.rows:
        yield "<tr>" + "".join(tag("td", n, cell(row[n]) if n in row else "") for n in names) + "</tr>"
    yield "</tbody></table></div>" + ("</details>" if table.folded else "")


def _is_numeric(values: Sequence[Any]) -> bool:
    known = [value for value in values if value is not None]
    return bool(known) and all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in known)
