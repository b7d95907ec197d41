"""What a script of its own loop sees of parameters that `layout.tensor` splits.

The split model computes with parts, which the optimizer steps. The script has lists, groups and hooks of the whole
parameters, made before the split. These objects take the parts' places in the model again as shells:

    a shell is              the script's own object, of the whole shape, without numbers outside of `full_parameters`
    its `.grad`             a `BoxGradient`: the numbers of the part's gradient, in memory that both share
    its `requires_grad`     the script's to set, and that of the part from the next step on
    the module it is in     registers the shell, and computes with the part (`shoal.parallel.tensor.layers`)

Every rank of a group computes the whole loss, from whole logits, so a part's gradient is its box of the whole gradient.
Numbers that several ranks hold (key heads that queries on several ranks share, and parameters that are not split) are
counted on the first of them in norms and sums.

Under ZeRO each rank of `shard` has a run of a part's elements: the part's gradient is then a `PartialGradient`, and the
shell's a `BoxGradient` of the same run. Their group are the ranks over which both axes divide the model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from math import nan
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from shoal.comm.collective import Collective
from shoal.errors import UserCodeError
from shoal.gradients.gradients import Gradients, Tuned, VisibleGradients
from shoal.gradients.partial_gradient import PartialGradient
from shoal.gradients.reducer import OwnGradient
from shoal.gradients.units import ReleasedParameter, released
from shoal.maths.fingerprint import fingerprint
from shoal.state import Region, Trained, boxes_in, counts_piece, regions_of, regions_of_run
from shoal.topology.holding import Holding


class BoxGradient(PartialGradient):
    """A gradient of which this rank has the boxes of `holding`, one after the other; of their elements those from
    `start` on, in `local`.
    """

    holding: Holding

    @staticmethod
    def __new__(
        cls,
        local: Tensor,
        holding: Holding,
        *,
        group: Collective,
        what: str,
        start: int = 0,
        counts: bool | None = None,
    ) -> Any:
        return Tensor._make_wrapper_subclass(cls, holding.global_shape, dtype=local.dtype, device=local.device)

    def __init__(
        self,
        local: Tensor,
        holding: Holding,
        *,
        group: Collective,
        what: str,
        start: int = 0,
        counts: bool | None = None,
    ) -> None:
        counts = holding.counts if counts is None else counts
        super().__init__(local, start, holding.global_shape, group=group, what=what, counts=counts)
        self.holding = holding

    def like(self, local: Tensor) -> BoxGradient:
        """See `PartialGradient`."""
        return BoxGradient(local, self.holding, group=self.group, what=self.what, start=self.start, counts=self.counts)

    def run_of(self, whole: Tensor) -> Tensor:
        """See `PartialGradient`."""
        return torch.cat([whole.reshape(-1)[:0], *(whole[each.box.slices].reshape(-1) for each in self._regions)])

    def whole(self) -> Tensor:
        """See `PartialGradient`."""
        found = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        for box, start in [(each.box, each.start) for each in self._regions if self.counts]:
            found[box.slices] = self.local[start : start + box.numel].view(box.shape)
        self.group.all_reduce(found).wait()
        return found

    @property
    def _regions(self) -> list[Region]:
        return list(regions_of_run(regions_of(self.holding), self.start, self.start + self.local.numel()))


@torch.no_grad()
def whole_of(part: Tensor, holding: Holding, group: Collective) -> Tensor:
    """All numbers of a parameter, of which this rank has `part`, on every rank of `group`, that of `tensor`."""
    found = torch.zeros(holding.global_shape, dtype=part.dtype, device=part.device)
    if counts_piece(holding):
        for box, numbers in boxes_in(holding, part.reshape(_shape_of(holding))):
            found[box.slices] = numbers
    group.all_reduce(found).wait()
    return found


def _shape_of(holding: Holding) -> tuple[int, ...]:
    return holding.box.shape if len(holding.boxes) == 1 else (sum(box.numel for box in holding.boxes),)


COPIED = (
    "a module that layout.tensor has split was copied or pickled, and it belongs to the ranks of its group: copy the "
    "model before shoal.start, and its state_dict() inside run.full_parameters()"
)


class Shell:
    """A parameter of the script, `whole`, of which this rank computes with `part`. It is empty from the start."""

    def __init__(self, whole: Parameter, part: Parameter, holding: Holding, group: Collective) -> None:
        self.whole, self.part, self.holding, self._group = whole, part, holding, group
        self.full, self.may_compute = False, _always
        self._kind, self._shown, self._local = type(whole), None, None
        self.release()

    def __call__(self, registered: Parameter | None) -> Parameter:
        """What its module computes with, which has it `registered`. Raises `UserCodeError` for another parameter, and
        where ranks do not compute together.
        """
        if registered is not self.whole:
            raise UserCodeError(
                f"another tensor stands in the place of the parameter {self.holding.name} (an assignment, or "
                "torch.func.functional_call), and layout.tensor computes with this rank's part of the parameter: write "
                "into it inside run.full_parameters(), or set layout.tensor = 1"
            )
        if not (self.full or self.may_compute()):
            raise UserCodeError(
                "the model was called outside of a step: under layout.tensor all ranks of a group compute a forward "
                "together, of the same inputs. Call it inside run.evaluation(), on every rank, or before the update"
            )
        if self.full:
            self.take()
        return self.part

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UserCodeError(COPIED)

    def release(self) -> None:
        """The numbers are gone, but for the part."""
        self.full, part = False, self.part
        self.whole.__class__ = self._kind
        self.whole.data = torch.full((), nan, dtype=part.dtype, device=part.device).expand(self.holding.global_shape)
        self.whole.__class__ = released(self._kind)
        assert isinstance(self.whole, ReleasedParameter)
        self.whole.read = (
            f"the parameter {self.holding.name} was read outside of run.full_parameters(), and layout.tensor has "
            "parts of it on several ranks: read and write it inside"
        )
        self.whole.differentiated = (
            f"torch.autograd.grad was asked for the gradient of {self.holding.name}, and layout.tensor computes with "
            "parts of it on several ranks: call run.backward(loss), and read .grad behind it, or set layout.tensor = 1"
        )

    def fill(self) -> None:
        """The numbers are there, on every rank, which call it together."""
        numbers = whole_of(self.part.detach(), self.holding, self._group)
        self.whole.__class__ = self._kind
        self.whole.data, self.full = numbers, True

    @torch.no_grad()
    def take(self) -> None:
        """What a script has written into the whole is in the part, too. Raises `UserCodeError` for data of another
        shape or type.
        """
        whole = self.whole
        if (tuple(whole.shape), whole.dtype) != (self.holding.global_shape, self.part.dtype):
            raise UserCodeError(
                f"{self.holding.name} was given data of shape {list(whole.shape)} and type {whole.dtype}: a parameter "
                "keeps its shape and type from shoal.start to close()"
            )
        for box, own in boxes_in(self.holding, self.part):
            if not torch.equal(own, written := whole.detach()[box.slices]):
                own.copy_(written)

    def show(self, gradient: Tensor | None) -> None:
        """Makes `.grad` that of all parts, of which this rank has `gradient`: of its part, or a run of that."""
        if gradient is None:
            self._shown = self._local = None
        elif self._shown is None or gradient is not self._local:
            self._shown, self._local = self._boxes_of(gradient), gradient
        self.whole.grad = self._shown

    def accept(self) -> None:
        """Makes the gradient of the part what `.grad` is now, where that was replaced."""
        now = self.whole.grad
        if now is self._shown:
            return
        if now is None:
            self.part.grad = None
        elif isinstance(now, BoxGradient) and isinstance(self._local, PartialGradient):
            self.part.grad = self._local.like(now.local)
        else:
            run = now.local if isinstance(now, BoxGradient) else torch.cat(
                [now[box.slices].reshape(-1) for box in self.holding.boxes]
            )  # fmt: skip
            self.part.grad = run.view(self.part.shape).to(self.part.dtype)

    def _boxes_of(self, gradient: Tensor) -> BoxGradient:
        what = f"the gradient of {self.holding.name} is divided over"
        if isinstance(gradient, PartialGradient):
            what = f"{what} {gradient.group.size} ranks by layout.tensor and ZeRO"
            return BoxGradient(
                gradient.local, self.holding, group=gradient.group, what=what, start=gradient.start,
                counts=gradient.counts,
            )  # fmt: skip
        what = f"{what} {self._group.size} ranks by layout.tensor"
        return BoxGradient(gradient.view(-1), self.holding, group=self._group, what=what)


def _always() -> bool:
    return True


Written = Mapping[str, tuple[int, int]]
"""Parameters, by name, that a script has written: their fingerprints before and now."""


class SplitGradients:
    """`VisibleGradients` of `inner`, which reduces those of parts, as the script sees them. `whole` are the script's
    parameters, by name, whose parts are `held`; `group` is that of `layout.tensor`.

    `meet` is called with the whole parameters where ranks leave `full_parameters`, and with those that are not split
    and were written there: the bits of these need not be the same on all ranks of `group`.
    """

    def __init__(
        self,
        inner: VisibleGradients,
        held: Iterable[tuple[Holding, Parameter]],
        trained: Sequence[Trained],
        whole: Mapping[str, Parameter],
        group: Collective,
    ) -> None:
        self.inner, self.owned = inner, inner.owned
        held = list(held)
        self.shells = {h.name: Shell(whole[h.name], part, h, group) for h, part in held if whole[h.name] is not part}
        self._trained = [self.shells[t.holding.name] for t in trained if t.holding.name in self.shells]
        self._unsplit = {h.name: part for h, part in held if whole[h.name] is part}
        self.meet: Callable[[Mapping[str, Tensor], Written], None] = lambda whole, written: None
        self.full = False

    def install(self, model: nn.Module) -> None:
        """The script's objects are the parameters of `model` again."""
        by_part = {id(shell.part): shell for shell in self.shells.values()}
        for module in model.modules():
            found = {name: by_part[id(p)] for name, p in module._parameters.items() if id(p) in by_part}
            if found:
                module.shells = found  # pyright: ignore[reportArgumentType]
                module._parameters.update({name: shell.whole for name, shell in found.items()})

    def allow(self, may_compute: Callable[[], bool]) -> None:
        """The model may be called where `may_compute` says so, and inside `full_parameters`."""
        for shell in self.shells.values():
            shell.may_compute = may_compute

    @property
    def own(self) -> OwnGradient:
        return self.inner.own

    @property
    def tuned(self) -> Tuned | None:
        return self.inner.tuned

    @property
    def used(self) -> frozenset[str]:
        return self.inner.used

    @property
    def divided(self) -> bool:
        return True

    def start(self) -> None:
        self.inner.start()
        for shell in self._trained:
            shell.show(None)
            shell.part.requires_grad_(shell.whole.requires_grad)

    def backward(self, *, last: bool) -> AbstractContextManager[None]:
        """Raises `UserCodeError` where a layer was frozen, or let go, within a step."""
        for shell in self._trained:
            if shell.part.requires_grad is not shell.whole.requires_grad:
                raise UserCodeError(
                    f"{shell.holding.name}.requires_grad was changed within a step, which layout.tensor does not see "
                    "before the next: change it behind the update"
                )
        return self.inner.backward(last=last)

    def schedule(self) -> AbstractContextManager[None]:
        return self.inner.schedule()

    def reduce(self) -> Tensor:
        return self.inner.reduce()

    def scale(self, factor: float | Tensor) -> None:
        self.inner.scale(factor)

    def show_between(self, shown: Mapping[str, Tensor]) -> bool:
        return False  # the script sees shells, and not what is added up

    def measured(self) -> Tensor:
        return self.inner.measured()

    def clip(self, limit: float, *, believed: float, written: bool) -> float:
        return self.inner.clip(limit, believed=believed, written=written)

    def expose(self, names: Collection[str]) -> None:
        self.inner.expose(names)
        for shell in self._trained:
            shell.show(shell.part.grad)

    def accept(self) -> None:
        for shell in self._trained:
            shell.accept()
        self.inner.accept()
        for shell in self._trained:
            shell.show(shell.part.grad)

    def accept_weights(self) -> None:
        self.inner.accept_weights()

    def gather(self) -> None:
        self.inner.gather()

    def settle(self) -> None:
        self.inner.settle()

    def parts(self, *, compares: bool = True) -> AbstractContextManager[None]:
        """Inside, this rank has all of its parts, which ZeRO-3 divides: forwards send nothing over `shard`."""
        return self.inner.full_parameters(compares=compares)

    @contextmanager
    def full_parameters(self, *, compares: bool = True) -> Iterator[None]:
        if self.full:
            yield
            return
        with self.parts(compares=compares):
            for shell in self.shells.values():
                shell.fill()
            self.full, before = True, self._fingerprints()
            try:
                yield
                for shell in self.shells.values():
                    shell.take()
                if compares:
                    both = {name: (before[name], now) for name, now in self._fingerprints().items()}
                    written = {name: each for name, each in both.items() if each[0] != each[1]}
                    self.meet({name: shell.whole.detach() for name, shell in self.shells.items()}, written)
            finally:
                self.full = False
                for shell in self.shells.values():
                    shell.release()

    def close(self) -> None:
        self.inner.close()

    def _fingerprints(self) -> dict[str, int]:
        return {name: fingerprint({name: parameter}) for name, parameter in self._unsplit.items()}


def script_parameters(gradients: Gradients, trained: Iterable[Trained]) -> dict[str, Parameter]:
    """The trained parameters as the script has them, by name."""
    shells = gradients.shells if isinstance(gradients, SplitGradients) else {}
    names = [(t.holding.name, t.parameter) for t in trained]
    return {name: shells[name].whole if name in shells else parameter for name, parameter in names}
