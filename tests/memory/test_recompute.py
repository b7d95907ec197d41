"""Recomputation changes memory and nothing else."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.errors import UserCodeError
from shoal.memory.recompute import ATTENTION, PRODUCTS, blocks_of, check_recompute, recompute
from shoal.models.batch_norm import GroupedBatchNorm
from shoal.models.build import build, initialise
from shoal.models.config import GPTConfig, MoEConfig
from shoal.models.layers import set_sample_keys

VOCABULARY, BATCH, SEQ = 30, 2, 24


def gpt(kind: Any = "none", *, layers: list[int] | None = None, moe: bool = False, **keys: Any) -> nn.Module:
    sizes = {"vocabulary": VOCABULARY, "layers": 3, "width": 32, "heads": 4, **keys}
    model = build(MoEConfig(balance="none", **sizes) if moe else GPTConfig(**sizes))
    initialise(model, seed=0, device="cpu")
    recompute(model, kind.partition(" ")[0], layers=layers, budget_bytes=int(kind.partition(" ")[2] or 0))
    return model


def tokens(seed: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (BATCH, SEQ), generator=torch.Generator().manual_seed(seed))


def gradients(model: nn.Module, *, documents: Tensor | None = None) -> dict[str, Tensor]:
    """Of two microbatches whose forwards both come before the backwards, as in a pipeline."""
    losses = []
    for microbatch in (0, 1):
        set_sample_keys(model.modules(), torch.arange(BATCH) + BATCH * microbatch)
        losses.append(model(tokens(microbatch), None, documents).logsumexp(-1).square().sum())
    model.eval()  # what comes in between is another mode, and other keys
    set_sample_keys(model.modules(), None)
    for loss in losses:
        loss.backward()
    model.train()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", ["selective", "operators", "full", "budget 60000", "budget 150000", "budget 10000000"])
@pytest.mark.parametrize("keys", [{"dropout": 0.3}, {"kv_heads": 2}, {"moe": True}])
def test_gradients_are_the_same_bits(kind: str, keys: dict[str, Any]) -> None:
    """Though another microbatch with other sample keys went through before the backward, and documents are packed."""
    documents = (torch.arange(SEQ) // 7).expand(BATCH, SEQ)
    wanted = gradients(gpt(**keys), documents=documents)
    found = gradients(gpt(kind, **keys), documents=documents)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], x) for name, x in wanted.items())


@pytest.mark.parametrize("kind", ["selective", "operators", "full", "budget 60000"])
def test_gradients_under_autocast_are_the_same_bits(kind: str) -> None:
    def half(model: nn.Module) -> list[Tensor | None]:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(tokens(0)).float().logsumexp(-1).sum()
        loss.backward()
        return [p.grad for p in model.parameters()]

    for a, b in zip(half(gpt(kind)), half(gpt()), strict=True):
        assert a is not None
        assert b is not None
        assert torch.equal(a, b)


def count_forwards(model: nn.Module) -> list[int]:
    """How often each block's feed-forward and attention core ran in one step."""
    calls: dict[str, int] = {}
    for name, module in model.named_modules():
        if name.endswith(("gate", "core")):
            module.register_forward_hook(lambda *_, name=name: calls.update({name: calls.get(name, 0) + 1}))
    model(tokens(0)).sum().backward()
    return [calls[name] for name in sorted(calls)]


def test_each_kind_repeats_what_it_says_and_the_layers_that_are_named() -> None:
    core_and_gate = {"none": [1] * 6, "full": [2] * 6}
    for kind, wanted in core_and_gate.items():
        assert count_forwards(gpt(kind)) == wanted
    assert count_forwards(gpt("full", layers=[1])) == [1, 1, 2, 2, 1, 1]
    model, runs = gpt("selective", layers=[2]), []
    core = model.get_submodule("blocks.2.attention.core")
    inner = core.forward.inner
    object.__setattr__(core.forward, "inner", lambda *inputs: runs.append(1) or inner(*inputs))
    model(tokens(0)).sum().backward()
    assert len(runs) == 2


def test_names_stay_and_copies_are_their_own() -> None:
    """A copied model recomputes with its own parameters."""
    model = gpt("full")
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in gpt().named_parameters()]
    twin = copy.deepcopy(model)
    twin(tokens(0)).sum().backward()
    assert all(p.grad is None for p in model.parameters())
    assert all(p.grad is not None for p in twin.parameters())


def test_nothing_is_repeated_without_gradients() -> None:
    with torch.no_grad():
        assert torch.equal(gpt("full")(tokens(0)), gpt()(tokens(0)))


