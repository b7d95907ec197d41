"""What a run is between two steps: everything that a checkpoint holds, in sections.

    section      tensors                                    facts
    model        parameters, persistent buffers             -
    optimizer    its slots, by parameter                    -
    progress     -                                          steps, samples, the cursor, what may not change
    watch        -                                          the best evaluation so far, if anybody asks
    others       the strategy's, such as outer momentum     the loss scale, the bucket size that was found

Every tensor goes by its name in the unsplit model. If ranks split the model, a name stands for the parts of that tensor
that this rank has: of the weights what it computes with, of the optimizer's slots what it updates. All ranks together
then hold the same tensors in every layout, and a checkpoint of one is a checkpoint of all.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from shoal.data.cursor import Cursor, Interval
from shoal.engine.extra_state import ExtraSection
from shoal.engine.growing_batch import BatchGrowth
from shoal.engine.save_policy import Watch
from shoal.errors import UsageError, UserCodeError
from shoal.optim.average import averages_shown
from shoal.optim.declared import Slot
from shoal.optim.layer_statistics import SeesLayers
from shoal.optim.slots import local, make_slots, named_slots, pack_slots, slot_and_parameter
from shoal.state import Held, Owned, Section, Target, targets_of, views
from shoal.topology.holding import Box, Dims

MODEL, OPTIMIZER = "model/", "optimizer/"
_OF_REPLICA = re.compile(rf"replica-(\d+)/{OPTIMIZER}")


class HeldWeight(NamedTuple):
    """A weight as this rank computes with it: `tensor` is the part `box` of one of `global_shape`."""

    name: str
    tensor: Tensor
    global_shape: Dims
    box: Box


@dataclass
class ModelSection:
    """The model's parameters and persistent buffers.

    For split models: `held` are the parts of parameters that are saved from this rank (None: all of them, whole),
    `owned` the tensors that the optimizer steps, and `names` all parameters and persistent buffers of the unsplit model
    (tied ones once). `gather`: brings the model what was read into `owned`, where it computes with other numbers; all
    ranks call it together.
    """

    model: nn.Module
    held: Sequence[HeldWeight] | None = None
    owned: Sequence[Owned] = ()
    names: Collection[str] = ()
    gather: Callable[[], None] | None = None
    name: str = field(default="model", init=False)

    def tensors(self) -> dict[str, Held]:
        """`model/<name>`; nothing for parts that other ranks have."""
        all_names: dict[str, Held] = {f"{MODEL}{name}": () for name in self.names}
        whole = {f"{MODEL}{name}": tensor for name, tensor in self._whole().items()}
        return all_names | whole | _parts(self.held or ())

    def targets(self, saved: Mapping[str, torch.dtype] | None = None) -> dict[str, Held]:
        """What is saved, and what the optimizer steps in memory of its own."""
        targets = {name: list(targets_of(held)) for name, held in self.tensors().items()}
        filled = {_memory(target.tensor) for parts in targets.values() for target in parts}
        for owned in self.owned:
            if _memory(owned.parameter) not in filled:
                targets.setdefault(f"{MODEL}{owned.name}", []).extend(_views(local(owned.parameter), owned))
        return dict(targets)

    def elsewhere(self, saved: Mapping[str, torch.dtype]) -> set[str]:
        """What other ranks have is listed in `names` already."""
        return set()

    def facts(self) -> dict[str, Any]:
        return {}

    def load(self, facts: Mapping[str, Any]) -> None:
        """There are no facts."""

    def _whole(self) -> dict[str, Tensor]:
        """What of the module's state is whole here: buffers, and the parameters unless `held` lists their parts."""
        found: dict[str, Tensor] = {}
        seen: set[int] = set()
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            if not isinstance(tensor, Tensor):
                raise UserCodeError(
                    f"the module's state {name} is of type {type(tensor).__name__}; checkpoints hold tensors only"
                )
            if id(tensor) not in seen and not (self.held is not None and isinstance(tensor, Parameter)):
                seen.add(id(tensor))
                found[name] = tensor.detach()
        return found


