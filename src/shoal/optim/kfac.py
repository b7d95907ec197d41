"""K-FAC (Martens and Grosse, arXiv:1503.05671): natural gradients, by a Fisher matrix in blocks that are products.

For the gradient V of a layer's weights `[outputs, inputs]`, and the factors A and G that `shoal.optim.layer_statistics`
measures every `every` steps:

    A' <- b A' + (1 - b) A,  A' = Q_A diag(a) Q_A^T,      G' likewise
    U = Q_G [ (Q_G^T V Q_A) / (g a^T + damping) ] Q_A^T                   the inverse of G' x A' + damping I
    n = min(1, sqrt(kl_clip / (lr^2 sum of U V)))                         the sum over all matrices
    M <- momentum M + n U,      X <- (1 - lr w) X - lr M

The inverse by eigenvalues is that of George et al., arXiv:1806.03884, without their rescaling; n is that of Ba et al.
(ICLR 2017) as Pauloski et al. have it (arXiv:2007.00784, 3.3). A side without a factor has eigenvalues of 1. Of a
convolution, inputs are the numbers of a patch; an embedding's gradient is `[tokens, width]`, with the frequencies of
tokens for G' and no basis on that side.

With `inverse = "cholesky"` the damping is split over both factors (arXiv:1503.05671, 6.3), which costs a third of an
eigendecomposition, and half of the products of a step:

    U = (G' + sqrt(damping) / pi I)^(-1) V (A' + pi sqrt(damping) I)^(-1),      pi^2 = mean diagonal of A' / that of G'

Factors are summed over all ranks that see samples. A matrix has an owner, which decomposes its factors; who keeps
them, and so who sends what, is the trade-off of KAISA (Pauloski et al., arXiv:2107.01739): the owner alone, which sends
updates (`decompositions = "owner"`), or every rank that has the matrix ("all"). What has no factors is AdamW's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from shoal.comm.collective import Alone, Collective
from shoal.errors import UserCodeError
from shoal.maths.counter import key_of
from shoal.maths.products import product
from shoal.optim.declared import Dims
from shoal.optim.fused import GroupTensors
from shoal.optim.layer_statistics import Factors, LayerStatistics, WeightSharing
from shoal.optim.matrix_kinds import KFAC, sides
from shoal.optim.owners import Owners, Whole, WholeOptimizer, as_matrix
from shoal.optim.parts import Parts

_SIDES = ("rows", "columns")
_INVERTED = ("tokens", *_SIDES)


OPTIONS = (
    "momentum", "damping", "kl_clip", "fisher", "every", "factor_beta", "weight_sharing", "decompositions", "inverse",
    "largest_side",
)  # fmt: skip
"""Keys of `[optimizer]` that are options of the class."""


def build(config: KFAC, groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
    """The optimizer of the run file."""
    return OwnedKFAC(
        groups,
        lr=lr,
        **{name: getattr(config, name) for name in OPTIONS},
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        adamw_rate=1.0 if config.adamw_lr is None or config.lr == 0 else config.adamw_lr / config.lr,
    )


class OwnedKFAC(WholeOptimizer):
    """K-FAC for the groups that say `whole`, AdamW for the others. It implements `SeesLayers`: call `watch` first.

    Args:
        params: Dictionaries with `params` and their options; of plain parameters those of two dimensions are `whole`.
        lr: The learning rate.
        options: `OPTIONS`, with the defaults of `[optimizer]`; `betas`, `eps` and `weight_decay` are AdamW's, and
            `adamw_rate` what the rate is multiplied by of weights that turn out to have no layer.
    """

    decomposes = True

    def __init__(self, params: Iterable[Any], lr: float = 0.02, **options: Any) -> None:
        config = KFAC()
        defaults = {
            **{name: getattr(config, name) for name in OPTIONS},
            "betas": (config.beta1, config.beta2),
            "eps": config.eps,
            "weight_decay": config.weight_decay,
            "adamw_rate": 1.0,
        }
        if unknown := options.keys() - defaults.keys():
            raise TypeError(f"OwnedKFAC has no option {sorted(unknown)[0]!r}; it has {', '.join(sorted(defaults))}")
        super().__init__(params, lr=lr, **{**defaults, **options})
        self.slots = KFAC(largest_side=self.defaults["largest_side"], inverse=self.defaults["inverse"]).slots
        self.weight_sharing: WeightSharing = self.defaults["weight_sharing"]
        self._statistics: LayerStatistics | None = None
        self._factors: dict[str, Factors] = {}
        self._layers: list[str] = []
        self._measured: set[str] | None = None
        self._due, self._frozen = set[str](), set[str]()
        self._all_due = False
        self._equal: Collective = Alone()
        self._sharing: Owners | None = None

    def watch(self, layers: Mapping[str, nn.Module], group: Collective, *, seed: int = 0) -> None:
        """Measures `layers` over the ranks of `group`; `seed` draws targets. Weights of none become AdamW's."""
        drawn_by = key_of(seed, "fisher") if self.defaults["fisher"] == "sampled" else None
        largest = self.defaults["largest_side"]
        self._statistics = LayerStatistics(layers, group, self.weight_sharing, largest, drawn_by)
        self._names = {id(module.weight): name for name, module in layers.items()}
        self._layers = sorted(layers)

    def connect(self, parts: Parts) -> None:
        """Matrices become whole on their owners; or these decompose factors for all."""
        super().connect(parts)
        self._equal = parts.equal
        whole = {id(p) for group in self.param_groups if group["whole"] for p in group["params"]}
        own = {each.name for each in parts.owned if id(each.parameter) in whole}
        matrices = own if self._owners is None else self._owners.shapes.keys()
        self._layers = [name for name in self._layers if name in matrices]
        if self.defaults["decompositions"] == "all":
            self._sharing, self._owners = self._owners, None

    def begin(self, step: int) -> None:
        """Measures in every step after `every` others; what has no means yet, until it has."""
        if self._measured is None:
            self._measured = self._with_factors()
        layers, self._all_due = set(self._layers), (step - 1) % self.defaults["every"] == 0
        self._due = layers if self._all_due else layers - self._measured
        if self._due:
            self._watching.begin(self._due)
        else:
            self._watching.stop()

    def microbatch(self, weights: Tensor) -> None:
        """The weights of the samples of the next forward."""
        self._watching.microbatch(weights)

    def look(self, outputs: Any, targets: Any, weights: Tensor, positions: Tensor) -> None:
        """What the next backward begins with: targets are drawn from it, if they are to be."""
        self._watching.look(outputs, targets, weights, positions)

    def agree(self, *, scale: float, terms: float) -> None:
        """Sums over ranks what a step has measured, if it has."""
        self._factors = self._watching.agree(scale=scale, terms=terms) if self._due else {}

    def aside(self) -> AbstractContextManager[None]:
        """Around a backward of other optimizers' parameters alone, which may pass through these layers."""
        return self._watching.aside()

    def close(self) -> None:
        """Takes its hooks off the layers."""
        self._watching.close()

    def updates(self, own: Mapping[str, Whole]) -> dict[str, Tensor]:
        """M of every matrix that this rank updates. Raises `UserCodeError` for one whose layer was not called."""
        assert self._watching, "it sees layers"
        self._follow(own)
        turned = {name: self._preconditioned(name, one) for name, one in own.items()}
        ratio = self._clipping(own, turned)
        found: dict[str, Tensor] = {}
        for name, one in own.items():
            if "kfac_momentum" not in one.state:
                one.state["kfac_momentum"] = torch.zeros_like(one.direction)
            kept = one.state["kfac_momentum"]
            found[name] = kept.mul_(one.group["momentum"]).add_(turned[name].view(kept.shape), alpha=ratio)
        return found

    def divided(self, work: list[GroupTensors]) -> tuple[list[GroupTensors], list[GroupTensors]]:
        """What is `whole` and of no layer is AdamW's, at a rate of its own."""
        groups, others = super().divided(work)
        layers, matrices = self._watching.layers, list[GroupTensors]()
        for group, parameters, gradients in groups:
            own, rest = GroupTensors(group, [], []), GroupTensors(group, [], [])
            for parameter, gradient in zip(parameters, gradients, strict=True):
                part = own if self._names.get(id(parameter)) in layers else rest
                part.parameters.append(parameter)
                part.gradients.append(gradient)
            if own.parameters:
                matrices.append(own)
            if rest.parameters:
                others.append(rest._replace(group={**group, "lr": group["lr"] * self.defaults["adamw_rate"]}))
        return matrices, others

    def direction(self, group: dict[str, Any], parameter: Parameter, gradient: Tensor) -> Tensor:
        """The gradient in the shape of the matrix: a rank that steps it has the whole of it."""
        return gradient.view(self._shapes.get(id(parameter), gradient.shape))

    def cost(self, shape: Dims) -> float:
        """Floating-point operations of an update, with its share of the inverses."""
        keys = ("largest_side", "inverse", "every")
        return KFAC(**{key: self.defaults[key] for key in keys}).matrix_flops(*sides(shape))

    @property
    def _watching(self) -> LayerStatistics:
        if self._statistics is None:
            raise UserCodeError(
                "OwnedKFAC sees no layers: hand it to shoal.start, or call watch_alone(optimizer, model) of "
                "shoal.optim.layer_statistics before the first step"
            )
        return self._statistics

    def _with_factors(self) -> set[str]:
        """The layers of which a rank that holds the same ones has means: often an owner alone does."""
        kept = {self._names.get(id(p)) for p, state in self.state.items() if any(n.startswith("mean_") for n in state)}
        found = torch.tensor([name in kept for name in self._layers], dtype=torch.float32, device=_device_of(self))
        if self._watching.group.size > 1:
            self._watching.group.all_reduce(found, "max").wait()
        return {name for name, has in zip(self._layers, found.tolist(), strict=True) if has}

    def _follow(self, own: Mapping[str, Whole]) -> None:
        """The factors of this step go into the means, which are decomposed, here or by the owner. Only after that, and
        where layers are frozen, or thawed, does another set of layers have means.
        """
        factors, self._factors = self._factors, {}
        alike = bool(factors) and self._equal is self._watching.group  # no rank has other layers: all have factors
        sharing = self._sharing if self._all_due or alike else None
        mine = own.keys() if sharing is None else set(sharing.mine)
        followed = [name for name in own if name in factors]
        for name in followed:
            _average(own[name], factors[name], beta=own[name].group["factor_beta"])
            _invert(name, own[name], really=name in mine)
        self._all_due = False
        if sharing is not None:
            sharing.share({name: _found(own[name].state) for name in followed})
        layers = self._watching.layers
        frozen = {name for name in self._layers if not layers[name].weight.requires_grad}
        if factors or frozen != self._frozen:
            self._measured, self._frozen = self._with_factors(), frozen

    def _preconditioned(self, name: str, one: Whole) -> Tensor:
        """U."""
        gradient, state = as_matrix(one.direction), one.state
        if not _found(state) and "mean_tokens" not in state:
            if bool(gradient.any()):
                raise UserCodeError(
                    f'optimizer.kind = "kfac": {name} has a gradient, and its layer was not called in the forward, or '
                    "both its sides are longer than optimizer.largest_side: add the name to optimizer.adamw"
                )
            return gradient.clone()
        return preconditioned(gradient, state, damping=one.group["damping"])

    def _clipping(self, own: Mapping[str, Whole], turned: Mapping[str, Tensor]) -> float:
        """n."""
        limit = self.defaults["kl_clip"]
        if limit is None:
            return 1.0
        counted = own if self._sharing is None else [name for name in self._sharing.mine if name in own]
        total = torch.zeros((), dtype=torch.float64, device=_device_of(self))
        for name in sorted(counted):
            one = own[name]
            product = (turned[name].double() * as_matrix(one.direction).double()).sum()
            total += product * one.group["lr"] ** 2
        if self._equal.size > 1:
            self._equal.all_reduce(total).wait()
        change = float(total)
        return min(1.0, (limit / change) ** 0.5) if change > 0 else 1.0


