"""The table `[memory]` of the run file. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from shoal.config.check import Table, says
from shoal.units import MEMORY_SIZE, memory_bytes

Size = Annotated[str, msgspec.Meta(pattern=MEMORY_SIZE)]

BudgetChange = Literal["nothing", "rounding", "moments"]
"""What a budget may change of the numbers, from the least on."""


class OffloadConfig(Table, frozen=True):
    """Where a rank keeps what it does not use at the moment: on the device, on the host, or on disk.

    Moved bytes are exact, and so is the update: with `activation_bits` and `delay_update_after` left out, losses are
    the same to the last bit.
    """

    optimizer: Annotated[
        Literal["device", "host", "disk"],
        says(
            "Home of the optimizer's state between two updates. It comes to the device for the update of its "
            "parameters, a part at a time, and leaves again beside the next ones (arXiv:2101.06840, arXiv:2104.07857)."
        ),
    ] = "device"
    parameters: Annotated[
        Literal["device", "host", "disk"],
        says(
            "Home of parameters and gradients: a block's come to the device for its forward and its backward, by "
            "memory.zero = 3, and its gradient leaves (arXiv:2104.07857). Their update is the host's; on CPUs. disk: "
            "they are mapped from the spill file, and the kernel keeps in the host's memory what there is room for."
        ),
    ] = "device"
    activations: Annotated[
        Literal["device", "host"],
        says(
            "Home of what blocks save for their backward: it leaves behind the forward, and comes before the backward."
        ),
    ] = "device"
    activation_bits: Annotated[
        Literal[8] | None,
        says(
            "Bits of a number that a block saves for its backward, in blocks of 256 with a scale: each is off by at "
            "most 1/254 of the largest of its block (arXiv:2206.11357). Default: as it was computed."
        ),
    ] = None
    delay_update_after: Annotated[
        Annotated[int, msgspec.Meta(ge=0)] | None,
        says(
            "From the step after this one on, the host makes the update of a step beside the forward and backward of "
            "the next, which therefore computes with weights one update old (arXiv:2101.06840, section 5.2): another "
            "training, which converges alike where steps are small. 0: from the first step on. Default: never."
        ),
    ] = None
    part: Annotated[
        Size, says("Parameters whose state moves together; that of three such parts is on the device at a time.")
    ] = "32 MiB"
    pool: Annotated[
        Size, says("Host memory for what is read ahead from disk, and as much for what is still to be written.")
    ] = "256 MiB"
    folder: Annotated[
        str | None,
        says("Folder of the spill files, which have no names and end with their rank; default: the run directory."),
    ] = None

    @property
    def part_bytes(self) -> int:
        """`part` in bytes."""
        return memory_bytes(self.part)

    @property
    def pool_bytes(self) -> int:
        """`pool` in bytes."""
        return memory_bytes(self.pool)


class MemoryConfig(Table, frozen=True):
    """What a rank keeps, and what it does without."""

    zero: Annotated[
        Annotated[int, msgspec.Meta(ge=1, le=3)] | None,
        says(
            "What the ranks of `layout.shard` split: 1 the optimizer's state, 2 gradients too, 3 parameters too "
            "(arXiv:1910.02054); default: 3 where `layout.shard` is more than 1."
        ),
    ] = None
    recompute: Annotated[
        Literal["none", "selective", "operators", "full", "budget"],
        says(
            "Activations computed again in the backward: none, those of attention (arXiv:2205.05198), all but the "
            "outputs of attention and of every second matrix product (arXiv:2410.06511), all, or, of any model's "
            "blocks, those whose bytes save least time, until the rest fits into `recompute_budget`."
        ),
    ] = "none"
    recompute_budget: Annotated[
        Size | None,
        says(
            'With `recompute = "budget"`: what all blocks of a rank may keep for their backwards beside their inputs, '
            'such as "2 GiB"; in a pipeline of all microbatches that it holds at a time.'
        ),
    ] = None
    recompute_layers: Annotated[
        list[Annotated[int, msgspec.Meta(ge=0)]] | None,
        says("The blocks that `recompute` is applied to, from 0; default: all."),
    ] = None
    loss_chunks: Annotated[
        int,
        says(
            "Parts of a microbatch's tokens whose logits and losses are computed one after the other in training, so "
            "that logits of all tokens are never there; for large vocabularies. Gradients are computed with the "
            "losses, or, where tensor or pipeline ranks share the model and under float16, by computing a part again.",
            ge=1,
            le=1 << 12,
        ),
    ] = 1
    build: Annotated[
        Literal["auto", "parts", "whole"],
        says(
            "How ranks that hold a part of a user's or a transformers model come to it: parts, one parameter after the "
            "other, so that no rank has all of them at once; whole, each rank builds all first; auto, by parts where "
            "the model's code allows it. First values are the same to the last bit."
        ),
    ] = "auto"
    offload: Annotated[OffloadConfig, says("Where a rank keeps what it does not use at the moment.")] = OffloadConfig()
    budget: Annotated[
        Size | None,
        says(
            'On CPUs: what a rank\'s device may hold, such as "512 MiB". Before any rank starts, mixtures of recompute '
            "and offload, ZeRO stage, microbatch, loss_chunks and moments in 8 bits are tried by three steps each, "
            "from that with the shortest predicted step on; the first that fits is used. Keys that are set to "
            "another value than their default stay. The bill is memory.json in the run directory."
        ),
    ] = None
    budget_may_change: Annotated[
        BudgetChange,
        says(
            "What `budget` may change of the numbers: nothing, losses are the same to the last bit; rounding, where "
            "that does not fit, also the order of sums (ZeRO stage, microbatch, loss_chunks); moments, where that "
            "does not fit either, also the optimizer's moments, to 8 bits."
        ),
    ] = "rounding"
    fit_microbatch: Annotated[
        bool,
        says(
            "Before any rank starts, the largest microbatch that fits is found, by trials of three steps; under "
            "`simulate_device`, which it wants on CPUs, the planner says where to begin. It becomes "
            "`batch.micro_samples`; updates are the same with any, and synchronised batch norms are refused. What was "
            "tried is in microbatch.json of the run directory."
        ),
    ] = False
    collect_every_steps: Annotated[
        int,
        says(
            "Python's garbage collector is off, and all ranks run it at the same points: on young objects after every "
            "step, on all every so many; what was made in the first steps is left out of it. Tensors that pile up are "
            "named. 0: Python decides, on each rank.",
            ge=0,
        ),
    ] = 0
    simulate_device: Annotated[
        Size | None,
        says(
            'On CPUs: a device of this size, such as "512 MiB", in ordinary memory. What a step allocates beyond it is '
            "refused, with what holds most of it; what is offloaded does not count."
        ),
    ] = None

    @property
    def recompute_budget_bytes(self) -> int:
        """`recompute_budget` in bytes; 0 without one."""
        return 0 if self.recompute_budget is None else memory_bytes(self.recompute_budget)

    @property
    def budget_bytes(self) -> int | None:
        """`budget` in bytes."""
        return None if self.budget is None else memory_bytes(self.budget)

    @property
    def simulated_bytes(self) -> int | None:
        """`simulate_device` in bytes."""
        return None if self.simulate_device is None else memory_bytes(self.simulate_device)
