"""Models that Shoal's authors did not write, or that are not a GPT, at sizes that take 20 to 150 ms a step on a core.

Each has random data and a loss, as a script has them: a data set whose samples are (inputs, targets), inputs being a
tensor or the keywords of the model's forward. Weights are random, of the same seed on every side. What transformers
and timm publish is built from a configuration; nothing is downloaded.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SAMPLES, VOCABULARY, CLASSES = 4096, 4096, 10


class Samples(torch.utils.data.Dataset):
    """`SAMPLES` samples, each made when it is asked for, of generators seeded with its index."""

    def __init__(self, draw: Callable[[torch.Generator], tuple[Any, Tensor]]) -> None:
        self._draw = draw

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Any, Tensor]:
        return self._draw(torch.Generator().manual_seed(int(index)))


@dataclass(frozen=True)
class Model:
    """What all sides of a benchmark train: `build` gives the module, `draw` a sample, and `losses` one number for each
    sample or position. `needs` is a package; `batch_norm`: whether statistics are taken over a rank's batch.
    """

    build: Callable[[], nn.Module]
    draw: Callable[[torch.Generator], tuple[Any, Tensor]]
    losses: Callable[[Any, Tensor], Tensor]
    needs: str = "torch"
    samples: int = 4
    batch_norm: bool = False

    @property
    def is_installed(self) -> bool:
        """Whether its package is there."""
        return importlib.util.find_spec(self.needs) is not None

    def new(self) -> nn.Module:
        """The module with the weights of seed 0."""
        torch.manual_seed(0)
        return self.build()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The mean over the batch."""
        inputs, targets = batch
        outputs = model(**inputs) if isinstance(inputs, Mapping) else model(inputs)
        return self.losses(outputs, targets).mean()


def classified(outputs: Any, targets: Tensor) -> Tensor:
    """Cross-entropy of logits, or of the `logits` of transformers' outputs."""
    logits = getattr(outputs, "logits", outputs)
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="none").view(targets.shape)


def squared(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean squared error of each sample."""
    return F.mse_loss(outputs, targets, reduction="none").flatten(1).mean(1)


def evidence(outputs: tuple[Tensor, Tensor, Tensor], targets: Tensor) -> Tensor:
    """The negative evidence lower bound of each sample (Kingma and Welling, arXiv 1312.6114, equation 10)."""
    pictures, mean, log_variance = outputs
    divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(1)
    return F.mse_loss(pictures, targets, reduction="none").flatten(1).sum(1) + divergence


# Samples.


def padded_text(generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    """64 places of which a third to all are tokens, and a class."""
    tokens = torch.randint(1, VOCABULARY, (64,), generator=generator)
    length = int(torch.randint(20, 65, (), generator=generator))
    mask = (torch.arange(64) < length).long()
    inputs = {"input_ids": tokens * mask, "attention_mask": mask, "token_type_ids": torch.zeros_like(mask)}
    return inputs, torch.randint(CLASSES, (), generator=generator)


def text(generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    """64 tokens and the next of each."""
    tokens = torch.randint(VOCABULARY, (65,), generator=generator)
    return {"input_ids": tokens[:-1]}, tokens[1:]


def pair(generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    """48 tokens of a source, and 32 of a target."""
    source, target = (torch.randint(2, VOCABULARY, (size,), generator=generator) for size in (48, 33))
    return {"input_ids": source, "decoder_input_ids": target[:-1]}, target[1:]


def picture(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A picture `[3, 32, 32]` and its class."""
    return torch.randn(3, 32, 32, generator=generator), torch.randint(CLASSES, (), generator=generator)


def itself(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A picture that is to be itself again."""
    whole = torch.randn(3, 32, 32, generator=generator)
    return whole, whole


def noisy(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A picture and what it is to become."""
    clean = torch.randn(3, 32, 32, generator=generator)
    return clean + 0.1 * torch.randn(3, 32, 32, generator=generator), clean


def click(generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    """26 categories and 13 numbers, and whether there was a click."""
    categories = torch.randint(TABLE, (26,), generator=generator)
    inputs = {"categories": categories, "numbers": torch.randn(13, generator=generator)}
    return inputs, torch.randint(2, (), generator=generator)


# Models that are not published in a package.

TABLE, FACTORS = 2000, 16


class Recommender(nn.Module):
    """Tables of categories beside numbers, whose products meet in a small network (DLRM, arXiv 1906.00091)."""

    pairs: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(TABLE, FACTORS) for _ in range(26))
        self.bottom = nn.Sequential(nn.Linear(13, 64), nn.ReLU(), nn.Linear(64, FACTORS))
        self.top = nn.Sequential(nn.Linear(FACTORS + 351, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2))
        self.register_buffer("pairs", torch.triu_indices(27, 27, 1), persistent=False)

    def forward(self, categories: Tensor, numbers: Tensor) -> Tensor:
        dense = self.bottom(numbers)
        rows = torch.stack([table(categories[:, i]) for i, table in enumerate(self.tables)] + [dense], 1)
        products = torch.bmm(rows, rows.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([dense, products], 1))


class Recurrent(nn.Module):
    """A language model of an LSTM of two layers, with dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 128)
        self.cells = nn.LSTM(128, 128, num_layers=2, batch_first=True, dropout=0.2)
        self.head = nn.Linear(128, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.cells(self.embedding(input_ids))[0])


def _residual(width: int, wider: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(width, wider, 3, padding=1), nn.GroupNorm(8, wider), nn.SiLU(), nn.Dropout2d(0.1),
        nn.Conv2d(wider, wider, 3, padding=1), nn.GroupNorm(8, wider), nn.SiLU(),
    )  # fmt: skip


class UNet(nn.Module):
    """Convolutions down to a quarter and up again, each level beside what it was made of (arXiv 1505.04597)."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.down = nn.ModuleList([_residual(3, width), _residual(width, 2 * width)])
        self.middle = _residual(2 * width, 4 * width)
        self.up = nn.ModuleList([_residual(6 * width, 2 * width), _residual(3 * width, width)])
        self.out = nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        levels = []
        for level in self.down:
            x = level(x)
            levels.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.middle(x)
        for level in self.up:
            x = level(torch.cat([F.interpolate(x, scale_factor=2.0), levels.pop()], 1))
        return self.out(x)


class Autoencoder(nn.Module):
    """A variational one of convolutions, which draws in its forward."""

    def __init__(self, width: int = 32, latent: int = 64) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, width, 4, 2, 1), nn.ReLU(), nn.Conv2d(width, 2 * width, 4, 2, 1), nn.ReLU(), nn.Flatten(),
            nn.Linear(2 * width * 64, 2 * latent),
        )  # fmt: skip
        self.decoder = nn.Sequential(
            nn.Linear(latent, 2 * width * 64), nn.Unflatten(1, (2 * width, 8, 8)), nn.ReLU(),
            nn.ConvTranspose2d(2 * width, width, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(width, 3, 4, 2, 1),
        )  # fmt: skip

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, dim=1)
        code = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        return self.decoder(code), mean, log_variance


