"""`python -m benchmarks.optimizers`: steps of training with each optimizer, beside AdamW by PyTorch's fused kernel.

All train the same GPT in the same loop, in turn with AdamW, under ZeRO-1; one side is AdamW itself (A/A). Muon
is also measured on replicas, with owners and computed redundantly, on every rank. A step of SOAP, Shampoo or K-FAC that
decomposes is dearer than the others, so their cost is that of all steps: the mean. `update` is the optimizer's part of
a step alone.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer

from benchmarks.command import run
from shoal.bench.ddp_script import ByteSamples, new_gpt
from shoal.bench.groups import interleaved, join_group, join_mesh, join_store
from shoal.bench.options import AsJson, Processes
from shoal.bench.ranks import is_rank, on_ranks, run_as_rank
from shoal.bench.report import Result, check, columns, print_report
from shoal.bench.training_job import SEQUENCE, corpus_file
from shoal.comm.collective import Collective
from shoal.comm.mesh import Mesh
from shoal.gradients.bucket import ALIGNMENT
from shoal.gradients.build import Summing, build_gradients
from shoal.gradients.config import GradientsConfig
from shoal.launcher.environment import Place
from shoal.models.config import GPTConfig
from shoal.models.roles import roles_of
from shoal.optim.build import build_optimizer
from shoal.optim.config import AdamW, OptimizerConfig
from shoal.optim.kinds import LAMB, LARS, Adafactor, Lion
from shoal.optim.layer_statistics import SeesLayers, layers_in
from shoal.optim.matrix_kinds import KFAC, SOAP, Dion, Muon, Shampoo
from shoal.optim.parts import Parts, SeesParts
from shoal.state import Trained
from shoal.topology.holding import held
from shoal.topology.layout import INSIDE_REPLICA, Layout

KINDS: dict[str, OptimizerConfig] = {
    "adamw again": AdamW(),
    "lamb": LAMB(),
    "lars": LARS(),
    "lion": Lion(),
    "adafactor": Adafactor(),
    "muon": Muon(),
    "muon, bfloat16": Muon(precision="bfloat16"),
    "dion": Dion(),
    "soap": SOAP(),
    "soap, bfloat16": SOAP(precision="bfloat16"),
    "shampoo": Shampoo(),
    "shampoo, bfloat16": Shampoo(precision="bfloat16"),
    "kfac": KFAC(),
    "kfac, cholesky": KFAC(inverse="cholesky"),
}
OWNED, REDUNDANT, BASE = "muon, replicas", "redundant", "adamw"
MOST = {
    "lamb": 1.2,
    "muon": 1.15,
    "muon, bfloat16": 1.15,
    "soap": 1.3,
    "soap, bfloat16": 1.3,
    "shampoo": 1.3,
    "shampoo, bfloat16": 1.3,
    "kfac": 1.5,
    "kfac, cholesky": 1.5,
}
"""Times AdamW's step, at most."""
LEAST_GAIN = 1.5
"""Of owners over redundant work, of what is beyond AdamW's step on the same replicas."""


