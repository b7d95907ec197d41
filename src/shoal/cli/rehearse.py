"""`shoal rehearse`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from shoal.cli.output import AsJson, ScriptOverrides
from shoal.standard_output import answer

if TYPE_CHECKING:
    from shoal.runfile.run_file import RunFile


def rehearse(
    run_file: Annotated[Path, typer.Argument(metavar="RUN.toml|SCRIPT.py", help="The run file, or a script.")],
    overrides: ScriptOverrides = None,
    faults: Annotated[
        str,
        typer.Option(
            metavar="FAMILY,...",
            help="rank, optimizer, save, recovery, coordinator, preemption, disk, corruption, numbers, slow, network; "
            "or all.",
        ),
    ] = "all",
    only: Annotated[str, typer.Option(metavar="TEXT", help="The faults whose names contain it.")] = "",
    every_point: Annotated[bool, typer.Option("--every-point", help="Kill at every point of a save.")] = False,
    limit_s: Annotated[float, typer.Option(min=1, help="Longest that one start may take, in seconds.")] = 180.0,
    show: Annotated[bool, typer.Option("--list", help="List the faults and train nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Trains a run file, or a script that calls shoal.train or shoal.start, under injected faults, each in a throw-away
    directory, and says what became of it.

    Exit 6 where a run does not end with the state of the undisturbed run.

    Example: shoal rehearse recipes/digits.toml --faults rank,save
    """
    from shoal.cli.script_target import command_of_script
    from shoal.runfile.load import load_run

    script = command_of_script(run_file, overrides or ())
    # A wrong file is refused before what follows imports torch.
    loaded = load_run(run_file, overrides or ()) if script is None else script.run_file
    from shoal.experiments.rehearsal.rehearse import RehearsedScript, line_of, table
    from shoal.experiments.rehearsal.rehearse import rehearse as play_all
    from shoal.experiments.rehearsal.scenarios import FAMILIES

    families = FAMILIES if faults == "all" else tuple(faults.split(","))
    unknown = [family for family in families if family not in FAMILIES]
    if unknown:
        raise typer.BadParameter(f"{unknown[0]!r}: give {', '.join(FAMILIES)}, or all", param_hint="--faults")
    if show:
        _list(loaded, families, only=only, every_point=every_point)
        return
    if not as_json:
        print(next(table([])), flush=True)
    found = play_all(
        run_file if script is None else RehearsedScript(run_file, script.arguments, script.run_file),
        (overrides or ()) if script is None else script.keys,
        families=families,
        only=only,
        every_point=every_point,
        limit_s=limit_s,
        on_row=lambda row: None if as_json else print(line_of(row), flush=True),
        note=_note,
    )
    if as_json:
        answer(msgspec.json.encode({**msgspec.structs.asdict(found), "holds": found.holds}).decode())
    else:
        print("\n".join(_conclusion(found)))
    raise typer.Exit(0 if found.holds else 6)


def _note(text: str) -> None:
    """What is being played, where somebody watches."""
    if sys.stderr.isatty():
        print(f"... {text}", file=sys.stderr, flush=True)


def _list(loaded: RunFile, families: tuple[str, ...], *, only: str, every_point: bool) -> None:
    from shoal.assembly.start import processes_of
    from shoal.experiments.rehearsal.scenarios import scenarios

    for scenario in scenarios(processes_of(loaded), elastic=loaded.elastic is not None, every_point=every_point):
        if scenario.family in families and only in scenario.name:
            print(f"{scenario.family:<12} {scenario.name}")


def _conclusion(found) -> list[str]:
    kept = sum(row.kept is True for row in found.rows)
    promised = sum(row.kept is not None for row in found.rows)
    return [
        f"{found.file} on {found.ranks} ranks: {kept} of {promised} promises kept",
        f"rehearsed with {' '.join(found.keys)}",
        *(f"not rehearsed: {sentence}" for sentence in found.skipped),
        *(f"{row.name}: {row.said or 'nobody said anything'}" for row in found.rows if row.kept is False),
    ]
