"""Scripts of `lightning.Trainer` train as under it in one process, on any layout, and go on after a kill."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.cli.warm_scripts import compare_script, run_plain, run_script

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed"),
]
SHARDED = ("layout.shard=2", "memory.zero=3")
ROUNDING = 1e-5
"""Of losses and weights: AdamW in float32 over some ten steps, summed in two orders."""

HEAD = """
import json, os
from contextlib import nullcontext
import torch
import torch.nn.functional as F
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import lightning as L
from lightning.pytorch.callbacks import Callback, EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.environments import LightningEnvironment
from SOURCE import Trainer

# Lightning's own search for a launcher starts MPI where mpi4py is installed
ALONE = {"plugins": LightningEnvironment()} if "SOURCE" == "lightning" else {}
L.seed_everything(0)
drawn = torch.Generator().manual_seed(0)

def left(trainer, module, **said):
    from safetensors.torch import save_file
    with trainer.full_parameters() if hasattr(trainer, "full_parameters") else nullcontext():
        state = {n: v.detach().clone() for n, v in module.state_dict().items()}
    if trainer.is_global_zero:
        save_file(state, "weights")
        print(json.dumps({"said": said}))
"""

# Metrics of a step and of an epoch, a schedule by steps, clipping, accumulation, hooks, callbacks, a logger, a test.
CLASSES = (
    HEAD
    + """
class Classes(L.LightningModule):
    def __init__(self, rate=1e-2, dropout=DROPOUT):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 4))
        self.right = torchmetrics.Accuracy(task="multiclass", num_classes=4)
        self.events = []
    def forward(self, x):
        return self.net(x)
    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train", loss, on_step=True, on_epoch=True, sync_dist=True, prog_bar=True)
        logged = self.trainer.fit_loop.epoch_loop._batches_that_stepped  # under which number, in a logger
        self.events.append([self.current_epoch, self.global_step, batch_idx, logged])
        return {"loss": loss, "rows": len(y)}
    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.right(logits, y)
        self.log_dict({"val": F.cross_entropy(logits, y), "right": self.right}, prog_bar=True)
    def test_step(self, batch, batch_idx):
        x, y = batch
        self.log("test", F.cross_entropy(self(x), y))
        self.log("most", self(x).max(), reduce_fx="max")
    def on_before_optimizer_step(self, optimizer):
        self.events.append("before")
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.rate, weight_decay=0.1)
        steps = int(self.trainer.estimated_stepping_batches)
        self.events.append(["steps", steps])
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

class Seen(Callback):
    found = []
    def on_validation_epoch_end(self, trainer, module):
        if not trainer.sanity_checking:
            names = [name for name in ("val", "right") if name in trainer.callback_metrics]
            self.found.append([float(trainer.callback_metrics[name]) for name in names])
    def on_train_epoch_end(self, trainer, module):
        self.found.append([float(trainer.callback_metrics["train_epoch"])])

x = torch.randn(SAMPLES, 8, generator=drawn)
y = torch.randint(0, 4, (SAMPLES,), generator=drawn)
train = DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True)
held_out = DataLoader(TensorDataset(x[:10], y[:10]), batch_size=4)
module = Classes()
best = ModelCheckpoint(dirpath="best", monitor="val", save_last=True)
trainer = Trainer(max_epochs=EPOCHS, val_check_interval=CHECKS, accelerator="cpu", devices=1, **ALONE,
    accumulate_grad_batches=2, gradient_clip_val=0.5,
    logger=CSVLogger("logs"), log_every_n_steps=1, callbacks=[Seen(), best, LearningRateMonitor(),
    EarlyStopping("val", patience=99)], enable_progress_bar=False, enable_model_summary=False)
trainer.fit(module, train, held_out)
after = [trainer.global_step, trainer.current_epoch, module.events]
tested = trainer.test(module, held_out, verbose=False)
left(trainer, module, after=after, seen=Seen.found, tested=tested, best=float(best.best_model_score),
    best_tested=trainer.test(ckpt_path="best", dataloaders=held_out, verbose=False), loaded=float(
        Classes.load_from_checkpoint(best.best_model_path).net[0].weight.double().sum()),
    rate=trainer.lr_scheduler_configs[0].scheduler.get_last_lr())
