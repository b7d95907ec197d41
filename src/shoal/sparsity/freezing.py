"""Layers that are not trained: by rule, by schedule, by progress.

What `freeze.layers` names never requires a gradient: it has no bucket, no optimizer state, and autograd keeps no
activations for it unless something before it is trained.

Layers that are frozen later have both, and give them up: their `.grad` is None in the optimizer's step, their state is
dropped but for averages, replicas do not send their gradients (`shoal.sparsity.exchange`), and autograd does not record
what lies before the first trained layer. Trained again, their optimizer state begins anew. What is frozen follows from
the step alone, but for progress, which is saved.

By progress, blocks are frozen from the front when they hardly change any more (`shoal.sparsity.plasticity`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from shoal.comm.collective import Collective, home_of
from shoal.errors import ConfigError
from shoal.sparsity.config import FreezeConfig
from shoal.sparsity.masks import Masks
from shoal.sparsity.plasticity import Activations, Plasticity
from shoal.state import Held, Owned, is_counted, views

REFERENCE, GRADIENT = "freeze/reference/", "freeze/gradient/"
_BLOCK = re.compile(r"^(.*?(?:\.|\.(?:\w+_)?(?:layer|block)_)\d+)\.")


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a pattern fits the parameter `name`, or a module that it is in."""
    path = name.split(".")
    names = [".".join(path[:length]) for length in range(1, len(path) + 1)]
    return any(fnmatchcase(each, pattern) for pattern in patterns for each in names)


def freeze(model: nn.Module, config: FreezeConfig) -> None:
    """Freezes what `freeze.layers` names, in place. Raises `ConfigError` where a pattern fits nothing, or all is
    frozen.
    """
    names = [name for name, _ in model.named_parameters()]
    for key, patterns in _patterns(config).items():
        for pattern in patterns:
            if not any(matches(name, [pattern]) for name in names):
                raise ConfigError(
                    f"freeze.{key}: {json.dumps(pattern)} fits no parameter or module of this model, which has "
                    f"{', '.join(names[:3])}, ..."
                )
    for name, parameter in model.named_parameters():
        if matches(name, config.layers) and not matches(name, config.train):
            parameter.requires_grad_(False)
    ever = [name for name, p in model.named_parameters() if p.requires_grad]
    always = [each.layers for each in config.later if each.at == 1 and each.until is None]
    if all(any(matches(name, layers) for layers in always) for name in ever):
        raise ConfigError("[freeze] leaves nothing to train: name fewer layers, or what stays trained in freeze.train")


def _patterns(config: FreezeConfig) -> dict[str, tuple[str, ...]]:
    later = {f"later[{number}].layers": each.layers for number, each in enumerate(config.later)}
    return {"layers": config.layers, "train": config.train, **later}


def frozen_by_schedule(config: FreezeConfig, step: int, names: Iterable[str]) -> frozenset[str]:
    """What `freeze.later` freezes in `step`."""
    now = [each.layers for each in config.later if each.at <= step and (each.until is None or step < each.until)]
    return frozenset(name for name in names if any(matches(name, layers) for layers in now))


def blocks_of(names: Iterable[str]) -> list[list[str]]:
    """The names of parameters by block, front to back: those below `<list>.<number>` or `<list>.layer_<number>`. What
    comes before the first block belongs to it; what follows the last one is in none, and so never frozen by progress.
    """
    blocks: dict[str, list[str]] = {}
    before: list[str] = []
    for name in names:
        found = _BLOCK.match(name)
        if found is not None:
            blocks.setdefault(found[1], [] if blocks else before).append(name)
        elif not blocks:
            before.append(name)
    return list(blocks.values())


def block_names(names: Iterable[str]) -> list[str]:
    """What the modules of these blocks are called, front to back."""
    found = (_BLOCK.match(name) for name in names)
    return list(dict.fromkeys(each[1] for each in found if each is not None))


class Rests(Protocol):
    """The optimizer's state of parameters that are frozen."""

    def forget(self, parameter: Parameter) -> None:
        """Before an update that leaves it alone."""

    def updated(self, parameter: Parameter) -> None:
        """After it."""


