"""`shoal train` as a person meets it: restarts, signals, failures. Real processes, real kills."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
import tomllib
from pathlib import Path

import numpy as np
import pytest

from shoal.data.order import Order
from shoal.launcher.signals import SAME_REQUEST_S
from tests.cli.project import Project, project, ranks_of
from tests.ports import free_port
from tests.programs import ended
from tests.waiting import HANG_S, NEVER_S, wait_until

STOPPED = 75
ENDLESS = ("model.arguments={pause=0.1}", "run.steps=1000000", f"wire.timeout_s={NEVER_S}")
"""Of a run that does not end by itself, nor by a timeout."""


@pytest.fixture
def own(tmp_path: Path) -> Project:
    return project(tmp_path)


@pytest.mark.slow
def test_every_sample_once_through_kills_and_other_worlds(own: Project) -> None:
    """An epoch and a half in three lives of 2, 3 and 1 ranks, two of them ended by kill -9: each id of the first epoch
    is used exactly once in the steps that count, in the order that an uninterrupted run would have used."""
    for processes, kill_at in ((2, 2), (3, 5)):
        held, before = f"model.arguments={{hold_at={kill_at + 2}}}", own.newest_checkpoint()
        running = own.start("train", "run.toml", f"run.processes={processes}", held)
        own.wait_for_step(kill_at)
        wait_until(lambda before=before: own.newest_checkpoint() > before)
        os.kill(ranks_of(running)[-1], signal.SIGKILL)
        assert running.wait(HANG_S) == 128 + signal.SIGKILL
        (own.folder / "used.jsonl").rename(own.folder / f"used-{processes}.jsonl")
    done = own.shoal("train", "run.toml", "run.processes=1")
    assert done.returncode == 0, done.stderr

    steps: dict[int, list[int]] = {}
    last_of_life = [json.loads(line)["step"] for line in (own.folder / "used.jsonl").read_text().splitlines()]
    first_of_third = min(last_of_life)
    second = [json.loads(line) for line in (own.folder / "used-3.jsonl").read_text().splitlines()]
    first = [json.loads(line) for line in (own.folder / "used-2.jsonl").read_text().splitlines()]
    third = [json.loads(line) for line in (own.folder / "used.jsonl").read_text().splitlines()]
    first_of_second = min(entry["step"] for entry in second)
    assert 1 < first_of_second < first_of_third <= 9, "both resumes must have come in the middle"
    for life, begin, end in (
        (first, 1, first_of_second),
        (second, first_of_second, first_of_third),
        (third, first_of_third, 10),
    ):
        for entry in sorted(life, key=lambda e: (e["step"], e["rank"])):
            if begin <= entry["step"] < end:
                steps.setdefault(entry["step"], []).extend(entry["ids"])

    in_order = [sample for step in sorted(steps) for sample in steps[step]]
    assert sorted(in_order[:30]) == list(range(30))
    assert in_order == Order(30, seed=0).ids(np.arange(45)).tolist()


def test_resuming_is_bitwise_never_having_stopped(own: Project) -> None:
    """Killed in mid-run and started again on as many ranks: the same losses, the same bytes of weights and moments."""
    plain = own.shoal("train", "run.toml", "run.directory=plain")
    assert plain.returncode == 0, plain.stderr
    running = own.start("train", "run.toml", "run.directory=killed", "model.arguments={hold_at=6}")
    own.wait_for_step(4, "killed")
    running.kill()
    running.wait()
    again = own.shoal("train", "run.toml", "run.directory=killed")
    assert again.returncode == 0, again.stderr
    assert own.losses("killed") == own.losses("plain")
    assert own.manifest("killed")["objects"] == own.manifest("plain")["objects"]
    assert {event.generation for event in own.events("killed")} == {0, 1}


@pytest.mark.slow
def test_a_file_and_a_seed_are_one_result(own: Project) -> None:
    """Two fresh runs end in the same bytes; another seed does not."""
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        done = own.shoal("train", "run.toml", f"run.directory={name}", f"run.seed={seed}", "run.steps=4")
        assert done.returncode == 0, done.stderr
    assert own.manifest("a", 4)["objects"] == own.manifest("b", 4)["objects"]
    assert own.manifest("a", 4)["objects"] != own.manifest("c", 4)["objects"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_the_same_command_goes_on(own: Project, number: signal.Signals) -> None:
    """Ctrl-C or SIGTERM: the step is finished, a checkpoint written, exit 75; the same command ends the run."""
    command = ("train", "run.toml", "checkpoint.every_steps=0", "model.arguments={hold_at=5}")
    running = own.start(*command)
    own.wait_for_step(3)
    running.send_signal(number)
    own.wait_for_text("a second one stops at once")  # by now the ranks have been told
    (own.folder / "go").touch()
    assert running.wait(HANG_S) == STOPPED, (own.folder / "out.txt").read_text()
    stopped_at = max(own.losses())
    assert 3 <= stopped_at < 9
    assert own.shoal("checkpoint", "verify", "runs/own").returncode == 0
    again = own.shoal(*command)
    assert again.returncode == 0, again.stderr
    assert f"resuming from the checkpoint of step {stopped_at}" in again.stdout
    assert sorted(own.losses()) == list(range(1, 10))


def test_a_second_signal_stops_at_once(own: Project) -> None:
    """Asked twice, the run does not wait for its step, which never ends."""
    running = own.start("train", "run.toml", "model.arguments={hold_at=2}", f"wire.timeout_s={NEVER_S}")
    with ended([running]):
        own.wait_for_step(1)
        running.send_signal(signal.SIGINT)
        own.wait_for_text("a second one stops at once")
        time.sleep(2 * SAME_REQUEST_S)  # the next signal is another request
        running.send_signal(signal.SIGINT)
        assert running.wait(HANG_S) == 128 + signal.SIGINT


def test_what_a_user_module_raises_comes_first_and_whole(own: Project) -> None:
    """Rank 1 raises: its traceback is shown first, with host and pid; the others get a line each; exit 1. The report of
    the failed run names cause and rank."""
    done = own.shoal("train", "run.toml", "model.arguments={fail_at=3}", "observe.report=true")
    assert done.returncode == 1
    first, *others = [line for line in done.stderr.splitlines() if line.startswith("rank ")]
    assert first.startswith("rank 1 of 2 failed (host ")
    assert "pid" in first
    assert 'raise ArithmeticError("a mistake in the user\'s own module")' in done.stderr
    assert "ArithmeticError: a mistake in the user's own module" in done.stderr
    assert len(others) == 1
    assert others[0].startswith("rank 0 ")
    facts = json.loads((own.folder / "runs/own/facts.json").read_text())
    cause = "ArithmeticError: a mistake in the user's own module"
    assert (facts["state"], facts["failure"]) == ("failed", {"cause": cause, "rank": 1, "exit_code": 1})
    assert "a mistake in the user" in (own.folder / "runs/own/report.html").read_text()


def test_a_killed_rank_is_noticed_and_leaves_nothing(own: Project) -> None:
    """kill -9 of one rank: not by a timeout, the others end, the code is 137, and the run directory is free again."""
    running = own.start("train", "run.toml", *ENDLESS)
    own.wait_for_step(2)
    victims = ranks_of(running)
    os.kill(victims[0], signal.SIGKILL)
    assert running.wait(HANG_S) == 128 + signal.SIGKILL
    assert not any(Path(f"/proc/{pid}").exists() for pid in victims)
    assert "SIGKILL" in (own.folder / "out.txt").read_text()


@pytest.mark.slow
def test_a_killed_launcher_leaves_no_ranks(own: Project) -> None:
    """kill -9 of the launcher: its ranks end too."""
    running = own.start("train", "run.toml", *ENDLESS)
    own.wait_for_step(1)
    ranks = ranks_of(running)
    running.kill()
    running.wait()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in ranks))


@pytest.mark.slow
def test_a_stopped_rank_is_named(own: Project) -> None:
    """A rank that stands still (SIGSTOP) in mid-step: after the timeout the others name it, and it is ended."""
    done = own.shoal("train", "run.toml", "model.arguments={stop_at=3}", "wire.timeout_s=8")
    assert done.returncode != 0
    assert "rank 1" in done.stderr
    assert "stopped" in done.stderr
    assert "all_reduce" in done.stderr


def test_data_that_is_no_number_is_named(own: Project) -> None:
    """NaN in one sample of every step's batch: skipped, counted, and after the limit exit 4 names the sample."""
    done = own.shoal(
        "train",
        "run.toml",
        "data.arguments={broken=7}",
        "batch.global_samples=30",
        "run.nonfinite_limit=3",
        "run.steps=20",
    )
    assert done.returncode == 4
    assert "3 steps in a row were not finite" in done.stderr
    assert "the inputs of sample 7 at position" in done.stderr
    assert "Traceback" not in done.stderr
    values = [event.values for event in own.events()]
    assert values[-1]["steps/skipped"] == 3
    assert values[0]["loss/train"] is None


