"""Modules as people write and publish them, right as they are: none declares anything to Shoal.

Each takes tokens `[batch, 16]` below 61 or pictures `[batch, 3, 8, 8]` of ten classes, and returns logits.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, WIDTH, SEQUENCE, CLASSES = 61, 16, 16, 10


class Tokens(nn.Module):
    """Embeddings, `body` on `[batch, seq, width]`, logits."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.embedding, self.body, self.head = nn.Embedding(VOCABULARY, WIDTH), body, nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(self.embedding(tokens)))


class Recurrence(nn.Module):
    """An LSTM or GRU with dropout between its layers; packed sequences have none, as their masks follow no sample."""

    def __init__(self, kind: Callable[..., nn.Module], *, both: bool = False, packed: bool = False) -> None:
        super().__init__()
        self.cells: Any = kind(WIDTH, WIDTH, 2, batch_first=True, dropout=0.0 if packed else 0.3, bidirectional=both)
        self.out, self.packed = nn.Linear(2 * WIDTH if both else WIDTH, WIDTH), packed

    def forward(self, x: Tensor) -> Tensor:
        if not self.packed:
            return self.out(self.cells(x)[0])
        lengths = torch.full((len(x),), x.shape[1])
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        return self.out(nn.utils.rnn.pad_packed_sequence(self.cells(packed)[0], batch_first=True)[0])


