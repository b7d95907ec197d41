"""The multi-layer perceptron."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shoal.models.build import build, initialise
from shoal.models.config import MLPConfig
from shoal.models.roles import roles_of


def mlp(**keys: object) -> nn.Module:
    with torch.device("meta"):
        model = build(MLPConfig(**keys))  # type: ignore[arg-type]
    initialise(model, seed=0, device="cpu")
    return model


@pytest.mark.parametrize("activation", ["relu", "gelu", "tanh"])
def test_it_is_the_chain_of_its_layers(activation: str) -> None:
    """Linear layers with the activation between them and none at the end; inputs are flattened."""
    model = mlp(inputs=12, hidden=(7, 5), outputs=3, activation=activation)
    between = {"relu": nn.ReLU(), "gelu": nn.GELU(), "tanh": nn.Tanh()}[activation]
    one, two, three = model.layers  # type: ignore[misc]
    x = torch.randn(4, 3, 4, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model(x), three(between(two(between(one(x.flatten(1)))))))


def test_without_hidden_layers_it_is_linear() -> None:
    """An empty `hidden` is one linear map."""
    model = mlp(inputs=4, hidden=(), outputs=2)
    x, y = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model(x) - model(y), model(x - y) - model(torch.zeros(3, 4)))


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_split_outputs_always_meet_split_inputs(depth: int) -> None:
    """Weights alternate between column and row, a lone last one is the head; a row's bias is added once."""
    roles = roles_of(mlp(inputs=4, hidden=(8,) * depth, outputs=2))
    weights = [roles[f"layers.{index}.weight"].kind for index in range(depth + 1)]
    biases = [roles[f"layers.{index}.bias"].kind for index in range(depth + 1)]
    assert weights == [["head"], ["column", "row"], ["column", "row", "head"], ["column", "row"] * 2][depth]
    assert biases == ["bias" if kind == "row" else kind for kind in weights]


@pytest.mark.parametrize("activation", ["relu", "gelu", "tanh"])
def test_depth_neither_drowns_nor_bursts_the_signal(activation: str) -> None:
    """After ten layers a unit input still has outputs between a tenth and ten."""
    model = mlp(inputs=256, hidden=(256,) * 10, outputs=256, activation=activation)
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    assert 0.1 < model(x).std().item() < 10


def test_whole_numbers_are_numbers() -> None:
    """JSON and parquet have features without a point; they give what the same floating-point numbers give."""
    model, x = mlp(inputs=2, hidden=(3,), outputs=2), torch.tensor([[1, 2], [3, 4]])
    torch.testing.assert_close(model(x), model(x.float()))
