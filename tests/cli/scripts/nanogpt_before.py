"""Trains a character-level GPT on a generated text: random offsets, accumulated gradients, a cosine rate by hand."""

import math

import torch
import torch.nn as nn
from torch.nn import functional as F

# -----------------------------------------------------------------------------
block_size = 16
batch_size = 6
gradient_accumulation_steps = 2
n_layer, n_head, n_embd = 2, 2, 32
learning_rate, min_lr = 3e-3, 3e-4
warmup_iters, max_iters = 2, 8
eval_interval, eval_iters = 4, 2
# -----------------------------------------------------------------------------
torch.manual_seed(1337)

text = "".join(f"{i} times {i} makes {i * i}. " for i in range(120))
chars = sorted(set(text))
data = torch.tensor([chars.index(c) for c in text])
train_data, val_data = data[:-400], data[-400:]


def get_batch(split, ix):
    source = train_data if split == "train" else val_data
    x = torch.stack([source[i : i + block_size] for i in ix])
    y = torch.stack([source[i + 1 : i + 1 + block_size] for i in ix])
    return x, y


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd))

    def forward(self, x):
        b, t, c = x.shape
        heads = self.c_attn(self.ln_1(x)).view(b, t, 3, n_head, c // n_head).transpose(1, 3)
        y = F.scaled_dot_product_attention(heads[:, :, 0], heads[:, :, 1], heads[:, :, 2], is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(len(chars), n_embd), nn.Embedding(block_size, n_embd)
        self.h = nn.ModuleList(Block() for _ in range(n_layer))
        self.ln_f = nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, len(chars), bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    ratio = (it - warmup_iters) / (max_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


@torch.no_grad()
def estimate_loss():
    generator = torch.Generator().manual_seed(0)
    model.eval()
    losses = []
    for _ in range(eval_iters):
        ix = torch.randint(len(val_data) - block_size, (batch_size,), generator=generator)
        losses.append(model(*get_batch("val", ix))[1].item())
    model.train()
    return sum(losses) / eval_iters


model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
offsets = len(train_data) - block_size

for iter_num in range(max_iters):
    for param_group in optimizer.param_groups:
        param_group["lr"] = get_lr(iter_num)
    if iter_num % eval_interval == 0:
        print(f"iter {iter_num}: validation {estimate_loss():.4f}")
    for ix in torch.randint(offsets, (gradient_accumulation_steps, batch_size)):
        X, Y = get_batch("train", ix)
        logits, loss = model(X, Y)
        (loss / gradient_accumulation_steps).backward()
        print(f"loss {loss.item()!r}")
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
