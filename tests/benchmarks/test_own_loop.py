"""Sides of one process do not hold each other up."""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from benchmarks.loop_scripts import by_itself
from benchmarks.models_of_others import MODELS, Samples
from shoal.engine.randomness import Randomness
from shoal.models.keyed_draws import KeyedDraws, active_draws


def test_an_own_loop_waits_without_the_mode_that_keys_its_draws() -> None:
    """It is there in each of its steps, and for nobody else on its thread."""
    model, seen = nn.Linear(2, 2), []
    draws = KeyedDraws(model, seed=0)
    run: Any = SimpleNamespace(
        step=SimpleNamespace(compute=SimpleNamespace(randomness=Randomness(model, seed=0, replica=0, draws=draws)))
    )

    def step() -> float:
        if not draws.in_loop:
            draws.enter_loop()
        seen.append(active_draws())
        return 0.0

    with ExitStack() as stack:
        alone = by_itself(step, run, stack)
        for _ in range(2):
            alone()
            assert active_draws() is None
    assert seen == [draws, draws]
    assert active_draws() is None
    assert not draws.in_loop


def test_models_of_no_package_take_their_samples() -> None:
    """The loss of a batch is finite and has a gradient for every parameter."""
    for name in ("unet", "vae", "lstm", "recommender"):
        other = MODELS[name]
        batch = torch.utils.data.default_collate([Samples(other.draw)[index] for index in range(2)])
        model = other.new()
        loss = other.loss(model, batch)
        loss.backward()
        assert loss.isfinite()
        assert all(parameter.grad is not None for parameter in model.parameters()), name
