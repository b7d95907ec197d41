"""Which device a rank takes, and what is refused before ranks start."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from unittest.mock import Mock

import msgspec
import pytest
import torch

from shoal.assembly import start
from shoal.assembly.process import device_of
from shoal.errors import EnvironmentFault
from shoal.launcher.environment import Place
from shoal.observe.facts import facts_path
from shoal.runfile.run_file import RunFile


def place(rank: int, size: int) -> Place:
    return Place(rank, size, rank, size, 0, "shoal")


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A host with one GPU, as torch and the driver show it; the devices that were taken."""
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(start, "gpus", lambda environ: 1)
    return taken


def run_file(**run: object) -> RunFile:
    tables = {"run": {"name": "a", "steps": 1, "device": "cuda", **run}, "batch": {"global_samples": 4}}
    return msgspec.convert({**tables, "model": {"kind": "python", "build": "a:b"}, "data": {"kind": "digits"}}, RunFile)


def test_two_ranks_on_one_gpu_are_refused_before_they_start(one_gpu: list[int]) -> None:
    """By the launcher, and by a rank that another launcher has started; not where they may share it."""
    with pytest.raises(EnvironmentFault, match="2 ranks on this host, but 1 GPU; start one a GPU"):
        start._check_gpus(run_file(), 2, {})
    start._check_gpus(run_file(share_gpus=True), 2, {})
    start._check_gpus(run_file(), 1, {})
    with pytest.raises(EnvironmentFault, match="2 ranks on this host, but 1 GPU"):
        device_of("cuda", place(1, 2))


def test_ranks_that_share_take_the_gpus_in_turn(one_gpu: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks on the only GPU; five on two. Without any there is nothing to share."""
    assert [device_of("cuda", place(rank, 2), shared=True).index for rank in range(2)] == [0, 0]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [device_of("cuda", place(rank, 5), shared=True).index for rank in range(5)] == [0, 1, 0, 1, 0]
    assert one_gpu == [0, 0, 0, 1, 0, 1, 0]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(EnvironmentFault, match="0 GPUs"):
        device_of("cuda", place(0, 2), shared=True)


def test_a_launcher_that_cannot_write_says_so_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script's launcher too, which would end with a traceback: a name that is too long, a disk that is full since the
    last start. Another error of the system is not hidden.
    """
    code = "raise SystemExit('no rank starts')"

    def launch(directory: Path) -> None:
        starting = run_file(device="cpu", processes=2)
        start.run(starting, [sys.executable, "-c", code], _never, directory=directory, file="run.toml", environ={})

    with pytest.raises(EnvironmentFault, match="the name is too long for this file system"):
        launch(tmp_path / ("x" * 300))
    facts_path(tmp_path).touch()
    for number, expected in ((errno.ENOSPC, EnvironmentFault), (errno.EIO, OSError)):
        failure = OSError(number, os.strerror(number), str(facts_path(tmp_path)))
        monkeypatch.setattr(start, "write_facts", Mock(side_effect=failure))
        with pytest.raises(expected, match=r"facts\.json"):
            launch(tmp_path)


def _never(run_file: RunFile, place: Place) -> None:
    raise AssertionError("this process is no rank")