class Convolutions(nn.Module):
    """A temporal convolutional net: causal, dilated, with weight norm and dropout of channels."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.utils.parametrizations.weight_norm
        self.layers = nn.ModuleList(norm(nn.Conv1d(WIDTH, WIDTH, 3, dilation=2**i)) for i in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = x.transpose(1, 2)
        for i, layer in enumerate(self.layers):
            y = y + F.dropout1d(F.relu(layer(F.pad(y, (2 * 2**i, 0)))), 0.1, self.training)
        return y.transpose(1, 2)


class Mixer(nn.Module):
    """MLP-Mixer: over positions, then over features."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.over_positions = nn.Sequential(nn.Linear(SEQUENCE, 32), nn.GELU(), nn.Linear(32, SEQUENCE))
        self.over_features = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.over_positions(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        return x + self.over_features(self.norms[1](x))


class StateSpace(nn.Module):
    """A diagonal state space model, unrolled over the sequence, with a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.decay, self.step = nn.Parameter(torch.randn(WIDTH)), nn.Linear(WIDTH, WIDTH)
        self.gate, self.skip = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        state, seen = torch.zeros_like(x[:, 0]), []
        for item in self.step(x).unbind(1):
            state = torch.sigmoid(self.decay) * state + item
            seen.append(state)
        return (torch.stack(seen, 1) + self.skip * x) * F.silu(self.gate(x))


class LinearAttention(nn.Module):
    """Attention by cumulative sums of outer products."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        sums = torch.einsum("bsi,bsj->bsij", k, v).cumsum(1)
        return x + torch.einsum("bsi,bsij->bsj", q, sums) / (q * k.cumsum(1)).sum(-1, keepdim=True)


class GraphNet(nn.Module):
    """Two layers of graph convolution: positions of one sample with the same embedding sign are neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        near = (x[..., :1] > 0) == (x[..., :1] > 0).transpose(1, 2)
        degree = near.sum(-1, keepdim=True).clamp(min=1)
        for layer in self.layers:
            x = F.dropout(F.relu(layer(near.to(x) @ x / degree)) + x, 0.1, self.training)
        return x


class Perceiver(nn.Module):
    """Learned latents ask the sequence, and the sequence asks the latents."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(4, WIDTH))
        self.read, self.write = (nn.MultiheadAttention(WIDTH, 4, dropout=0.1, batch_first=True) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        latents = self.read(self.latents.expand(len(x), -1, -1), x, x, need_weights=False)[0]
        return x + self.write(x, latents, latents, need_weights=False)[0]


class Equilibrium(nn.Module):
    """A fixed point, solved without gradient and then passed once with it; Euler steps of an ODE in front."""

    def __init__(self) -> None:
        super().__init__()
        self.field, self.layer = nn.Linear(WIDTH, WIDTH), nn.utils.parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = x + 0.1 * torch.tanh(self.field(x))
        with torch.no_grad():
            z = torch.zeros_like(x)
            for _ in range(8):
                z = 0.5 * torch.tanh(self.layer(z)) + x
        return 0.5 * torch.tanh(self.layer(z)) + x


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter, and a gate whose experts are all run."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
        self.gate, self.experts = nn.Linear(WIDTH, 3), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.base(x) + self.up(F.dropout(self.down(x), 0.2, self.training))
        answers = torch.stack([expert(x) for expert in self.experts], -1)
        return (answers * self.gate(x).softmax(-1)[..., None, :]).sum(-1)


class Unused(nn.Module):
    """A parameter that no loss reaches, one used twice, a buffer of state, and a branch by the sample."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.never = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        y = self.layer(F.relu(self.layer(x)))
        return torch.where(x.mean((1, 2), keepdim=True) > 0, y, -y)


class VariationalNet(nn.Module):
    """An encoder's mean and spread, a draw, a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.spread, self.decode = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.mean(x) + torch.exp(0.1 * self.spread(x)) * torch.randn_like(x))


class UNet(nn.Module):
    """Down, up and across, with group norms."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.down = _conv(3, 8), _conv(8, 16)
        self.up, self.last = nn.ConvTranspose2d(16, 8, 2, stride=2), _conv(16, 8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        low = F.dropout2d(self.down(F.max_pool2d(first, 2)), 0.1, self.training)
        return self.head(self.last(torch.cat([first, self.up(low)], 1)).mean((2, 3)))


def _conv(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.SiLU())


class ConvNext(nn.Module):
    """Depthwise convolutions, layer scale and stochastic depth."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 2, stride=2)
        self.blocks = nn.ModuleList(nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH) for _ in range(3))
        self.scales = nn.ParameterList(torch.full((WIDTH, 1, 1), 0.1) for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block, scale in zip(self.blocks, self.scales, strict=True):
            kept = F.dropout(torch.ones(len(x), 1, 1, 1), 0.2, self.training)
            x = x + kept * scale * F.gelu(block(x))
        return self.head(x.mean((2, 3)))


class DenseNet(nn.Module):
    """Every layer sees all before it; instance norms; squeeze and excite."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(3 + 4 * i, 4, 3, padding=1) for i in range(3))
        self.norm, self.squeeze = nn.InstanceNorm2d(4, affine=True), nn.Linear(15, 15)
        self.head = nn.Linear(15, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.cat([x, F.leaky_relu(self.norm(layer(x)))], 1)
        pooled = x.mean((2, 3))
        return self.head(pooled * torch.sigmoid(self.squeeze(pooled)))


class PatchTransformer(nn.Module):
    """A vision transformer of PyTorch's own layers, with their dropout and a class token."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, stride=4)
        self.token, self.places = nn.Parameter(torch.zeros(1, 1, WIDTH)), nn.Parameter(torch.randn(1, 5, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 32, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.places
        return self.head(self.encoder(x)[:, 0])


class Translator(nn.Module):
    """`nn.Transformer`, encoder and decoder, with causal masks."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = nn.Transformer(WIDTH, 4, 1, 1, 32, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.whole(x, x, src_mask=mask, tgt_mask=mask, memory_mask=mask)


DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "pad_token_id": 0,
    "num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
ENCODER: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64,
}  # fmt: skip
NAMED: dict[str, Any] = {"num_labels": CLASSES}
PATCHES = NAMED | {"image_size": 8, "patch_size": 4}
PUBLISHED: dict[str, dict[str, Any]] = {
    "GPT2LMHeadModel": {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4},
    "LlamaForCausalLM": DECODER,
    "MistralForCausalLM": DECODER | {"sliding_window": 8},
    "Qwen2ForCausalLM": DECODER,
    "Qwen3ForCausalLM": DECODER | {"head_dim": 8},
    "GemmaForCausalLM": DECODER | {"head_dim": 8},
    "PhiForCausalLM": DECODER,
    "GPTNeoXForCausalLM": ENCODER | {"hidden_dropout": 0.1, "attention_dropout": 0.1},
    "OPTForCausalLM": ENCODER | {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "BloomForCausalLM": {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4, "hidden_dropout": 0.1},
    "MixtralForCausalLM": DECODER | {"num_local_experts": 4},
    "BertForMaskedLM": ENCODER,
    "RobertaForMaskedLM": ENCODER,
    "AlbertForMaskedLM": ENCODER | {"embedding_size": 16},
    "DistilBertForMaskedLM": {"vocab_size": VOCABULARY, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4},
    "ElectraForMaskedLM": ENCODER | {"embedding_size": 16},
    "ViTForImageClassification": ENCODER | PATCHES,
    "DeiTForImageClassification": ENCODER | PATCHES,
    "ConvNextForImageClassification": NAMED | {
        "patch_size": 2, "hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "drop_path_rate": 0.1,
    },
}  # fmt: skip
"""Architectures of transformers with the dropout of their default configs."""

NORMALISED: dict[str, dict[str, Any]] = {
    "ResNetForImageClassification": NAMED | {
        "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2], "layer_type": "basic",
    },
    "RegNetForImageClassification": NAMED | {
        "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "groups_width": 4,
    },
    "MobileNetV2ForImageClassification": NAMED | {"depth_multiplier": 0.25, "image_size": 32},
}  # fmt: skip
"""Of transformers, with batch norms, which take their statistics over groups of samples."""

TORCHVISION: dict[str, Callable[[Any], nn.Module]] = {
    "ResNet": lambda vision: vision.ResNet(vision.resnet.BasicBlock, [1, 1, 1, 1], num_classes=CLASSES),
    "MobileNetV2": lambda vision: vision.MobileNetV2(num_classes=CLASSES, width_mult=0.25),
    "ShuffleNetV2": lambda vision: vision.ShuffleNetV2([1, 1, 1], [8, 16, 24, 32, 48], num_classes=CLASSES),
    "DenseNet": lambda vision: vision.DenseNet(4, (2, 2), 8, num_classes=CLASSES, drop_rate=0.1),
    "VisionTransformer": lambda vision: vision.VisionTransformer(
        32, 8, num_layers=2, num_heads=4, hidden_dim=32, mlp_dim=48, dropout=0.1, num_classes=CLASSES
    ),
    "SwinTransformer": lambda vision: vision.SwinTransformer(
        [2, 2], 16, [1, 1], [2, 2], [4, 4], stochastic_depth_prob=0.1, num_classes=CLASSES
    ),
    "SwinTransformer of version 2": lambda vision: vision.SwinTransformer(
        [2, 2], 16, [1, 1], [2, 2], [4, 4], stochastic_depth_prob=0.1, num_classes=CLASSES,
        block=vision.swin_transformer.SwinTransformerBlockV2, downsample_layer=vision.swin_transformer.PatchMergingV2,
    ),
    "resnet18": lambda vision: vision.resnet18(num_classes=CLASSES),
    "MobileNetV3": lambda vision: vision.MobileNetV3(
        [vision.mobilenetv3.InvertedResidualConfig(16, 3, 16, 16, True, "RE", 2, 1, 0.5),
         vision.mobilenetv3.InvertedResidualConfig(16, 5, 48, 16, True, "HS", 1, 1, 0.5)],
        32, num_classes=CLASSES, dropout=0.2,
    ),
    "EfficientNet": lambda vision: vision.EfficientNet(
        [vision.efficientnet.MBConvConfig(1, 3, 1, 8, 8, 1), vision.efficientnet.MBConvConfig(4, 3, 2, 8, 16, 2)],
        dropout=0.2, stochastic_depth_prob=0.2, num_classes=CLASSES, last_channel=32,
    ),
    "ConvNeXt": lambda vision: vision.ConvNeXt(
        [vision.convnext.CNBlockConfig(8, 16, 1), vision.convnext.CNBlockConfig(16, None, 2)],
        stochastic_depth_prob=0.1, num_classes=CLASSES,
    ),
    "MaxVit": lambda vision: vision.MaxVit((32, 32), 8, 4, [8, 16], [1, 1], 4, 0.1, num_classes=CLASSES),
    "SqueezeNet": lambda vision: vision.SqueezeNet(num_classes=CLASSES, dropout=0.2),
    "RegNet": lambda vision: vision.RegNet(
        vision.regnet.BlockParams([1, 1], [8, 16], [4, 8], [1.0, 1.0], [2, 2], 0.25), num_classes=CLASSES, stem_width=8
    ),
}  # fmt: skip
"""Classes of torchvision, small; what they hold of batch norms takes its statistics over groups of samples."""

TIMM: dict[str, dict[str, Any]] = {
    "convnext_atto": {"dims": (8, 16, 24, 32), "depths": (1, 1, 2, 1), "drop_path_rate": 0.1},
    "efficientnet_lite0": {"drop_path_rate": 0.2},
    "mobilenetv3_small_050": {"drop_rate": 0.2},
    "resnet10t": {"stem_width": 8, "drop_path_rate": 0.1},
    "resnetv2_50": {"layers": (1, 1, 1, 1), "channels": (16, 32, 32, 64)},
    "regnetx_002": {},
    "ghostnet_050": {},
    "lcnet_035": {},
    "vit_tiny_patch16_224": {
        "img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4, "drop_rate": 0.1,
        "attn_drop_rate": 0.1, "drop_path_rate": 0.1, "patch_drop_rate": 0.25,
    },
    "swin_tiny_patch4_window7_224": {
        "img_size": 32, "window_size": 4, "patch_size": 2, "embed_dim": 16, "depths": (1, 2), "num_heads": (2, 4),
    },
    "deit3_small_patch16_224": {
        "img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4, "drop_path_rate": 0.2,
    },
    "xcit_nano_12_p16_224": {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4},
}  # fmt: skip
"""Models of timm by name, with arguments that make them small; random weights."""


def published(architecture: str) -> nn.Module:
    """One of `PUBLISHED` or `NORMALISED`, as its own class makes it."""
    import transformers

    kind = getattr(transformers, architecture)
    return kind(kind.config_class(**(PUBLISHED | NORMALISED)[architecture]))


OWN: dict[str, Callable[[], nn.Module]] = {
    "LSTM": lambda: Tokens(Recurrence(nn.LSTM)),
    "GRU, packed": lambda: Tokens(Recurrence(nn.GRU, packed=True)),
    "LSTM, both ways": lambda: Tokens(Recurrence(nn.LSTM, both=True)),
    "convolutions": lambda: Tokens(Convolutions()),
    "mixer": lambda: Tokens(Mixer()),
    "state space": lambda: Tokens(StateSpace()),
    "linear attention": lambda: Tokens(LinearAttention()),
    "graph": lambda: Tokens(GraphNet()),
    "perceiver": lambda: Tokens(Perceiver()),
    "equilibrium": lambda: Tokens(Equilibrium()),
    "adapted": lambda: Tokens(Adapted()),
    "unused": lambda: Tokens(Unused()),
    "variational": lambda: Tokens(VariationalNet()),
    "translator": lambda: Tokens(Translator()),
    "U-Net": UNet,
    "ConvNeXt": ConvNext,
    "DenseNet": DenseNet,
    "patches": PatchTransformer,
}
PICTURED = frozenset({"U-Net", "ConvNeXt", "DenseNet", "patches", "ViTForImageClassification",
                      "DeiTForImageClassification", "ConvNextForImageClassification"})  # fmt: skip
"""Those that take pictures."""
HAVE_BLOCKS = frozenset({"convolutions", "graph", "adapted", "ConvNeXt", "DenseNet", "patches", *PUBLISHED})
"""Those that hold what may be recomputed in an `nn.ModuleList`."""
EVERY = (*OWN, *PUBLISHED)
SEEING = (*NORMALISED, *(f"torchvision {name}" for name in TORCHVISION), *(f"timm {name}" for name in TIMM))
"""Those that take pictures of 32 x 32."""
WITHOUT_BATCH_NORM = frozenset({
    "torchvision VisionTransformer", "torchvision SwinTransformer", "torchvision SwinTransformer of version 2",
    "torchvision ConvNeXt", "torchvision SqueezeNet", "timm convnext_atto", "timm vit_tiny_patch16_224",
    "timm swin_tiny_patch4_window7_224", "timm deit3_small_patch16_224",
})  # fmt: skip


def pictures32() -> list[tuple[Tensor, Tensor]]:
    """32 pictures `[3, 32, 32]` of ten classes."""
    drawn = torch.randn(32, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    return [(picture, torch.tensor(index % CLASSES)) for index, picture in enumerate(drawn)]


def seeing_tables(name: str) -> dict[str, Any]:
    """The tables `[model]` and `[data]` of one of `SEEING`."""
    model: dict[str, Any] = tables(name)["model"]
    if name not in WITHOUT_BATCH_NORM:
        model |= {"batch_norm": "grouped", "group_samples": 4}
    return {"model": model, "data": {"kind": "python", "build": "tests.verification.zoo:pictures32"}}


def build(name: str) -> nn.Module:
    torch.manual_seed(3)
    if name.startswith("torchvision "):
        return TORCHVISION[name.removeprefix("torchvision ")](importlib.import_module("torchvision.models"))
    if name.startswith("timm "):
        name = name.removeprefix("timm ")
        return importlib.import_module("timm").create_model(name, num_classes=CLASSES, **TIMM[name])
    return OWN[name]() if name in OWN else published(name)


def tables(name: str) -> dict[str, Any]:
    """The tables `[model]` and, for pictures, `[data]`."""
    model = {"kind": "python", "build": "tests.verification.zoo:build", "arguments": {"name": name}}
    pictures = {"kind": "python", "build": "tests.verification.foreign_models:pictures"}
    return {"model": model} | ({"data": pictures} if name in PICTURED else {})
