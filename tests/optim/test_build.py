"""Optimizers against their plain PyTorch twins, and their state as named tensors."""

from __future__ import annotations

import copy

import msgspec
import pytest
import torch
from torch import nn

from shoal.errors import ConfigError, UsageError
from shoal.optim.build import build_optimizer, layer_rates, part_of, set_rate
from shoal.optim.config import SGD, AdamW, AdamW8bit
from shoal.optim.declared import Group
from shoal.optim.kinds import LAMB, Lion, NAdam
from shoal.optim.matrix_kinds import SOAP, Muon
from shoal.optim.slots import make_slots, named_slots, pack_slots

ROUNDING = 1e-6  # fused and unfused kernels differ in the order of operations
LOW = 1e-4
"""A rate at which all optimizers descend."""


def net(width: int = 8) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), nn.LayerNorm(width), nn.Linear(width, 2))


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        optimizer.zero_grad()
        model(torch.randn(5, 4, generator=generator)).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("config", "plain"),
    [
        (AdamW(lr=0.01, weight_decay=0.3), lambda g: torch.optim.AdamW(g, lr=0.01, betas=(0.9, 0.95), foreach=False)),
        (
            SGD(lr=0.01, weight_decay=0.3, momentum=0.9),
            lambda g: torch.optim.SGD(g, lr=0.01, momentum=0.9, foreach=False),
        ),
    ],
)
def test_matrices_decay_and_the_rest_does_not(config, plain) -> None:
    """Five steps equal PyTorch's unfused optimizer whose groups were made by hand."""
    ours, theirs = net(), net()
    steps(ours, build_optimizer(config, [(n, p, p.ndim > 1) for n, p in ours.named_parameters()], lr=config.lr), 5)
    groups = [
        {"params": [p for p in theirs.parameters() if p.ndim > 1], "weight_decay": 0.3},
        {"params": [p for p in theirs.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    steps(theirs, plain(groups), 5)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.parametrize(
    "config",
    [
        AdamW(lr=0.01),
        SGD(lr=0.01, momentum=0.9),
        SGD(lr=0.01),
        AdamW8bit(lr=0.01),
        AdamW8bit(lr=0.01, groups={"0.*": Group(kind="adamw"), "1.*": Group(kind="lion")}),
        AdamW8bit(lr=0.01, groups={"0.*": Group(kind="lion", lr=1e-3)}),
    ],
)
def test_a_state_that_was_saved_and_loaded_goes_on_bitwise(config) -> None:
    """Slots read out by name and filled into a fresh optimizer continue as if nothing had happened."""
    going_on = net(AdamW8bit.least_numbers // 2)
    first = build_optimizer(config, [(n, p, True) for n, p in going_on.named_parameters()], lr=LOW)
    set_rate(first, LOW)
    steps(going_on, first, 3)
    resumed = copy.deepcopy(going_on)
    second = build_optimizer(config, [(n, p, True) for n, p in resumed.named_parameters()], lr=0.5)
    set_rate(second, LOW)
    saved = {name: tensor.clone() for name, tensor in named_slots(first, going_on.named_parameters()).items()}
    made = make_slots(
        second, resumed.named_parameters(), {name: t.dtype for name, t in saved.items()}, slots=config.all_slots
    )
    assert made.keys() == saved.keys()
    for name, tensor in made.items():
        tensor.copy_(saved[name])
    pack_slots(second)
    for model, optimizer in ((going_on, first), (resumed, second)):
        steps(model, optimizer, 3)
    assert all(torch.equal(a, b) for a, b in zip(going_on.parameters(), resumed.parameters(), strict=True))


@pytest.mark.parametrize("config", [AdamW(lr=0.01), SGD(lr=0.01, momentum=0.9)])
def test_a_rank_without_parameters_has_an_optimizer(config) -> None:
    """Its rate can be set and its step does nothing: what a rank whose piece is empty needs."""
    optimizer = build_optimizer(config, [], lr=0.01)
    set_rate(optimizer, 0.5)
    optimizer.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.5]


def test_groups_by_pattern_have_rates_and_decays_of_their_own() -> None:
    """The first pattern that fits decides; what none fits is the optimizer's. A schedule's rate is multiplied."""
    model = net()
    groups = {"0.*": Group(rate=0.5), "*.bias": Group(weight_decay=0.2), "2.*": Group(rate=9.0)}
    config = SGD(lr=0.01, weight_decay=0.3, groups=groups)
    optimizer = build_optimizer(config, [(n, p, p.ndim > 1) for n, p in model.named_parameters()], lr=0.01)
    set_rate(optimizer, 0.1)
    names = {id(p): n for n, p in model.named_parameters()}
    found = {names[id(p)]: (g["lr"], g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]}
    assert found == {
        "0.weight": (0.05, 0.3),
        "0.bias": (0.05, 0.0),
        "1.weight": (0.1, 0.0),
        "1.bias": (0.1, 0.2),
        "2.weight": (0.9, 0.3),
        "2.bias": (0.1, 0.2),
    }


def test_layers_have_rates_that_decay_towards_the_input() -> None:
    """What stands before the layers is one more, what stands after them is the last; decay is not scaled with it."""
    names = ["embedding.weight", "blocks.0.norm", "blocks.0.mlp.1.weight", "blocks.1.norm", "norm", "head.weight"]
    assert layer_rates(names, 0.5) == dict(zip(names, [0.125, 0.25, 0.25, 0.5, 1.0, 1.0], strict=True))
    assert layer_rates(names, 1.0) == {}
    parameters = [(name, nn.Parameter(torch.ones(2, 2)), True) for name in names]
    optimizer = build_optimizer(
        AdamW(layer_decay=0.5, weight_decay=0.1, groups={"head*": Group(rate=3.0)}), parameters, lr=1.0
    )
    set_rate(optimizer, 1.0)
    found = {id(p): (group["lr"], group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]}
    assert [found[id(p)] for _, p, _ in parameters] == [(r, 0.1) for r in (0.125, 0.25, 0.25, 0.5, 1.0, 3.0)]


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["first.weight", "head.weight"], "no parameter's name has a number"),
        (["encoder.layers.0.w", "decoder.layers.0.w"], "layers are counted in decoder.layers, encoder.layers"),
    ],
)
def test_layers_that_no_list_counts_are_refused(names: list[str], said: str) -> None:
    """With what to do."""
    with pytest.raises(ConfigError, match=said + ": it takes the layers of one list; give rates by patterns"):
        layer_rates(names, 0.9)


