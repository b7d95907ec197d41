"""What `[memory]` asks of other tables: where state may lie elsewhere, what a simulated device can count. Imports
no torch.
"""

from __future__ import annotations

from shoal.optim.config import kinds_whose
from shoal.runfile import facts
from shoal.runfile.facts import Fact
from shoal.runfile.rule import Rule, against, in_order
from shoal.runfile.run_file import RunFile

_ONE = "leave one of them out"
_ONE_OF_TWO = "leave one of the two out"
_DECIDES_ITSELF = "a compiled program decides itself what it saves"
_HOST = 'set memory.offload.optimizer = "host"'
_ON_DEVICE = Fact("the optimizer on the device", lambda run_file: run_file.memory.offload.optimizer == "device")
_BUDGET = facts.stated("memory.budget")
_SIMULATED = facts.stated("memory.simulate_device")


def _no_budget(run_file: RunFile) -> str | None:
    if run_file.memory.recompute != "budget" or run_file.memory.recompute_budget is not None:
        return None
    return (
        'memory.recompute = "budget" without memory.recompute_budget: say what blocks may keep, such as "2 GiB"; '
        'or set it to "full", which keeps nothing'
    )


_RECOMPUTE = in_order(
    against(
        facts.stated("memory.recompute_budget"),
        Rule(
            facts.other_than("memory.recompute", "budget"),
            'it is what "budget" may keep',
            'set memory.recompute to "budget", or leave it out',
        ),
    ),
    _no_budget,
    against(
        facts.equal("memory.recompute", "budget"),
        Rule(facts.COMPILED, _DECIDES_ITSELF, f'{_ONE_OF_TWO}, or set memory.recompute to "full"'),
    ),
)

_PARAMETERS = against(
    facts.PARAMETERS_AWAY,
    Rule(_ON_DEVICE, "its update is the host's", _HOST),
    Rule(facts.equal("memory.zero", 1, 2), ", which keeps parameters whole", "set it to 3, or leave it out"),
    Rule(facts.COMPILED, "blocks fetch their weights while they compute", "leave one out"),
)

_CARRIED = "its state is brought to other ranks while the run goes on"
_STREAMED = (
    Rule(
        facts.kind("optimizer", lambda optimizer: not optimizer.updates_apart, "whose update needs more than its own"),
        "it needs state beyond that of the parameters it updates, or keeps it itself",
        f"choose {kinds_whose(lambda table: table.updates_apart)}",
    ),
    Rule(
        Fact("optimizer.groups of another kind", lambda run_file: bool(run_file.optimizer.others)),
        "each part has state of its own form",
        "leave kind out of the groups",
    ),
    Rule(facts.FOLLOWS_UPDATES, "they read all of it beside the update", "leave them out"),
    Rule(facts.PRIORITY, "updates are made inside the next forward", 'set it to "order"'),
    Rule(facts.PIPEDREAM, "all of it would move once a microbatch", "choose another schedule"),
    Rule(facts.ELASTIC, _CARRIED, _ONE_OF_TWO),
    Rule(facts.WORKERS, _CARRIED, _ONE_OF_TWO),
)


def _packed_state(run_file: RunFile) -> bool:
    packed = run_file.sparsity is not None and run_file.sparsity.packed_state
    return packed and run_file.memory.offload.optimizer == "device"


_DELAY = against(
    facts.stated("memory.offload.delay_update_after"),
    Rule(_ON_DEVICE, ", which is not free for an update while it computes the next step", _HOST),
    Rule(
        Fact("parameters on disk", lambda run_file: run_file.memory.offload.parameters == "disk"),
        ", of which the host would need a copy in memory",
        _ONE,
    ),
    Rule(facts.given("sparsity"), ", which changes weights between two steps", _ONE),
    Rule(
        facts.given("freeze").where(lambda run_file: run_file.freeze is not None and run_file.freeze.changes),
        ", which changes weights between two steps",
        _ONE,
    ),
    Rule(facts.NOT_LOCKSTEP, ", which writes weights between two steps", _ONE),
)


def _activations(run_file: RunFile) -> str | None:
    offload = run_file.memory.offload
    if offload.activations == "host":
        return 'memory.offload.activations = "host"'
    return "memory.offload.activation_bits = 8" if offload.activation_bits is not None else None


def _empty_budget(run_file: RunFile) -> str | None:
    if run_file.memory.budget is None or run_file.memory.budget_bytes:
        return None
    return (
        f'memory.budget = "{run_file.memory.budget}" holds nothing: say what a rank\'s device may hold, such as '
        '"512 MiB", or leave it out'
    )


memory_refusal = in_order(
    _RECOMPUTE,
    _PARAMETERS,
    against(facts.other_than("memory.offload.optimizer", "device"), *_STREAMED),
    against(Fact("sparsity.packed_state", _packed_state), *_STREAMED),
    _DELAY,
    against(
        Fact("memory.offload.activations or activation_bits", _activations),
        Rule(facts.COMPILED, _DECIDES_ITSELF, _ONE_OF_TWO),
    ),
    against(
        _SIMULATED,
        Rule(facts.CUDA, ", which has memory of its own", 'set run.device = "cpu", or leave it out'),
        Rule(facts.COMPILED, "what a compiled program allocates is not seen", "leave one out"),
    ),
    against(
        facts.equal("memory.fit_microbatch", True),
        Rule(facts.MICRO_SAMPLES, "it says the size already", _ONE),
        Rule(facts.equal("layout.auto", True), "it chooses the microbatch with the layout", _ONE),
        Rule(facts.named("memory.budget"), "it chooses the microbatch, too", _ONE),
        Rule(
            facts.axis("pipeline"),
            "how many microbatches there are decides its bubble, too",
            "set pipeline.microbatches",
        ),
        Rule(
            facts.SYNCHRONISED,
            "its statistics are those of a microbatch, so that its size decides the losses",
            "set batch.micro_samples",
        ),
        Rule(facts.ELASTIC, "shares of a step grow when replicas leave", "set batch.micro_samples"),
    ),
    _empty_budget,
    against(_BUDGET, Rule(_SIMULATED, "the budget is what the simulated device holds", _ONE_OF_TWO)),
)
