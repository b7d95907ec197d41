"""More mistakes to plant: rank 1 alone computes wrongly, or every rank takes the schedule for another one.

Rank 0 also computes the reference, which has to stay as it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import msgspec
import torch


@contextmanager
def accumulation_overwritten(rank: int) -> Iterator[None]:
    """A microbatch's gradient takes the place of the sum of those before it."""
    from shoal.gradients.reducer import Reducer

    original = Reducer._take

    def forgetful(self: Any, indices: Any) -> None:
        for index in indices:
            if rank and self._all[index].grad is not None and index in self._filled:
                self._home[index].slice(index).zero_()
        original(self, indices)

    with patch.object(Reducer, "_take", forgetful):
        yield


@contextmanager
def silent_rank(rank: int) -> Iterator[None]:
    """Nothing of rank 1 arrives in the sums."""
    with _before_sending(rank, lambda values: values.zero_()):
        yield


@contextmanager
def rounded_to_half(rank: int) -> Iterator[None]:
    """Rank 1 sends its gradients with 8 bits."""
    with _before_sending(rank, lambda values: values.copy_(values.bfloat16())):
        yield


@contextmanager
def signs_alone(rank: int) -> Iterator[None]:
    """Rank 1 sends the signs of its gradients, as large as they are on average."""
    with _before_sending(rank, lambda values: values.copy_(values.sign() * values.abs().mean())):
        yield


@contextmanager
def own_denominator(rank: int) -> Iterator[None]:
    """Rank 1 divides its losses by half of the global denominator."""
    from shoal.engine.tally import PendingTally

    original = PendingTally.wait

    def halved(self: Any) -> Any:
        tally = original(self)
        return replace(tally, denominator=tally.denominator / 2) if rank else tally

    with patch.object(PendingTally, "wait", halved):
        yield


@contextmanager
def norm_unsummed_in_sequence(rank: int) -> Iterator[None]:
    """A norm that works on slices of the sequence keeps the gradient of its own slice."""
    from tests.verification.planted import _holding_of

    with _holding_of("blocks.0.attention_norm.weight", lambda h: replace(h, inside=(h.rank,), across=(h.rank,))):
        yield


@contextmanager
def tied_head_forgotten(rank: int) -> Iterator[None]:
    """The first stage and the last have one matrix, and each sums only its own gradient of it."""
    from tests.verification.planted import _holding_of

    with _holding_of("embedding.weight", lambda h: replace(h, inside=(h.rank,), across=(h.rank,))):
        yield


@contextmanager
def inputs_rounded(rank: int) -> Iterator[None]:
    """Inputs of float64 go through float32 on rank 1."""
    from shoal.data.sample import map_tree

    def rounded(leaf: Any) -> Any:
        return leaf.float().double() if leaf.dtype == torch.float64 else leaf

    with _batches(rank, lambda batch: replace(batch, inputs=map_tree(rounded, batch.inputs))):
        yield


@contextmanager
def loss_scale_left_in(rank: int) -> Iterator[None]:
    """The update takes the gradient of the scaled loss."""
    from shoal.engine import updates

    original = updates.AgreedGradient
    with patch.object(updates, "AgreedGradient", lambda gradients, norm, **others: original(gradients, norm)):
        yield


@contextmanager
def statistics_not_committed(rank: int) -> Iterator[None]:
    """Rank 1 leaves the running statistics where they were."""
    from shoal.models.batch_norm import GroupedBatchNorm

    original = GroupedBatchNorm.commit_sums

    def committed(self: Any, total: Any) -> None:
        original(self, total) if rank == 0 else self.discard_sums()

    with patch.object(GroupedBatchNorm, "commit_sums", committed):
        yield


@contextmanager
def teacher_frozen(rank: int) -> Iterator[None]:
    """On rank 1 the teacher does not follow."""
    from tests.verification.foreign_models import Distilled

    original = Distilled.forward

    def frozen(self: Any, tokens: Any) -> Any:
        self.training = self.training and not rank
        return original(self, tokens)

    with patch.object(Distilled, "forward", frozen):
        yield


@contextmanager
def power_iteration_twice(rank: int) -> Iterator[None]:
    """Rank 1 computes the spectral norm twice in every forward."""
    from tests.verification.foreign_models import Spectral

    original = Spectral.forward

    def twice(self: Any, tokens: Any) -> Any:
        if rank:
            with torch.no_grad():
                original(self, tokens)
        return original(self, tokens)

    with patch.object(Spectral, "forward", twice):
        yield