@pytest.mark.parametrize("config", [AdamW(lr=0.02), SGD(lr=0.05, momentum=0.9), LAMB(lr=0.01), Muon(lr=0.02)])
@pytest.mark.parametrize("in_parts", [False, True])
def test_a_group_of_another_kind_steps_as_an_optimizer_of_its_own(config, in_parts: bool) -> None:
    """Beside two optimizers: the other kind's rate and decay are its own, and the schedule scales both."""
    if in_parts and not config.updates_apart:
        return
    groups = {"0.*": Group(kind="lion", lr=1e-3, weight_decay=0.2), "1.*": Group(kind="sgd", momentum=0.5, rate=0.5)}
    own = msgspec.structs.replace(config, groups=groups)
    ours, theirs = net(), net()
    whole = build_optimizer(own, [(n, p, p.ndim > 1) for n, p in ours.named_parameters()], lr=config.lr)
    parts = [part_of(whole, [p]) for p in ours.parameters()] if in_parts else [whole]
    named = [(n, p, p.ndim > 1) for n, p in theirs.named_parameters()]
    tables = {
        "0.": Lion(lr=1e-3, groups={"*": Group(weight_decay=0.2)}),
        "1.": SGD(lr=0.05, momentum=0.5),
        "2.": config,
    }
    apart = [
        (build_optimizer(table, [one for one in named if one[0].startswith(prefix)], lr=table.lr), table.lr)
        for prefix, table in tables.items()
    ]
    generator = torch.Generator().manual_seed(1)
    for step in range(4):
        x = torch.randn(5, 4, generator=generator)
        for model in (ours, theirs):
            model.zero_grad()
            model(x).square().sum().backward()
        for part in parts:
            set_rate(part, config.lr / (1 + step))
            part.step()
        for optimizer, lr in apart:
            set_rate(optimizer, lr / (1 + step))
            optimizer.step()
    for (name, p), (_, q) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert torch.allclose(p, q, rtol=ROUNDING, atol=ROUNDING), name
    slots = {slot.name for slot in own.all_slots}
    assert slots >= {slot for p in ours.parameters() for slot in whole.state[p]}


