"""The folders of `save_state`. They have no weights: each says which step of which run it stands for. The checkpoint is
the run's own, with the position in the data and all that a resume needs (`shoal.checkpoint`).

A folder is there once its checkpoint is whole. Until then what the script's hooks write for it is in `.NAME.unfinished`
beside it, so that a script that goes on with the newest folder never finds one that stands for nothing.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from shoal.assembly.finished_run import is_finished
from shoal.checkpoint.commit import Pointer, findings, point_latest, read_manifest, retain
from shoal.checkpoint.objects import Disk, Places
from shoal.errors import UsageError, UserCodeError
from shoal.launcher.environment import ALONE, place_from
from shoal.launcher.lock import RunLock
from shoal.launcher.own_script import script_check

if TYPE_CHECKING:
    from accelerate.utils import ProjectConfiguration

    from shoal.own_loop.loop import Training

MARK = "shoal.json"
"""The file that makes a folder one of `save_state`."""


class Hooks:
    """Functions of the script that are called with the models and a folder, before each save or load."""

    def __init__(self) -> None:
        self._each: OrderedDict[int, Callable[..., None]] = OrderedDict()

    def add(self, hook: Callable[..., None]) -> RemovableHandle:
        """Returns what removes it."""
        handle = RemovableHandle(self._each)
        self._each[handle.id] = hook
        return handle

    def __bool__(self) -> bool:
        return bool(self._each)

    def saving(self, models: Sequence[nn.Module], folder: Path) -> None:
        """Calls them with the models' weights, which they may take out of the list."""
        for hook in self._each.values():
            hook([*models], [model.state_dict() for model in models], str(folder))

    def loading(self, models: Sequence[nn.Module], folder: Path) -> None:
        """Calls them with models into which they may load."""
        for hook in self._each.values():
            hook([*models], str(folder))


class Saved:
    """The folders of `save_state`, named by the script or, if `project` says so, by their number."""

    def __init__(self, project: ProjectConfiguration) -> None:
        self._project = project
        self._asked: list[tuple[Path, int]] = []
        self._waits = False  # the checkpoint is asked for, of which this rank may have no folder

    @property
    def number(self) -> int:
        """Of the next folder that is named by its number."""
        return self._project.iteration

    @property
    def asks(self) -> bool:
        """Whether this rank's script has called `save_state` behind this step, and the others do not know it yet."""
        return bool(self._asked) and not self._waits

    def go_on(self) -> None:
        """A resumed run numbers its folders behind those that are there, unless the script has set another number."""
        if self._project.iteration == 0 and (there := self._there()):
            self._project.iteration = _number(there[-1]) + 1

    def begin(self, named: str | os.PathLike[str] | None, step: int) -> Path:
        """The checkpoint of that step is asked for, for which a folder of that name is to stand: where hooks write what
        will be in it. Raises `UsageError` where nobody has named it.
        """
        project = self._project
        if project.automatic_checkpoint_naming:
            number, project.iteration = project.iteration, project.iteration + 1
            folder = self._numbered() / f"checkpoint_{number}"
        elif named is None:
            raise UsageError("save_state() needs a folder, or ProjectConfiguration(automatic_checkpoint_naming=True)")
        else:
            folder = Path(os.path.abspath(named))
        self._asked.append((folder, step))
        return unfinished(folder)

    def ask(self, run: Training) -> None:
        """All ranks know that one has called `save_state`: the run saves."""
        self._waits = True
        run.save()

    def settle(self, run: Training, *, wait: bool) -> None:
        """Marks the folders whose checkpoints are whole, and deletes what is more than `total_limit`; on rank 0. All
        ranks `wait` for them before the script goes on, so that none is behind the run's newest.
        """
        if wait and self._waits:
            run.wait_for_save()
        elif wait:
            return
        asked, self._asked, self._waits = self._asked, [], False
        if run.rank != 0 or not asked:
            return
        whole = Places(run.directory).steps()
        for folder, step in asked:
            if step in whole:
                mark(folder, run, step)
        limit = self._project.total_limit
        if self._project.automatic_checkpoint_naming and limit is not None:
            for old in self._there()[:-limit]:
                shutil.rmtree(old)

    def to_load(self, named: str | os.PathLike[str] | None) -> Path:
        """The folder that `load_state` names; None: the newest. Raises `UsageError` where it is none of a run's."""
        there = [each for each in self._there() if (each / MARK).is_file()]
        if named is None and not there:
            raise UsageError(f"load_state() finds no checkpoint in {self._numbered()}: say which folder")
        folder = there[-1] if named is None else Path(named)
        if not (folder / MARK).is_file():
            raise UsageError(
                f"{folder} does not stand for a checkpoint of a run of Shoal: it is none of its save_state, or the "
                "script wrote into it and was cut off before the checkpoint was whole. In that case delete it, and the "
                "script goes on from the one before. To begin with weights that accelerate has saved, load them into "
                "the model, and leave load_state out"
            )
        return folder

    def _numbered(self) -> Path:
        return Path(self._project.project_dir or ".") / "checkpoints"

    def _there(self) -> list[Path]:
        found = [each for each in self._numbered().glob("checkpoint_*") if re.fullmatch(r"\w+_\d+", each.name)]
        return sorted(found, key=_number)


