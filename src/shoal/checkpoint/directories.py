"""Ranks whose hosts share no file system: which of them see the same run directory, and one checkpoint in all of them.

Each rank writes a number that nobody can guess into the run directory, and looks for those of the others: ranks see the
same directory as the first rank whose number they find there. Where ranks see several directories, each has the whole
checkpoint: the ranks that see it save to it by themselves, and the loss of a host loses no checkpoint.

At a start the newest checkpoint of all directories goes to those that lack it. Where two hold different checkpoints of
one step, because each was trained on without the other, the one that was saved last counts for all.
"""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from shoal.checkpoint.agreement import MessageExchange
from shoal.checkpoint.commit import adopt, newest_verified
from shoal.checkpoint.objects import MANIFEST, Places
from shoal.errors import CorruptCheckpoint, EnvironmentFault
from shoal.files import read_file

FOLDER = ".seen-by"
"""In the run directory: the numbers of the ranks that saw it at the newest start."""
_NUMBER_BYTES = 16


@dataclass(frozen=True)
class Directories:
    """`groups` are the ranks that see one directory each, in the order of their first ranks."""

    groups: tuple[tuple[int, ...], ...]

    def group_of(self, rank: int) -> tuple[int, ...]:
        """The ranks that see the directory of `rank`."""
        return next(group for group in self.groups if rank in group)

    @property
    def shared(self) -> bool:
        """Whether all ranks see the same one."""
        return len(self.groups) == 1


@dataclass(frozen=True)
class Below:
    """An exchange for keys below `prefix` of another one."""

    exchange: MessageExchange
    prefix: str

    def publish(self, key: str, value: bytes) -> None:
        """See `MessageExchange`."""
        self.exchange.publish(f"{self.prefix}/{key}", value)

    def collect(self, keys: Sequence[str], timeout_s: float) -> list[bytes]:
        """See `MessageExchange`."""
        return self.exchange.collect([f"{self.prefix}/{key}" for key in keys], timeout_s)

    def forget(self, keys: Sequence[str]) -> None:
        """See `MessageExchange`."""
        self.exchange.forget([f"{self.prefix}/{key}" for key in keys])


def find_directories(
    directory: Path, exchange: MessageExchange, *, rank: int, world_size: int, timeout_s: float
) -> Directories:
    """Which of `world_size` ranks see the same `directory`; all call it, once on `exchange`. Blocks until all have.

    Raises `EnvironmentFault` where nothing can be written there, and what the exchange raises.
    """
    number = secrets.token_hex(_NUMBER_BYTES)
    own = directory.resolve() / FOLDER / f"rank-{rank:05d}"  # a link may lead to what another rank makes now
    try:
        own.parent.mkdir(parents=True, exist_ok=True)
        own.write_text(number)
    except OSError as error:
        raise EnvironmentFault(
            f"{own.parent} cannot be written ({error.strerror}): make it writable, or change run.directory"
        ) from error
    numbers = _all_gather(exchange, "number", number, rank=rank, world_size=world_size, timeout_s=timeout_s)
    first = next(other for other in range(world_size) if other == rank or _holds(directory, other, numbers[other]))
    firsts = _all_gather(exchange, "first", str(first), rank=rank, world_size=world_size, timeout_s=timeout_s)
    groups: dict[int, list[int]] = defaultdict(list)
    for other, found in enumerate(firsts):
        groups[int(found)].append(other)
    return Directories(tuple(tuple(group) for _, group in sorted(groups.items())))


def share_newest(
    directory: Path, directories: Directories, exchange: MessageExchange, *, rank: int, timeout_s: float
) -> str:
    """Brings the newest checkpoint of all directories to those without it; a sentence where it came here, else "".

    All ranks call it, once on `exchange`, and return when all directories have it. The first rank of each group works.
    Raises `CorruptCheckpoint` where what arrives is damaged, `OSError`, and what the exchange raises.
    """
    leaders = [group[0] for group in directories.groups]
    said = ""
    if rank in leaders:
        manifest, _ = newest_verified(directory)
        own = _Newest() if manifest is None else _Newest(manifest.step, manifest.created, manifest.hash)
        exchange.publish(f"newest/{rank}", msgspec.json.encode(own))
        found = [
            msgspec.json.decode(text, type=_Newest)
            for text in exchange.collect([f"newest/{leader}" for leader in leaders], timeout_s)
        ]
        newest = max(found, key=lambda one: (one.step, one.created))
        holder = leaders[found.index(newest)]
        lacking = [
            leader
            for leader, one in zip(leaders, found, strict=True)
            if (one.step, one.hash) != (newest.step, newest.hash)
        ]
        if rank == holder and lacking:
            _serve(Places(directory), newest.step, lacking, exchange, timeout_s=timeout_s)
        elif rank in lacking:
            _fetch(Places(directory), exchange, rank=rank, turns=1 + lacking.index(rank), timeout_s=timeout_s)
            said = f"fetched the checkpoint of step {newest.step} from the host of rank {holder}"
        exchange.publish(f"shared/{rank}", b"")
    exchange.collect([f"shared/{leader}" for leader in leaders], timeout_s * (1 + len(leaders)))
    return said


class _Newest(msgspec.Struct, frozen=True):
    """The newest whole checkpoint of a directory; none: step -1."""

    step: int = -1
    created: float = 0.0
    hash: str = ""


def _serve(places: Places, step: int, lacking: Sequence[int], exchange: MessageExchange, *, timeout_s: float) -> None:
    """Sends the checkpoint of `step` to the first ranks of other directories, one after the other."""
    manifest = (places.step(step) / MANIFEST).read_bytes()
    exchange.publish("manifest", manifest)
    for rank in lacking:
        asked = 0
        while digest := exchange.collect([f"want/{rank}/{asked}"], timeout_s)[0].decode():
            content = places.object(digest).read_bytes()
            exchange.publish(f"have/{rank}/{asked}", content)
            asked += 1
            exchange.forget([f"want/{rank}/{asked - 1}", *([f"have/{rank}/{asked - 2}"] if asked > 1 else [])])
        exchange.forget([f"have/{rank}/{asked - 1}"] if asked else [])


def _fetch(places: Places, exchange: MessageExchange, *, rank: int, turns: int, timeout_s: float) -> None:
    """Makes the checkpoint that another rank serves one of this directory, after `turns - 1` others."""
    asked = 0

    def get(digest: str) -> bytes:
        nonlocal asked
        exchange.publish(f"want/{rank}/{asked}", digest.encode())
        (content,) = exchange.collect([f"have/{rank}/{asked}"], turns * timeout_s)
        asked += 1
        return content

    (manifest,) = exchange.collect(["manifest"], timeout_s)
    try:
        adopt(manifest, places, source="the checkpoint of another host", get=get)
    finally:
        exchange.publish(f"want/{rank}/{asked}", b"")


def _all_gather(
    exchange: MessageExchange, key: str, text: str, *, rank: int, world_size: int, timeout_s: float
) -> list[str]:
    exchange.publish(f"{key}/{rank}", text.encode())
    keys = [f"{key}/{other}" for other in range(world_size)]
    return [value.decode() for value in exchange.collect(keys, timeout_s)]


def _holds(directory: Path, rank: int, number: str) -> bool:
    path = directory / FOLDER / f"rank-{rank:05d}"
    try:
        return read_file(path, limit_bytes=2 * _NUMBER_BYTES, error=CorruptCheckpoint, repair="") == number.encode()
    except (OSError, CorruptCheckpoint):
        return False
