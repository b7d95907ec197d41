"""What a step did is seen from outside: its attention kernels, and its operations, beside PyTorch's own counter."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from shoal.assembly.metering import arithmetic
from shoal.cost.transformer import model_flops
from shoal.models.build import build
from shoal.models.config import GPTConfig
from shoal.observe.profile import first_step
from shoal.observe.profile.first_step import Attention, StepLook, StepOperations, kernels_here, why_math, work_of
from shoal.optim.muon import OwnedMuon
from shoal.planning.stack import transformer_of

HEADS, TOKENS, FEATURES = 4, 16, 8


def seen(step: Callable[[], Tensor]) -> StepOperations:
    """What a step of this loss did, backward included."""
    look = StepLook(compiled=False)
    with look.around(nullcontext)():
        step().backward()
    assert look.found is not None
    return look.found


def attention(**options: object) -> Tensor:
    query, key, value = (torch.randn(2, HEADS, TOKENS, FEATURES, requires_grad=True) for _ in range(3))
    return F.scaled_dot_product_attention(query, key, value, **options).sum()  # type: ignore[arg-type]


def test_each_kind_of_call_is_named_with_its_kernel() -> None:
    """On a CPU: flash with a mask too, math under dropout, which is warned of with its reason."""
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    work = seen(lambda: attention(is_causal=True) + attention(attn_mask=mask) + attention(dropout_p=0.25))
    assert work.facts() == [
        "1 call: flash, float32 [2, 4, 16, 8], causal",
        "1 call: flash, float32 [2, 4, 16, 8], a mask",
        "1 call: math, float32 [2, 4, 16, 8], no mask, dropout 0.25",
    ]
    (warning,) = work.warnings("cpu")
    assert "1 attention call of a step took PyTorch's plain kernel (math)" in warning
    assert "set the dropout of attention to 0" in warning


def test_a_kernel_that_a_script_has_chosen_is_no_warning() -> None:
    """`sdpa_kernel(MATH)` is a choice, and nothing about the call's shape is in the way of another."""
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        work = seen(lambda: attention(is_causal=True))
    assert [call.backend for call in work.attention] == ["math"]
    assert work.warnings("cpu") == []


def test_attention_inside_a_module_of_pytorchs_is_seen() -> None:
    """`nn.MultiheadAttention` calls it deep inside, under autocast in another type."""
    module, x = nn.MultiheadAttention(32, HEADS, batch_first=True), torch.randn(2, TOKENS, 32)

    def step() -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return module(x, x, x, need_weights=False)[0].float().sum()

    assert seen(step).facts() == ["1 call: flash, bfloat16 [2, 4, 16, 8], no mask"]


@pytest.mark.parametrize("first", [True, False], ids=["first", "inner"])
@pytest.mark.parametrize(
    ("model", "x"),
    [
        (nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4, bias=False)), torch.randn(5, 8)),
        (
            nn.Sequential(nn.Conv2d(3, 6, 3, stride=2), nn.ReLU(), nn.Conv2d(6, 4, 3)),
            torch.randn(2, 3, 11, 11),
        ),
        (nn.ConvTranspose2d(3, 5, 3, stride=2), torch.randn(2, 3, 5, 5)),
        (nn.Conv1d(4, 6, 3, padding="same", dilation=2), torch.randn(2, 4, 9)),
        (nn.Conv2d(3, 6, 3).double(), torch.randn(2, 3, 7, 7).double()),
    ],
    ids=["linear", "convolutional", "transposed", "padded", "double"],
)
def test_operations_are_those_of_pytorchs_counter(model: nn.Module, x: Tensor, *, first: bool) -> None:
    """Forward and backward; the model's are at most three times the forward. A first layer's input has no gradient."""
    x = x.detach().requires_grad_(not first)

    def loss() -> Tensor:
        return model(x).sum()

    with FlopCounterMode(display=False) as counter:
        loss().backward()
    work = seen(loss)
    assert work.hardware_flops == counter.get_total_flops() > 0
    assert work.model_flops == work.hardware_flops


def test_recomputation_counts_for_the_hardware_alone() -> None:
    """A checkpointed forward is computed twice."""
    model, x = nn.Linear(8, 8, bias=False), torch.randn(5, 8, requires_grad=True)
    plain = seen(lambda: model(x).sum())
    again = seen(lambda: checkpoint(model, x, use_reentrant=False).sum())
    assert again.model_flops == plain.model_flops == plain.hardware_flops
    assert again.hardware_flops == pytest.approx(4 / 3 * plain.hardware_flops)


