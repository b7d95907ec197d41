"""From the table `[optimizer]` to the optimizer, with weight decay where it belongs."""

from __future__ import annotations

import copy
import functools
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import torch
from torch.nn import Parameter

from shoal.config.check import implementation_of
from shoal.config.named import find_named, users_traceback
from shoal.errors import ConfigError, UserCodeError
from shoal.models.roles import Widened
from shoal.optim.adopt import fill_empty_groups, keep_numbers
from shoal.optim.average import keep_average, look_ahead
from shoal.optim.config import SGD, Adagrad, AdamW, OptimizerConfig, PythonOptimizer, groups_refusal
from shoal.optim.declared import Common, Described, Dims, Granularity, Slot
from shoal.optim.fused import FusedAdamW, FusedOptimizer, FusedSGD
from shoal.optim.layer_statistics import SeesLayers
from shoal.optim.mup import factor_of
from shoal.optim.parts import SeesParts
from shoal.optim.probe import Tried, slots_of, tried, works_on


def build_optimizer(
    config: OptimizerConfig,
    parameters: Iterable[tuple[str, Parameter, bool]],
    *,
    lr: float,
    sparse: Collection[str] = (),
    shapes: Mapping[str, Dims] | None = None,
    kinds: Mapping[str, str] | None = None,
    widened: Mapping[str, Widened | None] | None = None,
) -> torch.optim.Optimizer:
    """The optimizer over `(name, parameter, decays)`. Parameters that do not decay form a group of their own, and so do
    those of fewer numbers than the optimizer's `least_numbers`, and those of which `groups` or the optimizer itself
    says something else. `shapes` are those of whole parameters by name, where `parameters` are parts of them; `kinds`
    their roles in the model, and `widened` says how rates follow its width.

    The gradients of those named `sparse` have the rows that a step touched alone, and form a last group. Without any
    parameter, as on a rank whose piece of a sharded model is empty, its step does nothing.

    Groups of another `kind` are updated by an optimizer of that kind, within the step of the first.

    Raises `ConfigError` for an optimizer that moves rows which a step has not touched, for `layer_decay` where the
    names do not count layers, for a group of another kind where the optimizer does not step beside others, and for what
    a group says of tables that they do not have.
    """
    parameters, tables = list(parameters), set(sparse)
    if (why := groups_refusal(config) or _against_tables(config, tables)) is not None:
        raise ConfigError(why)
    of_layers = layer_rates(kinds or [name for name, *_ in parameters], config.layer_decay)
    if tables and not config.takes_sparse:
        kind = config.variant
        raise ConfigError(
            f'optimizer.kind = "{kind}" has moments that move every row in every step, and the gradient of '
            f'{sorted(tables)[0]} is sparse: use "adagrad", or "sgd" without momentum'
        )
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for name, parameter, decays in parameters:
        if name not in tables:
            shape = (shapes or {}).get(name, tuple(parameter.shape))
            described = Described(name, shape, (kinds or {}).get(name, "replicated"), decays)
            by_width = factor_of(config.group_of(name).table or config, described, (widened or {}).get(name))
            options = _options(config, described, by_width, of_layers.get(name, 1.0))
            key = tuple(sorted(options.items()))
            found.setdefault(key, {"params": [], **options})["params"].append(parameter)
    groups = sorted(found.values(), key=lambda group: (group.get("small", False), -group["weight_decay"]))
    if of_tables := [parameter for name, parameter, _ in parameters if name in tables]:
        groups.append({"params": of_tables, "weight_decay": 0.0, "fused": False})
    groups = groups or [{"params": [], "weight_decay": config.weight_decay}]
    optimizer = implementation_of(config)(config, groups, lr)
    if config.others:
        _step_others(optimizer, config)
    if config.lookahead is not None:
        look_ahead(optimizer, config.lookahead)
    if config.average is not None:
        keep_average(optimizer, config.average)
    return optimizer


def _against_tables(config: OptimizerConfig, tables: Collection[str]) -> str | None:
    """One sentence if a group says what a table with a sparse gradient does not have: such tables are a group."""
    for name in sorted(tables):
        group = config.group_of(name)
        if group.kind is not None or group.rate != 1:
            key = f'kind = "{group.kind}"' if group.kind is not None else f"rate = {group.rate:g}"
            return (
                f"optimizer.groups: {key} for {name}, whose gradient is sparse: the run's optimizer steps it, at the "
                "run's rate; leave it out of the pattern"
            )
    return None


