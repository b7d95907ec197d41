"""`shoal profile`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli.arguments import AsJson, ScriptOverrides, lab_at, output_file
from shoal.observe.busy import busy, importing_torch
from shoal.standard_output import answer

if TYPE_CHECKING:
    from shoal.assembly.profiling import Profile
    from shoal.launcher.environment import Place
    from shoal.runfile.run_file import RunFile

OPERATORS = 5


def profile(
    run_file: Annotated[Path, typer.Argument(metavar="RUN.toml|SCRIPT.py", help="The run file, or a script.")],
    overrides: ScriptOverrides = None,
    steps: Annotated[
        int | None,
        typer.Option("--steps", min=1, max=1000, help="Steps that are recorded; default: 3 s of them, 5 to 50."),
    ] = None,
    warmup: Annotated[int, typer.Option("--warmup", min=0, help="Steps before them, which are not.")] = 5,
    trace: Annotated[
        Path,
        typer.Option("--trace", metavar="OUT.json", help="The timeline of all ranks, for ui.perfetto.dev.",
                     callback=output_file),
    ] = Path("profile.json"),
    flame: Annotated[
        Path | None,
        typer.Option("--flame", metavar="OUT.svg", help="A flame graph of one rank, by py-spy.", callback=output_file),
    ] = None,
    flame_rank: Annotated[int, typer.Option("--flame-rank", min=0, help="The rank of the flame graph.")] = 0,
    lab: Annotated[
        Path | None, typer.Option("--lab", metavar="LAB.toml", help="Run on the hosts and links of a lab file.")
    ] = None,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Records a few steps on every rank; says where the time goes, and which key to change. Of a script that calls
    shoal.train or shoal.start, the steps are those of its own loop.

    Example: shoal profile recipes/stdlib-gpt.toml
    """
    from shoal.assembly.start import run
    from shoal.assembly.user_code import require_modules
    from shoal.launcher.supervision import NOTHING_KEPT
    from shoal.planning.arrange import LOOKING
    from shoal.runfile.load import load_run
    from shoal.runfile.run_file import run_directory

    if flame is not None:
        from shoal.observe.profile.trace import flame_program

        flame_program()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler tells of its own start and end otherwise
    if run_file.suffix == ".py":
        if lab is not None:
            raise typer.BadParameter("takes a run file, and not a script", param_hint="--lab")
        graph = None if flame is None else (flame_rank, str(flame.absolute()))
        found = _of_script(run_file, overrides or [], warmup=warmup, steps=steps, flame=graph)
        _tell(found, trace, flame, as_json=as_json)
        return
    loaded = load_run(run_file, overrides or ())
    require_modules(loaded, run_file)

    def rank(run_file: RunFile, place: Place) -> None:
        with importing_torch():
            from shoal.assembly.objects import UserObjects
            from shoal.assembly.profiling import profile_rank
        from shoal.observe.terminal import ProgressBar, open_progress_bar

        _check_rank(flame_rank, place.world_size)
        graph = None if flame is None else (flame_rank, flame)
        with open_progress_bar(sys.stderr) if place.rank == 0 else ProgressBar() as bar:
            found = profile_rank(run_file, place, UserObjects(), warmup=warmup, steps=steps, flame=graph, bar=bar)
        if found is not None:
            _tell(found, trace, flame, as_json=as_json)

    told = ["--warmup", str(warmup), "--trace", str(trace)]
    if steps is not None:
        told += ["--steps", str(steps)]
    if flame is not None:
        told += ["--flame", str(flame), "--flame-rank", str(flame_rank)]
    command = [sys.executable, "-m", "shoal", "profile", str(run_file), *(overrides or ()), *told]
    directory, hosts = run_directory(loaded), lab_at(lab)
    raise typer.Exit(
        run(loaded, [*command, *(["--json"] if as_json else [])], rank, directory=directory, file=str(run_file),
            patience=NOTHING_KEPT, lab=hosts, planner=LOOKING)
    )  # fmt: skip


