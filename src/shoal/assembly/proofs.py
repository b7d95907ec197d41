"""Which splits of a user's own module have passed `shoal verify`: remembered in the run directory.

A tensor split follows from roles that the user declares. A wrong role (heads that are not kept together, a parameter
between split layers, arithmetic on split logits) trains without an error and computes something else, so that a start
without a proof says so.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import msgspec

from shoal.errors import UsageError
from shoal.files import read_json
from shoal.models.config import ForeignModel
from shoal.observe.facts import replace_file
from shoal.runfile.run_file import RunFile, run_directory
from shoal.topology.box import Dims

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
