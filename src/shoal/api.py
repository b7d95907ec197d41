"""`shoal.train`: a run from a script, with the script's own objects.

A process that no launcher started starts the ranks, each with the script's own command line, and waits for them; in
each of them the same call trains, and other calls of the script are passed over. So one script serves a laptop,
torchrun and srun alike.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.config.load import apply, read
from shoal.errors import ShoalError, UsageError
from shoal.launch.environment import place_from
from shoal.observe.facts import facts_path
from shoal.planning.arrange import arranged
from shoal.recipes.objects import UserObjects
from shoal.recipes.start import run
from shoal.recipes.user_code import GIVEN
from shoal.runfile.load import run_file_of
from shoal.runfile.run_file import RunFile, run_directory

ONLY_RUN = "SHOAL_ONLY_RUN"
"""Which run the ranks of a script were started for: they pass over its other calls of `train`."""


def train(
    config: str | Path | Mapping[str, Any] | RunFile,
    overrides: Sequence[str] = (),
    *,
    model: Any = None,
    data: Any = None,
    loss: Any = None,
) -> Path:
    """Trains, and returns the run directory. Afterwards an `nn.Module` given as `model` has the trained weights.

    `config` is a run file, its tables as dictionaries, or a `RunFile`. `model` is an `nn.Module` or a function that
    returns one; `data` a map-style data set or a pair (training, held out); `loss` a callable of (outputs, targets)
    that returns one value per sample or position. What is not given, the configuration names.

    Raises what `shoal.errors` draws in the process that started the ranks; a rank ends with its exit code.
    """
    run_file, file = _resolved(config, overrides, model=model, data=data, loss=loss)
    directory = run_directory(run_file)

    def be_rank(run_file: RunFile, place: Any) -> None:
        from shoal.planning.prediction import FORECAST
        from shoal.recipes.training import train_rank

        train_rank(run_file, place, UserObjects(model=model, data=data, loss=loss), forecast=FORECAST)

    place, wanted = place_from(os.environ), str(directory.resolve())
    if place is not None and os.environ.get(ONLY_RUN, wanted) != wanted:
        return directory  # this rank was started for another call of the script
    environ = os.environ if place is not None else {**os.environ, ONLY_RUN: wanted}
    code = run(run_file, _own_command(), be_rank, directory=directory, file=file, environ=environ, arrange=arranged)
    if place is not None and place.launcher == "shoal":
        sys.exit(code)  # this process was made for the call above; what follows in the script runs once, in its parent
    if code != 0:
        raise _Ended(code)
    if place is None and not facts_path(directory).exists():
        raise UsageError(
            f"the ranks ended without training into {directory}: the script, run again, did not come to the same "
            "call of shoal.train; what leads to it must not depend on time or chance"
        )
    if place is None:
        _give_back(model, directory)
    return directory


def _give_back(model: Any, directory: Path) -> None:
    """The trained weights and buffers to the script's own module: the ranks have trained copies of it."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(model, torch.nn.Module):
        return
    from shoal.checkpoint.inspect import weights_of

    weights, own = weights_of(directory), model.state_dict(keep_vars=True)
    with torch.no_grad():
        for name, tensor in own.items():
            if name in weights:  # a tied parameter is saved under its first name alone
                tensor.copy_(weights[name])


class _Ended(ShoalError):
    """The ranks ended with another exit code than 0; what went wrong was written to standard error."""

    def __init__(self, code: int) -> None:
        super().__init__(f"the run ended with exit code {code}; its first error is above")
        self.exit_code = code


def _resolved(
    config: str | Path | Mapping[str, Any] | RunFile, overrides: Sequence[str], **given: Any
) -> tuple[RunFile, str]:
    if isinstance(config, RunFile):
        return config, "the configuration"
    tables, file = (
        (read(Path(config)), str(config)) if isinstance(config, str | Path) else (dict(config), "the configuration")
    )
    for name, value in given.items():
        if value is not None:
            written = tables.get(name, {})
            own = written if isinstance(written, Mapping) and written.get("kind") == "python" else {}
            tables[name] = {**own, "kind": "python", "build": GIVEN}
    return run_file_of(apply(tables, overrides, RunFile), file=file), file


def _own_command() -> list[str]:
    """The command that starts this very script again. Raises `UsageError` where there is no script."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name:
        return [sys.executable, "-m", spec.name.removesuffix(".__main__"), *sys.argv[1:]]
    script = getattr(main, "__file__", None)
    if script is None:
        raise UsageError(
            "shoal.train starts its ranks by running the script again, and there is no script here (a notebook or a "
            "prompt); put the call into a file, or start the process under torchrun"
        )
    return [sys.executable, os.path.abspath(script), *sys.argv[1:]]
