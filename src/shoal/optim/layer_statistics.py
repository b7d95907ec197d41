"""What K-FAC needs of a layer: the second moments of what goes into it, and of the gradients of what comes out.

    A = sum over rows of a a^T / R,     G = sum over rows of g g^T / L

A row is one application of the weights: a position of a sample in a linear layer or an embedding, a patch of an image
in a convolution. There are R rows, over all ranks, and L terms in the mean loss; g is the gradient of a term, not of
the mean. A x G is then the empirical Fisher matrix of the layer, as if its applications were independent (Martens and
Grosse, arXiv:1503.05671; Grosse and Martens, arXiv:1602.01407; for weights that positions share Eschenhagen et al.,
arXiv:2311.00636, 3.2: "expand"). In the form "reduce" (3.3) a sample is one row: the mean of its inputs, and the sum
of its gradients. An embedding's input is one-hot, so that its A is a diagonal: how often each token stands there.

Of a sampled Fisher matrix g is the gradient of -log p(y | x) for a y that is drawn from the model's own p, the softmax
of its outputs: a backward of its own through the same forward, before that of the loss.

Samples that weigh nothing are no rows. Sums are added up in the backward: a forward that is repeated counts once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, cast, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from shoal.comm.collective import Alone, Collective
from shoal.errors import UserCodeError
from shoal.maths.counter import bits, uniform
from shoal.maths.products import symmetric_product
from shoal.models.roles import is_conv1d
from shoal.optim.parts import Parts, SeesParts
from shoal.state import Trained, owned_whole
from shoal.topology.holding import held
from shoal.topology.layout import Layout

WeightSharing = Literal["expand", "reduce"]


@runtime_checkable
class SeesLayers(SeesParts, Protocol):
    """An optimizer that sees what goes into layers, and what comes back to them."""

    weight_sharing: WeightSharing

    def watch(self, layers: Mapping[str, nn.Module], group: Collective, *, seed: int = 0) -> None:
        """Before it is connected: the layers by the names of their weights, and the ranks that hold the same ones and
        see other samples.
        """
        ...

    def begin(self, step: int) -> None:
        """Before the first forward of a step."""
        ...

    def microbatch(self, weights: Tensor) -> None:
        """Before each forward of a step: the weights of its samples, `[samples]` or `[samples, positions]`."""
        ...

    def agree(self, *, scale: float, terms: float) -> None:
        """After the last backward, on all ranks: the loss was `scale` times the sum of so many `terms`."""
        ...

    def look(self, outputs: Any, targets: Any, weights: Tensor, positions: Tensor) -> None:
        """After each forward of a step, before its backward."""
        ...

    def aside(self) -> AbstractContextManager[None]:
        """Around a backward of other optimizers' parameters alone, which may pass through these layers."""
        ...

    def close(self) -> None:
        """Takes its hooks off the layers."""
        ...


class Factors(NamedTuple):
    """Of a layer: A and G; None where a side is too long. Of an embedding, A is a vector. `turned`: its weight is
    `[inputs, outputs]`.
    """

    inputs: Tensor | None
    outputs: Tensor | None
    turned: bool = False


class _Rows(NamedTuple):
    """One application of the weights a row: `[samples, positions, width]`, and which of them count."""

    inputs: Tensor
    gradients: Tensor
    real: Tensor


class _Seen(NamedTuple):
    """A call of a layer, and the place of its output in the graph."""

    name: str
    module: nn.Module
    inputs: Tensor
    edge: GradientEdge


@dataclass
class _Sums:
    """Of one layer, over the rows of this rank."""

    inputs: Tensor | None
    outputs: Tensor | None
    rows: Tensor

    def tensors(self) -> list[Tensor]:
        return [tensor for tensor in (self.inputs, self.outputs) if tensor is not None]


