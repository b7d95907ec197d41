"""A plain run on a host that is about to be taken away: it saves and stops before the deadline."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from shoal.launch.signals import StopRequest
from tests.cli.project import Project, project
from tests.resilience.test_preemption import metadata
from tests.waiting import HANG_S

STOPPED = 75
SLOWLY = "model.arguments={pause=0.2}"


@pytest.fixture
def own(tmp_path: Path) -> Project:
    return project(tmp_path)


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
    assert f"going on from the checkpoint of step {taken}" in again.stdout


def test_a_metadata_service_makes_a_plain_run_save_and_stop(own: Project) -> None:
    """As those of the clouds answer: FALSE, and then TRUE."""
    with metadata([(200, "FALSE"), (200, "TRUE")]) as url:
        keys = ("run.steps=900", SLOWLY, "checkpoint.every_steps=0", f'run.preemption_url="{url}"')
        running = own.start("train", "run.toml", "run.processes=1", *keys)
        assert running.wait(HANG_S) == STOPPED, own.said()
    assert "says 'TRUE': saving after this step, and stopping" in own.said()
    assert (own.folder / "runs/own/checkpoints").is_dir()


def test_a_signal_after_a_notice_is_the_first_one() -> None:
    """It does not end the process, as a second signal does."""
    ended: list[int] = []
    with StopRequest(end=ended.append) as stop:
        stop.ask()
        assert stop.requested
        os.kill(os.getpid(), signal.SIGTERM)
        assert (stop.signal, ended) == (signal.SIGTERM, [])
