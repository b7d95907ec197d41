"""What `[memory]` asks of other tables: where state may lie elsewhere, what a simulated device can count. Imports
no torch.
"""

from __future__ import annotations

from collections.abc import Iterator

from shoal.optim.config import kinds_whose
from shoal.runfile.run_file import RunFile, synchronises_norms


def memory_refusal(run_file: RunFile) -> str | None:
    """One sentence if another table needs at once what `[memory]` moves away, or computes where it cannot look."""
    return (
        _recompute_rule(run_file)
        or _parameters_rule(run_file)
        or _state_rule(run_file)
        or _delay_rule(run_file)
        or _activations_rule(run_file)
        or _device_rule(run_file)
        or _fitted_rule(run_file)
        or _budget_rule(run_file)
    )


def _recompute_rule(run_file: RunFile) -> str | None:
    memory, given = run_file.memory, run_file.memory.recompute_budget
    if memory.recompute != "budget":
        if given is None:
            return None
        return (
            f'memory.recompute_budget = "{given}" with memory.recompute = "{memory.recompute}": it is what '
            '"budget" may keep; set memory.recompute to "budget", or leave it out'
        )
    if given is None:
        return (
            'memory.recompute = "budget" without memory.recompute_budget: say what blocks may keep, such as "2 GiB"; '
            'or set it to "full", which keeps nothing'
        )
    if run_file.run.compile is not False:
        return (
            f'memory.recompute = "budget" with {run_file.run.compile_said}: a compiled program decides itself what it '
            'saves; leave one of the two out, or set memory.recompute to "full"'
        )
    return None


def _parameters_rule(run_file: RunFile) -> str | None:
    memory = run_file.memory
    if memory.offload.parameters == "device":
        return None
    said = f'memory.offload.parameters = "{memory.offload.parameters}"'
    if memory.offload.optimizer == "device":
        return (
            f'{said} with the optimizer on the device: its update is the host\'s; set memory.offload.optimizer = "host"'
        )
    if memory.zero in (1, 2):
        return f"{said} with memory.zero = {memory.zero}, which keeps parameters whole: set it to 3, or leave it out"
    if run_file.run.compile is not False:
        return f"{said} with {run_file.run.compile_said}: blocks fetch their weights while they compute; leave one out"
    return None


def _state_rule(run_file: RunFile) -> str | None:
    home, sparsity = run_file.memory.offload.optimizer, run_file.sparsity
    if home != "device":
        found = next(_against_streams(run_file), None)
        return None if found is None else f'memory.offload.optimizer = "{home}" with {found[0]}: {found[1]}'
    found = None if sparsity is None or not sparsity.packed_state else next(_against_streams(run_file), None)
    return None if found is None else f"sparsity.packed_state with {found[0]}: {found[1]}"


def _against_streams(run_file: RunFile) -> Iterator[tuple[str, str]]:
    """(key and value, why not and what to do)"""
    optimizer, sync = run_file.optimizer, run_file.sync
    if not optimizer.updates_apart:
        apart = kinds_whose(lambda table: table.updates_apart)
        yield (
            f'optimizer.kind = "{optimizer.variant}"',
            f"it needs state beyond that of the parameters it updates, or keeps it itself; choose {apart}",
        )
    if optimizer.others:
        yield "optimizer.groups of another kind", "each part has state of its own form; leave kind out of the groups"
    if optimizer.average is not None or optimizer.lookahead is not None:
        yield "optimizer.average or optimizer.lookahead", "they read all of it beside the update; leave them out"
    if run_file.gradients.schedule == "priority":
        yield 'gradients.schedule = "priority"', 'updates are made inside the next forward; set it to "order"'
    if run_file.pipeline.asynchronous:
        yield 'pipeline.schedule = "PipeDream"', "all of it would move once a microbatch; choose another schedule"
    if sync.replicas_are == "workers" or run_file.elastic is not None:
        name = "[elastic]" if run_file.elastic is not None else f'sync.kind = "{sync.variant}"'
        yield name, "its state is brought to other ranks while the run goes on; leave one of the two out"


