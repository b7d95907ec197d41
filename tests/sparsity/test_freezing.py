"""Layers that are not trained: what they keep, send and compute, in every layout."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from shoal.comm.collective import Alone
from shoal.errors import ConfigError, UserCodeError
from shoal.memory.tracker import measured_activation_bytes
from shoal.models.build import initialise
from shoal.models.config import GPTConfig
from shoal.models.gpt import GPT
from shoal.sparsity.config import FreezeByProgress, FreezeConfig, FreezeLater
from shoal.sparsity.freezing import Freezing, blocks_of, freeze, frozen_by_schedule, matches
from shoal.sparsity.masks import Masks
from shoal.sparsity.plasticity import Activations, Plasticity, similarity_loss
from shoal.state import Owned, Region
from shoal.topology.holding import Box, Holding, Placement
from tests.assembly.journey import Leg, travel
from tests.sync.steps import ADAM, Trained, gap, train
from tests.verification.layouts import corpus, verified

SMALL = {"kind": "gpt", "vocabulary": 61, "layers": 4, "width": 16, "heads": 2, "feed_forward_width": 24}
BASE = ADAM | {"model": SMALL}
HALF = {"freeze": {"layers": ["embedding", "blocks.0", "blocks.1"]}}
WINDOW = {"freeze": {"later": [{"layers": ["embedding", "blocks.0"], "at": 4, "until": 8}]}}
PROGRESS = {"freeze": {"progress": {"every": 1, "below": 0.9, "patience": 1}}}
SUM_ORDER = 1e-8
"""Weights in float64 after 12 steps of AdamW, relative. Moments that begin anew amplify: 1e-9 was seen, else 1e-12."""
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "replicate": (2, {"layout": {"replicate": 2}}),
    "ZeRO-1": (2, {"layout": {"shard": 2}, "memory": {"zero": 1}}),
    "ZeRO-2": (2, {"layout": {"shard": 2}, "memory": {"zero": 2}}),
    "ZeRO-3": (2, {"layout": {"shard": 2}}),
    "tensor": (2, {"layout": {"tensor": 2}}),
    "pipeline": (2, {"layout": {"pipeline": 2}}),
}
BY_GRADIENT = {"freeze": {"progress": {"criterion": "gradient", "every": 2, "below": 0.6, "patience": 1}}}
BY_ACTIVATIONS = {
    "freeze": {"progress": {"criterion": "activations", "every": 1, "below": 0.9, "patience": 1, "window": 2}}
}
FROZEN = {"half": HALF, "window": WINDOW, "progress": PROGRESS, "gradient": BY_GRADIENT, "activations": BY_ACTIVATIONS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("frozen")
    corpus(folder)
    return folder


@pytest.fixture(scope="module")
def alone(ranks, folder: Path) -> dict[str, Trained]:
    """Twelve steps of one process."""
    return {kind: ranks(1, train, BASE | tables, str(folder))[0] for kind, tables in FROZEN.items()}


@pytest.mark.matrix(every=4)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", [kind for kind in FROZEN if kind != "activations"])
def test_every_layout_trains_as_one_process(
    ranks, folder: Path, alone: dict[str, Trained], kind: str, layout: str
) -> None:
    world, tables = LAYOUTS[layout]
    found = ranks(world, train, BASE | FROZEN[kind] | tables, str(folder))[0]
    assert found.state.keys() == alone[kind].state.keys()
    assert gap(found.weights, alone[kind].weights) < SUM_ORDER


def moved(before: dict[str, Tensor], after: dict[str, Tensor]) -> set[str]:
    return {name for name, tensor in after.items() if not torch.equal(before[name], tensor)}


def test_what_is_frozen_stays_and_has_no_state(ranks, folder: Path, alone: dict[str, Trained]) -> None:
    frozen = ("embedding", "blocks.0.", "blocks.1.")
    first = ranks(1, train, BASE, str(folder), 0, 0)[0].weights
    after = alone["half"]
    assert moved(first, after.weights) == {n for n in first if not n.removeprefix("model/").startswith(frozen)}
    assert not any(name.split("/", 2)[2].startswith(frozen) for name in after.state if name.startswith("optimizer/"))


@pytest.mark.slow
def test_half_a_model_sends_half_of_its_gradients(ranks, folder: Path) -> None:
    """From the start, and while a schedule freezes it; the masks of neither cost an index on the wire."""
    tables = BASE | LAYOUTS["replicate"][1]
    every = ranks(2, train, tables, str(folder), 0, 6)[0].sent[-1]
    half = ranks(2, train, tables | HALF, str(folder), 0, 6)[0].sent[-1]
    later = {"freeze": {"later": [{"layers": HALF["freeze"]["layers"], "at": 4}]}}
    scheduled = ranks(2, train, tables | later, str(folder), 0, 6)[0].sent
    assert half / every == pytest.approx(0.5, abs=0.05)
    assert scheduled[-1] == pytest.approx(half, rel=0.01)
    assert scheduled[2] == pytest.approx(every, rel=0.01)


def test_frozen_blocks_keep_no_activations() -> None:
    """What is saved is that of a model of the trained blocks alone, to the byte."""
    tokens = torch.zeros(2, 16, dtype=torch.int64)

    def kept(layers: int, frozen: tuple[str, ...]) -> int:
        model = GPT(GPTConfig(vocabulary=61, layers=layers, width=16, heads=2))
        if frozen:
            freeze(model, FreezeConfig(layers=frozen))
        return measured_activation_bytes(lambda: model(tokens))

    two, four = kept(2, ("embedding",)), kept(4, ())
    assert kept(4, ("embedding", "blocks.0", "blocks.1")) == two
    assert two < 0.6 * four


@pytest.mark.slow
def test_a_schedule_freezes_and_thaws(ranks, folder: Path) -> None:
    """Steps 4 to 7 of 12 leave the first block as it is; afterwards its moments begin anew."""
    at = {step: ranks(1, train, BASE | WINDOW, str(folder), 0, step)[0].state for step in (3, 7, 8, 12)}
    own = "blocks.0.attention.query.weight"
    assert torch.equal(at[3][f"model/{own}"], at[7][f"model/{own}"])
    assert not torch.equal(at[7][f"model/{own}"], at[8][f"model/{own}"])
    assert not torch.equal(at[3]["model/head.weight"], at[7]["model/head.weight"])
    assert f"optimizer/exp_avg/{own}" in at[3]
    assert f"optimizer/exp_avg/{own}" not in at[7]
    assert float(at[12][f"optimizer/step/{own}"]) == 5.0
    assert float(at[12]["optimizer/step/head.weight"]) == 12.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "layouts"),
    [
        ("window", ["replicate", "ZeRO-3"]),
        ("progress", ["ZeRO-1", "replicate"]),
        ("gradient", ["tensor", "ZeRO-3"]),
        ("activations", ["replicate", "ZeRO-2"]),
    ],
)
def test_a_run_resumes_while_layers_are_frozen(ranks, kind: str, layouts: list[str], tmp_path: Path) -> None:
    corpus(tmp_path)

    def leg(layout: str, name: str, steps: int) -> Leg:
        world, tables = LAYOUTS[layout]
        return ranks(world, travel, BASE | FROZEN[kind] | tables, str(tmp_path), name, steps)[0]

    whole = leg(layouts[0], "whole", 9)
    first, second = leg(layouts[0], "halves", 5), leg(layouts[0], "halves", 4)
    assert first.losses + second.losses == whole.losses
    assert all(torch.equal(second.left[name], tensor) for name, tensor in whole.left.items())
    begun, gone_on = leg(layouts[0], "abroad", 5), leg(layouts[1], "abroad", 4)
    assert all(torch.equal(gone_on.came[name], tensor) for name, tensor in begun.left.items())
    assert gone_on.losses == pytest.approx(whole.losses[5:], rel=1e-12)


@pytest.mark.parametrize("kind", ["progress", "gradient", "activations"])
def test_progress_freezes_blocks_from_the_front(alone: dict[str, Trained], kind: str) -> None:
    """The optimizer has no state for the first block, and has it for the last one."""
    states = {name.split("/", 2)[2] for name in alone[kind].state if name.startswith("optimizer/exp_avg/")}
    assert not any(name.startswith(("embedding", "blocks.0.")) for name in states)
    assert any(name.startswith("blocks.3.") for name in states)
    assert "head.weight" in states


def test_a_block_freezes_when_it_and_those_before_it_have_settled() -> None:
    progress = Plasticity(FreezeByProgress(below=0.5, patience=2, most=0.75, thaw=10.0), blocks=4)
    observed = [
        ([1.0, 1.0, 1.0, 1.0], 0),
        ([0.4, 0.4, 1.0, 1.0], 0),  # settled once
        ([0.6, 0.4, 1.0, 1.0], 0),  # the first has moved again; the second waits for it
        ([0.4, 0.4, 1.0, 1.0], 0),
        ([0.4, 0.4, 1.0, 1.0], 2),
        ([0.0, 0.0, 0.1, 0.1], 2),
        ([0.0, 0.0, 0.1, 0.1], 3),  # at most three quarters
        ([0.0, 0.0, 0.0, 0.1], 3),
    ]
    for plasticity, frozen in observed:
        progress.observe(plasticity, lr=1.0)
        assert progress.frozen == frozen
    progress.observe([0.0] * 4, lr=0.2)
    assert progress.frozen == 3
    progress.observe([0.0] * 4, lr=0.1)
    assert progress.frozen == 0, "the learning rate has fallen by ten"
    other = Plasticity(progress.config, blocks=4)
    other.load(progress.to_state())
    assert other == progress


def test_blocks_freeze_when_their_gradients_change_least() -> None:
    """Those at the front of which the change is in the lower half, as AutoFreeze's algorithm 1 has it."""
    progress = Plasticity(FreezeByProgress(criterion="gradient", patience=1, most=0.75), blocks=4)
    observed = [
        ([4.0, 4.0, 4.0, 4.0], 0),  # there is nothing before
        ([3.0, 3.9, 3.9, 2.0], 0),  # the second and third change least; the first has moved
        ([2.9, 3.8, 3.0, 1.0], 2),  # changes of 3 %, 3 %, 23 %, 50 %
        ([0.0, 0.0, 2.0, 0.9], 2),  # 33 % and 10 %
        ([0.0, 0.0, 1.9, 0.5], 3),
    ]
    for norms, frozen in observed:
        progress.observe(norms, lr=1.0)
        assert progress.frozen == frozen
    other = Plasticity(progress.config, blocks=4)
    other.load(progress.to_state())
    assert other == progress
    progress.observe([1.0] * 4, lr=0.1)
    assert progress.frozen == 0


