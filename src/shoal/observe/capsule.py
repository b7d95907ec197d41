"""A crash capsule: `capsule.zip` in the directory of a run that failed, with which its last step is computed again.

    capsule.json                           which step, which samples, what failed, which versions (`Capsule`)
    run.toml, facts.json                   as they lie in the run directory, without the keys in `SECRETS`
    events/..., logs/...                   the end of each rank's
    checkpoints/...                        the newest whole checkpoint, where it takes `CHECKPOINT_BYTES` at most

The environment in it has no variable that looks like a secret (`observe.provenance`), and no other file of the machine
is read. `shoal replay` computes the step (`experiments.capsule_replay`). The launcher writes it when all ranks have
ended.
"""

from __future__ import annotations

import math
import os
import time
import tomllib
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec
import tomli_w

from shoal.errors import UsageError
from shoal.files import open_file
from shoal.observe.events import Event, last_attempt, read_events
from shoal.observe.facts import read_facts

FILE, INDEX, RUN_FILE = "capsule.zip", "capsule.json", "run.toml"
NEXT_SAMPLES = "samples/next_step"
"""The measurement of a step, where sizes are not in the run file: how many samples the step behind it has."""
SECRETS = {"webhook", "remote_options", "kafka_options"}
"""Keys of the run file that a capsule does not hold, in whatever table."""
FORMAT = 1
CHECKPOINT_BYTES = 64 << 20
TAIL_BYTES = 64 << 10
MOST_BYTES = 4 * CHECKPOINT_BYTES
"""What a capsule may hold when it is unpacked; a larger one is no capsule of ours."""

_END_OF_LIST, _LARGE_LIST = b"PK\x05\x06", b"PK\x06\x07"
"""What the end of a zip archive's list of files begins with, and what is before it where the list needs 64 bits."""
_TRAILER_BYTES = 22 + (1 << 16) + 20
"""The end of the list, the longest comment behind it, and the locator before it (PKWARE's APPNOTE 6.3.10, 4.3)."""
_MOST_LISTED_BYTES = 4 << 20
_NO_CAPSULE = (OSError, EOFError, ValueError, RuntimeError, zipfile.BadZipFile, zlib.error)
"""What `zipfile` and the decoders raise for other files: a method that Python does not have and a password are
RuntimeErrors, a nesting that is too deep is one, too; texts that are no Unicode and no JSON are ValueErrors."""


class Failed(msgspec.Struct, frozen=True):
    """What ended the run: the first error, whole, where a rank left one."""

    exit_code: int
    rank: int | None
    sentence: str
    text: str = ""


class Capsule(msgspec.Struct, frozen=True, kw_only=True):
    """`step` is the step that failed, on the positions [`start`, `stop`) of the data's order. `samples`: how many the
    data set has; None: unknown. `losses`: those recorded, by step, from the checkpoint on. `checkpoint`: its step; None
    where there is none. `holds_checkpoint`: it is in the capsule, not only in `directory`.
    """

    format: int = FORMAT
    created: float
    shoal: str
    torch: str
    python: str
    directory: str
    name: str
    seed: int
    ranks: int
    step: int
    start: int
    stop: int
    samples: int | None
    losses: dict[str, float | None]
    checkpoint: int | None
    holds_checkpoint: bool
    failed: Failed


def shoal_version() -> str:
    """The installed version of Shoal."""
    try:
        return version("shoal")
    except PackageNotFoundError:
        return "not installed"


def write_capsule(
    directory: Path, failed: Failed, *, seed: int, samples_at: Callable[[int], int], checkpoint: Path | None
) -> Path:
    """Writes the capsule of the run in `directory`, in place of an earlier one; its path.

    `samples_at`: samples of the step that begins at a position, if the one before has not said so. `checkpoint`: the
    folder of the newest whole one.
    Raises `OSError`, and `UsageError` for damaged facts.
    """
    facts, events = read_facts(directory), read_events(directory)
    step, start = _failed_step(events, samples_at)
    count = _last_of(events, step - 1, NEXT_SAMPLES) or samples_at(start)
    holds, first = _checkpoint_files(checkpoint), 0 if checkpoint is None else int(checkpoint.name.split("-")[1])
    data = facts.get("data")
    samples = data.get("train/samples") if isinstance(data, dict) else None
    capsule = Capsule(
        created=time.time(),
        shoal=shoal_version(),
        torch=str(facts.get("torch", "")),
        python=str(facts.get("python", "")),
        directory=str(directory.absolute()),
        name=str(facts.get("name", "")),
        seed=seed,
        ranks=int(facts.get("world", 1)),
        step=step,
        start=start,
        stop=start + count,
        samples=samples if isinstance(samples, int) else None,
        losses={str(s): loss for s, loss in _losses(events).items() if s > first},
        checkpoint=None if checkpoint is None else first,
        holds_checkpoint=bool(holds),
        failed=failed,
    )
    path, draft = directory / FILE, directory / f".{FILE}.{os.getpid()}"
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(INDEX, msgspec.json.format(msgspec.json.encode(capsule), indent=2))
            for name, content in _files(directory):
                archive.writestr(name, content)
            for found in holds:
                archive.write(found, str(found.relative_to(directory)))
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    return path


