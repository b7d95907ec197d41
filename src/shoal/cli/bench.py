"""`shoal bench`: figures beside a peer's, measured in one run."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from shoal.launch.environment import Place

app = typer.Typer(
    help="Benchmarks, each beside a peer in one run. They report, they do not judge: exit 0 even where a check fails.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

FEWEST_PAIRS = 100

AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on standard output, nothing else.")]
Processes = Annotated[int, typer.Option(help="Ranks of one thread.", min=2)]


@app.command("step")
def step(
    tokens: Annotated[
        str, typer.Option(help="Tokens of a rank and step, several with commas; multiples of 128.")
    ] = "256,2048",
    pairs: Annotated[
        int | None, typer.Option(help="Paired steps for each; default: 100, more where steps are short.", min=6)
    ] = None,
    processes: Processes = 2,
    as_json: AsJson = False,
) -> None:
    """A training step beside the same step in a hand-written DDP script.

    Example: shoal bench step --tokens 256 --pairs 20
    """
    from shoal.recipes.benchmarks import machine

    sizes = _sizes(tokens)
    if machine.is_rank():
        _as_rank(lambda place: _step(place, sizes[0], pairs or FEWEST_PAIRS))
        return
    results = []
    for size in sizes:
        count = pairs or max(FEWEST_PAIRS, min(4 * FEWEST_PAIRS, FEWEST_PAIRS * 1024 // size))
        arguments = ["bench", "step", "--tokens", str(size), "--pairs", str(count)]
        results.append(machine.on_ranks(arguments, processes=processes))
    _show("step", [r["row"] for r in results], [c for r in results for c in r["checks"]], as_json)


@app.command("checkpoint")
def checkpoint(
    saves: Annotated[int, typer.Option(help="Saves of each kind.", min=2)] = 10,
    processes: Processes = 2,
    as_json: AsJson = False,
) -> None:
    """What a save holds up, beside a blocking torch.save and fsync of the same state.

    Example: shoal bench checkpoint --saves 5
    """
    from shoal.recipes.benchmarks import machine

    if machine.is_rank():
        _as_rank(lambda place: _checkpoint(place, saves))
        return
    result = machine.on_ranks(["bench", "checkpoint", "--saves", str(saves)], processes=processes)
    _show("checkpoint", [result["row"]], result["checks"], as_json)


@app.command("start")
def start(
    repeats: Annotated[int, typer.Option(help="Starts of each command.", min=1)] = 5,
    as_json: AsJson = False,
) -> None:
    """Seconds from a command to its first step, beside a bare script under torchrun.

    Example: shoal bench start --repeats 3
    """
    from shoal.recipes.benchmarks.start import measure

    result = measure(repeats)
    _show("start", result["rows"], result["checks"], as_json)


@app.command("feed")
def feed(
    run_files: Annotated[list[Path], typer.Argument(metavar="RUN.toml...", help="Run files with data of Shoal's own.")],
    steps: Annotated[int, typer.Option(help="Steps as they are, and as many slowed.", min=10)] = 100,
    processes: Processes = 2,
    as_json: AsJson = False,
) -> None:
    """How long a step waits for its data, also when reading is slowed to just under the need.

    Example: shoal bench feed recipes/digits.toml
    """
    from shoal.recipes.benchmarks import machine

    if machine.is_rank():
        _as_rank(lambda place: _feed(place, run_files[0], steps))
        return
    commands = [["bench", "feed", str(file.resolve()), "--steps", str(steps)] for file in run_files]
    results = [machine.on_ranks(arguments, processes=processes) for arguments in commands]
    _show("feed", [r["row"] for r in results], [c for r in results for c in r["checks"]], as_json)


@app.command("zero")
def zero(
    tokens: Annotated[int, typer.Option(help="Tokens of a rank and step; a multiple of 128.", min=128)] = 256,
    pairs: Annotated[int, typer.Option(help="Paired steps.", min=6)] = FEWEST_PAIRS,
    processes: Processes = 2,
    as_json: AsJson = False,
) -> None:
    """Steps of ZeRO-1 and -2 beside DDP, of ZeRO-3 beside a hand-written fully_shard script.

    Example: shoal bench zero --pairs 20
    """
    from shoal.recipes.benchmarks import machine

    if machine.is_rank():
        _as_rank(lambda place: _zero(place, tokens, pairs))
        return
    arguments = ["bench", "zero", "--tokens", str(tokens), "--pairs", str(pairs)]
    result = machine.on_ranks(arguments, processes=processes)
    _show("zero", result["rows"], result["checks"], as_json)


@app.command("wire")
def wire(
    pairs: Annotated[int, typer.Option(help="Paired turns of each case.", min=3)] = 20,
    processes: Annotated[str, typer.Option(help="Numbers of ranks, several with commas.")] = "2,4",
    as_json: AsJson = False,
) -> None:
    """Shared memory beside Gloo: collectives of several sizes, and the bound that copying and adding allow.

    Example: shoal bench wire --pairs 5 --processes 2
    """
    from shoal.recipes.benchmarks import machine

    if machine.is_rank():
        _as_rank(lambda place: _wire(place, pairs))
        return
    worlds = [int(part) for part in processes.split(",") if part.strip().isdigit() and int(part) > 1]
    if not worlds:
        raise typer.BadParameter(f"'{processes}'; give numbers from 2, such as 2,4", param_hint="--processes")
    results = [machine.on_ranks(["bench", "wire", "--pairs", str(pairs)], processes=world) for world in worlds]
    _show("wire", [r for result in results for r in result["rows"]], [c for r in results for c in r["checks"]], as_json)


@app.command("memory")
def memory(
    tokens: Annotated[int, typer.Option(help="Tokens of the long sequence; a multiple of 8.", min=64)] = 32768,
    pairs: Annotated[int, typer.Option(help="Paired steps with recomputation and without.", min=3)] = 15,
    as_json: AsJson = False,
) -> None:
    """What a rank of four keeps: model state under ZeRO, activations of a long sequence and under recomputation.

    Example: shoal bench memory --tokens 4096 --pairs 5
    """
    from shoal.recipes.benchmarks import machine

    if machine.is_rank():
        _as_rank(lambda place: _memory(place, tokens, pairs))
        return
    if tokens % 8:
        raise typer.BadParameter(
            f"{tokens}; four ranks hold two equal parts each: give a multiple of 8", param_hint="--tokens"
        )
    arguments = ["bench", "memory", "--tokens", str(tokens), "--pairs", str(pairs)]
    result = machine.on_ranks(arguments, processes=4)
    _show("memory", result["rows"], result["checks"], as_json)


@app.command("pipeline")
def pipeline(
    repeats: Annotated[int, typer.Option(help="Passes of each schedule, of which the median counts.", min=1)] = 3,
    as_json: AsJson = False,
) -> None:
    """Pipelines of four ranks: bubble of each schedule, activations in flight, and how even the automatic cut is.

    Example: shoal bench pipeline --repeats 1
    """
    from shoal.recipes.benchmarks import machine

    if machine.is_rank():
        _as_rank(lambda place: _pipeline(place, repeats))
        return
    result = machine.on_ranks(["bench", "pipeline", "--repeats", str(repeats)], processes=4)
    _show("pipeline", result["rows"], result["checks"], as_json)


@app.command("plan")
def plan(
    tables: Annotated[Path, typer.Argument(metavar="TABLES", help="Folder of published tables.")],
    markdown: Annotated[Path | None, typer.Option(help="Write the page here.")] = None,
    as_json: AsJson = False,
) -> None:
    """Predicted step times beside published ones, worst rows first.

    Example: shoal bench plan tests/planner/published
    """
    from shoal.recipes.benchmarks.plan import measure

    result = measure(tables)
    if markdown is not None:
        markdown.write_text(result["markdown"], encoding="utf-8")
    if as_json:
        _show("plan", result["rows"], result["checks"], as_json)
    else:
        print(result["markdown"])


@app.command("simulate")
def simulate(
    tables: Annotated[Path, typer.Argument(metavar="TABLES", help="Folder of published tables.")],
    as_json: AsJson = False,
) -> None:
    """The simulator beside the zero-bubble paper's tables and closed forms.

    Example: shoal bench simulate tests/planner/published
    """
    from shoal.recipes.benchmarks.simulate import measure

    result = measure(tables)
    _show("simulate", result["rows"], result["checks"], as_json)


def _zero(place: Place, tokens: int, pairs: int) -> dict[str, Any] | None:
    from shoal.recipes.benchmarks.zero import measure

    return measure(place, tokens=tokens, pairs=pairs)


def _wire(place: Place, pairs: int) -> dict[str, Any] | None:
    from shoal.recipes.benchmarks.wire import measure

    return measure(place, pairs=pairs)


def _memory(place: Place, tokens: int, pairs: int) -> dict[str, Any] | None:
    from shoal.recipes.benchmarks.memory import measure

    return measure(place, tokens=tokens, pairs=pairs)


def _pipeline(place: Place, repeats: int) -> dict[str, Any] | None:
    from shoal.recipes.benchmarks.pipeline import measure

    return measure(place, repeats=repeats)


def _feed(place: Place, file: Path, steps: int) -> dict[str, Any] | None:
    from shoal.recipes.benchmarks.feed import measure
    from shoal.recipes.rules import load_run

    return measure(load_run(file), place, steps=steps)


def _step(place: Place, tokens: int, pairs: int) -> dict[str, Any] | None:
    from shoal.recipes.benchmarks.step import measure

    return measure(place, tokens=tokens, pairs=pairs, alone=max(5, pairs // 5))


def _checkpoint(place: Place, saves: int) -> dict[str, Any] | None:
    from shoal.recipes.benchmarks.checkpoint import measure

    return measure(place, saves=saves)


def _as_rank(measure: Callable[[Place], dict[str, Any] | None]) -> None:
    """Measures as one rank; the first hands in the result."""
    from shoal.launch.environment import place_from
    from shoal.recipes.benchmarks import machine
    from shoal.recipes.start import as_rank

    place = place_from(os.environ)
    if place is None:
        raise typer.BadParameter("a rank of a benchmark was started without its place")

    def measured() -> None:
        result = measure(place)
        if result is not None:
            machine.hand_in(result)

    as_rank(place, measured, os.environ)


def _sizes(text: str) -> list[int]:
    sizes = [int(part) for part in text.split(",") if part.strip().isdigit()]
    if not sizes or any(size <= 0 or size % 128 for size in sizes):
        raise typer.BadParameter(f"'{text}'; give multiples of 128, such as 256,2048", param_hint="--tokens")
    return sizes


def _show(name: str, rows: list[dict[str, Any]], checks: list[dict[str, Any]], as_json: bool) -> None:
    from shoal.recipes.benchmarks.machine import machine

    if as_json:
        print(json.dumps({"bench": name, "machine": machine(), "rows": rows, "checks": checks}))
        return
    for row in rows:
        print("  ".join(f"{key}={value}" for key, value in row.items()))
    for check in checks:
        print(f"{'holds' if check['holds'] else 'SHORT'}  {check['name']}: {check['value']} (bound {check['bound']})")
