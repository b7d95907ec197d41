"""What scripts do between the backward and the optimizer's step, and to the trained set, as in a plain loop of PyTorch.

Each situation is the body of a loop. It runs in plain PyTorch, with one batch a step, and in a loop of Shoal on several
layouts, with and without accumulation; both end with the same weights.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.cli.warm_scripts import run_script

SAMPLES, BATCH, STEPS = 24, 6, 4
WEIGHTS = 2e-5
"""Relative to the largest number of a tensor: float32 sums in two orders, over four steps."""

SETUP = """
import copy
import io
import torch
import torch.nn.functional as F
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(5, 7), nn.Linear(7, 7), nn.Linear(7, 3)])
        self.side = nn.Linear(5, 3)
        self.never = nn.Linear(4, 4)
    def forward(self, x):
        h = x
        for block in self.blocks:
            h = torch.tanh(block(h))
        return h + self.side(x) if bool(x[0, 0] > 0) else h

torch.manual_seed(1)
inputs, targets = torch.randn(24, 5), torch.randn(24, 3)
inputs[:, 0] = inputs[:, 0].abs() * torch.where(torch.arange(24) % 6 < 5, 1.0, -1.0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=0.1)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1.0, factor=0.5)
def call(x):
    return torch.cat([model(one[None]) for one in x])
def loss_of(x, y):
    return (call(x) - y).square().mean()
"""
"""`side` is used by samples 0 to 4 of each batch of 6 alone, and `never` by none: both have momentum and decay."""

LOOP = """
import shoal
FIRST
data = torch.utils.data.TensorDataset(inputs, targets)
loader = torch.utils.data.DataLoader(data, batch_size=6)
run = shoal.start({"run": {"name": "mine"}}, model=model, optimizer=optimizer, data=loader, epochs=1)
BEFORE
for number, microbatches in run.steps():
    for x, y in microbatches:
        EARLY
        run.backward(loss_of(x, y))
        LATE
        optimizer.step()
        AFTER
