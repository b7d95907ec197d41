"""Who holds what of a split model, and what cannot be split."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shoal.comm.collective import Alone
from shoal.errors import LayoutError, UserCodeError
from shoal.models.build import build
from shoal.models.config import GPTConfig
from shoal.models.roles import Role
from shoal.parallel.tensor.plan import TensorPart, TensorPlan, split_tensor
from shoal.parallel.tensor.vocabulary import VocabularySplit
from tests.comm.local import local_group
from tests.parallel.tensor.models import Declaring, TwoPairs, keyed_gpt, two_pairs


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4, bias=False)
        self.experts = nn.Parameter(torch.zeros(4, 8, 8))

    def parameter_roles(self) -> dict[str, Role]:
        kinds: Any = {"router.weight": "router", "experts": "expert"}
        return {name: Role(kind, None, decay=True) for name, kind in kinds.items()}


def test_one_rank_holds_everything_and_is_left_as_it_is() -> None:
    model = keyed_gpt()
    before = dict(model.named_modules())
    plan = split_tensor(model, Alone(), sequence_parallel=True)
    assert dict(model.named_modules()) == before
    assert plan.vocabulary is None
    assert set(plan.parts) == {name for name, _ in model.named_parameters()}
    assert all(part.dim is None and part.twins == (0,) and not part.partial for part in plan.parts.values())


def plan_of(model: nn.Module, *, size: int, place: int = 0, sequence_parallel: bool = False) -> TensorPlan:
    """The plan of one place, without the others: nothing is sent before the first forward."""
    group = local_group(size)[place]
    return split_tensor(model, group, sequence_parallel=sequence_parallel)


def test_parts_say_who_holds_what() -> None:
    """Two key and value heads over four places: neighbours share one, and each has a term of its gradient."""
    plan = plan_of(keyed_gpt(kv_heads=2), size=4, place=1, sequence_parallel=True)
    assert plan.parts["blocks.0.attention.query.weight"] == TensorPart(0, 8, 8, (1,), partial=False)
    assert plan.parts["blocks.0.attention.key.weight"] == TensorPart(0, 0, 8, (0, 1), partial=True)
    assert plan.parts["blocks.0.attention.output.weight"] == TensorPart(1, 8, 8, (1,), partial=False)
    assert plan.parts["blocks.0.attention_norm.weight"] == TensorPart(None, 0, 32, (0, 1, 2, 3), partial=True)
    assert plan.parts["embedding.weight"] == TensorPart(0, 10, 10, (1,), partial=False)
    assert plan.vocabulary == VocabularySplit(10, 10, 40)
    whole_stream = plan_of(keyed_gpt(kv_heads=2), size=4, place=1)
    assert whole_stream.parts["norm.weight"] == TensorPart(None, 0, 32, (0, 1, 2, 3), partial=False)


def test_a_model_on_the_meta_device_is_split_there() -> None:
    """Names and ties stay; each parameter has the shape of its part, and trains or not as before."""
    with torch.device("meta"):
        model = build(GPTConfig(vocabulary=41, layers=1, width=32, heads=4, tied=True))
    model.norm.weight.requires_grad_(False)
    names = [name for name, _ in model.named_parameters()]
    plan = plan_of(model, size=4, place=3)
    assert [name for name, _ in model.named_parameters()] == names == list(plan.parts)
    assert model.head.weight is model.embedding.weight
    assert not model.norm.weight.requires_grad
    for name, parameter in model.named_parameters():
        part = plan.parts[name]
        assert parameter.is_meta
        assert parameter.shape[part.dim or 0] == part.length, name


def test_parts_and_shares_of_tokens_of_a_mixture_of_experts() -> None:
    """Experts are not this plan's; a router has a term on each place, whatever the stream."""
    plan = plan_of(Mixture(), size=2)
    assert plan.parts == {"router.weight": TensorPart(None, 0, 4, (0, 1), partial=True)}


def shared_weight() -> nn.Module:
    model = Declaring(PAIR, up=nn.Linear(8, 8), down=nn.Linear(8, 8))
    model.down.weight = model.up.weight
    return model


PAIR = {"up.*": "column", "down.*": "row"}
REFUSED: dict[str, tuple[type[Exception], Callable[[], nn.Module], str]] = {
    "no roles": (UserCodeError, lambda: nn.Linear(4, 4), r"Linear declares no roles .* tensor=4 .*shoal split"),
    "heads": (
        LayoutError,
        lambda: keyed_gpt(width=48, heads=6),
        r"query has 6 heads, which tensor=4 does not divide; nearest: tensor=3 or tensor=6, or 4 or 8 heads",
    ),
    "features": (
        LayoutError,
        lambda: keyed_gpt(feed_forward_width=42),
        r"gate has 42 features, which tensor=4 does not divide; nearest: tensor=3 or tensor=6, or 40 or 44 features",
    ),
    "shared heads": (
        LayoutError,
        lambda: keyed_gpt(width=48, heads=12, kv_heads=6),
        r"key has 6 heads that the 12 query heads share; .* nearest: tensor=3 or tensor=6",
    ),
    "fused projections": (
        UserCodeError,
        lambda: Declaring(PAIR, up=nn.Linear(4, 24), down=nn.Linear(8, 4)),
        r"'up' has 24 features .* takes 8",
    ),
    "a layer of another kind": (
        UserCodeError,
        lambda: Declaring(PAIR, up=nn.Bilinear(4, 4, 8), down=nn.Linear(8, 4)),
        r"'up.weight' has the role 'column', but 'up' is a Bilinear",
    ),
    "a role that no layer follows": (
        UserCodeError,
        lambda: Declaring({"up.weight": "norm", "up.bias": "column"}, up=nn.LayerNorm(4)),
        r"'up.bias' has the role 'column', but is not the parameter of",
    ),
    "layers that share a weight": (UserCodeError, shared_weight, r"'up' and 'down' share their weight"),
    "an embedding that renormalises": (
        UserCodeError,
        lambda: Declaring({"up.*": "embedding"}, up=nn.Embedding(8, 4, max_norm=1.0)),
        r"'up' uses max_norm",
    ),
    "no stream to split": (UserCodeError, two_pairs, r"TwoPairs has no embedding"),
}


@pytest.mark.parametrize(("error", "make", "sentence"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_split_is_refused_by_a_sentence_and_left_as_it_was(error, make, sentence: str) -> None:
    model = make()
    before = {name: id(module) for name, module in model.named_modules()}
    with pytest.raises(error, match=sentence):
        plan_of(model, size=4, sequence_parallel=isinstance(model, TwoPairs))
    assert {name: id(module) for name, module in model.named_modules()} == before
