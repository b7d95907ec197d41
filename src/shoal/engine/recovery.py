"""Going on: from the newest checkpoint that verifies, at the start; past steps that are not finite, in mid-run.

Such steps are skipped and counted; after too many in a row the run stops and names the culprit. Where a value first was
not finite is looked for once, when the run is about to stop for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from shoal.checkpoint.commit import checkpoint_in, checkpoints, newest_verified, read_manifest
from shoal.checkpoint.load import read_into
from shoal.checkpoint.manifest import Manifest
from shoal.checkpoint.objects import Places
from shoal.comm.collective import gather_texts
from shoal.data.sample import Batch
from shoal.engine.compute import Compute
from shoal.engine.precision import SMALLEST_SCALE, LossScaler
from shoal.engine.rank_context import RankContext
from shoal.engine.state import TrainState
from shoal.engine.tally import StepResult
from shoal.errors import CorruptCheckpoint, Diverged, VerificationFailed
from shoal.gradients.units import tensors_in
from shoal.models.adapters import is_adapter

SampleIds = Callable[[np.ndarray], np.ndarray]
"""From positions in the data's order to the ids of the samples that stand there, both int64 [samples]."""


def first_nonfinite(
    compute: Compute, batches: Iterable[Batch], *, forward: bool = True, ids: SampleIds | None = None
) -> str | None:
    """The first culprit: a parameter, a sample, a module's output, the loss, a gradient; None if all are finite.

    Without `forward`, modules are not run: a rank that holds a part of the model cannot run it alone. With `ids`, a
    sample is named by its id, too.
    """
    for name, parameter in compute.model.named_parameters():
        if not _finite(parameter):
            return f"parameter {name}"
    for batch in batches:
        batch = compute.prepared(batch).batch
        found = _in_samples(batch, ids) or (_in_forward(compute, batch) if forward else None)
        if found is not None:
            return found
    for name, parameter in compute.model.named_parameters():
        if parameter.grad is not None and not _finite(parameter.grad):
            return f"the gradient of parameter {name}"
    return None


def _in_samples(batch: Batch, ids: SampleIds | None) -> str | None:
    for part, tree in (("inputs", batch.inputs), ("targets", batch.targets)):
        for leaf in tensors_in(tree):
            if not _finite(leaf):
                bad = (~torch.isfinite(leaf)).flatten(1).any(1) if leaf.ndim > 1 else ~torch.isfinite(leaf)
                position = batch.positions[bad.cpu()][:1]
                sample = "the sample" if ids is None else f"sample {int(ids(position.cpu().numpy())[0])}"
                return f"the {part} of {sample} at position {int(position)} of the data's order"
    return None


@torch.no_grad()
def _in_forward(compute: Compute, batch: Batch) -> str | None:
    found: list[str] = []

    def watch(name: str):
        def after(module: nn.Module, inputs: object, output: object) -> None:
            if not found and not all(_finite(leaf) for leaf in tensors_in(output)):
                found.append(_output_of(name, module))

        return after

    hooks = [module.register_forward_hook(watch(name)) for name, module in compute.model.named_modules()]
    try:
        compute.randomness.microbatch(batch.positions)
        _, losses = compute.losses(batch)
    finally:
        for hook in hooks:
            hook.remove()
    if found:
        return found[0]
    return None if _finite(losses) else "the loss, from finite outputs of the model"


def _output_of(name: str, module: nn.Module) -> str:
    if name:
        return f"the output of module {name} ({type(module).__name__})"
    return f"the output of the model ({type(module).__name__}) itself, from finite outputs of its modules"


def _finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())


@dataclass
class NonfiniteGuard:
    """Counts non-finite steps in a row. An overflow that a smaller loss scale may cure does not count.

    `forward`: may a rank run its model alone, to find the module? Not where it holds a part of one.
    `ids`: to name samples by their ids.
    """

    limit: int
    context: RankContext
    forward: bool = True
    ids: SampleIds | None = None
    in_a_row: int = 0

    def check(
        self, number: int, result: StepResult, microbatches: Sequence[Batch], *, warn: Callable[[str], None]
    ) -> None:
        """Warns of a skipped step, except where a smaller loss scale cures it, as is usual in half precision: that is
        in the report alone. Raises `Diverged` at the limit, on every rank alike."""
        if result.committed:
            self.in_a_row = 0
            return
        if _scale_was_too_large(result, self.context.scaler):
            return
        self.in_a_row += 1
        if self.in_a_row >= self.limit:
            culprit = self._culprit(microbatches, result.loss)
            raise Diverged(f"{self.in_a_row} steps in a row were not finite, the last was step {number}. {culprit}")
        sample = self._first(lambda: self._own_sample(microbatches))
        warn(
            f"step {number} was not finite (loss {result.loss}, gradient norm {result.norm}) and was skipped: "
            f"{self.in_a_row} in a row; at {self.limit} the run stops"
            + (f". Not finite: {sample}; mend the sample or leave it out" if sample else "")
        )

    def _culprit(self, microbatches: Sequence[Batch], loss: float) -> str:
        compute = self.context.forward_backward.compute
        culprit = self._first(lambda: first_nonfinite(compute, microbatches, forward=self.forward, ids=self.ids))
        if culprit:
            return f"The first value that was not finite: {culprit}"
        alone = "Parameters, samples and outputs are finite when looked at alone"
        if not math.isfinite(loss):
            return f"{alone}, and the loss of them is {loss}: look for a logarithm or root of 0, a division by 0 in it"
        return f"{alone}: the gradient overflowed; lower the lr"

    def _own_sample(self, microbatches: Sequence[Batch]) -> str | None:
        compute = self.context.forward_backward.compute
        samples = (_in_samples(compute.prepared(batch).batch, self.ids) for batch in microbatches)
        return next((text for text in samples if text), None)

    def _first(self, look: Callable[[], str | None]) -> str:
        """What the first rank that finds something says, with its number; "" where none does. All ranks call it."""
        try:
            own = look() or ""
        except Exception as error:  # the others wait for a text from this rank, whatever happens here
            own = f"unknown, as looking for it raised {type(error).__name__}: {error}"
        texts = gather_texts(own, self.context.lockstep, device=self.context.device)
        return next((f"{text} (rank {rank})" for rank, text in enumerate(texts) if text), "")