"""
)

# In float64: a data module, an uneven last batch, schedules by epochs and by a metric, validation within an epoch.
IMAGES = (
    HEAD
    + """
class Images(L.LightningDataModule):
    def setup(self, stage):
        self.data = TensorDataset(torch.randn(22, 6, generator=drawn))
    def train_dataloader(self):
        return DataLoader(self.data, batch_size=4, shuffle=True)
    def val_dataloader(self):
        return [DataLoader(self.data, batch_size=4), DataLoader(self.data, batch_size=8)]

class Encoder(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Sequential(nn.Linear(6, 3), nn.Tanh()), nn.Linear(3, 6)
    def training_step(self, batch):
        (x,) = batch
        loss = F.mse_loss(self.out(self.into(x)), x)
        self.log("loss", loss, on_epoch=True, on_step=False)
        return loss
    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        (x,) = batch
        self.log("val", F.mse_loss(self.out(self.into(x)), x))
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, factor=0.5, patience=0, threshold=0.2), "monitor": "loss", "frequency": 1}}

module = Encoder()
trainer = Trainer(max_epochs=4, accelerator="cpu", devices=1, **ALONE, precision="64-true", val_check_interval=0.5,
    num_sanity_val_steps=0, logger=False, enable_progress_bar=False, enable_model_summary=False)
trainer.fit(module, datamodule=Images())
found = trainer.validate(module, datamodule=Images(), verbose=False)
left(trainer, module, rate=trainer.optimizers[0].param_groups[0]["lr"], validated=found)
"""
)

# A transformer, groups, clipping by value, an end by steps, an epoch that is left in its middle.
TOKENS = (
    HEAD
    + """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attends = nn.MultiheadAttention(16, 2, bias=False, batch_first=True)
        self.one, self.other = nn.LayerNorm(16), nn.LayerNorm(16)
        self.net = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        y = self.one(x)
        x = x + self.attends(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.net(self.other(x))

class GPT(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(20, 16), nn.Embedding(12, 16)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(16, 20)
    def forward(self, ids):
        return self.head(self.blocks(self.words(ids) + self.places(torch.arange(ids.shape[1]))))
    def loss_weight(self, batch):
        return float((batch["labels"] != -100).sum())
    def training_step(self, batch, batch_idx):
        logits = self(batch["ids"])
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        self.log("loss", loss)
        return loss
    def on_train_epoch_start(self):
        self.seen = 0
        if EARLY and self.current_epoch:
            self.lr_schedulers().step()
    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen += 1
    def configure_optimizers(self):
        plain = [p for p in self.parameters() if p.dim() < 2]
        decayed = [p for p in self.parameters() if p.dim() > 1]
        optimizer = torch.optim.AdamW([{"params": plain, "weight_decay": 0.0}, {"params": decayed}], lr=3e-3)
        warm = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / 12))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warm, "interval": "step", "frequency": 2}}

def row(many):
    ids = torch.randint(0, 20, (12,), generator=drawn)
    return {"ids": ids, "labels": torch.where(torch.arange(12) < many, ids.roll(-1), -100)}
data = [row(4 + n % 8 if UNEVEN else 9) for n in range(24)]
module = GPT()
trainer = Trainer(max_steps=STEPS, accelerator="cpu", devices=1, **ALONE, gradient_clip_val=0.01,
    gradient_clip_algorithm="value", accumulate_grad_batches=ACCUMULATES, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False)
