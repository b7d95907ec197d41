"""`shoal verify mine.py`: scripts of own loops beside plain PyTorch, with faults planted in them and in Shoal."""

from __future__ import annotations

import inspect
import json
import os
from functools import partial
from pathlib import Path

import pytest

from shoal.own_loop.loop import Training
from shoal.own_loop.plain import PlainTraining
from shoal.verification.verdict import Verdict
from tests import programs
from tests.cli.warm_scripts import compare_script
from tests.waiting import HANG_S

SCRIPT = """
import torch
import torch.nn.functional as F
from torch import nn
import shoal

torch.manual_seed(0)
x, y = torch.randn(48, 6), torch.randint(0, 3, (48,))
model = nn.ModuleList([nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 3)])
def call(x):
    for layer in model: x = layer(x)
    return x
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=12, shuffle=True)
run = shoal.start({"run": {"name": "mine"}}, model=model, optimizer=optimizer, data=loader, epochs=2)
for inputs, targets in run.batches():
    loss = F.cross_entropy(call(inputs), targets)
    run.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
"""
SHARDED = ("layout.shard=2", "memory.zero=3", "batch.micro_samples=2")


def compared(text: str, folder: Path, *keys: str, world: int = 2) -> Verdict | str:
    (folder / "mine.py").write_text(text)
    return compare_script(folder / "mine.py", folder, *keys, world=world)


@pytest.mark.parametrize("keys", [("batch.micro_samples=3",), SHARDED], ids=["replicated", "ZeRO-3"])
def test_a_right_loop_is_the_same_model(keys: tuple[str, ...], tmp_path: Path) -> None:
    """Loss, norm, gradients and weights of three steps, random numbers of dropout included."""
    verdict = compared(SCRIPT, tmp_path, *keys)
    assert isinstance(verdict, Verdict), verdict
    assert verdict.holds, "\n".join(verdict.lines())
    assert {finding.quantity for finding in verdict.findings} == {"loss", "norm", "gradient", "weight"}
    assert {finding.step for finding in verdict.findings} == {1, 2, 3}
    assert {finding.rank for finding in verdict.findings} >= {0, 1}


def test_what_the_comparison_leaves_out_is_said(tmp_path: Path) -> None:
    verdict = compared(SCRIPT, tmp_path, "precision.kind=bfloat16", "codec.kind=sign")
    assert isinstance(verdict, Verdict), verdict
    assert verdict.holds, "\n".join(verdict.lines())
    assert any('precision.kind = "bfloat16" was left out' in note for note in verdict.notes)
    assert any("[codec] and [shard_codec] were left out" in note for note in verdict.notes)