def _of_script(
    script: Path, given: list[str], *, warmup: int, steps: int | None, flame: tuple[int, str] | None
) -> Profile:
    """Runs the script until its steps are recorded. Leaves with its exit code where it fails."""
    import msgspec

    from shoal.assembly.profiling import THROW_AWAY, ProfileOrder, read_profile
    from shoal.cli.arguments import require_script
    from shoal.files import temporary_folder
    from shoal.launcher.children import wait_for
    from shoal.launcher.own_script import KEYS, PROFILE, divided

    require_script(script)
    keys, arguments = divided(given)
    with temporary_folder() as folder:
        keys = [*THROW_AWAY, f"run.directory={json.dumps(str(folder / 'run'))}", *keys]
        order = ProfileOrder(str(folder / "recorded"), warmup, steps, flame)
        environ = {**os.environ, PROFILE: msgspec.json.encode(order).decode(), KEYS: json.dumps(keys)}
        with busy(f"recording steps of {script}"):
            command = [sys.executable, str(script), *arguments]
            code = wait_for(subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL))
        if code:
            raise typer.Exit(code if code > 0 else 128 - code)
        return read_profile(folder / "recorded")


def _check_rank(rank: int, world_size: int) -> None:
    from shoal.errors import UsageError

    if rank >= world_size:
        raise UsageError(f"--flame-rank is {rank}, and the ranks are 0 to {world_size - 1}: name one of them")


def _tell(found: Profile, trace: Path, flame: Path | None, *, as_json: bool) -> None:
    from shoal.observe.profile.trace import trace as timeline

    trace.write_text(json.dumps(timeline(found.recordings)), encoding="utf-8")
    if as_json:
        answer(json.dumps(_record(found, trace, flame)))
        return
    print("\n".join(_lines(found)))
    print(f"Written: {trace}; open it in ui.perfetto.dev")
    if flame is not None:
        print(f"Written: {flame}")
    sys.stdout.flush()


def _lines(found: Profile) -> list[str]:
    from shoal import units
    from shoal.observe.profile.split import mean

    lines = ["rank      step   data   communication (late ranks, wire)   compute   host"]
    for rank in found.ranks:
        split, late_s = rank.split, sum(rank.exposed.for_rank_s.values())
        shares = [units.percent(part / split.step_s) for part in _parts(split)]
        inner = f"({units.percent(late_s / split.step_s)}, {units.percent(rank.exposed.wire_s / split.step_s)})"
        lines.append(
            f"{split.rank:>4} {units.milliseconds(split.step_s):>9} {shares[0]:>6} {shares[1]:>15} {inner:<18} "
            f"{shares[2]:>9} {shares[3]:>6}"
        )
    step_s = mean([rank.split.step_s for rank in found.ranks])
    own = found.ranks[0]
    lines += [f"operators of rank {own.split.rank}, by their own time:"]
    for operator in own.operators[:OPERATORS]:
        at = f"  {own.sources[operator.name]}" if operator.name in own.sources else ""
        share, calls = units.percent(operator.own_s / step_s), f"{operator.calls:.{0 if operator.calls >= 1 else 1}f}"
        lines.append(f"  {share:>6}  {operator.name}, {calls} call{'s' * (calls != '1')} a step{at}")
    error_s = max(recording.clock_error_s for recording in found.recordings)
    if error_s:
        lines.append(f"clocks agree to {units.seconds(error_s)}")
    return [*lines, f"bottleneck: {found.bottleneck.sentence}"]


def _parts(split: Any) -> tuple[float, float, float, float]:
    return split.data_s, split.communication_s, split.compute_s, split.host_s


def _record(found: Profile, trace: Path, flame: Path | None) -> dict[str, Any]:
    import dataclasses

    return {
        "bottleneck": dataclasses.asdict(found.bottleneck),
        "ranks": [
            {
                **dataclasses.asdict(rank.split),
                "wire_s": rank.exposed.wire_s,
                "own_wait_s": rank.exposed.own_s,
                "waits_for_rank_s": rank.exposed.for_rank_s,
                "sent_bytes": rank.exposed.sent_bytes,
                "operators": [dataclasses.asdict(operator) for operator in rank.operators[:OPERATORS]],
            }
            for rank in found.ranks
        ],
        "clock_error_s": max(recording.clock_error_s for recording in found.recordings),
        "trace": str(trace),
        "flame": None if flame is None else str(flame),
    }
