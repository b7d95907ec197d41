"""The page of a federated run: `report.html`, from what `federated.json` says. One file, no script, no network.

Rounds and what they cost, who took part and who was lost, how the model serves each client, and the privacy that is
spent. Every text that came from a file is escaped where it enters the HTML.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from shoal import units
from shoal.errors import CorruptCheckpoint, UsageError
from shoal.observe.charts import Across, Curve, Level, chart
from shoal.observe.facts import replace_file
from shoal.observe.report import document
from shoal.observe.tables import section, table

PAGE, REPORT = "report.html", "federated.json"
MOST_ROWS = 40
"""Rounds in the table; of more, the first and the last."""
Result = Mapping[str, Any]
Rows = Sequence[Mapping[str, Any]]
ROUNDS = Across("round")


def write_page(directory: Path) -> Path:
    """Writes the page of the run in `directory`, and returns its path.

    Raises `UsageError` where no federated run has ended there, and `CorruptCheckpoint` for a report of another form.
    """
    source = directory / REPORT
    try:
        result = json.loads(source.read_text(encoding="utf-8"))
        content = page(result)
    except FileNotFoundError as error:
        raise UsageError(f"{directory} has no {REPORT}: no federated run has ended there") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptCheckpoint(f"{source} is no report of this version ({error}): play the run again") from error
    replace_file(directory / PAGE, content.encode("utf-8", errors="replace"))
    return directory / PAGE


def page(result: Result) -> str:
    """The whole page."""
    rows: Rows = result["rounds"]
    body = _header(result) + _numbers(result)
    if rows:
        body += _quality(rows) + _taking_part(result, rows) + _clients(result) + _privacy(result, rows) + _table(rows)
    body += _refused(result["refused"])
    return document(str(result["name"]), body)


def _header(result: Result) -> str:
    rounds = result["totals"]["rounds"]
    about = f"{result['strategy']} over {units.plural(result.get('clients_enrolled', 0), 'client')}"
    return (
        f'<header><p class="kicker">Shoal federated report</p><h1>{escape(str(result["name"]))}</h1>'
        f'<p class="state finished">{escape(units.plural(rounds, "round"))}</p>'
        f'<p class="about">{escape(about)}</p></header>'
    )


def _numbers(result: Result) -> str:
    totals, fairness, rows = result["totals"], result["fairness"], result["rounds"]
    asked = sum(row["asked"] for row in rows)
    found: list[tuple[str, str, str]] = []
    for label, key in (("Held-out accuracy", "accuracy/eval"), ("Held-out loss", "loss/eval")):
        values = [row["values"][key] for row in rows if key in row["values"]]
        if values:
            best = max(values) if key == "accuracy/eval" else min(values)
            found.append((label, _value(key)(values[-1]), f"best {_value(key)(best)}"))
    name = _kind(fairness)
    if name:
        worst, deviation = fairness[f"{name}/worst"], fairness[f"{name}/deviation"]
        found.append((f"Worst client's {name}", _value(name)(worst), f"deviation {_value(name)(deviation)}"))
    if asked:
        counted = totals["counted"]
        found.append(("Updates that counted", units.count(counted), f"{units.percent(counted / asked)} of those asked"))
    found.append(("Lost", units.count(totals["lost"]), f"and {totals['late']} late"))
    found.append(("Uploaded", units.byte_size(totals["up_bytes"]), f"down {units.byte_size(totals['down_bytes'])}"))
    if "privacy" in result:
        privacy = result["privacy"]
        found.append(("Epsilon", f"{privacy['epsilon']:.3g}", f"of {privacy['budget']:g}, delta {privacy['delta']:g}"))
    cells = "".join(
        f"<div><dt>{escape(label)}</dt><dd>{escape(value)}<small>{escape(note)}</small></dd></div>"
        for label, value, note in found
    )
    return f'<dl class="numbers">{cells}</dl>'


def _quality(rows: Rows) -> str:
    accuracy = _curve(rows, "held out", lambda row: row["values"].get("accuracy/eval"))
    losses = [
        _curve(rows, "at clients", lambda row: row["values"].get("loss/train"), look="faint"),
        _curve(rows, "held out", lambda row: row["values"].get("loss/eval")),
    ]
    charts = chart("Loss", [curve for curve in losses if len(curve.places)], across=ROUNDS, may_be_log=True)
    if len(accuracy.places):
        charts = chart("Accuracy", [accuracy], across=ROUNDS, form=units.percent) + charts
    return section("The model", f'<div class="grid-of-charts">{charts}</div>')


def _taking_part(result: Result, rows: Rows) -> str:
    people = [
        _curve(rows, "counted", lambda row: row["counted"]),
        _curve(rows, "lost", lambda row: row["lost"], look="dots"),
    ]
    up = [_curve(rows, "up", lambda row: row["up_bytes"]), _curve(rows, "down", lambda row: row["down_bytes"])]
    up[1] = Curve("down", up[1].places, up[1].values, "faint")
    seconds = [_curve(rows, "", lambda row: row["time_s"])]
    charts = (
        chart("Clients of a round", people, across=ROUNDS, from_zero=True)
        + chart("Bytes of a round", up, across=ROUNDS, from_zero=True, form=units.byte_size)
        + chart("Time since the start", seconds, across=ROUNDS, from_zero=True, form=units.seconds)
        + _participation(result)
    )
    attempts = sum(row["attempts"] - 1 for row in rows)
    lead = f"{units.plural(attempts, 'attempt')} failed with too few contributions." if attempts else ""
    return section("Taking part", f'<div class="grid-of-charts">{charts}</div>', lead=lead)


def _participation(result: Result) -> str:
    rounds = sorted(result["clients"].get("rounds", ()))
    if not rounds:
        return ""
    curve = Curve("", range(1, len(rounds) + 1), rounds)
    return chart("Rounds in which a client counted", [curve], across=Across("clients, fewest first"), from_zero=True)


def _clients(result: Result) -> str:
    """How the newest model serves each client on its own samples."""
    fairness, each = result["fairness"], result["clients"]
    name = _kind(fairness)
    if not name:
        return ""
    form = _value(name)
    ordered = sorted(each[name], reverse=name == "loss")
    curves = [Curve("own model" if "shared model" in each else "", range(1, len(ordered) + 1), ordered)]
    if "shared model" in each:
        shared = sorted(each["shared model"], reverse=name == "loss")
        curves.append(Curve("shared model", range(1, len(shared) + 1), shared, "faint"))
    spread = chart(
        f"{name.capitalize()} of each client",
        curves,
        across=Across("clients, worst first"),
        level=Level("median", fairness[f"{name}/median"]),
        form=form,
    )
    pairs = sorted(zip(each["samples"], each[name], strict=True))
    by_size = chart(
        f"{name.capitalize()} by samples",
        [Curve("", [size for size, _ in pairs], [value for _, value in pairs], "dots")],
        across=Across("samples"),
        form=form,
    )
    columns = [key for key in fairness if key.startswith(f"{name}/")]
    rows = [(name, *(form(fairness[key]) for key in columns))]
    figures = table(["", *(key.partition("/")[2] for key in columns)], rows)
    lead = "The newest model on each client's own samples: is it good on the average, or for everybody?"
    return section("Fairness", f'<div class="grid-of-charts">{spread}{by_size}</div>{figures}', lead=lead)


def _privacy(result: Result, rows: Rows) -> str:
    if "privacy" not in result:
        return ""
    facts = result["privacy"]
    spent = _curve(rows, "spent", lambda row: row["values"].get("privacy/epsilon"))
    drawn = chart("Epsilon", [spent], across=ROUNDS, from_zero=True, level=Level("budget", facts["budget"]))
    what = [
        (key.replace("_", " "), str(value) if isinstance(value, str) else f"{value:.4g}")
        for key, value in facts.items()
    ]
    lead = "What an attacker who sees every model can learn of one " + str(facts["unit"]) + " is bounded by epsilon."
    return section("Privacy", drawn + table(["", ""], what), lead=lead)


def _table(rows: Rows) -> str:
    some = list(rows) if len(rows) <= MOST_ROWS else [*rows[: MOST_ROWS // 2], *rows[-MOST_ROWS // 2 :]]
    names = sorted({name for row in rows for name in row["values"]})
    columns = ["round", "time", "counted", "lost", "late", "up", *names]
    cells = [
        (
            str(row["round"]),
            units.seconds(row["time_s"]),
            f"{row['counted']}/{row['asked']}",
            str(row["lost"]),
            str(row["late"]),
            units.byte_size(row["up_bytes"]),
            *(_value(name)(row["values"][name]) if name in row["values"] else "" for name in names),
        )
        for row in some
    ]
    lead = "" if len(some) == len(rows) else f"The first and the last {MOST_ROWS // 2} of {len(rows)}."
    return section("Rounds", table(columns, cells), lead=lead)


def _refused(sentences: Sequence[str]) -> str:
    if not sentences:
        return ""
    shown = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences[:MOST_ROWS])
    more = len(sentences) - MOST_ROWS
    rest = f"<p>And {more} more.</p>" if more > 0 else ""
    return section("Refused, and what else was said", f"<ul>{shown}</ul>{rest}")


def _curve(rows: Rows, label: str, of: Callable[[Mapping[str, Any]], Any], *, look: str = "main") -> Curve:
    """A figure over rounds; a round without it is left out."""
    found = [(row["round"], value) for row in rows if (value := of(row)) is not None]
    return Curve(label, [place for place, _ in found], [float(value) for _, value in found], look)


def _kind(fairness: Mapping[str, float]) -> str:
    """What clients are compared by; nothing where the server sees no client's samples."""
    return next(iter(fairness), "").partition("/")[0]


def _value(name: str) -> Callable[[float], str]:
    """How a figure of this name is written."""
    written = units.percent if name.startswith("accuracy") else units.number
    return lambda value: written(value) if math.isfinite(value) else "not finite"