def test_blocks_freeze_when_the_slope_of_their_distance_is_small() -> None:
    """Beside numpy's moving average and least squares: the second block goes on changing, the others level off."""
    config = FreezeByProgress(criterion="activations", window=3, below=0.2, patience=2, most=0.75)
    progress, seen = Plasticity(config, blocks=3), []
    largest, settled, frozen = np.zeros(3), np.zeros(3, int), 0
    for step in range(14):
        seen.append([0.5**step, 1 - 0.05 * step if step < 9 else 0.6, 0.4**step])
        progress.observe(seen[-1], lr=1.0)
        if len(seen) >= 5:
            means = [np.convolve(each, np.ones(3) / 3, "valid") for each in np.array(seen[-5:]).T]
            slopes = np.abs([np.polyfit(range(3), each, 1)[0] for each in means])
            largest = np.maximum(largest, slopes)
            settled = np.where(slopes < 0.2 * largest, settled + 1, 0)
            while frozen < 2 and settled[frozen] >= 2:
                frozen += 1
        assert progress.frozen == frozen, f"at comparison {step}"
    assert frozen == 2
    other = Plasticity(config, blocks=3)
    other.load(progress.to_state())
    assert other == progress
    progress.observe(seen[-1], lr=0.1)
    assert progress.frozen == 0
    assert progress.recent == []