@pytest.mark.slow
def test_a_single_bad_step_is_skipped_and_the_run_goes_on(own: Project) -> None:
    """One NaN sample an epoch: its step is skipped by all ranks, the others count, the weights stay finite."""
    done = own.shoal("train", "run.toml", "data.arguments={broken=7}")
    assert done.returncode == 0, done.stderr
    skipped = [event.values["steps/skipped"] for event in own.events() if "steps/skipped" in event.values]
    assert 1 <= skipped[-1] <= 2
    assert "was skipped" in done.stdout + done.stderr
    assert "Not finite: the inputs of sample 7 at position" in done.stdout + done.stderr


@pytest.mark.slow
def test_a_read_that_hangs_is_named_by_its_sample(own: Project) -> None:
    """Rank 0's or rank 1's: no rank is said to be dead, the read is, with the sample that does not come."""
    for sample, where in (
        (8, r"at position \d+"),
        (29, "of the training data"),
    ):  # the last one is read at the start, too
        done = own.shoal("train", "run.toml", f"data.arguments={{hangs={sample}}}", "wire.timeout_s=10")
        assert done.returncode == 2
        assert re.search(f"Sample {sample} {where}: the data source has been reading for 8 s and hangs", done.stderr), (
            done.stderr
        )
        assert done.stderr.count("s and hangs") == 1


