"""Copies of checkpoints in a remote store, through fsspec (`s3://`, `gs://`, `memory://`, ...): sent behind training.

    URL/objects/<blake3>.safetensors     content, shared by all checkpoints: what is there is not sent again
    URL/step-00000100.json               the manifest, sent last: a checkpoint is there when its manifest is

A checkpoint that was committed on the disk is linked into a folder of its own, so that retention cannot take it away,
and a thread sends it: training waits for the links alone. A run that starts fetches the newest remote checkpoint where
it is newer than those on its disk; every object has to hash to its name.

Only the first rank sends and fetches.
"""

from __future__ import annotations

import os
import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from shoal.checkpoint import manifest as manifests
from shoal.checkpoint.commit import adopt, best_step
from shoal.checkpoint.manifest import Manifest
from shoal.checkpoint.objects import MANIFEST, SUFFIX, TEMPORARY, Places, step_name, step_of
from shoal.errors import CorruptCheckpoint, EnvironmentFault, Stopped, VerificationFailed
from shoal.remote_files import Attempts, open_url

END_S = 600.0
"""How long the end of a run waits for copies that are on their way."""
FOLDER = ".to-send"
"""Below the run directory: checkpoints that are linked, and not sent yet."""

T = TypeVar("T")


class RemoteCheckpoints:
    """The checkpoints below `url`. `options` are keywords of the fsspec file system; `sleep` is for tests.

    Raises `ConfigError` for an unknown protocol, `MissingExtra` where its package is not installed.
    """

    def __init__(
        self,
        url: str,
        *,
        attempts: int = 10,
        options: Mapping[str, Any] | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.url, self._attempts = url, Attempts(attempts, "checkpoint.remote_attempts", sleep)
        self._is_local = url.partition("://")[0] in (url, "file", "local")
        keywords = (
            ({"auto_mkdir": True} if self._is_local else {}) | dict(options or {}) | {"use_listings_cache": False}
        )
        self._files, self._root = open_url(url, purpose=f"checkpoint.remote = {url!r}", options=keywords)
        self._sent: dict[str, int | None] | None = None

    def steps(self) -> list[int]:
        """The steps whose checkpoints are there, newest first."""
        found = (step_of(name.removesuffix(".json")) for name in self._names(self._root) if name.endswith(".json"))
        return sorted((step for step in found if step is not None), reverse=True)

    def send(self, folder: Path, manifest: Manifest) -> int:
        """Sends the checkpoint in `folder`, its manifest last; the bytes that were sent.

        An object that is there with another size is sent again. Raises `EnvironmentFault` and `OSError`.
        """
        if self._sent is None:
            self._sent = self._sizes(f"{self._root}/objects")
        sent_bytes = 0
        for digest, nbytes in manifest.objects.items():
            name = f"{digest}{SUFFIX}"
            if name in self._sent and self._sent[name] in (nbytes, None):  # None: the store tells no sizes
                continue
            content = (folder / name).read_bytes()
            self._put(f"objects/{name}", content)
            self._sent[name] = len(content)
            sent_bytes += len(content)
        content = (folder / MANIFEST).read_bytes()
        self._put(f"{step_name(manifest.step)}.json", content)
        return sent_bytes + len(content)

    def retain(self, newest: int, *, keep: int) -> None:
        """Deletes all but the `keep` newest checkpoints up to step `newest`, and the best one, and objects that none of
        them names.

        Where the manifest of a kept one cannot be read, all objects stay until that checkpoint is deleted.
        """
        steps = self.steps()
        kept = [step for step in steps if step <= newest][:keep]
        best = self._best(newest) if newest in steps else None
        kept += [step for step in steps if step == best and step not in kept]
        named: set[str] = set()
        all_read = True
        for step in kept:
            try:
                named |= {f"{digest}{SUFFIX}" for digest in self.manifest(step).objects}
            except VerificationFailed:
                all_read = False
        for step in steps:
            if step not in kept:
                self._delete(f"{step_name(step)}.json")
        for name in self._names(f"{self._root}/objects") - named if all_read else ():
            self._delete(f"objects/{name}")
            if self._sent is not None:
                self._sent.pop(name, None)

    def _best(self, newest: int) -> int | None:
        with suppress(VerificationFailed):
            return best_step(self.manifest(newest).state)
        return None

    def manifest(self, step: int) -> Manifest:
        """The manifest of the checkpoint of `step`. Raises `VerificationFailed` for a damaged one."""
        name = f"{step_name(step)}.json"
        return manifests.decode(self._get(name), Path(name))

    def fetch(self, step: int, places: Places) -> None:
        """Brings the checkpoint of `step` to the disk: objects, then the manifest by one rename.

        A damaged checkpoint of the same step on the disk is replaced. Raises `CorruptCheckpoint` where an object is
        missing or does not hash to its name, `EnvironmentFault` and `OSError`.
        """
        name = f"{step_name(step)}.json"
        adopt(
            self._get(name),
            places,
            source=f"{self.url}/{name}",
            get=lambda digest: self._get(f"objects/{digest}{SUFFIX}"),
        )

    def _names(self, folder: str) -> set[str]:
        return set(self._sizes(folder))

    def _sizes(self, folder: str) -> dict[str, int | None]:
        """The names in a folder with their sizes in bytes; None where the store does not tell."""

        def listed() -> list[dict[str, Any]]:
            try:
                return self._files.ls(folder, detail=True)
            except FileNotFoundError:
                return []

        found = self._tried(listed, folder)
        return {entry["name"].rstrip("/").rpartition("/")[2]: entry.get("size") for entry in found}

    def _put(self, name: str, content: bytes) -> None:
        path = f"{self._root}/{name}"

        def put() -> None:
            if not self._is_local:
                self._files.pipe_file(path, content)  # an object store shows all of it or nothing
                return
            folder, _, last = path.rpartition("/")
            self._files.pipe_file(draft := f"{folder}/{TEMPORARY}{last}", content)
            self._files.mv(draft, path)

        self._tried(put, name)

    def _get(self, name: str) -> bytes:
        """Raises `CorruptCheckpoint` where nothing has this name, `EnvironmentFault` where no answer comes."""

        def get() -> bytes:
            try:
                return self._files.cat_file(f"{self._root}/{name}")
            except FileNotFoundError as error:
                raise CorruptCheckpoint(f"{self.url}/{name} is missing") from error

        return self._tried(get, name)

    def _delete(self, name: str) -> None:
        def delete() -> None:
            with suppress(FileNotFoundError):
                self._files.rm_file(f"{self._root}/{name}")

        self._tried(delete, name)

    def _tried(self, request: Callable[[], T], name: str) -> T:
        """What `request` returns, made again when it fails. Raises `EnvironmentFault` after the last attempt."""
        try:
            return self._attempts(request, f"{self.url}: {name}", answers=(PermissionError,))
        except (PermissionError, ImportError) as error:
            raise EnvironmentFault(f"{self.url}: {error}; allow this run to write there") from error


class RemoteCopies:
    """Sends committed checkpoints of the run directory `directory` to `store`, one after the other, on a thread.

    As a context manager: its end waits for what is on its way, unless the block ends with a failure. `warn` hears of a
    checkpoint that could not be sent; training goes on.
    """

    def __init__(self, store: RemoteCheckpoints, directory: Path, *, keep: int, warn: Callable[[str], None]) -> None:
        self._store, self._places, self._keep, self._warn = store, Places(directory), keep, warn
        self._folder = directory / FOLDER
        shutil.rmtree(self._folder, ignore_errors=True)  # left by a start before; its newest checkpoint is sent anew
        self._steps: queue.Queue[int | None] = queue.Queue()
        self._thread = threading.Thread(target=self._work, name="remote-checkpoints", daemon=True)
        self._thread.start()

    def committed(self, step: int) -> None:
        """The checkpoint of `step` is on the disk: links its files, and has it sent."""
        try:
            self._link(step)
        except (OSError, VerificationFailed) as error:
            self._warn(f"the checkpoint of step {step} is not copied to {self._store.url}: {error}")
        else:
            self._steps.put(step)

    def __enter__(self) -> RemoteCopies:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, Stopped):
            return  # a failed run ends at once; its next start sends the newest checkpoint
        self._steps.put(None)
        self._thread.join(END_S)
        if self._thread.is_alive():
            self._warn(f"{self._store.url} did not take all checkpoints within {END_S:g} s; the next start goes on")

    def _link(self, step: int) -> None:
        manifest_path = self._places.manifest(step)
        folder = self._folder / step_name(step)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        _link_all([manifest_path, *map(self._places.object, manifests.read(manifest_path).objects)], folder)

    def _work(self) -> None:
        while (step := self._steps.get()) is not None:
            folder = self._folder / step_name(step)
            try:
                self._store.send(folder, manifests.read(folder / MANIFEST))
            except Exception as error:  # whatever it is, training goes on without this copy
                self._warn(f"the checkpoint of step {step} was not copied to {self._store.url}: {error}")
            else:
                self._retain(step)
            shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _retain(self, step: int) -> None:
        try:
            self._store.retain(step, keep=self._keep)
        except Exception as error:  # the copy is there; too many of them cost no training
            self._warn(f"checkpoints before step {step} were not deleted from {self._store.url}: {error}")


def _link_all(files: Iterable[Path], folder: Path) -> None:
    for path in files:
        try:
            os.link(path, folder / path.name)
        except OSError:  # a file system without hard links
            shutil.copyfile(path, folder / path.name)


def fetch_newest(store: RemoteCheckpoints, directory: Path, *, newest_here: int | None) -> str:
    """Fetches the newest remote checkpoint that is whole and newer than `newest_here`; a sentence, "" for none.

    Raises `EnvironmentFault` where the store cannot be reached.
    """
    damaged = ""
    for step in store.steps():
        if newest_here is not None and step <= newest_here:
            break
        try:
            store.fetch(step, Places(directory))
        except VerificationFailed as error:
            damaged = damaged or f"{store.url} holds a damaged checkpoint of step {step}: {error}"
            continue
        return f"fetched the checkpoint of step {step} from {store.url}"
    return damaged
