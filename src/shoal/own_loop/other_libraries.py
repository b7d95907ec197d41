"""What the classes share that stand in the place of another library's, such as transformers' `Trainer`: they take that
library's arguments and start a loop of their own with `shoal.start`.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from shoal.assembly.start import leave_with, processes_of
from shoal.config.load import apply, read
from shoal.errors import ShoalError
from shoal.launcher.environment import place_from
from shoal.launcher.own_script import divided, keys_told
from shoal.observe.sink import OPEN_END
from shoal.own_loop.start import run_file_of_loop
from shoal.runfile.run_file import RunFile

LAUNCHERS = re.compile(r"(LOCAL_|GROUP_)?(RANK|WORLD_SIZE)$|MASTER_|PMI_|OMPI_|MV2_|MPI_|SLURM_|CCL_")
"""Variables by which other libraries find that there are ranks to connect."""
UNSEEDED = torch.Generator().initial_seed()
"""What PyTorch's generator is seeded with where no script has done it."""


@contextmanager
def without_launcher() -> Iterator[None]:
    """Hides the ranks of a launcher: inside, this process is alone."""
    before = {name: os.environ.pop(name) for name in list(os.environ) if LAUNCHERS.match(name)}
    try:
        yield
    finally:
        os.environ.update(before)


@contextmanager
def refusing() -> Iterator[None]:
    """Ends the process with the sentence and exit code of a refusal inside."""
    try:
        yield
    except ShoalError as refusal:
        leave_with(refusal, os.environ)


def seed_of_script() -> dict[str, int]:
    """The keys of `[run]` for the seed that the script has given PyTorch; none where it has not."""
    return {} if torch.initial_seed() == UNSEEDED else {"seed": torch.initial_seed() % 2**63}


def below(given: str | Path | Mapping[str, Any] | None, own: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The tables of a run file, or those of that file, with what `own` says where they say nothing."""
    tables = read(Path(given)) if isinstance(given, str | Path) else dict(given or {})
    return {**tables, **{name: {**keys, **tables.get(name, {})} for name, keys in own.items()}}


def keys_of(overrides: Sequence[str] | None) -> list[str]:
    """The keys on top of a run file; None: those of the command line."""
    return divided(sys.argv[1:])[0] if overrides is None else list(overrides)


def said_by(tables: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """The tables with the keys on top, those of a verb that has started the script included."""
    return apply(tables, [key for key in [*keys, *keys_told(os.environ)] if "=" in key], RunFile)


def ranks_of(tables: Mapping[str, Any], keys: Sequence[str], *, file: str, step: int, data: Any) -> int:
    """How many ranks the run will have: those of the launcher, or those that it starts for steps of `step` samples."""
    place = place_from(os.environ)
    if place is not None:
        return place.world_size
    run_file = run_file_of_loop(
        tables, [key for key in keys if "=" in key], file=file, loader=None, data=data, samples=step, epochs=None,
        steps=OPEN_END,
    )  # fmt: skip
    return processes_of(run_file)
