"""Users' scripts as ranks, each a process of its own that a forkserver with the imports made already begins.

`run_script` does what torchrun does: it sets the variables of a launcher, and runs the script once a rank.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from shoal.launcher.own_script import ScriptCheck
from shoal.verification.verdict import Verdict
from tests.forkserver import forkserver
from tests.ports import free_port
from tests.waiting import HANG_S


def run_script(
    script: Path, folder: Path, *overrides: str, world: int = 1, dies_at: int = 0, check: ScriptCheck | None = None
) -> list[int]:
    """Runs `script` in `folder` on `world` ranks under Shoal, with these keys on top; their exit codes. Output goes to
    `rank-N.txt`. The last rank is killed in its backward number `dies_at`, if that is not 0. `check`: a side of
    `shoal verify`.
    """
    port = free_port()
    return _run(_be_rank, [(script, folder, overrides, rank, world, port, dies_at, check) for rank in range(world)])


def compare_script(script: Path, folder: Path, *overrides: str, world: int = 1, steps: int = 3) -> Verdict | str:
    """What `shoal verify` finds about `script` in `folder` on `world` ranks with these keys on top, in float64; what it
    printed where a side fails.
    """
    check = ScriptCheck(side="plain", folder=str(folder), steps=steps, exact=True)
    if run_script(script, folder, world=1, check=check) != [0]:
        return (folder / "rank-0.txt").read_text()
    run_script(script, folder, *overrides, world=world, check=msgspec.structs.replace(check, side="layout"))
    if not check.verdict.exists():
        return "\n".join((folder / f"rank-{rank}.txt").read_text() for rank in range(world))
    return msgspec.convert(json.loads(check.verdict.read_text()), Verdict)


def run_plain(script: Path, folder: Path) -> str:
    """Runs `script` without Shoal, and returns what it printed. What it draws at random to choose samples is the order
    of a run of seed 0, so that both see the same.
    """
    codes = _run(_be_plain, [(script, folder)])
    printed = (folder / "plain.txt").read_text()
    assert codes == [0], printed
    return printed


def _run(target: Any, each: list[tuple]) -> list[int]:
    processes = [forkserver().Process(target=target, args=arguments) for arguments in each]
    for process in processes:
        process.start()
    for process in processes:
        process.join(HANG_S)
    late = [process for process in processes if process.is_alive()]
    for process in late:
        process.kill()
    assert not late, f"{len(late)} of {len(processes)} processes did not end"
    return [process.exitcode if process.exitcode is not None else -1 for process in processes]


def _be_rank(
    script: Path,
    folder: Path,
    overrides: tuple[str, ...],
    rank: int,
    world: int,
    port: int,
    dies_at: int,
    check: ScriptCheck | None,
) -> None:
    place = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), SHOAL_CACHE=str(folder / "cache"))
    os.environ.update({} if check is None else check.variables())
    import shoal
    from shoal import api
    from shoal.own_loop.loop import Training

    start = api.start

    def with_overrides(config: Any = None, given: Any = (), **objects: Any) -> Training:
        return start(config, [*given, *overrides], **objects)

    shoal.start = with_overrides  # type: ignore[assignment]
    if dies_at and rank == world - 1:
        backward, calls = Training.backward, iter(range(1, 1_000_000))

        def dying(self: Training, *args: Any, **kwargs: Any) -> None:
            if next(calls) == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            backward(self, *args, **kwargs)

        Training.backward = dying  # type: ignore[method-assign]
    _execute(script, folder, f"rank-{rank}.txt")


def _be_plain(script: Path, folder: Path) -> None:
    import torch
    from torch.utils.data import RandomSampler

    from shoal.data.order import Order

    taken = 0

    def following(count: int, size: int) -> list[int]:
        nonlocal taken
        taken += count
        return Order(size, 0).ids(np.arange(taken - count, taken)).tolist()

    drawn_by_generator = torch.randint

    def randint(*bounds: Any, **options: Any) -> torch.Tensor:
        if options or len(bounds[-1]) != 2:
            return drawn_by_generator(*bounds, **options)
        high, shape = bounds
        return torch.tensor(following(shape[0] * shape[1], high)).view(shape)

    RandomSampler.__iter__ = lambda self: iter(following(self.num_samples, self.num_samples))  # type: ignore[method-assign]
    torch.randint = randint  # type: ignore[assignment]
    _execute(script, folder, "plain.txt")


def _execute(script: Path, folder: Path, output: str) -> None:
    """The script as Python runs it: its exit code, its traceback, what it has left for the end."""
    import atexit

    os.chdir(folder)
    file = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.argv, code = [str(script)], 0
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException as error:
        code = 1
        try:
            sys.excepthook(type(error), error, error.__traceback__)
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1
        except BaseException:
            traceback.print_exc()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