def _step_others(optimizer: torch.optim.Optimizer, config: OptimizerConfig) -> None:
    """Gives `optimizer` those that update its groups of another kind, whose options are in the groups."""
    assert isinstance(optimizer, FusedOptimizer), f"{config.variant} does not say that it steps alone"
    optimizer.others = {_kind_of(t): implementation_of(t)(t, [{"params": []}], 1.0) for t in config.others}
    for other in optimizer.others.values():
        other.state = optimizer.state
    for group in optimizer.param_groups:
        if "kind" in group:
            kept = {key: group[key] for key in ("lr", "weight_decay")}
            group |= {**optimizer.others[group["kind"]].defaults, **kept}


def _kind_of(table: Common) -> str:
    """What tells optimizers of groups apart: their kind and keys."""
    return repr(table)


def layer_rates(names: Iterable[str], decay: float) -> dict[str, float]:
    """What the rates of parameters are multiplied by, by name: `names` are all of the model, in its order.

    Layers are counted by the first number in a name, such as 3 in `blocks.3.norm.weight`. What stands before them in
    the model is a layer below the first, what stands after them is the last. Of L layers, layer i has decay^(L - i).

    Raises `ConfigError` where no names have numbers, or they count under several names.
    """
    if decay == 1:
        return {}
    found = {name: re.match(r"((?:[^.]*\.)*?)(\d+)\.", name) for name in names}
    numbers = {name: int(match[2]) for name, match in found.items() if match}
    lists = sorted({match[1].rstrip(".") for match in found.values() if match})
    if len(lists) != 1:
        counted = "no parameter's name has a number" if not lists else f"layers are counted in {', '.join(lists)}"
        raise ConfigError(
            f"optimizer.layer_decay = {decay:g}, and {counted}: it takes the layers of one list; give rates by "
            "patterns of names in [optimizer.groups]"
        )
    layers, rates, seen = max(numbers.values()) + 1, dict[str, float](), False
    for name in found:
        seen = seen or name in numbers
        rates[name] = decay ** (layers - numbers[name] if name in numbers else 0 if seen else layers + 1)
    return rates


def _options(config: OptimizerConfig, parameter: Described, factor: float, of_layer: float) -> dict[str, Any]:
    """What the group of a parameter says, whose rate is multiplied by `factor`, and by `of_layer` with what decay takes
    off; what it does not say is the optimizer's own.
    """
    group = config.group_of(parameter.name)
    table = group.table or config
    decay = table.weight_decay if parameter.decays else 0.0
    own = config.options(parameter) if group.table is None else _of_another_kind(config, group.table)
    rate = own.pop("rate", 1.0) * group.rate * factor * of_layer
    small = math.prod(parameter.shape) < config.least_numbers
    return {
        **own,
        "weight_decay": (decay if group.weight_decay is None else group.weight_decay) / factor,
        **({} if rate == 1 else {"rate": rate}),
        **({"small": True} if small else {}),
    }


def _of_another_kind(config: OptimizerConfig, table: Common) -> dict[str, Any]:
    """What says that a parameter's group is another optimizer's, and its rate."""
    return {"kind": _kind_of(table), "rate": table.lr / config.lr}