@contextmanager
def warmup_left_out(rank: int) -> Iterator[None]:
    """Every rank begins at the peak."""
    with _schedule(lambda schedule, steps: (msgspec.structs.replace(schedule, warmup_steps=0), steps)):
        yield


@contextmanager
def decays_twice_as_long(rank: int) -> Iterator[None]:
    """Every rank takes the run for twice as long."""
    with _schedule(lambda schedule, steps: (schedule, 2 * steps)):
        yield


@contextmanager
def moments_forgotten(rank: int) -> Iterator[None]:
    """Rank 1's optimizer begins anew in every step."""
    with _before_update(rank, lambda optimizer: optimizer.state.clear()):
        yield


@contextmanager
def scales_of_other_blocks(rank: int) -> Iterator[None]:
    """Rank 1 keeps moments in 8 bits, each block with the scale of the one before it."""
    from shoal.codec.moments import Quantised
    from shoal.optim.adamw_8bit import EightBitAdamW

    original = EightBitAdamW.update

    def mistaken(self: Any, group: Any, parameters: Any, gradients: Any) -> None:
        original(self, group, parameters, gradients)
        for held in (value for parameter in parameters for value in self.state[parameter].values()):
            if rank and isinstance(held, Quantised):
                held.scales.copy_(held.scales.roll(1))

    with patch.object(EightBitAdamW, "update", mistaken):
        yield