def drawn_loss(outputs: Any, targets: Any, weights: Tensor, positions: Tensor, *, key: int) -> Tensor:
    """The weighted sum of -log p(y) over a batch, p the softmax of `outputs` `[samples, ..., classes]` and y drawn from
    it: one number for each sample and position, which follows from `key` and `positions`, where samples stand in the
    data. Of `targets` the shape counts, `[samples, ...]`; `weights` have the first or all of these dimensions.

    Raises `UserCodeError` for outputs that are no logits of classes.
    """
    logits = getattr(outputs, "logits", outputs)
    lead = getattr(targets, "shape", torch.Size())
    if not isinstance(logits, Tensor) or logits.ndim != len(lead) + 1 or logits.shape[:-1] != lead:
        shape = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise UserCodeError(
            f'optimizer.fisher = "sampled": the model gives {shape} for targets of {list(lead)}, and logits of classes '
            'are needed, [*targets, classes]: set it to "empirical"'
        )
    with torch.no_grad():
        sums = logits.double().softmax(-1).cumsum(-1)
        of_sample = bits(key, positions.to(logits.device)).view(-1, *[1] * (len(lead) - 1))
        places = torch.arange(lead[1:].numel(), device=logits.device).view(lead[1:])
        drawn = uniform(of_sample, places, dtype=torch.float64) * sums[..., -1]
        found = torch.searchsorted(sums, drawn[..., None]).clamp_(max=logits.shape[-1] - 1)
    terms = -logits.log_softmax(-1).gather(-1, found)[..., 0]
    return (terms * weights.to(terms.dtype).view(*weights.shape, *[1] * (len(lead) - weights.ndim))).sum()


