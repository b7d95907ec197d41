"""What a run file asks for, as the planner prices it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from shoal.comm.collective import Alone
from shoal.cost.footprint import Footprint
from shoal.cost.plan import Plan
from shoal.cost.transformer import total_parameters
from shoal.errors import ConfigError, LayoutError, UsageError
from shoal.models.config import GPTConfig, MoEConfig
from shoal.models.gpt import GPT
from shoal.models.roles import roles_of
from shoal.optim.build import build_optimizer
from shoal.optim.config import SGD, AdamW, AdamW8bit, OptimizerConfig
from shoal.optim.declared import EMA, Common
from shoal.optim.kfac import OwnedKFAC
from shoal.optim.kinds import LAMB, LBFGS, Adafactor, Lion, NewtonCG
from shoal.optim.matrix_kinds import KFAC, SOAP, Dion, Muon, Shampoo
from shoal.optim.parts import Parts
from shoal.planner.explain.text import help_sentence
from shoal.planner.predict.predictor import Prediction
from shoal.planner.predict.run_cost import save_of
from shoal.planning import answer
from shoal.planning.answer import cluster_of, planned, predictor_on, transformer_of
from shoal.planning.plan_file import written_plan
from shoal.planning.stack import CODED_BYTES, CODED_ON_CORES, hidden_share, stack_of
from shoal.runfile.load import load_run
from shoal.runfile.run_file import RunFile
from shoal.state import Trained, owned_whole
from shoal.topology.cluster_file import cluster_from
from shoal.topology.holding import held
from shoal.topology.layout import Layout

RECIPE = Path(__file__).parents[2] / "recipes/stdlib-gpt.toml"
EXPERTS = Layout(shard=8, expert=8)
OPTIMIZERS = ((AdamW(), 2), (SGD(), 0), (SGD(momentum=0.9, clip_norm=1.0), 1))


def _run(*keys: str) -> RunFile:
    return load_run(RECIPE, keys)


@pytest.mark.parametrize(("optimizer", "slots"), OPTIMIZERS)
def test_the_optimizers_slots_are_what_is_priced(optimizer: OptimizerConfig, slots: int) -> None:
    """AdamW keeps two numbers for a parameter, SGD none, and one with momentum: in memory and in what a step moves."""
    run = msgspec.structs.replace(_run(), optimizer=optimizer)
    cluster = cluster_of(run, None)
    predictor = predictor_on(run, cluster)
    one = predictor.predict(written_plan(run, cluster)).peak
    assert one.optimizer == pytest.approx(slots * one.weights)
    clip = 2 if run.optimizer.clip_norm else 0
    assert stack_of(run, cluster).update_bytes == 4 * (4 + clip + 2 * slots)


@pytest.mark.parametrize(
    ("optimizer", "hidden", "rest"),
    [(LAMB(), 2, 2), (Lion(), 1, 1), (Muon(), 1, 2), (SOAP(), 6, 2), (AdamW(average=EMA()), 3, 3), (Adafactor(), 0, 0)],
)
def test_what_hidden_matrices_keep_is_priced_apart(optimizer: OptimizerConfig, hidden: int, rest: int) -> None:
    """By the share of the parameters that are neither embeddings nor the head, counted in the module."""
    run = msgspec.structs.replace(_run(), optimizer=optimizer)
    assert isinstance(run.model, GPTConfig)
    with torch.device("meta"):
        module = GPT(run.model)
    sizes = {name: parameter.numel() for name, parameter in module.named_parameters()}
    inside = sum(numel for name, numel in sizes.items() if name.startswith("blocks."))
    share = inside / sum(sizes.values())
    cluster = cluster_of(run, None)
    one = predictor_on(run, cluster).predict(written_plan(run, cluster)).peak
    assert one.optimizer == pytest.approx((share * hidden + (1 - share) * rest) * one.weights, rel=1e-6)


WATCHING = ("kfac", "python")
"""Kinds whose state needs more than gradients to come about; `test_kfac.py` and `test_named.py` count theirs."""
NEARLY = 0.07
"""Of the model's numbers: rows and columns, sides of matrices that are not square, and their padding."""