@pytest.mark.parametrize("config", [NAdam(), SGD(lr=0.1)])
def test_what_steps_all_itself_has_no_groups_of_another_kind(config) -> None:
    """With what to choose; nor has a kind keys that are another's."""
    own = msgspec.structs.replace(config, groups={"0.*": Group(kind="lion")})
    built = lambda: build_optimizer(own, [(n, p, True) for n, p in net().named_parameters()], lr=1.0)  # noqa: E731
    if isinstance(config, SGD):
        built()
    else:
        with pytest.raises(
            ConfigError,
            match=r'optimizer.kind = "nadam", which steps all .*: choose .*"adamw", .* or leave kind out',
        ):
            built()
    with pytest.raises(ValueError, match=r"lr = 0\.1 without kind"):
        Group(lr=0.1)
    with pytest.raises(ValueError, match=r'momentum = 0\.9 without kind = "sgd"'):
        Group(kind="lion", momentum=0.9)
    none = SGD(lr=0.0, groups={"0.*": Group(kind="lion")})
    with pytest.raises(ConfigError, match=r"optimizer.lr = 0: a schedule scales both rates alike.*set it above 0"):
        build_optimizer(none, [("0.w", nn.Parameter(torch.ones(2)), True)], lr=0.0)


@pytest.mark.parametrize(
    ("group", "said"), [(Group(kind="lion"), 'kind = "lion" for e.weight'), (Group(rate=2.0), "rate = 2 for e.weight")]
)
def test_a_table_with_a_sparse_gradient_has_the_runs_optimizer(group: Group, said: str) -> None:
    """What a group says otherwise is not passed over."""
    parameters = [("e.weight", nn.Parameter(torch.ones(2, 2)), True), ("w", nn.Parameter(torch.ones(2)), True)]
    with pytest.raises(ConfigError, match=said + ", whose gradient is sparse"):
        build_optimizer(SGD(groups={"e*": group}), parameters, lr=0.1, sparse=["e.weight"])
    build_optimizer(SGD(groups={"w": group}), parameters, lr=0.1, sparse=["e.weight"])


def test_a_group_of_another_kind_may_have_slots_anywhere() -> None:
    """A plan counts what the rest of the model has for all of it, where a group could take hidden matrices."""
    of = {slot.name: slot.of for slot in Muon(groups={"*": Group(kind="adamw")}).all_slots}
    assert of == {"momentum_buffer": "hidden", "exp_avg": "all", "exp_avg_sq": "all", "step": "all"}
    assert {slot.of for slot in Muon().all_slots if slot.name == "exp_avg"} == {"rest"}


def test_slots_of_an_older_soap_are_named() -> None:
    """Which no key of the run file brings back."""
    held = [("w", nn.Parameter(torch.ones(4, 4)))]
    optimizer = build_optimizer(SOAP(), [("w", held[0][1], True)], lr=0.1)
    with pytest.raises(UsageError, match=r"holds optimizer state 'exp_avg_old'.*written by an older Shoal, whose SOAP"):
        make_slots(optimizer, held, {"exp_avg_old/w": torch.float32}, slots=SOAP().slots)
