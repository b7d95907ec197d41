"""`shoal verify`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from shoal.cli.arguments import AsJson, ScriptOverrides
from shoal.observe.busy import importing_torch
from shoal.standard_output import answer

if TYPE_CHECKING:
    from shoal.launcher.environment import Place
    from shoal.runfile.run_file import RunFile


def verify(
    run_file: Annotated[
        Path, typer.Argument(metavar="RUN.toml|SCRIPT.py", help="The run file, or a script that calls shoal.start.")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[key=value]...", help="Keys that replace the file's or the script's; then the script's arguments."
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            "--steps",
            min=1,
            help="Optimizer steps to compare. Default: 5; where replicas differ, two periods of their agreement.",
        ),
    ] = None,
    exact: Annotated[bool, typer.Option("--exact", help="In float64, to 1e-12 instead of 1e-5.")] = False,
    as_json: AsJson = False,
) -> None:
    """Proves a layout and a strategy against one process: loss, norm, every gradient, the weights after each step.

    A script's own loop is run twice: in plain PyTorch in one process, and by its ranks.

    Example: shoal verify recipes/stdlib-gpt.toml layout.tensor=2 layout.shard=2

    Example: shoal verify mine.py run.processes=4 layout.shard=2 memory.zero=3
    """
    if run_file.suffix == ".py":
        raise typer.Exit(_verify_script(run_file, overrides or (), steps=steps, exact=exact, as_json=as_json))
    from shoal.assembly.start import run
    from shoal.assembly.user_code import require_modules
    from shoal.launcher.supervision import NOTHING_KEPT
    from shoal.planning.arrange import LOOKING
    from shoal.runfile.load import load_run
    from shoal.runfile.run_file import run_directory
    from shoal.verification.refusals import require_provable

    loaded = load_run(run_file, overrides or ())
    require_provable(loaded)
    require_modules(loaded, run_file)

    def rank(run_file: RunFile, place: Place) -> None:
        with importing_torch():
            from shoal.assembly.objects import UserObjects
            from shoal.verification.verify import verify_rank
        from shoal.errors import VerificationFailed
        from shoal.observe.terminal import ProgressBar, open_progress_bar

        with open_progress_bar(sys.stderr) if place.rank == 0 else ProgressBar() as bar:
            verdict = verify_rank(run_file, place, UserObjects(), steps=steps, exact=exact, bar=bar)
        if verdict is None:
            return
        answer(json.dumps(verdict.to_json()) if as_json else "\n".join(verdict.lines()))
        if not verdict.holds:
            raise VerificationFailed(verdict.sentence())

    flags = [
        *([] if steps is None else ["--steps", str(steps)]),
        *(["--exact"] if exact else []),
        *(["--json"] if as_json else []),
    ]
    command = [sys.executable, "-m", "shoal", "verify", str(run_file), *(overrides or ()), *flags]
    raise typer.Exit(
        run(
            loaded,
            command,
            rank,
            directory=run_directory(loaded),
            file=str(run_file),
            patience=NOTHING_KEPT,
            planner=LOOKING,
        )
    )


def _verify_script(script: Path, arguments: Sequence[str], *, steps: int | None, exact: bool, as_json: bool) -> int:
    from shoal.cli.arguments import require_script

    require_script(script)  # before what follows imports torch
    from shoal.errors import VerificationFailed
    from shoal.observe.terminal import open_progress_bar
    from shoal.verification.scripts import STEPS, verify_script

    with open_progress_bar(sys.stderr) as bar:
        found = verify_script(script, arguments, steps=steps or STEPS, exact=exact, bar=bar)
    if isinstance(found, int):
        return found
    answer(json.dumps(found.to_json()) if as_json else "\n".join(found.lines()))
    if not found.holds:
        raise VerificationFailed(found.sentence())
    return 0


# `shoal rehearse`.


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
    from shoal.cli.arguments import command_of_script
    from shoal.experiments.rehearsal.scenarios import FAMILIES
    from shoal.runfile.load import load_run

    families = FAMILIES if faults == "all" else tuple(faults.split(","))
    unknown = [family for family in families if family not in FAMILIES]
    if unknown:
        raise typer.BadParameter(f"{unknown[0]!r}: give {', '.join(FAMILIES)}, or all", param_hint="--faults")
    script = command_of_script(run_file, overrides or ())
    # A wrong file is refused before what follows imports torch.
    loaded = load_run(run_file, overrides or ()) if script is None else script.run_file
    from shoal.experiments.rehearsal.rehearse import RehearsedScript, line_of, table
    from shoal.experiments.rehearsal.rehearse import rehearse as play_all

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
