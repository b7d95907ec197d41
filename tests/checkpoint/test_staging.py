"""Shares that are laid out in files: the same objects, faults of the disk in a sentence, and little memory."""

from __future__ import annotations

import errno
import os
from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.checkpoint.commit import newest_verified
from shoal.checkpoint.config import CheckpointConfig
from shoal.checkpoint.load import read_all
from shoal.checkpoint.objects import TEMPORARY, Disk, Places
from shoal.checkpoint.staging import FileStaging, Staging
from shoal.checkpoint.tensorfile import Piece, TensorSpec
from shoal.state import parts_of
from shoal.topology.holding import whole
from tests.checkpoint.states import save, saver_for, state_of

MIB = 1 << 20


def objects(directory: Path) -> list[str]:
    """Names of everything beside the manifests."""
    return sorted(path.name for path in Places(directory).objects.iterdir())


@pytest.mark.parametrize("compress", ["none", "planes"])
def test_the_objects_are_those_of_memory(tmp_path: Path, compress: str) -> None:
    """To the byte, hence by name; what an object was not made of is gone, and what was there is not written again."""
    found = {}
    for staging in ("memory", "disk"):
        saver = saver_for(tmp_path / staging, staging=staging, compress=compress)
        assert [save(saver, step).error for step in (1, 2)] == [None, None]
        again = save(saver, 3, state_of(2))
        assert again.bytes_written == 0
        saver.close()
        found[staging] = objects(tmp_path / staging)
    assert found["memory"] == found["disk"]
    manifest, _ = newest_verified(tmp_path / "disk")
    assert manifest is not None
    read = read_all(manifest, tmp_path / "disk")
    assert all(torch.equal(read[name], value) for name, value in state_of(2).items())


@pytest.mark.parametrize(("code", "said"), [(errno.ENOSPC, "No space left"), (errno.EIO, "Input/output error")])
def test_a_fault_of_the_disk_is_a_sentence_and_the_checkpoint_before_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, said: str
) -> None:
    saver, allocate = saver_for(tmp_path, staging="disk"), os.posix_fallocate
    assert save(saver, 1).committed
    before, calls = objects(tmp_path), []

    def failing(*arguments: int) -> None:
        calls.append(arguments)
        if len(calls) == 3:
            raise OSError(code, os.strerror(code))
        allocate(*arguments)

    monkeypatch.setattr(os, "posix_fallocate", failing)
    report = save(saver, 2)
    assert not report.committed
    assert report.error is not None
    assert said in report.error
    assert objects(tmp_path) == before
    monkeypatch.undo()
    assert save(saver, 3).committed
    saver.close()


def test_what_a_kill_leaves_is_swept_at_the_next_start(tmp_path: Path) -> None:
    saver = saver_for(tmp_path, staging="disk")
    assert save(saver, 1).committed
    saver.close()
    left = Places(tmp_path).objects / f"{TEMPORARY}rank-00000-staged-7"
    left.write_bytes(b"half")
    saver_for(tmp_path, staging="disk").close()
    assert not left.exists()


def test_a_sweep_leaves_what_another_rank_lays_out(tmp_path: Path) -> None:
    """After a save and after one that failed: rank 1 may fill its files for the next save already."""
    saver = saver_for(tmp_path, staging="disk")
    others = Places(tmp_path).objects / f"{TEMPORARY}rank-00001-staged-0"
    others.write_bytes(b"half")
    assert save(saver, 1).committed
    assert others.exists()
    with pytest.MonkeyPatch.context() as planted:
        planted.setattr(os, "posix_fallocate", failing_with(errno.EIO))
        assert not save(saver, 2).committed
    assert others.exists()
    saver.close()


def failing_with(code: int) -> Callable[..., None]:
    def fail(*_: int) -> None:
        raise OSError(code, os.strerror(code))

    return fail


class Looked(UserDict[str, Any]):
    """Tensors that say, whenever one is asked for, what this process maps."""

    def __init__(self, *arguments: Any) -> None:
        self.maps: list[str] = []
        super().__init__(*arguments)

    def __getitem__(self, name: str) -> Any:
        self.maps.append(Path("/proc/self/maps").read_text())
        return super().__getitem__(name)


def test_no_file_is_mapped(tmp_path: Path) -> None:
    """An error of the disk under a mapping is a signal, which ends the training."""
    tensors = {"x": torch.arange(6.0).view(2, 3).T, "y": torch.ones(5, dtype=torch.bfloat16)}
    pieces = [
        Piece(TensorSpec("x", "float32", 4, (3, 2)), whole((3, 2))),
        Piece(TensorSpec("y", "bfloat16", 2, (5,)), whole((5,))),
    ]
    held = {name: [whole(tuple(tensor.shape))] for name, tensor in tensors.items()}
    files = FileStaging([tuple(pieces)], held, places=Places(tmp_path), disk=Disk(), owner="rank-00000")
    memory, looked = Staging([tuple(pieces)], held), Looked(parts_of(tensors))
    files.fill(looked)
    memory.fill(parts_of(tensors))
    (laid,), (expected,) = files.objects(), memory.objects()
    looked["x"]
    assert len(looked.maps) == 3
    assert not any("-staged-" in maps for maps in looked.maps)
    assert bytes(laid.content) == bytes(expected.content)


def test_a_file_that_lost_its_end_is_a_sentence(tmp_path: Path) -> None:
    """As a full or broken disk leaves it."""
    piece = Piece(TensorSpec("x", "float32", 4, (5000,)), whole((5000,)))
    files = FileStaging([(piece,)], {"x": [whole((5000,))]}, places=Places(tmp_path), disk=Disk(), owner="rank-00000")
    files.fill(parts_of({"x": torch.ones(5000)}))
    (file,) = Places(tmp_path).objects.iterdir()
    os.truncate(file, 4096)
    with pytest.raises(OSError, match=r"ends after 4096 of 20\d+ bytes.*staged"):
        list(files.objects())


def anonymous_bytes() -> int:
    """Of this process's memory, what is neither pages of files nor shared."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


def test_a_share_in_files_takes_no_memory(tmp_path: Path) -> None:
    """64 MiB in 8 objects: as memory they are held from the first save on, as files hardly any."""
    tensors = {f"optimizer/{n}": torch.ones(2 * MIB) for n in range(8)}
    parcels = [(Piece(TensorSpec(name, "float32", 4, (2 * MIB,)), whole((2 * MIB,))),) for name in tensors]
    held, grown = {name: [whole((2 * MIB,))] for name in tensors}, {}
    for made in (
        FileStaging(parcels, held, places=Places(tmp_path), disk=Disk(), owner="rank-00000"),
        Staging(parcels, held),
    ):
        before = anonymous_bytes()
        made.fill(parts_of(tensors))
        sizes = [len(laid.content) for laid in made.objects()]
        assert min(sizes) > 8 * MIB
        grown[type(made)] = anonymous_bytes() - before if isinstance(made, FileStaging) else sum(sizes)
        made.clear()
    assert grown[FileStaging] < grown[Staging] / 8
    assert objects(tmp_path) == []


def test_differences_need_the_share_in_memory() -> None:
    with pytest.raises(ValueError, match="keeps a rank's share in memory"):
        CheckpointConfig(staging="disk", compress="deltas")
