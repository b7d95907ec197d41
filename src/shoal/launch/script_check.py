"""`ScriptCheck`: what `shoal verify mine.py` tells the processes of the script, by one environment variable.

The script runs twice. On the side "plain" its one process computes each global batch whole, in plain PyTorch, and
leaves in a folder what it started from and what every step came to. On the side "layout" its ranks start from the same
weights, compare each step with what is there, and leave a verdict.

    initial.safetensors      weights and buffers before the first step
    step-N.safetensors       gradients that the optimizers took, weights and buffers after step N; its loss and norm
    samples.txt              what the first samples are
    verdict.json             the fields of a `Verdict`, left by rank 0 of the layout

A script that calls `shoal.train` has no loop of its own: the plain side leaves the file "trains", and on the other the
call is one of `shoal.verify`.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

SCRIPT_CHECK = "SHOAL_SCRIPT_CHECK"


class ScriptCheck(msgspec.Struct, frozen=True, kw_only=True):
    """`steps` are compared, in float64 if `exact`. `overrides` are keys that come on top of the script's own."""

    side: Literal["plain", "layout"]
    folder: str
    steps: int
    exact: bool = False
    overrides: tuple[str, ...] = ()

    @property
    def path(self) -> Path:
        return Path(self.folder)

    @property
    def initial(self) -> Path:
        return self.path / "initial.safetensors"

    @property
    def samples(self) -> Path:
        return self.path / "samples.txt"

    @property
    def verdict(self) -> Path:
        return self.path / "verdict.json"

    @property
    def trains(self) -> Path:
        return self.path / "trains"

    def step(self, number: int) -> Path:
        """The file of a step."""
        return self.path / f"step-{number}.safetensors"

    def variables(self) -> dict[str, str]:
        """What the script's process gets in its environment."""
        return {SCRIPT_CHECK: msgspec.json.encode(self).decode()}


def script_check(environ: Mapping[str, str]) -> ScriptCheck | None:
    """What this process is to do for `shoal verify mine.py`; None: it is no part of one."""
    text = environ.get(SCRIPT_CHECK)
    return None if text is None else msgspec.json.decode(text, type=ScriptCheck)
