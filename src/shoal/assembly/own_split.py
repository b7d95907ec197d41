"""A script's own model under `layout.tensor`: what can be split, and what its loop sees of it.

A loop of `shoal train` hands the model batches and computes the loss of split logits. A script calls its model, reads
whole logits, and computes a loss by itself, on every rank of a group alike. So heads gather their logits, the script's
parameters stay where they were as shells (`shoal.gradients.split_shells`), and a layer that the split would replace by
another that does less is refused.

The model comes to the device when it is cut: a script may hand over one that fits into the memory of the host alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

from torch import Tensor, nn
from torch.nn import Parameter

from shoal.assembly.objects import placed
from shoal.assembly.splitting import Divided, trained_in
from shoal.comm.collective import Collective
from shoal.comm.mesh import Mesh
from shoal.engine.precision import Precision
from shoal.errors import ConfigError, UserCodeError
from shoal.gradients.gradients import Gradients, VisibleGradients
from shoal.gradients.split_shells import SplitGradients
from shoal.models.huggingface.model import check_plans, declare_plan
from shoal.models.roles import DeclaresRoles, is_conv1d, role_of, roles_of
from shoal.optim.adopt import OwnOptimizer
from shoal.parallel.split import Split
from shoal.parallel.tensor.layers import ColumnLinear, VocabularyEmbedding, change_output, uneven_cut
from shoal.parallel.tensor.operators import enter
from shoal.parallel.tensor.vocabulary import VocabularySplit, gather_logits
from shoal.topology.holding import Holding, held
from shoal.topology.layout import Layout


def prepare_split(model: nn.Module, layout: Layout) -> None:
    """Makes a script's model of transformers declare what its plans say, in place.

    Raises `UserCodeError` for a model that declares nothing, or that no loop of a script's own can have split.
    """
    name, said = type(model).__name__, f"layout.tensor = {layout.tensor}"
    if any(hasattr(module, "_is_expert_parallel") for module in model.modules()):
        raise UserCodeError(
            f"{said}: {name} is a mixture of experts, whose tokens a script's own loop does not exchange; use "
            "layout.replicate or layout.shard, or let shoal.train run the loop"
        )
    of_transformers = hasattr(getattr(model, "config", None), "base_model_tp_plan")
    for planned in declare_plan(model) or ([model] if of_transformers else []):
        check_plans(planned, layout)
    if not isinstance(model, DeclaresRoles):
        raise UserCodeError(
            f"{said}: {name} declares no roles of its parameters; let `shoal split` propose model.roles, or use "
            "layout.replicate or layout.shard"
        )
    expert = next((name for name, role in roles_of(model).items() if role.kind == "expert"), None)
    if expert is not None:
        raise UserCodeError(
            f"{said}: {expert} has the role 'expert', and a script's own loop exchanges no tokens; use "
            "layout.replicate or layout.shard, or let shoal.train run the loop"
        )


def check_steps_parts(optimizers: Sequence[OwnOptimizer], layout: Layout) -> None:
    """Raises `ConfigError` for a script's optimizer that would step parts where it needs whole parameters."""
    for own in optimizers:
        if own.couples or own.works_on == "matrices":
            needs = "the gradients of all parameters together" if own.couples else "whole parameters"
            raise ConfigError(
                f"{own.kind} needs {needs}, of which ranks of layout.tensor = {layout.tensor} have parts: use "
                "layout.replicate or layout.shard, or an optimizer that treats every number alone, such as AdamW"
            )


