"""Precision and the scale of the loss."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from shoal.engine.config import BFloat16, BFloat16Params, Float16, Float64
from shoal.engine.precision import LossScaler, cast_at_borders, precision_of, scaler_of
from shoal.gradients.masters import MixedPrecision
from tests.engine.same_math import Case, alone, trajectory

COARSE = 0.02  # relative; bfloat16 keeps 8 bits, float16 11


def test_a_dynamic_scale_halves_and_doubles() -> None:
    """An overflow halves it, never below 1; enough finite steps in a row double it; the count survives a resume."""
    scaler = LossScaler(4.0, dynamic=True, growth_steps=3)
    scaler.update(finite=False)
    assert scaler.scale == 2
    for _ in range(2):
        scaler.update(finite=True)
    resumed = LossScaler(1.0, dynamic=True, growth_steps=3)
    resumed.load(scaler.to_state())
    resumed.update(finite=True)
    assert resumed.scale == 4
    for _ in range(9):
        resumed.update(finite=False)
    assert resumed.scale == 1


def test_a_fixed_scale_stays() -> None:
    """An explicit scale is not touched, whatever happens."""
    scaler = scaler_of(Float16(loss_scale=128.0))
    scaler.update(finite=False)
    assert scaler.scale == 128


def test_a_model_under_bfloat16_params_computes_in_bfloat16_alone() -> None:
    """Called with its float32 weights rounded, on rounded inputs, without autocast; gradients come back in float32."""
    precision, model = precision_of(BFloat16Params()), nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    inputs = precision.cast({"x": torch.randn(2, 3), "n": torch.arange(2)})
    assert inputs["n"].dtype == torch.int64
    with precision.autocast(torch.device("cpu")):
        found = precision.computing(model)(inputs["x"])
    low = copy.deepcopy(model).bfloat16()
    assert torch.equal(found, low(inputs["x"]))
    found.sum().backward()
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
    assert precision.computing(low) is low


def test_borders_cast_what_a_script_hands_over_and_gets() -> None:
    """As FSDP2's `cast_forward_inputs` and `output_dtype`; a model without its hooks computes as before."""
    model = nn.Linear(3, 1).bfloat16()
    hooks = cast_at_borders(model, MixedPrecision(torch.bfloat16))
    assert model(torch.randn(2, 3)).dtype == torch.float32
    for hook in hooks:
        hook.remove()
    assert model(torch.randn(2, 3).bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("config", [BFloat16(), Float16(), Float16(loss_scale=1024.0)])
def test_half_precision_follows_float32(ranks, config) -> None:
    """Losses of a few steps on one and two ranks stay near float32's; gradients are unscaled; weights stay float32."""
    want = alone(Case(clip_norm=None))
    for losses, norms, weights in [
        alone(Case(precision=config, clip_norm=None)),
        *ranks(2, trajectory, Case(precision=config, clip_norm=None), None),
    ]:
        assert losses == pytest.approx(want[0], rel=COARSE)
        assert norms == pytest.approx(want[1], rel=5 * COARSE)
        assert all(tensor.dtype == torch.float32 for tensor in weights.values())


def test_an_overflow_is_skipped_and_the_scale_shrinks() -> None:
    """A scale that overflows float16 costs skipped steps, not the run."""
    losses, norms, _ = alone(Case(precision=Float16(initial_scale=2.0**40), clip_norm=None, steps=30))
    assert norms[0] == float("inf") or norms[0] != norms[0]
    assert losses[-1] < losses[0]


def test_float64_is_float64_throughout() -> None:
    """Parameters are stored in float64, and nothing is autocast."""
    precision = precision_of(Float64())
    assert precision.parameters == torch.float64
    assert precision.compute is None


def test_a_saved_scale_does_not_override_the_run_file() -> None:
    """A fixed scale stays what the file says when the saved run had a dynamic one, and the other way round."""
    dynamic, fixed = LossScaler(64.0, dynamic=True, growth_steps=3), LossScaler(1024.0, dynamic=False, growth_steps=1)
    fixed.load(dynamic.to_state())
    assert fixed.scale == 1024
    dynamic.load(fixed.to_state())
    assert dynamic.scale == 64
