"""State of an optimizer that lives on the host or on disk, and is on the device for its parameter's update alone.

    bring in part i + 1   |  update part i, by the optimizer's own kernel  |  take out part i - 1

(ZeRO-Offload, arXiv:2101.06840, and ZeRO-Infinity, arXiv:2104.07857, update on the host instead; decision 0064 says why
not.) So at most three parts are on the device at a time, and the update is the same to the last bit. Bytes of a step,
for S bytes of state: S to the device and S back, from the second step on.

`HostUpdates` are for parameters that are on the host themselves, and `DelayedUpdates` for an update that the host makes
beside the next step.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map_only, tree_unflatten

from shoal.memory.spill_file import Mapped, SpillFile, Traffic, aligned_buffer
from shoal.memory.tiers import Image, Lane, Tier, exposed, places_of
from shoal.state import UpdatePart, works_in_streams

LEAST_BYTES = 16 << 10
"""Smaller tensors, such as the moments of biases and counters of steps, stay on the device."""

State = MutableMapping[Parameter, dict[str, Any]]


@dataclass(frozen=True)
class Away:
    """Stands in the state for a tensor on disk."""

    read: Callable[[], Tensor]


@dataclass
class _Home:
    """Where the state of one parameter lies: `away` are the numbers of its leaves that are in `image`."""

    image: Image
    spec: TreeSpec
    away: Sequence[int]


class StreamedState:
    """Keeps the state of an optimizer in `tier`; parts have `part_bytes` of parameters, or one that is larger."""

    def __init__(self, tier: Tier, device: torch.device, traffic: Traffic, *, part_bytes: int) -> None:
        self._tier, self._device, self._traffic, self.part_bytes = tier, device, traffic, part_bytes
        self._homes: dict[Parameter, _Home] = {}
        self._coming, self._going = Lane(device, "state-in"), Lane(device, "state-out")
        self._order: list[Parameter] = []

    def stream(self, parts: Sequence[UpdatePart], state: State) -> None:
        """Runs all updates in order, each with its state on the device."""
        arriving: deque[_Arrival] = deque()
        leaving: deque[Future[None]] = deque()
        for number in range(len(parts) + 1):
            self._wait(leaving, most=1)
            if number < len(parts):
                arriving.append(self._bring(parts[number], state))
            if number:
                part = parts[number - 1]
                self._arrive(arriving.popleft(), state)
                part.update()
                leaving.append(self._take_out(part.parameters, state))
        self._wait(leaving, most=0)
        self._order = [parameter for part in parts for parameter in part.parameters]
        self.ahead()

    def ahead(self) -> None:
        """Begins to bring nearer what the next update needs first."""
        self._tier.ahead([self._homes[p].image for p in self._order if p in self._homes])

    def to_read(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        """Zeros on the host or on disk; None for what stays on the device."""
        numbers = math.prod(shape)
        if numbers * dtype.itemsize < LEAST_BYTES:
            return None
        return self._tier.to_read(numbers * dtype.itemsize).view(dtype).view(shape)

    def put_away(self, state: State) -> None:
        """Takes all of the state out, as after a checkpoint was read into it."""
        for parameter in list(state):
            self._take_out([parameter], state).result()
        self._tier.was_read()

    def close(self) -> None:
        """Ends its threads, and frees what is on disk."""
        for each in (self._coming, self._going, self._tier):
            each.close()

    def _wait(self, leaving: deque[Future[None]], *, most: int) -> None:
        """Until the last `most` parts alone are still on their way out."""
        with exposed(self._traffic):
            while len(leaving) > most:
                leaving.popleft().result()

    @property
    def used(self) -> bool:
        """Whether any state has moved so far."""
        return bool(self._homes)

    def _bring(self, part: UpdatePart, state: State) -> _Arrival:
        """One move for the whole part: each wakes a thread, which small tensors are not worth. State that was let go,
        as that of layers that are frozen for a while, does not come back.
        """
        homes = {p: self._homes[p] for p in part.parameters if p in self._homes and state.get(p)}
        tensors = {p: [place.empty(self._device) for place in home.image.places] for p, home in homes.items()}
        pairs = [(home.image, tensors[p]) for p, home in homes.items()]
        return _Arrival(tensors, self._coming.submit(partial(_each, self._tier.fetch, pairs)))

    def _arrive(self, arrival: _Arrival, state: State) -> None:
        with exposed(self._traffic):
            arrival.move.result()
        for parameter, tensors in arrival.tensors.items():
            home = self._homes[parameter]
            leaves, _ = tree_flatten(state[parameter])
            for number, tensor in zip(home.away, tensors, strict=True):
                leaves[number] = tensor
            state[parameter] = tree_unflatten(leaves, home.spec)

    def _take_out(self, parameters: Sequence[Parameter], state: State) -> Future[None]:
        pairs = [pair for parameter in parameters if (pair := self._leave(parameter, state)) is not None]
        return self._going.submit(partial(_each, self._tier.keep, pairs))

    def _leave(self, parameter: Parameter, state: State) -> tuple[Image, list[Tensor]] | None:
        """Puts stand-ins into the state: what is to be moved, and where to; None where all of it is small."""
        leaves, spec = tree_flatten(state.get(parameter, {}))
        away = [n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.nbytes >= LEAST_BYTES]
        if not away:
            return None
        tensors = [leaves[number] for number in away]
        home = self._homes.get(parameter)
        if home is None or [leaf.shape for leaf in tensors] != [torch.Size(p.shape) for p in home.image.places]:
            home = self._homes[parameter] = _Home(self._tier.image(tensors), spec, away)
        home.spec, home.away = spec, away
        for place, number in enumerate(away):
            leaves[number] = self._stand_in(home.image, place)
        state[parameter] = tree_unflatten(leaves, spec)
        return home.image, tensors

    def _stand_in(self, image: Image, place: int) -> Tensor | Away:
        if image.memory is not None:
            return image.places[place].view(image.memory)
        return Away(lambda: self._tier.host_tensors(image)[place])


class _Arrival(NamedTuple):
    """The state of a part's parameters on its way to the device."""

    tensors: Mapping[Parameter, list[Tensor]]
    move: Future[None]


