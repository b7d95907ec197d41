"""The script of a run as a command, and the run of it up to its call of Shoal in a process that only reads data.

Ranks are started by running the script again. A reader process does the same to get at the data that the script
hands over: it runs the script until that call, which raises `Reached` instead of training. So data sets need not be
pickled, and may be of classes that the script itself defines. Verbs that take a script in the place of a run file learn
from it in the same way which run it trains, and tell it by variables what to change.

Under `shoal verify mine.py` the script is run twice, to be compared: `ScriptCheck` tells each process its side.

Imports no torch.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from shoal.errors import RunEnded, UsageError, UserCodeError

READS_FOR = "SHOAL_READS_FOR"
"""The run directory of the run that this process reads data for."""
SCRIPT_CHECK = "SHOAL_SCRIPT_CHECK"
"""The `ScriptCheck` that this process is a part of, as JSON."""
KEYS = "SHOAL_KEYS"
"""Keys that replace those of the script's run, as `shoal train RUN.toml key=value` does: a list in JSON."""
EXPECTS = "SHOAL_EXPECTS_CALL"
"""The process of a script that a verb has started to train, until the script calls Shoal: its number."""
DESCRIBES = "SHOAL_DESCRIBES"
"""Set where the script is run to learn which run its first call of `shoal.train` or `shoal.start` trains."""
PROFILE = "SHOAL_PROFILE"
"""What a script's ranks are to record of their steps (`shoal.assembly.profiling.ProfileOrder`), as JSON."""
TRIAL = "SHOAL_TRIAL"
"""The run file of a trial: the script trains by it in the place of its run of the directory `TRIAL_OF`, and ends; it
passes over its other runs."""
TRIAL_OF = "SHOAL_TRIAL_OF"
STARTED = "SHOAL_STARTED"
"""Of which run of `shoal.start` this process is a rank: its own number, and the run's name."""
_KEY = re.compile(r"[a-z_]+(\.[A-Za-z0-9_*]+)+=", re.ASCII)
_IMPORTED = re.compile(r"^[ \t]*(?:from|import)[ \t]+(\w+)", re.MULTILINE)


class Reached(BaseException):
    """The script came to the call that this process was started for. `data` is what the call was given, or the run
    file of its run.

    No error, and so not an `Exception`, which scripts catch.
    """

    def __init__(self, data: Any) -> None:
        super().__init__("the script came to its call of Shoal")
        self.data = data


def refuse_second(call: str, environ: Mapping[str, str]) -> None:
    """Raises `UsageError` for this `call` in a process that is a rank of a run of `shoal.start`."""
    pid, _, name = environ.get(STARTED, "").partition(" ")
    if pid != str(os.getpid()):
        return
    if call == "shoal.start":
        raise UsageError(
            f"shoal.start was called again in a rank of run {name!r}; a script has one run: pass several models and "
            "optimizers to one call, model=(g, d), optimizer=(first, second). Several runs one after the other, as for "
            "cross-validation, need run.processes=1 and a close() of each, or a start of the script for each"
        )
    raise UsageError(
        f"{call} was called in a rank of run {name!r}, and would start ranks of its own: what follows shoal.start runs "
        f"in the ranks alone. Call {call} before it or in a script of its own, or set run.processes=1 and close() the "
        "first run"
    )


