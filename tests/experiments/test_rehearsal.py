"""`shoal rehearse`: what it injects, what it measures, and real runs that are struck."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
import torch

from shoal.checkpoint.commit import newest_verified
from shoal.checkpoint.objects import ACTIONS
from shoal.coordinator.journal import journal_of
from shoal.errors import EnvironmentFault, UsageError
from shoal.experiments.rehearsal import trial as trial_module
from shoal.experiments.rehearsal.faults import end_fill, fill, small_disk, why_no_small_disk
from shoal.experiments.rehearsal.rehearse import rehearse, row_of, state_of
from shoal.experiments.rehearsal.scenarios import AT, FAMILIES, Scenario, scenarios
from shoal.experiments.rehearsal.trial import FaultTrial, Line, damage
from shoal.observe.events import EventWriter
from shoal.resilience.events import Scaled
from shoal.resilience.faults import JOURNAL, REHEARSAL, Fault, Strike, write_faults
from tests.checkpoint.states import save, saver_for
from tests.cli.project import Project, project

PASSED = {
    "recovery/before", "recovery/in", "recovery/after", "step/before", "step/data", "step/state", "step/after",
    "collective/before", "collective/in", "gradients/reduced", "optimizer/before", "optimizer/after", JOURNAL,
    *(f"save/{action}.{moment}" for action in ACTIONS for moment in ("before", "after")),
}  # fmt: skip


@pytest.mark.parametrize(("ranks", "elastic"), [(1, False), (2, False), (4, False), (3, True)])
def test_every_scenario_strikes_at_a_label_that_ranks_pass(ranks: int, elastic: bool) -> None:
    """All families are there, names differ, ranks exist, and a kill at every point of a save can be asked for."""
    found = scenarios(ranks, elastic=elastic, every_point=True)
    missing = ({"slow", "network"} if ranks == 1 else set()) | (set() if elastic else {"coordinator"})
    assert {scenario.family for scenario in found} == set(FAMILIES) - missing
    assert len({scenario.slug for scenario in found}) == len(found)
    for scenario in found:
        for fault in scenario.faults:
            assert fault.label in PASSED, fault.label
            assert fault.rank < ranks
            assert fault.step <= scenario.steps
    points = [scenario for scenario in found if scenario.family == "save"]
    assert len(points) == 1 + 2 * len(ACTIONS)


def trial(folder: Path, *, codes: list[int | None], lines: list[Line], steps: list[tuple[int, float]]) -> FaultTrial:
    """A run that was struck at second 10 of step 5, with these events (a negative step: a start after it)."""
    found = FaultTrial(folder, Scenario("a fault", "rank", ()), codes, lines, [12.0, 30.0])
    found.struck = [Strike(10.0, AT, 1, 77, "step/before")]
    with EventWriter(folder, rank=0) as writer:
        for step, time_s in steps:
            writer.write(abs(step), {"loss/train": 1.0} if step > 0 else {}, time_s=time_s)
    return found


def test_what_a_row_says_is_what_happened(tmp_path: Path) -> None:
    """The first sentence after the strike is the notice, the next finished step the recovery; two steps are redone."""
    calm = FaultTrial(tmp_path / "calm", Scenario("calm", "rank", ()), [0])
    for directory in ("calm", "struck"):
        save(saver_for(tmp_path / directory), 8)
    lines = [Line(9.0, "an earlier line", True), Line(10.5, "shown", False), Line(11.0, "rank 1 failed", True)]
    steps = [(3, 8.0), (4, 9.5), (-2, 20.0), (3, 21.0), (4, 22.0), (8, 25.0)]
    found = row_of(trial(tmp_path / "struck", codes=[137, 0], lines=lines, steps=steps), calm)
    assert (found.noticed_s, found.said, found.recovered_s) == (1.0, "rank 1 failed", 11.0)
    assert (found.lost_steps, found.starts, found.exit_code) == (2, 2, 0)
    assert (found.state, found.kept) == ("bitwise", True)


def test_a_run_that_ends_in_another_state_has_not_kept_its_promise(tmp_path: Path) -> None:
    """One changed weight, or no checkpoint of the last step."""
    calm = FaultTrial(tmp_path / "calm", Scenario("calm", "rank", ()), [0])
    save(saver_for(tmp_path / "calm"), 8, {"model/weight": torch.ones(100)})
    save(saver_for(tmp_path / "other"), 8, {"model/weight": torch.ones(100).index_fill_(0, torch.tensor(3), 1.5)})
    save(saver_for(tmp_path / "near"), 8, {"model/weight": torch.ones(100) * (1 + 1e-6)})
    save(saver_for(tmp_path / "early"), 6, {"model/weight": torch.ones(100)})
    line = [Line(11.0, "rank 1 failed", True)]
    other = trial(tmp_path / "other", codes=[0], lines=line, steps=[(8, 12.0)])
    assert state_of(other, calm) == ("differs", pytest.approx(0.05))
    assert row_of(other, calm).kept is False
    near = trial(tmp_path / "near", codes=[0], lines=line, steps=[(8, 12.0)])
    assert state_of(near, calm) == ("within 0.0001", pytest.approx(1e-6, rel=0.1))
    assert row_of(near, calm).kept is True
    assert state_of(trial(tmp_path / "early", codes=[0], lines=line, steps=[]), calm)[0] == "none"


def test_a_fault_that_nobody_told_of_is_not_kept(tmp_path: Path) -> None:
    """A run that ends with the right state, and said nothing."""
    calm = FaultTrial(tmp_path / "calm", Scenario("calm", "rank", ()), [0])
    for directory in ("calm", "struck"):
        save(saver_for(tmp_path / directory), 8)
    found = row_of(trial(tmp_path / "struck", codes=[0], lines=[], steps=[(8, 12.0)]), calm)
    assert (found.noticed_s, found.kept) == (None, False)


def test_a_fault_or_a_damage_that_did_not_happen_proves_nothing(tmp_path: Path) -> None:
    """One of two faults at the same label struck; a checkpoint was to be damaged, and there was none."""
    calm = FaultTrial(tmp_path / "calm", Scenario("calm", "rank", ()), [0])
    for directory in ("calm", "struck"):
        save(saver_for(tmp_path / directory), 8)
    line = [Line(11.0, "rank 1 failed", True)]
    found = trial(tmp_path / "struck", codes=[0], lines=line, steps=[(8, 12.0)])
    assert row_of(found, calm).kept is True
    found.missed = True
    assert row_of(found, calm).kept is False, "the network had nothing that the fault could strike"
    found.missed = False
    twice = (Fault(action="kill", label="step/before"), Fault(action="kill", label="step/before", rank=1))
    found.scenario = Scenario("two kills", "recovery", twice)
    assert row_of(found, calm).kept is False
    found.scenario = Scenario("a damage", "corruption", twice[:1], damages="object")
    assert row_of(found, calm).kept is False


@pytest.mark.parametrize(
    "environ", [{"SHOAL_COORDINATOR": "host:1"}, {"RANK": "0", "WORLD_SIZE": "2"}, {"SHOAL_LAUNCHER_PID": "1"}]
)
def test_the_environment_of_another_run_is_refused(tmp_path: Path, environ: dict[str, str]) -> None:
    """Its ranks would be struck, or this process would be one."""
    own = project(tmp_path)
    with pytest.raises(UsageError, match="outside of srun, torchrun and mpiexec"):
        rehearse(own.folder / "run.toml", environ=environ)


def test_a_list_holds_what_would_be_played(tmp_path: Path) -> None:
    """--only counts for it too."""
    listed = project(tmp_path).here("rehearse", "run.toml", "--list", "--only", "kill before a step")
    assert listed.stdout.split(maxsplit=1) == ["rank", "kill before a step\n"]


@pytest.mark.parametrize("what", ["manifest", "object", "latest"])
def test_damage_is_noticed(tmp_path: Path, what: str) -> None:
    """One bit of each kind of file: the newest checkpoint is passed over, or `latest` is reported."""
    saver = saver_for(tmp_path)
    for step in (100, 200):
        save(saver, step)
    assert damage(tmp_path, what)
    manifest, problems = newest_verified(tmp_path)
    assert manifest is not None
    assert manifest.step == (200 if what == "latest" else 100)
    assert problems


def test_damage_to_each_file_is_noticed_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one stays; where one goes unnoticed, nothing is proved."""
    saver = saver_for(tmp_path)
    for step in (100, 200):
        save(saver, step, {"model/weight": torch.full((100,), float(step))})
    assert damage(tmp_path, "each") == "each of 2 files"
    manifest, problems = newest_verified(tmp_path)
    assert manifest is not None
    assert (manifest.step, len(problems)) == (100, 1)
    monkeypatch.setattr(trial_module, "newest_verified", lambda directory: (manifest, []))
    assert damage(tmp_path, "each") == ""