def preconditioned(gradient: Tensor, state: Mapping[str, Tensor], *, damping: float) -> Tensor:
    """U of `gradient` `[rows, columns]`, by what `state` has of the factors."""
    by_values = not any(f"inverse_{name}" in state for name in _INVERTED)
    x = gradient.to((_found(state) or [state["mean_tokens"]])[0].dtype)
    return (_by_eigenvalues(x, state, damping) if by_values else _by_inverses(x, state)).to(gradient.dtype)


def _by_eigenvalues(x: Tensor, state: Mapping[str, Tensor], damping: float) -> Tensor:
    rows, columns = (state.get(f"values_{name}") for name in _SIDES)
    rows = state.get("mean_tokens", x.new_ones(x.shape[0])) if rows is None else rows
    columns = x.new_ones(x.shape[1]) if columns is None else columns
    x = product(state["basis_rows"].mT, x) if "basis_rows" in state else x
    x = product(x, state["basis_columns"]) if "basis_columns" in state else x
    x = x / (rows[:, None] * columns + damping)
    x = product(state["basis_rows"], x) if "basis_rows" in state else x
    return product(x, state["basis_columns"].mT) if "basis_columns" in state else x


def _by_inverses(x: Tensor, state: Mapping[str, Tensor]) -> Tensor:
    x = state["inverse_tokens"][:, None] * x if "inverse_tokens" in state else x
    x = product(state["inverse_rows"], x) if "inverse_rows" in state else x
    return product(x, state["inverse_columns"]) if "inverse_columns" in state else x


