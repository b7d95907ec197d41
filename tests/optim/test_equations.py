"""Every optimizer beside its equations, written down plainly (`references.py`), over twenty steps in float64."""

from __future__ import annotations

from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

from shoal.optim.adaptive import ElementOptimizer, OwnedAdafactor
from shoal.optim.average import AVERAGE, AveragedAdamW, AveragedSGD
from shoal.optim.build import build_optimizer
from shoal.optim.config import SGD, OptimizerConfig
from shoal.optim.declared import EMA, SWA, Common, Lookahead
from shoal.optim.kinds import LAMB, Adan, Lion
from shoal.optim.layerwise import LayerwiseAdam, LayerwiseSGD
from shoal.optim.muon import OwnedDion, OwnedMuon
from shoal.optim.preconditioned import OwnedShampoo, OwnedSOAP
from tests.optim import references
from tests.optim.references import DECAY, LR, Plain

STEPS = 20
SAME = 1e-12
"""Relative to the largest number: float64, and another order of operations."""
LESS_SAME = {"nadam": 1e-8, "soap": 1e-9, "shampoo": 1e-9, "dion": 1e-9}
"""PyTorch keeps the product of NAdam's momenta in float32. Eigenvectors of small eigenvalues amplify last bits."""
SHAPES = {"embedding": (7, 5), "wide": (4, 9), "bias": (5,), "gate": ()}

VARIANTS: dict[str, tuple[OptimizerConfig, Plain]] = {
    "lookahead and ema": (
        SGD(lr=LR, weight_decay=DECAY, lookahead=Lookahead(every=3), average=EMA(decay=0.9)),
        references.ema,
    ),
    "swa": (SGD(lr=LR, weight_decay=DECAY, average=SWA(start=5, every=2)), references.swa),
    "lamb, apart": (
        LAMB(lr=LR, weight_decay=DECAY, bias_correction=False, decay_in_norm=False, max_trust=0.5),
        references.lamb_apart,
    ),
}


def case_of(kind: str, table: type[Common]) -> tuple[OptimizerConfig, Plain]:
    """The optimizer of a kind, and the equation of its name."""
    keys: dict[str, Any] = {"lr": LR, "weight_decay": DECAY, **references.OPTIONS.get(kind, {})}
    return table(**keys), getattr(references, kind)


CASES = {kind: case_of(kind, table) for kind, table in Common.kinds().items() if hasattr(references, kind)} | VARIANTS
ELSEWHERE = {
    "adamw_8bit": "test_adamw_8bit.py",
    "kfac": "test_kfac.py",
    "newton_cg": "test_newton.py",
    "lbfgs": "test_newton.py",
    "one_bit_adam": "../comm/exchanges/test_momentum_sum.py",
    "zero_one_adam": "../comm/exchanges/test_momentum_sum.py",
    "one_bit_lamb": "../comm/exchanges/test_momentum_sum.py",
    "python": "test_named.py",
}
"""Kinds whose equations are of another form, and where those are."""


def test_every_kind_has_an_equation() -> None:
    """A new one that has none is named here."""
    assert {kind for kind in Common.kinds() if kind not in ELSEWHERE} <= CASES.keys()
    assert all((Path(__file__).parent / file).is_file() for file in ELSEWHERE.values())


ROUNDED = 0.03
"""What products of bfloat16, of 8 bits, may change of an update, relative; 0.4 % of each factor is rounded off."""


@pytest.mark.parametrize("kind", ["soap", "shampoo"])
def test_products_may_be_rounded(kind: str) -> None:
    """The same updates to two digits, and not the same bits; the state keeps its type."""
    config, updates = CASES[kind][0], list[Tensor]()
    for precision in ("parameter", "bfloat16"):
        matrix = nn.Parameter(drawn(0)["wide"].float())
        before = matrix.detach().clone()
        own = msgspec.structs.replace(config, precision=precision, weight_decay=0.0)
        optimizer = build_optimizer(own, [("wide", matrix, True)], lr=LR)
        for step in range(1, 4):
            matrix.grad = drawn(step)["wide"].float()
            optimizer.step()
        updates.append(matrix.detach() - before)
        assert {t.dtype for t in optimizer.state[matrix].values()} == {torch.float32}
    gap = float((updates[1] - updates[0]).norm() / updates[0].norm())
    assert 0 < gap < ROUNDED


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("kind", "scale"), [("dion", 1e-30), ("dion", 1e18), ("adafactor", 1e12), ("muon", 1e18), ("muon", 1e30)]
)
def test_gradients_may_be_huge_or_tiny(kind: str, scale: float, dtype: torch.dtype) -> None:
    """Their squares leave the range of float32, and updates stay those of float64, or are none."""

    def updates(dtype: torch.dtype) -> Tensor:
        matrix = nn.Parameter(drawn(0)["wide"].to(dtype))
        before = matrix.detach().clone()
        own = msgspec.structs.replace(CASES[kind][0], weight_decay=0.0)
        optimizer = build_optimizer(own, [("wide", matrix, True)], lr=LR)
        for step in range(1, 4):
            matrix.grad = (drawn(step)["wide"] * scale).to(dtype)
            optimizer.step()
        return (matrix.detach() - before).double()

    found, wanted = updates(dtype), updates(torch.float64)
    assert float((found - wanted).norm() / wanted.norm()) < 1e-4 or (kind == "muon" and not found.any())


