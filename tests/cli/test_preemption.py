"""A plain run on a host that is about to be taken away: it saves and stops before the deadline."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from shoal.launcher.signals import StopRequest
from tests.cli.project import Project, project
from tests.resilience.test_preemption import metadata
from tests.waiting import HANG_S

STOPPED = 75
SLOWLY = "model.arguments={pause=0.2}"


@pytest.fixture
def own(tmp_path: Path) -> Project:
    return project(tmp_path)


@pytest.mark.slow
def test_a_file_makes_a_plain_run_save_and_stop(own: Project) -> None:
    """Of two ranks, with no save due before the last step; a SIGTERM afterwards, as of a host that shuts down, is the
    first request still."""
    notice = own.folder / "notice"
    keys = ("run.steps=900", SLOWLY, "checkpoint.every_steps=0", f'run.preemption_file="{notice}"')
    running = own.start("train", "run.toml", "run.processes=2", *keys)
    own.wait_for_step(1)
    notice.write_text("reclaimed at noon")
    own.wait_for_text(r"notice is there \(reclaimed at noon\): saving after this step, and stopping")
    running.send_signal(signal.SIGTERM)
    assert running.wait(HANG_S) == STOPPED, own.said()
    taken = max(own.losses())
    again = own.shoal("train", "run.toml", f"run.steps={taken + 1}", "run.processes=2")
    assert again.returncode == 0, again.stderr
    assert f"resuming from the checkpoint of step {taken}" in again.stdout


@pytest.mark.slow
def test_a_metadata_service_makes_a_plain_run_save_and_stop(own: Project) -> None:
    """As those of the clouds answer: FALSE, and then TRUE."""
    with metadata([(200, "FALSE"), (200, "TRUE")]) as url:
        keys = ("run.steps=900", SLOWLY, "checkpoint.every_steps=0", f'run.preemption_url="{url}"')
        running = own.start("train", "run.toml", "run.processes=1", *keys)
        assert running.wait(HANG_S) == STOPPED, own.said()
    assert "says 'TRUE': saving after this step, and stopping" in own.said()
    assert (own.folder / "runs/own/checkpoints").is_dir()


LOOP = """
import os, sys, time
import shoal, torch
from torch import nn

model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
data = torch.utils.data.TensorDataset(inputs, torch.arange(64) % 2)
run = shoal.start({"run": {"name": "loop"}}, sys.argv[1:], model=model, optimizer=optimizer, data=data, batch_samples=8,
                  epochs=1)
for number, (x, y) in enumerate(run.batches(), start=1):
    while number == 3 and not os.path.exists("go"):
        time.sleep(0.01)
    run.backward(nn.functional.cross_entropy(run.model(x), y))
    run.step()
run.close()
"""
"""A loop of one's own, of eight steps; it waits in its third until the file `go` is there."""


@pytest.mark.slow
@pytest.mark.parametrize("by", ["SIGTERM", "file", "url"])
def test_a_loop_of_ones_own_saves_and_stops_on_a_notice(own: Project, by: str) -> None:
    """On two ranks, whichever way the host's end is told: exit 75 after the step or the next one; the same command
    goes on from there."""
    (own.folder / "loop.py").write_text(LOOP)
    notice = own.folder / "notice"
    with metadata([(404, ""), (200, "TRUE")]) as url:
        how = {"SIGTERM": (), "file": (f'run.preemption_file="{notice}"',), "url": (f'run.preemption_url="{url}"',)}
        command = ("loop.py", "run.processes=2", "checkpoint.every_steps=0")
        running = own.start(*command, *how[by], module=())
        own.wait_for_step(2, run="runs/loop")
        if by == "SIGTERM":
            running.send_signal(signal.SIGTERM)
            own.wait_for_text("SIGTERM: finishing the step and saving")
        else:
            notice.write_text("reclaimed at noon")
            own.wait_for_text("saving after this step, and stopping")
        (own.folder / "go").touch()
        assert running.wait(HANG_S) == STOPPED, own.said()
    taken = max(own.losses("runs/loop"))
    assert own.newest_checkpoint("runs/loop") == taken
    assert taken in (3, 4), "ranks agree on the end of a step when it begins"
    again = own.python(*command)
    assert again.returncode == 0, again.stderr
    assert f"resuming from the checkpoint of step {taken}" in again.stdout
    assert sorted(own.losses("runs/loop")) == list(range(1, 9))


def test_a_signal_after_a_notice_is_the_first_one() -> None:
    """It does not end the process, as a second signal does."""
    ended: list[int] = []
    with StopRequest(end=ended.append) as stop:
        stop.ask()
        assert stop.requested
        os.kill(os.getpid(), signal.SIGTERM)
        assert (stop.signal, ended) == (signal.SIGTERM, [])
