"""muP: the table of rates, and the coordinate check that proves it, with wrong rates planted."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.assembly.objects import UserObjects, users_model
from shoal.errors import UserCodeError
from shoal.models.build import initialise
from shoal.models.config import GPTConfig, MLPConfig
from shoal.models.gpt import GPT
from shoal.models.roles import DeclaresRoles, Widened, roles_of
from shoal.models.small import mlp_from
from shoal.models.width import follow_width
from shoal.optim import build
from shoal.optim.build import build_optimizer, set_rate
from shoal.optim.config import SGD, AdamW, OptimizerConfig
from shoal.optim.declared import Described, Group
from shoal.optim.kinds import LAMB, LARS
from shoal.optim.matrix_kinds import Dion, Muon
from shoal.optim.mup import factor_of
from shoal.runfile.rules import refusal
from tests.verification.layouts import GPT as SMALL_GPT
from tests.verification.layouts import corpus, run_file_of, verified

WIDTHS = (64, 128, 256, 512)
BASE = 64
STEPS = 4
SAME_SCALE = 0.2
"""Most by which the logarithm of an activation's size may grow for one of the width's: 1.5 times over 64 .. 512."""
ADAMW, PLAIN = AdamW(lr=5e-3, weight_decay=0.0), SGD(lr=0.3)
FACTORS = {  # Yang et al., arXiv:2203.03466, table 3, at four times the base
    ("adam", "input"): 1.0,
    ("adam", "hidden"): 0.25,
    ("adam", "output"): 0.25,
    ("sgd", "input"): 4.0,
    ("sgd", "hidden"): 1.0,
    ("sgd", "output"): 0.25,
}


@pytest.mark.parametrize(("rule", "grows"), FACTORS)
def test_factors_are_those_of_the_table(rule: str, grows: Any) -> None:
    """And rate times decay stays as it is."""
    config = AdamW(weight_decay=0.1) if rule == "adam" else SGD(weight_decay=0.1)
    assert factor_of(config, Described("w", (2, 2), "column", True), Widened(grows, 4.0)) == FACTORS[rule, grows]
    optimizer = build_optimizer(
        config, [("w", nn.Parameter(torch.ones(2, 2)), True)], lr=0.5, widened={"w": Widened(grows, 4.0)}
    )
    set_rate(optimizer, 0.5)
    (group,) = optimizer.param_groups
    assert group["lr"] == 0.5 * FACTORS[rule, grows]
    assert group["lr"] * group["weight_decay"] == pytest.approx(0.05)


Make = Callable[[int, str], nn.Module]


def gpt(width: int, scaling: str) -> nn.Module:
    base = BASE if scaling == "mup" else None
    return GPT(GPTConfig(vocabulary=61, layers=2, width=width, heads=width // 16, scaling=scaling, base_width=base))  # type: ignore[arg-type]


def mlp(width: int, scaling: str) -> nn.Module:
    base = BASE if scaling == "mup" else None
    return mlp_from(MLPConfig(inputs=24, hidden=(width, width), outputs=61, scaling=scaling, base_width=base))  # type: ignore[arg-type]


class Llama(nn.Module):
    """That of transformers, whose first values do not follow the width."""

    def __init__(self, width: int) -> None:
        import transformers

        super().__init__()
        config = transformers.LlamaConfig(
            vocab_size=61, hidden_size=width, num_hidden_layers=2, num_attention_heads=width // 16, use_cache=False,
            num_key_value_heads=width // 32, intermediate_size=2 * width,
        )  # fmt: skip
        self.inner = transformers.LlamaForCausalLM(config)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.inner(tokens).logits


def plain(width: int) -> nn.Module:
    """Of PyTorch's layers, whose first values follow the inputs, those of biases too."""
    return nn.Sequential(nn.Linear(24, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 61))


def foreign(build: Callable[[int], nn.Module]) -> Make:
    def make(width: int, scaling: str) -> nn.Module:
        torch.manual_seed(2)
        base = build(BASE)
        torch.manual_seed(1)
        model = build(width)
        if scaling == "mup" and width != BASE:
            follow_width(model, base)
        return model

    return make


def inputs_of(model: nn.Module) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(3)
    targets = torch.randint(0, 61, (8, 16), generator=draw)
    if isinstance(model, GPT | Llama):
        return torch.randint(0, 61, (8, 16), generator=draw), targets
    return torch.randn(128, 24, generator=draw), targets.view(-1)


