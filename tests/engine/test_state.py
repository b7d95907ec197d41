"""A checkpoint of one layout is a checkpoint of all: weights and optimizer state, bit by bit. Ranks are simulated."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn
from torch.nn import Parameter

from shoal.checkpoint import manifest as manifests
from shoal.checkpoint.agreement import LocalExchange
from shoal.checkpoint.objects import Places
from shoal.checkpoint.weights import export, import_weights
from shoal.engine.precision import LossScaler
from shoal.engine.recovery import Loaded, load_weights, resume
from shoal.engine.state import (
    FactsSection,
    HeldWeight,
    ModelSection,
    OptimizerSection,
    Progress,
    TrainState,
    held_pieces,
)
from shoal.errors import CorruptCheckpoint, UsageError
from shoal.optim.config import AdamW
from shoal.state import Owned, Target, Trained, is_counted, owned_run, owned_whole, targets_of
from shoal.topology.holding import AlongTensor, Box, held, held_expert, whole
from shoal.topology.layout import Layout
from tests.checkpoint.states import on_ranks, saver_for
from tests.waiting import HANG_S

IDENTITY = {"optimizer.kind": "adamw"}
SPLIT_DIM = {"embed.weight": 0, "up.weight": 0, "up.bias": 0, "down.weight": 1}
STAGES = (("embed", "up"), ("down", "norm"))


class Net(nn.Module):
    """Two stages; matrices split by rows or columns, a vector that nobody splits, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(11, 4), nn.Linear(4, 7), nn.Linear(7, 4, bias=False)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.norm(self.down(torch.tanh(self.up(self.embed(tokens)))))


def state_of(model: nn.Module, stepped=None, owned=None, held=None, names=()) -> TrainState:
    """A state whose optimizer steps `stepped`, or the model's own parameters."""
    optimizer = torch.optim.AdamW(model.parameters() if stepped is None else stepped, lr=0.01)
    scaler = FactsSection("scaler", LossScaler(1.0, dynamic=False, growth_steps=1))
    return TrainState(
        ModelSection(model, held, owned or (), names), OptimizerSection(optimizer, AdamW().slots, model, owned, names),
        Progress(IDENTITY), [scaler],
    )  # fmt: skip


def train(state: TrainState, steps: int) -> None:
    """Steps on batches that follow from the number of the step."""
    for _ in range(steps):
        draw = torch.Generator().manual_seed(state.progress.step)
        state.optimizer.optimizer.zero_grad()
        state.model.model(torch.randint(0, 11, (8,), generator=draw)).square().sin().sum().backward()
        state.optimizer.optimizer.step()
        state.progress.step += 1


def reference(steps: int) -> TrainState:
    """One process, from fixed first values."""
    torch.manual_seed(3)
    state = state_of(Net())
    train(state, steps)
    return state


def slices(size: int, parts: int) -> list[tuple[int, int]]:
    """Uneven on purpose: the first parts are larger."""
    step = -(-size // parts)
    return [(min(size, at * step), min(size, (at + 1) * step)) for at in range(parts)]


def box_of(layout: Layout, rank: int, name: str, shape: tuple[int, ...]) -> Box:
    if name not in SPLIT_DIM or layout.tensor == 1:
        return whole(shape)
    dim = SPLIT_DIM[name]
    start, stop = slices(shape[dim], layout.tensor)[layout.index("tensor", rank)]
    offset, size = [0] * len(shape), list(shape)
    offset[dim], size[dim] = start, stop - start
    return Box(tuple(offset), tuple(size))


def rank_state(layout: Layout, rank: int, *, zero: int) -> TrainState:
    """What a rank of `layout` holds, filled with other numbers than any checkpoint's; `zero` as `memory.zero`, or 0."""
    model = Net()
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    names = frozenset(model.state_dict())
    if layout.pipeline == 2:
        for name in STAGES[1 - layout.index("pipeline", rank)]:
            delattr(model, name)
    owned, weights = [], []
    for name in [name for name, _ in model.named_parameters()]:
        box = box_of(layout, rank, name, shapes[name])
        local = Parameter(torch.full(box.shape, -7.0))
        module, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(module), leaf, local)
        along = AlongTensor(split=name in SPLIT_DIM and layout.tensor > 1)
        holding = held(layout, rank, name, shapes[name], boxes=(box,), tensor=along)
        if zero == 0:
            owned.append(Owned(name, local, holding, owned_run(holding, local, 0, local.numel()).regions))
        else:
            start, stop = slices(local.numel(), len(holding.shard))[holding.shard.index(rank)]
            piece = Parameter(local.detach().view(-1)[start:stop] if zero < 3 else torch.full((stop - start,), -7.0))
            if start < stop:
                owned.append(owned_run(holding, piece, start, stop))
        weights.append(HeldWeight(name, local, shapes[name], box))
    if zero == 3:
        weights = held_pieces(owned)
        for parameter in model.parameters():
            parameter.data = torch.empty(0)
    return state_of(model, [own.parameter for own in owned], owned=owned, held=weights, names=names)


