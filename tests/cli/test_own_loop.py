"""A user's own loop: scripts written for one process, changed in a few lines, on several ranks. Real processes."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.cli.project import Project, project, ranks_of
from tests.ports import free_port
from tests.waiting import HANG_S, wait_until

PLAIN = """
import json, sys
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
inputs = torch.randn(60, 8)
targets = (inputs[:, 0] > 0).long() + 2 * (inputs[:, 1] > 0).long()
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
"""
OWN = (
    PLAIN
    + """
import os, shoal, time
data = torch.utils.data.TensorDataset(inputs, targets)
run = shoal.start({"run": {"name": "own"}}, sys.argv[1:], model=model, optimizer=optimizer, data=(data, data),
                  batch_samples=12, epochs=2, state={"scheduler": scheduler})
for number, (x, y) in enumerate(run.batches(), start=1):
    while HELD:
        time.sleep(0.01)
    run.backward(F.cross_entropy(run.model(x), y))
    if run.step(clip_norm=1.0):
        scheduler.step()
right = sum(float((run.model(x).argmax(1) == y).sum()) for x, y in run.held_out())
right = run.sum(right)
if run.rank == 0:
    print(json.dumps({"right": right, "lr": optimizer.param_groups[0]["lr"], "epoch": run.epoch}))
run.close()
"""
)
HELD = 'number == 8 and not os.path.exists(sys.argv[1] + ".go")'
"""Whether a life of the script waits: in its eighth step, for a file that is named after the run."""
ONE_PROCESS = (
    PLAIN
    + """
