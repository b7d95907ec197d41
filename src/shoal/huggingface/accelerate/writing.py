"""`Writing`: what an `Accelerator` writes and reads: models, folders of `save_state`, and the script's trackers.

Scripts save on rank 0 alone as often as on all ranks (`if accelerator.is_main_process: accelerator.save_state(...)`). A
checkpoint is made by all of them, so behind each step ranks tell each other whether one has asked for it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shoal.errors import UserCodeError
from shoal.huggingface.accelerate.arguments import Settings
from shoal.huggingface.accelerate.folders import Hooks, Saved, go_back, require_state_of
from shoal.huggingface.accelerate.ranks import Function, OfRanks
from shoal.huggingface.accelerate.state import Beside
from shoal.launcher.environment import place_from
from shoal.launcher.own_script import script_check
from shoal.own_loop.other_libraries import refusing, without_launcher

if TYPE_CHECKING:
    from shoal.own_loop.loop import Training


class Writing(OfRanks):
    """See above. `log_with` are the script's trackers."""

    def __init__(self, settings: Settings, log_with: Any) -> None:
        super().__init__(cpu=settings.cpu)
        with without_launcher():
            self._accelerate = Beside(
                cpu=True, mixed_precision="no", log_with=log_with, project_config=settings.project
            )
        self.resumed_by_script = self.passes_over = self.is_over = False
        self._models: list[nn.Module] = []
        self._saved = Saved(settings.project)
        self._before_save, self._before_load = Hooks(), Hooks()
        self._given = 0  # the number of the step that the loop is at
        self._in_step = True  # ranks make every step together
        self._tracked: tuple[str, Any, Any] | None = None  # what trackers are to be started with
        place = place_from(os.environ)
        if place is not None:
            self._accelerate.be_place(place.rank, place.local_rank)

    def begun(self, *, resume: bool | None = None) -> Training:
        """The run, which begins with the first call."""
        raise NotImplementedError

    # Models.

    def verify_device_map(self, model: nn.Module) -> bool:
        """Whether the model is spread over several devices."""
        return self._accelerate.verify_device_map(model)

    def unwrap_model(self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> Any:
        """The model: nothing is wrapped around it. That inside of a compiled one, unless it is to be kept."""
        return model if keep_torch_compile else getattr(model, "_orig_mod", model)

    def full_parameters(self) -> AbstractContextManager[None]:
        """Inside, every rank has every parameter whole, which ZeRO-3 otherwise divides: to read, to export, to generate
        with them, and for a moving average of them. Every rank enters it.
        """
        return nullcontext() if self.run is None else self.run.full_parameters()

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Tensor]:
        """Copies of the model's whole weights. Under ZeRO-3 every rank calls it."""
        with self.full_parameters():
            return self._accelerate.get_state_dict(model)

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Writes the model's whole weights to a folder. Under ZeRO-3 every rank calls it."""
        if script_check(os.environ) is None:
            with self.full_parameters():
                self._accelerate.save_model(model, save_directory, max_shard_size, safe_serialization)
            if self._is_divided:
                self.wait_for_everyone()  # nobody reads the folder before it is whole

    def save(self, obj: Any, f: str | os.PathLike[str], safe_serialization: bool = False) -> None:
        """Writes an object to a file, on rank 0."""
        if script_check(os.environ) is None and self.is_main_process:
            self._accelerate.save(obj, f, safe_serialization)

    @property
    def _is_divided(self) -> bool:
        """Whether ranks hold parts of parameters."""
        return not isinstance(self.full_parameters(), nullcontext)

    # What a run is resumed from.

    @property
    def save_iteration(self) -> int:
        """The number of the next folder that `save_state` names itself."""
        return self._saved.number

    def register_save_state_pre_hook(self, hook: Function) -> RemovableHandle:
        """`hook(models, weights, folder)` is called in each `save_state`, on the ranks that call it. What it writes is
        in the folder when the checkpoint is whole.
        """
        return self._before_save.add(hook)

    def register_load_state_pre_hook(self, hook: Function) -> RemovableHandle:
        """`hook(models, folder)` is called in `load_state`, behind the run's own resume."""
        return self._before_load.add(hook)

    def save_state(
        self, output_dir: str | os.PathLike[str] | None = None, safe_serialization: bool = True, **kwargs: Any
    ) -> None:
        """Saves the run behind this step, for which the folder then stands. Rank 0 calls it, or all ranks, behind an
        update; all ranks where a hook needs whole weights under ZeRO-3, or replicas take steps of their own.
        """
        if self.passes_over or script_check(os.environ) is not None:
            return
        run, given = self.begun(), self._given
        if not given or run.update is None:
            raise UserCodeError(
                "save_state() was called in the middle of a step, of which a part would be lost: call it behind an "
                "update, if accelerator.sync_gradients"
            )
        folder = self._saved.begin(output_dir, given)
        if not self._in_step:
            self._saved.ask(run)
        if not self._before_save:
            return
        if self._is_divided and run.sum(1.0) < run.share[1]:
            raise UserCodeError(
                "save_state() was called on some ranks alone, and a hook of register_save_state_pre_hook needs the "
                "weights, of which every rank has a part under ZeRO-3: call it on every rank, outside of "
                "`if accelerator.is_main_process`"
            )
        folder.mkdir(parents=True, exist_ok=True)
        with run.full_parameters():
            self._before_save.saving(self._models, folder)

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Goes on from the run's newest checkpoint, for which the folder stands, or had a signal not stopped the run
        behind it: before the first batch, behind `prepare`. The loop then begins with the rest of the open epoch.
        """
        with refusing():
            folder = self._saved.to_load(input_dir)
            self._require_unbegun("load_state()")
            go_back(folder)
        run = self.begun(resume=True)
        require_state_of(folder, run)
        self.resumed_by_script, self.passes_over, self.is_over = True, False, False
        if self._before_load:
            with run.full_parameters():
                self._before_load.loading(self._models, folder)

    def _agree_on_save(self, run: Training) -> None:
        """Before a batch is asked for: where any rank has called `save_state` behind the update, all of them save.
        Replicas that take steps of their own do not wait for each other in each of them: there all ranks call it.
        """
        if run.update is None or not self._in_step or script_check(os.environ) is not None:
            return
        asks, known_by_rank_0 = self._saved.asks, float(run.world_size)
        asking = run.sum(float(asks) if run.rank else asks * known_by_rank_0)
        if asking < known_by_rank_0 and (asks or asking):
            raise UserCodeError("save_state() was called on other ranks than rank 0: call it there, or on all ranks")
        if asking:
            self._saved.ask(run)

    def _require_unbegun(self, call: str) -> None:
        raise NotImplementedError

    # Trackers.

    @property
    def trackers(self) -> list[Any]:
        """Those of `init_trackers`, on rank 0."""
        self._start_trackers()
        return self._accelerate.trackers

    def init_trackers(self, project_name: str, config: dict[str, Any] | None = None, init_kwargs: Any = None) -> None:
        """Starts the trackers of `log_with`, on rank 0: at once where a launcher has started this rank. A process that
        may only be about to start the ranks waits until it is one of them, or is asked for a tracker.
        """
        if script_check(os.environ) is None:
            self._tracked = (project_name, config, init_kwargs or {})
            if self.run is not None or place_from(os.environ) is not None:
                self._start_trackers()

    def _start_trackers(self) -> None:
        """Those that are to be started and are not yet."""
        given, self._tracked = self._tracked, None
        if given is not None and self.is_main_process:
            self._accelerate.init_trackers(*given)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """One of the trackers."""
        self._start_trackers()
        return self._accelerate.get_tracker(name, unwrap)

    def log(self, values: Mapping[str, Any], step: int | None = None, log_kwargs: Any = None) -> None:
        """To the trackers, on rank 0; numbers are recorded in the run, too."""
        if self.is_main_process and not self.passes_over:
            self._start_trackers()
            self._accelerate.log(dict(values), step, log_kwargs or {})
        if self.run is not None and self._given:
            self.run.log({name: value for name, value in values.items() if isinstance(value, int | float)})
