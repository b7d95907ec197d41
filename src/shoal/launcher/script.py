"""`shoal launch`, from the shell and from Python: a script, a module or a function on every rank of this host.

    python -m shoal.launcher.script SCRIPT.py ARGS       ... -m MODULE ARGS       ... --call CALL, as JSON

is a rank: it arms the guards, then runs what it is given as Python itself would. It ends with its launcher, and leaves
a record of what it failed with, whether the script knows of Shoal or not.

A function is found again by the file or module that defines it and its name, and gets its arguments as JSON: nothing
is pickled. A script's `if __name__ == "__main__":` does not run there.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from shoal.errors import RunFailed, RunStopped, UsageError
from shoal.launcher.environment import place_from
from shoal.launcher.failure import FAILURE_FOLDER, report_failure
from shoal.launcher.orphans import die_with_parent

RANK = (sys.executable, "-m", "shoal.launcher.script")
"""What begins the command of a rank."""
_CALL, _IMPORTED_AS = "--call", "__shoal__"
_OURS = (__file__, "<frozen runpy>", runpy.__file__, importlib.__file__, "<frozen importlib._bootstrap>")


def launch(
    target: str | Path | Callable[..., object],
    *arguments: Any,
    processes: int | None = None,
    directory: str | Path | None = None,
) -> None:
    """Runs `target` on `processes` ranks of this host, and returns when all have ended; as `shoal launch`.

        def main(lr):
            torch.distributed.init_process_group("gloo")
            ...

        if __name__ == "__main__":
            shoal.launch(main, 0.1, processes=2)

    `target` is the path of a script, with its command line's `arguments`, or a function at the top of a script or
    module, whose `arguments` JSON can hold. Ranks find torchrun's variables, and write to `directory`/logs (default
    runs/<name>), rank 0 to the terminal. `processes`: default one a GPU, else one. What functions return is lost.

    Raises `RunFailed` where a rank fails, `RunStopped` after a signal, `UsageError` for what cannot be run. Call it
    from the main thread.
    """
    from shoal.launcher.host import host_from, run_host

    if place_from(os.environ) is not None:
        raise UsageError(
            'shoal.launch was called in a rank that it has started: put the call under if __name__ == "__main__"'
        )
    command, name = _call_of(target, arguments) if callable(target) else _script_of(Path(target), arguments)
    host = host_from(os.environ, ranks=processes)
    code = run_host([*RANK, *command], host, directory=Path(directory or Path("runs") / name), environ=os.environ)
    if code != 0:
        raise (RunStopped if code.rank is None else RunFailed)(int(code), rank=code.rank, sentence=code.sentence)


def _script_of(path: Path, arguments: Sequence[Any]) -> tuple[list[str], str]:
    if not path.is_file() or path.suffix == ".toml":
        raise UsageError(f"{path} is no Python script: shoal.launch takes a script or a function")
    return [str(path), *map(str, arguments)], path.stem


def _call_of(function: Callable[..., object], arguments: Sequence[Any]) -> tuple[list[str], str]:
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "<")
    of_object = not isinstance(getattr(function, "__self__", function.__class__), type)
    if module is None or "<" in name or of_object:
        raise UsageError(f"shoal.launch cannot find {function!r} again in a rank: define it at the top of a module")
    try:
        call = {"where": _home(module, name), "name": name, "arguments": list(arguments), "path": sys.path}
        text = json.dumps(call)
    except (TypeError, ValueError) as fault:
        raise UsageError(f"shoal.launch sends arguments as JSON, which cannot hold these: {fault}") from fault
    if json.loads(text) != call:
        raise UsageError(
            "shoal.launch sends arguments as JSON, which changes these: give lists for tuples, and strings as keys"
        )
    return [_CALL, text], name


def _home(module: str, name: str) -> str:
    """The module or the file by which a rank finds the function. Raises `UsageError` where there is neither."""
    if module != "__main__":
        return module
    main_module = sys.modules["__main__"]
    if (spec := getattr(main_module, "__spec__", None)) is not None and spec.name:
        return spec.name  # python -m package.module
    file = getattr(main_module, "__file__", None)
    if file is None or not Path(file).is_file():
        raise UsageError(
            f"{name} is defined in no file, as in a notebook: write it to one (%%writefile), and import it"
        )
    return str(Path(file).resolve())


def main(arguments: list[str]) -> None:
    """Run what `arguments` name; ends the process with its exit code where that is not 0."""
    die_with_parent(os.environ)
    place = place_from(os.environ)
    if place is None:
        raise RuntimeError("a rank was started without its place: RANK and WORLD_SIZE are missing")
    with report_failure(place, Path(os.environ[FAILURE_FOLDER])):
        try:
            _run(arguments)
        except SystemExit as leaving:
            if leaving.code not in (0, None):
                raise
        except Exception as error:
            error.__traceback__ = _own_part(error.__traceback__)
            raise


def _own_part(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the script's first frame on; all of it where it never came so far."""
    frame = trace
    while frame is not None and frame.tb_frame.f_code.co_filename in _OURS:
        frame = frame.tb_next
    return frame or trace


def _run(arguments: list[str]) -> None:
    if arguments[0] == _CALL:
        _call(**json.loads(arguments[1]))
    elif arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
        runpy.run_path(arguments[0], run_name="__main__")


def _call(where: str, name: str, arguments: list[Any], path: list[str]) -> None:
    sys.argv, sys.path[:] = [where], path
    script = Path(where).is_file()
    names = runpy.run_path(where, run_name=_IMPORTED_AS) if script else vars(importlib.import_module(where))
    first, *rest = name.split(".")
    found: Any = names[first]
    for part in rest:
        found = getattr(found, part)
    found(*arguments)


if __name__ == "__main__":
    sys.path.pop(0)  # the folder that `-m` put there; what runs gets its own
    main(sys.argv[1:])