def _average(one: Whole, factors: Factors, *, beta: float) -> None:
    """The factors of a step go into the means; the first ones are these."""
    if factors.inputs is not None and factors.inputs.ndim == 1:
        named = {"mean_tokens": factors.inputs, "mean_columns": factors.outputs}
    else:
        rows, columns = (factors.outputs, factors.inputs)[:: -1 if factors.turned else 1]
        named = {"mean_rows": rows, "mean_columns": columns}
    for name, factor in named.items():
        if factor is None:
            continue
        if name in one.state:
            one.state[name].lerp_(factor, 1 - beta)
        else:
            one.state[name] = factor.clone()


def _invert(name: str, one: Whole, *, really: bool) -> None:
    """What inverts the means; or room for it."""
    if one.group["inverse"] == "eigenvalues":
        _decompose(one.state, really=really)
        return
    means = {side: one.state[f"mean_{side}"] for side in _INVERTED if f"mean_{side}" in one.state}
    shifts = _split(one.group["damping"], list(means.values()))
    for (side, mean), shift in zip(means.items(), shifts, strict=True):
        one.state[f"inverse_{side}"] = _damped_inverse(name, mean, shift) if really else torch.empty_like(mean)


def _decompose(state: dict[str, Any], *, really: bool) -> None:
    """The eigenvalues and the eigenbasis of each mean; or room for them."""
    for name in _SIDES:
        mean = state.get(f"mean_{name}")
        if mean is not None and really:
            values, basis = torch.linalg.eigh(mean)
            state[f"values_{name}"], state[f"basis_{name}"] = values.clamp_(min=0), basis.contiguous()
        elif mean is not None:
            state[f"values_{name}"], state[f"basis_{name}"] = torch.empty_like(mean[0]), torch.empty_like(mean)