def _delay_rule(run_file: RunFile) -> str | None:
    offload = run_file.memory.offload
    if offload.delay_update_after is None:
        return None
    said = f"memory.offload.delay_update_after = {offload.delay_update_after}"
    if offload.optimizer == "device":
        return (
            f"{said} with the optimizer on the device, which is not free for an update while it computes the next "
            'step: set memory.offload.optimizer = "host"'
        )
    if offload.parameters == "disk":
        return f"{said} with parameters on disk, of which the host would need a copy in memory: leave one of them out"
    if run_file.sparsity is not None or (run_file.freeze is not None and run_file.freeze.changes):
        table = "[sparsity]" if run_file.sparsity is not None else "[freeze]"
        return f"{said} with {table}, which changes weights between two steps: leave one of them out"
    if run_file.sync.replicas_are != "lockstep":
        return (
            f'{said} with sync.kind = "{run_file.sync.variant}", which writes weights between two steps: leave one of '
            "them out"
        )
    return None


def _activations_rule(run_file: RunFile) -> str | None:
    offload = run_file.memory.offload
    if offload.activations == "device" and offload.activation_bits is None:
        return None
    key = 'activations = "host"' if offload.activations == "host" else "activation_bits = 8"
    if run_file.run.compile is not False:
        return (
            f"memory.offload.{key} with {run_file.run.compile_said}: a compiled program decides itself what it saves; "
            "leave one of the two out"
        )
    return None


def _device_rule(run_file: RunFile) -> str | None:
    memory = run_file.memory
    if memory.simulate_device is None:
        return None
    said = f'memory.simulate_device = "{memory.simulate_device}"'
    if run_file.run.device == "cuda":
        return f'{said} with run.device = "cuda", which has memory of its own: set run.device = "cpu", or leave it out'
    if run_file.run.compile is not False:
        return f"{said} with {run_file.run.compile_said}: what a compiled program allocates is not seen; leave one out"
    return None


def _fitted_rule(run_file: RunFile) -> str | None:
    found = next(_against_fitting(run_file), None) if run_file.memory.fit_microbatch else None
    return None if found is None else f"memory.fit_microbatch = true with {found[0]}: {found[1]}"


def _against_fitting(run_file: RunFile) -> Iterator[tuple[str, str]]:
    """(key and value, why not and what to do)"""
    if run_file.batch.micro_samples is not None:
        yield f"batch.micro_samples = {run_file.batch.micro_samples}", "it says the size already; leave one of them out"
    if run_file.layout.auto:
        yield "layout.auto = true", "it chooses the microbatch with the layout; leave one of them out"
    if run_file.memory.budget is not None:
        yield "memory.budget", "it chooses the microbatch, too; leave one of them out"
    if run_file.layout.pipeline > 1:
        yield (
            f"layout.pipeline = {run_file.layout.pipeline}",
            "how many microbatches there are decides its bubble, too; set pipeline.microbatches",
        )
    if synchronises_norms(run_file.model):
        why = "its statistics are those of a microbatch, so that its size decides the losses; set batch.micro_samples"
        yield 'model.batch_norm = "synchronised"', why
    if run_file.elastic is not None:
        yield "[elastic]", "shares of a step grow when replicas leave; set batch.micro_samples"


def _budget_rule(run_file: RunFile) -> str | None:
    memory = run_file.memory
    if memory.budget is None:
        return None
    if memory.budget_bytes == 0:
        return (
            f'memory.budget = "{memory.budget}" holds nothing: say what a rank\'s device may hold, such as "512 MiB", '
            "or leave it out"
        )
    if memory.simulate_device is not None:
        return (
            f'memory.budget = "{memory.budget}" with memory.simulate_device = "{memory.simulate_device}": the budget '
            "is what the simulated device holds; leave one of the two out"
        )
    return None
