"""Table `[model.attention]`: which tokens before it a token sees. Imports no torch."""

from __future__ import annotations

from typing import Annotated, ClassVar

from shoal.config.table import Positive, Table, says


class Causal(Table, frozen=True, kw_only=True, tag_field="kind", tag="causal"):
    """All of them."""

    sparse: ClassVar[bool] = False


class SlidingWindow(Table, frozen=True, kw_only=True, tag_field="kind", tag="window"):
    """The last ones, and the first ones of the sequence (Longformer, arXiv:2004.05150)."""

    sparse: ClassVar[bool] = True

    window: Annotated[Positive, says("Tokens that a token sees, itself among them.")]
    dilation: Annotated[int, says("A token sees every so many tokens before it, over `window` x this.", ge=1)] = 1
    global_tokens: Annotated[int, says("The first tokens of a sequence, which all see.", ge=0)] = 0
    block: Annotated[int, says("Tokens whose queries are computed together.", ge=1, le=1 << 12)] = 64


class BigBird(Table, frozen=True, kw_only=True, tag_field="kind", tag="bigbird"):
    """Blocks of tokens: the last ones, the first ones, and some at random in between (arXiv:2007.14062)."""

    sparse: ClassVar[bool] = True

    window_blocks: Annotated[int, says("Blocks before and with its own that a token sees.", ge=1)] = 3
    global_blocks: Annotated[int, says("The first blocks of a sequence, which all see.", ge=0)] = 1
    random_blocks: Annotated[
        int, says("Others before its own that a block sees; the same in every step, drawn from `seed`.", ge=0)
    ] = 2
    seed: Annotated[int, says("Which random blocks a block sees follows from it.", ge=0, le=2**63 - 1)] = 0
    block: Annotated[int, says("Tokens in a block.", ge=1, le=1 << 12)] = 64


AttentionConfig = Causal | SlidingWindow | BigBird
SparseAttentionConfig = SlidingWindow | BigBird