class Users(nn.Module):
    """A model of somebody's own, with state that a forward writes and torch's dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3)
        self.body = nn.Sequential(nn.ModuleDict({"first": Users.block(), "second": Users.block()}))
        self.blocks = nn.ModuleList([Users.block(), Users.block()])

    @staticmethod
    def block() -> nn.Module:
        return nn.Sequential(GroupedBatchNorm(4, 2), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Conv2d(4, 4, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


def test_a_users_module_keeps_its_statistics_and_its_random_numbers() -> None:
    """Running statistics count a forward once, and torch's own dropout drops the same."""
    results = []
    for kind in ("none", "full"):
        torch.manual_seed(0)
        model = Users()
        recompute(model, kind)
        model(torch.randn(4, 1, 16, 16)).square().sum().backward()
        results.append([*(p.grad for p in model.blocks.parameters()), *model.buffers()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_blocks_are_the_children_of_lists_or_those_declared() -> None:
    class Declares(Users):
        def recompute_blocks(self) -> list[str]:
            return ["stem"]

    assert list(blocks_of(gpt())) == ["blocks.0", "blocks.1", "blocks.2"]
    assert list(blocks_of(Users())) == ["blocks.0", "blocks.1"]
    assert list(blocks_of(Declares())) == ["stem"]


class Vision(nn.Module):
    """As timm and torchvision have their models: stages of blocks in a sequence, beside a stem without submodules."""

    def __init__(self) -> None:
        super().__init__()
        stage = nn.Sequential(Users.block(), Users.block())
        self.stem, self.stages = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU()), nn.Sequential(nn.Identity(), stage)
        self.layer = nn.Sequential(Users.block(), nn.ReLU(inplace=True))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.stages(self.stem(x)))


def test_blocks_of_a_sequence_are_recomputed_where_there_are_no_lists() -> None:
    """As modules with submodules; gradients and statistics are the same bits."""
    assert list(blocks_of(Vision())) == ["stages.1", "layer.0"]
    assert not blocks_of(nn.Sequential(nn.Linear(1, 1), nn.ReLU()))
    results = []
    for kind in ("none", "full", "operators"):
        torch.manual_seed(0)
        model = Vision()
        recompute(model, kind)
        model(torch.randn(4, 1, 16, 16)).square().sum().backward()
        results.append([*(p.grad for p in model.parameters()), *model.buffers()])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_what_cannot_be_recomputed_is_refused() -> None:
    with pytest.raises(UserCodeError, match=r"Linear has no blocks to recompute: hold them in an nn\.ModuleList"):
        recompute(nn.Linear(1, 1), "full")
    with pytest.raises(UserCodeError, match="layer 3 cannot be recomputed: GPT has 3 blocks, numbered from 0 to 2"):
        gpt("full", layers=[0, 3])
    with pytest.raises(UserCodeError, match=r"no block of Users has a module .* 'full' or 'none'"):
        check_recompute(Users(), "selective")


class Overwrites(nn.Module):
    """Every operator's output is written to in place, inside of its block or behind it."""

    def __init__(self) -> None:
        super().__init__()
        layers = [[nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.Dropout(0.5, inplace=True)]] * 2
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), *copy.deepcopy(block)) for block in layers)
        self.blocks += [nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))] * 2

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).add_(1.0)
        return x


def test_outputs_that_are_written_to_in_place_are_computed_again() -> None:
    """Kept by "operators", they would not be what the product gave."""
    torch.manual_seed(0)
    models, x = [Overwrites()], torch.randn(5, 8)
    models.append(copy.deepcopy(models[0]))
    recompute(models[1], "operators")
    for model in models:
        torch.manual_seed(1)
        model(x).square().sum().backward()
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert torch.equal(a.grad, b.grad)


class CountsProducts(TorchDispatchMode):
    """How many matrix products and attentions run while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.products = self.attentions = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        self.products += name in PRODUCTS
        self.attentions += name in ATTENTION
        return func(*args, **(kwargs or {}))


def test_operators_repeats_every_second_product_and_no_attention() -> None:
    """Of a block's seven products three run again, query, value and gate; `full` repeats six, and attention."""
    ran = {}
    for kind in ("none", "operators", "full"):
        model = gpt(kind)
        with CountsProducts() as count:
            model(tokens(0)).sum().backward()
        ran[kind] = (count.products, count.attentions)
    blocks = 3
    assert ran["operators"] == (ran["none"][0] + 3 * blocks, ran["none"][1])
    assert ran["full"] == (ran["none"][0] + 6 * blocks, ran["none"][1] + blocks)


def test_a_second_backward_through_recomputed_operators_gives_the_same_again() -> None:
    model = gpt("operators")
    loss = model(tokens(0)).logsumexp(-1).sum()
    once = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    twice = torch.autograd.grad(loss, list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(once, twice, strict=True))