@dataclass
class OptimizerSection:
    """The optimizer's state. `slots` is what it declares for each parameter; `owned` are the tensors that it steps
    (None: the parameters of `model`, as they are), `names` all parameters of the unsplit model.

    `replica` is this rank's number among replicas that have optimizer state of their own (None: all have the same).
    Loaded by more replicas than saved it, a state is given to several. `only` are the parameters that it steps, if
    there are several optimizers.
    """

    optimizer: torch.optim.Optimizer
    slots: Sequence[Slot]
    model: nn.Module
    owned: Sequence[Owned] | None = None
    names: Collection[str] = ()
    replica: int | None = None
    only: Collection[str] | None = None
    name: str = field(default="optimizer", init=False)

    def tensors(self) -> dict[str, Held]:
        """`optimizer/<slot>/<parameter>`, or `replica-<number>/optimizer/...`."""
        return self._located(named_slots(self.optimizer, self._stepped), _prefix(self.replica))

    def targets(self, saved: Mapping[str, torch.dtype]) -> dict[str, Held]:
        """The saved slots, made anew in the optimizer."""
        prefix = self._source(saved)
        slots = {name.removeprefix(prefix): dtype for name, dtype in saved.items() if name.startswith(prefix)}
        return self._located(make_slots(self.optimizer, self._stepped, slots, slots=self.slots), prefix)

    def elsewhere(self, saved: Mapping[str, torch.dtype]) -> set[str]:
        """The slots of parameters that the model has, on whichever rank."""
        prefix = self._source(saved)
        slots = (name for name in saved if name.startswith(prefix))
        return {name for name in slots if slot_and_parameter(name.removeprefix(prefix))[1] in self.names}

    def facts(self) -> dict[str, Any]:
        return {}

    def load(self, facts: Mapping[str, Any]) -> None:
        """There are no facts."""

    def _source(self, saved: Iterable[str]) -> str:
        """The prefix of the saved slots that are this rank's: those of its own replica, if replicas had their own."""
        numbers = {int(found[1]) for name in saved if (found := _OF_REPLICA.match(name))}
        return _prefix((self.replica or 0) % (max(numbers) + 1) if numbers else None)

    @property
    def _stepped(self) -> list[tuple[str, Parameter]]:
        found = self.model.named_parameters() if self.owned is None else ((o.name, o.parameter) for o in self.owned)
        return [(name, parameter) for name, parameter in found if self.only is None or name in self.only]

    def _located(self, slots: Mapping[str, Tensor], prefix: str) -> dict[str, Held]:
        """Slots under the names that they are saved by, and where in the unsplit parameter they lie."""
        owned, whole = {own.name: own for own in self.owned or ()}, {slot.name for slot in self.slots if slot.whole}
        found: dict[str, Held] = {}
        for key, tensor in slots.items():
            slot, name = slot_and_parameter(key)
            found[f"{prefix}{key}"] = tensor if slot in whole else _slot(tensor, owned.get(name))
        return found


