"""`rehearse`: a run file under every fault of a suite, each in a directory of its own, beside the undisturbed run.

The run directory of the user is not touched. What the run says of its state at the end is compared with the undisturbed
run's: bitwise, else by the relative 2-norm ||a - b|| / ||b|| of all weights together.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import torch

from shoal.assembly.start import processes_of
from shoal.checkpoint.inspect import compare
from shoal.checkpoint.weights import weights_of
from shoal.errors import EnvironmentFault, ShoalError, UsageError
from shoal.experiments.rehearsal.faults import why_no_small_disk
from shoal.experiments.rehearsal.scenarios import FAMILIES, Scenario, scenarios
from shoal.experiments.rehearsal.trial import FaultTrial, Setup, play
from shoal.experiments.rehearsal.two_hosts import why_not_two_hosts
from shoal.files import temporary_folder
from shoal.fleet.processes import REPLICA
from shoal.launcher.environment import place_from
from shoal.launcher.orphans import LAUNCHER_PID
from shoal.resilience.config import COORDINATOR, ElasticConfig
from shoal.resilience.faults import REHEARSAL
from shoal.runfile.load import load_run
from shoal.runfile.run_file import RunFile

TOLERANCE = 1e-4
"""Of the weights, after some steps in another order of summation: elastic runs divide a step's samples anew, and Adam
amplifies the last digits (docs/reference/tolerances.md)."""
LIMIT_S = 180.0
"""Of one start, unless another is asked for: a run that hangs for longer has failed its scenario."""
KEYS = (
    "observe.report=false",
    "observe.evaluate_every_steps=0",
    "observe.evaluate_samples=1",
    "observe.page=false",
    'observe.wandb="off"',
    'checkpoint.every="steps"',
)
WIRE_TIMEOUT_S = 10.0
HANG_S = 15.0
"""How long a rank of an elastic run may keep others waiting."""
_OTHER_RUN = (COORDINATOR, REPLICA, LAUNCHER_PID)


class Row(msgspec.Struct, frozen=True):
    """One scenario. Seconds are from the strike on; None where there was nothing to measure.

    `state`: "bitwise", "within TOLERANCE", "differs" or "none" (no checkpoint of the last step); `difference` is the
    relative 2-norm. `kept`: the promise was kept; None where nothing is promised.
    """

    name: str
    family: str
    struck_step: int | None
    noticed_s: float | None
    said: str
    recovered_s: float | None
    lost_steps: int
    starts: int
    exit_code: int | None
    state: str
    difference: float | None
    kept: bool | None


class Rehearsal(msgspec.Struct, frozen=True):
    """All scenarios of one run file. `keys` are those that the rehearsal has set."""

    file: str
    ranks: int
    keys: list[str]
    rows: list[Row]
    skipped: list[str]

    @property
    def holds(self) -> bool:
        """Whether every promise was kept."""
        return all(row.kept is not False for row in self.rows)


class RehearsedScript(msgspec.Struct, frozen=True):
    """A script that calls `shoal.train` or `shoal.start`, its own arguments, and its run with all overrides."""

    file: Path
    arguments: Sequence[str]
    run_file: RunFile


def rehearse(
    file: Path | RehearsedScript,
    overrides: Sequence[str] = (),
    *,
    families: Sequence[str] = FAMILIES,
    only: str = "",
    every_point: bool = False,
    limit_s: float = LIMIT_S,
    on_row: Callable[[Row], None] = lambda row: None,
    note: Callable[[str], None] = lambda text: None,
    environ: Mapping[str, str] = os.environ,
) -> Rehearsal:
    """Plays the scenarios of `families` whose names contain `only`.

    `on_row` hears of each when it is over, `note` what is going on. Raises `UsageError` where no scenario is left or
    the run file names a service outside (remote copies, alerts, MLflow) or `environ` belongs to another run, and
    `EnvironmentFault` where the undisturbed run does not end well.
    """
    _require_no_other_run(environ)
    script = file if isinstance(file, RehearsedScript) else None
    file = file.file if isinstance(file, RehearsedScript) else file
    run_file = load_run(file, overrides) if script is None else script.run_file
    _require_nothing_outside(run_file)
    ranks = processes_of(run_file, environ)
    keys = [*_keys(overrides, run_file), *overrides]
    wanted = [
        scenario
        for scenario in scenarios(ranks, elastic=run_file.elastic is not None, every_point=every_point)
        if scenario.family in families and only in scenario.name
    ]
    wanted, skipped = _possible(wanted, of_script=script is not None, ranks=ranks, elastic=run_file.elastic)
    if not wanted and not skipped:
        raise UsageError(
            f"no scenario of {', '.join(families)} has {only!r} in its name: leave out --only, or change it"
        )
    if script is None:
        load_run(file, keys)
    rows: list[Row] = []
    with temporary_folder() as folder:
        own = {k: v for k, v in environ.items() if k != REHEARSAL}
        setup = Setup(file, keys, folder, own, limit_s, ranks, run_file.elastic, script and script.arguments)
        undisturbed = _Undisturbed(setup, note)
        for scenario in wanted:
            reference = undisturbed.like(scenario)
            note(scenario.name)
            trial = play(setup, scenario)
            rows.append(row_of(trial, reference))
            on_row(rows[-1])
            shutil.rmtree(trial.directory, ignore_errors=True)  # its checkpoints may be large
    return Rehearsal(str(file), ranks, keys[: len(keys) - len(overrides)], rows, skipped)


def _possible(
    wanted: list[Scenario], *, of_script: bool, ranks: int, elastic: ElasticConfig | None
) -> tuple[list[Scenario], list[str]]:
    """The scenarios that can be played here, and for the others a sentence of each kind that says why not."""
    skipped = []
    if of_script and any(one.network or one.restarts_coordinator for one in wanted):
        wanted = [one for one in wanted if not (one.network or one.restarts_coordinator)]
        skipped.append(
            "faults of the network and of a coordinator: they start the hosts of a run file, not of a script"
        )
    if any(one.network for one in wanted) and (reason := why_not_two_hosts(ranks, elastic=elastic)) is not None:
        wanted = [one for one in wanted if not one.network]
        skipped.append(f"network faults between two hosts: {reason}")
    if any(one.fills for one in wanted) and (reason := why_no_small_disk()) is not None:
        wanted = [one for one in wanted if not one.fills]
        skipped.append(f"a full file system: {reason}")
    return wanted, skipped


def _require_no_other_run(environ: Mapping[str, str]) -> None:
    """Raises `UsageError` in the environment of a rank or of an elastic run: its processes would be struck."""
    found = next((name for name in _OTHER_RUN if environ.get(name)), None)
    if found is None and place_from(environ) is not None:
        found = "RANK, SLURM_PROCID or one like them"
    if found is not None:
        raise UsageError(
            f"the environment has {found}, so a run is going on here, which the faults would strike: start the "
            "rehearsal from a shell without it, outside of srun, torchrun and mpiexec"
        )


def _require_nothing_outside(run_file: RunFile) -> None:
    """Raises `UsageError` where the rehearsed runs would write to what the real run writes to."""
    outside = {
        "checkpoint.remote": run_file.checkpoint.remote,
        "observe.webhook": run_file.observe.webhook,
        "observe.mlflow": run_file.observe.mlflow,
    }
    if found := [key for key, value in outside.items() if value is not None]:
        raise UsageError(
            f"{' and '.join(found)}: a rehearsal would send there what its runs do; rehearse a copy of the run file "
            "without it"
        )


def _keys(overrides: Sequence[str], run_file: RunFile) -> list[str]:
    """What a rehearsal sets, unless the user does: short waits, no reports."""
    set_by_user = {override.partition("=")[0] for override in overrides}
    keys = [*KEYS, f"wire.timeout_s={min(run_file.wire.timeout_s, WIRE_TIMEOUT_S)}"]
    if run_file.elastic is not None and run_file.elastic.hang_s:
        keys.append(f"elastic.hang_s={min(run_file.elastic.hang_s, HANG_S)}")
    return [key for key in keys if key.partition("=")[0] not in set_by_user]


class _Undisturbed:
    """The runs that nothing happens to, one for each number of steps."""

    def __init__(self, setup: Setup, note: Callable[[str], None]) -> None:
        self._setup, self._note = setup, note
        self._found: dict[int, FaultTrial] = {}

    def like(self, scenario: Scenario) -> FaultTrial:
        """The one with as many steps as `scenario` has. Raises `EnvironmentFault` where it does not end well."""
        if scenario.steps not in self._found:
            self._note(f"the undisturbed run of {scenario.steps} steps")
            calm = Scenario(f"undisturbed, {scenario.steps} steps", scenario.family, (), steps=scenario.steps)
            trial = play(self._setup, calm)
            if not trial.finished:
                said = "\n".join(line.text for line in trial.lines[-10:])
                raise EnvironmentFault(
                    f"the undisturbed run ended with exit code {trial.codes[-1]}, so there is nothing to rehearse; "
                    f"make `shoal train {self._setup.file} run.steps={scenario.steps}` work first. It said:\n{said}"
                )
            self._found[scenario.steps] = trial
        return self._found[scenario.steps]


def row_of(trial: FaultTrial, reference: FaultTrial) -> Row:
    """What became of a trial, beside the undisturbed run."""
    scenario, since_s, noticed, recovered_s = trial.scenario, trial.first_strike_s, trial.noticed, trial.recovered_s()
    state, difference = state_of(trial, reference)
    return Row(
        name=scenario.name,
        family=scenario.family,
        struck_step=trial.struck[0].step if trial.struck else None,
        noticed_s=_after(noticed.time_s if noticed else None, since_s),
        said=noticed.text if noticed else "",
        recovered_s=_after(recovered_s, since_s),
        lost_steps=trial.lost_steps(),
        starts=len(trial.codes),
        exit_code=trial.codes[-1],
        state=state,
        difference=difference,
        kept=_kept(trial, state),
    )


def _kept(trial: FaultTrial, state: str) -> bool | None:
    promise = trial.scenario.promise
    struck = len(trial.struck) >= len(trial.scenario.faults) and not trial.missed
    if not struck or (trial.scenario.damages and not trial.damaged):
        return False  # a fault never struck: nothing is proved
    if promise == "nothing":
        return None
    told = trial.noticed is not None or promise == "unharmed"
    return told and trial.finished and (promise == "noticed" or state in ("bitwise", _WITHIN))


_WITHIN = f"within {TOLERANCE:g}"


def state_of(trial: FaultTrial, reference: FaultTrial) -> tuple[str, float | None]:
    """How the newest checkpoint of a trial compares with the undisturbed run's, and the relative 2-norm."""
    try:
        found = compare(reference.directory, trial.directory)
    except ShoalError:
        return "none", None
    if found.first_step != found.second_step:
        return "none", None
    if not found.differences:
        return "bitwise", 0.0
    difference = math.inf
    with suppress(KeyError, RuntimeError):
        difference = _relative_norm(weights_of(reference.directory), weights_of(trial.directory))
    return (_WITHIN if difference <= TOLERANCE else "differs"), difference


def _relative_norm(reference: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor]) -> float:
    pairs = [(reference[name].double(), found[name].double()) for name in reference]
    apart = sum(float((a - b).square().sum()) for a, b in pairs)
    whole = sum(float(a.square().sum()) for a, _ in pairs)
    return math.sqrt(apart / whole) if whole else math.sqrt(apart)


def _after(time_s: float | None, since_s: float | None) -> float | None:
    return None if time_s is None or since_s is None else max(0.0, time_s - since_s)


def table(rows: Sequence[Row]) -> Iterator[str]:
    """The table, a line a row, its head first."""
    yield f"{'fault':<56} {'noticed':>9} {'recovered':>9} {'lost':>4}  state"
    for row in rows:
        yield line_of(row)


def line_of(row: Row) -> str:
    """One row of the table."""
    verdict = {True: "", False: "  NOT KEPT", None: "  (nothing promised)"}[row.kept]
    apart = f" ({row.difference:.1e})" if row.difference else ""
    return (
        f"{row.name:<56} {_seconds(row.noticed_s):>9} {_seconds(row.recovered_s):>9} {row.lost_steps:>4}  "
        f"{row.state}{apart}{verdict}"
    )


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"
