"""The pieces that every section of the report is made of: sections, tables, tabs. All text is escaped here.

A table has a label for each column, which its cells carry along: where the page is as narrow as a phone, the style
sheet turns every row of a wide table into a card of labelled values.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

NARROW_COLUMNS = 4
"""Tables of at most so many columns fit a phone as they are."""


class Html(str):
    """A text that is HTML already."""

    __slots__ = ()


Cell = str | Html


def section(title: str, body: str, *, lead: str = "") -> str:
    """A titled part of the page; `lead` is text, `body` is HTML."""
    opening = f'<p class="lead">{escape(lead)}</p>' if lead else ""
    return f"<section><h2>{escape(title)}</h2>{opening}{body}</section>"


def table(columns: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
    """A table whose first column names the rows; a cell that is no `Html` is escaped."""
    labels = [escape(label) for label in columns]
    head = f"<th>{labels[0]}</th>" + "".join(f"<td>{label}</td>" for label in labels[1:])
    body = "".join(_row(row, labels) for row in rows)
    kind = "few" if len(columns) <= NARROW_COLUMNS else "many"
    return f'<div class="scroll {kind}"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def tabs(name: str, panels: Sequence[tuple[str, str]]) -> str:
    """(label, HTML) of which one is shown at a time, chosen by radio buttons: it takes no script."""
    if len(panels) == 1:
        return panels[0][1]
    buttons = "".join(
        f'<input type="radio" name="{escape(name)}" id="{escape(name)}-{index}"{" checked" if index == 0 else ""}>'
        f'<label for="{escape(name)}-{index}">{escape(label)}</label>'
        for index, (label, _) in enumerate(panels)
    )
    return f'<div class="tabs">{buttons}' + "".join(f"<div>{body}</div>" for _, body in panels) + "</div>"


def _row(cells: Sequence[Cell], labels: Sequence[str]) -> str:
    name, *values = (cell if isinstance(cell, Html) else escape(cell) for cell in cells)
    data = "".join(f'<td data-label="{label}">{value}</td>' for label, value in zip(labels[1:], values, strict=True))
    return f'<tr><th data-label="{labels[0]}">{name}</th>{data}</tr>'