class Freezing:
    """Layers that are frozen for a part of a run, on one rank.

    `config` says how often blocks are compared (it is `resolved`), `parameters` are this rank's trained ones by their
    names in the unsplit model, `owned` the parts that the optimizer steps, `resting` its state of frozen ones, `names`
    all trained parameters of the unsplit model; the ranks of `replica` make up one model. `masks` are what the wire
    reads, `rate` is that of a step, `activations` what blocks are compared by (None: by weights or gradients).
    """

    name = "freeze"

    def __init__(
        self,
        config: FreezeConfig,
        parameters: Mapping[str, Parameter],
        owned: Sequence[Owned],
        resting: Rests,
        *,
        names: Sequence[str],
        replica: Collective,
        masks: Masks,
        rate: Callable[[int], float],
        activations: Activations | None = None,
    ) -> None:
        self._activations = activations
        self._config, self._parameters, self._owned, self._resting = config, parameters, owned, resting
        self._names, self._replica, self._masks, self._rate = names, replica, masks, rate
        self._blocks = blocks_of(names)
        self._block_of = {name: number for number, block in enumerate(self._blocks) for name in block}
        self._progress = None if config.progress is None else Plasticity(config.progress, len(self._blocks))
        self._every = 0
        if config.progress is not None:
            assert config.progress.every is not None, "the config is resolved"
            self._every = config.progress.every
        self._reference_every = self._every
        self._notes: list[str] = []
        self._references: dict[int, Tensor] = {}
        """Weights at the last comparison, or sums of the gradients since then."""
        self._by_gradient = config.progress is not None and config.progress.criterion == "gradient"
        self._prefix = GRADIENT if self._by_gradient else REFERENCE
        if config.progress is not None and len(self._blocks) < 2:
            raise ConfigError(
                "freeze.progress: this model has no blocks that follow each other (blocks.0, blocks.1, ...); use "
                "freeze.later"
            )

    def frozen(self, step: int) -> frozenset[str]:
        """The trained parameters of the unsplit model that are frozen in `step`."""
        front = self._blocks[: self._progress.frozen] if self._progress is not None else []
        return frozen_by_schedule(self._config, step, self._names) | {name for block in front for name in block}

    def begin(self, step: int) -> bool:
        """Before the forward of `step`. No weight changes."""
        frozen = self.frozen(step)
        for name, parameter in self._parameters.items():
            parameter.requires_grad_(name not in frozen)
        if frozen != self._masks.frozen:
            self._masks.frozen = frozen
            self._masks.version += 1
        if self._activations is not None:
            self._activations.look(self._compares(step))
        return False

    def explore(self, step: int, again: Callable[[], object]) -> None:
        """Nothing is wanted of other weights."""

    def agreed(self, step: int, *, scale: float = 1.0) -> None:
        """After the backward: the optimizer passes by what is frozen, and keeps nothing of it. Gradients are `scale`
        times what they should be.
        """
        for own in self._owned:
            if own.name in self._masks.frozen:
                own.parameter.grad = None
                self._resting.forget(own.parameter)
            elif self._by_gradient and own.name in self._block_of:
                total = self._references.setdefault(id(own), torch.zeros_like(own.parameter))
                total.add_(own.gradient, alpha=1 / scale)
        if self._activations is not None and self._progress is not None and self._compares(step):
            # Weights are whole here, and not yet gathered after an update.
            if self._activations.has_reference and self._is_comparable:
                self._observe(self._progress, step, self._activations.losses())
            self._activations.renew()
            self._reference_every = self._every

    @torch.no_grad()
    def updated(self, step: int) -> None:
        """After the update of `step`; all ranks call it together."""
        for own in self._owned:
            if own.name in self._masks.frozen:
                self._resting.updated(own.parameter)
        progress = self._progress
        if progress is None or self._activations is not None or not self._compares(step):
            return
        if self._by_gradient:
            if self._is_comparable:
                self._observe(progress, step, self._norms(lambda own: self._references[id(own)]).tolist())
            self._references = {}
        else:
            if step > self._every and self._is_comparable:  # there is something to compare with, on all ranks
                self._observe(progress, step, self._plasticity(step))
            self._references = {id(own): own.parameter.detach().clone() for own in self._owned}
        self._reference_every = self._every

    def skipped(self) -> bool:
        """A step without an update. No weight has changed."""
        return False

    def _compares(self, step: int) -> bool:
        """Whether blocks are compared with what they were after `step`."""
        return self._progress is not None and step % self._every == 0

    @property
    def _is_comparable(self) -> bool:
        """Whether the last reference was to be compared after as many steps as the next one is."""
        return self._reference_every == self._every

    def _observe(self, progress: Plasticity, step: int, measured: Sequence[float]) -> None:
        before = progress.frozen
        progress.observe(measured, self._rate(step))
        if progress.frozen != before:
            front = f"the first {progress.frozen} of {len(self._blocks)} blocks are frozen"
            thawed = "every block is trained again, for the learning rate has fallen"
            self._notes.append(f"freeze.progress: after step {step} {front if progress.frozen else thawed}")

    def _plasticity(self, step: int) -> list[float]:
        """That of every block, the same on all ranks."""
        moved = self._norms(lambda own: own.parameter.double() - self._references[id(own)].double())
        size = self._norms(lambda own: self._references[id(own)])
        return (moved / (size * self._rate(step) * self._every).clamp(min=1e-300)).tolist()

    def _norms(self, of: Callable[[Owned], Tensor]) -> Tensor:
        """The 2-norm of every block of what `of` gives of its parts, `[blocks]`, the same on all ranks."""
        squares = torch.zeros(len(self._blocks), dtype=torch.float64, device=self._device)
        for own in self._owned:
            if own.name in self._block_of and id(own) in self._references and is_counted(own):
                squares[self._block_of[own.name]] += of(own).double().square().sum()
        self._replica.all_reduce(squares).wait()
        return squares.sqrt()

    @property
    def _device(self) -> torch.device:
        return home_of([each.parameter for each in self._owned[:1]], self._replica)

    def figures(self) -> dict[str, float]:
        """`freeze/share`: the share of this rank's trained parameters that is frozen now."""
        numbers = {name: parameter.numel() for name, parameter in self._parameters.items()}
        frozen = sum(number for name, number in numbers.items() if name in self._masks.frozen)
        return {"freeze/share": frozen / max(1, sum(numbers.values()))}

    def take_lines(self) -> list[str]:
        """What is to be said since it was asked last, of how blocks settle."""
        if self._progress is None:
            return []
        lines, self._progress.lines = self._progress.lines, []
        return lines

    def take_notes(self) -> list[str]:
        """Which blocks progress has frozen since it was asked last, or trains again."""
        notes, self._notes = self._notes, []
        return notes

    def tensors(self) -> dict[str, Held]:
        """The references."""
        if self._activations is not None:
            return self._activations.tensors()
        return {
            f"{self._prefix}{own.name}": views(
                self._references[id(own)],
                ((region.box, region.start) for region in own.regions),
                global_shape=own.holding.global_shape,
            )
            for own in self._owned
            if id(own) in self._references
        }

    def targets(self, saved: Mapping[str, torch.dtype]) -> dict[str, Held]:
        """What a checkpoint that holds `saved` is read into."""
        if self._activations is not None:
            return self._activations.targets(saved)
        there = [own for own in self._owned if f"{self._prefix}{own.name}" in saved]
        self._references = {id(own): torch.zeros_like(own.parameter) for own in there}
        return self.tensors()

    def elsewhere(self, saved: Mapping[str, torch.dtype]) -> set[str]:
        """Those of other ranks."""
        return {name for name in saved if name.startswith((REFERENCE, GRADIENT))}

    def facts(self) -> dict[str, Any]:
        """How blocks have settled."""
        return {} if self._progress is None else self._progress.to_state() | {"every": self._reference_every}

    def load(self, facts: Mapping[str, Any]) -> None:
        """Goes on from there; with another interval, only what is frozen is taken over."""
        if self._progress is None:
            return
        self._progress.load(facts)
        self._reference_every = int(facts.get("every", self._every))  # earlier versions did not say it
        if not self._is_comparable:
            self._progress.forget(f"every was {self._reference_every} before and is {self._every} now")
