"""What a script's own loop may call: clipping, several losses, a moving average, saves on demand, export."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from shoal.observe.events import read_events
from tests.cli.warm_scripts import run_script

HEAD = """
import json
import torch
import torch.nn.functional as F
from torch import nn
import shoal

torch.manual_seed(0)
inputs = torch.randn(48, 8)
targets = (inputs[:, 0] > 0).long() + 2 * (inputs[:, 1] > 0).long()
data = torch.utils.data.TensorDataset(inputs, targets)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
model[2].requires_grad_(False)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
"""

CALLS = (
    HEAD
    + """
average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
run = shoal.start(model=model, optimizer=optimizer, data=(data, data), batch_samples=12, steps=6,
                  state={"average": average})
def at_most(optimizer, args, kwargs):
    torch.nn.utils.clip_grad_value_([p for group in optimizer.param_groups for p in group["params"]], 0.05)
optimizer.register_step_pre_hook(at_most)
norms = []
for number, microbatches in run.steps():
    for x, y in microbatches:
        outputs = run.model(x)
        run.backward(F.cross_entropy(outputs, y), more=True)
        run.backward(1e-3 * outputs.square().mean())
    norms.append(run.clip_grad_norm_(0.5))
    optimizer.step()
    assert run.update.grad_norm == norms[-1]
    with run.full_parameters():
        average.update_parameters(model)
    if number == 2:
        run.save()
    right = run.sum(sum(float((run.model(x).argmax(1) == y).sum()) for x, y in run.held_out()))
    run.log({"accuracy/train": right / 48})
run.export("weights.safetensors")
if run.rank == 0:
    print(json.dumps({"norms": norms, "average": float(average.module[0].weight.double().norm())}))
run.close()
"""
)


FREED = (
    HEAD
    + """
import weakref
run = shoal.start(model=model, optimizer=optimizer, data=data, batch_samples=12, steps=3)
gradients = []
for number, microbatches in run.steps():
    assert all(reference() is None for reference in gradients), "a gradient of the step before is still there"
    for x, y in microbatches:
        run.backward(F.cross_entropy(run.model(x), y))
    run.clip_grad_norm_(0.01)
    gradients = [weakref.ref(p.grad) for p in model.parameters() if p.grad is not None]
    assert len(gradients) == 4
    optimizer.step()
run.close()
"""
)

SHOWN = (
    HEAD
    + """
trained = [p for p in model.parameters() if p.requires_grad]
run = shoal.start(model=model, optimizer=optimizer, data=data, batch_samples=12, steps=4)
between = 0
for x, y in run.batches():
    run.backward(F.cross_entropy(run.model(x), y))
    if EVERY or run.last_of_step:
        for p in trained:
            p.grad.clamp_(-0.01, 0.01)
        torch.nn.utils.clip_grad_norm_(trained, 0.1)
    optimizer.step()
    if EVERY and not run.last_of_step:
        between += 1
        if between % 3:
            optimizer.zero_grad(set_to_none=between % 3 == 1)
run.export("weights.safetensors")
run.close()
assert between >= 3 * EVERY
"""
)

WRITTEN = (
    HEAD
    + """
import numpy as np
def by_data(gradient):
    gradient.data.mul_(10.0)
def by_other_data(gradient):
    gradient.data = gradient.data * 10.0
def by_numpy(gradient):
    np.multiply(gradient.numpy(), 10.0, out=gradient.numpy())
def in_place(gradient):
    gradient.mul_(10.0)
def nothing(gradient):
    pass
ways = (by_data, by_other_data, by_numpy, in_place, nothing)
def norm():
    return float(torch.stack([p.grad.norm() for p in model.parameters() if p.requires_grad]).norm())