def test_ranks_started_by_hand_hear_why_another_failed(own: Project) -> None:
    """Rank 1 was started with another key: it says so with its code, rank 0 ends at once with the same sentence."""
    port, sentence = free_port(), "rank 1 was started with optimizer.lr = 0.02, and rank 0 with 0.01"
    ranks = [own.start_rank(r, "train", "run.toml", *["optimizer.lr=0.02"][:r], port=port) for r in (0, 1)]
    assert [rank.wait(HANG_S) for rank in ranks] == [3, 2]
    assert own.said("rank-1.txt").count(sentence) == 1
    assert f"rank 1 failed: {sentence}" in own.said("rank-0.txt")
    assert not any(
        word in own.said(f"rank-{r}.txt") for r in (0, 1) for word in ("Traceback", "DistNetwork", "frame #")
    )


@pytest.mark.slow
def test_a_rank_that_never_comes_is_named_and_signals_end_the_wait(own: Project) -> None:
    """Rank 0 of 2 is alone: it says whom it waits for after some seconds, and a signal ends it, or its timeout."""
    command = ("train", "run.toml")
    waiting = own.start_rank(0, *command, port=free_port())
    own.wait_for_text("rank 0 waits for rank 1 of 2 to reach the store", "rank-0.txt")
    waiting.send_signal(signal.SIGTERM)
    assert waiting.wait(HANG_S) == -signal.SIGTERM
    alone = own.start_rank(0, *command, "run.start_timeout_s=3", port=free_port())
    assert alone.wait(HANG_S) == 3
    said = own.said("rank-0.txt").splitlines()
    assert [line for line in said if "waited 3 s in vain for rank 1 of 2 to reach the store" in line]
    assert len(said) == 1