def test_a_frozen_layer_costs_no_backward() -> None:
    """The model's operations are those that were made."""
    model = nn.Sequential(nn.Linear(8, 8, bias=False).requires_grad_(False), nn.Linear(8, 8, bias=False))
    work = seen(lambda: model(torch.randn(5, 8)).sum())
    assert work.model_flops == work.hardware_flops == 3 * 2 * 5 * 8 * 8


@pytest.mark.parametrize("kind", [torch.optim.Muon, OwnedMuon], ids=["pytorch", "shoal"])
def test_an_optimizers_products_count_for_the_hardware_alone(kind: Callable[..., torch.optim.Optimizer]) -> None:
    """Muon multiplies matrices as large as the layers."""
    model = nn.Linear(16, 16, bias=False)
    look, optimizer = StepLook(compiled=False), kind(model.parameters())
    with look.around(nullcontext)():
        model(torch.randn(4, 16)).sum().backward()
        optimizer.step()
    assert look.found is not None
    assert look.found.model_flops == 2 * 2 * 4 * 16 * 16
    assert look.found.hardware_flops >= look.found.model_flops + 5 * 3 * 2 * 16**3


def test_a_closures_forward_and_backward_are_the_models() -> None:
    """L-BFGS computes them in its step."""
    model, x = nn.Linear(16, 16, bias=False), torch.randn(4, 16)
    look, optimizer = StepLook(compiled=False), torch.optim.LBFGS(model.parameters(), max_iter=1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        return loss

    with look.around(nullcontext)():
        optimizer.step(closure)  # type: ignore[arg-type]
    assert look.found is not None
    assert look.found.model_flops == 2 * 2 * 4 * 16 * 16


def test_products_of_groups_count_once() -> None:
    """Experts: on a CPU each group is a product of its own, in the operator that stands for all."""
    tokens, experts = torch.randn(16, 8, dtype=torch.bfloat16), torch.randn(2, 8, 32, dtype=torch.bfloat16)
    ends = torch.tensor([4, 16], dtype=torch.int32)
    weight = torch.ones((), requires_grad=True)

    def loss() -> Tensor:
        return (torch.ops.aten._grouped_mm(tokens, experts, ends).sum() * weight).float()

    assert seen(loss).hardware_flops == 2 * 16 * 8 * 32


@pytest.mark.parametrize(
    ("shapes", "flops"),
    [([[16, 8], [2, 8, 32]], 2 * 16 * 8 * 32), ([[2, 4, 8], [8, 32]], 2 * 4 * 8 * 32), ([[], [8, 32]], 0)],
    ids=["rows", "columns", "unknown"],
)
def test_a_kernel_of_groups_is_one_product(shapes: list[list[int]], flops: float) -> None:
    """Of GPUs, with nothing in it. Groups of rows have a matrix each; groups of columns share theirs."""
    event = SimpleNamespace(
        name=lambda: "aten::_grouped_mm", shapes=lambda: shapes, start_ns=lambda: 0, end_ns=lambda: 1,
        start_thread_id=lambda: 1,
    )  # fmt: skip
    assert work_of([event]).model_flops == flops


def test_nested_tensors_count_by_their_parts() -> None:
    """Their operator has no shapes in a recording; what it calls for each tensor has."""
    layer, sizes = nn.Linear(8, 8, bias=False), (3, 5)
    left, right = ([torch.randn(n, 8), torch.randn(8, n)] for n in sizes)
    nested = [torch.nested.nested_tensor(list(each)) for each in zip(left, right, strict=True)]
    work = seen(lambda: layer(torch.randn(4, 8)).sum() + torch.bmm(*nested).to_padded_tensor(0.0).sum())
    assert work.model_flops == 2 * 2 * 4 * 8 * 8 + sum(2 * n * 8 * n for n in sizes)


def test_sparse_products_count_once() -> None:
    """One operator calls the other."""
    x = torch.randn(8, 4, requires_grad=True)
    work = seen(lambda: torch.sparse.mm(torch.eye(8).to_sparse_csr(), x).sum())
    assert work.model_flops <= 2 * 2 * 8 * 8 * 4


def test_a_gpts_operations_are_those_of_the_closed_form() -> None:
    """`cost.transformer`, causal attention counted once."""
    config = GPTConfig(layers=2, width=32, heads=4, vocabulary=64)
    model, tokens = build(config), torch.randint(64, (3, TOKENS))
    work = seen(lambda: F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()))
    assert work.model_flops == work.hardware_flops == model_flops(transformer_of(config), 3, TOKENS)