def _each(move: Callable[[Image, list[Tensor]], None], pairs: Sequence[tuple[Image, list[Tensor]]]) -> None:
    for image, tensors in pairs:
        move(image, tensors)


# Pieces of parameters and gradients that live on the host, and the updates that the host makes of them.


class HostPieces:
    """Allocates them outside of the device, and counts what comes and goes. With a `file` they are mapped from it, so
    that the host needs no memory for all of them: those beside the one in use are read ahead.
    """

    def __init__(self, traffic: Traffic, file: SpillFile | None = None) -> None:
        self._traffic, self._file = traffic, file
        self._mapped: list[Mapped] = []
        self._places: dict[int, int] = {}

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Zeros on the host, one-dimensional."""
        size_bytes = numel * dtype.itemsize
        if self._file is None:
            return aligned_buffer(max(1, size_bytes), torch.device("cpu"))[:size_bytes].view(dtype)
        self._mapped.append(self._file.mapped(max(1, size_bytes)))
        memory = self._mapped[-1].tensor
        self._places[memory.data_ptr()] = len(self._mapped) - 1
        return memory[:size_bytes].view(dtype)

    def fetched(self, piece: Tensor) -> None:
        """A piece of parameters came to the device; its neighbours come next, in the forward or in the backward."""
        self._traffic.add(to_device_bytes=piece.nbytes)
        place = self._places.get(piece.data_ptr())
        if place is not None:
            for each in self._mapped[max(0, place - 1) : place + 2]:
                each.ahead()

    def kept(self, size_bytes: int) -> None:
        """A piece of gradients left it."""
        self._traffic.add(to_host_bytes=size_bytes)


class HostUpdates:
    """The home of the state of parameters that are on the host themselves: nothing moves but to and from `disk`.

    `on_host` is around what the host computes.
    """

    part_bytes: int

    def __init__(
        self, on_host: Callable[[], AbstractContextManager[None]], disk: StreamedState | None, *, part_bytes: int
    ) -> None:
        self._on_host, self._disk, self.part_bytes = on_host, disk, part_bytes

    def stream(self, parts: Sequence[UpdatePart], state: State) -> None:
        """Runs all updates in order."""
        with self._on_host():
            if self._disk is not None:
                self._disk.stream(parts, state)
                return
            for part in parts:
                part.update()

    def to_read(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        """Zeros on the host or on disk."""
        found = None if self._disk is None else self._disk.to_read(shape, dtype)
        return torch.zeros(shape, dtype=dtype) if found is None else found

    def put_away(self, state: State) -> None:
        """Takes to the disk what a checkpoint was read into."""
        if self._disk is not None:
            self._disk.put_away(state)

    def close(self) -> None:
        """Ends the disk's threads, and frees its space."""
        if self._disk is not None:
            self._disk.close()


NEXT_WEIGHT = "next_weight"
"""The slot of weights that an update has made and that the model does not compute with yet."""