def changes(make: Make, scaling: str, config: OptimizerConfig) -> dict[str, list[float]]:
    """By layer: how far its outputs have moved after `STEPS` steps, root mean square, at each of `WIDTHS`."""
    found: dict[str, list[float]] = {}
    for width in WIDTHS:
        model = make(width, scaling)
        if isinstance(model, DeclaresRoles):
            initialise(model, seed=1, device="cpu")
        roles = roles_of(model)
        optimizer = build_optimizer(
            config, [(n, p, roles[n].decay) for n, p in model.named_parameters()], lr=config.lr,
            kinds={name: role.kind for name, role in roles.items()},
            widened={name: role.widened for name, role in roles.items()},
        )  # fmt: skip
        x, y = inputs_of(model)
        before = outputs(model, x)
        for _ in range(STEPS):
            optimizer.zero_grad()
            F.cross_entropy(model(x).flatten(0, -2), y.flatten()).backward()
            set_rate(optimizer, config.lr)
            optimizer.step()
        for name, after in outputs(model, x).items():
            found.setdefault(name, []).append(float((after - before[name]).square().mean().sqrt()))
    return found


@torch.no_grad()
def outputs(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Of every linear layer."""
    found: dict[str, Tensor] = {}
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}

    def keep(name: str) -> Callable[..., None]:
        return lambda module, args, output: found.__setitem__(name, output.detach().clone())

    hooks = [module.register_forward_hook(keep(name)) for name, module in layers.items()]
    model(x)
    for hook in hooks:
        hook.remove()
    return found


def slopes(make: Make, scaling: str, config: OptimizerConfig) -> dict[str, float]:
    """By layer, of log size over log width: 0 where its scale does not depend on the width."""
    logs = [math.log(width / WIDTHS[0]) for width in WIDTHS]
    mean = sum(logs) / len(logs)
    return {
        name: sum((at - mean) * math.log(size) for at, size in zip(logs, sizes, strict=True))
        / sum((at - mean) ** 2 for at in logs)
        for name, sizes in changes(make, scaling, config).items()
    }


CHECKED: dict[str, tuple[Make, OptimizerConfig]] = {
    "gpt, adamw": (gpt, ADAMW),
    "mlp, adamw": (mlp, ADAMW),
    "mlp, sgd": (mlp, PLAIN),
    "gpt, muon": (gpt, Muon(lr=5e-3, weight_decay=0.0)),
    "mlp, muon": (mlp, Muon(lr=5e-3, weight_decay=0.0, adjust="original")),
    "mlp, dion": (mlp, Dion(lr=5e-2, weight_decay=0.0)),
    "gpt, lamb": (gpt, LAMB(lr=5e-2, weight_decay=0.0)),
    "mlp, lars": (mlp, LARS(lr=1.0, coefficient=0.05, weight_decay=0.0)),
    "plain, adamw": (foreign(plain), ADAMW),
    "plain, sgd": (foreign(plain), PLAIN),
    "llama, adamw": (foreign(Llama), ADAMW),
    "llama, muon": (foreign(Llama), Muon(lr=5e-3, weight_decay=0.0)),
}
SLOW = ("gpt, muon", "llama, adamw", "llama, muon")


CASES = [pytest.param(case, marks=pytest.mark.slow) if case in SLOW else case for case in CHECKED]


@pytest.mark.parametrize("case", CASES)
def test_activations_move_as_far_at_every_width(case: str) -> None:
    """The coordinate check: widths 64 to 512, after some steps, every layer."""
    make, config = CHECKED[case]
    found = slopes(make, "mup", config)
    print(case, {name: round(slope, 2) for name, slope in found.items()})
    assert all(abs(slope) <= SAME_SCALE for slope in found.values()), found


@pytest.mark.parametrize("case", CASES)
def test_the_check_tells_standard_scaling_apart(case: str) -> None:
    """Without muP, logits move farther and farther, or layers less and less; LARS has much of muP by itself."""
    make, config = CHECKED[case]
    found = slopes(make, "standard", config)
    least = 1.25 if isinstance(config, LARS) else 2.0
    assert max(abs(slope) for slope in found.values()) > least * SAME_SCALE, found


@contextmanager
def planted(grows: str) -> Iterator[None]:
    """Rates of one row of the table as if the model were not wider."""
    plain = factor_of

    def wrong(config: Any, parameter: Described, widened: Widened | None) -> float:
        return 1.0 if widened is not None and widened.grows == grows else plain(config, parameter, widened)

    with patch.object(build, "factor_of", wrong):
        yield


@pytest.mark.parametrize(
    ("case", "grows"),
    [
        ("gpt, adamw", "hidden"),
        ("mlp, adamw", "output"),
        ("mlp, sgd", "input"),
        ("mlp, muon", "output"),
        ("gpt, lamb", "hidden"),
        ("mlp, lars", "hidden"),
        ("plain, adamw", "output"),
        pytest.param("gpt, muon", "hidden", marks=pytest.mark.slow),
    ],
)
def test_a_wrong_rate_is_found(case: str, grows: str) -> None:
    """One row of the table at a time."""
    make, config = CHECKED[case]
    with planted(grows):
        found = slopes(make, "mup", config)
    assert max(abs(slope) for slope in found.values()) > 1.5 * SAME_SCALE, found


def wider(build: str, **keys: Any) -> dict[str, Any]:
    return {"model": {"kind": "python", "build": f"tests.verification.user_models:{build}"} | keys}


@pytest.mark.parametrize(
    "layout",
    [{"layout": {"replicate": 2}}, {"layout": {"shard": 2}, "memory": {"zero": 3, "build": "parts"}}],
    ids=["replicate", "ZeRO-3, built by parts"],
)
def test_a_module_of_the_users_is_proved(ranks, tmp_path: Path, layout: dict[str, Any]) -> None:
    """Its first values and rates are those of one process, also where large parameters are drawn later."""
    corpus(tmp_path)
    model = wider("biased", arguments={"width": 320, "hidden": 64}, base={"width": 160, "hidden": 32})
    verdict, *_ = ranks(2, verified, model | layout, str(tmp_path), True, 2)
    assert verdict["holds"], verdict["sentence"]


def spread(x: Tensor) -> float:
    return float(x.detach().std(correction=0))


def test_first_values_and_rates_follow_what_has_grown() -> None:
    """Of a layer that reads inputs, one in the middle, a head, biases, norms and an embedding."""

    def build(width: int) -> nn.ModuleDict:
        torch.manual_seed(width)
        layers = {"in": nn.Linear(500, width), "norm": nn.LayerNorm(width), "head": nn.Linear(width, 300)}
        return nn.ModuleDict(layers | {"mid": nn.Linear(width, width), "embed": nn.Embedding(200, width)})

    base, model, drawn = build(64), build(256), build(256)
    follow_width(model, base)
    roles = {name: role.widened for name, role in roles_of(model).items()}
    grows = {"in.weight": "input", "mid.weight": "hidden", "head.weight": "output", "embed.weight": "input"}
    grows |= {"in.bias": "input", "mid.bias": "input", "norm.weight": "input", "norm.bias": "input"}
    assert roles == {name: Widened(grow, 4.0) for name, grow in grows.items()} | {"head.bias": None}  # type: ignore[arg-type]
    powers = {"input": 0.0, "hidden": 0.5, "output": 1.0}
    for name, parameter in model.named_parameters():
        wanted = spread(base.get_parameter(name)) * (4.0 ** -powers[grows[name]] if name in grows else 1.0)
        if name.startswith("norm") or name == "head.bias":
            assert torch.equal(parameter, drawn.get_parameter(name))
        else:
            assert spread(parameter) == pytest.approx(wanted, rel=1e-5)


class Own(nn.Module):
    """A weight that no known layer has."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, columns))


class Tied(nn.Module):
    """A head that is its embedding."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(61, width), nn.Linear(width, 61, bias=False)
        self.head.weight = self.embedding.weight


@pytest.mark.parametrize(
    ("model", "base", "said"),
    [
        (lambda: plain(64), lambda: plain(64), "no parameter has another shape"),
        (lambda: plain(64), lambda: nn.Linear(24, 32), "parameter of one width alone"),
        (lambda: Own(8, 8), lambda: Own(4, 2), "not known which of its dimensions Own takes for inputs"),
        (lambda: Own(8, 3), lambda: Own(4, 3), "grows from .4, 3. to .8, 3., and it is not known whether Own takes"),
        (lambda: Own(3, 8), lambda: Own(3, 4), "not known whether Own takes what has grown for inputs"),
        (lambda: Tied(8), lambda: Tied(4), "the weight of Embedding and Linear"),
    ],
)
def test_what_is_not_one_module_in_two_widths_is_refused(model: Any, base: Any, said: str) -> None:
    """By the name of a parameter."""
    with pytest.raises(UserCodeError, match=said):
        follow_width(model(), base())


def test_what_is_added_and_what_recurrent_layers_project_follow_their_inputs() -> None:
    """An embedding of positions that is a parameter has none; the projection of an LSTM reads what has grown."""
    projecting, base = (nn.LSTM(24, width, proj_size=5) for width in (64, 16))
    follow_width(projecting, base)
    rules = {name: role.widened for name, role in roles_of(projecting).items()}
    assert rules["weight_hr_l0"] == Widened("output", 4.0)
    assert rules["weight_ih_l0"] == rules["weight_hh_l0"] == rules["bias_hh_l0"] == Widened("input", 4.0)
    for shape in ((1, 1, 8), (1, 5, 8)):
        added, narrow = nn.ParameterList([torch.ones(shape)]), nn.ParameterList([torch.ones(*shape[:-1], 4)])
        follow_width(added, narrow)
        assert roles_of(added)["0"].widened == Widened("input", 2.0)


@pytest.mark.parametrize(("heads", "kept"), [(2, True), (8, False)])
def test_heads_of_transformers_keep_their_size(tmp_path: Path, heads: int, kept: bool) -> None:
    """A number of them that base does not change makes them narrower there."""
    config = {"vocab_size": 61, "hidden_size": 128, "num_hidden_layers": 1, "num_attention_heads": 8}
    config |= {"intermediate_size": 64, "num_key_value_heads": heads}
    base = {"hidden_size": 32, "num_attention_heads": heads, "num_key_value_heads": 2}
    model = {"kind": "transformers", "architecture": "LlamaForCausalLM", "config": config, "base": base}
    run_file = run_file_of(tmp_path, model=model)
    with nullcontext() if kept else pytest.raises(UserCodeError, match="have 16 features, and 4 with"):
        users_model(run_file, UserObjects())


def test_at_the_base_width_nothing_changes() -> None:
    """The same first values, bit by bit, and the same rates."""
    for make in (gpt, mlp):
        one, other = make(BASE, "mup"), make(BASE, "standard")
        initialise(one, seed=1, device="cpu")
        initialise(other, seed=1, device="cpu")
        for (name, p), q in zip(one.named_parameters(), other.parameters(), strict=True):
            assert torch.equal(p, q), name
        assert all(role.widened is None or role.widened.times == 1 for role in roles_of(one).values())


def test_a_head_of_muon_keeps_its_size() -> None:
    """Rows that are orthogonalised head by head do not grow: there are more of them."""
    muon, widened = Muon(heads={"*query*": 4}), Widened("hidden", 4.0)
    assert factor_of(muon, Described("key", (64, 64), "column", True), widened) == pytest.approx(0.5)
    assert factor_of(muon, Described("query", (64, 64), "column", True), widened) == pytest.approx(0.25)


def test_rates_of_muons_rest_keep_what_they_are_of_its_own() -> None:
    """A factor of the width, or of a group, comes on top of `adamw_lr`."""
    config = Muon(lr=0.02, adamw_lr=0.01, groups={"head*": Group(rate=3.0)})
    head = nn.Parameter(torch.ones(2, 2))
    optimizer = build_optimizer(config, [("head.weight", head, True)], lr=0.02, widened={"head.weight": None})
    assert optimizer.param_groups[0]["rate"] == pytest.approx(1.5)


@pytest.mark.parametrize("kind", ["adamw", pytest.param("muon", marks=pytest.mark.stress), "lamb"])
@pytest.mark.parametrize(
    "layout",
    [
        ({"layout": {"shard": 2}, "memory": {"zero": 1}}),
        pytest.param({"layout": {"tensor": 2}}, marks=pytest.mark.stress),
        pytest.param({"layout": {"pipeline": 2}}, marks=pytest.mark.stress),
        pytest.param({"layout": {"shard": 2}, "memory": {"zero": 3}}, marks=pytest.mark.stress),
    ],
    ids=str,
)
def test_it_is_proved_in_every_layout(ranks, tmp_path: Path, layout: dict[str, Any], kind: str) -> None:
    """Rates and decays are those of the whole model's parameters."""
    corpus(tmp_path)
    model = {"model": SMALL_GPT | {"scaling": "mup", "base_width": 8}, "optimizer": {"kind": kind}}
    verdict, *_ = ranks(2, verified, model | layout, str(tmp_path), True, 2)
    assert verdict["holds"], verdict["sentence"]


def test_other_optimizers_are_refused(tmp_path: Path) -> None:
    """With those that are not."""
    model = SMALL_GPT | {"scaling": "mup", "base_width": 8}
    for kind in ("soap", "kfac", "rmsprop"):
        sentence = refusal(run_file_of(tmp_path, model=model, optimizer={"kind": kind}))
        assert sentence is not None
        assert sentence.endswith("or leave it out")
    foreign_model = wider("biased", arguments={"width": 32}, base={"width": 16})["model"]
    sentence = refusal(run_file_of(tmp_path, model=foreign_model, optimizer={"kind": "soap"}))
    assert sentence is not None
    assert sentence.startswith('model.base with optimizer.kind = "soap"')
    assert refusal(run_file_of(tmp_path, model=model, optimizer={"kind": "lion"})) is None


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"scaling": "mup"}, "without base_width"),
        ({"base_width": 64}, "with base_width"),
        ({"scaling": "mup", "base_width": 8, "tied": True}, "leave tied out"),
        ({"scaling": "mup", "base_width": 12}, "more heads of the same size"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(keys: dict[str, Any], said: str) -> None:
    """In a sentence."""
    with pytest.raises(msgspec.ValidationError, match=said):
        msgspec.convert(SMALL_GPT | keys, GPTConfig)