@pytest.mark.slow
def test_a_resume_says_which_keys_have_changed(own: Project) -> None:
    """The key, what it was and what it is; the run file of each start is kept."""
    assert own.shoal("train", "run.toml", "run.steps=2").returncode == 0
    renamed = ["run.name=renamed", "run.directory=runs/own"]
    done = own.shoal("train", "run.toml", "--resume", "run.steps=3", "optimizer.lr=0.02", *renamed)
    assert done.returncode == 0, done.stderr
    assert "since the start before, run.name has changed from 'own' to 'renamed'" in done.stdout
    assert "since the start before, optimizer.lr has changed from 0.01 to 0.02" in done.stdout
    assert "since the start before, run.steps has changed from 2 to 3" in done.stdout
    kept = [tomllib.loads((own.folder / f"runs/own/{name}.toml").read_text()) for name in ("run-0", "run")]
    assert [file["optimizer"]["lr"] for file in kept] == [0.01, 0.02]


@pytest.mark.slow
def test_what_takes_long_is_said_before_the_first_step_and_after_the_last(own: Project) -> None:
    """In the order of a start and of an end, of a resumed run too; and what its keys mean for the data and the rate."""
    keys = ["observe.report=true", "schedule.warmup_steps=2", "batch.global_samples=31"]
    first = own.shoal("train", "run.toml", "run.steps=2", *keys)
    resumed = own.shoal("train", "run.toml", "run.steps=3", *keys)
    building = ["building the model and opening the data", "waiting until every rank has built its model"]
    building += ["connecting the ranks and drawing the weights"]
    loading = ["verifying the newest checkpoint", "loading the checkpoint of step 2"]
    for done, begins, last in ((first, building, 2), (resumed, building + loading, 3)):
        assert done.returncode == 0, done.stderr
        said = done.stdout.splitlines()
        ends = [f"waiting until the checkpoint of step {last} is written", "writing the report"]
        steps = [n for n, line in enumerate(said) if line.startswith("step ")]
        assert said[: len(begins)] == begins
        assert [line for line in said if line in ends] == ends
        assert said.index(begins[-1]) < steps[0] <= steps[-1] < said.index(ends[0])
    assert "the learning rate only rises: schedule.warmup_steps = 2 and run.steps = 2" in first.stdout
    assert "the learning rate only rises" not in resumed.stdout
    assert (
        "warning: batch.global_samples = 31, and the training data has 30 samples: each step uses some" in first.stdout
    )


def test_a_launcher_with_another_number_of_ranks_is_said(own: Project) -> None:
    """Two ranks started by hand and `run.processes = 3`: rank 0 says that two train, once, and they do."""
    port = free_port()
    ranks = [own.start_rank(r, "train", "run.toml", "run.steps=1", "run.processes=3", port=port) for r in (0, 1)]
    assert [rank.wait(HANG_S) for rank in ranks] == [0, 0]
    said = "run.processes = 3 is passed over: the launcher has started 2 ranks, and all of them train"
    assert [own.said(f"rank-{r}.txt").count(said) for r in (0, 1)] == [1, 0]


@pytest.mark.slow
def test_out_of_memory_is_said_in_a_few_lines(own: Project) -> None:
    """An address space of 6 GiB and a layer of 12: exit 5, what was asked for, what there is, what is large, and what
    frees some.
    """
    done = own.shoal("train", "run.toml", "model.arguments={width=1500000000}", address_space_bytes=6 << 30)
    assert done.returncode == 5
    lines = done.stderr.splitlines()
    assert len(lines) <= 5
    assert re.match(r"out of memory: asked for [\d.]+ GiB, and [\d.]+ GiB are left of 6.00 GiB \(ulimit -v\)", lines[1])
    assert lines[-1].startswith("What frees memory: batch.micro_samples")


