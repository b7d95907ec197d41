"""Where the parts of a checkpoint lie inside a run directory, and what unfinished parts are called.

Inside the run directory:

    checkpoints/step-00000100/manifest.json   a committed checkpoint
    checkpoints/objects/<blake3>.safetensors  its content, shared by all checkpoints
    checkpoints/latest                        the name of the newest one, for people and scripts
    .tmp-*                                    not finished, or about to be deleted; never read, swept at a start
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

MANIFEST = "manifest.json"
SUFFIX = ".safetensors"
TEMPORARY = ".tmp-"
_STEP = re.compile(r"step-(\d{8,18})\Z")


@dataclass(frozen=True)
class Places:
    """The paths of the checkpoints of one run directory."""

    run_directory: Path

    @property
    def root(self) -> Path:
        """The folder of all checkpoints."""
        return self.run_directory / "checkpoints"

    @property
    def objects(self) -> Path:
        """The folder of all objects."""
        return self.root / "objects"

    @property
    def latest(self) -> Path:
        """The file that names the newest checkpoint."""
        return self.root / "latest"

    def step(self, step: int) -> Path:
        """The folder of the checkpoint of `step`."""
        return self.root / step_name(step)

    def manifest(self, step: int) -> Path:
        """The manifest of the checkpoint of `step`."""
        return self.step(step) / MANIFEST

    def object(self, digest: str) -> Path:
        """The object whose bytes hash to `digest`."""
        return self.objects / f"{digest}{SUFFIX}"

    def steps(self) -> list[int]:
        """The steps of all committed checkpoints, newest first; empty when there is no such folder."""
        if not self.root.is_dir():
            return []
        found = (_STEP.match(entry.name) for entry in self.root.iterdir())
        return sorted((int(match[1]) for match in found if match), reverse=True)


def step_name(step: int) -> str:
    """The name of the folder of the checkpoint of `step`."""
    return f"step-{step:08d}"


def temporary(path: Path, owner: str) -> Path:
    """Beside `path`, the name it has while `owner` has not finished with it."""
    return path.with_name(f"{TEMPORARY}{owner}-{path.name}")