def test_a_loss_of_similarities_is_that_of_the_paper() -> None:
    """Pair by pair. Outputs that are turned or grow by a factor are as similar to each other as they were."""
    one, other = torch.randn(2, 5, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    total = 0.0
    for a in range(5):
        rows = [torch.tensor([float((x[a] * x[b]).sum()) for b in range(5)]) for x in (one, other)]
        total += float((rows[0] / rows[0].norm() - rows[1] / rows[1].norm()).square().sum())
    assert float(similarity_loss(one, other)) == pytest.approx(total / 25, rel=1e-5)
    turn = torch.linalg.qr(torch.randn(12, 12, dtype=torch.float64))[0]
    assert float(similarity_loss(one, 3 * (one.flatten(1) @ turn))) < 1e-20


def test_activations_are_compared_with_a_reference_of_8_bits() -> None:
    """As a copy of the model, whose weights are rounded by hand, gives them; a reference goes through a checkpoint."""
    model = GPT(GPTConfig(vocabulary=61, layers=3, width=16, heads=2)).double()
    initialise(model, seed=1, device="cpu", dtype=torch.float64)
    parameters, names = dict(model.named_parameters()), [f"blocks.{number}" for number in range(3)]
    activations = Activations(model, parameters, names, Alone())
    activations.renew()
    copy = deepcopy(model).eval()
    for parameter in copy.parameters():
        if parameter.ndim > 1:
            scale = parameter.data.abs().amax(1, keepdim=True) / 127
            parameter.data = (parameter.data / scale).round() * scale
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.01)
    tokens = torch.randint(0, 61, (4, 8), generator=torch.Generator().manual_seed(0))

    def blocks(of: nn.Module) -> list[Tensor]:
        given: list[Any] = []
        for name in names:
            of.get_submodule(name).register_forward_hook(lambda _, args, out: given.append(out))
        with torch.no_grad():
            of(tokens)
        return given

    saved = {name: cast(Tensor, held).clone() for name, held in activations.tensors().items()}
    other = Activations(model, parameters, names, Alone())
    for name, target in other.targets({name: held.dtype for name, held in saved.items()}).items():
        cast(Tensor, target).copy_(saved[name])
    assert sum(held.nbytes for held in saved.values()) < 0.3 * sum(p.nbytes for p in parameters.values())
    found = []
    for each in (activations, other):
        each.look(now=True)
        model.train()
        model(tokens)
        found.append(each.losses())
        assert model.training
    wanted = [float(similarity_loss(*pair)) for pair in zip(blocks(model.eval()), blocks(copy), strict=True)]
    assert found[0] == found[1] == pytest.approx(wanted, rel=1e-9)
    assert min(wanted) > 0