from shoal.data.order import Order
order, losses = Order(60, 0), []
for step in range(10):
    ids = torch.as_tensor(order.ids(torch.arange(12 * step, 12 * step + 12).numpy()))
    optimizer.zero_grad()
    loss = F.cross_entropy(model(inputs[ids]), targets[ids])
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    losses.append(float(loss))
right = float((model(inputs).argmax(1) == targets).sum())
print(json.dumps({"losses": losses, "right": right, "lr": optimizer.param_groups[0]["lr"]}))
"""
)


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Project:
    made = project(tmp_path_factory.mktemp("own"))
    (made.folder / "plain.py").write_text(ONE_PROCESS)
    (made.folder / "own.py").write_text(OWN.replace("HELD", "False"))
    (made.folder / "held.py").write_text(OWN.replace("HELD", HELD))
    return made


def losses_of(own: Project, run: str) -> dict[int, float]:
    """The loss of each step; what a later attempt computed again counts."""
    events = own.events(f"runs/{run}")
    return {event.step: loss for event in events if (loss := event.get("loss/train")) is not None}


@pytest.fixture(scope="module")
def plain(own: Project) -> dict:
    """The script without Shoal, in one process."""
    return json.loads(own.python("plain.py").stdout)


@pytest.mark.matrix(every=3)
@pytest.mark.parametrize(
    "layout",
    [
        "run.processes=1 batch.micro_samples=5",
        "run.processes=3 batch.micro_samples=2",
        "layout.shard=2 memory.zero=1",
        "layout.shard=2 memory.zero=3 batch.micro_samples=3",
    ],
)
def test_a_loop_computes_what_it_did_in_one_process(own: Project, plain: dict, layout: str) -> None:
    """Losses, learning rate and accuracy are those of the plain script, on any number of ranks and under ZeRO."""
    name = layout.replace(" ", "-").replace("=", "-")
    done = own.python("own.py", *layout.split(), f"run.name={name}")
    assert done.returncode == 0, done.stderr
    losses = losses_of(own, name)
    assert list(losses) == list(range(1, 11))
    assert list(losses.values()) == pytest.approx(plain["losses"], rel=2e-6)
    said = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    assert said["lr"] == plain["lr"]
    assert said["right"] == plain["right"]
    assert said["epoch"] == 2.0
    facts = json.loads((own.folder / "runs" / name / "facts.json").read_text())
    assert facts["state"] == "finished"


@pytest.mark.slow
def test_a_killed_loop_goes_on_with_other_ranks(own: Project, plain: dict) -> None:
    """Killed on two ranks in mid-run and started again on three: the losses of the plain script, its learning rates."""
    command = ("held.py", "run.name=killed", "checkpoint.every_steps=2")
    running = own.start(*command, "run.processes=2", module=())
    own.wait_for_step(5, run="runs/killed")
    wait_until(lambda: own.newest_checkpoint("runs/killed") > 0)
    os.kill(ranks_of(running)[-1], signal.SIGKILL)
    (own.folder / "run.name=killed.go").touch()
    assert running.wait(HANG_S) == 128 + signal.SIGKILL
    done = own.python(*command, "run.processes=3")
    assert done.returncode == 0, done.stderr
    losses = losses_of(own, "killed")
    assert [losses[step] for step in range(1, 11)] == pytest.approx(plain["losses"], rel=2e-6)
    said = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    assert (said["lr"], said["right"]) == (plain["lr"], plain["right"])
    assert "resuming from the checkpoint" in done.stdout


def test_a_signal_ends_a_loop_after_a_checkpoint(own: Project, plain: dict) -> None:
    """SIGTERM: exit 75 at the next step; the same command goes on."""
    command = ("held.py", "run.name=stopped", "run.processes=1")
    running = own.start(*command, module=())
    own.wait_for_step(3, run="runs/stopped")
    running.send_signal(signal.SIGTERM)
    (own.folder / "run.name=stopped.go").touch()
    assert running.wait(HANG_S) == 75
    done = own.python(*command)
    assert done.returncode == 0, done.stderr
    losses = losses_of(own, "stopped")
    assert [losses[step] for step in range(1, 11)] == pytest.approx(plain["losses"], rel=2e-6)


def test_what_a_script_raises_ends_its_run(own: Project) -> None:
    """The script's own error: exit 1, its own traceback without Shoal's frames, and a report that names it."""
    (own.folder / "broken.py").write_text(
        OWN.replace("HELD", "False").replace("        scheduler.step()", "        raise ArithmeticError('a mistake')")
    )
    done = own.python("broken.py", "run.name=broken", "run.processes=2")
    assert done.returncode == 1
    assert "ArithmeticError: a mistake" in done.stderr
    assert "shoal/own_loop" not in done.stderr
    assert "shoal/engine" not in done.stderr
    facts = json.loads((own.folder / "runs/broken/facts.json").read_text())
    assert (facts["state"], facts["failure"]["cause"]) == ("failed", "ArithmeticError: a mistake")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (("    if run.step(clip_norm=1.0):\n        scheduler.step()\n", ""), "step() was not called for microbatch 1"),
        (("    run.backward(", "    loss = ("), "step() was called before the last backward()"),
        (("run.backward(F.cross_entropy(run.model(x), y))", "[run.backward(run.model(x).sum()) for _ in 'ab']"),
         "backward() was called again for one batch"),
        (("run.backward(F.cross_entropy(run.model(x), y))", "run.backward(run.model(x))"),
         "the loss is of shape (12, 4); backward() takes a scalar"),
        (("optimizer=optimizer", "optimizer=torch.optim.SGD([nn.Parameter(x0)], lr=1)"), "not in the model"),
        (("optimizer=optimizer", "optimizer=torch.optim.SGD(model[0].parameters(), lr=1)"),
         "the optimizer does not step 2.weight, which requires a gradient"),
        (('{"run": {"name": "own"}}', '{"optimizer": {"kind": "sgd"}}'), "[optimizer] is for runs without a loop"),
        (("epochs=2, ", ""), "pass epochs or steps, one of them"),
        (("sys.argv[1:]", '["batch.adaptive.first=4", "observe.noise_every_steps=1"]'),
         "epochs with batch.adaptive: the noise decides"),
        (("sys.argv[1:]", '["layout.pipeline=2"]'), "layout.pipeline = 2: a script's own loop can be"),
        (("sys.argv[1:]", '["run.processes=2", "sync.kind=\\"server\\"", "sync.servers=1"]'),
         "sync.servers = 1: dedicated servers run no script"),
        (("    run.backward(", "    g = torch.amp.GradScaler('cpu')\n    run.backward(g.scale(torch.ones(())) * "),
         "the script scales its loss by a GradScaler"),
        (("run = shoal", "dist = torch.distributed\n"
          "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\nrun = shoal"),
         "the script has called torch.distributed.init_process_group"),
        (("data=(data, data)", "data=5"), "the data is of type int" ),
    ],
)  # fmt: skip
def test_what_a_loop_may_not_do(own: Project, change: tuple[str, str], sentence: str) -> None:
    """Each mistake is one sentence, and no hang."""
    script = OWN.replace("HELD", "False").replace(
        "import os, shoal, time", "import os, shoal, time\nx0 = torch.zeros(3)"
    )
    assert change[0] in script
    (own.folder / "wrong.py").write_text(script.replace(*change))
    done = own.python("wrong.py", "run.processes=1")
    assert done.returncode not in (0, 75)
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


def test_the_script_of_the_documentation_runs(own: Project) -> None:
    """The first block of docs/own-loop.md, as it stands."""
    page = (Path(__file__).parents[2] / "docs/own-loop.md").read_text()
    (own.folder / "mine.py").write_text(page.split("```python\n")[1].split("```")[0])
    done = own.python("mine.py", "run.processes=2")
    assert done.returncode == 0, done.stderr
    assert len(losses_of(own, "mine")) == 16


def test_weights_of_the_loop(own: Project) -> None:
    """A loss that is the mean over tokens, with their number as weight: on three ranks the mean over all tokens of the
    global batch, as in one process."""
    body = """
    count = (y % 3 + 1).float()
    per_sample = F.cross_entropy(run.model(x), y, reduction="none")
    run.backward((per_sample * count).sum() / count.sum(), weight=float(count.sum()))
"""
    script = OWN.replace("HELD", "False").replace("    run.backward(F.cross_entropy(run.model(x), y))\n", body[1:])
    (own.folder / "weighed.py").write_text(script)
    for name, layout in (("one", "batch.micro_samples=5"), ("three", "run.processes=3")):
        done = own.python("weighed.py", layout, f"run.name={name}")
        assert done.returncode == 0, done.stderr
    first, third = (list(losses_of(own, name).values()) for name in ("one", "three"))
    assert third == pytest.approx(first, rel=2e-6)
    assert len(first) == 10


@pytest.mark.stress
@pytest.mark.parametrize("command", ["shoal launch", "torchrun"])
def test_a_loop_under_a_launcher(own: Project, plain: dict, command: str) -> None:
    """Two ranks of `shoal launch`, and of torchrun: the losses of the plain script."""
    name = command.replace(" ", "-")
    script = ("own.py", f"run.name={name}")
    if command == "torchrun":
        nodes = ("--nnodes=1", "--nproc-per-node=2", "--master-addr=127.0.0.1", f"--master-port={free_port()}")
        done = own.python("-m", "torch.distributed.run", *nodes, *script)
    else:
        done = own.shoal("launch", "-n", "2", *script)
    assert done.returncode == 0, done.stderr
    assert list(losses_of(own, name).values()) == pytest.approx(plain["losses"], rel=2e-6)
