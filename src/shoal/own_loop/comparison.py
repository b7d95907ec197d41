"""`Comparison`: the ranks of a script's own loop beside the same loop in plain PyTorch (`shoal.own_loop.plain`).

Every rank starts from the weights that plain PyTorch started from. Before an update it compares the gradient that its
optimizer is about to take, its own pieces of it, with the one that plain PyTorch's took, and then takes that one: so
the update is judged by itself, and not by how Adam amplifies the last bit of a gradient. After the step, with all that
the script has done behind the update, every rank compares all weights and buffers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict

import msgspec
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from shoal.assembly.run import Run
from shoal.codec.config import NoCodec, ShardCodecConfig
from shoal.comm.collective import gather_lines
from shoal.engine.config import Float32, Float64
from shoal.engine.tolerances import (
    EXACT,
    SINGLE,
    Finding,
    HeldBox,
    Quantity,
    compare_gradients,
    compare_number,
    compare_weights,
)
from shoal.engine.updates import Outcome
from shoal.errors import ConfigError, UserCodeError
from shoal.launcher.own_script import ScriptCheck
from shoal.own_loop.plain import state_of
from shoal.runfile.run_file import RunFile
from shoal.state import Owned, owned_gradients
from shoal.topology.holding import whole

NOTE = "one process ran the script's own loop in plain PyTorch, each global batch whole"
CODED = "[codec] and [shard_codec] were left out: this compares gradients that are sent as they are"
PRECISION = (
    'precision.kind = "{}" was left out: this compares a script\'s own loop in {}, where a difference is told from '
    "rounding"
)
LIKELY = (
    ". Is the loss a mean over the samples of the microbatch (else pass weight=), of each sample by itself (else "
    "shoal.gather_samples), and without dropout in attention over sequences that are padded to the longest of the "
    "microbatch? docs/own-loop-situations.md lists what people met"
)
"""What a difference that is no rounding comes from, most often."""
DREW = (
    "the script draws random numbers that are not keyed on samples (a permutation of the batch, or numbers for single "
    "samples from Python's random or NumPy, which give every microbatch the same): draw by functions of PyTorch, or "
    "from a generator that is seeded by what they are for"
)


def comparable(run_file: RunFile, check: ScriptCheck) -> tuple[RunFile, list[str]]:
    """The run file without what a comparison leaves out, in the type that it computes in, and in a folder of its own;
    and what is to be said of it.

    Raises `ConfigError` where replicas differ by design.
    """
    if run_file.sync.replicas_are != "lockstep":
        raise ConfigError(
            f'sync.kind = "{run_file.sync.variant}" trains replicas that differ, and a loop in plain PyTorch has none '
            "to compare them with: verify the script with sync.kind=allreduce"
        )
    coded = run_file.codec != NoCodec() or run_file.shard_codec != ShardCodecConfig()
    own, compared = run_file.precision, Float64() if check.exact else Float32()
    left_out = [] if isinstance(own, Float32 | Float64) else [PRECISION.format(own.variant, compared.variant)]
    run_file = msgspec.structs.replace(
        run_file,
        run=msgspec.structs.replace(run_file.run, directory=str(check.path / "run")),
        precision=compared,
        codec=NoCodec(),
        shard_codec=ShardCodecConfig(),
    )
    return run_file, [NOTE, *([CODED] if coded else []), *left_out]


@torch.no_grad()
def start_as_plain(model: nn.Module, check: ScriptCheck) -> None:
    """Gives it the weights and buffers that plain PyTorch started from, in their type. Raises `UserCodeError` if
    they are of another model.
    """
    if check.exact:
        model.double()
    own, initial = dict([*model.named_parameters(), *model.named_buffers()]), load_file(check.initial)
    shapes = [{name: list(each.shape) for name, each in side.items()} for side in (_real(own), initial)]
    if shapes[0] != shapes[1]:
        raise UserCodeError(
            "the script built another model when it was started again: what it builds must not depend on time or chance"
        )
    for name, each in _real(own).items():
        each.copy_(initial[name])


def _real(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.view_as_real(each) if each.is_complex() else each for name, each in tensors.items()}


class Comparison:
    """One rank's part. `notes` are sentences for the verdict."""

    def __init__(self, run: Run, check: ScriptCheck, notes: Sequence[str]) -> None:
        self._run, self._check = run, check
        self._tolerances = EXACT if check.exact else SINGLE
        self._steps = min(check.steps, run.run_file.run.steps)
        self._findings: list[Finding] = []
        self._notes = notes
        self._drew = False
        if "\n".join(run.workload.samples) != check.samples.read_text(encoding="utf-8"):
            raise UserCodeError(
                "the script made other data when it was started again: seed what it draws, so that every start, and "
                "every rank, has the same samples"
            )

    def before_update(self, step: int, owned: Sequence[Owned]) -> None:
        """The optimizer is about to take the gradients of `owned`."""
        wanted = self._wanted(step, "gradient/")
        if wanted is None:
            return
        rank = self._run.mesh.rank
        here = [each for each in owned if each.parameter.grad is not None]
        sides = {each.name for each in here}, {each.name for each in owned if each.name in wanted}
        self._found(self._one_sided(step, sides))
        both = [each for each in here if each.name in wanted]
        parts = [HeldBox(name, rank, box, part) for name, box, part in owned_gradients(both)]
        self._found(compare_gradients(step, parts, wanted, tolerances=self._tolerances))
        if all(finding.holds for finding in self._findings):
            _take(both, wanted)

    def after_step(self, step: int, outcome: Outcome) -> bool:
        """All that the script does in a step is done: whether the comparison is over. Every rank calls it."""
        wanted = self._wanted(step, "state/")
        if wanted is None:  # plain PyTorch's loop has ended before
            return self.conclude(over=True)
        with safe_open(self._check.step(step), "pt") as file:
            said = file.metadata()
        loss, norm, limits = float(said["loss"]), float(said["norm"]), self._tolerances
        self._found([compare_number(step, "loss", outcome.loss, loss, tolerance=limits.loss)])
        self._found([compare_number(step, "norm", outcome.norm, norm, tolerance=limits.norm)])
        self._drew |= said["drew"] == "true"
        with self._run.generation.gradients.full_parameters():
            found, trained = state_of(self._run.model), dict(self._run.model.named_parameters())
        missing = {name for name in trained if name not in wanted}
        self._found(self._one_sided(step, (missing, set()), "weight"))
        parts = [HeldBox(name, self._run.mesh.rank, whole(tuple(found[name].shape)), found[name]) for name in found]
        parts = [part for part in parts if part.name in wanted]
        weights, buffers = ([p for p in parts if (p.name in trained) is kind] for kind in (True, False))
        self._found(compare_weights(step, weights, wanted, tolerance=limits.weight))
        self._found(compare_weights(step, buffers, wanted, tolerance=limits.gradient, quantity="buffer"))
        return self.conclude(over=step == self._steps)

    def _wanted(self, step: int, kind: str) -> dict[str, Tensor] | None:
        """What plain PyTorch has in that step; None: it took fewer."""
        file = self._check.step(step)
        if not file.exists():
            return None
        return {name.removeprefix(kind): each for name, each in load_file(file).items() if name.startswith(kind)}

    def _found(self, findings: Sequence[Finding]) -> None:
        """Keeps the worst of each quantity in each step."""
        worst = {(each.step, each.quantity): each for each in self._findings}
        for each in findings:
            before = worst.get((each.step, each.quantity))
            if before is None or each.difference > before.difference:
                worst[each.step, each.quantity] = each
        self._findings = list(worst.values())

    def _one_sided(self, step: int, sides: tuple[set[str], set[str]], quantity: Quantity = "gradient") -> list[Finding]:
        """What only one side has is off by all of it."""
        rank = self._run.mesh.rank
        return [Finding(step, quantity, name, rank, math.inf, 0.0) for name in sorted(sides[0] ^ sides[1])]

    def conclude(self, *, over: bool) -> bool:
        """Whether it is over: after the last step, or because a rank has found a difference. Then rank 0 leaves the
        verdict.
        """
        lines = [json.dumps(asdict(each)) for each in self._findings]
        everyone = gather_lines(lines, self._run.mesh.world, device=self._run.device)
        findings = [Finding(**json.loads(line)) for own in everyone for line in own if line]
        holds = all(finding.holds for finding in findings)
        over = over or not holds
        if over and self._run.mesh.rank == 0:
            verdict = {
                "layout": self._run.mesh.layout.describe(),
                "exact": self._check.exact,
                "axes": {},
                "findings": [asdict(finding) for finding in findings],
                "notes": self._notes,
                "unkeyed": DREW if self._drew and not holds else "",
                "likely": LIKELY,
            }
            self._check.verdict.write_text(json.dumps(verdict), encoding="utf-8")
        return over


@torch.no_grad()
def _take(owned: Sequence[Owned], wanted: Mapping[str, Tensor]) -> None:
    """The gradients of plain PyTorch in the place of those that were compared with them."""
    for each in owned:
        gradient = each.parameter.grad
        if gradient is None or gradient.is_sparse or not gradient.is_contiguous():
            continue
        for box, part in each.boxes(gradient):
            part.copy_(wanted[each.name][box.slices])