def test_out_of_memory_is_explained_under_other_launchers(own: Project) -> None:
    """A rank that was started by hand and runs out of memory says what there is, and what frees some; exit 5."""
    (own.folder / "own.py").write_text(
        (own.folder / "own.py").read_text()
        + "\n\nclass Greedy(Logging):\n    def forward(self, x):\n"
        + "        raise MemoryError('Unable to allocate 7.45 GiB')\n"
    )
    rank = own.start_rank(0, "train", "run.toml", "model.build=own:Greedy", world_size=1, port=free_port())
    assert rank.wait(HANG_S) == 5
    said = own.said("rank-0.txt")
    assert "out of memory: asked for 7.45 GiB" in said
    assert said.splitlines()[-1].startswith("What frees memory: batch.micro_samples")


@pytest.mark.slow
def test_a_run_directory_that_is_removed_is_named(own: Project) -> None:
    """Removed in mid-run: exit 3 and a sentence at the next step, no traceback."""
    running = own.start("train", "run.toml", *ENDLESS)
    own.wait_for_step(2)
    shutil.rmtree(own.folder / "runs", ignore_errors=True)
    assert running.wait(HANG_S) == 3
    assert "the run directory runs/own was removed" in own.said()
    assert "Traceback" not in own.said()


SCRIPT = """
import sys
import own, shoal
try:
    shoal.train("run.toml", sys.argv[1:])
except shoal.RunFailed as failure:
    print(failure.rank, failure.exit_code, failure.sentence)
    raise
"""


def test_a_script_gets_the_failure_of_a_rank(own: Project) -> None:
    """`RunFailed` has rank, code and sentence; not caught, it ends the script with the code, without its own frames."""
    (own.folder / "mine.py").write_text(SCRIPT)
    done = own.python("mine.py", "data.arguments={broken=7}", "run.nonfinite_limit=1", "batch.global_samples=30")
    assert done.returncode == 4
    assert re.match(r"[01] 4 Diverged: ", done.stdout.splitlines()[-1])
    assert "Traceback" not in done.stderr


def test_ctrl_c_ends_a_script_with_75(own: Project) -> None:
    """The ranks save; the script ends with the code that says so, without a traceback."""
    (own.folder / "mine.py").write_text(SCRIPT)
    running = own.start("mine.py", *ENDLESS, module=())
    own.wait_for_step(2)
    running.send_signal(signal.SIGINT)
    assert running.wait(HANG_S) == STOPPED
    assert "Traceback" not in own.said()


def test_ctrl_c_while_modules_are_imported_leaves_no_traceback(own: Project) -> None:
    """The command dies by the signal at once, wherever in its imports it is."""
    (own.folder / "shellingham.py").write_text(f"import time\nprint('importing', flush=True)\ntime.sleep({NEVER_S})\n")
    starting = own.start_anew("doctor")
    own.wait_for_text("importing\n")
    starting.send_signal(signal.SIGINT)
    assert starting.wait(HANG_S) == -signal.SIGINT
    assert own.said() == "importing\n"


def test_a_model_that_cannot_train_is_one_sentence(own: Project) -> None:
    """What is wrong with it stands once, though two ranks found it; no traceback, and exit 2."""
    done = own.shoal("train", "run.toml", "model.build='own:not_a_model'")
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("the model is a str, 'hello'; it must be an nn.Module") == 1
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_script_on_standard_input_is_one_sentence(own: Project) -> None:
    """The ranks run the script again, and there is no file to run: exit 2, and no frames of Shoal's."""
    done = own.python("-", text=SCRIPT)
    assert done.returncode == 2
    assert done.stderr.startswith("shoal: ranks and reader processes are started by running the script again")
    assert len(done.stderr.splitlines()) == 1