class OwnSplit:
    """The split of a script's `model`, which is still whole, and on the host."""

    def __init__(self, model: nn.Module, mesh: Mesh, precision: Precision) -> None:
        self._model, self._mesh, self._precision = model, mesh, precision
        self._whole: Mapping[str, Parameter] = dict(model.named_parameters())
        self._layers = dict(model.named_modules())

    def cut(self, parts: Divided) -> Divided:
        """After the split: heads give whole logits, and the parts are on the device; `parts` as the loop has them.

        Raises `UserCodeError` for a layer that did more than the one in its place does.
        """
        self._check_replaced(parts.split)
        self._gather_heads(parts.split)
        for holding, part in parts.split.held:
            if (whole := self._whole[holding.name]) is not part:
                whole.data = whole.data.new_empty(0).expand(0)
        placed(self._model, self._mesh.device, self._precision.parameters)
        holdings = self._with_whole_gradients(parts.split)
        return replace(parts, split=replace(parts.split, vocabulary=None, holdings=holdings))

    def shown(self, gradients: Gradients, parts: Divided) -> SplitGradients:
        """Those of the parts as the script sees them."""
        assert isinstance(gradients, VisibleGradients), "a schedule by priority is refused in a script's own loop"
        return SplitGradients(gradients, parts.split.held, trained_in(parts), self._whole, self._mesh.axis("tensor"))

    def _check_replaced(self, split: Split) -> None:
        now = dict(split.model.named_modules())
        for name, layer in self._layers.items():
            if (other := now.get(name)) is layer:
                continue
            if isinstance(other, VocabularyEmbedding) and not (other._forward_hooks or other._forward_pre_hooks):
                _take_hooks(other, layer)
            hooks = any(getattr(layer, each) for each in (*FORWARD_HOOKS, "_backward_hooks", "_backward_pre_hooks"))
            if hooks or not _is_plain(layer):
                what = "has hooks" if hooks else f"is a {type(layer).__name__}"
                raise UserCodeError(
                    f"the layer {name} {what}, and layout.tensor = {self._mesh.layout.tensor} puts its own in the "
                    "place of a plain nn.Linear or nn.Embedding: take what was added to it away, give it the role "
                    "'replicated', or use layout.replicate or layout.shard"
                )

    def _with_whole_gradients(self, split: Split) -> dict[str, Holding]:
        """Norms of single heads, of whose gradient each rank computes a term, give all of it already in the backward: a
        script's own term, such as a penalty on all norms, is whole on every rank, and must not be summed.
        """
        mesh, found = self._mesh, dict(split.holdings)
        for path, module in split.model.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                holding = found.get(f"{path}.{name}")
                if holding is None or self._whole[holding.name] is not parameter:
                    continue
                if "tensor" not in holding.placement.partial:
                    continue  # its gradient is whole on each rank of the group already
                found[f"{path}.{name}"] = held(mesh.layout, mesh.rank, holding.name, holding.global_shape)
                _enter_parameter(module, name, mesh.axis("tensor"))
        return found

    def _gather_heads(self, split: Split) -> None:
        group = self._mesh.axis("tensor")
        for name, module in split.model.named_modules():
            if isinstance(module, ColumnLinear) and role_of(split.model, f"{name}.weight").kind == "head":
                total = self._layers[name].get_parameter("weight").shape[0]
                cut = uneven_cut(total, group.rank, group.size)
                own = VocabularySplit(cut.offset, cut.length, total)
                change_output(module, partial(gather_logits, split=own, group=group))


FORWARD_HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
    "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs",
)  # fmt: skip
"""Where a module keeps what is called around its forward."""


def _take_hooks(embedding: nn.Module, layer: nn.Module) -> None:
    """What is called around the forward of `layer`, as transformers' checkpointing asks for gradients of its output, is
    called around that of `embedding`, which takes and gives the same.
    """
    for name in FORWARD_HOOKS:
        own, theirs = getattr(layer, name), getattr(embedding, name)
        setattr(layer, name, theirs)
        setattr(embedding, name, own)  # the same object, which the script's handles take hooks off


def _enter_parameter(module: nn.Module, name: str, group: Collective) -> None:
    """While `module` computes, it reads a parameter of its own whose gradient is summed over `group`."""

    def before(module: nn.Module, args: Any) -> None:
        vars(module)[name] = enter(cast(Tensor, module._parameters[name]), group)

    def after(module: nn.Module, args: Any, output: Any) -> None:
        vars(module).pop(name, None)

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after, always_call=True)


def _is_plain(layer: Any) -> bool:
    """Whether its forward is that of PyTorch's class, or of the linear layer of GPT-2."""
    forward = type(layer).forward
    return "forward" not in vars(layer) and (forward in (nn.Linear.forward, nn.Embedding.forward) or is_conv1d(layer))