def test_compiled_calls_are_seen_in_the_second_step() -> None:
    """The first compiles, and is left alone."""
    look, found = StepLook(compiled=True), []
    compiled = torch.compile(lambda: attention(is_causal=True), backend="aot_eager")
    for _ in range(3):
        with look.around(nullcontext)():
            compiled().backward()
        found.append(None if look.found is None else look.found.facts())
    expected = ["1 call: flash, float32 [2, 4, 16, 8], causal"]
    assert found == [None, expected, expected]


def test_a_script_may_compile_its_own_model() -> None:
    """A compiler calls operators by the hundred in the first step: another one is looked at."""
    model, look = torch.compile(nn.Linear(16, 16, bias=False), backend="aot_eager"), StepLook(compiled=False)
    found = []
    for _ in range(3):
        with look.around(nullcontext)():
            model(torch.randn(8, 16)).sum().backward()
        found.append(look.found and look.found.model_flops)
    assert found == [None, *2 * [2 * 2 * 8 * 16 * 16]]


def test_of_many_microbatches_a_part_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are like it: time and memory of a look do not grow with their number."""
    monkeypatch.setattr(first_step, "ENOUGH_S", 0.0)
    recorded: list[int] = []

    def work(events: Sequence[Any]) -> StepOperations:
        recorded.append(sum(event.name() == "aten::scaled_dot_product_attention" for event in events))
        return work_of(events)

    monkeypatch.setattr(first_step, "work_of", work)
    look = StepLook(compiled=False)
    with look.around(nullcontext)():
        for _ in range(5):
            look.microbatch()
            attention(is_causal=True).backward()
    whole = seen(lambda: attention(is_causal=True))
    assert look.found == whole.times(5)
    assert recorded == [1, 1]
    assert whole.times(5).facts() == ["5 calls: flash, float32 [2, 4, 16, 8], causal"]


def test_what_cannot_be_read_ends_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said once, and nothing is claimed."""
    told: list[str] = []
    look = StepLook(compiled=False, warn=told.append)
    monkeypatch.setattr(first_step, "PRODUCTS", {"mm": 7})  # a version of PyTorch with other arguments
    for _ in range(2):
        with look.around(nullcontext)():
            torch.ones(2, 2).mm(torch.ones(2, 2))
    assert look.found is None
    assert len(told) == 1
    assert "could not be read" in told[0]


