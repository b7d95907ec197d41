"""Hosts that share no file system: who sees the same directory, and the newest checkpoint in all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.checkpoint.agreement import LocalExchange
from shoal.checkpoint.commit import newest_verified
from shoal.checkpoint.directories import Below, Directories, find_directories, share_newest
from shoal.checkpoint.inspect import compare
from shoal.checkpoint.objects import Places
from shoal.errors import EnvironmentFault
from tests.checkpoint.states import on_ranks, save, saver_for, state_of
from tests.waiting import HANG_S


def found_by(directories: list[Path], exchange: LocalExchange) -> list[Directories]:
    """What the ranks find that see one of `directories` each."""
    found: list[Directories | None] = [None] * len(directories)

    def work(rank: int) -> None:
        found[rank] = find_directories(
            directories[rank], exchange, rank=rank, world_size=len(directories), timeout_s=HANG_S
        )

    on_ranks(len(directories), work)
    return [one for one in found if one is not None]


def shared(directories: list[Path]) -> list[str]:
    """What the ranks say that bring each other the newest checkpoint."""
    groups = found_by(directories, exchange := LocalExchange())[0]
    said = [""] * len(directories)

    def work(rank: int) -> None:
        said[rank] = share_newest(directories[rank], groups, Below(exchange, "share"), rank=rank, timeout_s=HANG_S)

    on_ranks(len(directories), work)
    return said


def newest(directory: Path) -> tuple[int, str] | None:
    """Step and hash of the newest whole checkpoint."""
    manifest, _ = newest_verified(directory)
    return None if manifest is None else (manifest.step, manifest.hash)


def test_ranks_of_one_directory_find_each_other(tmp_path: Path) -> None:
    """In any order, and by any path to it; a copy of a directory is another one, whatever it holds."""
    a, b = tmp_path / "a", tmp_path / "b"
    (tmp_path / "link").symlink_to(a)
    groups = found_by([a, b, tmp_path / "link", b], LocalExchange())
    assert all(one.groups == ((0, 2), (1, 3)) for one in groups)
    assert groups[0].group_of(2) == (0, 2)
    assert not groups[0].shared
    (tmp_path / "copy").mkdir()
    a.rename(tmp_path / "copy" / "a")
    b.rename(a)
    assert [one.groups for one in found_by([tmp_path / "copy" / "a", a], LocalExchange())] == [((0,), (1,))] * 2
    assert found_by([a, a], LocalExchange())[0].shared


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """It is a file."""
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentFault, match=r"file/\.seen-by cannot be written"):
        find_directories(tmp_path / "file", LocalExchange(), rank=0, world_size=1, timeout_s=HANG_S)


@pytest.mark.parametrize("holder", [0, 1, 2])
def test_the_newest_checkpoint_comes_to_all_directories(tmp_path: Path, holder: int) -> None:
    """Whoever has it: a directory with an older one and an empty one get it, and save the next step."""
    directories = [tmp_path / name for name in "abc"]
    save(saver_for(directories[holder]), 20)
    save(saver_for(directories[(holder + 1) % 3]), 10)
    said = shared(directories)
    assert [bool(text) for text in said] == [rank != holder for rank in range(3)]
    assert {newest(one) for one in directories} == {newest(directories[holder])}
    assert all(save(saver_for(one), 30).committed for one in directories)


def test_a_damaged_directory_is_healed_by_another(tmp_path: Path) -> None:
    """The object that is damaged there is fetched, and no other."""
    a, b = tmp_path / "a", tmp_path / "b"
    save(saver_for(a), 20)
    save(saver_for(b), 20)
    shared([a, b])
    damaged = next(iter(sorted(Places(b).objects.iterdir())))
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    others = {path: path.stat().st_ino for path in Places(b).objects.iterdir() if path != damaged}
    assert newest(b) is None
    assert "step 20" in shared([a, b])[1]
    assert newest(b) == newest(a)
    assert {path: path.stat().st_ino for path in others} == others


def test_of_two_histories_the_one_that_was_saved_last_counts(tmp_path: Path) -> None:
    """Both hosts went on alone, and hold other states of the same step."""
    a, b = tmp_path / "a", tmp_path / "b"
    save(saver_for(a), 20, state_of(1))
    save(saver_for(b), 20, state_of(2))
    later = newest(b)
    assert "step 20" in shared([a, b])[0]
    assert newest(a) == newest(b) == later
    assert not compare(a, b).differences


def test_directories_without_a_checkpoint_stay_empty(tmp_path: Path) -> None:
    """A fresh start."""
    assert shared([tmp_path / "a", tmp_path / "b"]) == ["", ""]
    assert newest(tmp_path / "a") is None
