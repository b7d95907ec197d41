"""`shoal train --replay RUN_DIR`, to its end: an asynchronous run is repeated bitwise, and a difference is found."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.sync.event_order import event_file
from tests.cli.project import Project, project
from tests.launcher.labs import can_lab

SERVED = """
[sync]
kind = "server"
admission = "async"
period = 9
"""
RECORDED = "runs/own"
__all__ = ["can_lab"]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A run of two asynchronous workers, nine steps, with its order of events."""
    own = project(tmp_path_factory.mktemp("recorded"))
    run_file = own.folder / "run.toml"
    run_file.write_text(run_file.read_text().replace("global_samples = 5", "global_samples = 6") + SERVED)
    done = own.shoal("train", "run.toml", "run.processes=2", "checkpoint.every_steps=0")
    assert done.returncode == 0, done.stderr
    return own


def remove_replay(own: Project) -> Path:
    """Where a replay goes, with nothing there."""
    replay = own.folder / f"{RECORDED}-replay"
    if replay.exists():
        replay.rename(own.folder / f"before-{len(list(own.folder.iterdir()))}")
    return replay


@pytest.mark.slow
def test_a_replay_ends_with_the_bits_of_the_run(recorded: Project) -> None:
    """Exit 0 and a sentence; the order at each part, and every object of the checkpoint, are those of the run."""
    replay = remove_replay(recorded)
    done = recorded.shoal("train", "--replay", RECORDED)
    assert done.returncode == 0, done.stderr
    assert f"the replay came to the state of {RECORDED}, bit for bit" in done.stdout + done.stderr
    assert recorded.manifest(f"{RECORDED}-replay")["objects"] == recorded.manifest()["objects"]
    for rank in range(2):
        orders = [event_file(folder, rank).read_text() for folder in (recorded.folder / RECORDED, replay)]
        assert orders[0] == orders[1]


@pytest.mark.slow
def test_a_replay_that_comes_to_other_values_exits_6(recorded: Project) -> None:
    """The user's module has changed in one activation since the run: the first tensor that differs is named."""
    remove_replay(recorded)
    source = (recorded.folder / "own.py").read_text()
    (recorded.folder / "own.py").write_text(source.replace("nn.Tanh()", "nn.Sigmoid()"))
    done = recorded.shoal("train", "--replay", RECORDED)
    (recorded.folder / "own.py").write_text(source)
    assert done.returncode == 6, done.stderr
    assert "came to other values in" in done.stderr
    assert "first in model/layers" in done.stderr or "first in optimizer/" in done.stderr


@pytest.mark.slow
def test_a_period_that_followed_the_link_is_repeated(tmp_path: Path) -> None:
    """By another clock: the agreements, and with them the bits, are those of the run."""
    own = project(tmp_path)
    follows = ["sync.kind=local", "sync.period=1", "sync.longest_period=5", "sync.wait_share=0.3"]
    done = own.shoal("train", "run.toml", "run.processes=2", "batch.global_samples=6", *follows)
    assert done.returncode == 0, done.stderr
    done = own.shoal("train", "--replay", RECORDED)
    assert done.returncode == 0, done.stderr
    orders = [event_file(own.folder / name, 0).read_text() for name in (RECORDED, f"{RECORDED}-replay")]
    assert orders[0] == orders[1] != ""
    assert own.manifest(f"{RECORDED}-replay")["objects"] == own.manifest()["objects"]


@pytest.mark.slow
@pytest.mark.usefixtures("can_lab")
def test_a_codec_that_followed_the_link_is_repeated(tmp_path: Path) -> None:
    """On one host, where nothing would be coded: every step uses what it used over the slow link, to the bit."""
    own = project(tmp_path)
    (own.folder / "lab.toml").write_text("[lab]\nhosts = 2\nrate_mbit = 20\n")
    keys = ["run.processes=2", "batch.global_samples=6", "codec.kind=auto", "codec.candidates=['sign']"]
    done = own.shoal(
        "train", "run.toml", "--lab", "lab.toml", *keys, "codec.measure_every=1", "model.arguments.width=4000"
    )
    assert done.returncode == 0, done.stderr
    done = own.shoal("train", "--replay", RECORDED)
    assert done.returncode == 0, done.stderr
    orders = [event_file(own.folder / name, 0).read_text() for name in (RECORDED, f"{RECORDED}-replay")]
    assert orders[0] == orders[1]
    assert "wsign" in orders[0]
    assert own.manifest(f"{RECORDED}-replay")["objects"] == own.manifest()["objects"]


IN_LAB = "[lab]\nhosts = 2\nranks_per_host = 2\nrate_mbit = 200\n"
FOLLOWING = {
    "a codec, with two ranks a host": (
        ["codec.kind=auto", "codec.candidates=['sign']", "codec.measure_every=1"], ["--lab", "lab.toml"], '"w'
    ),
    "algorithms and buckets": (
        ["wire.transport=gloo", "wire.algorithm=auto", "gradients.bucket=auto"], [], '"k{'
    ),
    "a codec and algorithms": (
        ["wire.transport=gloo", "wire.algorithm=auto", "codec.kind=auto", "codec.candidates=['sign']"],
        ["--lab", "lab.toml"],
        '"k{',
    ),
}  # fmt: skip
"""(keys of the run, how it is repeated, how its events begin)"""


@pytest.mark.slow
@pytest.mark.usefixtures("can_lab")
@pytest.mark.parametrize("name", FOLLOWING)
def test_four_ranks_that_followed_their_links_are_repeated(tmp_path: Path, name: str) -> None:
    """Of two hosts: where more than two ranks sum, algorithm and size of buckets are part of the bits. Algorithms are
    repeated on a single host, too, whose links are others.
    """
    keys, where, begins = FOLLOWING[name]
    own = project(tmp_path)
    (own.folder / "lab.toml").write_text(IN_LAB)
    run = ["run.processes=4", "batch.global_samples=8", "model.arguments.width=150000", "run.steps=9"]
    done = own.shoal("train", "run.toml", "--lab", "lab.toml", *run, *keys)
    assert done.returncode == 0, done.stderr
    done = own.shoal("train", *where, "--replay", RECORDED)
    assert done.returncode == 0, done.stderr
    for rank in range(4):
        orders = [event_file(own.folder / folder, rank).read_text() for folder in (RECORDED, f"{RECORDED}-replay")]
        assert orders[0] == orders[1]
        assert rank > 1 or begins in orders[0]
    assert own.manifest(f"{RECORDED}-replay")["objects"] == own.manifest()["objects"]