run = shoal.start(model=model, optimizer=optimizer, data=data, batch_samples=12, steps=10)
for number, (x, y) in enumerate(run.batches()):
    run.backward(F.cross_entropy(run.model(x), y))
    for parameter in (p for p in model.parameters() if p.requires_grad):
        ways[number // 2](parameter.grad)
    written = norm()
    if number % 2:
        run.step(clip_norm=0.05)
    else:
        assert abs(run.clip_grad_norm_(0.05) / written - 1) < 1e-5, (number, written)
        assert abs(run.clip_grad_norm_(1.0) / 0.05 - 1) < 1e-5, number
        run.step()
    assert written > 0.06 and abs(norm() / 0.05 - 1) < 1e-5, (number, written, norm())
run.close()
"""
)


def run_of(folder: Path, text: str, *overrides: str, world: int) -> str:
    script = folder / "mine.py"
    script.write_text(text)
    codes = run_script(script, folder, *overrides, world=world)
    said = (folder / "rank-0.txt").read_text()
    assert codes == [0] * world, said
    return said


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    folder = tmp_path_factory.mktemp("alone")
    said = run_of(folder, CALLS, world=1)
    return folder, json.loads(next(line for line in said.splitlines() if line.startswith("{")))


def values(folder: Path, name: str) -> list[float]:
    return [value for e in read_events(folder / "runs/mine", 0) if (value := e.get(name)) is not None]


@pytest.mark.parametrize("layout", [(3,), (2, "layout.shard=2", "memory.zero=3", "batch.micro_samples=3")])
def test_the_calls_mean_the_same_on_several_ranks(alone: tuple[Path, dict], layout: tuple, tmp_path: Path) -> None:
    """Norms before clipping, the averaged weights, accuracy, losses and exported weights are those of one rank."""
    there, expected = alone
    world, *overrides = layout
    said = run_of(tmp_path, CALLS, *overrides, world=world)
    found = json.loads(next(line for line in said.splitlines() if line.startswith("{")))
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-5)
    assert found["average"] == pytest.approx(expected["average"], rel=1e-6)
    for name in ("loss/train", "accuracy/train"):
        assert values(tmp_path, name) == pytest.approx(values(there, name), rel=1e-5)
    weights, wanted = (load_file(folder / "weights.safetensors") for folder in (tmp_path, there))
    assert weights.keys() == wanted.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, wanted[name], rtol=1e-4, atol=1e-6)


def test_a_step_is_saved_when_the_loop_asks(alone: tuple[Path, dict]) -> None:
    """The third step and the last, and no other."""
    there, _ = alone
    saved = sorted(path.name for path in (there / "runs/mine/checkpoints").glob("step-*"))
    assert saved == ["step-00000003", "step-00000006"]


LOOP = (
    HEAD
    + """
run = shoal.start(model=model, optimizer=optimizer, data=data, batch_samples=12, steps=24)
for x, y in run.batches():
    run.backward(F.cross_entropy(model(x), y))
    optimizer.step()
"""
)


@pytest.mark.parametrize(
    "keys",
    [
        ("sync.kind=local", "sync.period=4"),
        ("codec.kind=blockwise",),
    ],
)
def test_a_loop_learns_under_any_agreement(keys: tuple[str, ...], tmp_path: Path) -> None:
    """Local steps with an outer optimizer, and a coded sum, on three ranks."""
    run_of(tmp_path, LOOP, *keys, world=3)
    losses = values(tmp_path, "loss/train")
    assert len(losses) == 24
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (("optimizer.step()", "optimizer.step(lambda: 0)"), "optimizer.step() was given a closure"),
        (("    optimizer.step()\n", "    optimizer.step()\n    optimizer.step()\n"), "step() was called twice"),
        (("run.backward(", "(lambda loss: loss.backward())("), "step() was called before the last backward()"),
        (("    run.backward(", "    def by_hand(loss):\n"
          "        inputs = [p for p in model.parameters() if p.requires_grad]\n"
          "        for p, g in zip(inputs, torch.autograd.grad(loss, inputs)): p.grad = g\n    by_hand("),
         "gradients of the loop's own, as of torch.autograd.grad or loss.backward(), which are those of this rank's"),
        (("    run.backward(", "    if run.steps_done: optimizer.step()\n    run.backward("),
         "before the last backward() of the batch; call backward() first"),
        (("for x, y in run.batches()", "import queue, threading\nahead = queue.Queue()\ndef fill():\n"
          "    for batch in run.batches(): ahead.put(batch); ahead.join()\n"
          "threading.Thread(target=fill, daemon=True).start()\nfor x, y in iter(ahead.get, None)"),
         "backward() was called in another thread than the one that took the batch"),
        (("for x, y", "shoal.start(model=model, optimizer=optimizer, data=data, steps=1)\nfor x, y"),
         "shoal.start was called again in a rank of run 'mine'"),
        (("for x, y", "shoal.train({'run': {'name': 'next', 'steps': 1}}, model=model, data=data)\nfor x, y"),
         "shoal.train was called in a rank of run 'mine'"),
        (("    optimizer.step()\n", "    optimizer.step()\n    optimizer.param_groups[0]['lr'] *= 0.9\n"),
         "the learning rate changed behind microbatch 1 of 3, in the middle of an update"),
        (("optimizer=optimizer", "optimizer=(optimizer, torch.optim.SGD(model[0].parameters(), lr=1))"),
         "two optimizers step 0.weight"),
        (("steps=24", "steps=24, epochs=2"), "pass epochs or steps, one of them"),
        (("steps=24", "epochs=0"), "epochs = 0: a run has at least 1"),
        (("data=data, batch_samples=12, steps=24", "data=[], batch_samples=12, epochs=1"),
         "the training data has no samples: give at least one"),
        (("    run.backward(", "    first = F.mse_loss(model(x), here := torch.ones(len(x), 4)); here.zero_()\n"
          "    run.backward(first, more=True)\n    run.backward("),
         "an earlier one needs was changed in place meanwhile"),
        (("run.batches()", "(batch for _, batches in run.epochs() for _, batch in zip(range(3), batches))"),
         "the loop left epoch 0 after 12 of its 48 samples and asked for the next"),
    ],
)  # fmt: skip
def test_mistakes_are_a_sentence(change: tuple[str, str], sentence: str, tmp_path: Path) -> None:
    assert change[0] in LOOP
    (tmp_path / "mine.py").write_text(LOOP.replace(*change))
    (code,) = run_script(tmp_path / "mine.py", tmp_path, "batch.micro_samples=4", world=1)
    said = (tmp_path / "rank-0.txt").read_text()
    assert code not in (0, 75)
    assert sentence in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("key", "what"),
    [("lr", "the learning rate"), pytest.param("weight_decay", "the weight decay", marks=pytest.mark.slow)],
)
def test_a_schedule_that_counts_microbatches_is_refused(key: str, what: str, tmp_path: Path) -> None:
    """Set by hand, for each batch that the loop is given. With two in a step no other one shows it."""
    change = (
        f"for number, (x, y) in enumerate(run.batches()):\n    optimizer.param_groups[0]['{key}'] = 0.01 / (1 + number)"
    )
    text = LOOP.replace("for x, y in run.batches():", change).replace("batch_samples=12", "batch_samples=8")
    (tmp_path / "mine.py").write_text(text)
    assert run_script(tmp_path / "mine.py", tmp_path, "batch.micro_samples=4", world=1) == [2]
    said = " ".join((tmp_path / "rank-0.txt").read_text().split())
    assert f"step 1: {what} changed before the backward() of microbatch 2 of 2, in the middle of an update" in said
    assert "run.steps_done" in said


@pytest.mark.parametrize(
    ("said_as", "warning"),
    [
        ("(model(x), y, reduction='sum'))", "the loss looks like a sum over the samples of a microbatch"),
        pytest.param(
            "(model(x), y, reduction='sum') / 2)",
            "the loss looks like a sum over the samples of a microbatch",
            marks=pytest.mark.slow,
        ),
        (
            "(model(x), y), reduction='sum')",
            'the loss is a mean, and reduction="sum" adds up those of all microbatches',
        ),
    ],
)
def test_a_sum_that_is_taken_for_a_mean_is_warned_of(said_as: str, warning: str, tmp_path: Path) -> None:
    """Or a mean for a sum: once, in the first step, where a microbatch is not the whole batch."""
    (tmp_path / "mine.py").write_text(LOOP.replace("(model(x), y))", said_as))
    assert run_script(tmp_path / "mine.py", tmp_path, "batch.micro_samples=4", world=1) == [0]
    said = (tmp_path / "rank-0.txt").read_text()
    assert said.count(warning) == 1


@pytest.mark.slow
def test_a_mean_that_weighs_more_than_one_is_no_sum(tmp_path: Path) -> None:
    """The loss of a distillation: "batchmean", times the square of the temperature."""
    loss = "(model(x), y) + 16 * F.kl_div(model(x), torch.ones(len(x), 4), reduction='batchmean'))"
    (tmp_path / "mine.py").write_text(LOOP.replace("(model(x), y))", loss))
    assert run_script(tmp_path / "mine.py", tmp_path, "batch.micro_samples=4", world=1) == [0]
    assert "looks like a sum" not in (tmp_path / "rank-0.txt").read_text()


@pytest.mark.parametrize(
    ("entered", "left_out"),
    [
        ("", True),
        pytest.param("with run.autocast(): ", False, marks=pytest.mark.slow),
        pytest.param("with torch.autocast('cpu', torch.bfloat16): ", False, marks=pytest.mark.slow),
    ],
)
def test_a_forward_outside_of_autocast_is_warned_of(entered: str, left_out: bool, tmp_path: Path) -> None:
    """A key that a script does not follow would leave it in float32."""
    (tmp_path / "mine.py").write_text(LOOP.replace("run.backward(", f"{entered}run.backward("))
    assert run_script(tmp_path / "mine.py", tmp_path, "precision.kind=bfloat16", world=1) == [0]
    said = (tmp_path / "rank-0.txt").read_text()
    assert said.count('precision.kind = "bfloat16", and the forward runs outside of run.autocast()') == left_out


def test_gradients_of_a_step_are_gone_before_the_next_ones_come(tmp_path: Path) -> None:
    """As in a plain loop: else there would be two of each in memory."""
    run_of(tmp_path, FREED, world=1)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_what_a_loop_does_with_gradients_between_microbatches_has_no_effect(world: int, tmp_path: Path) -> None:
    """The same weights to the bit, whether its body clamps, clips and wipes them in each, or once a step."""
    found = []
    for every in (True, False):
        (folder := tmp_path / str(every)).mkdir()
        run_of(folder, SHOWN.replace("EVERY", str(every)), "batch.micro_samples=2", world=world)
        found.append(load_file(folder / "weights.safetensors"))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.parametrize("world", [1, 2])
def test_a_gradient_is_clipped_by_the_norm_that_it_has(world: int, tmp_path: Path) -> None:
    """However the script has written into it, also where no version of a tensor counts that; and the next gradient is
    another, the same on all ranks.
    """
    run_of(tmp_path, WRITTEN, world=world)


SCHEDULED = (
    HEAD
    + """
import os
optimizer = torch.optim.AdamW(
    [{"params": model[0].parameters(), "lr": torch.tensor(0.02)}, {"params": model[4].parameters()}],
    lr=torch.tensor(0.01), betas=(torch.tensor(0.8), torch.tensor(0.9)),
)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
keys = {"run": {"name": "mine"}, "checkpoint": {"every_steps": 2}}
run = shoal.start(keys, model=model, optimizer=optimizer, data=data, batch_samples=12, steps=8, STATE)
for x, y in run.batches():
    run.backward(F.cross_entropy(model(x), y))
    optimizer.step()
    if run.update:
        scheduler.step()
    if run.steps_done == 4 and not os.path.exists("resumed"):
        break
else:
    run.export("weights.safetensors")
run.close()
"""
)
UNSAVED = "a scheduler moves the optimizer's rates, and state= is empty"


@pytest.mark.slow
@pytest.mark.parametrize("keys", [(), ("layout.shard=2", "memory.zero=1"), ("layout.shard=2", "memory.zero=3")])
def test_rates_and_decays_that_are_tensors_come_back_to_the_bit(keys: tuple[str, ...], tmp_path: Path) -> None:
    """Moved by a scheduler, which is saved with the run."""
    found = []
    for name in ("whole", "cut"):
        (folder := tmp_path / name).mkdir()
        (folder / "mine.py").write_text(SCHEDULED.replace("STATE", 'state={"scheduler": scheduler}'))
        if name == "cut":
            assert run_script(folder / "mine.py", folder, *keys, world=2) == [0, 0], (folder / "rank-0.txt").read_text()
        (folder / "resumed").touch()
        assert run_script(folder / "mine.py", folder, *keys, world=2) == [0, 0], (folder / "rank-0.txt").read_text()
        said = (folder / "rank-0.txt").read_text()
        assert ("resumed after step 4" in said) is (name == "cut")
        assert UNSAVED not in said
        found.append(load_file(folder / "weights.safetensors"))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.slow
def test_a_scheduler_that_is_not_saved_is_told(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SCHEDULED.replace(", STATE", ""))
    assert run_script(tmp_path / "mine.py", tmp_path, world=1) == [0], (tmp_path / "rank-0.txt").read_text()
    assert (tmp_path / "rank-0.txt").read_text().count(UNSAVED) == 1