def _scale_was_too_large(result: StepResult, scaler: LossScaler) -> bool:
    """A finite loss whose scaled gradient overflowed, at a scale that can shrink."""
    return scaler.dynamic and result.scale > SMALLEST_SCALE and math.isfinite(result.loss)


# Where a run goes on: rank 0 looks for the newest verified checkpoint, all ranks load the one it found.
#
# A checkpoint can be whole and still not load: another version wrote it, or a program that was wrong. Then all ranks
# take the one before it, and the run says so. What a user has changed (another model, another optimizer) is an error at
# once: the one before it is no other.


Announce = Callable[[str, Callable[[], str]], str]
"""`announce(key, find)`: rank 0 calls `find`; every rank gets its answer."""
Collect = Callable[[str], list[str]]
"""Every rank's text, in rank order."""


class Loaded(NamedTuple):
    """What this rank has loaded: the checkpoint of `step`, whose manifest hashes to `hash` ("" of format 1)."""

    step: int
    hash: str


def _unsaid(text: str) -> None:
    """Nobody listens."""


def resume(
    state: TrainState,
    directory: Path,
    *,
    announce: Announce,
    warn: Callable[[str], None],
    collect: Collect | None = None,
    activity: Callable[[str], None] = _unsaid,
) -> Loaded | None:
    """Loads the newest checkpoint of `directory` that verifies and loads on every rank into `state`; None where there
    is none.

    `activity` hears what takes long.
    `collect` tells every rank what the others could not load; None: this rank is alone, or loads what rank 0 does.
    Raises `CorruptCheckpoint` where there are checkpoints and none loads: starting afresh would hide the loss. Raises
    `UsageError` for the checkpoint of another model or run.
    """
    refused: dict[int, str] = {}
    warned: set[str] = set()

    def warn_once(problem: str) -> None:
        if problem not in warned:
            warned.add(problem)
            warn(problem)

    if checkpoints(directory):
        activity("verifying the newest checkpoint")
    while True:
        step = announce(f"resume/{len(refused)}", lambda: _newest(directory, refused, warn_once))
        if not step:
            return None
        activity(f"loading the checkpoint of step {step}")
        loaded, problem = _load(state, directory, int(step))
        problems = [problem] if collect is None else collect(problem)
        if not any(problems):
            state.gather()
            return loaded
        rank, said = next((rank, text) for rank, text in enumerate(problems) if text)
        refused[int(step)] = f"rank {rank} cannot load the checkpoint of step {step}: {said}"


def _newest(directory: Path, refused: dict[int, str], warn: Callable[[str], None]) -> str:
    """The step of the newest checkpoint that is whole and not `refused`, "" where there is no checkpoint."""

    def accept(manifest: Manifest) -> None:
        if manifest.step in refused:
            raise CorruptCheckpoint(refused[manifest.step])

    manifest, problems = newest_verified(directory, accept=accept)
    for problem in problems:
        warn(problem)
    if manifest is None and problems:
        raise CorruptCheckpoint(
            f"{directory} holds checkpoints, but none can be used: {problems[0]}. Restore one, or give "
            "another run.directory"
        )
    return str(manifest.step) if manifest is not None else ""


def _load(state: TrainState, directory: Path, step: int) -> tuple[Loaded, str]:
    """Fills `state`; what this rank has loaded, and why it could not ("": it could)."""
    try:
        manifest = read_manifest(Places(directory).step(step))
    except VerificationFailed as error:
        return Loaded(step, ""), str(error)
    loaded = Loaded(step, manifest.hash)
    dtypes = _dtypes(manifest)
    try:
        state.load_json(manifest.state)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        return loaded, f"its state is not one of this version ({type(error).__name__}: {error})"
    try:
        read_into(manifest, directory, state.targets(dtypes), elsewhere=state.elsewhere(dtypes))
    except CorruptCheckpoint as error:
        return loaded, str(error)
    state.pack()
    return loaded, ""


def load_weights(state: TrainState, source: Path, *, announce: Announce, repair: str, with_order: bool = False) -> int:
    """Loads the weights alone, from a run directory (its newest verified checkpoint) or from one checkpoint in it.
    Adapters that it does not have keep their first values. `with_order`: and begins with the samples that came next.

    The step that they are from. Raises `UsageError` where there is none, or, with the sentence `repair`, where names or
    shapes differ.
    """
    folder = Path(announce("weights", lambda: str(checkpoint_in(source))))
    manifest = read_manifest(folder)
    saved = {entry.name for entry in manifest.tensors}
    targets = {n: t for n, t in state.model.targets().items() if n in saved or not is_adapter(n)}
    read_into(manifest, folder.parent.parent, targets, cast=True, repair=repair)
    state.gather()
    if with_order:
        state.progress.take_order(manifest.state, source=str(source))
    return manifest.step


def _dtypes(manifest: Manifest) -> dict[str, torch.dtype]:
    return {entry.name: getattr(torch, entry.dtype) for entry in manifest.tensors}
