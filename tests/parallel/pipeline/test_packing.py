"""Activations and gradients between stages in fewer bits: how far off they are, and that nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.codec.config import BlockwiseConfig, CastConfig
from shoal.codec.quantise import Blockwise, Cast
from shoal.parallel.pipeline.packing import AS_IT_IS, Form, Packing, StageCodec
from shoal.parallel.pipeline.stages import balanced_cut, estimated_costs, staged
from shoal.schedules.build import build
from tests.parallel.pipeline import chains
from tests.parallel.pipeline.test_execute import SYNCHRONOUS, Case, close, pipeline_of, run_case, takes
from tests.ranks import TestPlace

BLOCK = 8
"""Short, so that the small activations of the chains have several blocks."""
ROUNDING = 1 + 1e-3
"""Of scales and of products, in the dtype of the numbers."""
CPU = torch.device("cpu")


def packing_of(kind: str) -> Packing:
    """One of each, with its bound on the error where there is one."""
    if kind == "int8":
        return StageCodec(Blockwise(BlockwiseConfig(block=BLOCK, feedback=False)))
    return StageCodec(Cast(CastConfig(feedback=False))) if kind == "bfloat16" else AS_IT_IS


def passed(packing: Packing, tensor: Tensor) -> Tensor:
    """What the other end gets."""
    form, packed = Form.of(tensor, stage=0), packing.packed(tensor)
    buffer = packing.buffer(form, CPU)
    assert (packed.dtype, packed.numel()) == (buffer.dtype, buffer.numel())
    return packing.unpacked(buffer.copy_(packed), form)


SHAPES = ((3, 5, 16), (1,), (7,), (0, 4), (2, 33))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["int8", "bfloat16", "as it is"])
def test_the_error_is_within_the_stated_bound(kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """int8: 1/254 of the block's largest; bfloat16: 1/256 of the number. Form and dtype stay; strides do not matter."""
    made = torch.Generator().manual_seed(3)
    tensor = (torch.randn(*shape[::-1], generator=made) * 5).to(dtype).permute(*range(len(shape) - 1, -1, -1))
    found = passed(packing_of(kind), tensor)
    assert (found.shape, found.dtype) == (tensor.shape, tensor.dtype)
    if kind == "as it is":
        assert torch.equal(found, tensor)
        return
    x, y = tensor.double().reshape(-1), found.double().reshape(-1)
    if kind == "bfloat16":
        bound = x.abs() / 256
    else:
        blocks = torch.nn.functional.pad(x, (0, -len(x) % BLOCK)).view(-1, BLOCK)
        bound = (blocks.abs().amax(1, keepdim=True) / 254).expand_as(blocks).reshape(-1)[: len(x)]
    own = x.abs() * torch.finfo(dtype).eps  # what was decoded is rounded to the dtype of the tensor
    assert bool(((x - y).abs() <= bound * ROUNDING + own).all())


@pytest.mark.parametrize("kind", ["int8", "bfloat16"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(kind: str, value: float) -> None:
    """A stage that overflows is seen by all stages behind it."""
    tensor = torch.ones(40)
    tensor[17] = value
    assert not bool(torch.isfinite(passed(packing_of(kind), tensor)).all())


def test_a_coded_tensor_is_a_quarter() -> None:
    """Of float32 in 8 bits, and a scale of 4 bytes for each block; bfloat16 is a half."""
    form = Form((4, 64), torch.float32, differentiable=True)
    assert packing_of("int8").buffer(form, CPU).nbytes == 256 + 4 * 256 // BLOCK
    assert packing_of("bfloat16").buffer(form, CPU).nbytes == 512


class _Through(torch.autograd.Function):
    """Straight-through: what is computed with is coded, and so is the gradient on its way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packing: Packing) -> Tensor:
        ctx.packing = packing
        return passed(packing, x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return passed(ctx.packing, gradients[0]), None


def one_process(case: Case, ranks: int, packing: Packing) -> tuple[float, dict[str, Tensor]]:
    """The oracle: one stage after the other, coded where two ranks would meet."""
    kind, schedule, microbatches, per_rank = case
    table = build(schedule, ranks=ranks, microbatches=microbatches, stages_per_rank=per_rank)
    whole, batch, total = chains.model(kind), chains.data(kind, microbatches), 0.0
    stages = staged(whole, balanced_cut(estimated_costs(whole, whole.parts()), table.stages), table.placement)
    for microbatch, inputs in enumerate(batch.inputs):
        x, context = None, whole.context(inputs)
        for stage in range(table.stages):
            x = stages.forward(stage, x, context)
            if stage < table.last_stage and table.placement[stage] != table.placement[stage + 1]:
                x = _Through.apply(x, packing)
        assert x is not None
        loss = batch.loss(x, microbatch)
        loss.backward()
        total += loss.item()
    return total, {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}


def compare(place: TestPlace, cases: list[Case], kind: str) -> list[str]:
    """What differs from the oracle on this rank; that it is coded at all is part of it."""
    group, packing, wrong = pipeline_of(place), packing_of(kind), []
    for case in cases:
        loss, expected = one_process(case, group.size, packing)
        _, exact = chains.one_process(case[0], case[2])
        result, gradients = run_case(group, case, packing=packing)
        if all(close(gradient, exact[name]) for name, gradient in expected.items()):
            wrong.append(f"{case}: the oracle codes nothing")
        if result.loss is not None and abs(result.loss.item() - loss) > 1e-12 * abs(loss):
            wrong.append(f"{case}: loss {result.loss.item()} for {loss}")
        wrong += [f"{case}: {name}" for name, g in gradients.items() if not close(g, expected[name])]
    return wrong


EVERY: list[Case] = [("perceptron", name, takes(name, 3, 2), None) for name in SYNCHRONOUS]
MORE: list[Case] = [("tied gpt", name, 4, None) for name in ("1F1B", "DualPipeV")]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "bfloat16"])
def test_every_schedule_computes_what_straight_through_coding_means(ranks, kind: str) -> None:
    """Loss and every gradient, float64: those of one process that codes wherever two ranks would meet."""
    for wrong in ranks(2, compare, [*EVERY, *MORE], kind):
        assert wrong == []
