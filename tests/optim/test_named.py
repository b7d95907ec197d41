"""`optimizer.kind = "python"`: an optimizer of a user's own file, in every layout, as this file is one."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

from shoal.errors import ConfigError, UserCodeError
from shoal.optim.build import build_optimizer
from shoal.optim.config import AdamW, PythonOptimizer
from shoal.optim.declared import Granularity, Slot
from shoal.optim.owners import WholeOptimizer
from shoal.planning.answer import cluster_of
from shoal.planning.stack import stack_of
from shoal.runfile.load import load_run
from tests.assembly.journey import travel
from tests.verification.layouts import corpus, verified

HERE = "tests.optim.test_named"
SAME_MATH = 1e-12
"""Losses in float64, relative."""
FLOAT64 = {"precision": {"kind": "float64"}}


class RootMomentum(torch.optim.Optimizer):
    """x <- x - lr sign(m) sqrt(|m|) of a momentum m: nobody's but this test's."""

    works_on: Granularity = "elements"

    def __init__(self, params: Iterable[Any], lr: float = 0.01, beta: float = 0.9, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.lerp_(p.grad, 1 - group["beta"])
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * momentum.sign() * momentum.abs().sqrt())


class Undeclared(RootMomentum):
    """The same, and nothing known of it."""

    works_on = None  # type: ignore[assignment]


class Lies(RootMomentum):
    """Says that it treats every number alone, and divides by the norm of what it is given."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            p.grad /= p.grad.norm() + 1e-12
        return super().step()


class UnitColumns(WholeOptimizer):
    """The gradient of a hidden matrix with columns of length 1, AdamW for the rest. Its state is on the owner."""

    slots = (Slot("mean", of="hidden", whole=True), Slot("exp_avg"), Slot("exp_avg_sq"), Slot("step", lambda shape: ()))

    def __init__(self, params: Iterable[Any], lr: float = 0.01) -> None:
        super().__init__(params, lr=lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)

    def updated(self, group: dict[str, Any], direction: Tensor, state: dict[str, Any]) -> Tensor:
        mean = state.setdefault("mean", torch.zeros_like(direction)).lerp_(direction, 0.5)
        return mean / mean.norm(dim=0, keepdim=True).clamp(min=1e-12)


class Counts(RootMomentum):
    """Keeps a number in its groups, which no checkpoint holds."""

    works_on = None  # type: ignore[assignment]

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        return super().step()


class CountsElements(Counts):
    works_on = "elements"


class OwnNumber(RootMomentum):
    """Keeps a number in an attribute."""

    k = 0

    def step(self, closure: Any = None) -> Any:
        self.k += 1
        return super().step()


class OwnTensor(RootMomentum):
    """Keeps a tensor there, from its first step on."""

    kept: Any = None

    def step(self, closure: Any = None) -> Any:
        self.kept = [torch.ones(2)]
        return super().step()


class Inner(RootMomentum):
    """Another optimizer has its state."""

    def __init__(self, params: Iterable[Any], lr: float = 0.01) -> None:
        super().__init__(params, lr)
        self.base = torch.optim.Adam(self.param_groups, lr=lr)

    def step(self, closure: Any = None) -> Any:
        return self.base.step()


class KeepsText(RootMomentum):
    def step(self, closure: Any = None) -> Any:
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p]["phase"] = "late"
        return super().step()