@pytest.mark.skipif(why_no_small_disk() is not None, reason="needs root and mount")
def test_a_small_disk_is_full_for_a_while_and_leaves_its_files(tmp_path: Path) -> None:
    """Not a byte can be written while it is full; afterwards its files lie in a plain folder."""
    folder = tmp_path / "disk"
    with small_disk(folder, 4 << 20):
        (folder / "first").write_text("kept")
        fill(folder)
        with pytest.raises(OSError, match="No space left"):
            (folder / "second").write_bytes(bytes(1 << 16))
        end_fill(folder)
        (folder / "third").write_bytes(bytes(1 << 16))
    assert not folder.is_mount()
    assert sorted(path.name for path in folder.iterdir() if path.name != "second") == ["first", "third"]


@pytest.mark.skipif(why_no_small_disk() is not None, reason="needs root and mount")
def test_a_small_disk_goes_with_a_rehearsal_that_is_killed(tmp_path: Path) -> None:
    """Nobody else sees it, so that nothing is left to unmount."""
    folder = tmp_path / "disk"
    code = f"""
import sys, time
from pathlib import Path
from shoal.experiments.rehearsal.faults import small_disk
with small_disk(Path({str(folder)!r}), 1 << 20):
    print(Path({str(folder)!r}).is_mount(), flush=True)
    time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as rehearsal:
        assert rehearsal.stdout is not None
        assert rehearsal.stdout.readline() == "True\n"
        assert not folder.is_mount()
        rehearsal.kill()
    folder.rmdir()


def test_the_journal_of_a_rehearsal_fails_once(tmp_path: Path) -> None:
    """At the passing that the fault names; the coordinator that comes after it writes on."""
    write_faults([Fault(action="fail_disk", label=JOURNAL, passing=2)], tmp_path / "scenario")
    opened = journal_of({REHEARSAL: str(tmp_path / "scenario")})
    with closing(opened(tmp_path / "journal")) as journal:
        journal.append([Scaled(2)])
        with pytest.raises(EnvironmentFault, match="No space left on device"):
            journal.append([Scaled(3)])
    with closing(opened(tmp_path / "journal")) as journal:
        for replicas in (4, 5):
            journal.append([Scaled(replicas)])
        assert journal.read() == [Scaled(2), Scaled(4), Scaled(5)]


def rehearsed(own: Project, *arguments: str) -> list[dict]:
    done = own.shoal("rehearse", "run.toml", "--json", *arguments, timeout_s=280.0)
    found = json.loads(done.stdout)
    assert done.returncode == (0 if found["holds"] else 6), done.stderr
    return found["rows"]


@pytest.mark.slow
def test_a_killed_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    """One rank, kill -9 in the middle: the next start goes on, and the user's own run directory is not made."""
    own = project(tmp_path)
    (row,) = rehearsed(own, "run.processes=1", "--only", "kill before a step")
    assert (row["state"], row["kept"], row["starts"], row["struck_step"]) == ("bitwise", True, 2, AT)
    assert row["noticed_s"] < row["recovered_s"]
    assert not (tmp_path / "runs").exists()


def test_nothing_is_sent_to_what_the_real_run_writes_to(tmp_path: Path) -> None:
    """A run file with remote copies or alerts is refused before any run is started."""
    own = project(tmp_path)
    done = own.shoal("rehearse", "run.toml", 'checkpoint.remote="s3://bucket/run"', 'observe.webhook="http://a/b"')
    assert done.returncode == 2, done.stderr
    assert "checkpoint.remote and observe.webhook: a rehearsal would send" in done.stderr


ELASTIC = "[elastic]\nmax = 2\nsilence_s = 5\n"


@pytest.mark.stress
@pytest.mark.parametrize("family", FAMILIES)
def test_every_promise_is_kept_on_two_ranks(tmp_path: Path, family: str) -> None:
    """The whole suite, a family at a time; a coordinator there is in an elastic run alone."""
    own = project(tmp_path)
    if family == "coordinator":
        text = (tmp_path / "run.toml").read_text().replace("global_samples = 5", "global_samples = 6")
        (tmp_path / "run.toml").write_text(text + ELASTIC)
    rows = rehearsed(own, "--faults", family)
    assert rows
    assert [row["name"] for row in rows if row["kept"] is False] == []
