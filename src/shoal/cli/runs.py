"""Verbs for runs that are over: `shoal diff`, `report`, `reproduce`, `replay`, `compress`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from shoal.cli.arguments import AsJson, output_folder, picture_file
from shoal.observe.busy import busy
from shoal.standard_output import answer

if TYPE_CHECKING:
    from shoal.experiments.diff import RunDiff


# `shoal diff`.


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
        lines += _rounding(found)
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


def _rounding(found: RunDiff) -> list[str]:
    """Whether the runs part by no more than the order of sums explains, and until when."""
    from shoal.experiments.diff import ROUNDING

    parting, beyond = found.parting, found.beyond_rounding
    if parting is None or (beyond is not None and beyond <= parting.step):
        return []
    until = "in every common step" if beyond is None else f"before step {beyond:,}"
    return [
        f"they differ by no more than rounding {until}: two layouts add up in another order, by which losses may be "
        f"{ROUNDING:g} apart, and an optimizer such as AdamW makes that larger with every step"
    ]


def _first(lines: list[str]) -> list[str]:
    return lines if len(lines) <= MOST else [*lines[:MOST], f"and {len(lines) - MOST} more"]


def _number(value: float | None) -> str:
    return "not finite" if value is None else repr(value)


# `shoal report`.


def report(
    directory: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A run directory, finished or not.")],
) -> None:
    """Writes report.html and loss.png of a run: one page, no network.

    Example: shoal report runs/stdlib-gpt
    """
    from shoal.federated.page import REPORT, write_page
    from shoal.observe.report import write_report

    with busy(f"writing the report of {directory}"):
        page = (write_page if (directory / REPORT).is_file() else write_report)(directory)
    print(page)


# `shoal reproduce`.


def reproduce(
    directory: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The directory of a run that has ended.")],
    into: Annotated[
        Path | None, typer.Option("--into", metavar="DIR", help="Where it trains again; default: RUN_DIR-again.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Trains a run again and says whether it is bitwise the same, or what differs; exit 6 where it is not.

    Example: shoal reproduce runs/digits
    """
    from shoal.experiments.diff import reproduce as again

    found = again(directory, into or directory.with_name(directory.name + "-again"))
    same = found.diff.same
    if as_json:
        answer(msgspec.json.encode({**msgspec.structs.asdict(found), "same": same}, enc_hook=str).decode())
    else:
        verdict = "bitwise the same" if same else "not the same"
        print(f"{found.directory}: {verdict}")
        print("\n".join([*(f"changed since: {sentence}" for sentence in found.changed), *sentences(found.diff)]))
    raise typer.Exit(0 if same else 6)


# `shoal replay`.


def replay(
    capsule: Annotated[Path, typer.Argument(metavar="CAPSULE", help="The capsule.zip of a run that failed.")],
    run_directory: Annotated[
        Path | None, typer.Option("--run-directory", help="Where the checkpoint lies, if not in the capsule.")
    ] = None,
    any_version: Annotated[bool, typer.Option("--any-version", help="Also a capsule of another version.")] = False,
    as_json: AsJson = False,
) -> None:
    """Computes the step at which a run failed again, on one CPU process: does it fail in the same way?

    Call it where the run was started, so that your own code is found. Exit 6 where it does not repeat the failure.

    Example: shoal replay runs/digits/capsule.zip
    """
    from shoal.observe.capsule import read_capsule

    read_capsule(capsule)  # a wrong file is refused before what follows imports torch
    from shoal.experiments.capsule_replay import replay_capsule
    from shoal.files import temporary_folder

    with temporary_folder() as folder, busy("computing the step that failed"):
        found = replay_capsule(capsule, folder, run_directory=run_directory, any_version=any_version)
    if as_json:
        answer(msgspec.json.encode(found).decode())
    else:
        for step in found.steps:
            recorded = "" if step.recorded is None else f", {step.recorded:.8g} was recorded"
            print(f"step {step.step}: loss {step.loss:.8g}{recorded}")
        if found.sample_ids:
            print(f"samples of step {found.step}: {' '.join(map(str, found.sample_ids[:32]))}"
                  + (" ..." if len(found.sample_ids) > 32 else ""))  # fmt: skip
        if found.traceback:
            print(found.traceback.rstrip())
        print(found.sentence)
    raise typer.Exit(6 if found.same is False else 0)


# `shoal compress`.


def compress(
    run_directory: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A trained run.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[key=value]...", help="Keys of the run that trains it on.")
    ] = None,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="HOW",
            help="0.1 (the share of weights that stays), 2:4, features:0.5 (also rows, columns, block), int8 or int4.",
        ),
    ] = "0.1",
    directory: Annotated[
        Path | None, typer.Option("--directory", help="Its folder; default: RUN_DIR-HOW.", callback=output_folder)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Prunes or rounds a trained model, trains it on for a quarter of its steps, and says what that cost.

    Example: shoal compress runs/digits --to 0.1
    """
    from shoal.checkpoint.objects import require_checkpoint

    require_checkpoint(run_directory)  # before what follows imports torch
    from shoal.experiments import compress as compressing

    folder = directory or run_directory.with_name(f"{run_directory.resolve().name}-{compressing.folder_name(to)}")
    found = compressing.compress(run_directory, to, folder, overrides or ())
    if as_json:
        answer(msgspec.json.encode(found).decode())
    else:
        print("\n".join(compressing.sentences(found)))