@dataclass
class Progress:
    """How far the run has come. `step` is the number of steps taken.

    `identity` is what may not change between two starts of a run, by the key that says it: the order of the samples and
    the optimizer. With another one, "exactly once" or the moments would be lost in silence. `contents` are hashes of
    some training samples, by what a sentence calls them; a checkpoint keeps those of the run that wrote it.
    """

    identity: Mapping[str, Any]
    contents: Mapping[str, str] = field(default_factory=dict)
    cursor: Cursor = field(default_factory=Cursor)
    step: int = 0
    samples: int = 0
    tokens: int = 0
    skipped: int = 0

    def advance(self, interval: Interval, *, tokens: int = 0, committed: bool = True) -> None:
        """A step is taken, on the samples at the positions `interval`: they are used, committed or not.

        Raises `AssertionError` for other positions than those that follow.
        """
        cursor, following = self.cursor.take(len(interval))
        if following != interval:
            raise AssertionError(f"the step took positions {interval}, the run's cursor stands at {following}")
        self.cursor = cursor
        self.step += 1
        self.samples += len(interval)
        self.tokens += tokens
        self.skipped += not committed

    def facts(self) -> dict[str, Any]:
        """Random numbers follow from the seed and `step`, so there is no generator to save."""
        return {
            "step": self.step,
            "samples": self.samples,
            "tokens": self.tokens,
            "skipped": self.skipped,
            "identity": dict(self.identity),
            "contents": dict(self.contents),
            "cursor": self.cursor.to_state(),
        }

    def load(self, facts: Mapping[str, Any]) -> None:
        """Goes on from there. Raises `UsageError` if the saved run was another one."""
        if "identity" not in facts:
            raise UsageError(
                "this run directory holds imported weights and no run to go on with: give another run.directory, and "
                "this one as run.warm_start"
            )
        for key, value in facts["identity"].items():
            if self.identity.get(key) != value:
                raise UsageError(
                    f"this run directory was trained with {key} = {value!r}, and now it is {self.identity.get(key)!r}; "
                    "keep it, or give another run.directory (and run.warm_start to begin with these weights)"
                )
        for sample, saved in facts.get("contents", {}).items():  # earlier versions saved none
            if self.contents.get(sample, saved) != saved:
                raise UsageError(
                    f"this run directory was trained on other data: {sample} is not what it was, and a run uses each "
                    "sample once an epoch; bring back the data, or give another run.directory (and run.warm_start to "
                    "begin with these weights)"
                )
        self.step, self.samples, self.tokens = int(facts["step"]), int(facts["samples"]), int(facts["tokens"])
        self.skipped, self.cursor = int(facts["skipped"]), Cursor.from_state(facts["cursor"])

    def take_order(self, facts: Mapping[str, Any], *, source: str) -> None:
        """Begins with the samples that follow those which the run of `facts`, at `source`, had used.

        Raises `UsageError` where it read others, or in another order.
        """
        for key, value in facts.get("identity", {}).items():
            if key not in ("optimizer.kind", "sparsity.kind") and self.identity.get(key) != value:
                raise UsageError(
                    f"run.warm_start_data: {source} was trained with {key} = {value!r}, and this run has "
                    f"{self.identity.get(key)!r}, so that its next samples are not those of this run; leave "
                    "warm_start_data out"
                )
        if "cursor" not in facts:
            raise UsageError(f"run.warm_start_data: {source} holds weights and no run; leave warm_start_data out")
        self.cursor = Cursor.from_state(facts["cursor"])


class HasFacts(Protocol):
    """Something with a state that is no tensor."""

    def to_state(self) -> dict[str, Any]: ...

    def load(self, state: Mapping[str, Any]) -> None: ...


@runtime_checkable
class Measures(Protocol):
    """A section that tells something of itself in every step."""

    def figures(self) -> dict[str, float]:
        """Measurements by name."""
        ...


@runtime_checkable
class Tells(Protocol):
    """A section that now and then has something to say that somebody should act on."""

    def take_lines(self) -> list[str]:
        """Sentences, each once."""
        ...


@runtime_checkable
class Notes(Protocol):
    """A section that says what it does."""

    def take_notes(self) -> list[str]:
        """Sentences, each once."""
        ...


@dataclass(frozen=True)
class FactsSection:
    """The section of something without tensors."""

    name: str
    holder: HasFacts

    def tensors(self) -> dict[str, Held]:
        return {}

    def targets(self, saved: Mapping[str, torch.dtype]) -> dict[str, Held]:
        return {}

    def elsewhere(self, saved: Mapping[str, torch.dtype]) -> set[str]:
        return set()

    def facts(self) -> dict[str, Any]:
        return self.holder.to_state()

    def load(self, facts: Mapping[str, Any]) -> None:
        self.holder.load(facts)