@pytest.mark.parametrize("kind", [kind for kind in Common.kinds() if kind not in WATCHING])
def test_what_every_kind_keeps_is_what_is_planned(kind: str) -> None:
    """Numbers of the state for one of the model, after two updates of a GPT."""
    sizes = GPTConfig(vocabulary=61, layers=3, width=32, heads=4, feed_forward_width=48)
    model = GPT(sizes)
    config, roles = Common.kinds()[kind](), roles_of(model)
    parameters = [(name, p, roles[name].decay) for name, p in model.named_parameters()]
    optimizer = build_optimizer(config, parameters, lr=1e-3, kinds={name: role.kind for name, role in roles.items()})

    def closure() -> float:
        optimizer.zero_grad()
        loss = sum((p.square().sum() for p in model.parameters()), torch.zeros(()))
        loss.backward()
        return float(loss.detach())

    for _ in range(2):
        optimizer.step(closure)
    tensors = [t for state in optimizer.state.values() for t in state.values() if hasattr(t, "numel") and t.numel() > 1]
    kept = sum(tensor.numel() for tensor in tensors) / sum(p.numel() for p in model.parameters())
    planned = sum(slot.planned_numbers(hidden_share(sizes)) for slot in config.slots)
    assert kept == pytest.approx(planned, rel=NEARLY / 2, abs=NEARLY)


RARELY = 10**9
"""Steps between two decompositions, which no counter of products sees."""
MATRICES = (
    Muon(polish=1),
    Dion(),
    SOAP(every=RARELY),
    Shampoo(every=RARELY, start=0, block=24),
    KFAC(every=RARELY),
    KFAC(every=RARELY, inverse="cholesky"),
)


def in_place(total: Any, a: Any, b: Any, *_: Any, **keys: Any) -> int:
    """Of `addmm_`, which torch does not count by itself."""
    return 2 * a[0] * a[1] * b[1]


@pytest.mark.parametrize("rows", [72, 120])
@pytest.mark.parametrize("config", MATRICES, ids=lambda config: config.variant)
def test_products_of_an_update_are_those_that_torch_counts(config: OptimizerConfig, rows: int) -> None:
    """Of one matrix, in a step that decomposes nothing; one of them is more than twice as high as wide."""
    layer = torch.nn.Linear(48, rows, bias=False)
    optimizer = build_optimizer(config, [("w", layer.weight, True)], lr=0.1, kinds={"w": "column"})
    if isinstance(optimizer, OwnedKFAC):
        optimizer.watch({"w": layer}, Alone())
        own = [owned_whole(Trained(held(Layout(), 0, "w", (rows, 48)), layer.weight))]
        optimizer.connect(Parts(own, Alone(), Alone()))
    for step in (1, 2, 3):
        if isinstance(optimizer, OwnedKFAC):
            optimizer.begin(step)
        layer(torch.randn(5, 48)).square().sum().backward()
        if isinstance(optimizer, OwnedKFAC):
            optimizer.agree(scale=1.0, terms=5.0)
        with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: in_place}) as counted:
            optimizer.step()
    assert counted.get_total_flops() == pytest.approx(config.matrix_flops(rows, 48), rel=1e-6)


def test_whole_matrices_are_priced_where_ranks_divide_them() -> None:
    """By two ranks in half the time; AdamW computes nothing beyond its passes."""
    muon, adamw = _run('optimizer.kind="muon"'), _run()
    cluster = cluster_of(muon, None)
    assert stack_of(adamw, cluster).update_flops == 0
    seconds = []
    for run, ranks in ((muon, 2), (muon, 1), (adamw, 1)):
        plan = replace(written_plan(run, cluster), layout=Layout(replicate=ranks))
        seconds.append(predictor_on(run, cluster).predict(plan).bill.seconds["optimizer"])
    assert seconds[0] < seconds[1]
    assert seconds[1] > 2 * seconds[2]


def test_a_search_is_priced_by_its_evaluations() -> None:
    """Forward, backward and their sums as often as it takes them; the update once."""
    search = NewtonCG(cg_iterations=3)
    run = msgspec.structs.replace(_run(), optimizer=search)
    cluster = cluster_of(run, None)
    one, other = (predictor_on(r, cluster).predict(written_plan(r, cluster)).bill.seconds for r in (run, _run()))
    assert search.backwards == 8
    assert {name for name in one if name != "optimizer" and one[name] != pytest.approx(8 * other[name])} == set()
    assert LBFGS().backwards == 2


