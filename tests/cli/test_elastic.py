"""`shoal train` with `[elastic]`: real replicas, real signals. A run through losses and joins is compared with an
undisturbed one, in float64, where the order of summation shows in the last digits alone."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest

from shoal.data.order import Order
from shoal.observe.summary import RESTARTING
from shoal.resilience.faults import Fault, write_faults
from tests.cli.elastic_runs import rank_zero, set_pace, to_the_end, wait_for_join
from tests.cli.project import OWN, RUN, Project, ranks_of
from tests.programs import Program, environ_of
from tests.waiting import HANG_S, NEVER_S, wait_until

STOPPED = 75
LOSS_TOLERANCE = 1e-9
"""Relative, in float64 with SGD: another order of summation shows in the last digits alone."""
PACED = """

import threading

STUCK = threading.Lock()


class Paced(Logging):
    # Steps take as long as the file `pace` says, in seconds; where a file `flip` names this rank, one bit changes, and
    # where a file `hang` does, it waits for a lock that nobody gives back.
    def forward(self, x):
        if self.training:
            time.sleep(float(open("pace").read()))
            if os.path.exists("flip") and open("flip").read() == RANK:
                os.remove("flip")
                with torch.no_grad():
                    self.layers[0].weight.view(torch.int64)[0, 0] ^= 1 << 20
            if os.path.exists("hang") and open("hang").read() == RANK:
                os.remove("hang")
                STUCK.acquire()
                STUCK.acquire()  # here: it hangs
        return super().forward(x)


def paced():
    return Paced()
"""
SAMPLES, BATCH, STEPS = 30, 6, 150
TABLES = """
[precision]
kind = "float64"
[elastic]
min = 1
max = 3
silence_s = 100
accept_s = 40
wait_s = 50
fingerprint_every_steps = 3
"""


@pytest.fixture
def own(tmp_path: Path) -> Project:
    (tmp_path / "own.py").write_text(OWN + PACED)
    (tmp_path / "pace").write_text("0")
    table = RUN.replace("global_samples = 5", f"global_samples = {BATCH}").replace("steps = 9", f"steps = {STEPS}")
    table = table.replace("own:model", "own:paced").replace('"adamw"', '"sgd"')
    (tmp_path / "run.toml").write_text(table.replace("every_steps = 1", "every_steps = 50") + TABLES)
    (tmp_path / "fixed.toml").write_text((tmp_path / "run.toml").read_text().partition("[elastic]")[0])
    return Project(tmp_path)


def replicas_of(launcher: Program) -> dict[int, int]:
    """The pids of a launcher's replicas, by their slots."""
    found = {}
    for pid in ranks_of(launcher):
        found[int(environ_of(pid)["RANK"])] = pid
    return found


def start(own: Project, *overrides: str) -> Program:
    """The run, at a pace that leaves time for what happens to it, in its first steps."""
    set_pace(own, 0.2)
    running = own.start("train", "run.toml", *overrides)
    own.wait_for_step(3)
    return running


def place_in(path: Path, text: str) -> None:
    """Writes a file that a reader finds whole."""
    draft = path.with_name(f".{path.name}")
    draft.write_text(text)
    draft.replace(path)


def used_ids(own: Project) -> list[int]:
    """The samples of the steps that count, in order: of a step that was taken again, those of its last time."""
    lines = [json.loads(line) for line in (own.folder / "used.jsonl").read_text().splitlines()]
    by_step: dict[int, list[int]] = {}
    for line in reversed(lines):
        found = by_step.setdefault(line["step"], [])
        if len(found) < BATCH:
            found.extend(reversed(line["ids"]))
    return [sample for step in sorted(by_step) for sample in sorted(by_step[step])]


def expected_ids(steps: int) -> list[int]:
    order = Order(SAMPLES, seed=0).ids(np.arange(steps * BATCH)).reshape(steps, BATCH)
    return np.sort(order, axis=1).ravel().tolist()


def undisturbed(own: Project) -> dict[int, float]:
    """The losses of the same run on one rank that nothing happens to."""
    done = own.shoal("train", "fixed.toml", "run.processes=1", "run.directory=plain")
    assert done.returncode == 0, done.stderr
    (own.folder / "used.jsonl").unlink()
    return own.losses("plain")