def _split(damping: float, means: Sequence[Tensor]) -> list[float]:
    """What is added to the diagonal of each of the means: G', A'."""
    if len(means) == 1:
        return [damping]
    outputs, inputs = (float((mean if mean.ndim == 1 else mean.diagonal()).mean()) for mean in means)
    pi = (inputs / outputs) ** 0.5 if inputs > 0 and outputs > 0 else 1.0
    return [damping**0.5 / pi, damping**0.5 * pi]


def _damped_inverse(name: str, mean: Tensor, shift: float) -> Tensor:
    """(M + shift I)^(-1) of a matrix, or of a diagonal."""
    if mean.ndim == 1:
        return (mean + shift).reciprocal_()
    damped = mean.clone()
    damped.diagonal().add_(shift)
    factor, failed = torch.linalg.cholesky_ex(damped)
    if failed:
        raise UserCodeError(
            f'optimizer.inverse = "cholesky": a factor of {name} is not positive with {shift:.1e} added to its '
            'diagonal: raise optimizer.damping, or use inverse = "eigenvalues"'
        )
    return torch.cholesky_inverse(factor)


def _found(state: Mapping[str, Tensor]) -> list[Tensor]:
    """What inverts the means, in one order: what one rank finds for all that have the matrix."""
    by_values = [state[f"{of}_{name}"] for name in _SIDES for of in ("values", "basis") if f"{of}_{name}" in state]
    return by_values + [state[f"inverse_{name}"] for name in _INVERTED if f"inverse_{name}" in state]


def _device_of(optimizer: torch.optim.Optimizer) -> torch.device:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return parameters[0].device if parameters else torch.device("cpu")
