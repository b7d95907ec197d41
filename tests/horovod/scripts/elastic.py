"""Horovod's elastic example for PyTorch, written from its documented API; its data are drawn. A rank is lost, or told
to leave, in the middle of epoch 1.
"""

import argparse
import itertools
import json
import os
import signal

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from torch import nn, optim

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--lr", type=float, default=0.01)
parser.add_argument("--rank", type=int, default=-1)
parser.add_argument("--signal", default="SIGKILL")
parser.add_argument("--until-sizes", type=int, default=0, help="Go on until the number of ranks has changed so often.")
parser.add_argument("--found", default="found.json")
args = parser.parse_args()

draw = torch.Generator().manual_seed(0)
labels = torch.randint(4, (100,), generator=draw)
dataset = torch.utils.data.TensorDataset(torch.randn(100, 6, generator=draw) + labels.view(-1, 1), labels)

hvd.init()
torch.manual_seed(7 if hvd.rank() == 0 else 8)
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4)).double()
optimizer = optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=0.5)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
sampler = hvd.elastic.ElasticSampler(dataset)
loader = torch.utils.data.DataLoader(dataset, batch_size=args.batch_size, sampler=sampler)


class CountedState(hvd.elastic.TorchState):
    went_back = 0

    def restore(self):
        self.went_back += 1
        super().restore()


def on_state_reset():
    for group in optimizer.param_groups:
        group["lr"] = args.lr * hvd.size()


def disturb():
    marker = args.found + ".disturbed"
    if hvd.rank() == args.rank and state.epoch == 1 and sampler.processed_indices and not os.path.exists(marker):
        open(marker, "w").close()
        os.kill(os.getpid(), getattr(signal, args.signal))


def goes_on():
    return state.epoch < args.epochs or changes() < args.until_sizes


def changes():
    sizes = [step[1] for step in state.steps]
    return sum(one != other for one, other in itertools.pairwise(sizes))


@hvd.elastic.run
def train(state):
    while goes_on():
        for index, (data, target) in enumerate(loader):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data.double()), target)
            loss.backward()
            disturb()
            optimizer.step()
            sampler.record_batch(index, args.batch_size)
            mean = hvd.allreduce(loss.detach(), name="loss").item()
            state.steps = [*state.steps, [state.epoch, hvd.size(), mean]]
            state.commit()
        state.epoch += 1
        sampler.set_epoch(state.epoch)
        state.commit()


state = CountedState(model=model, optimizer=optimizer, sampler=sampler, epoch=0, steps=[])
state.register_reset_callbacks([on_state_reset])
train(state)

if hvd.rank() == 0:
    weights = [parameter.flatten().tolist() for parameter in model.parameters()]
    with open(args.found, "w") as file:
        found = {"steps": state.steps, "weights": weights, "size": hvd.size(), "went_back": state.went_back}
        json.dump(found, file)
