"""Fine-tunes a small transformers model to classify generated sentences: what Trainer does, as a loop."""

import torch
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

import shoal


class Sentences:
    """Sentence i is padded, and its label is whether its words are more even than odd ones."""

    def __init__(self, number, length=12):
        self.rows = torch.randint(3, 40, (number, length), generator=torch.Generator().manual_seed(0))
        self.lengths = 4 + torch.arange(number) % (length - 4)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        mask = torch.arange(self.rows.shape[1]) < self.lengths[i]
        even = (self.rows[i] % 2 == 0) & mask
        return {
            "input_ids": self.rows[i] * mask,
            "attention_mask": mask.long(),
            "labels": int(2 * even.sum() > mask.sum()),
        }


num_train_epochs = 2
per_device_train_batch_size = 12
max_grad_norm = 1.0

torch.manual_seed(42)
config = BertConfig(
    vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
    max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)  # fmt: skip
model = BertForSequenceClassification(config)
model.train()
for parameter in model.bert.embeddings.parameters():
    parameter.requires_grad_(False)
train_dataset = Sentences(48)
train_dataloader = DataLoader(train_dataset, batch_size=per_device_train_batch_size, shuffle=True)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-4)
lr_scheduler = get_linear_schedule_with_warmup(optimizer, 2, num_train_epochs * len(train_dataloader))
run = shoal.start(model=model, optimizer=optimizer, data=train_dataloader, epochs=2, state={"lr": lr_scheduler})

for epoch, train_dataloader in run.epochs():
    for batch in train_dataloader:
        outputs = model(**batch)
        run.backward(outputs.loss)
        print(f"epoch {epoch} loss {outputs.loss.item()!r}")
        run.clip_grad_norm_(max_grad_norm)
        optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()