HALF = 0.05
"""What bfloat16 may change of five updates, relative."""
PLAIN = {
    "lion": lambda groups: ElementOptimizer(groups, Lion(lr=LR)),
    "adan": lambda groups: ElementOptimizer(groups, Adan(lr=LR)),
    "lars": partial(LayerwiseSGD, lr=LR, coefficient=0.1),
    "lamb": partial(LayerwiseAdam, lr=LR),
    "adafactor": partial(OwnedAdafactor, lr=LR),
    "muon": partial(OwnedMuon, lr=LR),
    "dion": partial(OwnedDion, lr=LR, rank_fraction=1.0),
    "soap": partial(OwnedSOAP, lr=LR),
    "shampoo": partial(OwnedShampoo, lr=LR, every=2, start=1),
    "schedule_free_adamw": partial(AveragedAdamW, lr=LR),
    "schedule_free_sgd": partial(AveragedSGD, lr=LR),
}
"""Classes as a script uses them."""


def in_a_script(kind: str, dtype: torch.dtype, *, resumed: bool = False) -> dict[str, Tensor]:
    """Where five updates by a class lead, `resumed` from a file in the middle."""

    def built() -> torch.optim.Optimizer:
        matrices = [p for p in ours.values() if p.ndim > 1]
        return PLAIN[kind]([{"params": matrices, "whole": True}, {"params": [ours["bias"], ours["gate"]]}])

    ours = {name: nn.Parameter(value.to(dtype)) for name, value in drawn(0).items()}
    optimizer = built()
    for step in range(1, 6):
        for name, gradient in drawn(step).items():
            ours[name].grad = gradient.to(dtype)
        optimizer.step()
        if resumed and step == 3:
            file = BytesIO()
            torch.save(optimizer.state_dict(), file)
            file.seek(0)
            optimizer = built()
            optimizer.load_state_dict(torch.load(file))
    return {name: parameter.detach() for name, parameter in ours.items()}


@pytest.mark.parametrize("kind", PLAIN)
def test_what_was_never_stepped_has_no_state_after_load_state_dict(kind: str) -> None:
    """As a layer that a script freezes: it begins where its gradient comes, as without a reload."""
    used, frozen = nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(2, 2))

    def built() -> torch.optim.Optimizer:
        return PLAIN[kind]([{"params": [used, frozen], "whole": True}])

    first, again = built(), built()
    used.grad = torch.ones(3, 2)
    first.step()
    again.load_state_dict(first.state_dict())
    assert again.state_dict()["state"].keys() == first.state_dict()["state"].keys() == {0}


@pytest.mark.parametrize("kind", PLAIN)
def test_parameters_of_a_script_may_be_of_bfloat16(kind: str) -> None:
    """Updates are those of float32, rounded; and `load_state_dict` goes on with the same bits, of both types."""
    wanted, found, first = in_a_script(kind, torch.float32), in_a_script(kind, torch.bfloat16), drawn(0)
    for name, value in found.items():
        moved, rounding = wanted[name] - first[name].float(), 2**-8 * first[name].abs().max()
        assert value.dtype == torch.bfloat16
        assert float((value.float() - wanted[name]).abs().max()) < HALF * float(moved.abs().max()) + 5 * float(rounding)
    for dtype, straight in ((torch.float32, wanted), (torch.bfloat16, found)):
        again = in_a_script(kind, dtype, resumed=True)
        assert all(torch.equal(again[name], straight[name]) for name in straight)


def drawn(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("kind", CASES)
def test_updates_are_those_of_the_equations(kind: str) -> None:
    """Of matrices, vectors and single numbers, all of which decay here."""
    config, plain = CASES[kind]
    ours = {name: nn.Parameter(value.clone()) for name, value in drawn(0).items()}
    theirs, states = drawn(0), {name: {} for name in SHAPES}
    optimizer = build_optimizer(config, [(name, p, True) for name, p in ours.items()], lr=LR)
    for step in range(1, STEPS + 1):
        gradients = drawn(step)
        for name, parameter in ours.items():
            parameter.grad = gradients[name].clone()
            plain(theirs[name], gradients[name], states[name], step)
        optimizer.step()
        if any(slot.name == AVERAGE for slot in config.all_slots):
            for name, parameter in ours.items():
                assert torch.allclose(optimizer.state[parameter][AVERAGE], states[name]["a"], rtol=SAME, atol=SAME)
    for name, wanted in theirs.items():
        gap = (ours[name].detach() - wanted).abs().max() / wanted.abs().max()
        assert float(gap) < LESS_SAME.get(kind, SAME), name


@pytest.mark.parametrize("kind", CASES)
def test_the_state_is_what_the_table_declares(kind: str) -> None:
    """By name and shape: checkpoints are made from the declaration."""
    config, _ = CASES[kind]
    parameters = {name: nn.Parameter(value) for name, value in drawn(0).items()}
    optimizer = build_optimizer(config, [(name, p, True) for name, p in parameters.items()], lr=LR)
    for name, parameter in parameters.items():
        parameter.grad = drawn(1)[name]
    optimizer.step()
    for name, parameter in parameters.items():
        found = {slot: tuple(value.shape) for slot, value in optimizer.state[parameter].items()}
        declared = {slot.name: slot.shape(SHAPES[name]) for slot in config.all_slots}
        assert found.items() <= declared.items()
        if all(slot.of == "all" for slot in config.slots):
            assert found == {slot: shape for slot, shape in declared.items() if 0 not in shape}
