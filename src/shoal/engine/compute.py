"""What turns a microbatch into losses on one rank: its part of the model, the loss, the device and the precision."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

from shoal.comm.collective import Collective
from shoal.comm.mesh import Mesh
from shoal.data.inputs import unpacked
from shoal.data.sample import Batch, first_leaf, map_tree
from shoal.engine.batch_statistics import StepBuffers, synchronised_norms
from shoal.engine.loss import (
    ChunkedLoss,
    Distillation,
    Loss,
    call_model,
    cross_entropy,
    described,
    in_chunks,
    prediction_in,
    weighted_sum,
    with_prediction,
)
from shoal.engine.microbatches import GlobalBatch
from shoal.engine.precision import Precision
from shoal.engine.randomness import Randomness
from shoal.errors import UserCodeError
from shoal.models.batch_norm import SynchronisedBatchNorm
from shoal.models.router import TakesAuxiliary, counted_tokens, set_auxiliary
from shoal.parallel.tensor.vocabulary import VocabularySplit, gather_logits, vocabulary_cross_entropy

# What `run.compile` hands to `torch.compile`: the model and the loss together, or each block by itself.
#
# Together, Inductor fuses the cast of the logits, the log-softmax and its backward: logits are never written in
# float32. Blocks alone start faster, as equal ones are compiled once, and leave room between them: under ZeRO-3 the
# weights of a block are gathered before its program begins and released when it has ended (as torchtitan does). Hooks
# of a block are called around its program, never traced.
#
# Training asks for the sum of the losses and nothing else: an output that nobody differentiates by would cost a
# gradient of zeros as large as the logits. An evaluation has a program of its own, which returns the outputs too.


DEFAULTS: Mapping[str, Any] = MappingProxyType({})
"""Options of `torch.compile`: none."""


class LossPrograms:
    """`model` and `loss` in one program each for training and for evaluation. `whole`: the model is compiled with the
    loss; else it is called as it is, and the loss is compiled alone. `options` are those of `torch.compile`.
    """

    def __init__(self, model: nn.Module, loss: Loss, *, whole: bool, options: Mapping[str, Any] = DEFAULTS) -> None:
        def summed(outputs: Any, targets: Any, weights: Tensor, ones: bool) -> Tensor:
            return weighted_sum(loss(outputs, targets), weights, ones=ones)

        def trained(inputs: Any, targets: Any, weights: Tensor, ones: bool) -> Tensor:
            return weighted_sum(loss(call_model(model, inputs), targets), weights, ones=ones)

        def evaluated(inputs: Any, targets: Any) -> tuple[Any, Tensor]:
            outputs = call_model(model, inputs)
            return outputs, loss(outputs, targets)

        self._model = model
        self._trained = torch.compile(trained, **options) if whole else None
        self._summed = torch.compile(summed, **options)
        self._evaluated = torch.compile(evaluated, **options) if whole else evaluated

    def loss_sum(self, inputs: Any, targets: Any, weights: Tensor, *, ones: bool) -> Tensor:
        """`sum(losses * weights)`, a scalar; `ones`: every weight is 1."""
        if self._trained is not None:
            return self._trained(inputs, targets, weights, ones)
        return self._summed(call_model(self._model, inputs), targets, weights, ones)

    def evaluated(self, inputs: Any, targets: Any) -> tuple[Any, Tensor]:
        """The outputs, and the loss of each sample or position."""
        return self._evaluated(inputs, targets)


def compile_blocks(blocks: Iterable[nn.Module], options: Mapping[str, Any] = DEFAULTS) -> None:
    """Compiles the `forward` of each, in place."""
    for block in blocks:
        block.forward = _OutsideModes(block.forward, options)


class _OutsideModes:
    """A compiled forward. Under a mode that looks at each call it is the plain one: ZeRO-3 looks at a run's first
    forward for weights that are read while they are not there.
    """

    def __init__(self, forward: Callable[..., Any], options: Mapping[str, Any]) -> None:
        self._plain, self._compiled = forward, torch.compile(forward, **options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = self._plain if _get_current_function_mode_stack() else self._compiled
        return forward(*args, **kwargs)


Cut = Callable[[Batch], Batch]


def uncut(batch: Batch) -> Batch:
    """Every sample whole."""
    return batch


def as_it_is(outputs: Any) -> Any:
    """Outputs that are whole on every rank."""
    return outputs


@dataclass(frozen=True)
class Microbatch:
    """This rank's part of some samples, and the weights of the whole ones, `[samples]` or `[samples, tokens]`.

    `ones`: all of these are 1.
    """

    batch: Batch
    weights: Tensor
    ones: bool = False


@dataclass(frozen=True)
class Compute:
    """One rank's means. `cut` gives this rank's part of every sample, where samples are split along the sequence;
    `gathered` the outputs over all classes, where ranks have parts of them; `global_batch` the samples of other ranks,
    for losses that couple samples (None: this process computes all of them); `programs` are what model and loss were
    compiled to, None: they are called as they are; `announces` are called before each forward of a step with the
    weights of this rank's part of its samples, `looks` behind it with outputs, targets, weights and positions, and
    `on_backward` before each backward, and those in `first` before the first forward alone, with its inputs;
    `distillation` adds a teacher's part to losses that are trained on.
    """

    model: nn.Module
    loss: Loss
    precision: Precision
    device: torch.device
    randomness: Randomness
    cut: Cut = field(default=uncut)
    gathered: Callable[[Any], Any] = field(default=as_it_is)
    global_batch: GlobalBatch | None = None
    programs: LossPrograms | None = None
    announces: list[Callable[[Tensor], None]] = field(default_factory=list)
    looks: list[Callable[[Any, Any, Tensor, Tensor], None]] = field(default_factory=list)
    on_backward: list[Callable[[], None]] = field(default_factory=list)
    first: list[Callable[[Any], None]] = field(default_factory=list)
    distillation: Distillation | None = None
    frozen: Sequence[nn.Module] = field(init=False)
    buffers: StepBuffers = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "frozen", frozen_modules(self.model))
        object.__setattr__(self, "buffers", StepBuffers(self.model))

    def train(self) -> None:
        """The model in training mode, what the user has frozen in evaluation mode."""
        enter_training(self.model, self.frozen)

    def prepared(self, batch: Batch) -> Microbatch:
        """This rank's part of `batch`, on the device and in the type of the parameters."""
        own = on_device(self.cut(batch), self.device, self.precision.parameters)
        if (inputs := unpacked(own.inputs, self.device)) is not own.inputs:
            own = replace(own, inputs=inputs)
        whole = own.weights if self.cut is uncut else batch.weights.to(self.device, non_blocking=True)
        return Microbatch(own, whole, batch.weighs_ones)

    def announce(self, microbatch: Microbatch, factor: Callable[[], float]) -> None:
        """Tells the model which samples come next; their losses will be multiplied by `factor()`."""
        batch = microbatch.batch
        self.buffers.rewind()
        for announced in self.announces:
            announced(batch.weights)
        if self.synchronised_norms:
            real = self.counted(batch)
            for norm in self.synchronised_norms:
                norm.real = real
        if self.global_batch is not None:
            self.global_batch.microbatch(batch.positions)
        first = first_leaf(batch.inputs)
        self.randomness.microbatch(batch.positions, tokens=first.shape[1] if first.ndim > 1 else 0)
        if self.mixes:
            weights = microbatch.weights
            whole = weights.flatten(1).sum(1) if weights.ndim > 1 else weights
            set_auxiliary(self.model, whole, factor(), real=self._real(microbatch), samples=batch.positions)

    def counted(self, batch: Batch) -> Tensor | None:
        """Which samples are no padding, that makes microbatches alike, bool `[samples]`; None: all of them."""
        real = batch.positions >= 0
        return None if bool(real.all()) else real.to(self.device)

    def losses(self, batch: Batch) -> tuple[Any, Tensor]:
        """The whole chain on a prepared batch: its outputs, and the loss of each sample or position."""

        def forward() -> tuple[Any, Tensor]:
            if self.programs is not None:
                return self.programs.evaluated(self.precision.cast(batch.inputs), batch.targets)
            outputs = call_model(self.called, self.precision.cast(batch.inputs))
            losses = self.loss(outputs, batch.targets)
            if self.distillation is not None:
                losses = self.distillation(batch.inputs, outputs, losses)
            return outputs, losses

        with self.coupled(), self.precision.autocast(self.device):
            return self.randomness.forward(forward, take_back=self.buffers.take_back, repeatable=self._repeatable)

    def loss_sum(self, microbatch: Microbatch) -> Tensor:
        """`sum(losses * weights)` of a prepared microbatch, of which a backward follows."""
        batch, programs = microbatch.batch, self.programs
        if self.first:
            self._look_first(batch)
        if programs is None:
            outputs, losses = self.losses(batch)
            self.look(outputs, batch)
            return weighted_sum(losses, batch.weights, ones=microbatch.ones)
        with self.coupled(), self.precision.autocast(self.device):
            inputs = self.precision.cast(batch.inputs)
            return programs.loss_sum(inputs, batch.targets, batch.weights, ones=microbatch.ones)

    def _look_first(self, batch: Batch) -> None:
        with self.coupled(), self.precision.autocast(self.device):
            for look in self.first:
                look(self.precision.cast(batch.inputs))
        self.first.clear()

    def look(self, outputs: Any, batch: Batch) -> None:
        """Shows the outputs of a forward to whoever asked for them, before its backward."""
        for look in self.looks:
            look(outputs, batch.targets, batch.weights, batch.positions)

    def begin_backward(self) -> None:
        """A backward begins, which computes without Python for a while."""
        for begins in self.on_backward:
            begins()

    def coupled(self) -> AbstractContextManager[None]:
        """Around a forward and its loss: `gather_samples` gathers the samples that were announced."""
        return nullcontext() if self.global_batch is None else self.global_batch.current()

    def _repeatable(self) -> bool:
        """Whether a forward meets no other rank."""
        return self.global_batch is None or not self.global_batch.gathered

    def _real(self, microbatch: Microbatch) -> Tensor:
        """Which of this rank's tokens are no padding, `[samples, tokens]`."""
        batch, weights = microbatch.batch, microbatch.weights
        if weights.ndim == 1:
            return counted_tokens(weights, first_leaf(batch.inputs).shape[1])
        real = counted_tokens(weights, weights.shape[1])
        whole = Batch(real, real, weights=weights, positions=batch.positions)
        return first_leaf(self.cut(whole).inputs)

    @cached_property
    def called(self) -> Callable[..., Any]:
        """The model, as it computes under the precision."""
        return self.precision.computing(self.model)

    @cached_property
    def synchronised_norms(self) -> Sequence[SynchronisedBatchNorm]:
        """The model's batch norms over samples of all ranks, which leave made-up samples out."""
        return synchronised_norms(self.model)

    @cached_property
    def mixes(self) -> bool:
        """Whether the model has mixtures of experts."""
        return any(isinstance(module, TakesAuxiliary) for module in self.model.modules())