class NumberState(RootMomentum):
    """Its rate falls with a number of Python in its state, and so does a mean; its `options` are nothing of Shoal's."""

    options: Any = "of its own"

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state["step"], state["mean"] = 0, 0.0
                state["step"] += 1
                state["mean"] += (0.1 - state["mean"]) / 3
                assert type(state["step"]) is int
                p.sub_(p.grad, alpha=group["lr"] * (1 + state["mean"]) / state["step"] ** 0.5)


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "replicate": (2, {"layout": {"replicate": 2}}),
    "ZeRO-1": (2, {"layout": {"shard": 2}, "memory": {"zero": 1}}),
    "ZeRO-3": (2, {"layout": {"shard": 2}, "memory": {"zero": 3}}),
    "tensor": (2, {"layout": {"tensor": 2}}),
    "pipeline": (2, {"layout": {"pipeline": 2}}),
    "ZeRO-1 x tensor": (4, {"layout": {"shard": 2, "tensor": 2}, "memory": {"zero": 1}}),
}
FEW = [("RootMomentum", "ZeRO-3"), ("RootMomentum", "tensor"), ("UnitColumns", "ZeRO-1 x tensor")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("named")
    corpus(folder)
    return folder


def own(name: str, **keys: Any) -> dict[str, Any]:
    return {"optimizer": {"kind": "python", "build": f"{HERE}:{name}", "clip_norm": 0.5, **keys}}


def built(build: str, **keys: Any) -> tuple[torch.optim.Optimizer, nn.Parameter]:
    parameter = nn.Parameter(torch.ones(4, 3))
    return build_optimizer(PythonOptimizer(build=build, **keys), [("w", parameter, True)], lr=0.1), parameter


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(name, layout, marks=[] if (name, layout) in FEW else pytest.mark.stress)
        for name in ("RootMomentum", "Undeclared", "UnitColumns")
        for layout in LAYOUTS
        if name != "Undeclared" or "tensor" not in layout
    ],
)
def test_it_is_proved_in_every_layout(ranks, folder: Path, name: str, layout: str) -> None:
    """Groups, sharding and owners follow from what the class says."""
    world, tables = LAYOUTS[layout]
    keys = {} if name == "UnitColumns" else {"weight_decay": 0.1, "arguments": {"beta": 0.8}}
    verdict, *_ = ranks(world, verified, own(name, **keys) | tables, str(folder), True, 4)
    assert verdict["holds"], verdict["sentence"]


@pytest.mark.parametrize("layout", ["ZeRO-1", "tensor"])
def test_a_class_that_says_too_much_is_found(ranks, folder: Path, layout: str) -> None:
    """The proof compares weights, whatever is declared."""
    world, tables = LAYOUTS[layout]
    verdict, *_ = ranks(world, verified, own("Lies") | tables, str(folder), True, 2)
    assert not verdict["holds"]


@pytest.mark.parametrize("name", [pytest.param("RootMomentum", marks=pytest.mark.slow), "UnitColumns"])
def test_its_checkpoints_go_on_in_other_layouts(ranks, folder: Path, name: str) -> None:
    """Every bit of its state, which nobody has declared but the class."""
    legs = []
    for layout in ("ZeRO-3", "tensor", "pipeline"):
        world, tables = LAYOUTS[layout]
        legs.append(ranks(world, travel, own(name) | tables | FLOAT64, str(folder), f"own-{name}", 2)[0])
    straight = ranks(1, travel, own(name) | FLOAT64, str(folder), f"own-straight-{name}", 6)[0]
    for here, there in pairwise(legs):
        assert any(key.startswith("optimizer/m") for key in there.came)
        assert all(torch.equal(there.came[key], tensor) for key, tensor in here.left.items())
    assert [loss for leg in legs for loss in leg.losses] == pytest.approx(straight.losses, rel=SAME_MATH)


def test_numbers_of_python_go_on(ranks, folder: Path) -> None:
    """State that is no tensor: a resume, sharded or not, equals a run in one go, to the bit in one process."""
    name = "NumberState"
    legs = [ranks(1, travel, own(name) | FLOAT64, str(folder), f"own-{name}", 2)[0] for _ in range(2)]
    legs.append(ranks(2, travel, own(name) | LAYOUTS["ZeRO-3"][1] | FLOAT64, str(folder), f"own-{name}", 2)[0])
    straight = ranks(1, travel, own(name) | FLOAT64, str(folder), f"own-straight-{name}", 6)[0]
    assert any(key.startswith("optimizer/step/") and int(value) == 4 for key, value in legs[2].came.items())
    assert legs[0].losses + legs[1].losses == straight.losses[:4]
    assert legs[2].losses == pytest.approx(straight.losses[4:], rel=SAME_MATH)


def test_matrices_alone_have_a_muon_of_pytorchs() -> None:
    """With a bias beside them it is refused, by the name of Shoal's own."""
    built("torch.optim:Muon")
    with pytest.raises(UserCodeError, match=r'its own: optimizer\.kind = "muon"'):
        build_optimizer(PythonOptimizer(build="torch.optim:Muon"), [("b", nn.Parameter(torch.ones(3)), False)], lr=0.1)


@pytest.mark.parametrize("key", ["lr", "weight_decay", "params"])
def test_what_the_run_file_says_itself_is_no_argument(key: str) -> None:
    with pytest.raises(ValueError, match=f"optimizer.arguments has {key}, which would have no effect"):
        PythonOptimizer(build="torch.optim:AdamW", arguments={key: 0.5})