@dataclass(frozen=True)
class TrainState:
    """All of it. Progress stands at the top of a checkpoint's state, every other section under its name."""

    model: ModelSection
    optimizer: OptimizerSection
    progress: Progress
    others: Sequence[Section] = ()
    watch: Watch = field(default_factory=Watch)
    growth: BatchGrowth | None = None

    def tensors(self) -> dict[str, Held]:
        """Every tensor of the state."""
        return {name: held for section in self._sections for name, held in section.tensors().items()}

    def targets(self, saved: Mapping[str, torch.dtype]) -> dict[str, Held]:
        """The tensors that a checkpoint holding `saved` (name and dtype) is read into."""
        return {name: held for section in self._sections for name, held in section.targets(saved).items()}

    def elsewhere(self, saved: Mapping[str, torch.dtype]) -> set[str]:
        """Those of `saved` that other ranks may fill."""
        return {name for section in self._sections for name in section.elsewhere(saved)}

    def to_json(self) -> dict[str, Any]:
        """What is not a tensor."""
        facts = {section.name: section.facts() for section in self._sections}
        return self.progress.facts() | {name: found for name, found in facts.items() if found}

    def load_json(self, state: Mapping[str, Any]) -> None:
        """Takes over what `to_json` gave. Raises `UsageError` if the saved run was another one."""
        self.progress.load(state)
        state = _current(state)
        for section in self._sections:
            saved = state.get(section.name)
            if saved is not None:
                section.load(saved)

    def pack(self) -> None:
        """After everything was read: brings optimizers' slots into the form that they are kept in."""
        for section in self._optimizers:
            pack_slots(section.optimizer)

    def gather(self) -> None:
        """After all ranks have read everything: the model computes with it."""
        if self.model.gather is not None:
            self.model.gather()

    def restore_extra(self) -> None:
        """After everything was read: hands a script's objects what was read for them."""
        for section in self.others:
            if isinstance(section, ExtraSection):
                section.restore()

    def averages_shown(self, gather: Callable[[], None]) -> AbstractContextManager[None]:
        """See `shoal.optim.average`."""
        return averages_shown([section.optimizer for section in self._optimizers], gather)

    def close(self) -> None:
        """Takes the hooks of optimizers off the model."""
        for section in self._optimizers:
            if isinstance(section.optimizer, SeesLayers):
                section.optimizer.close()

    def figures(self) -> dict[str, float]:
        """What sections measure."""
        measuring = [each for each in (*self.others, self.growth) if isinstance(each, Measures)]
        return {name: value for section in measuring for name, value in section.figures().items()}

    def take_notes(self) -> list[str]:
        """What sections say that they do."""
        return [line for section in self.others if isinstance(section, Notes) for line in section.take_notes()]

    def take_lines(self) -> list[str]:
        """What sections have to say that somebody should act on."""
        return [line for section in self.others if isinstance(section, Tells) for line in section.take_lines()]

    @property
    def is_whole_on_replicas(self) -> bool:
        """Whether ranks with the same part of the model have the same state; not of matrices that have an owner."""
        return not any(slot.whole for section in self._optimizers for slot in section.slots)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Those whose state it holds."""
        return [section.optimizer for section in self._optimizers]

    @property
    def _optimizers(self) -> list[OptimizerSection]:
        return [section for section in self._sections if isinstance(section, OptimizerSection)]

    @property
    def _sections(self) -> Sequence[Section]:
        growth = [] if self.growth is None else [FactsSection("batch", self.growth)]
        return (self.model, self.optimizer, *self.others, *growth, FactsSection("watch", self.watch))


def _current(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """A saved state with the names of today: the bucket size that was found once stood under "sync"."""
    found = state.get("sync")
    if isinstance(found, Mapping) and "sizes" in found and "gradients" not in state:
        return {**state, "gradients": found, "sync": None}
    return state


def _prefix(replica: int | None) -> str:
    return OPTIMIZER if replica is None else f"replica-{replica}/{OPTIMIZER}"


def held_pieces(owned: Iterable[Owned]) -> list[HeldWeight]:
    """The weights of a rank that has nothing of them but what it updates (ZeRO-3)."""
    return [
        HeldWeight(own.name, target.tensor, target.global_shape, target.box)
        for own in owned
        for target in _views(local(own.parameter), own)
    ]


def _parts(held: Iterable[HeldWeight]) -> dict[str, list[Target]]:
    parts: dict[str, list[Target]] = defaultdict(list)
    for name, tensor, global_shape, box in held:
        parts[f"{MODEL}{name}"].append(Target(local(tensor).detach(), tuple(global_shape), box.offset))
    return dict(parts)


def _slot(tensor: Tensor, owned: Owned | None) -> Held:
    """A slot of one number belongs to the whole parameter; one of the tensor's size lies as the tensor does; any other
    shape belongs to a parameter that is whole on this rank.
    """
    if owned is None or tensor.dim() == 0 or tensor.numel() != owned.parameter.numel():
        return tensor
    return _views(tensor, owned)


def _views(tensor: Tensor, owned: Owned) -> list[Target]:
    return views(tensor, ((each.box, each.start) for each in owned.regions), global_shape=owned.holding.global_shape)


def _memory(tensor: Tensor) -> int:
    return local(tensor).untyped_storage().data_ptr()