def adamw(config: AdamW, groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
    """AdamW by PyTorch's fused kernel."""
    return FusedAdamW(groups, lr=lr, betas=(config.beta1, config.beta2), eps=config.eps)


def sgd(config: SGD, groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
    """SGD by PyTorch's fused kernel."""
    return FusedSGD(groups, lr=lr, momentum=config.momentum, nesterov=config.nesterov)


def adagrad(config: Adagrad, groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
    """PyTorch's Adagrad."""
    return torch.optim.Adagrad(groups, lr=lr, eps=config.eps)


# The optimizer that a run file names (`optimizer.kind = "python"`).


class Asked(NamedTuple):
    """What is known of a class: its state, what its update needs together, whether it `couples` parameters, what it
    says of a parameter's group (None: nothing), and whether it finds the parts of a parameter (`SeesParts`).
    """

    slots: Sequence[Slot]
    works_on: Granularity
    couples: bool
    options: Callable[[Described], dict[str, Any]] | None
    sees_parts: bool


def asked(config: PythonOptimizer) -> Asked:
    """What the class that `config` names says, or does with two small parameters. Raises `UserCodeError` for one that
    is not there, or keeps what no checkpoint can hold.
    """
    return _asked(config.build, msgspec.msgpack.encode(config.arguments))


@functools.cache
def _asked(build: str, arguments: bytes) -> Asked:
    config = PythonOptimizer(build=build, arguments=msgspec.msgpack.decode(arguments))
    optimizer = _made(config, [{"params": [Parameter(torch.ones(3, 2))]}], lr=config.lr)
    sees_parts = isinstance(optimizer, SeesParts)
    kind, options = works_on(optimizer), getattr(type(optimizer), "group_options", None)
    slots, alone = _slots(config, optimizer), sees_parts or isinstance(optimizer, SeesLayers)
    found = Tried(False, ()) if alone else tried(optimizer)
    if found.counts:
        raise UserCodeError(
            f"optimizer.build = {build!r} changes numbers of its groups ({', '.join(found.counts)}), which a "
            "checkpoint of shoal train does not hold: keep them in the state of parameters, or hand the optimizer to "
            "shoal.start"
        )
    if found.attributes:
        raise UserCodeError(
            f"optimizer.build = {build!r} changes attributes of its own in a step ({', '.join(found.attributes)}), "
            "which no checkpoint holds: keep them in the state of parameters"
        )
    couples = kind == "matrices" and found.couples
    return Asked(slots, kind, couples, options, sees_parts)


OWN_KINDS = {"Adafactor": "adafactor", "Muon": "muon", "LBFGS": "lbfgs", "SparseAdam": "adagrad"}
"""Of `torch.optim`, classes that are refused, most often, and what trains in their place."""


def _in_its_place(build: str) -> str:
    kind = OWN_KINDS.get(build.rpartition(":")[2]) if build.startswith("torch.optim") else None
    return "" if kind is None else f'\nShoal has its own: optimizer.kind = "{kind}"'


def _slots(config: PythonOptimizer, optimizer: torch.optim.Optimizer) -> tuple[Slot, ...]:
    try:
        return slots_of(optimizer)
    except UserCodeError as error:
        raise UserCodeError(f"{error}{_in_its_place(config.build)}") from None


def named(config: PythonOptimizer, groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
    """The optimizer of the class that the run file names. Raises `ConfigError` for a decay that it does not know."""
    optimizer = _made(config, groups, lr=lr)
    if "weight_decay" not in optimizer.defaults and any(group["weight_decay"] for group in groups):
        raise ConfigError(
            f"optimizer.weight_decay with optimizer.build = {config.build!r}, which has no option of this name: leave "
            "it out, and give what the class calls it in optimizer.arguments"
        )
    keep_numbers(optimizer, config.slots)
    if config.needs == "matrices":
        fill_empty_groups(optimizer)
    return optimizer


def _made(config: PythonOptimizer, groups: list[dict[str, Any]], *, lr: float) -> torch.optim.Optimizer:
    build = find_named(config.build, key="optimizer.build", what="class")
    try:
        optimizer = build(groups, lr=lr, **config.arguments)
    except Exception as error:
        raised = f"optimizer.build = {config.build!r} raised:\n{users_traceback(error)}"
        raise UserCodeError(f"{raised}{_in_its_place(config.build)}") from None
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserCodeError(
            f"optimizer.build = {config.build!r} made {type(optimizer).__name__}; it must be a torch.optim.Optimizer"
        )
    return optimizer


def set_rate(optimizer: torch.optim.Optimizer, lr: float | None) -> None:
    """Makes `lr`, times its `rate`, the rate of every group; None: they keep their own."""
    if lr is not None:
        for group in optimizer.param_groups:
            group["lr"] = lr * group.get("rate", 1.0)


def part_of(optimizer: torch.optim.Optimizer, parameters: Collection[Parameter]) -> torch.optim.Optimizer:
    """An optimizer over some of the parameters of another, to step them alone: the same options and the same state.

    What it writes into its state stands in that of `optimizer`, too. The learning rate is its own.
    """
    wanted = {id(parameter) for parameter in parameters}
    part = copy.copy(optimizer)
    groups = [{**g, "params": [p for p in g["params"] if id(p) in wanted]} for g in optimizer.param_groups]
    part.param_groups = [group for group in groups if group["params"]]
    if isinstance(part, FusedOptimizer) and isinstance(optimizer, FusedOptimizer):
        part.others = optimizer.others
    return part
