"""What an `Accelerator` does beside its loop: schedulers that follow the updates, losses of transformers' models, the
type that models compute in, and the folders of `save_state`.

A folder of `save_state` has no weights. It says which step of which run it stands for; the checkpoint is the run's own,
with the position in the data and all that a resume needs (`shoal.checkpoint`).
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import accelerate
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from shoal.assembly.finished_run import is_finished
from shoal.checkpoint.commit import Pointer, findings, point_latest, read_manifest, retain
from shoal.checkpoint.objects import Disk, Places
from shoal.errors import UsageError, UserCodeError
from shoal.huggingface.labels import innermost, label_count, shifts_labels
from shoal.launcher.environment import ALONE, place_from
from shoal.launcher.lock import RunLock
from shoal.launcher.own_script import script_check

if TYPE_CHECKING:
    from accelerate.utils import ProjectConfiguration

    from shoal.huggingface.accelerate.accelerator import Accelerator
    from shoal.own_loop.loop import Training

MARK = "shoal.json"
"""The file that makes a folder one of `save_state`."""


class StepScheduler:
    """A prepared scheduler: it steps once for an update, wherever the loop calls `step`; or, unless `follows`, whenever
    it does. Its other attributes are those of `scheduler`.
    """

    def __init__(self, scheduler: Any, accelerator: Accelerator, *, follows: bool) -> None:
        self.scheduler = scheduler
        self._accelerator, self._follows = accelerator, follows

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """As the scheduler's, in the last batch of a step whose update was made."""
        accelerator = self._accelerator
        if accelerator.passes_over or (
            self._follows and not (accelerator.sync_gradients and not accelerator.optimizer_step_was_skipped)
        ):
            return
        self.scheduler.step(*args, **kwargs)


class ModelLosses:
    """The losses that transformers' models have computed for the batch at hand, and over how many labels each is a
    mean: a loop that passes on such a loss need not say its weight.
    """

    def __init__(self) -> None:
        self._own: list[tuple[Tensor, float]] = []

    def watch(self, model: nn.Module) -> None:
        """From now on. A copy of the model takes the hook along."""
        inside, own = innermost(model), self._own
        if not isinstance(inside, PreTrainedModel):
            return
        shifted = shifts_labels(model)

        def returned(module: nn.Module, args: Any, inputs: dict[str, Any], output: Any) -> None:
            loss = getattr(output, "loss", None)
            if isinstance(loss, Tensor) and inputs.get("labels") is not None and torch.is_grad_enabled():
                own.append((loss, label_count(inputs, module, shifted=shifted)))

        model.register_forward_hook(returned, with_kwargs=True)

    def clear(self) -> None:
        """Another batch begins."""
        self._own.clear()

    def weight_of(self, loss: Tensor) -> float | None:
        """What `loss` is a mean over; None where no model has returned it."""
        return next((count for own, count in self._own if own is loss), None)


def compute_in(model: nn.Module, autocast: Callable[[], AbstractContextManager[Any]]) -> None:
    """Calls of `model` compute in the type of the run, and return float32, as those of a model that was prepared."""
    entered: list[AbstractContextManager[Any]] = []

    def before(module: nn.Module, args: Any) -> None:
        around = autocast()
        around.__enter__()
        entered.append(around)

    def behind(module: nn.Module, args: Any, output: Any) -> Any:
        entered.pop().__exit__(None, None, None)
        return tree_map(_in_float32, output)

    model.register_forward_pre_hook(before, prepend=True)
    model.register_forward_hook(behind, always_call=True)


def _in_float32(each: Any) -> Any:
    narrow = isinstance(each, Tensor) and each.dtype in (torch.bfloat16, torch.float16)
    return each.float() if narrow else each


class Beside(accelerate.Accelerator):
    """Accelerate's own, which connects nothing: it writes models, and has the trackers."""

    def be_rank(self, rank: int, local_rank: int) -> None:
        """Says which rank this is to `get_logger` and to trackers, which look there."""
        for state in (accelerate.PartialState(), self.state):
            vars(state).update(process_index=rank, local_process_index=local_rank)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Tensor]:
        """Copies in memory of their own, of which tied weights share one."""
        state, copies = model.state_dict(), dict[Any, Tensor]()
        for value in state.values():
            copies.setdefault((value.data_ptr(), value.shape), value.detach().clone())
        return {name: copies[value.data_ptr(), value.shape] for name, value in state.items()}


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
        self._pending: list[tuple[Path, int]] = []

    def folder(self, named: str | os.PathLike[str] | None) -> Path:
        """Where the next one comes. Raises `UsageError` where nobody has named it."""
        project = self._project
        if not project.automatic_checkpoint_naming:
            if named is None:
                raise UsageError(
                    "save_state() needs a folder, or ProjectConfiguration(automatic_checkpoint_naming=True)"
                )
            return Path(named)
        number, project.iteration = project.iteration, project.iteration + 1
        return self._numbered() / f"checkpoint_{number}"

    def begin(self, folder: Path, step: int) -> None:
        """The checkpoint of that step is asked for, for which the folder is to stand."""
        self._pending.append((folder, step))

    def settle(self, run: Training, *, wait: bool) -> None:
        """Marks the folders whose checkpoints are whole, and deletes what is more than `total_limit`; on rank 0. All
        ranks `wait` for them before the script goes on, so that none is behind the run's newest.
        """
        if not self._pending:
            return
        if wait:
            run.wait_for_save()
        pending, self._pending = self._pending, []
        if run.rank != 0:
            return
        whole = Places(run.directory).steps()
        for folder, step in pending:
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
                f"{folder} does not stand for a checkpoint of a run of Shoal: it is none of its save_state, or the run "
                "was cut off before the checkpoint was whole. To begin with weights that accelerate has saved, load "
                "them into the model, and leave load_state out"
            )
        return folder

    def _numbered(self) -> Path:
        return Path(self._project.project_dir or ".") / "checkpoints"

    def _there(self) -> list[Path]:
        found = [each for each in self._numbered().glob("checkpoint_*") if re.fullmatch(r"\w+_\d+", each.name)]
        return sorted(found, key=lambda each: int(each.name.rpartition("_")[2]))


def mark(folder: Path, run: Training, step: int) -> None:
    """Writes which step of which run the folder stands for."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"directory": str(run.directory.resolve()), "step": step})
    written = folder / f".{MARK}"
    written.write_text(text, encoding="utf-8")
    written.replace(folder / MARK)


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