@pytest.mark.slow
def test_killed_replicas_are_replaced_and_the_losses_stay_the_same(own: Project) -> None:
    """kill -9 of a replica, growth back to full size, kill -9 of rank 0: the other processes go on, every sample is
    used once, and the losses are those of an undisturbed run."""
    plain = undisturbed(own)
    running = start(own)
    first = replicas_of(running)
    lost = next(slot for slot in first if first[slot] != rank_zero(first.values()))
    os.kill(first[lost], signal.SIGKILL)
    own.wait_for_text(r"of 3 replicas; rank [12] lost after step")
    wait_for_join(own, r"3 of 3 replicas; .*rank 2 joined after step")
    second = replicas_of(running)
    assert {slot for slot in first if second[slot] != first[slot]} == {lost}, "survivors were restarted"
    os.kill(rank_zero(second.values()), signal.SIGKILL)
    own.wait_for_text(r"replicas; rank 0(, rank \d)* lost after step")  # and who is fenced for not accepting in time
    assert to_the_end(own, running) == 0, own.said()
    losses = own.losses()
    assert len(losses) >= len(plain) - 1, "the record of one step may die with rank 0, which was to write it"
    assert losses == pytest.approx({step: plain[step] for step in losses}, rel=LOSS_TOLERANCE)
    assert used_ids(own) == expected_ids(STEPS)
    facts = json.loads((own.folder / "runs/own/facts.json").read_text())
    changes = facts["membership"]
    assert changes[0]["replicas"] == 3
    assert sum("lost" in change["change"] for change in changes) == 2
    assert all(change["replicas"] in (2, 3) for change in changes)
    assert any(event.get(RESTARTING) for event in own.events()), "what the losses cost is in the events"


@pytest.mark.stress
def test_a_replica_that_dies_before_a_due_save_takes_nobody_along(own: Project) -> None:
    """kill -9 after a step and before what ranks say to each other on the store, to compare their copies before its
    save: the others wait for that neither until the timeout of a collective nor until `accept_s`, and none is fenced.
    """
    plain = undisturbed(own)
    set_pace(own, 0.2)
    write_faults([Fault(action="kill", label="step/after", rank=2, step=5)], own.folder / "scenario")
    never = (f"wire.timeout_s={NEVER_S}", "elastic.accept_s=8")
    running = own.start("train", "run.toml", "checkpoint.every_steps=5", *never, SHOAL_REHEARSAL="scenario")
    own.wait_for_text(r"of 3 replicas; rank \d lost after step 5")
    assert to_the_end(own, running) == 0, own.said()
    assert "is fenced" not in own.said()
    assert "did not accept" not in own.said()
    assert own.losses() == pytest.approx(plain, rel=LOSS_TOLERANCE)
    assert used_ids(own) == expected_ids(STEPS)


@pytest.mark.stress
def test_a_stopped_replica_is_fenced_and_replaced(own: Project) -> None:
    """SIGSTOP: noticed by its silence, its process is ended, another takes its slot."""
    plain = undisturbed(own)
    running = start(own, "elastic.silence_s=10")
    os.kill(replicas_of(running)[2], signal.SIGSTOP)
    own.wait_for_text(r"replica-2-\w+ is fenced: its rank 0 was silent for")
    wait_for_join(own, r"3 of 3 replicas; .*rank 2 joined after step")
    assert to_the_end(own, running) == 0, own.said()
    assert own.losses() == pytest.approx(plain, rel=LOSS_TOLERANCE)
    assert used_ids(own) == expected_ids(STEPS)


