"""The sections of a report as Markdown and as one self-contained HTML page."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sharebert.table import markdown_table

_NUMBER = re.compile(r"[-+]?[\d.,]+(e[-+]?\d+)?( ± [\d.,]+)?|-|not reached|")


@dataclass(frozen=True)
class Table:
    """Rows of cells as they are shown."""

    head: list[str]
    rows: list[list[str]]

    def is_numeric(self, column: int) -> bool:
        """Whether a column is set flush right."""
        return all(_NUMBER.fullmatch(row[column]) for row in self.rows)


@dataclass(frozen=True)
class Section:
    """A heading and what stands below it, in the order of the fields."""

    title: str
    text: list[str] = field(default_factory=list)
    """Paragraphs."""
    table: Table | None = None
    picture: Path | None = None
    """A PNG in the report's folder."""
    caption: str = ""
    """What the picture shows; also read out in its place."""

    @property
    def anchor(self) -> str:
        """Its id on the page."""
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-")


def as_markdown(title: str, sections: Sequence[Section]) -> str:
    """The whole report; pictures are linked by name."""
    parts = [f"# {title}"]
    for section in sections:
        parts += [f"## {section.title}", *section.text]
        if section.table is not None:
            parts.append(markdown_table(section.table.head, section.table.rows))
        if section.picture is not None:
            parts += [f"![{section.caption}]({section.picture.name})", section.caption]
    return "\n\n".join(parts) + "\n"


STYLE = """
:root { color-scheme: light dark;
  --ink: #1c1e21; --soft: #5c6370; --line: #d9dce1; --paper: #ffffff; --shade: #f4f5f7; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8eb; --soft: #a2a9b4; --line: #3a4048; --paper: #16181c; --shade: #1f2228; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2.5rem 1.5rem 5rem; max-width: 68rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "DejaVu Sans", sans-serif; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 1rem; }
h2 { font-size: 1.3rem; margin: 3rem 0 .6rem; padding-top: .6rem; border-top: 1px solid var(--line); }
p { max-width: 46rem; margin: .6rem 0; }
nav { display: flex; flex-wrap: wrap; gap: .25rem 1.1rem; margin: 0 0 1rem; font-size: .92rem; }
a { color: inherit; text-decoration-color: var(--soft); text-underline-offset: .2em; }
.scroll { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .38rem .8rem; text-align: left; border-bottom: 1px solid var(--line); vertical-align: top; }
th { font-weight: 600; color: var(--soft); vertical-align: bottom; }
td.number, th.number { text-align: right; }
td:not(:first-child):not(:last-child), td.number { white-space: nowrap; }
tbody tr:nth-child(even) { background: var(--shade); }
figure { margin: 1.2rem 0; }
img { display: block; width: 100%; height: auto; background: #ffffff; border-radius: 6px; padding: .5rem; }
figcaption { color: var(--soft); font-size: .92rem; margin-top: .5rem; max-width: 46rem; }
@media print { nav { display: none; } h2 { break-after: avoid; } figure, tr { break-inside: avoid; } }
""".strip()


def as_html(title: str, sections: Sequence[Section]) -> str:
    """One page that needs nothing else: style and pictures are inside. For light and dark screens, and paper."""
    links = "".join(f'<a href="#{section.anchor}">{html.escape(section.title)}</a>' for section in sections)
    body = "\n".join(_html_section(section) for section in sections)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title>
<style>
{STYLE}
</style>
</head>
<body>
<h1>{html.escape(title)}</h1>
<nav>{links}</nav>
{body}
</body>
</html>
"""


def _html_section(section: Section) -> str:
    parts = [f'<section id="{section.anchor}">', f"<h2>{html.escape(section.title)}</h2>"]
    parts += [f"<p>{html.escape(paragraph)}</p>" for paragraph in section.text]
    if section.table is not None:
        parts.append(_html_table(section.table))
    if section.picture is not None:
        data = base64.b64encode(section.picture.read_bytes()).decode("ascii")
        caption = html.escape(section.caption)
        image = f'<img alt="{caption}" src="data:image/png;base64,{data}">'
        parts.append(f"<figure>{image}<figcaption>{caption}</figcaption></figure>")
    return "\n".join([*parts, "</section>"])


def _html_table(table: Table) -> str:
    kinds = [' class="number"' if table.is_numeric(column) else "" for column in range(len(table.head))]

    def row(cells: list[str], tag: str) -> str:
        shown = (f"<{tag}{kind}>{html.escape(cell)}</{tag}>" for cell, kind in zip(cells, kinds, strict=True))
        return f"<tr>{''.join(shown)}</tr>"

    rows = "\n".join(row(cells, "td") for cells in table.rows)
    return (
        f'<div class="scroll"><table>\n<thead>{row(table.head, "th")}</thead>\n<tbody>\n{rows}\n</tbody></table></div>'
    )
