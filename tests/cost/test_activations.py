"""Activation bytes against Korthikanti et al. and the measured peaks of Zero Bubble."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from shoal.cost.activations import Kept, in_flight, layer_activation_bytes, loss_bytes
from shoal.cost.footprint import MEGATRON_FP16, Overheads, footprint
from shoal.cost.plan import Plan, Schedule
from shoal.cost.transformer import Recompute, gpt, llama
from shoal.topology.layout import Layout

PUBLISHED = Path(__file__).parent.parent / "planner" / "published"
PAPER = Kept(element_bytes=2, dropout=True, flash_attention=False)
LAYERS, HIDDEN, HEADS, SEQUENCE, BATCH = 4, 6144, 64, 2048, 4
PEAK_ERROR = 0.10
"""The papers' gigabytes are whole numbers, and include what the allocator rounds up."""


@pytest.mark.parametrize(
    ("tensor", "sequence_parallel", "recompute", "unsplit", "split", "square"),
    [
        (1, False, "none", 10, 24, True),
        (8, False, "none", 10, 24, True),
        (8, True, "none", 10, 24, True),
        (8, True, "selective", 10, 24, False),
        (8, False, "selective", 10, 24, False),
        (8, False, "full", 2, 0, False),
    ],
)
def test_the_forms_of_the_paper(
    tensor: int, sequence_parallel: bool, recompute: Recompute, unsplit: int, split: int, square: bool
) -> None:
    """Table 2 of arXiv:2205.05198: sbh(10 + 24/t + 5as/ht), and over t with sequence parallelism."""
    model = gpt(LAYERS, HIDDEN, HEADS)
    found = layer_activation_bytes(
        model, BATCH * SEQUENCE, SEQUENCE,
        tensor=tensor, sequence_parallel=sequence_parallel, recompute=recompute, kept=PAPER,
    )  # fmt: skip
    sbh = SEQUENCE * BATCH * HIDDEN
    quadratic = 5 * HEADS * SEQUENCE / HIDDEN / tensor if square else 0
    expected = sbh * (unsplit / (tensor if sequence_parallel else 1) + split / tensor + quadratic)
    assert found == pytest.approx(expected, rel=1e-12)


def test_flash_attention_keeps_no_square() -> None:
    """It stores as little as selective recomputation does."""
    model = gpt(LAYERS, HIDDEN, HEADS)
    flash = Kept(element_bytes=2, dropout=True, flash_attention=True)
    sizes = [
        layer_activation_bytes(
            model, BATCH * SEQUENCE, SEQUENCE, tensor=1, sequence_parallel=False, recompute=recompute, kept=kept
        )
        for recompute, kept in (("none", flash), ("selective", PAPER))
    ]
    assert sizes[0] == sizes[1]


def test_autocast_keeps_the_stream_wide_and_eager_gates_one_more() -> None:
    """Two of the four unsplit numbers double; a gate by operators keeps four inner numbers, a fused one three."""
    plain, wide = Kept(), Kept(stream_bytes=4)
    model = llama(2, 1024, 16, kv_heads=16, feed_forward=4096, vocabulary=32000)

    def kept(how: Kept) -> float:
        return layer_activation_bytes(model, 1, SEQUENCE, tensor=1, sequence_parallel=False, recompute="none", kept=how)

    assert kept(wide) - kept(plain) == 4 * 1024
    assert kept(Kept(eager=True)) - kept(plain) == 2 * 4096


def test_the_loss_keeps_logits_and_their_gradient() -> None:
    """4 s b V / t each and the head's input twice; two more in 16 bits under PyTorch's cast; those alone where one
    kernel does it all; and all of the vocabulary where tensor ranks gather it."""
    model = gpt(LAYERS, HIDDEN, HEADS, vocabulary=51200)

    def bytes_of(kept: Kept) -> float:
        return loss_bytes(model, 100, tensor=4, kept=kept)

    head = 100 * 2 * 2 * HIDDEN / 4
    assert bytes_of(Kept()) == 100 * 8 * 51200 / 4 + head
    assert bytes_of(Kept(eager_loss=True)) == 100 * 12 * 51200 / 4 + head
    assert bytes_of(Kept(fused_loss=True)) == 100 * 4 * 51200 / 4 + head
    assert bytes_of(Kept(eager_loss=True, whole_loss=True)) == 100 * 12 * 51200 + head


@pytest.mark.parametrize(
    ("schedule", "rank", "held"),
    [("GPipe", 0, 16), ("1F1B", 0, 4), ("1F1B", 3, 1), ("ZB-H1", 0, 4), ("ZB-H2", 0, 7), ("ZBVZeroBubble", 2, 4)],
)
def test_microbatches_in_flight(schedule: Schedule, rank: int, held: float) -> None:
    """Four ranks, sixteen microbatches."""
    assert in_flight(schedule, rank, pipeline=4, virtual_stages=1, microbatches=16) == held


def test_interleaving_holds_the_papers_share_more() -> None:
    """p (1 + (p-1)/(pv)) microbatches on the first rank (arXiv:2205.05198), never more than there are."""
    assert in_flight("Interleaved1F1B", 0, pipeline=8, virtual_stages=3, microbatches=64) == 8 * (1 + 7 / 24)
    assert in_flight("Interleaved1F1B", 0, pipeline=8, virtual_stages=3, microbatches=8) == 8


def test_peaks_of_one_forward_one_backward_are_those_measured() -> None:
    """The 1F1B rows of arXiv:2401.10241, table 4: 30 to 43 GB. Its stages are those of `layers + 2` layers."""
    with open(PUBLISHED / "zero_bubble_table4.csv", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["schedule"] == "1F1B"]
    assert rows
    for row in rows:
        ranks, hidden = int(row["PP(gpus)"]), int(row["hidden"])
        model = gpt(int(row["layers"]) + 2, hidden, int(row["heads"]), vocabulary=50304, positions=1024)
        plan = Plan(
            layout=Layout(pipeline=ranks),
            microbatch=int(row["micro_batch"]),
            microbatches=int(row["num_microbatches"]),
        )
        # Both ends have a layer less there, so the second rank is the fullest.
        peak = footprint(
            model, plan, rank=1, sequence=int(row["seq_len"]), state=MEGATRON_FP16, kept=PAPER,
            overheads=Overheads(workspace_bytes=0, slack_share=0),
        ).total  # fmt: skip
        assert peak / 2**30 == pytest.approx(float(row["peak_mem_GB"]), rel=PEAK_ERROR), row