@pytest.mark.slow
def test_looking_imports_nothing() -> None:
    """`torch.profiler.profile` imports eight hundred modules when it begins, which would take a second of every run."""
    program = (
        "import sys, torch\n"
        "from contextlib import nullcontext\n"
        "from shoal.observe.profile.first_step import StepLook\n"
        "before = set(sys.modules)\n"
        "with StepLook(compiled=False).around(nullcontext)():\n"
        "    torch.ones(2, 2, requires_grad=True).mm(torch.ones(2, 2)).sum().backward()\n"
        "print(len(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 20
    assert done.stderr == ""  # nor does it say that it begins and ends


def test_another_profiler_is_left_alone() -> None:
    """One that is at work would be ended by a second."""
    look = StepLook(compiled=False)
    with profile(activities=[ProfilerActivity.CPU]) as profiler, look.around(nullcontext)():
        attention().backward()
    assert look.found is None
    assert any("scaled_dot_product" in event.key for event in profiler.key_averages())


WARMS_UP = (
    "profiler = torch.profiler.profile(schedule=torch.profiler.schedule(wait=0, warmup=1, active=1), acc_events=True)\n"
    "profiler.start()\n"
    "for _ in range(2):\n"
    "    with look():\n"
    "        product()\n"
    "    profiler.step()\n"
    "profiler.stop()\n"
)
BEGINS_INSIDE = "with look():\n    product()\n    with torch.profiler.profile() as profiler:\n        product()\n"
STARTS_INSIDE = (
    "profiler = torch.profiler.profile(schedule=torch.profiler.schedule(wait=1, warmup=1, active=1), acc_events=True)\n"
    "profiler.start()\n"
    "with look():\n"
    "    product()\n"
    "    profiler.step()\n"
    "    product()\n"
    "profiler.step()\n"
    "product()\n"
    "profiler.step()\n"
)


@pytest.mark.slow
@pytest.mark.parametrize("script", [WARMS_UP, BEGINS_INSIDE, STARTS_INSIDE], ids=["warm-up", "inside", "steps inside"])
def test_a_scripts_profiler_sees_what_it_would_see_alone(script: str) -> None:
    """PyTorch has one profiler: a second one beside it is a segmentation fault, or takes its events."""
    program = (
        "import os, torch, torch.profiler\n"
        "from contextlib import nullcontext\n"
        "from shoal.observe.profile.first_step import StepLook\n"
        "looks = StepLook(compiled=False)\n"
        "look = looks.around(nullcontext)\n"
        "product = lambda: torch.ones(8, 8) @ torch.ones(8, 8)\n"
        f"{script}"
        "seen = [event for event in profiler.events() if event.name == 'aten::mm']\n"
        "print(len(seen), looks.found, os.environ.get('KINETO_LOG_LEVEL'))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "None", "None"]


@pytest.mark.parametrize(
    ("call", "device", "reason"),
    [
        (Attention("math", (2, 4, 16, 8), (2, 4, 16, 8), (2, 4, 16, 4), "float32"), "cpu", "make them equal"),
        (Attention("math", (4, 16, 8), (4, 16, 8), (4, 16, 8), "float32"), "cpu", "3 dimensions"),
        (Attention("math", (2, 4, 16, 8), (2, 4, 16, 8), (2, 4, 16, 8), "float64"), "cuda", "float64"),
        (Attention("math", *3 * [(2, 4, 16, 20)], "bfloat16", mask=True), "cuda", "multiple of 8"),
        (Attention("math", (2, 4, 16, 6), (2, 4, 16, 6), (2, 4, 16, 6), "float32"), "cuda", "multiple of 4"),
        (Attention("math", (2, 4, 16, 8), (2, 4, 16, 8), (2, 4, 16, 12), "bfloat16"), "cuda", "heads of 12 features"),
        (Attention("math", (2, 4, 16, 8), (2, 4, 16, 8), (2, 4, 16, 16), "bfloat16"), "cuda", None),
        (Attention("math", (2, 4, 16, 8), (2, 4, 16, 8), (2, 4, 16, 8), "float64"), "mps", None),
    ],
)
def test_why_a_call_took_the_plain_kernel(call: Attention, device: str, reason: str | None) -> None:
    """By PyTorch's rules, with the repair."""
    found = why_math(call, device)
    assert found is None if reason is None else reason in str(found)


@pytest.mark.parametrize("shape", [(2, 4, 16, 8), (4, 16, 8)])
@pytest.mark.parametrize("values", [8, 4])
def test_the_rules_of_a_cpu_are_pytorchs(shape: tuple[int, ...], values: int) -> None:
    """Where a rule says that no fast kernel takes a call, none does; and the other way round."""
    query, value = torch.randn(shape, requires_grad=True), torch.randn(*shape[:-1], values, requires_grad=True)
    (call,) = seen(lambda: F.scaled_dot_product_attention(query, query, value).sum()).attention
    assert (call.backend == "math") == (why_math(call, "cpu") is not None)


def test_the_doctor_tries_each_type() -> None:
    """Here flash takes all of them."""
    assert kernels_here(torch.device("cpu")) == dict.fromkeys(["bfloat16", "float16", "float32", "float64"], "flash")


def test_no_events_are_no_work() -> None:
    """A rank that computes nothing."""
    assert work_of([]) == StepOperations({}, 0.0, 0.0)


def _refused() -> str:
    raise RuntimeError("mix of the legacy and new APIs to set the TF32 flags")


def test_tf32_is_known_however_a_script_has_asked_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a script uses PyTorch's newer way, the older raises: this is no reason to end a run."""
    assert arithmetic("float32") == "float32"
    monkeypatch.setattr(torch, "get_float32_matmul_precision", _refused)
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(fp32_precision="tf32"))
    assert arithmetic("float32") == "tfloat32"
    assert arithmetic("bfloat16_params") == "bfloat16"
