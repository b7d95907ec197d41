"""What Shoal adds to a class of transformers: how it is called, and its plans as roles and as a chain.

A subclass of the architecture is made for each model, so that parameters and modules keep their names:

    Called      one tensor is the main input (`input_ids`, `pixel_values`, ...); several inputs are a dictionary
    Roles       `parameter_roles`, where a tensor or an expert plan is    (`shoal.models.huggingface.tensor_plan`)
    RolesInside the same of a model that holds such ones, as peft's do
    Stages      `context` and `parts`, where a pipeline plan is declared  (`shoal.models.huggingface.chain`)

Outputs are transformers' own (`ModelOutput`): a loss takes their `logits`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.errors import ConfigError, UserCodeError
from shoal.models.adapters import SoftPrompt
from shoal.models.huggingface.causal_cores import as_mask, has_causal_cores, whole_attentions, whole_order
from shoal.models.huggingface.chain import Probe, declares_chain, parts_of, probed
from shoal.models.huggingface.tensor_plan import (
    check_tensor_plan,
    declares_roles,
    planned_experts,
    roles_by_plan,
    settle_plan,
)
from shoal.models.layers import CausalAttention
from shoal.models.roles import DeclaresParts, DeclaresRoles, Part, Role, roles_of
from shoal.models.sparse_attention import SparseAttention
from shoal.topology.layout import Layout
from shoal.topology.refusal import nearest_divisors


def declared_class(architecture: Any, config: Any, *, chain: bool = True) -> Any:
    """The subclass of `architecture` for models of `config`, with roles and, where wanted, `chain`, if these declare
    plans.
    """
    bases: list[Any] = [Called]
    if declares_roles(config):
        bases.append(Roles)
    if chain and declares_chain(architecture, config):
        bases.append(Stages)
    # transformers treats classes of other modules as custom code, whose first values it draws in another order.
    return type(architecture.__name__, (*bases, architecture), {"__module__": architecture.__module__})


def declare_plan(model: Any) -> list[Any]:
    """Makes a model of transformers that a script has built declare the roles of its plans, in place: it is of a class
    that its own is a base of, and is called as before. So is a model that holds such ones, as those of peft do. Returns
    the models whose plans these are; nothing happens where there is no plan, or roles are declared already.

    Raises `UserCodeError` for a model that uses a parameter of one inside, too.
    """
    if isinstance(model, DeclaresRoles):
        return [model] if isinstance(model, Roles) else []
    paths: list[str] = []
    for path, module in model.named_modules():
        inside = any(not each or path.startswith(f"{each}.") for each in paths)
        if not inside and hasattr(type(module), "_tp_plan") and declares_roles(module.config):
            paths.append(path)
    planned = [model.get_submodule(path) for path in paths]
    if planned and planned != [model]:
        _check_apart(model, paths)
        _of_class(model, RolesInside).planned_paths = paths
    for each in planned:
        settle_plan(_of_class(each, Roles))
    return planned


def _of_class(model: Any, base: type) -> Any:
    kind = type(model)
    model.__class__ = type(kind.__name__, (base, kind), {"__module__": kind.__module__})
    return model


def _check_apart(model: nn.Module, paths: Sequence[str]) -> None:
    """Raises `UserCodeError`: see `declare_plan`."""
    own = {id(p): name for path in paths for name, p in model.get_submodule(path).named_parameters(prefix=path)}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in own and not name.startswith(tuple(f"{path}." for path in paths)):
            raise UserCodeError(
                f"{name} of {type(model).__name__} is {own[id(parameter)]}, which layout.tensor splits by a plan that "
                "knows nothing of the other: give it a copy, or use layout.replicate or layout.shard"
            )


class Called(nn.Module):
    """How Shoal calls a model of transformers. `sees_slices`: of sequences that are cut behind its embedding."""

    sees_slices = False
    main_input_name: str
    config: Any
    get_input_embeddings: Callable[[], nn.Embedding]

    def forward(self, main: Tensor | None = None, positions: Tensor | None = None, **named: Any) -> Any:
        """Inputs of any shape that the architecture takes, to its `ModelOutput`.

        `main` is the architecture's main input. `positions` `[samples, tokens]` say which tokens of a sequence this
        rank holds; attention then sees the others by `layout.context`. Raises `UserCodeError` for labels, which are
        targets, and for masks beside `positions`.
        """
        found = self.architecture_forward(**self.named_inputs(main, positions, named))
        if self._prompt is not None:
            found["logits"] = found["logits"][:, self._prompt.count :]
        return found

    def take_prompt(self, count: int) -> None:
        """Has every sequence begin with `count` trained vectors, for which there are no logits.

        Raises `ConfigError` for what is no causal decoder.
        """
        if not has_causal_cores(self):
            raise ConfigError(
                f'adapter.kind = "prompt": {type(self).__name__} is no decoder of blocks with one plain causal '
                'self-attention each, or model.attention is not "auto"; use adapter.kind = "lora"'
            )
        self.prompt = SoftPrompt(count, self.get_input_embeddings().weight)

    def architecture_forward(self, **named: Any) -> Any:
        """The forward of the class in transformers."""
        return super().forward(**named)  # type: ignore[misc]

    def named_inputs(self, main: Tensor | None, positions: Tensor | None, named: Mapping[str, Any]) -> dict[str, Any]:
        """The keywords of the architecture's own forward."""
        if "documents" in named:
            if self._prompt is not None:
                raise UserCodeError('adapter.kind = "prompt" with data.packing = "documents": use packing = "pad"')
            return self._packed(positions, **named)
        inputs = dict(named) if main is None else {self.main_input_name: main, **named}
        if "labels" in inputs:
            raise UserCodeError(
                f"the inputs of {type(self).__name__} hold labels: return them as targets; the loss is that of [loss]"
            )
        if positions is not None:
            taken = [name for name in ("attention_mask", "position_ids") if inputs.get(name) is not None]
            if taken:
                raise UserCodeError(
                    f"the inputs of {type(self).__name__} hold {taken[0]}, and layout.context cuts sequences: there "
                    "every token sees those before it; leave it out, or set layout.context = 1"
                )
            return inputs | {"position_ids": positions, "attention_mask": whole_order(positions)}
        if self._prompt is not None:
            main, inputs = None, self._prompted(self._prompt, inputs)
        if self._has_masks:
            inputs["attention_mask"] = _as_documents(inputs)
        elif self.sees_slices and inputs.get("attention_mask") is not None:
            raise UserCodeError(
                f"the inputs of {type(self).__name__} hold attention_mask, and layout.sequence_parallel = true cuts "
                "sequences, of which it would be the mask of a slice; leave it out, or set it to false"
            )
        main = inputs.get(self.main_input_name) if self.sees_slices else main
        if main is not None and main.ndim == 2 and self._takes_position_ids and inputs.get("position_ids") is None:
            # The length of a slice of the sequence (layout.sequence_parallel) is not that of the sequence.
            inputs["position_ids"] = torch.arange(main.shape[1], device=main.device)[None]
        return inputs

    def _prompted(self, prompt: SoftPrompt, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The embedded tokens behind the prompt, which padding masks see."""
        padding, tokens = inputs.get("attention_mask"), inputs["input_ids"]
        if inputs.get("position_ids") is not None or (padding is not None and padding.ndim != 2):
            raise UserCodeError(
                'adapter.kind = "prompt": a prompt stands before a whole sequence, and the inputs hold position_ids or '
                "a mask of pairs of tokens; leave them out"
            )
        others = {name: value for name, value in inputs.items() if name not in ("input_ids", "attention_mask")}
        if padding is not None:
            others["attention_mask"] = F.pad(padding, (prompt.count, 0), value=1)
        return others | {"inputs_embeds": prompt(self.get_input_embeddings()(tokens))}

    def _packed(self, positions: Tensor | None, *, tokens: Tensor, documents: Tensor) -> dict[str, Any]:
        """Windows of packed documents, as Shoal's data has them (`data.packing = "documents"`)."""
        if not has_causal_cores(self):
            raise UserCodeError(
                f'data.packing = "documents": {type(self).__name__} is no decoder of blocks with one plain causal '
                'self-attention each, or model.attention is not "auto"; use packing = "pad"'
            )
        return {self.main_input_name: tokens, "position_ids": positions, "attention_mask": as_mask(documents)}

    @property
    def _prompt(self) -> SoftPrompt | None:
        return self._modules.get("prompt")  # type: ignore[return-value]

    @property
    def _has_masks(self) -> bool:
        first = next((module for module in self.modules() if isinstance(module, CausalAttention)), None)
        return isinstance(first, SparseAttention)

    @property
    def _takes_position_ids(self) -> bool:
        return has_causal_cores(self) and "position_ids" in inspect.signature(super().forward).parameters


def _as_documents(inputs: Mapping[str, Any]) -> Tensor | None:
    """A padding mask `[batch, seq]`, or positions that leap where packed documents begin, as a core under a mask takes
    them; None where a sequence is one document.
    """
    padding, places = inputs.get("attention_mask"), inputs.get("position_ids")
    if padding is not None:
        return as_mask(padding) if padding.ndim == 2 else padding
    if places is None:
        return None
    leaps = places.diff(dim=1, prepend=places[:, :1]) != 1
    leaps[:, 0] = False
    return as_mask(leaps.cumsum(1)) if leaps.any() else None


class Roles(nn.Module):
    """Roles from the tensor plan and the expert plan."""

    def parameter_roles(self) -> dict[str, Role]:
        """See `shoal.models.roles`."""
        return roles_by_plan(self)


class RolesInside(nn.Module):
    """Roles of the models at `planned_paths`; all else is whole on every rank."""

    planned_paths: Sequence[str]

    def parameter_roles(self) -> dict[str, Role]:
        """See `shoal.models.roles`."""
        own = self.named_parameters(remove_duplicate=False)
        roles = {name: Role("replicated", init=None, decay=parameter.ndim >= 2) for name, parameter in own}
        for path in self.planned_paths:
            inside: Any = self.get_submodule(path)
            roles |= {f"{path}.{name}": role for name, role in inside.parameter_roles().items()}
        return roles


class Stages(nn.Module):
    """A chain from the pipeline plan."""

    def context(self, main: Tensor | None = None, positions: Tensor | None = None, **named: Any) -> Probe:
        """What every layer is called with beside the activations: see `shoal.models.huggingface.chain`."""
        return probed(self, self.named_inputs(main, positions, named))  # type: ignore[operator]

    def parts(self) -> list[Part]:
        """See `shoal.models.roles`."""
        return parts_of(self)


def check_plans(
    model: nn.Module, layout: Layout, *, sequence_parallel: bool = False, sequence: int | None = None
) -> None:
    """Refuses axes for which a model of transformers declares nothing. `sequence`: tokens in a sample, where known.

    Raises `UserCodeError` with the class's name and the layouts that are left.
    """
    name, config = type(model).__name__, model.config
    tensor, pipeline, context = layout.tensor, layout.pipeline, layout.context
    others = "use layout.replicate or layout.shard"
    proposed = "`shoal split` proposes {} where its forward allows it and says where not; or " + others
    if tensor > 1:
        experts_alone = isinstance(model, Roles) and not getattr(config, "base_model_tp_plan", None)
        if experts_alone or not isinstance(model, DeclaresRoles):
            left = "use layout.expert, layout.replicate or layout.shard"
            left = left if experts_alone else proposed.format("model.roles")
            raise UserCodeError(
                f"layout.tensor = {tensor}: {name} declares no tensor plan (base_model_tp_plan of "
                f"{type(config).__name__}), which says how its layers are split: {left}"
            )
        if isinstance(model, Roles):
            check_tensor_plan(model)
        if any(role.kind in ("column", "packed") for role in roles_of(model).values()):
            _check_heads(config, tensor)
    if tensor > 1 and sequence_parallel:
        _check_slices(model)
        model.sees_slices = True  # type: ignore[assignment]
    if pipeline > 1 and not isinstance(model, DeclaresParts):
        raise UserCodeError(
            f"layout.pipeline = {pipeline}: {name} declares no pipeline plan (base_model_pp_plan of "
            f"{type(config).__name__}) of embedding, layers, norm and head: "
            f"{proposed.format('model.parts')}"
        )
    if pipeline > 1 and isinstance(model, Stages):
        _check_parts(model)
    if layout.expert > 1 and not any(True for _ in planned_experts(model)):
        raise UserCodeError(
            f"layout.expert = {layout.expert}: {name} declares no expert plan (base_model_ep_plan of "
            f"{type(config).__name__}) of stacked experts, which are what the axis splits; set it to 1"
        )
    if context > 1 and not any(isinstance(module, CausalAttention) for module in model.modules()):
        raise UserCodeError(
            f"layout.context = {context}: {name} is no decoder of blocks with one plain causal self-attention each, "
            f'called through transformers\' AttentionInterface, or model.attention is not "auto"; {others}'
        )
    if context > 1 and sequence is not None:
        _check_window(model, layout, sequence)


def _check_window(model: nn.Module, layout: Layout, sequence: int) -> None:
    """A window that is shorter than the sequence, in all layers (models of several kinds of layers have no cores)."""
    window = getattr(model.config, "sliding_window", None)
    if window is not None and getattr(model.config, "layer_types", None) is None and window < sequence:
        raise UserCodeError(
            f"layout.context = {layout.context}: attention over parts of a sequence has no windows, and "
            f"model.config.sliding_window = {window} of {type(model).__name__} is less than batch.sequence = "
            f"{sequence}; use layout.replicate or layout.shard, or shorter sequences"
        )


def _check_parts(model: Stages) -> None:
    modules = [f"{module}." for part in model.parts() for module in part.modules]
    for path, _ in model.named_parameters(remove_duplicate=False):
        if not path.startswith(tuple(modules)):
            raise UserCodeError(
                f"{type(model).__name__} has {path} outside of the modules in its pipeline plan, so it is no chain of "
                "them: set layout.pipeline = 1"
            )


def _check_slices(model: nn.Module) -> None:
    """Sequences are cut behind the embedding; an attention that is whole on every rank would see a slice of one."""
    if getattr(model, "peft_config", None):
        raise UserCodeError(
            f"layout.sequence_parallel = true: adapters of {type(model).__name__} stand inside its attention, which "
            "reads the length of the sequence off its input; set it to false"
        )
    if not has_causal_cores(model):
        raise UserCodeError(
            f"layout.sequence_parallel = true: {type(model).__name__} is no decoder of blocks with one plain causal "
            'self-attention each, or model.attention is not "auto": its masks and positions would be those of a slice '
            "of the sequence; set it to false"
        )
    window = getattr(model.config, "sliding_window", None)
    if window is not None and getattr(model.config, "layer_types", None) is None:
        raise UserCodeError(
            f"layout.sequence_parallel = true: model.config.sliding_window = {window} of {type(model).__name__} asks "
            "for masks, which would be those of a slice of the sequence; set it to false, or have no sliding window"
        )
    kinds = {name: role.kind for name, role in roles_of(model).items()}
    if "embedding" not in kinds.values():
        raise UserCodeError(
            f"layout.sequence_parallel = true: the embedding of {type(model).__name__}, behind which sequences are "
            "cut, is split by no tensor plan, as one that does more than look up tokens is not; set it to false"
        )
    split = {name for name, kind in kinds.items() if kind in ("column", "row", "packed")}
    for path in whole_attentions(model, split):
        raise UserCodeError(
            f"layout.sequence_parallel = true: {path} of {type(model).__name__} is split by no tensor plan, and would "
            "see a slice of the sequence alone; set it to false"
        )


def _check_heads(config: Any, tensor: int) -> None:
    for key in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, key, None)
        if isinstance(heads, int) and heads % tensor:
            nearest = " or ".join(map(str, nearest_divisors(heads, tensor)))
            raise UserCodeError(
                f"layout.tensor = {tensor} does not divide model.config.{key} = {heads}: every rank has whole heads; "
                f"nearest: layout.tensor = {nearest}"
            )