LOSS = "F.cross_entropy(call(inputs), targets)"
FAULTS = {
    "a sum for a mean": (LOSS, "F.cross_entropy(call(inputs), targets, reduction='sum')"),
    "a loss that couples samples": (LOSS, "call(inputs).std()"),
    "weights changed by the rank's number": ("zero_grad()", "zero_grad(); model[0].weight.data.mul_(1 + run.rank)"),
    "random numbers of the loop": ("call(inputs)", "call(inputs + torch.poisson(torch.ones_like(inputs)))"),
    "a rank with a target of its own": (LOSS, f"{LOSS} * (1 + run.rank)"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_what_trains_another_model_is_found(name: str, tmp_path: Path) -> None:
    """Each is right in one process, and trains another model on two ranks."""
    verdict = compared(SCRIPT.replace(*FAULTS[name]), tmp_path)
    assert isinstance(verdict, Verdict), verdict
    assert not verdict.holds
    drawn = name == "random numbers of the loop"
    assert ("draws random numbers" in verdict.sentence()) is drawn


SHARED = """
    import random
    import numpy as np
    kept = np.random.beta(0.4, 0.4) if random.random() < 0.7 else float(torch.rand(1))
    inputs = kept * inputs + (1 - kept) * torch.randn(1, 6) + random.choice([0.1, 0.2, 0.3])
"""
"""A mixup's lambda from NumPy, coins, and noise that all samples share."""


@pytest.mark.slow
@pytest.mark.parametrize("micro", [1, 3])
def test_a_number_for_the_whole_batch_is_the_same_on_every_rank(micro: int, tmp_path: Path) -> None:
    """Drawn from Python, NumPy or PyTorch, with one sample in a microbatch or several: the model of one process."""
    text = SCRIPT.replace("run.batches():", "run.batches():" + SHARED)
    verdict = compared(text, tmp_path, f"batch.micro_samples={micro}")
    assert isinstance(verdict, Verdict), verdict
    assert verdict.holds, "\n".join(verdict.lines())


def test_what_the_model_draws_is_no_excuse(tmp_path: Path) -> None:
    """It is keyed on the samples, so a difference comes from elsewhere: here from a sum for a mean."""
    module = "class Noisy(nn.Sequential):\n    def forward(self, x): return super().forward(x + torch.randn_like(x))\n"
    text = SCRIPT.replace("torch.manual_seed(0)", module + "torch.manual_seed(0)").replace(
        "call(inputs)", "model(inputs)"
    )
    text = text.replace("nn.ModuleList([", "Noisy(").replace("nn.Linear(8, 3)])", "nn.Linear(8, 3))")
    verdict = compared(text.replace("targets)", "targets, reduction='sum')"), tmp_path)
    assert isinstance(verdict, Verdict), verdict
    assert not verdict.holds
    assert "draws random numbers" not in verdict.sentence()


def test_a_wrong_gradient_is_found(tmp_path: Path) -> None:
    """A fault in Shoal itself: half of every gradient."""
    planted = (
        "from shoal.gradients.replicated import ReplicatedGradients as Gradients\n"
        "right = Gradients.accept\n"
        "def half(self):\n"
        "    right(self)\n"
        "    for owned in self.owned: owned.parameter.grad.mul_(0.5)\n"
        "Gradients.accept = half\n"
    )
    verdict = compared(planted + SCRIPT, tmp_path)
    assert isinstance(verdict, Verdict), verdict
    assert verdict.first is not None
    assert (verdict.first.step, verdict.first.quantity) == (1, "gradient")


def test_what_the_script_must_not_do_twice_differently_is_a_sentence(tmp_path: Path) -> None:
    """Data and models that another start makes otherwise."""
    text = SCRIPT.replace("torch.manual_seed(0)", "import os; torch.manual_seed(os.getpid())")
    said = compared(text, tmp_path, world=1)
    assert isinstance(said, str)
    assert "the script made other data when it was started again" in said
    text = SCRIPT.replace("nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 3)", "*WIDE")
    wide = "import os\nwide = 8 + os.path.exists('initial.safetensors')\n"
    (tmp_path / "other").mkdir()
    text = wide + text.replace("*WIDE", "nn.Linear(6, wide), nn.Linear(wide, 3)")
    said = compared(text, tmp_path / "other", world=1)
    assert isinstance(said, str)
    assert "the script built another model when it was started again" in said


@pytest.mark.slow
def test_a_loop_that_is_left_early_is_compared_up_to_there(tmp_path: Path) -> None:
    """By break and close(), or at the end of the script."""
    text = SCRIPT.replace(
        "    optimizer.zero_grad()", "    optimizer.zero_grad()\n    if run.update and run.steps_done == 1: break"
    )
    for end in ("run.close()\n", ""):
        (tmp_path / (folder := f"closed {bool(end)}")).mkdir()
        verdict = compared(text + end, tmp_path / folder)
        assert isinstance(verdict, Verdict), verdict
        assert verdict.holds
        assert {finding.step for finding in verdict.findings} == {1, 2}


def test_data_that_draws_where_it_is_read_is_a_sentence(tmp_path: Path) -> None:
    """Not a difference of the layout."""
    draws = "class Draws(torch.utils.data.Dataset):\n    def __len__(self): return 48\n"
    draws += "    def __getitem__(self, i): return x[i] + torch.randn(6), y[i]\n"
    text = SCRIPT.replace("optimizer = ", draws + "optimizer = ").replace(
        "torch.utils.data.TensorDataset(x, y)", "Draws()"
    )
    said = compared(text, tmp_path)
    assert isinstance(said, str)
    assert "returns another sample when one is read again" in said


def test_what_is_on_one_side_only_is_said_and_null_in_json(tmp_path: Path) -> None:
    text = SCRIPT.replace(
        "    optimizer.step()", "    if run.world_size > 1: model[0].bias.grad = None\n    optimizer.step()"
    )
    verdict = compared(text, tmp_path)
    assert isinstance(verdict, Verdict), verdict
    assert "at step 1 the gradient of 0.bias on rank 0 is on one side only" in verdict.sentence()
    assert json.loads(json.dumps(verdict.to_json(), allow_nan=False))["first"]["difference"] is None


def test_the_plain_loop_has_the_calls_of_a_run() -> None:
    """Whatever a script may call is there, with the same parameters."""

    def calls(kind: type) -> dict[str, str]:
        found = {n: v for n, v in vars(kind).items() if not n.startswith("_") and inspect.isfunction(v)}
        return {name: str(inspect.signature(value)) for name, value in found.items()}

    assert calls(Training) == calls(PlainTraining)
    given = {n for n, v in vars(Training).items() if isinstance(v, property)}
    plain = {n for n in vars(PlainTraining) if not n.startswith("_")} | {"device", "model", "steps_done"}
    assert given <= plain


@pytest.mark.slow
def test_on_the_command_line(tmp_path: Path) -> None:
    """Code 6, what differs, and JSON alone, whatever the script prints and leaves running; a script without a call.
    Nothing is left behind.
    """
    child = "import atexit, subprocess, sys\nchild = subprocess.Popen(['sleep', '300'])\natexit.register(child.kill)\n"
    speaks = "sys.stdout.buffer.write(b'\\xff what it says\\n')\n"
    (tmp_path / "mine.py").write_text(child + speaks + SCRIPT.replace(*FAULTS["a sum for a mean"]))
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    run = partial(programs.run, cwd=tmp_path, env=environ, timeout_s=HANG_S)
    bad = run(["-m", "shoal", "verify", "mine.py", "run.processes=2", "--json"])
    assert bad.returncode == 6, bad.stderr
    assert "2 replicas = 2 ranks differs from one process: at step 1 the gradient of" in bad.stderr
    assert json.loads(bad.stdout)["holds"] is False
    (tmp_path / "mine.py").write_text("print('nothing')")
    none = run(["-m", "shoal", "verify", "mine.py"])
    assert none.returncode == 2
    assert "came to its end without a call of shoal.start or shoal.train" in none.stderr
    assert [each.name for each in tmp_path.iterdir()] == ["mine.py"]
