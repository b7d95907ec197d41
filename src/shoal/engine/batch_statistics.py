"""State that a module changes in its forward: running statistics, power iterations, teachers that follow by an average.

Nothing sums it as gradients are summed, so two things could go wrong in silence: it comes to depend on how a step's
samples are cut, and a step that is skipped for a NaN has already written it. The rule is therefore: within a step,
every forward begins with the state that the step began with (`StepBuffers`); of a loop that goes through the
microbatches again, with the state that the pass before has left. What follows from the weights alone, such
as spectral norm, is then changed once a step, and alike on every rank and by every microbatch. What follows from the
samples is not alike, and `BufferGuard` refuses it by name, in whichever step it begins to move.

Modules that follow `StepStatistics` bring their own agreement: `StatisticsSync` sums it over the replicas once a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import compress, repeat
from operator import attrgetter, getitem, is_not
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from shoal.comm.collective import Collective
from shoal.errors import UserCodeError
from shoal.gradients.units import ReleasedParameter
from shoal.models.batch_norm import GroupedBatchNorm, StepStatistics, SynchronisedBatchNorm
from shoal.models.joint_commit import JointCommit


class StepBuffers:
    """The buffers of `model`, saved or not, and its untrained parameters: what may change without a gradient.

    Left out are caches, which begin as None or change their shape, and those of `StepStatistics`: of batch norms over
    groups a forward can be taken back all the same. Untrained parameters
    are watched if there are no more of them than of trained ones (a teacher, not a base that adapters are added to) and
    their numbers are here; those that have not moved in the first `WATCHED_STEPS` steps are let go.

    `moving` are the names of what has changed so far; `of_samples` is one that two forwards of this step changed
    otherwise, None where there is none.
    """

    WATCHED_STEPS = 3

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._places: dict[str, tuple[dict[str, Any], str]] = {}
        self._watch({})
        self._before_pass: dict[str, Tensor] = {}
        self._after_first: dict[str, Tensor] = {}
        self._versions: dict[str, int] = {}
        self._counters: dict[str, str] = {}
        self._grouped = [module for module in model.modules() if isinstance(module, GroupedBatchNorm)]
        self._gathered, self._gathered_versions = [norm.totals.clone() for norm in self._grouped], list[int]()
        self._forwards, self._steps, self._looked = 0, 0, False
        self.moving: set[str] = set()
        self.of_samples: str | None = None

    @property
    def watched(self) -> list[str]:
        """The names of what is watched, sorted: the same on every rank that holds the same layers."""
        return sorted(self._start)

    def now(self, name: str) -> Tensor:
        """What is there under a watched name."""
        owner, attribute = self._places[name]
        return owner[attribute]

    def _watch(self, start: dict[str, Tensor]) -> None:
        """`start` is what is watched from now on, as the step found it."""
        places = [self._places[name] for name in start]
        self._start, self._forms = start, list(map(_form_of, start.values()))
        self._owners, self._keys = [owner for owner, _ in places], [key for _, key in places]

    def _all_now(self) -> list[Tensor]:
        """What is there under all watched names, without a call for each: a batch norm has three."""
        return list(map(getitem, self._owners, self._keys))

    def start(self) -> None:
        """A step begins."""
        if not self._steps:
            self._places = places = dict(_places(self._model))
            beside = {name: name.removesuffix(own) + "num_batches_tracked" for name, (_, own) in places.items()}
            self._counters = {name: counter for name, counter in beside.items() if counter in places}
            self._watch({name: self.now(name).detach().clone() for name in self._places})
        self._copy_moving(back=False)
        self._versions = dict(zip(self._start, map(_version_of, self._all_now()), strict=True))
        self._after_first, self._forwards, self._looked, self.of_samples = {}, 0, False, None
        self._before_pass = {}
        self._steps += 1

    @torch.no_grad()
    def next_pass(self) -> None:
        """The loop goes through the step's microbatches again: each forward now begins with what the pass before has
        left. A step that is not committed still goes back to where it began.
        """
        self.look()
        self._before_pass = {name: self.now(name).detach().clone() for name in self.moving & set(self._start)}
        self._after_first, self._forwards = {}, 0

    @torch.no_grad()
    def refresh(self) -> None:
        """Between two steps something else, such as an evaluation, may have changed it: the next step starts there."""
        for name, tensor in self._comparable().items():
            self._start[name].copy_(tensor)

    def rewind(self) -> None:
        """Before each forward: back to the state with which the step began."""
        self._forwards, self._looked = self._forwards + 1, False
        if self._grouped:
            totals = self._totals()
            torch._foreach_copy_(self._gathered, totals)  # pyright: ignore[reportPrivateImportUsage]
            self._gathered_versions = _versions_of(totals)
        if self._forwards > 1 and self._start:
            self._rewind()

    @torch.no_grad()
    def _rewind(self) -> None:
        for name, tensor in self._comparable().items():
            touched, before = name in self.moving or self._written(name, tensor), self._before(name)
            if touched and not _same(tensor, before):
                self._compare_forwards(name, tensor)
                tensor.copy_(before)
                self._versions[name] = tensor._version

    @torch.no_grad()
    def at_start(self) -> bool:
        """Since `rewind`, has nobody written what moves, such as a script that calls a part of its model?"""
        if _versions_of(self._totals()) != self._gathered_versions:
            return False
        now = self._comparable() if self.moving else {}
        if list(map(_version_of, now.values())) != list(map(self._versions.get, now)):
            return False
        return self._steps > self.WATCHED_STEPS or all(_same(now[name], self._before(name)) for name in now)

    @torch.no_grad()
    def take_back(self) -> None:
        """The forward that has just been computed does not count: what it changed is as it was before it."""
        if self._grouped:
            torch._foreach_copy_(self._totals(), self._gathered)  # pyright: ignore[reportPrivateImportUsage]
        for name, tensor in self._comparable().items():
            before = self._before(name)
            if not _same(tensor, before):
                tensor.copy_(before)
                self._versions[name] = tensor._version

    def look(self) -> None:
        """After the last forward: notes what has moved."""
        if not self._looked and self._start:
            self._look()
        self._looked = True

    @torch.no_grad()
    def _look(self) -> None:
        now = self._comparable()
        if len(now) < len(self._start):
            self._watch({name: self._start[name] for name in now})
        known = self.moving if self._forwards <= 1 else ()  # there is no other forward to compare it with
        for name in [name for name in now if name not in known]:
            tensor = now[name]
            if not self._untouched(name, tensor) and not _same(tensor, self._start[name]):
                self.moving.add(name)
                self._compare_forwards(name, tensor)

    def finish(self, *, committed: bool) -> None:
        """The step is over. A step that is not `committed` leaves no trace."""
        self.look()
        if not committed:
            self._copy_moving(back=True)
        if self._steps == self.WATCHED_STEPS:
            still = {name for name, _ in self._model.named_parameters()} - self.moving
            self._watch({name: start for name, start in self._start.items() if name not in still})

    @torch.no_grad()
    def _copy_moving(self, *, back: bool) -> None:
        """To where the step begins, or `back` to that, in one call: there may be three for each batch norm."""
        moves = list(map(self.moving.__contains__, self._start))
        if any(moves):
            start, now = list(compress(self._start.values(), moves)), list(compress(self._all_now(), moves))
            read, written = (start, now) if back else (now, start)
            torch._foreach_copy_(written, read)  # pyright: ignore[reportPrivateImportUsage]

    def _totals(self) -> list[Tensor]:
        """What the batch norms over groups have gathered."""
        return [cast(Tensor, norm._buffers["totals"]) for norm in self._grouped]

    def _before(self, name: str) -> Tensor:
        """What each forward begins with."""
        return self._before_pass.get(name, self._start[name])

    def _untouched(self, name: str, tensor: Tensor) -> bool:
        """Does PyTorch know of no write in this step to what never moved? It sees none through `.data`: the first steps
        are compared, whatever it says. A comparison on a GPU is a wait for it.
        """
        watched = self._steps > self.WATCHED_STEPS and name not in self.moving
        return watched and not self._written(name, tensor)

    def _written(self, name: str, tensor: Tensor) -> bool:
        """Has its version changed, or that of the counter beside it? Kernels of batch norms write statistics and change
        no version of theirs.
        """
        if tensor._version != self._versions.get(name):
            return True
        counter = self._counters.get(name)
        return counter is not None and getattr(self.now(counter), "_version", None) != self._versions.get(counter)

    def _compare_forwards(self, name: str, tensor: Tensor) -> None:
        """`tensor` is what a forward has left: does another forward of this step leave something else?"""
        if not _same(self._after_first.setdefault(name, tensor.detach().clone()), tensor):
            self.of_samples = name

    def _comparable(self) -> dict[str, Tensor]:
        """What is there now, by name, without caches."""
        now = self._all_now()
        if all(map(is_not, now, repeat(None))) and list(map(_form_of, now)) == self._forms:
            return dict(zip(self._start, now, strict=True))
        both = zip(self._start.items(), now, strict=True)
        return {name: tensor for (name, start), tensor in both if _alike(tensor, start)}


def _places(model: nn.Module) -> Iterator[tuple[str, tuple[dict[str, Any], str]]]:
    """Where everything lies that may change without a gradient: its name, and the dictionary and key that hold it."""
    agreed = {id(b) for m in model.modules() if isinstance(m, StepStatistics) for b in cast(nn.Module, m).buffers()}
    sizes = dict.fromkeys((False, True), 0)
    for parameter in model.parameters():
        sizes[parameter.requires_grad] += parameter.numel()
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for name, buffer in module._buffers.items():
            if buffer is not None and id(buffer) not in agreed:
                yield f"{prefix}{name}", (module._buffers, name)  # type: ignore[misc]
        for name, parameter in module._parameters.items():
            if parameter is None or parameter.requires_grad or isinstance(parameter, ReleasedParameter):
                continue
            if sizes[False] <= sizes[True]:
                yield f"{prefix}{name}", (module._parameters, name)  # type: ignore[misc]


_version_of, _form_of = attrgetter("_version"), attrgetter("shape", "dtype")


def _versions_of(tensors: Sequence[Tensor]) -> list[int]:
    return list(map(_version_of, tensors))


def _alike(tensor: Tensor | None, start: Tensor) -> bool:
    return tensor is not None and tensor.shape == start.shape and tensor.dtype == start.dtype


class BufferGuard:
    """Refuses state of `buffers` that is not the same on all ranks of `group`, which hold the same layers.

    The first step is compared, and every step once something has moved anywhere: `moving` is to be made known to all
    ranks before `compare`.
    """

    def __init__(self, buffers: StepBuffers, group: Collective) -> None:
        self._buffers, self._group = buffers, group
        self._first, self._compared = True, False

    @property
    def moving(self) -> bool:
        """Has anything changed on this rank so far?"""
        return bool(self._buffers.moving)

    def compare(self, *, moving_anywhere: bool) -> None:
        """After a step's last forward. Raises `UserCodeError`, on every rank alike, for what follows a rank's own
        samples.
        """
        self._buffers.look()
        self._compare(moving_anywhere=moving_anywhere)
        self._compared = True

    def finish(self, *, committed: bool, moving_anywhere: bool) -> None:
        """After a step, which compares where `compare` has not. Raises as that does."""
        self._buffers.finish(committed=committed)
        if not self._compared:
            self._compare(moving_anywhere=moving_anywhere)
        self._first = self._compared = False

    def _compare(self, *, moving_anywhere: bool) -> None:
        buffers = self._buffers
        if self._group.size > 1 and (self._first or moving_anywhere):
            self._require_alike()
        elif buffers.of_samples is not None and self._group.size == 1:
            raise _follows_samples(buffers.of_samples, "microbatches")

    def _require_alike(self) -> None:
        buffers, names = self._buffers, self._buffers.watched
        if not names:
            return
        sums = [self._sum_of(name) for name in names]
        if buffers.of_samples is not None:
            sums[names.index(buffers.of_samples)] = torch.tensor(float(self._group.rank), dtype=torch.float64)
        own = torch.stack([total.to(sums[0].device) for total in sums])
        extremes = torch.cat([own, -own])
        self._group.all_reduce(extremes, "max").wait()
        high, low = extremes.chunk(2)
        for name, same in zip(names, (high == -low).tolist(), strict=True):
            if not same:
                raise _follows_samples(name, "ranks")

    def _sum_of(self, name: str) -> Tensor:
        """What has to be the same on all ranks. They may hold different parts of a frozen parameter, which counts only
        if it has moved.
        """
        now = self._buffers.now(name)
        if isinstance(now, Parameter) and name not in self._buffers.moving:
            return torch.zeros((), dtype=torch.float64, device=now.device)
        return _checksum(now)


def _follows_samples(name: str, what: str) -> UserCodeError:
    return UserCodeError(
        f"the module changes {name} in forward, and {what} that see other samples change it otherwise; what is "
        "evaluated and saved would depend on the layout. Compute it without the samples, or follow "
        "shoal.models.batch_norm.StepStatistics, which sums over ranks once a step"
    )


def _same(a: Tensor, b: Tensor) -> bool:
    """The same numbers; a NaN is itself."""
    if torch.equal(a, b):
        return True
    if not a.is_floating_point() or not bool(a.isnan().any()):
        return False
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


def _checksum(buffer: Tensor) -> Tensor:
    flat = torch.view_as_real(buffer).flatten() if buffer.is_complex() else buffer.flatten()
    weights = torch.arange(1, flat.numel() + 1, dtype=torch.float64, device=flat.device)
    return (flat.detach().double().nan_to_num() * weights.sin()).sum()


class StatisticsSync:
    """Brings the modules that follow the `StepStatistics` protocol to agreement. Costs nothing where there are none."""

    def __init__(self, model: nn.Module, group: Collective) -> None:
        self._modules = [module for module in model.modules() if isinstance(module, StepStatistics)]
        self._group, self._joint = group, JointCommit.of(self._modules)
        self._totals: tuple[Tensor, ...] | None = None
        self._kept = False

    def sum(self) -> None:
        """After a step's last forward: adds up what the ranks have gathered. The statistics stay as they are."""
        self._totals = ()
        if not self._modules:
            return
        sums = [] if self._joint is not None else [module.step_sums() for module in self._modules]
        flat = torch.cat(sums) if self._joint is None else self._joint.gathered()
        if self._group.size > 1:
            self._group.all_reduce(flat).wait()
        self._totals = (flat,) if self._joint is not None else flat.split([own.numel() for own in sums])

    def keep(self) -> None:
        """Before the end of a step that is committed: its sums go into the running statistics, which evaluations read.
        What forwards gather from here on is dropped.
        """
        if self._modules:
            self.finish(committed=True)
            self._kept = True

    def finish(self, *, committed: bool) -> None:
        """After a step: its sums go into the running statistics, or are dropped where the step was skipped."""
        if committed and not self._kept:
            if self._totals is None:
                self.sum()
            if self._joint is not None and self._totals:
                self._joint(*self._totals)
            elif self._joint is None:
                for module, total in zip(self._modules, self._totals or (), strict=True):
                    module.commit_sums(total)
        elif self._joint is not None:
            self._joint.discard_sums()
        else:
            for module in self._modules:
                module.discard_sums()
        self._totals, self._kept = None, False