def frozen_modules(model: nn.Module) -> list[nn.Module]:
    """The modules that a user has put into evaluation mode inside of a model that trains, such as batch norms."""
    return [module for module in model.modules() if not module.training] if model.training else []


def enter_training(model: nn.Module, frozen: Sequence[nn.Module]) -> None:
    """The model in training mode, the `frozen` ones of its modules in evaluation mode."""
    model.train()
    for module in frozen:
        module.training = False


def on_device(batch: Batch, device: torch.device, dtype: torch.dtype) -> Batch:
    """The batch on `device`, its floating inputs and targets in `dtype` at least; wider ones and weights stay."""
    if device.type != "cpu":
        if batch.weighs_ones:  # written there instead of being sent
            batch = replace(batch, weights=torch.ones_like(batch.weights, device=device))
        batch = batch.to(device, non_blocking=True)
    cast = lambda leaf: leaf.to(_at_least(leaf.dtype, dtype)) if leaf.is_floating_point() else leaf  # noqa: E731
    inputs, targets = map_tree(cast, batch.inputs), map_tree(cast, batch.targets)
    if inputs is batch.inputs and targets is batch.targets:
        return batch
    return Batch(inputs, targets, weights=batch.weights, positions=batch.positions)


def _at_least(own: torch.dtype, dtype: torch.dtype) -> torch.dtype:
    return own if torch.finfo(own).bits > torch.finfo(dtype).bits else dtype


