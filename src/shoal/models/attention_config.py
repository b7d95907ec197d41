"""Table `[model.attention]`: which tokens before it a token sees. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from shoal.config.check import Positive, Table, says


class Causal(Table, frozen=True, kw_only=True, tag_field="kind", tag="causal"):
    """All of them."""


class SparseMask(Table, frozen=True, kw_only=True):
    """The keys of every kind that leaves tokens out."""

    block: Annotated[int, says("Tokens whose queries are computed together.", ge=1, le=1 << 12)] = 64
    form: Annotated[
        Literal["auto", "blocks", "flex"],
        says(
            "Kept blocks are gathered and multiplied by PyTorch's attention, or given to FlexAttention, which is "
            "compiled at the first step and has no backward on CPUs. auto: flex on GPUs, for numbers of 32 bits or "
            "fewer and without run.compile; else blocks."
        ),
    ] = "auto"


class SlidingWindow(SparseMask, frozen=True, kw_only=True, tag_field="kind", tag="window"):
    """The last ones, and the first ones of the sequence (Longformer, arXiv:2004.05150)."""

    window: Annotated[Positive, says("Tokens that a token sees, itself among them.")]
    dilation: Annotated[int, says("A token sees every so many tokens before it, over `window` x this.", ge=1)] = 1
    global_tokens: Annotated[int, says("The first tokens of a sequence, which all see.", ge=0)] = 0


class BigBird(SparseMask, frozen=True, kw_only=True, tag_field="kind", tag="bigbird"):
    """Blocks of tokens: the last ones, the first ones, and some at random in between (arXiv:2007.14062)."""

    window_blocks: Annotated[int, says("Blocks before and with its own that a token sees.", ge=1)] = 3
    global_blocks: Annotated[int, says("The first blocks of a sequence, which all see.", ge=0)] = 1
    random_blocks: Annotated[
        int, says("Others before its own that a block sees; the same in every step, drawn from `seed`.", ge=0)
    ] = 2
    seed: Annotated[int, says("Which random blocks a block sees follows from it.", ge=0, le=2**63 - 1)] = 0


class BlockLists(SparseMask, frozen=True, kw_only=True, tag_field="kind", tag="blocks"):
    """The blocks that a list names, for each block of the sequence."""

    kept: Annotated[
        tuple[tuple[int, ...], ...],
        says(
            "For each block of `block` tokens, the numbers of the earlier blocks that its tokens see beside their own; "
            "[[], [0], [0]] leaves block 1 out of what block 2 sees. As many lists as the longest sequence has blocks.",
            min_length=1,
        ),
    ]

    def __post_init__(self) -> None:
        for own, seen in enumerate(self.kept):
            wrong = next((block for block in seen if not 0 <= block <= own), None)
            if wrong is not None:
                raise ValueError(
                    f"kept[{own}] names block {wrong}; attention is causal, so block {own} sees blocks from 0 to "
                    f"{own}: take {wrong} out"
                )

    @property
    def tokens(self) -> int:
        """The longest sequence that has a list for each of its blocks."""
        return len(self.kept) * self.block


SparseAttentionConfig = SlidingWindow | BigBird | BlockLists
AttentionConfig = Causal | SparseAttentionConfig


def mask_of(attention: str | AttentionConfig) -> SparseAttentionConfig | None:
    """What leaves tokens out of the key `model.attention`; None where a token sees all before it."""
    return attention if isinstance(attention, SlidingWindow | BigBird | BlockLists) else None
