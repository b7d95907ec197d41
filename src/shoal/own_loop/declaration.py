"""`Declaration`: what every rank tells the others when its last backward of a step is over.

One sum over the ranks in lock-step brings the loss of the global batch, how many parameters ranks left without a
gradient, and whether all ranks have made the same decisions: the numbers of the optimizer's groups, which parameters
are frozen, which gradients the script has changed. Ranks that go different ways here train copies that drift apart, or
under ZeRO one model with pieces that are trained differently, and nothing else shows it.

Equality is seen in the sum itself. For a number h(r) of N ranks, below 2^20 so that float64 holds the sums exactly,

    N * sum h(r)^2 = (sum h(r))^2    if and only if all h(r) are equal    (Cauchy-Schwarz)

and two such numbers of the text of all decisions miss a difference once in 10^12 times.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.comm.collective import Collective, gather_lines
from shoal.engine.rank_context import GlobalSum
from shoal.engine.tally import read_numbers
from shoal.errors import UserCodeError
from shoal.state import numbers_on

BITS = 20


class Declaration(GlobalSum):
    """`loss` is this rank's part of the loss, a number or a float64 scalar; `without` the number of parameters that got
    no gradient here; `decisions` a line for each decision. They are told on `device`.
    """

    def __init__(
        self,
        group: Collective,
        loss: float | Tensor,
        *,
        without: int,
        decisions: Sequence[str],
        device: torch.device,
    ) -> None:
        super().__init__(group)
        self._ranks, self._decisions, self._device = group, decisions, device
        self._sums: list[float] | None = None
        self._loss, self._without = loss, without
        if group.size == 1:  # nobody decides otherwise
            return
        text = "\n".join(decisions).encode()
        first, second = (zlib.crc32(text, start) >> (32 - BITS) for start in (0, 1))
        numbers = numbers_on(device, [without, first, first**2, second, second**2])
        self._told = torch.cat([_scalar(loss, device).reshape(1), numbers])
        self.start(self._told)

    def tensor(self) -> Tensor:
        """The loss of all ranks, a scalar on the device."""
        if self._handle is None:
            return _scalar(self._loss, self._device)
        self._handle.wait()
        return self._told[0]

    def wait(self) -> float:
        """The loss of all ranks."""
        return float(self._loss) if self._ranks.size == 1 else self._all()[0]

    @property
    def all_used(self) -> bool:
        """Whether every parameter got a gradient on every rank."""
        return (self._without if self._ranks.size == 1 else self._all()[1]) == 0

    def check(self, step: int) -> None:
        """Raises `UserCodeError`, on every rank, where ranks have decided differently."""
        if (size := self._ranks.size) == 1:
            return
        _, _, *sums = self._all()
        if all(size * square == total**2 for total, square in (sums[:2], sums[2:])):
            return
        everyone = gather_lines(self._decisions, self._ranks, self._device)
        raise UserCodeError(f"step {step}: {_difference(everyone)}")

    def _all(self) -> list[float]:
        if self._sums is None:
            if self._handle is not None:
                self._handle.wait()
            self._sums = read_numbers(self._told)
        return self._sums


def _scalar(loss: float | Tensor, device: torch.device) -> Tensor:
    return torch.as_tensor(loss, dtype=torch.float64, device=device)


def used_anywhere(names: Sequence[str], used: Collection[str], group: Collective, device: torch.device) -> set[str]:
    """Those of `names` that are in `used` on some rank of `group`."""
    flags = torch.tensor([float(name in used) for name in names], device=device)
    group.all_reduce(flags, "max").wait()
    return {name for name, flag in zip(names, flags.tolist(), strict=True) if flag}


def numbers_of(groups: Iterable[Mapping[str, Any]]) -> list[str]:
    """What an optimizer's groups say, but for their parameters: a line for each key."""
    return [
        f"{key} of the optimizer's group {number} is {_said(value)}"
        for number, group in enumerate(groups)
        for key, value in group.items()
        if key != "params"
    ]


SCHEDULED = {
    "lr": "the learning rate",
    "weight_decay": "the weight decay",
    "momentum": "the momentum",
    "betas": "one of the betas",
}
"""What schedules change in an optimizer's groups."""


def scheduled_in(groups: Iterable[Mapping[str, Any]]) -> list[tuple[str, float]]:
    """The numbers of `SCHEDULED` in `groups`, each behind what it is."""
    numbers = [(what, group.get(key)) for group in groups for key, what in SCHEDULED.items()]
    return [
        (what, float(each))
        for what, value in numbers
        for each in (value if isinstance(value, (tuple, list)) else (value,))
        if isinstance(each, (int, float, Tensor))
    ]


def check_unchanged(
    before: Sequence[tuple[str, float]], groups: Iterable[Mapping[str, Any]], step: str, where: str
) -> None:
    """Raises `UserCodeError` where a number of a schedule has changed between two microbatches of a step."""
    changed = next((now for now, then in zip(scheduled_in(groups), before, strict=False) if now != then), None)
    if changed is not None:
        raise UserCodeError(
            f"{step}: {changed[0]} changed {where}, in the middle of an update; step the scheduler after an update "
            "only: if run.update: scheduler.step(). What follows from the number of a step is set before the backward, "
            "by run.steps_done"
        )


def named(what: str, names: Iterable[str]) -> list[str]:
    """A line for each of `names`."""
    return [f"{name} {what}" for name in names]


def _said(value: Any) -> str:
    if isinstance(value, Tensor):
        return repr(value.tolist())
    if isinstance(value, (int, float, str, bool, type(None))):
        return repr(value)
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_said, value))})"
    return f"a {type(value).__name__}"


def _difference(everyone: Sequence[Sequence[str]]) -> str:
    """A sentence about the first line that ranks do not share."""
    rank = next(rank for rank, lines in enumerate(everyone) if lines != everyone[0])
    zero = next((line for line in everyone[0] if line not in everyone[rank]), None)
    other = next((line for line in everyone[rank] if line not in everyone[0]), None)
    said = " and ".join(f"on rank {number} {line}" for number, line in ((0, zero), (rank, other)) if line is not None)
    only = "" if zero is not None and other is not None else f", and not on rank {rank if other is None else 0}"
    return (
        f"{said}{only}. All ranks train one model, so each must make the same decision in the same step: base it on a "
        "number that all ranks share, such as run.mean(loss) for a scheduler that looks at the loss"
    )
