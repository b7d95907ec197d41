"""Table `[model]`. Imports no torch: a size that cannot be is refused before any process starts."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec

from shoal.config.check import Positive, PositiveFloat, Table, says
from shoal.models.attention_config import AttentionConfig, Causal, SparseAttentionConfig, mask_of
from shoal.models.huggingface.config import ForeignKeys, TransformersConfig

# Table `[adapter]`. Imports no torch.


class Addition(Table, frozen=True, kw_only=True):
    """The keys of every kind: the model is frozen, and what is added to it is trained."""

    train: Annotated[
        tuple[str, ...], says("Patterns of parameters (`head.*`, `*norm*`) that are trained as well, whole.")
    ] = ()


class PromptTuning(Addition, frozen=True, tag_field="kind", tag="prompt"):
    """Trained vectors before the tokens of every sequence (arXiv:2104.08691). They stay in exported weights."""

    tokens: Annotated[int, says("How many.", ge=1, le=1 << 14)] = 20


class Adapter(Addition, frozen=True, kw_only=True):
    """The keys of what is added to linear layers."""

    layers: Annotated[
        tuple[str, ...],
        says(
            "Patterns of names of linear layers (`blocks.*.query`) that get one; default: all but the output head.",
            min_length=1,
        ),
    ] = ("*",)


class LoRA(Adapter, frozen=True, tag_field="kind", tag="lora"):
    """Low-rank updates of linear layers: W + (alpha / rank) B A (arXiv:2106.09685). Merged into exported weights."""

    implemented_by: ClassVar[str] = "shoal.models.adapters:LoRALinear"

    rank: Annotated[int, says("Rank of each update.", ge=1, le=1 << 14)] = 8
    alpha: Annotated[PositiveFloat | None, says("The update is scaled by alpha / rank; default: 2 x rank.")] = None

    @property
    def scale(self) -> float:
        """What the product of both factors is multiplied by."""
        return 2.0 if self.alpha is None else self.alpha / self.rank


class DoRA(LoRA, frozen=True, tag_field="kind", tag="dora"):
    """LoRA, and a magnitude for each row of the weight (arXiv:2402.09353). Merged into exported weights."""

    implemented_by: ClassVar[str] = "shoal.models.adapters:DoRALinear"


class Bottleneck(Adapter, frozen=True, tag_field="kind", tag="bottleneck"):
    """Small layers behind linear ones: y + up(relu(down(y))) (arXiv:1902.00751). They stay in exported weights."""

    implemented_by: ClassVar[str] = "shoal.models.adapters:BottleneckLinear"

    width: Annotated[Positive, says("Features between `down` and `up`.")] = 16


class BitFit(Adapter, frozen=True, tag_field="kind", tag="bitfit"):
    """Trains biases alone (arXiv:2106.10199)."""

    layers: Annotated[
        tuple[str, ...],
        says("Patterns of names of layers (`encoder.*.query`) whose biases are trained; default: all.", min_length=1),
    ] = ("*",)


AdapterConfig = LoRA | DoRA | Bottleneck | BitFit | PromptTuning


SWIGLU_ROUNDING = 32
CHANNEL_MULTIPLE = 8
MOST_FEATURES = 1 << 24
Scaling = Literal["standard", "mup"]


class GPTConfig(Table, frozen=True, kw_only=True, tag_field="kind", tag="gpt"):
    """A decoder-only transformer: RMSNorm, rotary positions, grouped-query attention, SwiGLU or GELU."""

    implemented_by: ClassVar[str] = "shoal.models.gpt:GPT"

    vocabulary: Annotated[int, says("Different tokens; 256 for bytes.", ge=2, le=1 << 24)] = 256
    layers: Annotated[int, says("Blocks of attention and feed-forward.", ge=1, le=4096)] = 4
    width: Annotated[int, says("Features of the residual stream; a multiple of `heads`.", ge=2, le=1 << 20)] = 128
    heads: Annotated[int, says("Query heads in each block.", ge=1, le=4096)] = 4
    kv_heads: Annotated[
        Positive | None, says("Key and value heads, a divisor of `heads` (arXiv:2305.13245); default: `heads`.")
    ] = None
    head_size: Annotated[Positive | None, says("Features of a head, an even number; default: width / heads.")] = None
    feed_forward: Annotated[
        Literal["swiglu", "gelu"], says("Gated (arXiv:2002.05202) or plain feed-forward layers.")
    ] = "swiglu"
    feed_forward_width: Annotated[
        Positive | None,
        says(
            "Features inside the feed-forward; default: 4 x width for gelu, 8/3 x width rounded up to a multiple of 32 "
            "for swiglu."
        ),
    ] = None
    tied: Annotated[bool, says("Use the embedding's weights for the output head too.")] = False
    dropout: Annotated[float, says("Share of features dropped, keyed per sample; 0: none.", ge=0, lt=1)] = 0.0
    rope_base: Annotated[float, says("Base of the rotary wavelengths (arXiv:2104.09864).", gt=1, le=1e12)] = 10_000.0
    norm_eps: Annotated[float, says("Added to the mean square in RMSNorm.", gt=0, le=1)] = 1e-5
    attention: Annotated[AttentionConfig, says("Which tokens before it a token sees; `kind` says which.")] = Causal()
    scaling: Annotated[
        Scaling,
        says(
            'How first values and rates follow the width: "mup" (arXiv:2203.03466) makes the rate that was found at '
            "`base_width` right at every width; heads keep their size."
        ),
    ] = "standard"
    base_width: Annotated[Positive | None, says('The `width` at which rates were found, for `scaling = "mup"`.')] = None

    def __post_init__(self) -> None:
        check_scaling(self.scaling, self.base_width)
        if self.scaling == "mup" and self.tied:
            raise ValueError(
                'scaling = "mup" with tied = true: an embedding and a head follow the width in different ways; leave '
                "tied out"
            )
        if self.base_width is not None and self.base_width % self.size_of_head:
            raise ValueError(
                f"base_width = {self.base_width} with heads of {self.size_of_head} features; a wider model has "
                "more heads of the same size, so give as many heads as make width / heads the base model's"
            )
        step = 2 * self.heads
        if self.head_size is not None and self.head_size % 2:
            raise ValueError(
                f"head_size = {self.head_size}; rotary positions need an even number of features in each head: use "
                f"{self.head_size + 1}"
            )
        if self.head_size is None and self.width % step:
            raise ValueError(
                f"width = {self.width} with heads = {self.heads}; rotary positions need an even number of features in "
                f"each head, so width must be a multiple of 2 x heads = {step}; nearest: {_nearest(self.width, step)}"
            )
        if self.hidden_width > MOST_FEATURES:
            raise ValueError(
                f"feed_forward_width = {self.hidden_width}; a layer has at most {MOST_FEATURES} features: lower it"
            )
        if self.heads % self.key_value_heads:
            divisors = ", ".join(str(n) for n in range(1, self.heads + 1) if self.heads % n == 0)
            raise ValueError(
                f"kv_heads = {self.kv_heads} with heads = {self.heads}; each key and value head serves the same number "
                f"of query heads, so kv_heads must divide heads; use one of {divisors}"
            )

    @property
    def key_value_heads(self) -> int:
        """Key and value heads, the default resolved."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def size_of_head(self) -> int:
        """Features of a head, the default resolved."""
        return self.width // self.heads if self.head_size is None else self.head_size

    @property
    def hidden_width(self) -> int:
        """Features inside the feed-forward, the default resolved."""
        if self.feed_forward_width is not None:
            return self.feed_forward_width
        if self.feed_forward == "gelu":
            return 4 * self.width
        return -(-8 * self.width // (3 * SWIGLU_ROUNDING)) * SWIGLU_ROUNDING


class MoEConfig(GPTConfig, frozen=True, kw_only=True, tag_field="kind", tag="moe"):
    """A GPT whose feed-forwards are mixtures of experts: each token goes through a few of many."""

    experts: Annotated[int, says("Experts in each mixture.", ge=2, le=1 << 16)] = 8
    top_k: Annotated[int, says("Experts that each token goes through; of equal scores the lower index.", ge=1)] = 2
    expert_width: Annotated[
        Positive | None, says("Features inside each expert; default: those of a dense feed-forward over `top_k`.")
    ] = None
    shared_experts: Annotated[
        int, says("Experts that every token goes through, beside those (arXiv:2401.06066).", ge=0, le=1 << 10)
    ] = 0
    moe_every: Annotated[int, says("Every so many blocks one has a mixture, the others stay dense.", ge=1)] = 1
    first_dense: Annotated[int, says("The first blocks, which stay dense and are not counted.", ge=0)] = 0
    gate: Annotated[Literal["softmax", "sigmoid"], says("Scores over all experts together, or of each by itself.")] = (
        "softmax"
    )
    normalise_gates: Annotated[
        bool | None, says("Divide the chosen scores by their sum; default: yes, unless `top_k` is 1.")
    ] = None
    capacity_factor: Annotated[
        PositiveFloat | None,
        says(
            "An expert takes at most capacity_factor x top_k x length / experts tokens of a sequence, rounded up, the "
            "first ones; default: all (dropless)."
        ),
    ] = None
    balance: Annotated[
        Literal["auxiliary", "bias", "none"],
        says(
            "What keeps the loads even: a loss over each sequence (arXiv:2101.03961), or a bias on the choice that "
            "follows the loads of each step (arXiv:2408.15664)."
        ),
    ] = "auxiliary"
    balance_coefficient: Annotated[float, says('Weight of the loss of `balance = "auxiliary"`.', ge=0, le=1e3)] = 0.01
    bias_rate: Annotated[float, says('How far a step moves a bias of `balance = "bias"`.', ge=0, le=1)] = 1e-3
    router_z_loss: Annotated[
        float, says("Weight of the squared log-sum-exp of the router's logits (arXiv:2202.08906).", ge=0, le=1e3)
    ] = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.top_k > self.experts:
            raise ValueError(
                f"top_k = {self.top_k} with experts = {self.experts}; a token goes to different experts, so top_k is "
                f"at most {self.experts}: lower it"
            )
        if self.normalise_gates and self.top_k == 1:
            raise ValueError(
                "normalise_gates = true with top_k = 1; the only gate is then always 1 and the router learns nothing: "
                "leave it out or set it to false"
            )
        if self.first_dense + self.moe_every > self.layers:
            raise ValueError(
                f"first_dense = {self.first_dense} and moe_every = {self.moe_every} with layers = {self.layers}; no "
                f"block would have a mixture: their sum must be at most {self.layers}"
            )

    @property
    def gates_normalised(self) -> bool:
        """Are the chosen scores divided by their sum? The default resolved."""
        return self.top_k > 1 if self.normalise_gates is None else self.normalise_gates

    @property
    def width_of_expert(self) -> int:
        """Features inside each expert, the default resolved."""
        return max(1, self.hidden_width // self.top_k) if self.expert_width is None else self.expert_width


class ConvNetConfig(Table, frozen=True, kw_only=True, tag_field="kind", tag="convnet"):
    """A small convolutional net for small images."""

    implemented_by: ClassVar[str] = "shoal.models.small:convnet_from"

    channels: Annotated[int, says("Channels of the images: 1 for grey, 3 for colour.", ge=1, le=1024)] = 1
    classes: Annotated[int, says("Classes to tell apart.", ge=2, le=1 << 20)] = 10
    width: Annotated[
        int, says("Features of the first two layers, a multiple of 8; the last has four times.", ge=8, le=8192)
    ] = 32
    norm: Annotated[
        Literal["group", "batch"],
        says("Normalise over groups of features in each sample (group), or over declared groups of samples (batch)."),
    ] = "group"
    group_samples: Annotated[
        int, says('Consecutive samples whose statistics are taken together, for `norm = "batch"`.', ge=1, le=1 << 16)
    ] = 16

    def __post_init__(self) -> None:
        if self.width % CHANNEL_MULTIPLE:
            raise ValueError(
                f"width = {self.width}; features are normalised in {CHANNEL_MULTIPLE} groups, so width must be a "
                f"multiple of {CHANNEL_MULTIPLE}; nearest: {_nearest(self.width, CHANNEL_MULTIPLE)}"
            )


class MLPConfig(Table, frozen=True, kw_only=True, tag_field="kind", tag="mlp"):
    """A multi-layer perceptron over flat inputs."""

    implemented_by: ClassVar[str] = "shoal.models.small:mlp_from"

    inputs: Annotated[int, says("Numbers in one sample; samples of more dimensions are flattened.", ge=1, le=1 << 24)]
    hidden: Annotated[
        tuple[int, ...], says("Features of each hidden layer; empty: a linear model.", max_length=1024)
    ] = (128,)
    outputs: Annotated[int, says("Numbers that come out.", ge=1, le=1 << 24)]
    activation: Annotated[Literal["relu", "gelu", "tanh"], says("What follows each hidden layer.")] = "relu"
    scaling: Annotated[
        Scaling,
        says(
            'How first values and rates follow the width: "mup" (arXiv:2203.03466) makes the rate that was found at '
            "`base_width` right at every width of the hidden layers."
        ),
    ] = "standard"
    base_width: Annotated[
        Positive | None, says('The width of hidden layers at which rates were found, for `scaling = "mup"`.')
    ] = None

    def __post_init__(self) -> None:
        check_scaling(self.scaling, self.base_width)
        if self.scaling == "mup" and not self.hidden:
            raise ValueError('scaling = "mup" with hidden = []: a linear model has no width; leave scaling out')
        for features in self.hidden:
            if not 1 <= features <= MOST_FEATURES:
                raise ValueError(
                    f"hidden = {list(self.hidden)}; a hidden layer has from 1 to {MOST_FEATURES} features: "
                    f"replace {features}, or leave it out"
                )


class PythonModel(ForeignKeys, frozen=True, kw_only=True, tag_field="kind", tag="python"):
    """The user's own module."""

    build: Annotated[
        str, says('"package.module:function"; the function returns a `torch.nn.Module`.', pattern=r"^[^:\s]+:[^:\s]+$")
    ]
    arguments: Annotated[dict[str, Any], says("Keywords for the function.")] = msgspec.field(default_factory=dict)


BuiltInModel = GPTConfig | MoEConfig | ConvNetConfig | MLPConfig
ForeignModel = PythonModel | TransformersConfig
"""Models that Shoal did not write: they are built whole, with their first values."""

ModelConfig = GPTConfig | MoEConfig | ConvNetConfig | MLPConfig | PythonModel | TransformersConfig


def attention_mask_of(model: ModelConfig) -> SparseAttentionConfig | None:
    """The mask of `[model.attention]`; None where the model has none."""
    return mask_of(model.attention) if isinstance(model, GPTConfig | TransformersConfig) else None


def _nearest(found: int, step: int) -> str:
    """The multiples of `step` on both sides of `found`, as words."""
    below, above = found // step * step, -(-found // step) * step
    return f"{below} or {above}" if below else str(above)


def check_scaling(scaling: Scaling, base_width: int | None) -> None:
    """Raises `ValueError` where only one of the two is given."""
    if (scaling == "mup") != (base_width is not None):
        raise ValueError(
            f'scaling = "{scaling}" {"without" if base_width is None else "with"} base_width; muP is relative to the '
            'width at which rates were found: give both scaling = "mup" and base_width, or neither'
        )


# Table `[quantisation]`. Imports no torch.


class QuantisationConfig(Table, frozen=True, kw_only=True):
    """Linear layers compute with weights of few bits, as they will once deployed; what is trained stays as it is."""

    bits: Annotated[Literal[8, 4], says("Bits of a weight: integers from -127 to 127, or from -7 to 7.")] = 8
    group: Annotated[
        Positive | None, says("Weights of a row, one after the other, that share a scale; default: the row.")
    ] = None
    layers: Annotated[
        tuple[str, ...],
        says("Patterns of names of linear layers (`blocks.*.query`); default: all but the output head.", min_length=1),
    ] = ("*",)

    @property
    def largest(self) -> int:
        """The largest integer."""
        return 2 ** (self.bits - 1) - 1
