"""`shoal diff`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from shoal.cli.busy import busy
from shoal.cli.output import AsJson, picture_file
from shoal.standard_output import answer

if TYPE_CHECKING:
    from shoal.experiments.diff import RunDiff

MOST = 20


def diff(
    first: Annotated[Path, typer.Argument(metavar="RUN_A", help="A run directory.")],
    second: Annotated[Path, typer.Argument(metavar="RUN_B", help="Another.")],
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw both losses.", callback=picture_file)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Says where two runs part: keys, data, packages, files, the first step and tensor; exit 6 where they do.

    Example: shoal diff runs/digits runs/digits-again
    """
    from shoal.experiments.diff import diff_runs, draw

    with busy(f"comparing {first} and {second}"):
        found = diff_runs(first, second)
    if plot is not None:
        with busy(f"drawing {plot}"):
            draw(first, second, plot)
    if as_json:
        answer(msgspec.json.encode({**msgspec.structs.asdict(found), "same": found.same}, enc_hook=str).decode())
    else:
        print("\n".join(sentences(found)))
    raise typer.Exit(0 if found.same else 6)


def sentences(found: RunDiff) -> list[str]:
    """A difference a line."""
    lines = [f"{key}: {' | '.join('–' if value is None else repr(value) for value in values)}"
             for key, values in found.keys.items()]  # fmt: skip
    lines += [*_first(found.data), *_first(found.environment)]
    parting = found.parting
    if not found.steps:
        lines.append("no step is in both runs")
    elif parting is None:
        lines.append(f"losses and gradient norms are bitwise the same in all {found.steps:,} common steps")
    else:
        lines.append(
            f"the runs part at step {parting.step:,}: {parting.measurement} is {_number(parting.first)} and "
            f"{_number(parting.second)}; the losses differ by at most {found.largest_relative:.2g} (relative) in "
            f"{found.steps:,} common steps"
        )
    tensors = found.tensors
    if tensors is None:
        lines.append("no step has a checkpoint in both runs")
    elif not tensors.differences:
        lines.append(f"all {tensors.same} tensors of step {found.checkpoint_step:,} are bitwise the same")
    else:
        one = tensors.differences[0]
        size = "" if one.max_abs is None else f", by at most {one.max_abs:.6g}"
        count = len(tensors.differences)
        lines.append(
            f"of the checkpoints of step {found.checkpoint_step:,}, {count} of {count + tensors.same} tensors differ; "
            f"the first is {one.name} ({one.kind}{size})"
        )
    return lines


def _first(lines: list[str]) -> list[str]:
    return lines if len(lines) <= MOST else [*lines[:MOST], f"and {len(lines) - MOST} more"]


def _number(value: float | None) -> str:
    return "not finite" if value is None else repr(value)
