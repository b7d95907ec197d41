"""The run that the benchmarks measure: a GPT of five million parameters on random bytes, without evaluations."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import numpy as np

from shoal.checkpoint.agreement import Exchange
from shoal.checkpoint.config import CheckpointConfig
from shoal.checkpoint.save import Saver
from shoal.comm.config import WireConfig
from shoal.data.config import BatchConfig, Tokens
from shoal.engine.loop import Job
from shoal.engine.recovery import NonfiniteGuard
from shoal.models.config import GPTConfig
from shoal.observe.display import SilentDisplay
from shoal.observe.events import EventWriter
from shoal.recipes.assembly import new_feed, new_state, new_step, new_sync
from shoal.recipes.setting import Setting
from shoal.runfile.run_file import RunConfig, RunFile

SEQUENCE = 128
MODEL = GPTConfig(layers=6, width=256, heads=8, feed_forward="gelu", feed_forward_width=1024)
CORPUS_BYTES = 1 << 20
LR = 3e-4


def corpus_file(folder: Path) -> Path:
    """Random printable bytes, the same for everybody."""
    path = folder / "tokens.bin"
    path.write_bytes(np.random.default_rng(0).integers(32, 127, CORPUS_BYTES, dtype=np.uint8).tobytes())
    return path


def gpt_run_file(folder: Path, corpus: Path, tokens: int) -> RunFile:
    """`tokens` of all ranks together in each step."""
    return RunFile(
        run=RunConfig(name="bench", steps=10**6, directory=str(folder)),
        model=MODEL,
        data=Tokens(path=str(corpus), dtype="uint8"),
        batch=BatchConfig(global_samples=tokens // SEQUENCE, sequence=SEQUENCE),
        wire=WireConfig(timeout_s=600.0),
        checkpoint=CheckpointConfig(every_steps=0),
    )


def gpt_job(setting: Setting, folder: Path, stack: ExitStack, *, exchange: Exchange, ranks: int) -> Job:
    """The parts of the run, as `shoal train` puts them together; `ranks` share the saves."""
    sync = new_sync(setting)
    state = new_state(setting, sync)
    step = new_step(setting, state, sync)
    saver = Saver(folder, rank=setting.place.rank if ranks > 1 else 0, world_size=ranks, exchange=exchange, keep=1)
    stack.callback(saver.close)
    return Job(
        state=state,
        step=step,
        feed=stack.enter_context(new_feed(setting, state.cursor)),
        guard=NonfiniteGuard(5, step, setting.mesh.world),
        saver=saver,
        events=stack.enter_context(EventWriter(folder, rank=setting.place.rank)),
        display=SilentDisplay(),
        rate=lambda number: LR,
        evaluate=dict,
        stop_requested=lambda: False,
        layout=setting.mesh.layout.to_dict(),
        generation=0,
        came_from=0,
        steps=10**6,
        evaluate_every=0,
        save_every=0,
    )