def test_activations_of_one_sample_are_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    activations = Activations(model, dict(model.named_parameters()), ["0", "1"], Alone())
    activations.renew()
    activations.look(now=True)
    model(torch.zeros(1, 2))
    with pytest.raises(UserCodeError, match=r"block 0 of Sequential gives \[1, 2\], and at least two samples"):
        activations.losses()


@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_gradients_are_compared_without_their_scale(scale: float) -> None:
    """A loss scale that changes is no change of a gradient, and what is in no block is not summed."""
    shape, placement = (2, 2), Placement((), (), ())
    names = ["blocks.0.weight", "blocks.1.weight", "head.weight"]
    box = Box((0, 0), shape)
    owned = [
        Owned(name, Parameter(torch.zeros(shape)), Holding(name, shape, (box,), placement, 0, *[(0,)] * 4), regions)
        for name, regions in zip(names, [(Region(box, 0),)] * 3, strict=True)
    ]
    freezing = Freezing(
        FreezeConfig(progress=FreezeByProgress(criterion="gradient", every=2)),
        {own.name: own.parameter for own in owned},
        owned,
        torch.optim.SGD([own.parameter for own in owned], lr=0.1),
        names=names,
        replica=Alone(),
        masks=Masks(),
        rate=lambda step: 0.1,
    )
    for step, by in ((1, 1.0), (2, scale)):
        for number, own in enumerate(owned):
            own.parameter.grad = torch.full(shape, by * (number + 1))
        freezing.agreed(step, scale=by)
    assert set(freezing.tensors()) == {"freeze/gradient/blocks.0.weight", "freeze/gradient/blocks.1.weight"}
    freezing.updated(2)
    assert freezing.facts()["before"] == [4.0, 8.0], "twice a tensor of four ones, and of four twos"


MOVEMENT = {"sparsity": {"kind": "movement", "density": 0.5}}


@pytest.mark.parametrize(
    ("tables", "prefix"), [(BY_GRADIENT, "freeze/gradient/"), (MOVEMENT, "sparsity/")], ids=["freeze", "movement"]
)
def test_a_loss_scale_is_not_in_what_a_run_sums(ranks, folder: Path, tables: dict[str, Any], prefix: str) -> None:
    def sums(scale: float) -> dict[str, Tensor]:
        precision = {"precision": {"kind": "float16", "loss_scale": scale}}
        state = ranks(1, train, BASE | tables | precision, str(folder), 0, 3)[0].state
        return {
            name: tensor for name, tensor in state.items() if name.startswith(prefix) and tensor.is_floating_point()
        }

    small, large = sums(1024.0), sums(8192.0)
    assert small
    for name, tensor in small.items():
        assert torch.allclose(large[name], tensor, rtol=0.1, atol=0.02 * float(tensor.abs().max())), name


