"""Every rank must be started alike: the same run file, versions and code, and then the same model and the same data.

Rank 0 says what it has; another rank that has something else is named, with the first thing that differs.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from shoal.data.batches import SlowReads
from shoal.data.build import Dataset
from shoal.data.iterable import IterableSource
from shoal.data.sample import Source, map_tree, parse_sample
from shoal.errors import ConfigError, UserCodeError
from shoal.launcher.versions import installed
from shoal.observe.facts import flat
from shoal.observe.provenance import PACKAGE, file_hashes, hash_of_file, shoals_files, users_modules
from shoal.runfile.run_file import RunFile

DATA_PLACES = ("path", "files", "inputs", "targets", "held_out", "held_out_inputs", "held_out_targets")
OWN_KEYS = frozenset({"run.directory", "observe.live", *(f"data.{name}" for name in DATA_PLACES)})
"""Keys that may differ between ranks: where a host keeps the run directory and the data, whose samples are compared,
and how it shows progress."""

SAMPLED = 16
"""Samples of each data set that are compared, evenly spaced."""

RANDOM, UNREADABLE = "random", "unreadable"
"""What stands for the hash of a sample that has none."""

Announce = Callable[[str, Callable[[], str]], str]
"""`announce(key, find)`: rank 0 calls `find`; every rank gets its answer."""


def require_same_start(rank: int, announce: Announce, run_file: RunFile) -> None:
    """Compares every key of the run file, and the versions of Python, PyTorch and Shoal.

    Raises `ConfigError` on the rank that was started with another one than rank 0.
    """
    keys = {key: value for key, value in flat(msgspec.to_builtins(run_file)).items() if key not in OWN_KEYS}
    versions = {"Python": platform.python_version(), "torch": str(torch.__version__), "Shoal": installed("shoal")}
    own = {key: _shown(value) for key, value in (keys | versions).items()}
    theirs: dict[str, str] = msgspec.json.decode(announce("same/start", lambda: msgspec.json.encode(own).decode()))
    for key in (*own, *(key for key in theirs if key not in own)):
        mine, wanted = own.get(key, _shown(None)), theirs.get(key, _shown(None))
        if mine != wanted:
            raise ConfigError(
                f"rank {rank} was started with {key} = {mine}, and rank 0 with {wanted}: start every rank "
                "with the same run file, command line and packages"
            )


class Code(msgspec.Struct, frozen=True):
    """The code of a rank, by hash: Shoal's files, and the modules that were imported from elsewhere than an installed
    package. `used` are those of the latter that define what the rank trains with.
    """

    files: dict[str, str | None]
    modules: dict[str, str | None]
    used: list[str]


def code_of(used: Iterable[object]) -> Code:
    """The code of this process; `used` are objects, functions or classes."""
    modules = users_modules()
    names = {getattr(one, "__module__", None) or type(one).__module__ for one in used}
    hashes = {name: hash_of_file(path) for name, path in modules.items()}
    return Code(file_hashes(shoals_files(), Path.cwd()), hashes, sorted(names & modules.keys()))


class KnownCode:
    """`code_of(used)` again and again: files are hashed anew only where one has changed, which `stat` says."""

    def __init__(self, used: Iterable[object]) -> None:
        self._used, self._seen = list(used), file_times(PACKAGE, users_modules())
        self._code = code_of(self._used)

    def now(self) -> Code:
        """The code as the files hold it now."""
        seen = file_times(PACKAGE, users_modules())
        if seen != self._seen:
            self._seen, self._code = seen, code_of(self._used)
        return self._code


def file_times(package: Path, modules: Mapping[str, Path]) -> dict[str, tuple[int, int, int]]:
    """When each file of `package` and of `modules` was changed (ns), its size and inode."""
    paths = [f"{folder}/{name}" for folder, _, names in os.walk(package) for name in names if name.endswith(".py")]
    found = {}
    for path in [*paths, *map(str, modules.values())]:
        with suppress(OSError):
            status = os.stat(path)
            found[path] = status.st_mtime_ns, status.st_size, status.st_ino
    return found


def require_same_code(rank: int, announce: Announce, used: Iterable[object], *, own: Code | None = None) -> None:
    """Compares the files of Shoal, and every module of the user's, wherever it lies. `used` is what the rank trains
    with: parts of the model, data, loss. Their modules must be imported by all ranks; another module that this rank has
    not imported is compared where it would be found. `own` is this rank's code, where it is known already.

    Raises `UserCodeError` on the rank whose code is not rank 0's.
    """
    own = code_of(used) if own is None else own
    theirs = msgspec.json.decode(announce("same/code", lambda: msgspec.json.encode(own).decode()), type=Code)
    repair = "copy the same files to every host, and start all ranks again"
    for name in (name for name in own.files if name in theirs.files and own.files[name] != theirs.files[name]):
        raise UserCodeError(f"rank {rank} runs another {name} than rank 0: {repair}")
    for name, wanted in theirs.modules.items():
        path = _file_of(name)
        if path is not None and hash_of_file(path) != wanted:
            raise UserCodeError(f"rank {rank} runs another module {name} ({path}) than rank 0: {repair}")
    for one, other, names in (
        ("rank 0", f"rank {rank}", [name for name in theirs.used if name not in own.modules]),
        (f"rank {rank}", "rank 0", [name for name in own.used if name not in theirs.modules]),
    ):
        if names:
            raise UserCodeError(f"{one} trains with code of the module {names[0]}, and {other} does not: {repair}")


def _file_of(name: str) -> Path | None:
    """The file that the module was imported from, or would be; None where there is none."""
    if name in sys.modules:
        file = getattr(sys.modules[name], "__file__", None)
        return None if file is None else Path(file)
    parts = name.replace(".", "/")
    places = (Path(folder or ".", f"{parts}{end}") for folder in sys.path for end in ("/__init__.py", ".py"))
    return next((place for place in places if place.is_file()), None)


def _shown(value: Any) -> str:
    """As text, which tells an infinite number from none."""
    return "nothing" if value is None else json.dumps(value)


def require_same(rank: int, announce: Announce, own: Mapping[str, Sequence[str]]) -> None:
    """Raises `UserCodeError` on the rank whose lines are not rank 0's."""
    for what, lines in own.items():
        wanted = announce(f"same/{what}", lambda lines=lines: "\n".join(lines)).split("\n")
        pairs = [(a, b) for a, b in zip(wanted, lines, strict=False) if a != b]
        if pairs or len(wanted) != len(lines):
            mine, theirs = pairs[0][::-1] if pairs else (f"{len(lines)} entries", f"{len(wanted)}")
            raise UserCodeError(
                f"rank {rank} has another {what} than rank 0: '{mine}', not '{theirs}'. Every rank runs the same code: "
                "what it draws at random must be seeded, and must not depend on the rank"
            )