def optimizers(
    tokens: Annotated[int, typer.Option(help="Tokens of a rank and step; a multiple of 128.", min=128)] = 512,
    pairs: Annotated[int, typer.Option(help="Steps of each side.", min=6)] = 20,
    only: Annotated[list[str] | None, typer.Option(help="A kind to measure, once for each; default: all.")] = None,
    width: Annotated[int, typer.Option(help="Of the GPT's residual stream; a multiple of 64.", min=64)] = 256,
    layers: Annotated[int, typer.Option(help="Of the GPT: 6 of 256 have 5M parameters, 8 of 512 have 25M.", min=1)] = 6,
    processes: Processes = 2,
    as_json: AsJson = False,
) -> None:
    """Steps of training with each optimizer beside fused AdamW, and Muon with owners beside redundant Muon.

    Example: python -m benchmarks.optimizers --pairs 10 --only muon --only kfac
    """
    kinds = only or [*KINDS, OWNED]
    model = GPTConfig(layers=layers, width=width, heads=width // 32, feed_forward="gelu", feed_forward_width=4 * width)
    if is_rank():
        run_as_rank(lambda place: measure(place, model, tokens=tokens, pairs=pairs, kinds=kinds))
        return
    command = ["benchmarks.optimizers", "--tokens", str(tokens), "--pairs", str(pairs)]
    command += ["--width", str(width), "--layers", str(layers), *(word for kind in kinds for word in ("--only", kind))]
    print_report("optimizers", on_ranks(command, processes=processes), as_json=as_json)


def measure(place: Place, model: GPTConfig, *, tokens: int, pairs: int, kinds: Sequence[str]) -> Result | None:
    """A row for each side, beside its peer; None on all ranks but rank 0."""
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-bench-")))
        store, corpus = join_store(place), corpus_file(folder)
        clock = join_group("clock", place, store)
        sharded = join_mesh(Layout(shard=place.world_size), place, store)
        replicas = join_mesh(Layout(replicate=place.world_size), place, store)
        of = partial(_Side, model, corpus=corpus, samples=tokens // SEQUENCE)
        if OWNED in kinds:
            apart = {OWNED: of(Muon(), replicas), REDUNDANT: of(Muon(), replicas, connected=False)}
            rows += _rows([OWNED], {BASE: of(AdamW(), replicas)} | apart, clock, pairs=pairs)
        if named := [name for name in kinds if name != OWNED]:
            sides = {BASE: of(AdamW(), sharded)} | {name: of(KINDS[name], sharded) for name in named}
            rows += _rows(named, sides, clock, pairs=pairs)
    return _result(rows) if place.rank == 0 else None


def _rows(names: Sequence[str], sides: Mapping[str, _Side], clock: Collective, *, pairs: int) -> list[dict[str, Any]]:
    turns = interleaved({each: side.step for each, side in sides.items()}, clock, pairs=pairs, always=list(sides))
    mean = {each: statistics.fmean(seconds) for each, seconds in columns(turns).items()}
    return [_row(name, sides, mean, pairs=len(turns)) for name in names]


def _row(name: str, sides: Mapping[str, _Side], mean: Mapping[str, float], *, pairs: int) -> dict[str, Any]:
    row = {
        "side": name,
        "pairs": pairs,
        "step_ms": round(1e3 * mean[name], 1),
        "adamw_ms": round(1e3 * mean[BASE], 1),
        "times_adamw": round(mean[name] / mean[BASE], 3),
        "update_ms": round(1e3 * sides[name].update_s, 1),
        "times_adamw_update": round(sides[name].update_s / sides[BASE].update_s, 2),
    }
    if REDUNDANT in mean:
        row["redundant_ms"] = round(1e3 * mean[REDUNDANT], 1)
        row["gain"] = round((mean[REDUNDANT] - mean[BASE]) / max(1e-9, mean[name] - mean[BASE]), 2)
    return row


class _Side:
    """A model, its gradients and its optimizer."""

    def __init__(
        self,
        model: GPTConfig,
        config: OptimizerConfig,
        mesh: Mesh,
        *,
        corpus: Path,
        samples: int,
        connected: bool = True,
    ) -> None:
        self.model, self.world_size = new_gpt(model), mesh.layout.world_size
        shapes = {name: tuple(p.shape) for name, p in self.model.named_parameters()}
        trained = [
            Trained(held(mesh.layout, mesh.rank, name, shapes[name]), p) for name, p in self.model.named_parameters()
        ]
        replica = mesh.axis(*INSIDE_REPLICA)
        self.gradients = build_gradients(
            GradientsConfig(),
            trained,
            zero=1 if mesh.layout.shard > 1 else None,
            groups=mesh.ranks,
            replica=replica,
            model=self.model,
            blocks=list(self.model.blocks),
            summing=Summing(undivided=None if config.works_on == "matrices" else ALIGNMENT),
        )
        owned = [(o.name, o.parameter, len(o.holding.global_shape) > 1) for o in self.gradients.owned]
        kinds: dict[str, str] = {name: role.kind for name, role in roles_of(self.model).items()}
        self.optimizer = build_optimizer(config, owned, lr=config.lr, shapes=shapes, kinds=kinds)
        self.seeing, self.steps = self.optimizer if isinstance(self.optimizer, SeesLayers) else None, 0
        if self.seeing is not None:
            names = {id(p): name for name, p in self.model.named_parameters()}
            self.seeing.watch(layers_in(self.model, names), mesh.world)
        if connected and isinstance(self.optimizer, SeesParts):
            self.optimizer.connect(Parts(self.gradients.owned, replica, mesh.world))
        self.batches = ByteSamples(corpus, samples=samples, sequence=SEQUENCE, rank=mesh.rank)
        self._updates_s: list[float] = []

    @property
    def update_s(self) -> float:
        """Seconds of the optimizer's part of a step, the median."""
        return statistics.median(self._updates_s)

    def step(self) -> float:
        """Makes one update and returns its loss."""
        self.steps += 1
        self.gradients.start()
        batch = self.batches.next()
        if self.seeing is not None:
            self.seeing.begin(self.steps)
            self.seeing.microbatch(torch.ones(batch[:, 1:].shape))
        loss = F.cross_entropy(self.model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        with self.gradients.backward(last=True):
            (loss / self.world_size).backward()
        norm = float(self.gradients.reduce())
        if self.seeing is not None:
            terms = batch[:, 1:].numel() * self.world_size
            self.seeing.agree(scale=1 / terms, terms=terms)
        if norm > 1.0:
            self.gradients.scale(1.0 / norm)
        begin_s = time.perf_counter()
        self.optimizer.step()
        self._updates_s.append(time.perf_counter() - begin_s)
        self.gradients.gather()
        return float(loss.detach())


def _result(rows: list[dict[str, Any]]) -> Result:
    times = {row["side"]: row["times_adamw"] for row in rows}
    checks = [
        check(f"a step of {n}, times one of AdamW", times[n], most, at_most=True)
        for n, most in MOST.items()
        if n in times
    ]
    gains = [row["gain"] for row in rows if "gain" in row]
    checks += [check("owners beside redundant Muon, of what AdamW does not take", gain, LEAST_GAIN) for gain in gains]
    return {"rows": rows, "checks": checks}


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(optimizers)
