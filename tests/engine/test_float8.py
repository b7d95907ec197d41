"""Linear layers in float8: which are replaced, how near the results stay, and where they are refused."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import nn

from shoal.engine import precision
from shoal.engine.config import BFloat16, Float8
from shoal.engine.precision import use_float8
from shoal.errors import EnvironmentFault, MissingExtra, UserCodeError
from shoal.models.config import GPTConfig
from shoal.models.gpt import GPT

CPU = torch.device("cpu")
NEAR = 0.1  # relative; e4m3 keeps 4 bits: each factor is off by up to 1/16, and sums average it out
installed = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="pip install 'shoal[float8]'")


class Blocks(nn.Module):
    """Two blocks, one of whose sizes float8 cannot multiply, and a head."""

    def __init__(self, *, width: int = 64) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(width, width), nn.Linear(width, 24), nn.Linear(24, width)])
        self.head = nn.Linear(width, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.relu(block(x))
        return self.head(x)


def test_another_kind_changes_nothing() -> None:
    """No torchao is asked for."""
    model = Blocks()
    use_float8(model, BFloat16(), device=CPU)
    assert {type(module) for module in model.modules() if isinstance(module, nn.Linear)} == {nn.Linear}


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence, before anything is changed."""
    monkeypatch.setattr(precision.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"\[float8\]"):
        use_float8(Blocks(), Float8(), device=CPU)


@installed
def test_a_device_without_float8_is_refused() -> None:
    """A CPU; the sentence offers bfloat16 and emulation."""
    with pytest.raises(EnvironmentFault, match=r"bfloat16.*emulate"):
        use_float8(Blocks(), Float8(), device=CPU)


@installed
def test_a_model_without_blocks_is_refused() -> None:
    """Whose linear layers stand alone, or have sizes that are no multiples of 16."""
    for model in (nn.Linear(64, 64), Blocks(width=40)):
        with pytest.raises(UserCodeError, match="multiples of 16"):
            use_float8(model, Float8(emulate=True), device=CPU)


@installed
def test_layers_of_blocks_are_replaced_and_keep_their_parameters() -> None:
    """The head and the layers of 24 features stay; names and parameters are the same objects."""
    model = Blocks()
    before = dict(model.named_parameters())
    use_float8(model, Float8(emulate=True), device=CPU)
    replaced = {name for name, module in model.named_modules() if type(module).__name__ == "Float8Linear"}
    assert replaced == {"blocks.0"}
    after = dict(model.named_parameters())
    assert before.keys() == after.keys()
    assert all(before[name] is after[name] for name in before)


@installed
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_float8_follows_float32(recipe: str) -> None:
    """A GPT's loss and gradients are near those of float32, and not the same."""
    found = {}
    for config in (BFloat16(), Float8(recipe=recipe, emulate=True)):  # type: ignore[arg-type]
        torch.manual_seed(0)
        model = GPT(GPTConfig(vocabulary=64, layers=2, width=64, heads=2, feed_forward_width=128))
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.1)
        use_float8(model, config, device=CPU)
        tokens = torch.randint(0, 64, (4, 32))
        logits = model(tokens)
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
        found[type(config)] = [logits.detach(), *(parameter.grad for parameter in model.parameters())]
    for plain, small in zip(found[BFloat16], found[Float8], strict=True):
        assert 0 < torch.linalg.vector_norm(plain - small) < NEAR * torch.linalg.vector_norm(plain)
