"""The page of `benchmarks.plan` in Markdown: figures, the worst rows of each table, regrets, terms, constants."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.plan_errors import TERMS, Machine, Scored, Terms, less_time_for_more, regrets
from benchmarks.plan_memory import Peak, memory_page

WORST_SHOWN = 12
TRIED, NOTICED = (1, 2, 3), 0.03


def markdown_page(
    rows: Sequence[Scored],
    found: Sequence[Machine],
    checks: Sequence[dict[str, Any]],
    terms: Sequence[Terms],
    memory: Sequence[Peak],
) -> str:
    """The whole page."""
    lines = ["# Predicted against published step times", "", "| figure | value | bound | |", "|---|---|---|---|"]
    lines += [f"| {c['name']} | {c['value']} | {c['bound']} | {'holds' if c['holds'] else 'SHORT'} |" for c in checks]
    for table in dict.fromkeys(one.row.table for one in rows):
        lines += _table(table, [one for one in rows if one.row.table == table])
    lines += ["", "## Regret, where the best predicted are tried (`shoal plan --measure N`)", "", *_tried(rows)]
    lines += ["", "## Regret, worst groups", "", "| group | regret |", "|---|---|"]
    lines += [f"| {name} | {value:.1%} |" for name, value in sorted(regrets(rows), key=lambda p: -p[1])[:WORST_SHOWN]]
    lines += memory_page(memory)
    lines += _by_term(terms)
    for machine in found:
        lines += ["", f"## Constants: {machine.name}, calibrated on `{machine.calibrated_on}`", ""]
        lines += ["| constant | value | origin |", "|---|---|---|"]
        lines += [f"| {name} | {value:.4g} | {origin} |" for name, value, origin in machine.constants.listed()]
    return "\n".join(lines) + "\n"


def _by_term(terms: Sequence[Terms]) -> list[str]:
    """Measured and predicted milliseconds of each term, and where more work was measured to take less time."""
    lines = ["", "## One node without a pipeline, by term: measured / predicted ms", ""]
    lines += [f"| hidden, tensor, micro | {' | '.join(TERMS)} | scatter |", "|---|" + "---|" * (len(TERMS) + 1)]
    for one in terms:
        cells = " | ".join(f"{one.measured[name]:.2f} / {one.predicted[name]:.2f}" for name in TERMS)
        lines.append(f"| {one.hidden}, {one.tensor}, {one.microbatch} | {cells} | {one.scatter:.2%} |")
    lines += ["", "More work, and less time for a layer:", ""]
    for more, less in less_time_for_more(terms):
        lines.append(
            f"- tensor {more.tensor}: hidden {more.hidden}, micro {more.microbatch} {more.measured['layer']:.2f} ms; "
            f"hidden {less.hidden}, micro {less.microbatch} {less.measured['layer']:.2f} ms"
        )
    return lines


def _table(name: str, rows: Sequence[Scored]) -> list[str]:
    errors = sorted((abs(one.error) for one in rows if not one.calibrated), reverse=True)
    head = f"mean {statistics.mean(errors):.1%}, median {statistics.median(errors):.1%}, worst {errors[0]:.1%}"
    lines = ["", f"## {name}: {len(rows)} rows, {head}", ""]
    lines += ["| row, worst first | measured s | predicted s | error |", "|---|---|---|---|"]
    for one in sorted(rows, key=lambda one: -abs(one.error))[:WORST_SHOWN]:
        mark = " (calibrated)" if one.calibrated else ""
        lines.append(f"| {one.row.name}{mark} | {one.row.measured_s:.3f} | {one.predicted_s:.3f} | {one.error:+.1%} |")
    return lines


def _tried(rows: Sequence[Scored]) -> list[str]:
    """Regrets where the plans that are predicted best are tried; 1: the prediction is trusted."""
    lines = ["| tried | mean | worst | groups above 3 % |", "|---|---|---|---|"]
    for tried in TRIED:
        found = [regret for _, regret in regrets(rows, tried=tried)]
        above = sum(regret > NOTICED for regret in found)
        lines.append(f"| {tried} | {statistics.mean(found):.2%} | {max(found):.1%} | {above} of {len(found)} |")
    return lines