def own_command() -> list[str]:
    """The command that starts this very script again. Raises `UsageError` where there is no script."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name:
        return [sys.executable, "-m", spec.name.removesuffix(".__main__"), *sys.argv[1:]]
    script = getattr(main, "__file__", None)
    if script is None or not os.path.exists(script):
        raise UsageError(
            "ranks and reader processes are started by running the script again, and there is no script here (a "
            "notebook, a prompt or standard input); put the call into a file, or start the process under torchrun"
        )
    return [sys.executable, os.path.abspath(script), *sys.argv[1:]]


def reads_for(directory: Path, environ: Mapping[str, str]) -> bool | None:
    """Whether this process reads data for the run of that directory; None: it reads for none, and goes on."""
    wanted = environ.get(READS_FOR)
    return None if wanted is None else wanted == str(directory.resolve())


def data_given(command: Sequence[str], directory: Path, environ: MutableMapping[str, str]) -> Any:
    """Runs the script of `command` (see `own_command`) up to its call for the run of `directory`: the call's data.

    Raises:
        UserCodeError: the script ends before it.
        Exception: what the script raises.
    """
    environ[READS_FOR] = str(directory.resolve())
    call = f"the call of Shoal that trains into {directory}"
    return _given_to_call(command, call, rule=": what leads to the call must not depend on time or chance")


def run_file_of_script(command: Sequence[str], keys: Sequence[str], environ: MutableMapping[str, str]) -> Any:
    """Runs the script of `command` up to its first call of Shoal: the run file of that run, with `keys` on top.

    Raises as `data_given` does.
    """
    environ.update({DESCRIBES: "1", KEYS: json.dumps(list(keys))})
    try:
        return _given_to_call(command, "a call of shoal.train or shoal.start")
    finally:
        del environ[DESCRIBES], environ[KEYS]


def keys_told(environ: Mapping[str, str]) -> list[str]:
    """The keys that replace those of this script's run."""
    return json.loads(environ.get(KEYS, "[]"))


def say_unless_called(environ: Mapping[str, str]) -> None:
    """At the end of this process, if it is the script of `EXPECTS` and has not called Shoal. Where it raises, its error
    says more.
    """
    if environ.get(EXPECTS) == str(os.getpid()) and getattr(sys, "last_value", None) is None:
        sys.stderr.write(
            f"shoal: {sys.argv[0]} came to its end without a call of shoal.train or shoal.start, so nothing of Shoal "
            "took part; start what calls shoal.horovod, shoal.wire or torch.distributed by `shoal launch`\n"
        )


def divided(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """What stands behind a script: the keys of its run (`run.steps=5`), and the arguments of its own."""
    keys = [one for one in arguments if _KEY.match(one)]
    return keys, [one for one in arguments if one not in keys]


def names_no_shoal(script: Path) -> bool:
    """Whether the script calls nothing of Shoal: the name is not in its text, nor is that of a module beside it, which
    may call it.
    """
    text = script.read_text(encoding="utf-8", errors="replace")
    imported = set(_IMPORTED.findall(text))
    beside = {name for name in imported if any(script.parent.glob(f"{name}.*")) or (script.parent / name).is_dir()}
    return "shoal" not in text and not beside


def _given_to_call(command: Sequence[str], call: str, *, rule: str = "") -> Any:
    module = command[1] == "-m"
    sys.argv = [command[1 + module], *command[2 + module :]]
    try:
        if module:
            runpy.run_module(command[2], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(os.path.abspath(command[1])))
            runpy.run_path(command[1], run_name="__main__")
    except Reached as reached:
        return reached.data
    except RunEnded:
        raise
    except SystemExit as ended:
        why = f"ended with exit code {ended.code}"
    else:
        why = "came to its end"
    raise UserCodeError(f"{sys.argv[0]} {why} without {call}{rule}")


class ScriptCheck(msgspec.Struct, frozen=True, kw_only=True):
    """What `shoal verify mine.py` tells the processes of the script: `steps` are compared, in float64 if `exact`.

    The script runs twice. On the side "plain" its one process computes each global batch whole, in plain PyTorch, and
    leaves in `folder` what it started from and what every step came to. On the side "layout" its ranks start from the
    same weights, compare each step with what is there, and leave a verdict.

        initial.safetensors      weights and buffers before the first step
        step-N.safetensors       gradients that the optimizers took, weights and buffers after step N; its loss and norm
        samples.txt              what the first samples are
        verdict.json             the fields of a `Verdict`, left by rank 0 of the layout

    A script that calls `shoal.train` has no loop of its own: the plain side leaves the file "trains", and on the other
    the call is one of `shoal.verify`.
    """

    side: Literal["plain", "layout"]
    folder: str
    steps: int
    exact: bool = False

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
