"""The user's functions that the run file names under `[hooks]`, found and bound to this rank."""

from __future__ import annotations

from shoal.assembly.run import Run
from shoal.assembly.user_code import find_named, users_traceback
from shoal.engine.hooks import Hook, Hooks


def run_hooks(run: Run) -> Hooks:
    """Those that the run file names. Raises `UserCodeError` for one that is not there."""
    config = run.run_file.hooks

    def found(key: str, names: list[str]) -> list[tuple[str, Hook]]:
        return [(name, find_named(name, key=f"hooks.{key}")) for name in names]

    return Hooks(
        run.mesh.rank,
        run.model,
        found("after_step", config.after_step),
        found("after_evaluation", config.after_evaluation),
        found("after_save", config.after_save),
        users_traceback,
    )
