"""Roles of parameters."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from shoal.errors import UserCodeError
from shoal.models.build import build
from shoal.models.config import BuiltInModel, ConvNetConfig, GPTConfig, MLPConfig
from shoal.models.roles import ONES, ZEROS, Normal, Role, role_of, roles_of

CONFIGS: list[BuiltInModel] = [
    GPTConfig(),
    GPTConfig(feed_forward="gelu", kv_heads=2, tied=True),
    ConvNetConfig(),
    ConvNetConfig(norm="batch"),
    MLPConfig(inputs=12, hidden=(8, 8), outputs=3),
]


@pytest.mark.parametrize("config", CONFIGS)
def test_every_parameter_of_our_models_has_a_role_and_a_first_value(config: BuiltInModel) -> None:
    """No parameter is forgotten, all can be drawn, and decay is for two dimensions or more, no less and no more."""
    with torch.device("meta"):
        model = build(config)
    roles = roles_of(model)
    assert list(roles) == [name for name, _ in model.named_parameters()]
    for name, parameter in model.named_parameters():
        assert roles[name].init is not None
        assert roles[name].decay == (parameter.ndim >= 2), name
        assert roles[name] == role_of(model, name)


def test_a_gpt_declares_what_tensor_parallelism_needs() -> None:
    """Query, key, value, gate and up split their outputs; output and down their inputs; the vocabulary splits."""
    with torch.device("meta"):
        roles = roles_of(build(GPTConfig(layers=2)))
    kinds = {name: role.kind for name, role in roles.items()}
    for name in ("attention.query", "attention.key", "attention.value", "feed_forward.gate", "feed_forward.up"):
        assert kinds[f"blocks.1.{name}.weight"] == "column"
    for name in ("attention.output", "feed_forward.down"):
        assert kinds[f"blocks.1.{name}.weight"] == "row"
        assert roles[f"blocks.1.{name}.weight"].init == Normal(0.02 / 2)
    assert (kinds["embedding.weight"], kinds["head.weight"], kinds["norm.weight"]) == ("embedding", "head", "norm")


def test_a_users_module_is_replicated_and_keeps_its_values() -> None:
    """A module that declares nothing: kind replicated, no law, decay from two dimensions on."""
    roles = roles_of(nn.Linear(3, 2))
    assert roles == {"weight": Role("replicated", None, decay=True), "bias": Role("replicated", None, decay=False)}
    assert role_of(nn.Linear(3, 2), "bias") == roles["bias"]


class Forgetful(nn.Linear):
    def parameter_roles(self) -> dict[str, Role]:
        return {"b*": Role("bias", ZEROS, decay=False), "bias": Role("norm", ONES, decay=True)}


def test_a_forgotten_parameter_and_an_unknown_name_are_refused() -> None:
    """A model that declares roles declares all; the error names the parameter. The first fitting pattern decides."""
    with pytest.raises(UserCodeError, match="says nothing of the parameter 'weight'"):
        roles_of(Forgetful(3, 2))
    assert role_of(Forgetful(3, 2), "bias").kind == "bias"
    with pytest.raises(UserCodeError, match="has no parameter 'wait'"):
        role_of(Forgetful(3, 2), "wait")


def test_a_tied_head_is_one_parameter_with_two_names() -> None:
    """It is listed once, as the embedding, and found by either name."""
    with torch.device("meta"):
        model = build(GPTConfig(tied=True))
    assert "head.weight" not in roles_of(model)
    assert role_of(model, "head.weight").kind == "head"


@pytest.mark.slow
def test_training_a_table_warns_of_nothing() -> None:
    """PyTorch warns, once a process, of sparse tensors that nobody said whether to check."""
    code = (
        "import shoal, torch\n"
        "table = shoal.EmbeddingTable(5, 2)\n"
        "optimizer = torch.optim.Adagrad(table.parameters())\n"
        "table(torch.tensor([1, 2])).sum().backward()\n"
        "optimizer.step()\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)