def test_moments_in_8_bits_are_priced_as_they_are_kept() -> None:
    """Two bytes and two scales of a block for a parameter, in float32 in a checkpoint; a step computes for longer."""
    plain, run = _run(), _run('optimizer.kind="adamw_8bit"')
    cluster = cluster_of(run, None)
    one, other = (predictor_on(r, cluster).predict(written_plan(r, cluster)) for r in (run, plain))
    numbers = one.peak.weights / 4
    assert one.peak.optimizer == pytest.approx(2 * (1 + 4 / 256) * numbers)
    assert other.peak.optimizer == pytest.approx(8 * numbers)
    assert stack_of(run, cluster).update_bytes == 4 * (4 + 2) + 2 * CODED_ON_CORES
    assert one.bill.seconds["optimizer"] > other.bill.seconds["optimizer"]
    states = [save_of(predictor_on(r, cluster), written_plan(r, cluster)) for r in (run, plain)]
    assert states[0] == states[1]


def test_checkpoints_in_fewer_bytes_are_priced_as_they_are_written() -> None:
    """Shares of the state that `python -m benchmarks.checkpoint_bytes` has measured, to a hundredth; training is held
    up by the copy as ever, and storage that is slow has less to do.
    """
    measured = {("planes", "exact"): 0.828, ("deltas", "exact"): 0.791, ("planes", "8bit"): 0.428}
    cluster = cluster_of(_run(), None)
    plain = save_of(predictor_on(_run(), cluster), written_plan(_run(), cluster))
    for (compress, moments), share in measured.items():
        run = _run(f"checkpoint.compress={compress}", f"checkpoint.moments={moments}")
        found = save_of(predictor_on(run, cluster), written_plan(run, cluster))
        assert found.written_bytes / plain.written_bytes == pytest.approx(share, abs=0.01)
        assert found.stall_s == plain.stall_s
        slow = msgspec.structs.replace(cluster.reliability, storage_gb_s=1e-3)
        slow_cluster = msgspec.structs.replace(cluster, reliability=slow)
        found = save_of(predictor_on(run, slow_cluster), written_plan(run, slow_cluster))
        assert found.write_s == pytest.approx(found.written_bytes / 1e6 / cluster.nodes)


def test_on_gpus_their_step_is_that_of_torchs_operators() -> None:
    """No kernel decodes and encodes there."""
    run = _run('optimizer.kind="adamw_8bit"')
    cluster = cluster_from({"cluster": {"nodes": 1, "machine": "dgx-a100-80gb", "devices_per_node": 8}}, file="a test")
    assert stack_of(run, cluster).update_bytes == 4 * (4 + 2) + 2 * CODED_BYTES


def test_moments_in_8_bits_are_among_the_changes(tmp_path: Path) -> None:
    """With the bytes that they free and what they cost; not where they are there, or there are none to round."""
    keys, cluster = ("model.width=2048", "model.layers=16"), tmp_path / "c.toml"
    cluster.write_text('[cluster]\nnodes = 1\nmachine = "cpu-2"\ndevices_per_node = 2\n')
    what = 'optimizer.kind = "adamw_8bit"'
    found = planned(_run(*keys), cluster, keep=1)
    (change,) = [change for change in found.changes if change.what == what]
    best = found.found.best[0]
    assert change.memory_bytes < best.memory_bytes
    assert change.fits
    sentence = help_sentence(change, best)
    assert sentence is not None
    assert sentence.startswith(f"{what} frees ")
    for optimizer in (AdamW8bit(), SGD()):
        others = planned(msgspec.structs.replace(_run(*keys), optimizer=optimizer), cluster, keep=1).changes
        assert what not in [change.what for change in others]