def layouts() -> dict[str, tuple[Layout, int]]:
    """Each axis that cuts a parameter, alone and together."""
    return {
        "one": (Layout(), 0),
        "replicas": (Layout(replicate=2), 0),
        "zero 1": (Layout(shard=3), 1),
        "tensor": (Layout(tensor=2), 0),
        "pipeline": (Layout(pipeline=2), 0),
        "zero 3": (Layout(shard=2), 3),
        "all": (Layout(replicate=2, shard=2, tensor=2, pipeline=2), 1),
    }


def load(state: TrainState, directory: Path) -> None:
    """As the engine does at a start."""
    assert resume(state, directory, announce=lambda _, find: find(), warn=pytest.fail) is not None


def save(directory: Path, states: list[TrainState]) -> None:
    """All ranks save."""
    exchange = LocalExchange()
    savers = [
        saver_for(directory, rank=rank, world_size=len(states), exchange=exchange, split=len(states) > 1)
        for rank in range(len(states))
    ]

    def work(rank: int) -> None:
        savers[rank].save(states[rank].progress.step, states[rank].tensors(), states[rank].to_json(), layout={})
        (report,) = savers[rank].wait(HANG_S)
        assert report.committed, report.error

    on_ranks(len(states), work)


def expect_equal(state: TrainState, want: dict[str, torch.Tensor]) -> None:
    """Every part that the rank holds is the part of the reference's tensor."""
    for name, parts in state.tensors().items():
        for part in targets_of(parts):
            assert torch.equal(part.tensor, want[name][part.box.slices]), name


@pytest.fixture(scope="module")
def origin(tmp_path_factory) -> tuple[Path, dict[str, torch.Tensor]]:
    """The checkpoint of one process, and its tensors."""
    state = reference(3)
    directory = tmp_path_factory.mktemp("origin")
    save(directory, [state])
    return directory, {name: targets_of(part)[0].tensor.clone() for name, part in state.tensors().items()}


@pytest.mark.parametrize("name", layouts())
def test_a_checkpoint_passes_through_any_layout(tmp_path, origin, name):
    """One process -> layout -> the next layout -> one process, which then trains on as if it had never stopped."""
    directory, want = origin
    names = list(layouts())
    way = [layouts()[name], layouts()[names[(names.index(name) + 1) % len(names)]]]
    for number, (layout, zero) in enumerate(way):
        states = [rank_state(layout, rank, zero=zero) for rank in range(layout.world_size)]
        for state in states:
            load(state, directory)
            expect_equal(state, want)
        directory = tmp_path / str(number)
        save(directory, states)
    end = state_of(Net())
    load(end, directory)
    expect_equal(end, want)
    assert set(end.tensors()) == set(want)
    assert end.progress.step == 3
    train(end, 2)
    expect_equal(end, {name: targets_of(part)[0].tensor for name, part in reference(5).tensors().items()})


def test_a_step_counter_is_one_number_in_every_layout():
    """`step` is not cut, the moments are."""
    state = rank_state(Layout(shard=2), 1, zero=1)
    for own in state.model.owned:
        own.parameter.grad = torch.ones_like(own.parameter)
    state.optimizer.optimizer.step()
    tensors = state.tensors()
    assert isinstance(tensors["optimizer/step/up.weight"], torch.Tensor)
    (part,) = targets_of(tensors["optimizer/exp_avg/norm.bias"])
    assert part == Target(part.tensor, (4,), (2,))


def test_weights_alone_start_another_layout(tmp_path, origin):
    """A file of exported weights, imported, is what every rank of a split run begins with."""
    directory, want = origin
    export(directory, tmp_path / "weights.safetensors")
    import_weights(tmp_path / "weights.safetensors", tmp_path / "imported")
    layout, zero = layouts()["all"]
    for rank in range(layout.world_size):
        state = rank_state(layout, rank, zero=zero)
        assert load_weights(state, tmp_path / "imported", announce=lambda _, find: find(), repair="") == 0
        expect_equal(state, want)
        assert state.progress.step == 0


def test_imported_weights_are_no_run_to_go_on_with(tmp_path, origin):
    """Training in that folder is refused by a sentence that names the key to use."""
    export(origin[0], tmp_path / "weights.safetensors")
    import_weights(tmp_path / "weights.safetensors", tmp_path / "imported")
    with pytest.raises(UsageError, match=r"run\.warm_start"):
        load(state_of(Net()), tmp_path / "imported")