def test_without_a_decay_there_is_none() -> None:
    """Whatever the class's default."""
    optimizer, _ = built("torch.optim:AdamW")
    assert (optimizer.defaults["weight_decay"], optimizer.param_groups[0]["weight_decay"]) == (0.01, 0.0)


def test_optimizers_of_others_are_taken() -> None:
    """What PyTorch's own change in a step is in their state."""
    for name in ("SGD", "Adam", "AdamW", "Adadelta", "Adagrad", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop"):
        optimizer, parameter = built(f"torch.optim:{name}")
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        assert not torch.equal(parameter.detach(), torch.ones(4, 3))


def test_arguments_and_decay_reach_the_class() -> None:
    """As keywords, and as an option of its groups."""
    optimizer, parameter = built("torch.optim:Adamax", arguments={"betas": [0.5, 0.6]}, weight_decay=0.25)
    assert isinstance(optimizer, torch.optim.Adamax)
    assert optimizer.param_groups[0]["betas"] == [0.5, 0.6]
    assert optimizer.param_groups[0]["weight_decay"] == 0.25
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert float(parameter.detach().max()) < 1


REFUSED = [
    ("torch.optim:Adamaxx", {}, "has no class 'Adamaxx'"),
    ("nowhere_at_all:X", {}, "there is no module 'nowhere_at_all'"),
    ("torch.optim:Adamax", {"arguments": {"wrong": 1}}, "unexpected keyword argument 'wrong'"),
    ("torch.nn:ReLU6", {}, "raised"),
    ("torch.optim:LBFGS", {}, "LBFGS steps by a closure"),
    ("torch.optim:LBFGS", {}, 'Shoal has its own: optimizer.kind = "lbfgs"'),
    ("torch.optim:Adafactor", {}, 'Shoal has its own: optimizer.kind = "adafactor"'),
    ("torch.optim:SparseAdam", {}, 'Shoal has its own: optimizer.kind = "adagrad"'),
    (f"{HERE}:Counts", {}, "changes numbers of its groups (k)"),
    (f"{HERE}:CountsElements", {}, "changes numbers of its groups (k)"),
    (f"{HERE}:OwnNumber", {}, "changes attributes of its own in a step (k)"),
    (f"{HERE}:OwnTensor", {}, "changes attributes of its own in a step (kept)"),
    (f"{HERE}:KeepsText", {}, "keeps 'phase' of type str for a parameter"),
    (f"{HERE}:Inner", {}, "changes attributes of its own in a step (base)"),
    ("tests.optim.coupled_optimizers:ByAllNorms", {"weight_decay": 0.1}, "has no option of this name"),
]


@pytest.mark.parametrize(("build", "keys", "why"), REFUSED)
def test_what_cannot_be_used_is_refused(build: str, keys: dict[str, Any], why: str) -> None:
    """In a sentence, before anything is trained."""
    with pytest.raises((ConfigError, UserCodeError)) as error:
        built(build, **keys)
    assert why in str(error.value)


PARTED = [
    ("Undeclared", "tensor", "is taken for an optimizer of whole parameters"),
    ("tests.optim.coupled_optimizers:ByAllNorms", "ZeRO-1", "from the gradients of all parameters together"),
    ("tests.optim.coupled_optimizers:ByAllNorms", "pipeline", "from the gradients of all parameters together"),
]


def opening(place: Any, tables: dict[str, Any], folder: str) -> str:
    """What opening such a run is refused with."""
    try:
        travel(place, tables, folder, "refused", 1)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("name", "layout", "why"), PARTED)
def test_parts_of_what_must_be_whole_are_refused(ranks, folder: Path, name: str, layout: str, why: str) -> None:
    """Two ranks would train another model without a word."""
    world, tables = LAYOUTS[layout]
    build = {"optimizer": {"kind": "python", "build": name}} if ":" in name else own(name)
    said = ranks(world, opening, build | tables, str(folder))
    assert all(why in sentence for sentence in said), said


def test_a_plan_counts_what_it_keeps() -> None:
    """One number for a parameter, where AdamW keeps two."""
    run = load_run(Path(__file__).parents[2] / "recipes/stdlib-gpt.toml")
    kept = [
        stack_of(each, cluster_of(each, None)).state.optimizer
        for each in (
            msgspec.structs.replace(run, optimizer=AdamW()),
            msgspec.structs.replace(run, optimizer=PythonOptimizer(build=f"{HERE}:RootMomentum")),
        )
    ]
    assert kept[1] == pytest.approx(kept[0] / 2)