trainer.fit(module, DataLoader(data, batch_size=8 // ACCUMULATES, shuffle=True))
left(trainer, module, steps=trainer.global_step)
"""
)

# Two optimizers by hand: with toggles, or with two losses of one and without.
ADVERSARIES = (
    HEAD
    + """
class GAN(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.g = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 2))
        self.d = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 1))
    def training_step(self, batch, batch_idx):
        real, noise = batch
        of_g, of_d = self.optimizers()
        if TOGGLES:
            self.toggle_optimizer(of_g)
        loss = F.softplus(-self.d(self.g(noise))).mean()
        of_g.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(of_g, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        of_g.step()
        if TOGGLES:
            self.untoggle_optimizer(of_g)
            self.toggle_optimizer(of_d)
        of_d.zero_grad()
        self.manual_backward(F.softplus(-self.d(real)).mean())
        self.manual_backward(F.softplus(self.d(self.g(noise).detach())).mean())
        of_d.step()
        if TOGGLES:
            self.untoggle_optimizer(of_d)
        self.log_dict({"g": loss, "step": float(self.global_step)}, on_epoch=True)
    def on_train_epoch_end(self):
        for each in self.lr_schedulers():
            each.step()
    def configure_optimizers(self):
        both = [torch.optim.Adam(each.parameters(), 1e-2) for each in (self.g, self.d)]
        return both, [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in both]

real, noise = torch.randn(24, 2, generator=drawn), torch.randn(24, 3, generator=drawn)
module = GAN()
trainer = Trainer(max_epochs=3, accelerator="cpu", devices=1, **ALONE, logger=False, enable_progress_bar=False,
    enable_checkpointing=False, enable_model_summary=False)
trainer.fit(module, DataLoader(TensorDataset(real, noise), 8, shuffle=True))
left(trainer, module, steps=trainer.global_step, rates=[each.param_groups[0]["lr"] for each in trainer.optimizers])
"""
)

# Evaluations that two ranks cannot share evenly: of one sample a batch, and of a DataLoader with batches of its own.
COUNTS = (
    HEAD
    + """
from lightning.pytorch.callbacks import TQDMProgressBar
from torch.utils.data import BatchSampler, SequentialSampler

class Counts(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(8, 4)
        self.right, self.of_training = (torchmetrics.Accuracy(task="multiclass", num_classes=4) for _ in range(2))
    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        self.of_training(logits, y)
        self.log("of_training", self.of_training, on_epoch=True, on_step=False)
        self.log("trained", float(len(y)), reduce_fx="sum", on_epoch=True, on_step=False)
        return F.cross_entropy(logits, y)
    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        x, y = batch
        logits = self.net(x)
        self.right(logits, y)
        self.log("right", self.right)
        self.log("samples", float(len(y)), reduce_fx="sum")
        self.log("loss", F.cross_entropy(logits, y), on_step=True, on_epoch=True, sync_dist=True)
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

data = TensorDataset(torch.randn(9, 8, generator=drawn), torch.randint(0, 4, (9,), generator=drawn))
own = BatchSampler(SequentialSampler(data), 4, False)
held_out = [DataLoader(data, batch_size=1), DataLoader(data, batch_sampler=own)]
module = Counts()
trainer = Trainer(max_epochs=2, accelerator="cpu", devices=1, **ALONE, logger=False, enable_checkpointing=False,
    num_sanity_val_steps=0, callbacks=[TQDMProgressBar()], enable_model_summary=False)
trainer.fit(module, DataLoader(data, batch_size=4), held_out)
found = {name: float(value) for name, value in sorted(trainer.callback_metrics.items())}
left(trainer, module, found=found, validated=trainer.validate(module, held_out[:1], verbose=False))
"""
)


def script(folder: Path, text: str, source: str, **constants: Any) -> Path:
    defaults = {
        "SAMPLES": 24,
        "DROPOUT": 0.0,
        "EPOCHS": 3,
        "STEPS": 7,
        "ACCUMULATES": 1,
        "UNEVEN": False,
        "EARLY": False,
    }
    for name, value in (defaults | {"TOGGLES": True, "EARLY": False, "CHECKS": 1.0} | constants).items():
        text = text.replace(name, repr(value))
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "mine.py"
    file.write_text(text.replace("SOURCE", source))
    return file


def said(printed: str) -> dict[str, Any]:
    return json.loads(next(line for line in printed.splitlines() if line.startswith('{"said')))["said"]


def plain(folder: Path, text: str, **constants: Any) -> dict[str, Any]:
    return said(run_plain(script(folder, text, "lightning", **constants), folder))


def ours(folder: Path, text: str, *keys: str, world: int, **constants: Any) -> dict[str, Any]:
    codes = run_script(script(folder, text, "shoal.lightning", **constants), folder, *keys, world=world)
    printed = (folder / "rank-0.txt").read_text()
    assert codes == [0] * world, printed
    return said(printed)


def assert_alike(folder: Path, expected: Path, rounding: float = ROUNDING) -> None:
    one, other = load_file(folder / "weights"), load_file(expected / "weights")
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].dtype == other[name].dtype
        assert float((one[name] - other[name]).abs().max()) <= rounding, name


def assert_near(found: Any, expected: Any) -> None:
    """Numbers in equal structures."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert_near(found[name], value)
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_near(one, other)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=ROUNDING)
    else:
        assert found == expected


@pytest.mark.parametrize("text", [CLASSES, IMAGES, TOKENS, ADVERSARIES], ids=["classes", "images", "tokens", "gan"])
def test_it_trains_as_lightning_does(text: str, tmp_path: Path) -> None:
    """What the script sees (metrics, schedules, hooks, counts, the best checkpoint), and its weights, are those of one
    process of Lightning: on one rank, on two, and under ZeRO-1 and -3 on two.
    """
    expected = plain(tmp_path / "plain", text)
    for world, keys in ((1, ()), (2, ()), (2, ("layout.shard=2", "memory.zero=1")), (2, SHARDED)):
        folder = tmp_path / f"{world}{'-'.join(keys)}"
        assert_near(ours(folder, text, *keys, world=world), expected)
        assert_alike(folder, tmp_path / "plain", 1e-13 if text is IMAGES else ROUNDING)


MID = CLASSES.replace("CHECKS", "3")
COPIES = CLASSES.replace("accumulate_grad_batches=2", "accumulate_grad_batches=1").replace("SAMPLES", "25")
FSDP = TOKENS.replace("logger=False", 'logger=False, **({} if ALONE else {"strategy": "fsdp"})')
LIMITED = TOKENS.replace("max_steps=STEPS", "limit_train_batches=2, max_epochs=3").replace(
    "shuffle=True", "shuffle=False"
)
ITEMS = TOKENS.replace(
    "DataLoader(data, batch_size=8 // ACCUMULATES, shuffle=True)", "DataLoader(Items(), batch_size=8)"
).replace(
    "module = GPT()",
    """
class Items(torch.utils.data.IterableDataset):
    def __iter__(self):
        for _ in range(4):
            yield from data
module = GPT()
""",
)
AVERAGE = TOKENS.replace("logger=False", "callbacks=[EMAWeightAveraging(decay=0.9)], logger=False").replace(
    "import lightning as L", "import lightning as L\nfrom lightning.pytorch.callbacks import EMAWeightAveraging"
)
OLD = TOKENS.replace("lightning as L", "pytorch_lightning as L").replace(
    "from lightning.pytorch", "from pytorch_lightning"
)


@pytest.mark.parametrize(
    "text",
    [MID, COPIES, FSDP, LIMITED, ITEMS, AVERAGE],
    ids=["validated-in-a-step", "fewer-samples-than-ranks", "fsdp", "limited", "iterable", "average"],
)
def test_so_do_other_scripts(text: str, tmp_path: Path) -> None:
    """On two ranks, one of which may have no sample of a batch: the copy that it computes counts for nothing."""
    expected = plain(tmp_path / "plain", text)
    assert_near(ours(tmp_path / "two", text, world=2), expected)
    assert_alike(tmp_path / "two", tmp_path / "plain")


def test_a_copy_of_a_sample_counts_in_no_metric(tmp_path: Path) -> None:
    """Sums, means and metric objects are those of one process where a rank has no sample of a batch, and where a
    DataLoader has batches of its own, which every rank computes.
    """
    expected = plain(tmp_path / "plain", COUNTS)
    assert expected["found"]["samples/dataloader_idx_0"] == expected["found"]["samples/dataloader_idx_1"] == 9
    assert_near(ours(tmp_path / "two", COUNTS, world=2), expected)
    assert_alike(tmp_path / "two", tmp_path / "plain")


def test_rank_0_says_when_a_time_is_over(tmp_path: Path) -> None:
    """Clocks of ranks differ, and all of them validate behind the same batch."""
    text = TOKENS.replace("logger=False", "val_check_interval={'hours': 1}, callbacks=[Clock()], logger=False").replace(
        "def row(many)",
        """
class Clock(Callback):
    def on_train_batch_end(self, trainer, *others):
        late = trainer.global_step == 3 if trainer.is_global_zero else trainer.global_step < 6
        trainer._last_val_time = float("-inf") if late else float("inf")
    def on_validation_end(self, trainer, module):
        if not trainer.sanity_checking:
            found.append(trainer.global_step)
found = []
GPT.validation_step = lambda self, batch, batch_idx: None
def row(many)""",
    )
    text = text.replace("shuffle=True))", "shuffle=True), DataLoader(data, 8))").replace(
        "module, steps=", "module, found=found, steps="
    )
    assert ours(tmp_path, text, world=2)["found"] == [3]


def test_modules_of_the_other_package_train_too(tmp_path: Path) -> None:
    """Those of `pytorch_lightning`, as those of `lightning`."""
    expected = plain(tmp_path / "plain", TOKENS)
    assert_near(ours(tmp_path / "two", OLD, world=2), expected)
    assert_alike(tmp_path / "two", tmp_path / "plain")


def test_an_average_that_a_callback_keeps_goes_on(tmp_path: Path) -> None:
    """What callbacks add to a checkpoint of Lightning's is in those of the run; a hook that is called again, as the
    module is a new one, steps no scheduler a second time.
    """
    keys = "checkpoint.every_steps=2"
    ours(tmp_path / "whole", AVERAGE, keys, world=2, EARLY=True)
    file = script(tmp_path / "cut", AVERAGE, "shoal.lightning", EARLY=True)
    assert run_script(file, tmp_path / "cut", keys, world=2, dies_at=6)[-1] == -9
    ours(tmp_path / "cut", AVERAGE, keys, world=2, EARLY=True)
    assert step_of_resume(tmp_path / "cut") > 0
    assert_alike(tmp_path / "cut", tmp_path / "whole", rounding=0)


def test_two_losses_of_one_optimizer_need_no_toggles(tmp_path: Path) -> None:
    """Each loss is of the optimizer that steps behind it."""
    plain(tmp_path / "plain", ADVERSARIES, TOGGLES=False)
    ours(tmp_path / "two", ADVERSARIES, *SHARDED, world=2, TOGGLES=False)
    assert_alike(tmp_path / "two", tmp_path / "plain")


def test_uneven_labels_weigh_alike_in_batches_of_any_size(tmp_path: Path) -> None:
    """A module with `loss_weight` trains in two batches a step on two ranks as in one batch in one process, though the
    mean over labels of each is over another number.
    """
    text = TOKENS.replace('"frequency": 2', '"frequency": 1')  # it counts batches
    expected = plain(tmp_path / "plain", text, UNEVEN=True)
    found = ours(tmp_path / "two", text, *SHARDED, world=2, UNEVEN=True, ACCUMULATES=2)
    assert found == expected
    assert_alike(tmp_path / "two", tmp_path / "plain")


def test_the_processes_of_the_script_make_the_batch(tmp_path: Path) -> None:
    """`devices=2` with a batch of 2 is a batch of 4, on one rank and on two."""
    expected = plain(tmp_path / "plain", CLASSES)
    text = CLASSES.replace("devices=1", "devices=2").replace("batch_size=4", "batch_size=2")
    for world in (1, 2):
        folder = tmp_path / str(world)
        assert_near(ours(folder, text, world=world), expected)
        assert_alike(folder, tmp_path / "plain")


def step_of_resume(folder: Path) -> int:
    (step,) = re.findall(r"resuming from the checkpoint of step (\d+)", (folder / "rank-0.txt").read_text())
    return int(step)


@pytest.mark.parametrize(("world", "keys"), [(1, ()), (2, ()), (2, SHARDED)])
@pytest.mark.parametrize(("dies_at", "within"), [(17, False), (27, True)])
def test_a_killed_script_goes_on_bit_by_bit(
    world: int, keys: tuple[str, ...], dies_at: int, within: bool, tmp_path: Path
) -> None:
    """By the same command, within an epoch and at its beginning, with dropout and an epoch that does not divide: the
    same bits, schedules, metrics of epochs, and best checkpoint.
    """
    constants = {"SAMPLES": 58, "DROPOUT": 0.1, "EPOCHS": 3}  # 15 batches, 8 steps
    constants["CHECKS"] = 2 if within else 1.0  # a validation behind each step, where a checkpoint is
    whole = ours(tmp_path / "whole", CLASSES, *keys, "checkpoint.every_steps=2", world=world, **constants)
    cut = tmp_path / "cut"
    keys = (*keys, "checkpoint.every_steps=2")
    file = script(cut, CLASSES, "shoal.lightning", **constants)
    assert run_script(file, cut, *keys, world=world, dies_at=dies_at)[-1] == -9
    resumed = ours(cut, CLASSES, *keys, world=world, **constants)
    assert step_of_resume(cut) > (8 if within else 0)
    events = [each for each in resumed["after"][2] if each[0] != "steps"]
    assert whole["after"][2][-len(events) :] == events
    assert resumed["after"][:2] == whole["after"][:2]
    assert resumed["seen"] == whole["seen"][-len(resumed["seen"]) :]
    for name in ("tested", "best", "best_tested", "loaded", "rate"):
        assert resumed[name] == whole[name]
    assert_alike(cut, tmp_path / "whole", rounding=0)

    again = ours(cut, CLASSES, *keys, world=world, **constants)  # it is finished
    assert [each for each in again["after"][2] if each[0] != "steps"] == []
    assert_alike(cut, tmp_path / "whole", rounding=0)


def test_a_stop_is_kept(tmp_path: Path) -> None:
    """`EarlyStopping` finishes the run: started again, it trains no more."""
    text = CLASSES.replace("patience=99", "patience=1, min_delta=9.0")
    expected = plain(tmp_path / "plain", text, EPOCHS=6)
    folder = tmp_path / "two"
    assert_near(ours(folder, text, world=2, EPOCHS=6), expected)
    before = load_file(folder / "weights")
    again = ours(folder, text, world=2, EPOCHS=6)
    assert [each for each in again["after"][2] if each[0] != "steps"] == []
    assert all(bool((value == before[name]).all()) for name, value in load_file(folder / "weights").items())


def test_a_signal_ends_in_a_checkpoint(tmp_path: Path) -> None:
    """SIGTERM of one rank stops all of them behind a step, with exit code 75; the same command goes on to the same
    bits.
    """
    constants = {"DROPOUT": 0.1}
    ours(tmp_path / "whole", CLASSES, world=2, **constants)
    stops = "if self.global_step == 4 and self.trainer.is_global_zero: os.kill(os.getpid(), 15)\n        x, y = batch"
    cut = tmp_path / "cut"
    stopped = CLASSES.replace("x, y = batch", stops, 1)
    assert run_script(script(cut, stopped, "shoal.lightning", **constants), cut, world=2) == [75, 75]
    ours(cut, CLASSES, world=2, **constants)
    assert_alike(cut, tmp_path / "whole", rounding=0)


def test_it_is_verified(tmp_path: Path) -> None:
    """`shoal verify` takes the script as any other, accumulation and metrics that a schedule follows included, and
    finds a loss that is weighed wrongly.
    """
    for name, text, constants in (
        ("classes", CLASSES, {}),
        ("images", IMAGES, {}),
        ("tokens", TOKENS, {"UNEVEN": True, "ACCUMULATES": 2}),
        ("gan", ADVERSARIES, {}),
    ):
        file = script(tmp_path / name, text, "shoal.lightning", **constants)
        verdict = compare_script(file, tmp_path / name, world=2)
        assert not isinstance(verdict, str), verdict
        assert max(each.difference for each in verdict.findings) < 1e-12, name
    wrong = TOKENS.replace("def loss_weight", "def other")
    file = script(tmp_path / "wrong", wrong, "shoal.lightning", UNEVEN=True, ACCUMULATES=2)
    verdict = compare_script(file, tmp_path / "wrong", world=2)
    assert not isinstance(verdict, str), verdict
    assert max(each.difference for each in verdict.findings) > 1e-4


def test_the_script_of_the_page_runs(tmp_path: Path) -> None:
    """On two ranks, as the page starts it, and what it logs is in the run's log."""
    page = Path(__file__).parents[2] / "docs" / "migration" / "lightning.md"
    (code,) = re.findall(r"## One import\n```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
    (tmp_path / "mine.py").write_text(code)
    codes = run_script(tmp_path / "mine.py", tmp_path, world=2)
    assert codes == [0, 0], (tmp_path / "rank-0.txt").read_text()
    assert "val_loss" in (tmp_path / "output/shoal/events/rank-00000.jsonl").read_text()
