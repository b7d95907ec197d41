"""`shoal bench`: figures beside a peer's, measured in one run."""

from __future__ import annotations

import json
import os
import sys
from typing import Annotated, Any

import typer

bench = typer.Typer(
    name="bench", help="Benchmarks, each beside a peer in one run.", no_args_is_help=True, rich_markup_mode=None
)

AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on standard output, nothing else.")]


@bench.callback()
def _bench() -> None:
    """Benchmarks, each beside a peer in one run. They report, they do not judge: exit 0 even where a check fails."""


@bench.command("step")
def step(
    tokens: Annotated[
        str, typer.Option(help="Tokens of a rank and step, several with commas; multiples of 128.")
    ] = "256,2048",
    pairs: Annotated[int, typer.Option(help="Paired steps for each.", min=5)] = 100,
    processes: Annotated[int, typer.Option(help="Ranks of one thread.", min=2)] = 2,
    as_json: AsJson = False,
) -> None:
    """A training step beside the same step in a hand-written DDP script.

    Example: shoal bench step --tokens 256 --pairs 20
    """
    from shoal.recipes.benchmarks import machine

    sizes = _sizes(tokens)
    if machine.is_rank():
        _step_rank(sizes[0], pairs)
        return
    results = []
    for size in sizes:
        arguments = ["bench", "step", "--tokens", str(size), "--pairs", str(pairs)]
        results.append(machine.on_ranks(arguments, processes=processes))
    rows, checks = [r["row"] for r in results], [c for r in results for c in r["checks"]]
    _show({"bench": "step", "machine": machine.machine(), "rows": rows, "checks": checks}, as_json)


def _step_rank(tokens: int, pairs: int) -> None:
    from pathlib import Path

    from shoal.launch.environment import place_from
    from shoal.launch.failure import FAILURE_FOLDER, reporting
    from shoal.launch.orphans import die_with_parent
    from shoal.recipes.benchmarks import machine

    place, folder = place_from(os.environ), os.environ.get(FAILURE_FOLDER)
    assert place is not None
    with reporting(place, Path(folder) if folder else None):
        die_with_parent(os.environ)
        from shoal.recipes.benchmarks.step import measure

        result = measure(place, tokens=tokens, pairs=pairs, alone=max(5, pairs // 5))
        if result is not None:
            machine.hand_in(result)


def _sizes(text: str) -> list[int]:
    sizes = [int(part) for part in text.split(",") if part.strip().isdigit()]
    if not sizes or any(size <= 0 or size % 128 for size in sizes):
        raise typer.BadParameter(f"'{text}'; give multiples of 128, such as 256,2048", param_hint="--tokens")
    return sizes


def _show(result: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(result))
        return
    for row in result["rows"]:
        print("  ".join(f"{name}={value}" for name, value in row.items()))
    for check in result["checks"]:
        print(f"{'holds' if check['holds'] else 'SHORT'}  {check['name']}: {check['value']} (bound {check['bound']})")
    sys.stdout.flush()
