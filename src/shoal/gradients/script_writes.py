"""What a script writes into weights, read back from the parameters into what the optimizer steps; and into gradients.

In a loop of one's own weights may be written as in plain PyTorch: in place (`p.data.clamp_(-1, 1)`, `p.copy_(q)`), or
by giving a parameter other data (`p.data = q`). Here a parameter is a view of a flat buffer, and what the optimizer
steps is a piece of that buffer, or a master in float32. So what was written is read back, and every parameter shows its
buffer again:

    weights are              read back
    whole (ZeRO-1, -2,       when a step starts, before the optimizer's step, and before a checkpoint:
    masters)                 `start`, `accept_weights`, `settle` of `Gradients`
    in pieces (ZeRO-3)       before they are released: at the end of `full_parameters`, behind the forward of a block,
                             and at the end of a backward or of a pipeline's schedule

Where the optimizer has the model's own parameters there is nothing to read back. `shoal train` does not call
`accept_weights`: what a forward has given other data there is refused at `gather`.

Note: weights that are swapped for a while
------------------------------------------
A script evaluates with other weights, such as a moving average, and puts its own back:

    backup = p.data; p.data = average; evaluate(); p.data = backup

`backup` is the flat buffer itself, which `average` must not be copied into meanwhile. Whole weights are therefore not
read back at the end of `full_parameters`, which evaluation enters: at the next step the script's own are there again.
Under ZeRO-3 they have to be. A unit that was given other data then leaves its buffer to whoever holds it, and gets a
new one. Inside of `full_parameters` a forward reads nothing back.

Masters know 24 bits where weights show 8. Whatever they round to already is no change to them; and under ZeRO-3 the
masters of the last update are kept beside what was written, as long as that may be put back.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from shoal.comm.collective import Collective
from shoal.errors import UserCodeError
from shoal.maths.fingerprint import fingerprint
from shoal.state import complete, gradients_of, same_objects


class Placed(NamedTuple):
    """A parameter of this `name`, and its `place`: the view of a flat buffer that it shows."""

    name: str
    parameter: Tensor
    place: Tensor


def replaced(placed: Sequence[Placed]) -> list[Placed]:
    """Those that a script has given other data. Raises `UserCodeError` for data of another shape or type, and for data
    that two of them share.
    """
    found = [each for each in placed if not each.parameter.is_set_to(each.place)]
    for name, parameter, place in found:
        if (parameter.shape, parameter.dtype) != (place.shape, place.dtype):
            raise UserCodeError(
                f"{name} was given data of {_kind(parameter)} in the place of {_kind(place)}: a parameter keeps its "
                "shape and type from shoal.start to close()"
            )
    if found:
        _check_apart(placed)
    return found


@torch.no_grad()
def read_back_data(placed: Sequence[Placed]) -> None:
    """Moves data that a script has given to parameters into their places. They may have swapped it, so all is copied
    before anything is written.
    """
    found = replaced(placed)
    for (_, parameter, place), numbers in zip(found, [each.parameter.detach().clone() for each in found], strict=True):
        place.copy_(numbers)
        parameter.data = place


def check_read_back(placed: Sequence[Placed]) -> None:
    """After the optimizer's step: raises `UserCodeError` where it has not seen the data that a parameter was given."""
    for name, _, _ in replaced(placed):
        raise UserCodeError(
            f"{name} was given other data (.data = ...) where an update cannot see it, as in a hook of the optimizer's "
            "step or a forward under shoal train: write it in place there, with .data.copy_(...)"
        )


@torch.no_grad()
def read_back_masters(masters: Tensor, computed: Tensor, *, before: Tensor | None = None) -> None:
    """Makes `masters` what was written into `computed`. Where nothing was, or what they were `before` was put back,
    they have the bits of then.
    """
    if masters.dtype == computed.dtype:
        masters.copy_(computed)
        return
    computed = computed.to(masters.device)
    written = computed.to(masters.dtype)
    if before is not None:
        written = torch.where(before.to(computed.dtype) == computed, before, written)
    torch.where(masters.to(computed.dtype) == computed, masters, written, out=masters)