# What a rank does with the logits of its part of the model: the loss, and the outputs that accuracy is judged of.


def loss_of_logits(
    loss: Loss, vocabulary: VocabularySplit | None, mesh: Mesh, *, model: nn.Module | None, chunks: int
) -> Loss:
    """`loss` of logits that may be split over `tensor`; `chunks`: over so many parts of the tokens, one by one.

    `model` is this rank's part of it, None where that does not end with the head: its own forward then hands over to
    another rank. Raises `UserCodeError` for a model whose head no one names.
    """
    own = split_loss(loss, vocabulary, mesh.axis("tensor")) if vocabulary is not None else loss
    return own if model is None or chunks == 1 else in_chunks(model, own, chunks)


def compute_gradients_with_losses(compute: Compute) -> None:
    """Where a loss in chunks may do so: of one microbatch after the other, without a teacher and a loss scale."""
    loss = compute.loss
    if not isinstance(loss, ChunkedLoss) or not loss.may_expect:
        return
    if compute.distillation is None and compute.precision.compute is not torch.float16:
        compute.announces.append(loss.expect)


def split_loss(loss: Loss, vocabulary: VocabularySplit, group: Collective) -> Loss:
    """The loss over logits that are split over `group`: cross-entropy as they are, another after gathering them."""

    def of_parts(outputs: Any, targets: Tensor) -> Tensor:
        logits = _logits(outputs)
        if loss is cross_entropy:
            return vocabulary_cross_entropy(logits, targets, split=vocabulary, group=group)
        return loss(with_prediction(outputs, gather_logits(logits, vocabulary, group)), targets)

    return of_parts


def gathered_outputs(vocabulary: VocabularySplit | None, mesh: Mesh) -> Callable[[Any], Any]:
    """Outputs `[samples, classes]`, of which accuracy is judged, over all classes; those of a sequence as they are."""
    if vocabulary is None:
        return as_it_is
    group = mesh.axis("tensor")

    def whole(outputs: Any) -> Any:
        logits = _logits(outputs)
        return with_prediction(outputs, gather_logits(logits, vocabulary, group)) if logits.ndim == 2 else outputs

    return whole


def _logits(outputs: Any) -> Tensor:
    """The logits of a model whose head is split. Raises `UserCodeError` where the outputs do not say which they are."""
    found = prediction_in(outputs)
    if found is None:
        raise UserCodeError(
            f"the model returned {described(outputs)}, and layout.tensor splits its logits: name them 'logits', so "
            "that ranks know what to put together"
        )
    return found
