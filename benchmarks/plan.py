"""`python -m benchmarks.plan TABLES`: predicted step times beside published ones, worst first.

Each machine type is calibrated on one row, which is marked and left out of the figures; everything else is predicted.
The peers of the two vTrain tables are the errors of vTrain's own simulator (arXiv:2312.12391: 14.7 % on several nodes,
8.4 % on one, from profiled kernels). Regret and errors by term are explained in `plan_errors`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import published, published_steps
from benchmarks.command import run
from benchmarks.plan_errors import Machine, Scored, Terms, by_term, regrets
from benchmarks.plan_memory import memory_checks, peaks
from benchmarks.plan_page import markdown_page
from benchmarks.published import Row, layer_times
from shoal.bench.options import AsJson
from shoal.bench.report import Check, check, print_report
from shoal.cli.arguments import output_file
from shoal.cost.transformer import llama
from shoal.planner.predict.predictor import Predictor, Workload
from shoal.planner.predict.stack import MODERN
from shoal.planner.predict.workload import Constants, calibrate_compute, calibrate_dispatch
from shoal.planner.search.search import Found, search
from shoal.topology.cluster_file import known_cluster

SELENE = "Selene"
SC21_ROW = "18B"
MULTI_ROW = "h6144 L40 on 256, batch 1024: t8 p1 d32 micro 8"
SINGLE_TABLE = "vTrain, one node"
SEEN = ("SC'21 table 1", "SC'21 table 2", "Korthikanti tables 3, 5", "vTrain, several nodes", SINGLE_TABLE)
"""Tables that the model was made with."""
NEAR = 0.08
SINGLE_ROW = "h1024 L16 on 2, batch 32: t1 p1 d2 micro 1"


def plan(
    tables: Annotated[Path, typer.Argument(metavar="TABLES", help="Folder of published tables.")],
    markdown: Annotated[Path | None, typer.Option(help="Write the page here.", callback=output_file)] = None,
    as_json: AsJson = False,
) -> None:
    """Predicted step times beside published ones, worst rows first.

    Example: python -m benchmarks.plan tests/planner/published
    """
    result = measure(tables)
    if markdown is not None:
        markdown.write_text(result["markdown"], encoding="utf-8")
    if as_json:
        print_report("plan", result, as_json=True)
    else:
        print(result["markdown"])


def measure(folder: Path) -> dict[str, Any]:
    """`rows`, `checks` and the page in `markdown`. Raises `OSError` where a table is missing in `folder`."""
    found = list(machines(folder))
    result = report(found)
    selene = next(machine for machine in found if machine.name == SELENE)
    layers = list(layer_times(folder, selene.constants))
    worst = max(abs(one.error) for one in layers)
    result["checks"].append(check("Korthikanti table 4: worst error of a layer", worst, 0.12, at_most=True))
    result["rows"] += [{"table": "Korthikanti table 4", **asdict(one), "error": round(one.error, 4)} for one in layers]
    seconds, plans = search_seconds()
    result["checks"].append(check("405B on 16,384 devices: processor seconds", seconds, 10.0, at_most=True))
    result["rows"].append({"table": "search", "considered": plans.considered, "fitting": plans.fitting, "s": seconds})
    return result


def machines(folder: Path) -> Iterator[Machine]:
    """The machine types of the published tables, calibrated. Raises `OSError` where a table is missing."""
    selene = (*published.sc21(folder), *published.korthikanti(folder), *published.sc21_scaling(folder))
    several = tuple(published.vtrain(folder, file=published.VTRAIN_MULTI, table="vTrain, several nodes"))
    one = tuple(published.vtrain(folder, file=published.VTRAIN_SINGLE, table=SINGLE_TABLE))
    single = _row(one, SINGLE_ROW)
    dispatch = calibrate_dispatch(lambda c: predicted_s(single, c), single.measured_s, Constants())
    yield Machine(name="vTrain's node", rows=one, constants=dispatch, calibrated_on=SINGLE_ROW)
    for name, rows, chosen in ((SELENE, selene, SC21_ROW), ("vTrain's cluster", several, MULTI_ROW)):
        row = _row(rows, chosen)
        start = replace(Constants(), dispatch_s=dispatch.dispatch_s)
        compute = calibrate_compute(lambda c, row=row: predicted_s(row, c), row.measured_s, start)
        yield Machine(name=name, rows=rows, constants=compute, calibrated_on=chosen)
    for rows, row in published_steps.tables(folder):
        compute = calibrate_compute(lambda c, row=row: predicted_s(row, c), row.measured_s, Constants())
        yield Machine(name=row.table, rows=rows, constants=compute, calibrated_on=row.name)


def predicted_s(row: Row, constants: Constants) -> float:
    """The predicted seconds of the row's step."""
    return Predictor(row.workload, row.cluster, stack=row.stack, constants=constants).bill(row.plan).total


