"""Which splits of a user's own module have passed `shoal verify`: remembered in the run directory.

A tensor split follows from roles that the user declares. A wrong role (heads that are not kept together, a parameter
between split layers, arithmetic on split logits) trains without an error and computes something else, so that a start
without a proof says so.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

from shoal.assembly.run import Run
from shoal.engine.randomness import COMPILED_PROGRAM, Randomness
from shoal.errors import UsageError
from shoal.files import read_json
from shoal.models.config import ForeignModel
from shoal.observe.facts import replace_file
from shoal.runfile.run_file import RunFile, run_directory
from shoal.topology.holding import Dims

_FILE = "verified.json"
MOST_BYTES = 16 << 20
"""A proof takes 35 bytes."""

Shapes = Mapping[str, Dims]


def remember(run_file: RunFile, shapes: Shapes) -> None:
    """The module whose unsplit parameters have these `shapes` is under this layout the same as in one process."""
    path = _path(run_file)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, msgspec.json.encode(sorted({*_passed(path), _key(run_file, shapes)})))


def missing_proof(run_file: RunFile, shapes: Shapes) -> str | None:
    """A sentence where a user's module is split by its roles and has not passed; None where nothing is to be said."""
    if not isinstance(run_file.model, ForeignModel) or run_file.layout.tensor == 1:
        return None
    if _key(run_file, shapes) in _passed(_path(run_file)):
        return None
    return (
        f"layout.tensor = {run_file.layout.tensor} splits a module by the roles that it declares, and a "
        "wrong role trains wrongly without an error; `shoal verify` with this run file proves the split"
    )


def _path(run_file: RunFile) -> Path:
    return run_directory(run_file) / _FILE


def _passed(path: Path) -> list[str]:
    try:
        return read_json(path, list[str], limit_bytes=MOST_BYTES, error=UsageError, repair="run `shoal verify` again")
    except UsageError:
        return []


def _key(run_file: RunFile, shapes: Shapes) -> str:
    tables = msgspec.json.encode([run_file.model, run_file.layout, run_file.pipeline, run_file.context, dict(shapes)])
    return hashlib.blake2b(tables, digest_size=16).hexdigest()


# What a user's module draws that no sample's key decides, and how that is said.
#
# `shoal.models.keyed_draws` keys dropout and the common random functions on the sample, so that no layout changes them.
# Functions that it cannot key, and all of them under `run.compile`, draw from PyTorch's generator: each replica draws
# numbers of its own, and another layout others.


COMPILED = (
    "the model draws random numbers, and under run.compile = true no sample's key decides them: what it draws depends "
    "on the layout; with run.compile = false dropout and the common random functions do not"
)
COMPILED_BY_SCRIPT = (
    "a program that torch.compile has made for the script draws random numbers, and no sample's key decides them: what "
    "it draws depends on the layout; dropout and the common random functions do not where they are not compiled"
)
UNKEYED = (
    "the model calls {}, or the loop around it, which draws from PyTorch's generator and knows no samples: what it "
    "draws depends on the layout. Draw by torch.rand, torch.randn or dropout instead, or in the data, where results "
    "must not depend on it"
)


DATA_DRAWS = (
    "the data set, or its collate_fn, draws from {}: each rank and each run reads other samples, and what the loop or "
    "the model draws from there is another number on each rank. Change samples by data.augment, or set "
    'data.reader_kind = "processes", which seeds what a sample draws'
)
HOST_DRAWS = (
    "the model, or the loop around it, draws from {}: every rank and microbatch is given the same numbers in a step, "
    "for what a batch has in common; draw numbers for single samples by PyTorch"
)


def said_of(names: Iterable[str], *, compiled: bool | str) -> str:
    """One sentence about the functions `names`; "" where there are none."""
    called = sorted(names)
    if not called:
        return ""
    if called == [COMPILED_PROGRAM]:
        return COMPILED_BY_SCRIPT
    return COMPILED if compiled else UNKEYED.format(" and ".join(called))


class UnkeyedDraws:
    """Says once of each function that this rank's part of the model calls it, and once of Python's and NumPy's
    generators, at which it looks after 1, 2, 4, 8, ... steps.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._said: frozenset[str] = frozenset()
        self._ask = isinstance(run.run_file.model, ForeignModel)
        self._steps, self._host_said = 0, False

    def news(self) -> Iterator[str]:
        """After a step: a sentence about what it was the first to draw."""
        self._steps += 1
        if not self._host_said and self._steps.bit_count() == 1:
            yield from self._of_host()
        if sentence := self._of_pytorch():
            yield sentence

    def _of_host(self) -> Iterator[str]:
        data, drawn = self._run.workload.data_draws, self._randomness.host_draws()
        self._host_said = bool(data or drawn)
        if data or drawn:
            yield (DATA_DRAWS if data else HOST_DRAWS).format(" and ".join(data or drawn))

    @property
    def _randomness(self) -> Randomness:
        return self._run.generation.forward_backward.compute.randomness

    def _of_pytorch(self) -> str:
        if not self._ask:
            return ""
        compiled = self._run.run_file.run.compile
        found = self._randomness.unkeyed(self._run.device) - self._said
        self._said |= found
        self._ask = not compiled  # its forwards are alike, and reading the generator costs more than a set
        return said_of(found, compiled=compiled)