@pytest.mark.stress
def test_a_replica_that_hangs_in_user_code_is_named_fenced_and_replaced(own: Project) -> None:
    """A lock in the model: heartbeats go on, the other replicas wait. The rank and its line are named, its replica is
    fenced long before `accept_s` or a collective's timeout, another joins; losses and samples are those of an
    undisturbed run."""
    plain = undisturbed(own)
    never = (f"elastic.accept_s={NEVER_S}", f"elastic.wait_s={2 * NEVER_S}", f"wire.timeout_s={NEVER_S}")
    running = start(own, "elastic.hang_s=15", "wire.report_hang_s=2", *never)
    place_in(own.folder / "hang", "2")
    own.wait_for_text(
        r"replica-2-\w+ is fenced: its rank 0 hangs: it made no progress for 15 s, and others wait for it"
    )
    code = (own.folder / "own.py").read_text().splitlines()
    line = next(number for number, text in enumerate(code, start=1) if text.endswith("# here: it hangs"))
    own.wait_for_text(rf"why it hung: rank \d \([^)]*\) .*own\.py:{line} ")
    wait_for_join(own, r"3 of 3 replicas; .*rank 2 joined after step")
    assert to_the_end(own, running) == 0, own.said()
    assert own.losses() == pytest.approx(plain, rel=LOSS_TOLERANCE)
    assert used_ids(own) == expected_ids(STEPS)


@pytest.mark.stress
def test_a_replica_that_is_asked_to_leave_hands_over(own: Project) -> None:
    """SIGTERM of one replica: it ends with 75 between two steps, nobody takes its place, no step is taken twice."""
    plain = undisturbed(own)
    running = start(own)
    os.kill(replicas_of(running)[0], signal.SIGTERM)
    own.wait_for_text(r"of 3 replicas; rank \d lost after step")
    assert to_the_end(own, running) == 0, own.said()
    assert "takes its place" not in own.said()
    assert own.losses() == pytest.approx(plain, rel=LOSS_TOLERANCE)
    lines = [json.loads(line) for line in (own.folder / "used.jsonl").read_text().splitlines()]
    assert sum(len(line["ids"]) for line in lines) == STEPS * BATCH


@pytest.mark.stress
def test_the_launcher_stops_the_run_and_the_same_command_goes_on(own: Project) -> None:
    """SIGTERM of the launcher: a checkpoint, exit 75; the next start resumes from it."""
    plain = undisturbed(own)
    running = start(own)
    running.send_signal(signal.SIGTERM)
    assert running.wait(HANG_S) == STOPPED, own.said()
    set_pace(own, 0.0)
    again = own.shoal("train", "run.toml")
    assert again.returncode == 0, again.stderr
    assert "resuming from the checkpoint of step" in again.stdout
    assert own.losses() == pytest.approx(plain, rel=LOSS_TOLERANCE)
    assert used_ids(own) == expected_ids(STEPS)


@pytest.mark.stress
def test_a_replica_with_a_flipped_bit_is_named_and_healed(own: Project) -> None:
    """One bit of one weight: the fingerprints after a step name the replica, and another takes over from the others."""
    running = start(own)
    (own.folder / "flip").write_text("2")
    own.wait_for_text(r"replica-2-\w+ is fenced: its parameters after step \d+ differ from the majority's")
    wait_for_join(own, r"3 of 3 replicas; .*rank 2 joined after step")
    assert to_the_end(own, running) == 0, own.said()
    assert used_ids(own) == expected_ids(STEPS)