def scored(machine: Machine) -> list[Scored]:
    """Every row of a machine type with its prediction."""
    return [
        Scored(row=row, predicted_s=predicted_s(row, machine.constants), calibrated=row.name == machine.calibrated_on)
        for row in machine.rows
    ]


def report(found: Sequence[Machine]) -> dict[str, Any]:
    """The same for the step times of calibrated machine types, without layers and search."""
    all_scored = [one for machine in found for one in scored(machine)]
    checks = _checks(all_scored)
    terms = by_term(one for one in all_scored if one.row.table == SINGLE_TABLE)
    memory = peaks(found)
    checks += memory_checks(memory)
    return {
        "rows": [_record(one) for one in all_scored] + _constants(found) + [_term_record(one) for one in terms],
        "checks": checks,
        "markdown": markdown_page(all_scored, found, checks, terms, memory),
    }


def llama_405b_predictor() -> Predictor:
    """Llama 3 405B on its 16,384 H100 (arXiv:2407.21783): the job that the search's speed is promised for."""
    model = llama(126, 16384, 128, kv_heads=8, feed_forward=53248, vocabulary=128256)
    workload = Workload(model=model, global_samples=2048, sequence=8192)
    return Predictor(workload, known_cluster("h100-roce", 2048), stack=MODERN)


def search_seconds() -> tuple[float, Found]:
    """Processor seconds of one core for the whole search of `llama_405b_predictor`, and what it found."""
    predictor = llama_405b_predictor()
    begin_s = time.process_time()
    found = search(predictor)
    return time.process_time() - begin_s, found


def _checks(rows: Sequence[Scored]) -> list[Check]:
    tables = {name: _errors(rows, name) for name in dict.fromkeys(one.row.table for one in rows)}
    promised = tables["SC'21 table 1"] + tables["Korthikanti tables 3, 5"]
    several, one = tables["vTrain, several nodes"], tables[SINGLE_TABLE]
    regret = [value for _, value in regrets(rows)]
    return [
        check("SC'21 table 1 and Korthikanti: median error", statistics.median(promised), 0.05, at_most=True),
        check("SC'21 table 1 and Korthikanti: worst error", max(promised), 0.12, at_most=True),
        check("vTrain, several nodes: mean error (theirs 0.147)", statistics.mean(several), 0.10, at_most=True),
        check("vTrain, one node: mean error (theirs 0.084)", statistics.mean(one), 0.12, at_most=True),
        check("FSDP, float8, expert, small-cluster tables: share with a median of at most 8 %", _near(tables), 1.0),
        check("regret of the chosen plan: mean over groups", statistics.mean(regret), 0.03, at_most=True),
        check("regret of the chosen plan: share of groups above 3 %", _above(regret, 0.03), 0.0, at_most=True),
    ]


def _near(tables: Mapping[str, Sequence[float]]) -> float:
    """Of the tables that were found in public and that no part of the model was fitted to."""
    found = [statistics.median(errors) for name, errors in tables.items() if name not in SEEN]
    return sum(median <= NEAR for median in found) / len(found)


def _above(values: Sequence[float], bound: float) -> float:
    return sum(value > bound for value in values) / len(values)


def _errors(rows: Sequence[Scored], table: str) -> list[float]:
    """Absolute errors of a table, the calibrated row left out."""
    return [abs(one.error) for one in rows if one.row.table == table and not one.calibrated]


def _record(one: Scored) -> dict[str, Any]:
    return {
        "table": one.row.table,
        "row": one.row.name,
        "measured_s": round(one.row.measured_s, 4),
        "predicted_s": round(one.predicted_s, 4),
        "error": round(one.error, 4),
        "calibrated": one.calibrated,
    }


def _term_record(one: Terms) -> dict[str, Any]:
    record = {"table": f"{SINGLE_TABLE}, by term", **asdict(one)}
    for side in ("measured", "predicted"):
        record[side] = {f"{name} ms": round(value, 2) for name, value in record[side].items()}
    return record | {"scatter": round(one.scatter, 5)}


def _constants(found: Sequence[Machine]) -> list[dict[str, Any]]:
    """Every constant of every machine type, with its origin."""
    return [
        {"table": "constants", "machine": machine.name, "name": name, "value": value, "origin": origin}
        for machine in found
        for name, value, origin in machine.constants.listed()
    ]


def _row(rows: Sequence[Row], name: str) -> Row:
    return next(row for row in rows if row.name == name)


if __name__ == "__main__":
    run(plan)