def read_capsule(path: Path) -> Capsule:
    """What a capsule says. Raises `UsageError` for a file that is none, and for one of another format."""
    repair = "give the capsule.zip of a run that failed"
    try:
        with _opened(path) as archive:
            if archive.getinfo(INDEX).file_size > MOST_BYTES:
                raise UsageError(f"{path}: {INDEX} is too large to be one; {repair}")
            content = archive.read(INDEX)
        found = msgspec.json.decode(content, type=dict)
    except (*_NO_CAPSULE, KeyError) as error:
        raise UsageError(f"{path} is no crash capsule ({error}): {repair}") from error
    if found.get("format") != FORMAT:
        raise UsageError(
            f"{path} is a capsule of format {found.get('format')!r} by shoal {found.get('shoal')}, and this version "
            f"({shoal_version()}) reads format {FORMAT}: replay it with the version that wrote it"
        )
    try:
        return msgspec.convert(found, Capsule)
    except msgspec.ValidationError as error:
        raise UsageError(f"{path} is a damaged capsule ({error}): {repair}") from error


def unpack(path: Path, folder: Path) -> None:
    """The files of a capsule, below `folder`. Raises `UsageError` for names that lead elsewhere, and for too much."""
    try:
        _unpack(path, folder)
    except _NO_CAPSULE as error:
        raise UsageError(f"{path} cannot be unpacked ({error}): copy it anew, or see that the disk has room") from error


@contextmanager
def _opened(path: Path) -> Iterator[zipfile.ZipFile]:
    """The archive `path`, after a look at how long its list of files is, which `zipfile` reads whole.

    Raises `UsageError` for what is no regular file, and where the list is longer than a capsule's.
    """
    repair = "give the capsule.zip of a run that failed"
    with open_file(path, error=UsageError, repair=repair) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TRAILER_BYTES))
        trailer = file.read()
        at = trailer.rfind(_END_OF_LIST)
        listed_bytes = int.from_bytes(trailer[at + 12 : at + 16], "little") if at >= 0 else 0
        if listed_bytes > _MOST_LISTED_BYTES or _LARGE_LIST in trailer[: max(0, at)]:
            raise UsageError(f"{path} lists more files than a crash capsule has: {repair}")
        with zipfile.ZipFile(file) as archive:
            yield archive


def _unpack(path: Path, folder: Path) -> None:
    with _opened(path) as archive:
        if sum(entry.file_size for entry in archive.infolist()) > MOST_BYTES:
            raise UsageError(f"{path} unpacks to more than {MOST_BYTES} bytes: it is no capsule of Shoal's")
        for name in archive.namelist():
            target = folder / name
            if not target.resolve().is_relative_to(folder.resolve()):
                raise UsageError(f"{path} holds {name!r}, which lies outside of it: it is no capsule of Shoal's")
        if RUN_FILE not in archive.namelist():
            raise UsageError(f"{path} holds no {RUN_FILE}, so there is nothing to replay: give a whole capsule")
        archive.extractall(folder)


def _failed_step(events: list[Event], samples_at: Callable[[int], int]) -> tuple[int, int]:
    """The step that failed, and the first position of its samples: after the last step that came to a finite loss.

    Where the last start took no step, it is the first that this start had before it.
    """
    own = last_attempt(events)
    taken = [event for event in own if event.get("loss/train") is not None]
    if not taken:
        before = own[0].step if own else 0  # a start leaves a line of the step from which it goes on
        return before + 1, _consumed(events, before) if before else 0
    last = taken[-1]
    consumed = int(last.get("samples/consumed") or 0)
    if math.isfinite(last.get("loss/train") or 0.0) and math.isfinite(last.get("grad/norm") or 0.0):
        return last.step + 1, consumed
    before = _consumed(events, last.step - 1)
    return last.step, before or max(0, consumed - samples_at(0))


def _consumed(events: list[Event], step: int) -> int:
    """The samples that the run had consumed after `step`, as it last came to it."""
    return _last_of(events, step, "samples/consumed")


def _last_of(events: list[Event], step: int, name: str) -> int:
    """A measurement of `step`, as the run last came to it; 0 without one."""
    found = (event.get(name) for event in reversed(events) if event.step == step)
    return int(next((value for value in found if value is not None), 0.0))


def _losses(events: list[Event]) -> dict[int, float | None]:
    found = {event.step: event.get("loss/train") for event in events if event.get("loss/train") is not None}
    return {step: loss if loss is not None and math.isfinite(loss) else None for step, loss in found.items()}


def _files(directory: Path) -> Iterator[tuple[str, bytes]]:
    if (directory / RUN_FILE).is_file():
        yield RUN_FILE, _without_secrets((directory / RUN_FILE).read_text(encoding="utf-8")).encode()
    if (directory / "facts.json").is_file():
        yield "facts.json", (directory / "facts.json").read_bytes()
    for folder in ("events", "logs"):
        for path in sorted((directory / folder).glob("rank-*")):
            yield f"{folder}/{path.name}", _tail(path)


def _without_secrets(text: str) -> str:
    """A run file without the keys in `SECRETS`."""
    return tomli_w.dumps(_cleaned(tomllib.loads(text)))


def _cleaned(table: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _cleaned(value) if isinstance(value, dict) else value for key, value in table.items() if key not in SECRETS
    }


def _tail(path: Path) -> bytes:
    """Whole lines from the end of a file."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - TAIL_BYTES))
        content = file.read()
    return content if size <= TAIL_BYTES else content.partition(b"\n")[2]


def _checkpoint_files(folder: Path | None) -> list[Path]:
    """The files of a checkpoint that is small enough; none of a larger one."""
    if folder is None:
        return []
    manifest = folder / "manifest.json"
    names = msgspec.json.decode(manifest.read_bytes()).get("objects", {})
    files = [folder.parent / "objects" / f"{digest}.safetensors" for digest in names]
    return [manifest, *files] if sum(path.stat().st_size for path in files) <= CHECKPOINT_BYTES else []