def test_where_nothing_fits_moments_in_8_bits_are_named_if_they_do(tmp_path: Path) -> None:
    """The plan that then fits, and its bytes; nothing of them where they do not help."""
    cluster = tmp_path / "c.toml"
    cluster.write_text('[cluster]\nnodes = 1\nmachine = "cpu-2"\ndevices_per_node = 1\n')
    with pytest.raises(LayoutError, match=r'; with optimizer\.kind = "adamw_8bit", one device .*fits in'):
        planned(_run("model.width=2176", "model.heads=16", "model.layers=12"), cluster, keep=1)
    with pytest.raises(LayoutError) as refusal:
        planned(_run("model.width=8192", "model.layers=40"), cluster, keep=1)
    assert "adamw_8bit" not in str(refusal.value)


def test_only_some_layers_recomputed_is_priced_between_none_and_all() -> None:
    """Two of the blocks: more memory and less time than all of them."""
    times, sizes = [], []
    for keys in ((), ('memory.recompute="full"', "memory.recompute_layers=[0, 1]"), ('memory.recompute="full"',)):
        run = _run(*keys)
        cluster = cluster_of(run, None)
        one = predictor_on(run, cluster).predict(written_plan(run, cluster))
        times.append(one.step_s)
        sizes.append(one.peak.activations)
    assert times == sorted(times)
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(times)) == len(set(sizes)) == 3


def test_recompute_by_budget_is_priced_between_none_and_full() -> None:
    """As whole blocks with as many bytes; with room for all it is none, and with next to nothing it is full."""
    found = []
    for budget in ("1 TiB", "4 MiB", "1 MiB", "1 B"):
        run = _run("memory.recompute=budget", f"memory.recompute_budget={budget}")
        found.append(written_plan(run, cluster_of(run, None)).recompute_share)
    assert found[0] == 0
    assert found == sorted(found)
    assert 0 < found[1] < found[2] < found[3] < 1
    run = _run("memory.recompute=budget", "memory.recompute_budget=1 GiB", "batch.sequence=64")
    assert written_plan(run, cluster_of(run, None)).recompute == "full"


@pytest.mark.parametrize("mixed", [{}, {"first_dense": 1}, {"moe_every": 2}, {"moe_every": 2, "first_dense": 1}])
def test_a_mixture_has_the_sizes_of_the_module(mixed: dict[str, int]) -> None:
    """Whatever blocks are mixtures: as many parameters as the model that is trained."""
    config = MoEConfig(vocabulary=64, layers=5, width=32, heads=2, experts=4, shared_experts=1, **mixed)
    run = msgspec.structs.replace(_run(), model=config)
    with torch.device("meta"):
        module = GPT(config)
    assert total_parameters(transformer_of(run.model)) == sum(parameter.numel() for parameter in module.parameters())


def test_layers_without_experts_take_less() -> None:
    """Every second block dense: fewer activations, half of the tokens sent to experts, less time."""
    found = []
    for every in (1, 2):
        config = MoEConfig(vocabulary=64, layers=4, width=256, heads=4, experts=8, moe_every=every)
        run = msgspec.structs.replace(_run(), model=config)
        cluster = cluster_from({"cluster": {"machine": "dgx-h100", "nodes": 1}}, file="here")
        found.append(predictor_on(run, cluster).predict(Plan(layout=EXPERTS, microbatch=1, microbatches=2)))
    mixed, half = found
    assert half.peak.activations < mixed.peak.activations
    assert half.bill.seconds["expert"] == pytest.approx(mixed.bill.seconds["expert"] / 2)
    assert half.step_s < mixed.step_s


def test_uneven_experts_cost_time_and_memory() -> None:
    """Every rank waits for the fullest one, which computes, sends and keeps more; a capacity bounds what it gets."""
    cluster = cluster_from({"cluster": {"machine": "dgx-h100", "nodes": 1}}, file="here")
    plan = Plan(layout=EXPERTS, microbatch=1, microbatches=2)

    def predicted(imbalance: float, **keys: float) -> Prediction:
        config = MoEConfig(vocabulary=64, layers=4, width=1024, heads=4, experts=8, **keys)
        run = msgspec.structs.replace(_run("batch.sequence=4096"), model=config)
        return predictor_on(run, cluster, expert_imbalance=imbalance).predict(plan)

    even, uneven, bounded = predicted(1.0), predicted(2.0), predicted(2.0, capacity_factor=1.0)
    for part in ("expert", "matrix products", "memory passes"):
        assert uneven.bill.seconds[part] > even.bill.seconds[part]
    assert uneven.peak.activations > even.peak.activations
    assert bounded.step_s == even.step_s
    assert predicted(1.0, capacity_factor=1.0).step_s == even.step_s