@contextmanager
def aside(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[None]:
    """Around a backward that is not of their parameters: those that see layers leave it out."""
    with ExitStack() as around:
        for each in optimizers:
            if isinstance(each, SeesLayers):
                around.enter_context(each.aside())
        yield


def layers_in(model: nn.Module, names: Mapping[int, str]) -> dict[str, nn.Module]:
    """The layers of `model` that have statistics, by the names of their weights: `names`, by the parameter's id.

    A weight that several layers share is not among them, nor are those that a module uses without calling the layer.
    """
    inside = {id(part) for m in model.modules() if isinstance(m, nn.MultiheadAttention) for part in m.modules()}
    found: dict[str, list[nn.Module]] = {}
    for module in model.modules():
        own = names.get(id(getattr(module, "weight", None)))
        if own is not None:
            found.setdefault(own, []).append(module)
    alone = {name: modules[0] for name, modules in found.items() if len(modules) == 1}
    return {name: module for name, module in alone.items() if _is_known(module) and id(module) not in inside}


def watch_alone(optimizer: SeesLayers, model: nn.Module, *, seed: int = 0) -> None:
    """Gives `optimizer` the layers of `model`, before the first step of a process that has the whole of it."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer.watch(layers_in(model, {id(p): name for name, p in named.items()}), Alone(), seed=seed)
    own = [owned_whole(Trained(held(Layout(), 0, name, tuple(p.shape)), p)) for name, p in named.items()]
    optimizer.connect(Parts(own, Alone(), Alone()))


def _is_known(module: nn.Module) -> bool:
    if isinstance(module, nn.Conv2d):
        return module.groups == 1 and module.padding_mode == "zeros" and not isinstance(module.padding, str)
    linear = type(module) is nn.Linear or is_conv1d(module)
    return linear or (isinstance(module, nn.Embedding) and not module.sparse)


@dataclass
class LayerStatistics:
    """Measures `layers` in the steps from `begin` to `agree`, over the ranks of `group`.

    `largest`: longer sides are left out. `drawn_by`: the key by which targets are drawn; None: the data's own. Raises
    `UserCodeError` in a forward whose rows are not those of the batch.
    """

    layers: Mapping[str, nn.Module]
    group: Collective
    weight_sharing: WeightSharing
    largest: int
    drawn_by: int | None = None
    _seen: list[_Seen] = field(default_factory=list, init=False)
    _sums: dict[str, _Sums] | None = field(default=None, init=False)
    _weights: Tensor | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._hooks = [
            module.register_forward_hook(self._forward_hook(name), with_kwargs=True)
            for name, module in self.layers.items()
        ]

    def close(self) -> None:
        """Takes the hooks off the layers."""
        for hook in self._hooks:
            hook.remove()

    def begin(self, names: Collection[str] | None = None) -> None:
        """From now on backwards are added up, of the layers with these names; None: of all."""
        names = self.layers if names is None else names
        self._sums, self._seen = {name: self._empty(self.layers[name]) for name in sorted(names)}, []

    def stop(self) -> None:
        """What was added up is forgotten."""
        self._sums = None

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Around a backward that is not of these layers' weights: nothing of it is added up."""
        sums, self._sums = self._sums, None
        try:
            yield
        finally:
            self._sums = sums

    def microbatch(self, weights: Tensor) -> None:
        """The weights of the samples of the next forward."""
        self._weights = weights

    def look(self, outputs: Any, targets: Any, weights: Tensor, positions: Tensor) -> None:
        """Goes backward from drawn targets, if they are, to what layers of this forward have put out."""
        seen, self._seen = self._seen, []
        if self._sums is None or self.drawn_by is None or not seen:
            return
        loss = drawn_loss(outputs, targets, weights, positions, key=self.drawn_by)
        found = torch.autograd.grad(loss, [one.edge for one in seen], retain_graph=True, allow_unused=True)
        for one, gradient in zip(seen, found, strict=True):
            if gradient is not None:
                self._add(one.name, one.module, one.inputs, gradient, self._weights)

    def agree(self, *, scale: float, terms: float) -> dict[str, Factors]:
        """The factors of all ranks' samples, by layer; without those that no sample has passed. All ranks call it."""
        if self._seen:
            raise UserCodeError(
                'fisher = "sampled" draws targets from outputs that shoal train has computed, and this loop is a '
                'script of your own: use "empirical"'
            )
        scale = scale if self.drawn_by is None else 1.0
        sums, self._sums, self._weights = self._sums, None, None
        assert sums is not None, "begin was called"
        self._sum_over_ranks([own.rows for own in sums.values()])
        used = {name: own for name, own in sums.items() if float(own.rows) > 0}
        self._sum_over_ranks([tensor for own in used.values() for tensor in own.tensors()])
        return {
            name: Factors(
                None if own.inputs is None else own.inputs.div_(own.rows),
                None if own.outputs is None else own.outputs.div_(scale**2 * terms),
                is_conv1d(self.layers[name]),
            )
            for name, own in used.items()
        }

    def _sum_over_ranks(self, tensors: list[Tensor]) -> None:
        if self.group.size == 1 or not tensors:
            return
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        self.group.all_reduce(flat).wait()
        parts = flat.split([tensor.numel() for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_(part.view(tensor.shape))

    def _empty(self, module: nn.Module) -> _Sums:
        weight: Any = module.weight
        like = {"device": weight.device, "dtype": torch.promote_types(weight.dtype, torch.float32)}
        inputs, outputs = _widths(module)
        side = lambda length: torch.zeros(length, length, **like) if length <= self.largest else None  # noqa: E731
        first = torch.zeros(inputs, **like) if isinstance(module, nn.Embedding) else side(inputs)
        return _Sums(first, side(outputs), torch.zeros((), **like))

    def _forward_hook(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
            if name not in (self._sums or {}) or not torch.is_grad_enabled() or not output.requires_grad:
                return
            if not cast(Tensor, module.weight).requires_grad:  # frozen: nothing is preconditioned
                return
            inputs, weights = (args[0] if args else kwargs["input"]).detach(), self._weights
            if self.drawn_by is None:
                output.register_hook(lambda gradient: self._add(name, module, inputs, gradient, weights))
            else:
                self._seen.append(_Seen(name, module, inputs, get_gradient_edge(output)))

        return hook

    @torch.no_grad()
    def _add(self, name: str, module: nn.Module, inputs: Tensor, gradient: Tensor, weights: Tensor | None) -> None:
        if name not in (self._sums or {}):  # another backward than a step's
            return
        assert self._sums is not None, "it has the name"
        sums, rows = self._sums[name], _rows(name, module, inputs, gradient, weights)
        if isinstance(module, nn.Embedding):
            assert sums.inputs is not None, "a diagonal is never too long"
            sums.inputs += torch.bincount(rows.inputs[rows.real], minlength=module.num_embeddings)
            taken = (None, rows.gradients[rows.real])
        elif self.weight_sharing == "expand":
            taken = (rows.inputs[rows.real], rows.gradients[rows.real])
        else:
            taken = _reduced(rows)
        sums.rows += len(taken[1])
        for total, values in zip((sums.inputs, sums.outputs), taken, strict=True):
            if total is not None and values is not None:
                wide = values.to(total.dtype).mT
                total += symmetric_product(wide, wide)


def _widths(module: nn.Module) -> tuple[int, int]:
    """The rows of A and of G."""
    if isinstance(module, nn.Embedding):
        return module.num_embeddings, module.embedding_dim
    if isinstance(module, nn.Conv2d):
        return module.in_channels * module.kernel_size[0] * module.kernel_size[1], module.out_channels
    if is_conv1d(module):
        inputs, outputs = cast(Tensor, module.weight).shape
        return inputs, outputs
    assert isinstance(module, nn.Linear)
    return module.in_features, module.out_features


def _rows(name: str, module: nn.Module, inputs: Tensor, gradient: Tensor, weights: Tensor | None) -> _Rows:
    if isinstance(module, nn.Conv2d):
        kernel, padding = module.kernel_size, module.padding
        assert not isinstance(padding, str)
        patches = F.unfold(inputs, kernel, dilation=module.dilation, padding=padding, stride=module.stride)  # pyright: ignore[reportArgumentType]
        inputs, gradient = patches.mT, gradient.flatten(2).mT
    if gradient.ndim == 1:  # of a single row, without a batch
        inputs, gradient = inputs[None], gradient[None]
    lead = gradient.shape[:-1]
    if weights is not None:
        _check_own_rows(name, module, weights, lead)
    every = torch.ones(lead, dtype=torch.bool, device=gradient.device)
    real = every if weights is None else _real(name, weights, lead)
    by_sample = (lead[0], -1) if len(lead) > 1 else (lead[0], 1)
    width = () if isinstance(module, nn.Embedding) else inputs.shape[-1:]
    return _Rows(
        inputs.reshape(*by_sample, *width), gradient.reshape(*by_sample, gradient.shape[-1]), real.reshape(by_sample)
    )


def _check_own_rows(name: str, module: nn.Module, weights: Tensor, lead: Sequence[int]) -> None:
    """Raises `UserCodeError` where samples share a layer's output `[*lead, width]`, as that of learned positions: what
    comes back is a sum over the samples of a microbatch, and squares of sums depend on how a batch is divided.
    """
    samples = len(weights)
    in_front = len(lead) > 1 and lead[0] == 1 and samples not in lead
    without_batch = isinstance(module, nn.Embedding) and len(lead) == 1 and lead[0] % samples
    if samples > 1 and (in_front or without_batch):
        raise UserCodeError(
            f'optimizer.kind = "kfac": the layer of {name} gives {list(lead)} rows to a batch of {samples} samples, '
            "which share them: their gradients come as one sum. Add the name to optimizer.adamw, or in a script give "
            "it to a group without `whole`"
        )


def _real(name: str, weights: Tensor, lead: Iterable[int]) -> Tensor:
    """Which rows of a layer's output `[*lead, width]` belong to something that weighs."""
    lead, counted = tuple(lead), weights > 0
    if lead == tuple(weights.shape) or (len(lead) == 1 and lead[0] == weights.numel()):
        return counted.reshape(lead)
    if lead[0] == len(weights):
        return counted.reshape(len(weights), -1).any(1).view(-1, *[1] * (len(lead) - 1)).expand(lead)
    if bool(counted.all()):
        return torch.ones(lead, dtype=torch.bool, device=weights.device)
    raise UserCodeError(
        f'optimizer.kind = "kfac": the output of the layer of {name} has {list(lead)} rows for a batch of '
        f"{list(weights.shape)}, some of which is padding, so that it cannot be told which rows count: add the name to "
        "optimizer.adamw"
    )


def _reduced(rows: _Rows) -> tuple[Tensor, Tensor]:
    """One row a sample: the mean of its inputs, and the sum of its gradients."""
    counts = rows.real.sum(1)
    own, real = counts > 0, rows.real[..., None]
    inputs = (rows.inputs * real).sum(1)[own] / counts[own, None]
    return inputs, (rows.gradients * real).sum(1)[own]