def contents_changed(directory: Path, contents: dict[str, str] | None) -> None:
    """The manifest of the newest checkpoint with other hashes of samples; None: without any, as earlier versions'."""
    path = Places(directory).manifest(2)
    manifest = manifests.read(path)
    state = {key: value for key, value in manifest.state.items() if key != "contents"}
    state |= {} if contents is None else {"contents": contents}
    path.write_bytes(manifests.encode(msgspec.structs.replace(manifest, state=state)))
    (directory / "checkpoints" / "latest").unlink(missing_ok=True)


def test_other_contents_of_the_data_are_refused_by_the_sample(tmp_path):
    """A hash that differs is named; the same ones, samples that have none now, and checkpoints without any are not."""
    now = {"training sample 0": "aa", "training sample 7": "bb"}
    state = state_of(Net())
    state.progress.contents = now
    train(state, 2)
    save(tmp_path, [state])
    for saved in (now, {**now, "training sample 3": "cc"}, {}, None):
        contents_changed(tmp_path, saved)
        again = state_of(Net())
        again.progress.contents = now
        assert resume(again, tmp_path, announce=lambda _, find: find(), warn=lambda _: None) is not None
    contents_changed(tmp_path, {**now, "training sample 7": "b"})
    with pytest.raises(UsageError, match=r"other data: training sample 7 is not what it was.* bring back the data"):
        resume(again, tmp_path, announce=lambda _, find: find(), warn=lambda _: None)


def test_weights_of_another_model_are_refused_with_the_callers_repair(origin):
    """The sentence names the directory that they are from, and nothing of the run's own."""
    with pytest.raises(UsageError, match=r"holds another model: .*\. name another run") as refused:
        load_weights(state_of(nn.Linear(2, 2)), origin[0], announce=lambda _, find: find(), repair="name another run")
    assert str(origin[0]) in str(refused.value)
    assert "run.directory" not in str(refused.value)


def test_a_state_that_is_not_of_this_version_is_passed_over(tmp_path):
    """The checkpoint before it is loaded, and the sentence says why; without one, nothing is trained in silence."""
    for steps in (2, 4):
        save(tmp_path, [reference(steps)])
    newest = Places(tmp_path).manifest(4)
    manifest = manifests.read(newest)
    strange = msgspec.structs.replace(manifest, state={**manifest.state, "identity": []})
    newest.write_bytes(manifests.encode(strange))
    (tmp_path / "checkpoints" / "latest").unlink()
    said, state = [], state_of(Net())
    loaded = resume(state, tmp_path, announce=lambda _, find: find(), warn=said.append)
    assert loaded == Loaded(2, manifests.read(Places(tmp_path).manifest(2)).hash)
    expect_equal(state, {name: targets_of(part)[0].tensor for name, part in reference(2).tensors().items()})
    assert len(said) == 1
    assert (
        "rank 0 cannot load the checkpoint of step 4: its state is not one of this version (AttributeError" in said[0]
    )
    shutil.rmtree(Places(tmp_path).step(2))
    with pytest.raises(CorruptCheckpoint, match="none can be used: rank 0 cannot load the checkpoint of step 4"):
        resume(state_of(Net()), tmp_path, announce=lambda _, find: find(), warn=said.append)


def test_a_parameter_that_no_stage_has_is_missed_on_all(origin):
    """Names of the unsplit model that the checkpoint has not, or that the model has not, are refused by every rank."""
    for change, said in (
        (lambda names: names | {"tail.weight"}, "missing in it: model/tail.weight"),
        (lambda names: names - {"embed.weight"}, "only in it: model/embed.weight"),
    ):
        state = rank_state(Layout(pipeline=2), 1, zero=0)
        state.model.names = state.optimizer.names = change(state.model.names)
        with pytest.raises(UsageError, match=said):
            load(state, origin[0])


def test_a_parameter_that_no_rank_holds_is_refused_before_anything_is_written(tmp_path):
    """What a rank holds may lack what others have; what all lack would be lost in silence, and is named."""
    states = [rank_state(Layout(tensor=2), rank, zero=0) for rank in range(2)]
    for state in states:
        assert state.model.held is not None
        state.model.held = [weight for weight in state.model.held if weight.name != "up.bias"]
    with pytest.raises(UsageError, match=r"no rank holds any of model/up\.bias"):
        save(tmp_path, states)


def test_experts_that_ranks_of_a_tensor_group_hold_whole_are_counted_once() -> None:
    """Their gradient is a sum over these ranks, as that of pieces is, which are each another part."""
    counted, pieces = [], []
    for rank in range(2):
        holding = held_expert(Layout(tensor=2), rank, "up", (4, 2, 2))
        experts = Parameter(torch.zeros(4, 2, 2))
        counted.append(is_counted(owned_whole(Trained(holding, experts))))
        pieces.append(is_counted(owned_run(holding, Parameter(torch.zeros(8)), 8 * rank, 8 * rank + 8)))
    assert (counted, pieces) == ([True, False], [True, True])