class Masked(nn.Module):
    """A block with the mask of a causal attention."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.mask = nn.Buffer(torch.full((4, 4), -torch.inf).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear((x @ x.transpose(1, 2) + self.mask).softmax(-1) @ x)


def test_a_mask_of_infinities_is_whole_in_the_reference() -> None:
    model = nn.Sequential(Masked(), Masked())
    activations = Activations(model, dict(model.named_parameters()), ["0", "1"], Alone())
    activations.renew()
    activations.look(True)
    model(torch.randn(5, 4, 8))
    assert all(0 <= loss < 1e-3 for loss in activations.losses())
    with pytest.raises(UserCodeError, match="without a call of Sequential itself"):
        activations.losses()


@pytest.mark.parametrize("criterion", ["movement", "gradient", "activations"])
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_what_is_not_finite_has_not_settled(criterion: Any, number: float) -> None:
    """Nor gets into the state; the block before it is frozen, as without it, and it is said once."""
    config = FreezeByProgress(criterion=criterion, window=2, patience=1, below=0.7, most=0.9)
    progress = Plasticity(config, blocks=3)
    for measured in (1.0, 9.0, 1.0, 1.0, 1.0, 1.0, 1.0):
        progress.observe([measured, number, 2 * measured], lr=1.0)
        assert all(torch.tensor(each).isfinite().all() for each in list(progress.to_state().values())[1:])
    assert progress.frozen == 1
    assert len(progress.lines) == 1
    assert f'criterion = "{criterion}": what is measured of block 1 is not finite' in progress.lines[0]


def test_another_criterion_measures_anew() -> None:
    """What is frozen stays frozen."""
    before = Plasticity(FreezeByProgress(criterion="movement"), 3, 1, 0.5, [9.0] * 3, [2, 1, 1], [1.0] * 3, [[1.0] * 3])
    after = Plasticity(FreezeByProgress(criterion="gradient"), blocks=3)
    after.load(before.to_state())
    assert after == Plasticity(after.config, 3, 1, 0.5)
    assert len(after.lines) == 1
    assert 'criterion was "movement" before and is "gradient" now' in after.lines[0]


def test_a_pattern_names_parameters_or_modules() -> None:
    assert matches("blocks.0.attention.query.weight", ["blocks.0"])
    assert matches("blocks.0.attention.query.weight", ["*.query.weight"])
    assert not matches("blocks.10.attention.query.weight", ["blocks.1"])
    names = ["embedding.weight", "blocks.0.a", "blocks.0.b", "blocks.1.a", "norm.weight"]
    assert blocks_of(names) == [["embedding.weight", "blocks.0.a", "blocks.0.b"], ["blocks.1.a"]]
    config = FreezeConfig(later=(FreezeLater(layers=("blocks.0",), at=3, until=5),))
    assert [len(frozen_by_schedule(config, step, names)) for step in (2, 3, 4, 5)] == [0, 2, 2, 0]


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (FreezeConfig(layers=("blocks.7",)), '"blocks.7" fits no parameter or module'),
        (FreezeConfig(layers=("*",)), "leaves nothing to train"),
        (FreezeConfig(layers=("*",), train=("head",)), 'freeze.train: "head" fits no'),
    ],
)
def test_what_cannot_be_frozen_is_refused(config: FreezeConfig, sentence: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(ConfigError, match=sentence):
        freeze(model, config)


def test_what_is_named_in_train_stays_trained() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    freeze(model, FreezeConfig(layers=("*",), train=("*.bias",)))
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["0.bias", "1.bias"]


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize("layout", ["replicate", "ZeRO-3", "pipeline", "tensor"])
def test_verify_proves_a_half_frozen_model(ranks, folder: Path, layout: str) -> None:
    world, tables = LAYOUTS[layout]
    verdict, *_ = ranks(world, verified, BASE | HALF | tables, str(folder), False, 2)
    assert verdict["holds"], verdict["sentence"]