class DelayedUpdates:
    """Updates that the host makes beside the forward and backward of the next step, on copies of the weights
    (ZeRO-Offload's delayed parameter update, arXiv:2101.06840, section 5.2).

        x(t + 1) = x(t) - u(g(t))     u the optimizer's update, g(t) the gradient of step t at the weights w(t)
        w(t + 1) = x(t)               from step `after` + 1 on;  x(t + 1) before

    So weights are one update behind, and all that looks at the model sees w: forwards, evaluations, exports. What has
    been made of x(t + 1) is a slot of the state, by which a run goes on to the last bit.

    `updates` are those of the host, made in a thread of their own. `steps`: how many the run has taken. `on_host` is
    around what is allocated there. Bytes of a step, for P bytes of parameters: P to the host (gradients), P back.
    """

    def __init__(
        self,
        updates: HostUpdates,
        device: torch.device,
        traffic: Traffic,
        *,
        after: int,
        steps: Callable[[], int],
        on_host: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._updates, self._device, self._traffic, self._on_host = updates, device, traffic, on_host
        self._after, self._steps, self.part_bytes = after, steps, updates.part_bytes
        self._thread = Lane(torch.device("cpu"), "delayed-update")
        self._copies: dict[Parameter, Parameter] = {}
        self._stale: set[Parameter] = set()
        self._own: list[Parameter] = []
        self._going: Future[None] | None = None

    def stream(self, parts: Sequence[UpdatePart], state: State) -> None:
        """Shows what the update before has made, and begins this one."""
        self.settle(state)
        self._show(state)
        copied = [part.of(*self._on_the_host(part)) for part in parts]
        self._own = [parameter for part in parts for parameter in part.parameters]
        for parameter in self._own:
            state[self._copies[parameter]] = state.pop(parameter, {})
        launched = torch.accelerator.current_stream(self._device).record_event() if self._in_streams else None
        self._going = self._thread.submit(partial(self._make, copied, state, launched))
        if self._steps() < self._after:
            self.settle(state)
            self._show(state)

    def settle(self, state: State) -> None:
        """Returns when the last update is made, and `state` is that after it."""
        if self._going is None:
            return
        with exposed(self._traffic):
            self._going.result()
        self._going = None
        for parameter in self._own:
            copy = self._copies[parameter]
            state[parameter] = {**state.pop(copy), NEXT_WEIGHT: copy.detach()}

    def to_read(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        """Where the host's updates have it."""
        return self._updates.to_read(shape, dtype)

    def put_away(self, state: State) -> None:
        """Goes on from what a checkpoint was read into: weights that it was ahead of are in their slot."""
        ahead = {p: slots.pop(NEXT_WEIGHT) for p, slots in state.items() if NEXT_WEIGHT in slots}
        for parameter in list(state):
            state[self._copy_of(parameter)] = tree_map_only(Tensor, Tensor.cpu, state.pop(parameter))
        self._updates.put_away(state)
        self._stale = set(self._copies) - set(ahead)
        for parameter, copy in self._copies.items():
            if copy in state:
                state[parameter] = state.pop(copy)
        with torch.no_grad():
            for parameter, weight in ahead.items():
                state[parameter][NEXT_WEIGHT] = self._copies[parameter].copy_(weight).detach()

    def close(self) -> None:
        """Ends its threads behind the update under way, and frees what is on disk."""
        self._thread.close()
        self._updates.close()

    @property
    def _in_streams(self) -> bool:
        return works_in_streams(self._device)

    def _make(self, parts: Sequence[UpdatePart], state: State, launched: torch.Event | None) -> None:
        """In the thread."""
        if launched is not None:
            launched.synchronize()  # gradients are there, and what was made before was shown
        with torch.no_grad():
            self._updates.stream(parts, state)

    def _show(self, state: State) -> None:
        """The model computes with what has been made."""
        for parameter, slots in state.items():
            weight = slots.pop(NEXT_WEIGHT, None)
            if weight is not None:
                parameter.copy_(weight, non_blocking=True)
                self._traffic.add(to_device_bytes=weight.nbytes)

    def _on_the_host(self, part: UpdatePart) -> tuple[list[Parameter], list[Tensor]]:
        """Copies of parameters and gradients. The weights are those of the update before already."""
        found = [self._copy_of(parameter) for parameter in part.parameters]
        for parameter, copy, gradient in zip(part.parameters, found, part.gradients, strict=True):
            assert copy.grad is not None
            if parameter in self._stale:
                copy.copy_(parameter, non_blocking=True)
                self._stale.discard(parameter)
            copy.grad.copy_(gradient.to_dense() if gradient.is_sparse else gradient, non_blocking=True)
            self._traffic.add(to_host_bytes=gradient.nbytes)
        return found, [copy.grad for copy in found if copy.grad is not None]

    def _copy_of(self, parameter: Parameter) -> Parameter:
        """Its place on the host, with one for its gradient."""
        if parameter not in self._copies:
            with self._on_host(), torch.no_grad():
                place = places_of([parameter])[0]
                both = [place.view(aligned_buffer(place.size_bytes, self._device)) for _ in range(2)]
                copy = self._copies[parameter] = Parameter(both[0])
                copy.grad = both[1]
            self._stale.add(parameter)
        return self._copies[parameter]