# The exchange of `SynchronisedBatchNorm` between ranks: rows of statistics, with gradients of any order.
#
#     rows = [row_0; row_1; ...],    dL/drow_r = sum over ranks q of (dL_q/drows)[r]
#
# The forward is an all-gather, the backward a reduce-scatter, and the backward of that an all-gather again.


def synchronised_norms(model: nn.Module) -> list[SynchronisedBatchNorm]:
    """Those of `model`, in its order."""
    return [module for module in model.modules() if isinstance(module, SynchronisedBatchNorm)]


def connect_norms(model: nn.Module, group: Collective) -> None:
    """From now on they take their statistics over the ranks of `group`, all of which call them in the same order."""

    def exchange(row: Tensor) -> Tensor:
        return _Rows.apply(row, group)

    for norm in synchronised_norms(model):
        norm.exchange = exchange


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, row: Tensor, group: Collective) -> Tensor:
        ctx.group = group
        rows = row.new_empty(group.size, *row.shape)
        group.all_gather(rows.flatten(), row.contiguous()).wait()
        return rows

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _Summed.apply(gradients[0], ctx.group), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Collective) -> Tensor:
        ctx.group = group
        own = torch.empty_like(rows[0])
        group.reduce_scatter(own, rows.contiguous().flatten()).wait()
        return own

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _Rows.apply(gradients[0], ctx.group), None