END
run.export("weights.safetensors")
run.close()
"""

SITUATIONS: dict[str, dict[str, str]] = {
    "zero_grad": {"AFTER": "optimizer.zero_grad()"},
    "zero_grad in place": {"AFTER": "optimizer.zero_grad(set_to_none=False)"},
    "zero_grad of the model": {"AFTER": "model.zero_grad(set_to_none=False)"},
    "nothing": {},
    "clip by norm": {"LATE": "torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)"},
    "clip by the largest": {"LATE": "torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type=float('inf'))"},
    "clip by value": {"LATE": "torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)"},
    "clip of the group": {"LATE": "torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]['params'], 0.05)"},
    "scaled by hand": {"LATE": "[p.grad.mul_(0.5) for p in model.parameters() if p.grad is not None]"},
    "replaced": {"LATE": "for p in model.parameters():\n    if p.grad is not None: p.grad = p.grad * 0.5 + 0.001"},
    "taken away": {"LATE": "model.blocks[1].weight.grad = None"},
    "frozen": {"EARLY": "model.blocks[1].requires_grad_(number < 2)"},
    "frozen for a while": {"EARLY": "model.blocks[0].weight.requires_grad_(number not in (1, 2))"},
    "unfrozen one by one": {
        "BEFORE": "model.blocks[:2].requires_grad_(False)",
        "EARLY": "model.blocks[1].requires_grad_(number > 0); model.blocks[0].requires_grad_(number > 1)",
    },
    "moving average": {
        "FIRST": "average = torch.optim.swa_utils.AveragedModel(model)",
        "AFTER": "if run.update:\n    with run.full_parameters(): average.update_parameters(model)",
        "END": "with run.full_parameters(): model.load_state_dict(average.module.state_dict())",
    },
    "trained at other weights": {
        "EARLY": "with run.full_parameters():\n    own = [p.data for p in model.parameters()]\n"
        "    for p in model.parameters(): p.data = p.data + 0.02 * (number + 1)",
        "LATE": "run.clip_grad_norm_(0.05)\n"
        "with run.full_parameters():\n    for p, weights in zip(model.parameters(), own): p.data = weights",
    },
    "weights clipped": {
        "AFTER": "if run.update:\n"
        "    with run.full_parameters(), torch.no_grad(): [p.clamp_(-0.2, 0.2) for p in model.parameters()]",
    },
    "looked into": {
        "LATE": "with run.full_parameters(), torch.no_grad():\n"
        "    model.eval(); model(inputs[:1]); copy.deepcopy(model)(inputs[:1]); model.train()\n"
        "    torch.save(model.state_dict(), io.BytesIO())\n"
        "    with run.full_parameters(): nn.utils.parameters_to_vector(model.parameters()).norm().item()\n"
        "    torch.func.functional_call(model, dict(model.named_parameters()), (inputs[:1],))",
    },
    "gradient penalty": {
        "BEFORE": "def loss_of(x, y):\n"
        "    x = x.clone().requires_grad_(True)\n"
        "    outputs = call(x)\n"
        "    (slope,) = torch.autograd.grad(outputs.sum(), x, create_graph=True)\n"
        "    return (outputs - y).square().mean() + slope.square().mean()",
    },
    "hooks that are not linear": {
        "BEFORE": "model.blocks[0].weight.register_hook(lambda g: g.clamp(-0.01, 0.01))\n"
        "model.blocks[1].weight.register_hook(lambda g: g / g.norm())",
        "EARLY": "hook = model.side.weight.register_hook(lambda g: g.sign() * 0.01) if number == 2 else None",
        "AFTER": "hook is not None and hook.remove()",
    },
    "hooks with a memory": {
        "BEFORE": "seen = torch.zeros(())\n"
        "model.blocks[0].weight.register_hook(lambda g: g / (1 + seen.add_(g.abs().sum())))\n"
        "model.blocks[1].weight.register_hook(lambda g: g if number < 2 else g.clamp(-0.001, 0.001))\n"
        "model.blocks[1].bias.register_hook(lambda g: None if number < 1 else g + 0.1 * g.sign())\n"
        "model.blocks[2].weight.register_hook(lambda g: (g[0].zero_(), None)[1])\n"
        "model.blocks[2].weight.register_hook(lambda g: g / (0.1 + g.norm(dim=1, keepdim=True)))",
    },
    "hooks of the optimizer": {
        "BEFORE": "def clip(optimizer, args, kwargs):\n"
        "    torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]['params'], 0.05)\n"
        "first = optimizer.register_step_pre_hook(lambda *_: None)",
        "EARLY": "if number == 1: first.remove(); first = optimizer.register_step_pre_hook(clip)",
    },
    "a moving average of gradients": {
        "BEFORE": "mean = torch.zeros(7, 7)",
        "LATE": "there = model.blocks[1].weight.grad\n"
        "mean.lerp_(there, 0.4); there.copy_(mean) if number % 2 else there.add_(mean, alpha=2.0)",
    },
    "gradients squared, added up": {
        "BEFORE": "fisher, mean = torch.zeros(7, 7), torch.zeros(7, 7)",
        "LATE": "there = model.blocks[1].weight.grad\n"
        "if there is not None: fisher.add_(there.detach() ** 2); torch._foreach_add_([mean], [there], alpha=0.5)",
        "END": "with run.full_parameters(), torch.no_grad(): model.blocks[1].weight.div_(0.01 + fisher).add_(mean)",
    },
    "replaced by .data": {
        "AFTER": "if run.update:\n"
        "    with run.full_parameters(): model.blocks[1].weight.data = model.blocks[1].weight.data * 0.5",
    },
    "other weights for a while": {
        "FIRST": "others = [torch.zeros_like(p) for p in model.parameters()]",
        "AFTER": "if run.update:\n"
        "    with run.full_parameters(), torch.no_grad():\n"
        "        backup = [p.data for p in model.parameters()]\n"
        "        for p, other in zip(model.parameters(), others): p.data = other\n"
        "        with run.full_parameters(): model(inputs[:1])\n"
        "        for p, own in zip(model.parameters(), backup): p.data = own",
    },
    "exchanged and transposed": {
        "AFTER": "if run.update:\n"
        "    with run.full_parameters():\n"
        "        a, b, weight = model.blocks[0].bias, model.blocks[1].bias, model.blocks[1].weight\n"
        "        a.data, b.data, weight.data = b.data, a.data, weight.data.t()",
    },
    "norm of all, logged": {
        "LATE": "there = [p.grad for p in model.parameters() if p.grad is not None]\n"
        "norm = float(torch.nn.utils.get_total_norm(there))\n"
        "for gradient in there: gradient.div_(max(norm, 0.1))"
    },
}
LAYOUTS = {
    "one rank": (1,),
    "one rank, accumulated": (1, "batch.micro_samples=2"),
    "3 ranks": (3,),
    "2 ranks, accumulated": (2, "batch.micro_samples=1"),
    "ZeRO-1": (2, "layout.shard=2", "memory.zero=1"),
    "ZeRO-1, accumulated": (2, "layout.shard=2", "memory.zero=1", "batch.micro_samples=1"),
    "ZeRO-2, accumulated": (2, "layout.shard=2", "memory.zero=2", "batch.micro_samples=1"),
    "ZeRO-3": (2, "layout.shard=2", "memory.zero=3"),
    "ZeRO-3, accumulated": (3, "layout.shard=3", "memory.zero=3", "batch.micro_samples=1"),
}
OFTEN = {
    "one rank, accumulated": ("zero_grad in place", "clip by value", "replaced", "unfrozen one by one"),
    "3 ranks": ("clip by norm", "frozen"),
    "2 ranks, accumulated": ("hooks with a memory",),
    "ZeRO-1": ("gradients squared, added up", "trained at other weights"),
    "ZeRO-1, accumulated": (
        "hooks of the optimizer",
        "zero_grad in place",
        "clip of the group",
        "replaced",
        "replaced by .data",
    ),
    "ZeRO-3, accumulated": (
        "hooks with a memory",
        "taken away",
        "looked into",
        "moving average",
        "gradient penalty",
        "unfrozen one by one",
    ),
}
"""What runs at every test; the rest is stress."""


PLACES = ("FIRST", "BEFORE", "EARLY", "LATE", "AFTER", "END")


class PlainRun:
    """What a situation asks a run for, in a plain loop; `scope` holds its model."""

    update = True

    def __init__(self, scope: dict) -> None:
        self._scope = scope

    def full_parameters(self) -> AbstractContextManager[None]:
        return nullcontext()

    def clip_grad_norm_(self, largest: float) -> None:
        torch.nn.utils.clip_grad_norm_(self._scope["model"].parameters(), largest)


def plain(situation: dict[str, str]) -> dict[str, torch.Tensor]:
    """The weights after the steps of a plain loop."""
    scope: dict = {}
    scope["run"] = PlainRun(scope)
    first, before, early, late, after, end = (situation.get(place, "") for place in PLACES)
    exec(SETUP, scope)
    exec(first, scope)
    exec(before, scope)
    for number in range(STEPS):
        batch = slice(number * BATCH, (number + 1) * BATCH)
        scope |= {"number": number, "x": scope["inputs"][batch], "y": scope["targets"][batch]}
        exec(early, scope)
        scope["loss_of"](scope["x"], scope["y"]).backward()
        exec(late, scope)
        scope["optimizer"].step()
        exec(after, scope)
        scope["model"].zero_grad()
    exec(end, scope)
    return scope["model"].state_dict()


def script_of(situation: dict[str, str]) -> str:
    text = SETUP + LOOP
    for place in PLACES:
        indent = " " * (0 if place in ("FIRST", "BEFORE", "END") else 8)
        text = text.replace(place, situation.get(place, "pass").replace("\n", "\n" + indent))
    return text


def _marks(name: str, layout: str) -> list[pytest.MarkDecorator]:
    return [] if name in OFTEN.get(layout, ()) else [pytest.mark.stress]


def _cases() -> list:
    return [
        pytest.param(
            name, layout, marks=() if name in OFTEN.get(layout, ()) else pytest.mark.stress, id=f"{name}-{layout}"
        )
        for name in SITUATIONS
        for layout in LAYOUTS
    ]


@pytest.mark.matrix(every=1, often=2)
@pytest.mark.parametrize(("name", "layout"), _cases())
def test_a_loop_trains_as_in_plain_pytorch(name: str, layout: str, tmp_path: Path) -> None:
    """Whatever the script does to gradients and to `requires_grad`, on any layout: the weights of a plain loop."""
    world, *keys = LAYOUTS[layout]
    (tmp_path / "mine.py").write_text(script_of(SITUATIONS[name]))
    codes = run_script(tmp_path / "mine.py", tmp_path, *keys, world=world)
    assert codes == [0] * world, (tmp_path / "rank-0.txt").read_text()
    found = load_file(tmp_path / "weights.safetensors")
    wanted = plain(SITUATIONS[name])
    largest = {key: float((found[key] - wanted[key]).abs().max() / wanted[key].abs().max()) for key in wanted}
    assert max(largest.values()) < WEIGHTS, largest


REFUSED: dict[str, tuple[dict[str, str], tuple, str]] = {
    "unfrozen that was frozen at the start": (
        {"FIRST": "model.side.requires_grad_(False)", "EARLY": "model.side.requires_grad_(number > 1)"},
        (1,),
        "step 3: side.weight requires a gradient now, and did not when shoal.start was called",
    ),
    "a group more": (
        {
            "FIRST": "model.side.requires_grad_(False)\n"
            "optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.2)",
            "AFTER": "if number == 1: optimizer.add_param_group({'params': [model.side.weight], 'lr': 0.1})",
        },
        (2, "layout.shard=2", "memory.zero=1"),
        "step 3: the parameters of the optimizer's groups are not those of the start (added: side.weight)",
    ),
    "a rate of each rank": (
        {"AFTER": "if number == 1: optimizer.param_groups[0]['lr'] = 0.1 + run.rank"},
        (3,),
        "step 3: on rank 0 lr of the optimizer's group 0 is 0.1 and on rank 1 lr of the optimizer's group 0 is 1.1",
    ),
    "a rate of each rank under ZeRO": (
        {"AFTER": "if number == 1: optimizer.param_groups[0]['lr'] = 0.1 + run.rank"},
        (2, "layout.shard=2", "memory.zero=3"),
        "lr of the optimizer's group 0 is 0.1 and on rank 1",
    ),
    "frozen on one rank": (
        {"EARLY": "model.side.requires_grad_(run.rank == 0 or number < 2)"},
        (2,),
        "step 3: on rank 1 side.weight is frozen, and not on rank 0",
    ),
    "a gradient changed on one rank": (
        {"LATE": "if run.rank == 0 and number == 2: model.blocks[0].weight.grad.mul_(0.5)"},
        (2,),
        "had its gradient changed by the script in the step before",
    ),
    "a gradient changed by a hook on one rank": (
        {"BEFORE": "if run.rank == 0: model.blocks[0].weight.register_hook(lambda g: g * 0.5)"},
        (2,),
        "step 2: on rank 0 blocks.0.weight had its gradient changed by a hook in the step before, and not on rank 1",
    ),
    "a hook on one rank under ZeRO": (
        {"BEFORE": "if run.rank == 0: model.blocks[0].weight.register_hook(lambda g: None)"},
        (2, "layout.shard=2", "memory.zero=1"),
        "step 1: on rank 0 blocks.0.weight has a hook of register_hook, and not on rank 1",
    ),
    "read under ZeRO-3": (
        {"AFTER": "nn.utils.parameters_to_vector(model.parameters())"},
        (2, "layout.shard=2", "memory.zero=3"),
        "the parameter blocks.0.weight was read outside of blocks.0 (a Linear), the block it is in",
    ),
    "a backward of its own": (
        {"EARLY": "loss_of(x, y).backward()"},
        (2, "batch.micro_samples=1"),
        ".grad is not empty before run.backward()",
    ),
    "an operator on the whole of a piece": (
        {"LATE": "torch.linalg.svd(model.blocks[0].weight.grad)"},
        (2, "layout.shard=2", "memory.zero=1"),
        "the gradient of blocks.0.weight is divided over 2 ranks by ZeRO, and",
    ),
    "the optimizer's state between two steps": (
        {"AFTER": "optimizer.state[model.blocks[0].weight]"},
        (2, "layout.shard=2", "memory.zero=1"),
        "the optimizer's state of a parameter was asked for outside of step()",
    ),
    "other numbers of another shape": (
        {"AFTER": "model.side.weight.data = torch.zeros(2, 2)"},
        (2, "layout.shard=2", "memory.zero=1"),
        "side.weight was given data of shape [2, 2] and type float32 in the place of shape [3, 5]",
    ),
    "an optimizer that draws, of its own pieces": (
        {
            "FIRST": "class Noisy(torch.optim.SGD):\n"
            "    def step(self, closure=None):\n"
            "        super().step()\n"
            "        for p in self.param_groups[0]['params']: p.data.add_(torch.randn_like(p), alpha=0.01)\n"
            "optimizer = Noisy(model.parameters(), lr=0.1)"
        },
        (2, "layout.shard=2", "memory.zero=1"),
        "step 1: the optimizer draws random numbers in its step, and under ZeRO each rank would draw those of its own",
    ),
    "layers of two types": ({"FIRST": "model.side.double()"}, (1,), "the parameter side.bias is float64, and"),
}
RARE = {
    "a rate of each rank under ZeRO",
    "an operator on the whole of a piece",
    "other numbers of another shape",
    "a hook on one rank under ZeRO",
    "unfrozen that was frozen at the start",
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.stress] if name in RARE else []) for name in REFUSED]
)
def test_what_cannot_be_right_is_a_sentence_in_the_step_in_which_it_happens(name: str, tmp_path: Path) -> None:
    """Never another model with exit code 0."""
    situation, (world, *keys), sentence = REFUSED[name]
    (tmp_path / "mine.py").write_text(script_of(situation))
    codes = run_script(tmp_path / "mine.py", tmp_path, *keys, world=world)
    said = " ".join((tmp_path / "rank-0.txt").read_text().split())
    assert set(codes) == {2}, said
    assert sentence in said


DRAWING = {
    "BEFORE": "drawn = []\n"
    "def noise(g):\n"
    "    drawn.append(torch.randn_like(g))\n"
    "    return g + 0.1 * drawn[-1]\n"
    "for block in model.blocks[:2]: block.weight.register_hook(noise)",
    "END": "assert len({float(each.sum()) for each in drawn}) == len(drawn) == 8\n"
    "assert all(abs(run.mean(each.sum()) - float(each.sum())) < 1e-6 for each in drawn)",
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["2 ranks, accumulated", "ZeRO-1"])
def test_hooks_that_draw_draw_alike_on_all_ranks(layout: str, tmp_path: Path) -> None:
    """Other numbers at each step and for each parameter; copies of the model stay the same, which the run checks."""
    world, *keys = LAYOUTS[layout]
    (tmp_path / "mine.py").write_text(script_of(DRAWING))
    codes = run_script(tmp_path / "mine.py", tmp_path, *keys, world=world)
    assert codes == [0] * world, (tmp_path / "rank-0.txt").read_text()
