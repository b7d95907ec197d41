"""`shoal verify mine.py`: a script's own loop under its layout, and in plain PyTorch in one process.

The script is run twice, see `shoal.launcher.own_script`. What the two print is kept back, and shown where one fails.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from shoal.errors import UsageError
from shoal.files import meant, temporary_folder
from shoal.launcher.children import interrupted_by_sigterm, wait_for
from shoal.launcher.own_script import KEYS, ScriptCheck, divided
from shoal.launcher.spawn import ExitCode
from shoal.observe.terminal import ProgressBar
from shoal.verification.verdict import Verdict

STEPS = 5
"""Optimizer steps that are compared where nobody says how many."""
PATIENCE_S = 20.0
"""How long the script may take for its end after Ctrl-C."""
IN_FLOAT64 = (
    "shoal: --exact computes in float64: what the script makes in float32 beside the model, such as weights of "
    "classes, must take the model's type; or leave --exact out\n"
)


def verify_script(
    script: Path, arguments: Sequence[str], *, steps: int, exact: bool, bar: ProgressBar
) -> Verdict | ExitCode:
    """What was found, or the exit code of a side that failed, which is told.

    A script that calls `shoal.train` is verified as `shoal.verify` does it. Raises `UsageError` where there is no
    script, or where it comes to no call of Shoal.
    """
    if not script.is_file():
        raise UsageError(f"there is no script {script}{meant(script)}")
    keys, own = divided(arguments)
    command, told = [sys.executable, str(script), *own], {KEYS: json.dumps(keys)}
    with temporary_folder() as folder:
        check = ScriptCheck(side="plain", folder=str(folder), steps=steps, exact=exact)
        bar.update("one process runs the script in plain PyTorch")
        code, said = _run(command, check, told)
        if code == 0 and not (check.trains.exists() or check.initial.exists()):
            raise UsageError(f"{script} came to its end without a call of shoal.start or shoal.train")
        if code == 0:
            bar.update("the layout runs it" if check.initial.exists() else "comparing the layout with one process")
            code, said = _run(command, msgspec.structs.replace(check, side="layout"), told)
        bar.close()
        if check.verdict.exists():
            return msgspec.convert(json.loads(check.verdict.read_text(encoding="utf-8")), Verdict)
        sys.stderr.write(said)
        if code == 0:
            raise UsageError(
                f"{script} ended without a comparison when it was started again: it did not come to the same call, or "
                "took no step; what leads to it must not depend on time or chance"
            )
        return ExitCode(code)


def _run(command: Sequence[str], check: ScriptCheck, told: Mapping[str, str]) -> tuple[int, str]:
    """The exit code of the script on one side, and all that it said."""
    environ, output = {**os.environ, **told, **check.variables()}, check.path / "said.txt"
    with output.open("wb") as file, interrupted_by_sigterm():  # no pipe: what the script leaves running may hold it
        code = wait_for(subprocess.Popen(command, env=environ, stdout=file, stderr=file), patience_s=PATIENCE_S)
    lines = output.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    said = "".join(line for line in lines if check.folder not in line)  # that is removed
    if code != 0 and check.exact and "Double" in said:
        said += IN_FLOAT64
    return code if code >= 0 else 128 - code, said
