"""`SparseTraining`: masks in a run. What a step asks of it, what it keeps, and what a checkpoint holds of it.

A step under masks is that of a dense model with three additions, each number by number, so that they know of no layout:

    before the forward   in the first step of a process: masked weights are 0
    after the backward   masks change where they are due; then the agreed gradient of masked weights is 0, and so is
                         what the optimizer keeps for them
    after the update     masked weights are 0, whatever the optimizer made of them

Weights that a change brings back begin at zero, and so does what the optimizer keeps for them. Under
`kind = "top_kast"` masked weights wait: their values are kept aside, come back for the update, and are set aside again.

A checkpoint holds bits of whole parameters, `sparsity/mask/<name>` and, of Top-KAST, `sparsity/trained/<name>`; and
numbers that lie as the weights do, `sparsity/movement/<name>` (sums of -gradient x weight),
`sparsity/waiting/<name>` (values kept aside) and `sparsity/gate/<name>` (`shoal.sparsity.gates`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.comm.collective import Collective
from shoal.errors import Diverged
from shoal.sparsity.changes import MaskChanges, NewMasks, Ticket
from shoal.sparsity.config import L0, Grasp, Movement, Sparse, TopKAST
from shoal.sparsity.gates import Gates
from shoal.sparsity.mask_plan import MaskPlan
from shoal.sparsity.masks import Masks, packed_bytes
from shoal.sparsity.owners import Owners, taken
from shoal.sparsity.packed_state import KeptNumbers, PackedState
from shoal.sparsity.patterns import check_divides
from shoal.sparsity.semi_structured import SemiStructured
from shoal.state import Held, Owned, is_counted, views

PREFIX = "sparsity/"
MASK, TRAINED = f"{PREFIX}mask/", f"{PREFIX}trained/"
MOVEMENT, WAITING = f"{PREFIX}movement/", f"{PREFIX}waiting/"
GATES = (f"{PREFIX}gate/", f"{PREFIX}gate_mean/", f"{PREFIX}gate_square/")


@dataclass(frozen=True)
class WholeNorm:
    """The 2-norm of the agreed gradient of the whole model, as it is now: `owned` is all that this rank steps, and the
    ranks of `replica` together step the model.
    """

    owned: Sequence[Owned]
    replica: Collective
    device: torch.device

    def __call__(self) -> float:
        """The same on every rank; all call it together."""
        square = torch.zeros((), dtype=torch.float64, device=self.device)
        for own in self.owned:
            if own.parameter.grad is not None and is_counted(own):
                gradient = own.parameter.grad
                square += (gradient._values() if gradient.is_sparse else gradient).double().square().sum()
        self.replica.all_reduce(square).wait()
        return math.sqrt(float(square))


class SparseTraining:
    """Masks of the layers that `owners` knows, over the parts that `optimizer` steps. `masks` are what the wire reads,
    `state_home` is where the optimizer's state lives (None: where it leaves it).

    `held` are the layers of which this rank has a part; `whole_norm` measures the gradient of the whole model;
    `ticket`: see `Lottery`. Raises `ConfigError` where the pattern
    does not divide a layer, or nothing of it would be left.
    """

    name = "sparsity"

    def __init__(
        self,
        plan: MaskPlan,
        owners: Owners,
        masks: Masks,
        optimizer: torch.optim.Optimizer,
        *,
        seed: int,
        held: Iterable[str],
        whole_norm: WholeNorm,
        ticket: Ticket | None = None,
        state_home: PackedState | None = None,
    ) -> None:
        self._whole_norm, self._state_home = whole_norm, state_home
        self.products: SemiStructured | None = None
        """What computes with the kept half of weights; None: layers compute as they are."""
        self.owners, self.masks, self._optimizer = owners, masks, optimizer
        self._held = frozenset(held) | {name for name in owners.shapes if owners.owns(name)}
        self._plan, self._wider = plan, Masks()
        self._kept: dict[int, Tensor] = {}
        self._trained: dict[int, Tensor] = {}
        self._slots: dict[str, dict[int, Tensor]] = {prefix: {} for prefix in (MOVEMENT, WAITING, *GATES)}
        self._products: dict[int, Tensor] = {}
        self._gates = None
        if isinstance(self._config, L0):
            slots = [self._slots[prefix] for prefix in (*GATES, WAITING)]
            self._gates = Gates(
                self._config, owners.owned, slots, seed=seed, replica=whole_norm.replica, device=owners.device
            )
        self._stale, self._masked, self._density = True, False, (-1, 1.0)
        self._changed = False
        self._changes = MaskChanges(plan, owners, masks, seed, self._measured, ticket=ticket)
        for name in owners.shapes:
            check_divides(name, owners.rows_shape(name), self._config)
        self._changes.counts(self._config.final_density)

    @property
    def _config(self) -> Sparse:
        return self._plan.config

    def figures(self) -> dict[str, float]:
        """`sparsity/density`: the share of weights that is kept now, of the layers whose masks this rank has."""
        if self._gates is not None and not self._masked:
            return {"sparsity/density": self._gates.expected}
        if self._density[0] != self.masks.version:
            whole = [(self.masks.whole(name, shape), shape) for name, shape in self._shapes.items()]
            kept = sum(torch.Size(shape).numel() if mask is None else int(mask.sum()) for mask, shape in whole)
            share = kept / max(1, sum(torch.Size(shape).numel() for _, shape in whole))
            self._density = self.masks.version, share
        return {"sparsity/density": self._density[1]}

    @property
    def held_bytes(self) -> int:
        """Of masks, and of what is kept beside them."""
        bits = [each for masks in (self.masks, self._wider) for each in masks.bits.values()]
        numbers = [each for slot in (self._kept, self._trained, *self._slots.values()) for each in slot.values()]
        return sum(each.nbytes for each in (*bits, *numbers))

    @torch.no_grad()
    def begin(self, step: int) -> bool:
        """Before the forward of `step`, on all ranks together. Whether weights may have changed: then they are to be
        gathered.
        """
        changed = self._settle(step) if self._stale else False
        self._stale = False
        self.masks.all_sent = self._config.sends_all or (self._config.reads_gradient and self._due(step))
        if self._gates is not None and not self._masked and step >= self._plan.begin:
            self._gates.close(step)
            changed = True
        self._refresh()
        return changed

    def _refresh(self) -> None:
        """Before forwards with other weights or masks than before."""
        if self.products is not None:
            self.products.refresh(self.masks)

    def _settle(self, step: int) -> bool:
        """In the first step of a process. Whether masks may have changed weights."""
        self._masked = self._of_any_rank(bool(self.masks.bits))
        if self._config.starts_sparse and not self._masked:
            self._change(self._changes.first(), self._changes.trained() if self._waits else None)
            self.updated(step)
        else:
            self._take_over()
            self._forget()
            self._mask()
        return bool(self.masks.bits)

    def _of_any_rank(self, holds: bool) -> bool:
        """Whether it `holds` on one of the ranks that step the model: there may be some without a masked layer."""
        count = torch.tensor([int(holds)], device=self.owners.device)
        self._whole_norm.replica.all_reduce(count).wait()
        return bool(count)

    def _due(self, step: int) -> bool:
        return self._plan.due(step) or (not self._masked and self._plan.late(step))

    @torch.no_grad()
    def explore(self, step: int, again: Callable[[], object]) -> None:
        """What `kind = "grasp"` wants in a step that changes masks: the product of the Hessian with the gradient of the
        masked layers, as a central difference of two gradients (Nocedal and Wright, Numerical Optimization, 8.20).
        Raises `Diverged` where it is not finite.
        """
        if not isinstance(self._config, Grasp) or not self._due(step):
            return
        found = [(own, own.parameter.grad.clone()) for own in self._whole_norm.owned if own.parameter.grad is not None]
        directions = [(own, own.gradient * self._kept.get(id(own), 1)) for own in self.owners.owned]
        weights = [own.parameter.clone() for own, _ in directions]
        reach = self._reach(directions)
        products = [torch.zeros_like(direction) for _, direction in directions]
        for side in (reach, -reach):
            for (own, direction), weight in zip(directions, weights, strict=True):
                own.parameter.copy_(weight).add_(direction, alpha=side)
            self._refresh()
            with torch.enable_grad():
                again()
            for (own, _), product in zip(directions, products, strict=True):
                product.add_(own.gradient, alpha=1 / (2 * side))
        for (own, _), weight, product in zip(directions, weights, products, strict=True):
            own.parameter.copy_(weight)
            self._products[id(own)] = product
        for own, gradient in found:
            assert own.parameter.grad is not None, "it had one"
            own.parameter.grad.copy_(gradient)
        if self._of_any_rank(not all(bool(product.isfinite().all()) for product in products)):
            raise Diverged(
                f'sparsity.kind = "grasp": in step {step} the product of the Hessian with the gradient is not finite, '
                'and nothing can be said of the weights: use kind = "snip", precision.kind = "float32", or another '
                "schedule.begin"
            )

    def _reach(self, directions: Sequence[tuple[Owned, Tensor]]) -> float:
        """How many gradients the weights move, the same on all ranks: for their norm, the third root of their rounding
        (Nocedal and Wright, after 8.8).
        """
        sums = torch.zeros(2, dtype=torch.float64, device=self.owners.device)
        for own, direction in directions:
            if is_counted(own):
                sums += torch.stack([own.parameter.double().square().sum(), direction.double().square().sum()])
        self._whole_norm.replica.all_reduce(sums).wait()
        weights, gradients = sums.sqrt().tolist()
        return torch.finfo(self.owners.dtype).eps ** (1 / 3) * weights / gradients if weights and gradients else 1.0

    def _measured(self, own: Owned) -> Tensor:
        """What a mask of this kind is decided by, beside weights and gradients."""
        of_kind = {L0: self._slots[GATES[0]], Grasp: self._products}
        return of_kind.get(type(self._config), self._slots[MOVEMENT])[id(own)]

    @torch.no_grad()
    def agreed(self, step: int, *, scale: float = 1.0) -> float:
        """After the backward of `step`, on all ranks together: every `.grad` is the agreed one times `scale`, and
        finite. It becomes that of the weights which are trained, whose 2-norm over the whole model is returned.
        """
        if self._gates is not None and self._gates.locations:
            since = step - self._plan.begin + 1
            self._gates.learn(step, density=self._plan.density(step), since=since, scale=scale)
        elif self._waits:
            for own, waiting in self._with(WAITING):
                own.parameter.add_(waiting)
        self._measure(scale)
        if self._due(step):
            self._change(self._changes.next(step), self._changes.trained() if self._waits else None)
            self._products.clear()
            if self._gates is not None:
                self._gates.join()
        for own in self.owners.owned:
            trained = self._trained.get(id(own), self._kept.get(id(own)))
            if own.parameter.grad is not None and trained is not None:
                own.parameter.grad.mul_(trained)
        return self._whole_norm()

    @torch.no_grad()
    def updated(self, step: int) -> None:
        """After the update of `step`."""
        if self._gates is not None and self._gates.locations:
            self._gates.settle()
        elif self._waits:
            for own in self.owners.owned:
                self._slots[WAITING][id(own)] = own.parameter * ~self._kept[id(own)]
        self._mask()
        if self._changed:  # an average has taken in the last of weights that are masked now
            self._forget()
            self._changed = False

    def skipped(self) -> bool:
        """After a step without an update. Whether weights may have changed."""
        if self._gates is None or not self._gates.locations:
            return False
        self._gates.reopen()
        return True

    def tensors(self) -> dict[str, Held]:
        """What is saved."""
        bits: dict[str, Held] = {f"{MASK}{name}": each for name, each in self.masks.bits.items()}
        wider: dict[str, Held] = {f"{TRAINED}{name}": each for name, each in self._wider.bits.items()}
        numbers: dict[str, Held] = {
            f"{prefix}{own.name}": views(
                slot, ((region.box, region.start) for region in own.regions), global_shape=own.holding.global_shape
            )
            for prefix in self._slots
            for own, slot in self._with(prefix)
        }
        return bits | wider | numbers

    def targets(self, saved: Mapping[str, torch.dtype]) -> dict[str, Held]:
        """What a checkpoint that holds `saved` is read into."""
        for prefix, masks in ((MASK, self.masks), (TRAINED, self._wider)):
            for name, shape in self._shapes.items():
                if f"{prefix}{name}" in saved:
                    length = packed_bytes(torch.Size(shape).numel())
                    masks.bits[name] = torch.zeros(length, dtype=torch.uint8, device=self.owners.device)
        for prefix, slot in self._slots.items():
            for own in self.owners.owned:
                if f"{prefix}{own.name}" in saved:
                    slot[id(own)] = torch.zeros_like(own.parameter)
        self._stale = True
        self.masks.version += 1
        return self.tensors()

    def elsewhere(self, saved: Mapping[str, torch.dtype]) -> set[str]:
        """All: what this rank has no part of, others have."""
        return {name for name in saved if name.startswith(PREFIX) and name.split("/", 2)[2] in self.owners.shapes}

    def facts(self) -> dict[str, Any]:
        """How hard gates are pressed to shut."""
        return {} if self._gates is None else {"multiplier": self._gates.multiplier, "expected": self._gates.expected}

    def load(self, facts: Mapping[str, Any]) -> None:
        """Goes on from there."""
        if self._gates is not None:
            self._gates.multiplier, self._gates.expected = float(facts["multiplier"]), float(facts["expected"])

    @property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the layers whose masks this rank has: it has a part of them, or decides them."""
        return {name: shape for name, shape in self.owners.shapes.items() if name in self._held}

    @property
    def _waits(self) -> bool:
        return isinstance(self._config, TopKAST)

    def _with(self, prefix: str) -> list[tuple[Owned, Tensor]]:
        """This rank's parts, each with what is kept for it under `prefix`."""
        slot = self._slots[prefix]
        return [(own, slot[id(own)]) for own in self.owners.owned if id(own) in slot]

    def _measure(self, scale: float) -> None:
        """What a kind adds up in every step."""
        if isinstance(self._config, Movement):
            for own in self.owners.owned:
                sums = self._slots[MOVEMENT].setdefault(id(own), torch.zeros_like(own.parameter))
                if own.parameter.grad is not None:
                    sums.addcmul_(own.parameter, own.parameter.grad, value=-1 / scale)

    def _change(self, masks: NewMasks, wider: NewMasks | None) -> None:
        """New masks, which their owners have, come to all ranks, and what the optimizer keeps for masked weights is
        forgotten; `updated` makes these zero.
        """
        self._share(masks, self.masks)
        self._masked = self._changed = True
        if wider is not None:
            self._share(wider, self._wider)
        self._take_over()
        self._forget()

    def _forget(self) -> None:
        """What the optimizer keeps for weights that are not trained becomes zero."""
        for own in self.owners.owned:
            trained = self._trained.get(id(own), self._kept.get(id(own)))
            if trained is None:
                continue
            slots = self._optimizer.state.get(own.parameter, {})
            for name, slot in slots.items():
                whole = slot.read() if isinstance(slot, KeptNumbers) else slot
                if isinstance(whole, Tensor) and whole.shape == own.parameter.shape:
                    slots[name] = whole.mul_(trained.to(whole.device))
            if self._state_home is not None:
                self._state_home.masks[own.parameter] = trained
                self._state_home.pack(own.parameter, slots)

    def _mask(self) -> None:
        """Masked weights are zero."""
        for own in self.owners.owned:
            if (kept := self._kept.get(id(own))) is not None:
                own.parameter.mul_(kept)

    def _share(self, new: NewMasks, masks: Masks) -> None:
        for name in self.owners.shapes:
            bits = self.owners.share(name, new.get(name))
            if name in self._held:
                masks.bits[name] = bits
        masks.version += 1

    def _take_over(self) -> None:
        """The masks of this rank's parts, from the bits."""
        for masks, parts in ((self.masks, self._kept), (self._wider, self._trained)):
            for own in self.owners.owned:
                whole = masks.whole(own.name, self.owners.shapes[own.name])
                if whole is not None:
                    parts[id(own)] = taken(whole, own)