def test_a_rank_with_several_experts_is_less_uneven_than_an_expert() -> None:
    """One expert a rank: as uneven as experts are. Four times as many: half of the excess. All experts: even."""
    mixture = replace(transformer_of(_run().model), experts=16, experts_per_token=2, expert_imbalance=3.0)
    assert [mixture.fullest_rank(ranks) for ranks in (16, 4, 1)] == [3.0, 2.0, 1.0]
    assert replace(mixture, expert_imbalance=9.0).fullest_rank(2) == 2.0  # there is no more than all tokens


def test_float8_is_priced_where_the_device_has_it() -> None:
    """Faster than bfloat16 on a large GPT, with attention, head and memory as they were; an A100 has none."""
    large = ("model.layers=4", "model.width=4096", "model.heads=32", "batch.sequence=1024")
    h100 = cluster_from({"cluster": {"machine": "dgx-h100", "nodes": 1}}, file="here")
    plan = Plan(layout=Layout(shard=8), microbatch=2, microbatches=1, zero=3)
    plain, small = (
        predictor_on(_run(*large, f'precision.kind="{kind}"'), h100).predict(plan) for kind in ("bfloat16", "float8")
    )
    assert small.bill.seconds["matrix products"] < 0.7 * plain.bill.seconds["matrix products"]
    assert small.bill.seconds["memory passes"] > plain.bill.seconds["memory passes"]
    assert small.step_s < plain.step_s
    assert small.memory_bytes == plain.memory_bytes
    for same in ("attention", "head and loss"):
        assert small.bill.seconds[same] == plain.bill.seconds[same]
    a100 = cluster_from({"cluster": {"machine": "dgx-a100-80gb", "nodes": 1}}, file="here")
    with pytest.raises(ConfigError, match="no rate for float8"):
        predictor_on(_run(*large, 'precision.kind="float8"'), a100)


def test_masters_are_priced_as_they_lie() -> None:
    """Beside autocast of float32 weights: replicated two bytes a parameter more, under ZeRO-3 none, gathers halved."""
    large = ("model.layers=4", "model.width=1024", "model.heads=8")
    h100 = cluster_from({"cluster": {"machine": "dgx-h100", "nodes": 1}}, file="here")
    kinds = ("bfloat16", "bfloat16_params")
    for plan, more in ((Plan(layout=Layout(replicate=8), microbatch=2, microbatches=1), 2.0), (ZERO_3, 0.0)):
        auto, mixed = (
            max(predictor_on(_run(*large, f'precision.kind="{kind}"'), h100).predict(plan).footprints, key=state_of)
            for kind in kinds
        )
        numbers = auto.optimizer / 8 * (plan.layout.shard if plan.zero else 1)
        state = (state_of(mixed) - state_of(auto)) / numbers * (plan.layout.shard if plan.zero else 1)
        assert state == pytest.approx(more)
        assert mixed.gathered == pytest.approx(auto.gathered / 2)


ZERO_3 = Plan(layout=Layout(shard=8), microbatch=2, microbatches=1, zero=3)


def state_of(one: Footprint) -> float:
    """Bytes of what lives between two steps."""
    return one.weights + one.gradients + one.optimizer


def test_float8_layers_are_not_split() -> None:
    """A sentence before any rank starts, and no plan that splits them."""
    with pytest.raises(ConfigError, match=r"float8.*layout\.tensor"):
        _run('precision.kind="float8"', "layout.tensor=2")


def test_a_condition_that_is_none_is_refused_before_anything_is_priced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search of layouts of a large model takes minutes."""
    monkeypatch.setattr(answer, "predictor_of", Mock(side_effect=AssertionError))
    with pytest.raises(UsageError, match="is no condition on a plan"):
        planned(_run(), None, keep=1, why_not="nonsense=2")