def _number(folder: Path) -> int:
    return int(folder.name.rpartition("_")[2])


def unfinished(folder: Path) -> Path:
    """Where what will be in `folder` is until its checkpoint is whole."""
    return folder.with_name(f".{folder.name}.unfinished")


def mark(folder: Path, run: Training, step: int) -> None:
    """Makes `folder` stand for that step of the run, with what hooks have written for it. A script may have made it."""
    made = unfinished(folder)
    made.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"directory": str(run.directory.resolve()), "step": step})
    (made / MARK).write_text(text, encoding="utf-8")
    if not folder.exists():
        made.replace(folder)
        return
    for each in sorted(made.iterdir(), key=lambda each: each.name == MARK):  # the mark comes last
        if each.is_dir() and (folder / each.name).is_dir():
            shutil.rmtree(folder / each.name)
        each.replace(folder / each.name)
    made.rmdir()


def go_back(folder: Path) -> None:
    """Deletes what a stop by a signal has saved behind the step that `folder` stands for: the script counts from there,
    and trains the steps between once more. Before the run begins; rank 0 does it.

    Nothing is deleted of a run that is finished, or where another folder stands for a later step.
    """
    place = place_from(os.environ) or ALONE
    if place.rank != 0 or script_check(os.environ) is not None:
        return
    said = _marked(folder)
    directory, step = Path(said["directory"]), said["step"]
    places = Places(directory)
    steps = places.steps()
    later = {each for each in steps if each > step}
    others = [_marked(mark.parent) for mark in folder.resolve().parent.glob(f"*/{MARK}")]
    named = {each["step"] for each in others if each["directory"] == said["directory"]}
    if step not in steps or not later or later & named or is_finished(directory):
        return
    with nullcontext() if place.launcher == "shoal" else RunLock(directory):
        manifest = read_manifest(places.step(step))
        if not any(findings(manifest, directory)):
            retain(places, step, keep=len(steps), disk=Disk())
            point_latest(Pointer(step, manifest.hash), places, disk=Disk())


def _marked(folder: Path) -> dict[str, Any]:
    """Which step of which run the folder stands for."""
    return json.loads((folder / MARK).read_text(encoding="utf-8"))


def require_state_of(folder: Path, run: Training) -> None:
    """Raises `UserCodeError` where the run does not stand at the step that `folder` stands for."""
    said = _marked(folder)
    if said["directory"] != str(run.directory.resolve()):
        raise UserCodeError(
            f"{folder} is a checkpoint of the run in {said['directory']}, and this one is in {run.directory}"
        )
    if said["step"] == run.steps_done:
        return
    there = ", ".join(map(str, Places(run.directory).steps()))
    raise UserCodeError(
        f"{folder} stands for step {said['step']}, and the run for step {run.steps_done}, that of its newest whole "
        f"checkpoint (there are those of {there or 'no step'}): load_state goes on from the newest. "
        "Leave it out, and the same command goes on there"
    )