def shapes_of(model: nn.Module) -> list[str]:
    """A line for each parameter and buffer: name, shape, dtype."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [f"{name} {list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}" for name, tensor in tensors]


def samples_of(data: Dataset, slow: SlowReads = SlowReads(), *, first: int = SAMPLED) -> list[str]:
    """Lines for `SAMPLED` samples of the training and of the held-out data, from the first to the last, by hash; of an
    iterable for the `first` ones.

    Raises `DataError` where `slow` gives up a read.
    """
    held_out = _lines("held-out", data.held_out, slow) if data.held_out is not None else []
    if data.iterable is not None:
        return _first_lines(data.iterable, min(first, SAMPLED), slow) + held_out
    return (["a stream"] if data.endless else _lines("training", data.train, slow)) + held_out


def require_same_length(rank: int, first: Callable[[str, str], str], source: IterableSource) -> None:
    """From now on the pass of `source` that ends on this rank must have had as many items as on the rank where it ended
    first: reading raises `UserCodeError` where it has not. `first(key, text)` is `Process.first`.
    """

    def compare(number: int, items: int) -> None:
        wanted = int(first(f"same/pass {number}", str(items)))
        if items != wanted:
            raise UserCodeError(
                f"on rank {rank} {source.name} ended after {items} items, and on another rank after {wanted}: every "
                "rank must be given the same items in the same order, and Shoal divides them"
            )

    source.agree = compare


def contents_of(samples: Sequence[str]) -> dict[str, str]:
    """What a checkpoint keeps of the lines of `samples_of`: the hash of each training sample that has one."""
    hashes = (line.rpartition(": ")[::2] for line in samples if line.startswith("training sample "))
    return {sample: digest for sample, digest in hashes if digest not in (RANDOM, UNREADABLE)}


def _first_lines(source: IterableSource, count: int, slow: SlowReads) -> list[str]:
    lines = [f"training data is {source.name}"]

    def read() -> None:
        items = source.first(count)
        lines.extend(f"training sample {i}: {_stable_hash(items, i)}" for i in range(len(items)))

    _in_thread(read, slow, lambda: f"one of the first {count} items of {source.name}")
    return lines


def _lines(name: str, source: Source, slow: SlowReads) -> list[str]:
    last = len(source) - 1
    chosen = sorted({last * i // (SAMPLED - 1) for i in range(SAMPLED)})
    lines = [f"{name} data of {len(source)} samples"]

    def read() -> None:
        for i in chosen:
            reading.append(i)
            lines.append(f"{name} sample {i}: {_stable_hash(source, i)}")

    reading: list[int] = []
    _in_thread(read, slow, lambda: f"Sample {reading[-1] if reading else 0} of the {name} data")
    return lines


def _in_thread(read: Callable[[], None], slow: SlowReads, where: Callable[[], str]) -> None:
    """Calls `read`, which reads a user's source, and may hang."""
    over = Event()

    def work() -> None:
        try:
            read()
        finally:
            over.set()

    Thread(target=work, name="shoal-samples", daemon=True).start()
    slow.wait(over, where)


def _stable_hash(source: Source, index: int) -> str:
    """The sample's hash, if it has one: an augmented sample differs at every reading, and the feed tells of errors."""
    try:
        first, second = _hash(source, index), _hash(source, index)
    except Exception:
        return UNREADABLE
    return first if first == second else RANDOM


def _hash(source: Source, index: int) -> str:
    sample, digest = parse_sample(source[index]), hashlib.blake2b(digest_size=8)

    def add(leaf: Tensor) -> Tensor:
        digest.update(repr((leaf.dtype, leaf.shape)).encode())
        digest.update(leaf.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return leaf

    map_tree(add, sample.inputs)
    map_tree(add, sample.targets)
    if sample.weights is not None:
        add(sample.weights)
    return digest.hexdigest()
