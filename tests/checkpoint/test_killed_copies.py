"""kill -9 at every call to the remote store while a checkpoint is sent, deleted or fetched: none is ever half there."""

from __future__ import annotations

import os
import shutil
import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from _pytest.monkeypatch import MonkeyPatch

from shoal.checkpoint import commit, manifest
from shoal.checkpoint.commit import newest_verified
from shoal.checkpoint.load import read_all
from shoal.checkpoint.objects import MANIFEST, Disk, Places
from shoal.checkpoint.remote import RemoteCheckpoints, fetch_newest
from tests.checkpoint.states import leftovers, same, save, saver_for, state_of
from tests.forkserver import forkserver
from tests.waiting import HANG_S

MOST_CALLS = 200
"""No child makes so many: it is a loop that does not end."""


def _later(value: str) -> Any:
    """A parameter of `make stress`."""
    return pytest.param(value, marks=pytest.mark.stress)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass
class Dying:
    """A store's file system; its call number `last` is the last one of this process, which dies before it, after it or,
    where it writes, with half of it written.
    """

    files: Any
    last: int
    moment: str
    calls: int = 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self.files, name)

        def call(*inputs: Any, **named: Any) -> Any:
            self.calls += 1
            if self.calls < self.last:
                return method(*inputs, **named)
            if self.moment == "half" and name == "pipe_file":
                path, content = inputs
                method(path, content[: len(content) // 2])
            elif self.moment == "after":
                method(*inputs, **named)
            return die()

        return call


def dying_store(url: str, last: int, moment: str) -> RemoteCheckpoints:
    """The store at `url`, which kills its process."""
    store = RemoteCheckpoints(url)
    store._files = Dying(store._files, last, moment)
    return store


def copy_newest(store: RemoteCheckpoints, directory: Path) -> int:
    """Sends the newest checkpoint of `directory` and keeps it alone, as a run's thread does; its step."""
    found, _ = newest_verified(directory)
    assert found is not None
    places = Places(directory)
    folder = directory / "sent"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    shutil.copyfile(places.manifest(found.step), folder / MANIFEST)
    for digest in found.objects:
        shutil.copyfile(places.object(digest), folder / places.object(digest).name)
    store.send(folder, manifest.read(folder / MANIFEST))
    store.retain(found.step, keep=1)
    return found.step


def survives(work: Callable[[], Any]) -> bool:
    """Whether a child that does `work` comes to its end; otherwise it was killed."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -signal.SIGKILL), "the child failed, see its traceback"
    return code == 0


def require_whole(store: RemoteCheckpoints, elsewhere: Path, steps: tuple[int, ...]) -> int:
    """A machine that has nothing gets a checkpoint of one of `steps`, bit for bit, nothing being damaged; its step."""
    for step in store.steps():
        assert set(store.manifest(step).objects) <= {
            name.removesuffix(".safetensors") for name in store._names(f"{store._root}/objects")
        }, f"the manifest of step {step} is there before its objects"
    said = fetch_newest(store, elsewhere, newest_here=None)
    found, problems = newest_verified(elsewhere)
    assert found is not None
    assert (problems, said.startswith("fetched")) == ([], True)
    assert found.step in steps
    assert same(read_all(found, elsewhere), state_of(found.step))
    assert leftovers(elsewhere) == []
    return found.step


def saved_in(directory: Path, *steps: int) -> Path:
    """A run directory whose newest checkpoint is of the last of `steps`."""
    saver = saver_for(directory, keep=1)
    for step in steps:
        assert save(saver, step).committed
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("moment", [_later("before"), _later("half"), "after"])
def test_a_kill_at_every_call_of_a_copy_leaves_one_checkpoint_whole(tmp_path: Path, moment: str) -> None:
    """The one before, until the new one's manifest is there, then the new one; the next copy leaves nothing behind."""
    first, second = saved_in(tmp_path / "first", 100), saved_in(tmp_path / "second", 100, 200)
    seen: list[int] = []
    for last in range(1, MOST_CALLS):
        place = tmp_path / f"store-{last}"
        store = RemoteCheckpoints(place.as_uri())
        copy_newest(store, first)
        if survives(lambda at=last, url=store.url: copy_newest(dying_store(url, at, moment), second)):
            break
        seen.append(require_whole(store, tmp_path / f"there-{last}", (100, 200)))
        again = RemoteCheckpoints(store.url)
        assert copy_newest(again, second) == 200
        assert again.steps() == [200]
        assert {path.stem for path in (place / "objects").iterdir()} == set(again.manifest(200).objects)
        assert [path.name for path in place.iterdir() if path.is_file()] == ["step-00000200.json"]
    assert seen == sorted(seen), "a step that was there is gone again"
    assert set(seen) == {100, 200}


@pytest.mark.slow
@pytest.mark.parametrize("moment", [_later("before"), "after"])
@pytest.mark.parametrize("where", ["store", _later("disk")])
def test_a_kill_at_every_call_of_a_fetch_leaves_the_disk_whole(tmp_path: Path, moment: str, where: str) -> None:
    """Calls to the store and those to the disk: the checkpoint before or the new one, and the next start fetches it."""
    store = RemoteCheckpoints((tmp_path / "store").as_uri())
    copy_newest(store, saved_in(tmp_path / "second", 200))
    start = saved_in(tmp_path / "start", 100)
    seen: list[int] = []
    for last in range(1, MOST_CALLS):
        here = shutil.copytree(start, tmp_path / f"here-{last}")

        def fetch(at: int = last, into: Path = here) -> None:
            if where == "store":
                fetch_newest(dying_store(store.url, at, moment), into, newest_here=100)
                return
            passed: list[str] = []

            def at_point(label: str) -> None:
                if label.endswith(moment):
                    passed.append(label)
                    if len(passed) == at:
                        die()

            with MonkeyPatch.context() as patch:
                patch.setattr(commit, "Disk", lambda: Disk(at_point))
                fetch_newest(store, into, newest_here=100)

        if survives(fetch):
            break
        found, problems = newest_verified(here)
        assert found is not None
        assert (problems, found.step in (100, 200)) == ([], True)
        assert same(read_all(found, here), state_of(found.step))
        seen.append(found.step)
        fetch_newest(store, here, newest_here=found.step)
        assert save(saver_for(here, keep=1), 300).committed
        assert leftovers(here) == []
        assert Places(here).steps() == [300]
    assert seen == sorted(seen)
    assert set(seen) == ({100, 200} if where == "disk" else {100})


@pytest.mark.stress
@pytest.mark.timeout(3600)  # a process for each request; a child that hangs ends by HANG_S
@pytest.mark.parametrize("moment", ["before", "after", "half"])
@pytest.mark.parametrize("work", ["copy", "fetch"])
def test_a_kill_at_every_request_to_an_s3_store_leaves_it_whole(tmp_path: Path, work: str, moment: str) -> None:
    """Before the server has the request, behind what it did, and in the middle of its answer."""
    pytest.importorskip("s3fs")
    pytest.importorskip("moto.server")
    from tests.checkpoint.s3_server import Strike, s3_server

    first, second = saved_in(tmp_path / "first", 100), saved_in(tmp_path / "second", 100, 200)
    seen: list[int] = []
    with s3_server() as server:
        ours = {
            **server.options,
            "skip_instance_cache": False,
        }  # one client, whose making takes half a second of a core
        for at in range(1, MOST_CALLS):
            server.trouble.become()
            place = f"{work}-{moment}-{at if work == 'copy' else 1}"  # who fetches changes nothing there
            store = RemoteCheckpoints(f"s3://copies/{place}", options=ours)
            if work == "copy" or at == 1:
                copy_newest(store, first if work == "copy" else second)
            here = second if work == "copy" else shutil.copytree(first, tmp_path / f"here-{at}")
            gate = forkserver().Event()
            child = forkserver().Process(target=_ask, args=(work, store.url, server.options, here, gate))
            child.start()
            assert child.pid is not None
            server.trouble.strike = Strike(child.pid, at, moment)
            gate.set()
            child.join(HANG_S)
            assert child.exitcode in (0, -signal.SIGKILL)
            server.trouble.strike = None
            if child.exitcode == 0:
                break
            if work == "copy":
                seen.append(require_whole(store, tmp_path / f"there-{at}", (100, 200)))
                assert copy_newest(RemoteCheckpoints(store.url, options=ours), second) == 200
                assert store.steps() == [200]
                continue
            found, problems = newest_verified(here)
            assert found is not None
            assert (problems, found.step) == ([], 100)
            assert same(read_all(found, here), state_of(100))
            seen.append(require_whole(store, here, (200,)))
    assert seen == sorted(seen)
    assert set(seen) == ({100, 200} if work == "copy" else {200})


def _ask(work: str, url: str, options: dict[str, Any], directory: Path, gate: Any) -> None:
    """A process that lives until it is struck."""
    store = RemoteCheckpoints(url, options=options)
    gate.wait()
    if work == "copy":
        copy_newest(store, directory)
    else:
        fetch_newest(store, directory, newest_here=100)