@contextmanager
def bias_correction_left_out(rank: int) -> Iterator[None]:
    """Rank 1's optimizer believes to have taken a thousand steps."""

    def older(optimizer: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = optimizer.state[parameter]
                if "step" in state:
                    state["step"] += 1000

    with _before_update(rank, older):
        yield


@contextmanager
def updated_twice(rank: int) -> Iterator[None]:
    """Rank 1 takes every step twice."""
    with _before_update(rank, lambda optimizer: optimizer.step()):
        yield


@contextmanager
def dropout_left_out(rank: int) -> Iterator[None]:
    """Rank 1 drops nothing."""
    from shoal.models.layers import KeyedDropout

    original = KeyedDropout.forward

    def whole(self: Any, x: Any, positions: Any = None) -> Any:
        return x if rank else original(self, x, positions)

    with patch.object(KeyedDropout, "forward", whole):
        yield


@contextmanager
def masks_of_the_step_before(rank: int) -> Iterator[None]:
    """Rank 1's user module draws what belongs to no sample as one step earlier."""
    from shoal.models.keyed_draws import KeyedDraws

    original = KeyedDraws.begin

    def earlier(self: Any, step: int, keys: Any, **others: Any) -> None:
        original(self, step - rank, keys, **others)

    with patch.object(KeyedDraws, "begin", earlier):
        yield


@contextmanager
def masks_of_the_first_part(rank: int) -> Iterator[None]:
    """Behind a split layer rank 1 draws the masks of rank 0's features."""
    from shoal.models.sample_places import Extent

    original = Extent.__init__

    def first(self: Any, places: Any, whole: int) -> None:
        original(self, places - places.min() if rank else places, whole)

    with patch.object(Extent, "__init__", first):
        yield


@contextmanager
def gates_unnormalised(rank: int) -> Iterator[None]:
    """On rank 1 the weights of the chosen experts do not add up to 1."""
    from shoal.models.router import Router

    original = Router.gates

    def raw(self: Any, scores: Any, chosen: Any) -> Any:
        return scores.gather(-1, chosen) if rank else original(self, scores, chosen)

    with patch.object(Router, "gates", raw):
        yield


@contextmanager
def balance_moves_twice(rank: int) -> Iterator[None]:
    """Rank 1's router moves its bias twice as far."""
    from shoal.models.router import Router

    original = Router.commit_sums

    def twice(self: Any, total: Any) -> None:
        original(self, total)
        if rank:
            loads = total[:-1]
            self.bias += self.bias_rate * torch.sign(loads.mean() - loads).to(self.bias.dtype)

    with patch.object(Router, "commit_sums", twice):
        yield


@contextmanager
def expert_forgotten(rank: int) -> Iterator[None]:
    """On rank 1 the last expert answers with zeros."""
    from shoal.models.mixture import Experts

    original = Experts.forward

    def without(self: Any, rows: Any, counts: Any) -> Any:
        out = original(self, rows, counts)
        kept = torch.arange(len(out)) < len(out) - int(counts[-1])
        return out * kept[:, None] if rank else out

    with patch.object(Experts, "forward", without):
        yield


@contextmanager
def clip_left_out(rank: int) -> Iterator[None]:
    """No gradient is clipped."""
    with _clip(lambda limit: math.inf):
        yield


@contextmanager
def clip_of_one_rank(rank: int) -> Iterator[None]:
    """Rank 1 clips to another norm."""
    with _clip(lambda limit: limit * (1 + rank)):
        yield


@contextmanager
def order_of_another_seed(rank: int) -> Iterator[None]:
    """Rank 1 draws its own order of the samples."""
    with _ids(lambda original, order, positions: original(replace(order, seed=order.seed + rank), positions)):
        yield


@contextmanager
def sample_repeated(rank: int) -> Iterator[None]:
    """Rank 1 takes every other sample twice, and those between never."""

    def repeated(original: Any, order: Any, positions: Any) -> Any:
        ids = original(order, positions)
        if rank:
            ids[1::2] = ids[: len(ids) // 2 * 2 : 2]
        return ids

    with _ids(repeated):
        yield


@contextmanager
def order_of_the_epoch_before(rank: int) -> Iterator[None]:
    """Rank 1 does not draw a new order when an epoch is over."""
    with _ids(lambda original, order, positions: original(order, positions % order.samples if rank else positions)):
        yield


@contextmanager
def targets_shifted(rank: int) -> Iterator[None]:
    """Rank 1 predicts the token that it has, and not the next."""
    from shoal.data.sample import map_tree

    with _batches(rank, lambda batch: replace(batch, targets=map_tree(lambda leaf: leaf.roll(1, -1), batch.targets))):
        yield


@contextmanager
def weight_of_padding(rank: int) -> Iterator[None]:
    """Rank 1's loss does not count its last position."""

    def uncounted(batch: Any) -> Any:
        weights = batch.weights.clone()
        weights[:, -1:] = 0
        return replace(batch, weights=weights)

    with _batches(rank, uncounted):
        yield


@contextmanager
def _before_sending(rank: int, change: Any) -> Iterator[None]:
    """`change` of rank 1's own gradients, parameter by parameter, before they are summed."""
    from shoal.gradients.reducer import Reducer

    original = Reducer._send

    def changed(self: Any, bucket: Any) -> None:
        for index in bucket.indices if rank else ():
            change(bucket.slice(index))
        original(self, bucket)

    with patch.object(Reducer, "_send", changed):
        yield


@contextmanager
def _before_update(rank: int, act: Any) -> Iterator[None]:
    from shoal.engine.updates import AtOnce

    original = AtOnce.agree

    def agreed(self: Any, *inputs: Any, **named: Any) -> Any:
        found = original(self, *inputs, **named)
        if rank and found.committed:
            act(self._optimizer)
        return found

    with patch.object(AtOnce, "agree", agreed):
        yield


@contextmanager
def _batches(rank: int, change: Any) -> Iterator[None]:
    """`change` of rank 1's microbatches."""
    from shoal.engine import compute

    original = compute.on_device

    def changed(batch: Any, *others: Any) -> Any:
        found = original(batch, *others)
        return change(found) if rank else found

    with patch.object(compute, "on_device", changed):
        yield


@contextmanager
def _schedule(change: Any) -> Iterator[None]:
    from shoal.assembly import run

    original = run.rate

    def changed(schedule: Any, peak: float, *, step: int, steps: int) -> float:
        schedule, steps = change(schedule, steps)
        return original(schedule, peak, step=step, steps=steps)

    with patch.object(run, "rate", changed):
        yield


@contextmanager
def _clip(change: Any) -> Iterator[None]:
    from shoal.assembly import train_step

    original = train_step.clip_by_global_norm
    with patch.object(train_step, "clip_by_global_norm", lambda limit: original(change(limit))):
        yield


@contextmanager
def _ids(change: Any) -> Iterator[None]:
    from shoal.data.order import Order

    original = Order.ids
    with patch.object(Order, "ids", lambda self, positions: change(original, self, positions)):
        yield