COMPARED_FIRST, COMPARED_EVERY = 8, 100
"""Which readings are compared between ranks: so many first ones, and then one of so many."""


def compared(number: int) -> bool:
    """Is that one of them? The first is 1."""
    return number <= COMPARED_FIRST or number % COMPARED_EVERY == 0


class WrittenAlike:
    """Whether ranks that update pieces of the same weights have written the same into the whole ones.

    What a rank writes outside of its own piece, nobody reads: where writes differ, as those of an ActNorm that begins
    with the statistics of its first samples, each piece would be that of another rank, and all copies equal. So now and
    then ranks compare fingerprints of the whole, at a reading that all of `ranks` come to.
    """

    def __init__(self, ranks: Collective) -> None:
        self._ranks, self._readings = ranks, 0

    def compare(self, placed: Sequence[Placed], *, always: bool = False) -> None:
        """Raises `UserCodeError`, on every rank, with the first parameter that differs. `always`: at this reading in
        any case, as where a script has asked for the whole to write into it.
        """
        self._readings += 1
        if self._ranks.size == 1 or not (always or compared(self._readings)):
            return
        own = [fingerprint({"": each.place}) for each in placed]
        differing = self._differing(own, placed[0].place.device)
        if differing is None:
            return
        number, rank = differing
        raise UserCodeError(
            f"{placed[number].name} was written by the script or by a forward, and not alike on the "
            f"{self._ranks.size} ranks that have pieces of it: the first and number {rank} have other numbers. Write "
            "the same on every rank. "
            "What follows from samples, such as the first scales of an ActNorm or codes found by k-means, is to be "
            "there before shoal.start: call the model on a batch there"
        )

    def _differing(self, own: Sequence[int], device: torch.device) -> tuple[int, int] | None:
        """The first place at which a rank has another number than the first one, and which rank, counted from 1."""
        everyone = torch.empty(self._ranks.size * len(own), dtype=torch.int64, device=device)
        self._ranks.all_gather(everyone, torch.tensor(own, dtype=torch.int64, device=device)).wait()
        first, *others = everyone.view(self._ranks.size, len(own)).tolist()
        found = (
            (number, rank)
            for number, value in enumerate(first)
            for rank, other in enumerate(others, start=2)
            if other[number] != value
        )
        return next(found, None)


_version_of = attrgetter("_version")


class SeenGradients(NamedTuple):
    """The gradients of parameters, and how often each was written to: what a script does to them shows."""

    gradients: Sequence[Tensor | None] = ()
    versions: Sequence[int] = ()

    @classmethod
    def now(cls, parameters: Sequence[Parameter]) -> SeenGradients:
        """As they are."""
        gradients = gradients_of(parameters)
        if complete(gradients):
            return cls(gradients, list(map(_version_of, gradients)))
        return cls(gradients, [0 if gradient is None else gradient._version for gradient in gradients])

    def changed(self, before: SeenGradients) -> Sequence[int]:
        """Which of them are others, or were written to since."""
        if self.versions == before.versions and same_objects(self.gradients, before.gradients):
            return ()  # as always: a step has no time for a look at each
        both = zip(self.gradients, before.gradients, self.versions, before.versions, strict=False)
        return [index for index, (now, then, new, old) in enumerate(both) if now is not then or new != old]


def _kind(tensor: Tensor) -> str:
    return f"shape {list(tensor.shape)} and type {str(tensor.dtype).removeprefix('torch.')}"


def _check_apart(placed: Sequence[Placed]) -> None:
    seen: dict[int, str] = {}
    for name, parameter, _ in placed:
        if parameter.numel() and (other := seen.setdefault(parameter.data_ptr(), name)) != name:
            raise UserCodeError(
                f"{other} and {name} were given the same memory by .data, which ties them: tie parameters before "
                "shoal.start, or give each a copy (.data.clone())"
            )
