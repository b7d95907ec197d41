"""One training of a small stdlib GPT to a fixed held-out loss: how many steps it took, and the noise on the way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torch._C._distributed_c10d import PrefixStore, Store

from shoal.checkpoint.config import CheckpointConfig
from shoal.comm.config import WireConfig
from shoal.cost.noise_scale import Moments
from shoal.data.config import BatchConfig, StdlibText
from shoal.errors import Diverged
from shoal.launch.environment import Place
from shoal.models.config import GPTConfig
from shoal.observe.config import ObserveConfig
from shoal.optim.config import AdamW
from shoal.recipes.assembly import new_feed, new_state, new_step, new_sync
from shoal.recipes.objects import UserObjects
from shoal.recipes.setting import Setting, set_up
from shoal.runfile.run_file import RunConfig, RunFile

MODEL = GPTConfig(layers=2, width=64, heads=4, feed_forward="gelu", feed_forward_width=256, tied=True)
SEQUENCE, WARM_UP_STEPS, EVALUATE_EVERY, EVALUATED_SAMPLES, MOST_STEPS = 64, 20, 10, 256, 4000
BLOCK_STEPS = 20
"""Moments are averaged over so many steps before they are divided: the scale of a step alone is mostly chance."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Steps to the loss, interpolated between two evaluations, and the moments of every step."""

    steps: float
    moments: tuple[Moments, ...]

    @property
    def scales(self) -> list[float]:
        """B_noise of each step up to the loss, that of its block."""
        found: list[float] = []
        for first in range(0, int(self.steps), BLOCK_STEPS):
            block = self.moments[first : min(first + BLOCK_STEPS, int(self.steps))]
            signal, trace = sum(one.signal for one in block), sum(one.trace for one in block)
            before = found[-1] if found else 0.0
            found += [max(0.0, trace / signal) if signal > 0 else before] * len(block)
        return found


def run_file_of(folder: Path, *, batch: int, seed: int) -> RunFile:
    """A cut of recipes/stdlib-gpt.toml that reaches its loss within some hundred steps."""
    return RunFile(
        run=RunConfig(name="noise", steps=MOST_STEPS, seed=seed, directory=str(folder)),
        model=MODEL,
        data=StdlibText(),
        batch=BatchConfig(global_samples=batch, sequence=SEQUENCE),
        optimizer=AdamW(beta2=0.98, weight_decay=0.0),
        wire=WireConfig(timeout_s=600.0),
        checkpoint=CheckpointConfig(every_steps=0),
        observe=ObserveConfig(noise_every_steps=1, evaluate_samples=EVALUATED_SAMPLES),
    )


def train_to(loss: float, run_file: RunFile, place: Place, store: Store, *, lr: float) -> Trained:
    """Trains on all ranks; the same answer on each. Raises `Diverged` where `MOST_STEPS` do not reach the loss."""
    name = f"batch-{run_file.batch.global_samples}-seed-{run_file.run.seed}"
    setting = set_up(run_file, place, UserObjects(), store=PrefixStore(name, store))
    moments: list[Moments] = []
    before = (0, float("inf"))
    for number, found in _evaluations(setting, lr, moments):
        if found <= loss:
            share = (before[1] - loss) / (before[1] - found) if before[0] else 1.0
            return Trained(steps=before[0] + share * (number - before[0]), moments=tuple(moments))
        before = (number, found)
    raise Diverged(f"{name}: a loss of {loss} was not reached in {MOST_STEPS} steps; give a higher one")


def _evaluations(setting: Setting, lr: float, moments: list[Moments]) -> Iterator[tuple[int, float]]:
    """(step, held-out loss) every few steps of training; `moments` grows by one a step."""
    sync = new_sync(setting)
    state = new_state(setting, sync)
    step = new_step(setting, state, sync)
    with new_feed(setting, state.cursor) as feed:
        for number in range(1, MOST_STEPS + 1):
            rate = lr * min(1.0, number / WARM_UP_STEPS)
            noise = step(number, feed.next().microbatches, lr=rate).noise
            moments.append(noise.step if noise is not None else Moments(signal=0.0, trace=0.0))
            if number % EVALUATE_EVERY == 0:
                yield number, setting.evaluate()["loss/eval"]