@pytest.mark.stress
def test_no_fingerprint_differs_in_10_000_steps(own: Project) -> None:
    """Compared after every step, replicas that nothing strikes are never taken to differ; none is fenced or slow for
    good, and no step is taken again."""
    steps = 10_000
    done = own.shoal(
        "train", "run.toml", f"run.steps={steps}", "elastic.fingerprint_every_steps=1", "elastic.max=2",
        "checkpoint.every_steps=0", timeout_s=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "fenced" not in done.stderr + done.stdout
    assert "differ" not in done.stderr + done.stdout
    lines = [json.loads(line) for line in (own.folder / "used.jsonl").read_text().splitlines()]
    assert sum(len(line["ids"]) for line in lines) == steps * BATCH


@pytest.mark.stress
def test_of_two_replicas_that_differ_none_goes_on(own: Project) -> None:
    """Nobody can say which of the two is right: exit 6 with a sentence, and nothing of it is saved."""
    running = start(own, "elastic.max=2")
    (own.folder / "flip").write_text("1")
    assert running.wait(HANG_S) == 6, own.said()
    assert "no majority says whose are right" in own.said()
    assert not (own.folder / "runs/own/checkpoints/latest").exists()


@pytest.mark.stress
def test_too_few_replicas_end_the_run_with_a_sentence(own: Project) -> None:
    """Below `min`, and nothing that is started again takes a step: exit 3, and how to go on."""
    running = start(own, "elastic.min=3", "elastic.retries=0", "elastic.accept_s=15", "elastic.wait_s=20")
    os.kill(replicas_of(running)[1], signal.SIGKILL)
    assert running.wait(HANG_S) == 3, own.said()
    assert "2 of at least 3 replicas are left" in own.said()


@pytest.mark.stress
def test_checkpoints_are_copied_to_a_remote_store_though_their_sender_is_lost(own: Project) -> None:
    """kill -9 of rank 0, which sends them: the next rank 0 does. The interval between saves is the measured one. In an
    empty directory the same command fetches the last checkpoint, and has nothing to do."""
    pytest.importorskip("fsspec")
    remote = own.folder / "remote"
    keys = (f'checkpoint.remote="file://{remote}"', 'checkpoint.every="auto"', "checkpoint.every_steps=5")
    running = start(own, *keys)
    wait_until(lambda: list(remote.glob("step-*.json")), own.said)
    os.kill(rank_zero(replicas_of(running).values()), signal.SIGKILL)
    own.wait_for_text(r"replicas; rank 0 lost after step")
    assert to_the_end(own, running) == 0, own.said()
    assert used_ids(own) == expected_ids(STEPS)
    assert (remote / f"step-{STEPS:08d}.json").is_file()
    shutil.rmtree(own.folder / "runs")
    again = own.shoal("train", "run.toml", *keys)
    assert again.returncode == 0, again.stderr
    assert f"fetched the checkpoint of step {STEPS} from file://{remote}" in again.stdout


@pytest.mark.slow
def test_what_cannot_be_elastic_is_refused(own: Project) -> None:
    """A sentence before any process starts."""
    for override, said in (
        ("elastic.min=4", "min = 4 is more than max = 3"),
        ("elastic.wait_s=40", "raise wait_s above accept_s"),
        ("run.processes=5", "run.processes = 5"),
        ("layout.replicate=3", "layout.replicate = 3 with [elastic]"),
        ("layout.shard=3", "each replica needs at least 3 of a step"),
        ("layout.auto=true", "layout.auto with [elastic]"),
        ('sync.kind="hogwild"', "its processes share one memory"),
        ('sync.kind="gossip"', "there is no other to agree with"),
        ('optimizer.kind="one_bit_adam"', "a lost replica would take its error feedback along"),
        ("batch.global_samples=2", "batch.global_samples = 2"),
    ):
        refused = own.shoal("train", "run.toml", override)
        assert refused.returncode == 2, override
        assert said in refused.stderr


@pytest.mark.stress
def test_the_price_takes_replicas_away_and_brings_them_back(own: Project) -> None:
    """They stand by while it is high, in processes that stay; the losses are those of an undisturbed run."""
    plain = undisturbed(own)
    price = own.folder / "price"
    price.write_text("1")
    keys = ('elastic.policy="price"', "elastic.price_limit=2", f'elastic.price_file="{price}"')
    running = start(own, *keys)
    first = replicas_of(running)
    price.write_text("3")
    own.wait_for_text(r"1 of 3 replicas; .*lost after step")
    price.write_text("1")
    wait_for_join(own, r"(?s)lost after step.*3 of 3 replicas; .*joined after step")
    assert replicas_of(running) == first
    assert to_the_end(own, running) == 0, own.said()
    assert own.losses() == pytest.approx(plain, rel=LOSS_TOLERANCE)
    assert used_ids(own) == expected_ids(STEPS)


@pytest.mark.stress
def test_a_host_that_is_to_go_saves_and_stops(own: Project) -> None:
    """The file appears: no replica can stay on another host, so the run saves, and the same command goes on."""
    notice = own.folder / "notice"
    running = start(own, f'elastic.preemption_file="{notice}"')
    notice.write_text("spot instance is reclaimed")
    assert running.wait(HANG_S) == STOPPED, own.said()
    assert "notice is there (spot instance is reclaimed): its replicas hand over and leave" in own.said()
    set_pace(own, 0.0)
    again = own.shoal("train", "run.toml")
    assert again.returncode == 0, again.stderr
    assert "resuming from the checkpoint of step" in again.stdout
    assert used_ids(own) == expected_ids(STEPS)