# Models of packages, which are imported where they are built: transformers takes seconds.


def _transformer(name: str, config: str, **sizes: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        model = getattr(transformers, name)(getattr(transformers, config)(vocab_size=VOCABULARY, **sizes))
        model.config.use_cache = False
        return model

    return build


def _timm(name: str, **more: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import timm  # pyright: ignore[reportMissingImports]

        return timm.create_model(name, num_classes=CLASSES, **more)

    return build


def _resnet18() -> nn.Module:
    import torchvision  # pyright: ignore[reportMissingImports]

    return torchvision.models.resnet18(num_classes=CLASSES)


def _frozen(build: Callable[[], nn.Module], trains: str) -> Callable[[], nn.Module]:
    """Only parameters whose names hold `trains` are trained."""

    def frozen() -> nn.Module:
        model = build()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(trains in name)
        return model

    return frozen


_BERT = _transformer(
    "BertForSequenceClassification", "BertConfig", num_labels=CLASSES, hidden_size=128, num_hidden_layers=4,
    num_attention_heads=4, intermediate_size=512,
)  # fmt: skip
_GPT2 = _transformer("GPT2LMHeadModel", "GPT2Config", n_positions=64, n_embd=128, n_layer=4, n_head=4)
_LLAMA = _transformer(
    "LlamaForCausalLM", "LlamaConfig", hidden_size=128, intermediate_size=344, num_hidden_layers=4,
    num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
)  # fmt: skip
_T5 = _transformer("T5ForConditionalGeneration", "T5Config", d_model=128, d_kv=32, d_ff=256, num_layers=2, num_heads=4)
MODELS = {
    "bert": Model(_BERT, padded_text, classified, "transformers", 8),
    "bert_frozen": Model(_frozen(_BERT, "classifier"), padded_text, classified, "transformers", 8),
    "gpt2": Model(_GPT2, text, classified, "transformers"),
    "llama": Model(_LLAMA, text, classified, "transformers"),
    "t5": Model(_T5, pair, classified, "transformers"),
    "vit": Model(
        _timm("vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=128, depth=6, num_heads=4),
        picture, classified, "timm", 8,
    ),
    "mobilenet": Model(_timm("mobilenetv3_small_050"), picture, classified, "timm", 8, batch_norm=True),
    "resnet18": Model(_resnet18, picture, classified, "torchvision", 4, batch_norm=True),
    "unet": Model(UNet, noisy, squared),
    "vae": Model(Autoencoder, itself, evidence, samples=16),
    "lstm": Model(Recurrent, text, classified),
    "recommender": Model(Recommender, click, classified, samples=64),
}  # fmt: skip
