"""Horovod's synthetic ImageNet benchmark for PyTorch, written from its documented API, with a small ResNet."""

import argparse
import json
import timeit

import horovod.torch as hvd
import numpy as np
import torch
import torch.nn.functional as F
from torch import optim
from transformers import ResNetConfig, ResNetForImageClassification

parser = argparse.ArgumentParser()
parser.add_argument("--fp16-allreduce", action="store_true", default=False)
parser.add_argument("--batch-size", type=int, default=4)
parser.add_argument("--num-warmup-batches", type=int, default=1)
parser.add_argument("--num-batches-per-iter", type=int, default=2)
parser.add_argument("--num-iters", type=int, default=2)
parser.add_argument("--no-cuda", action="store_true", default=False)
parser.add_argument("--losses", default="losses.json")
args = parser.parse_args()
args.cuda = not args.no_cuda and torch.cuda.is_available()

hvd.init()
torch.set_num_threads(1)
if args.cuda:
    torch.cuda.set_device(hvd.local_rank())

torch.manual_seed(7)
config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=10)
model = ResNetForImageClassification(config)
lr_scaler = hvd.size()
if args.cuda:
    model.cuda()
optimizer = optim.SGD(model.parameters(), lr=0.01 * lr_scaler)
compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), compression=compression, op=hvd.Average
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)

draw = torch.Generator().manual_seed(hvd.rank())
data = torch.randn(args.batch_size, 3, 32, 32, generator=draw)
target = torch.randint(10, (args.batch_size,), generator=draw)
if args.cuda:
    data, target = data.cuda(), target.cuda()
losses = []


def benchmark_step():
    optimizer.zero_grad()
    loss = F.cross_entropy(model(data).logits, target)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())


timeit.timeit(benchmark_step, number=args.num_warmup_batches)
img_secs = []
for _ in range(args.num_iters):
    time = timeit.timeit(benchmark_step, number=args.num_batches_per_iter)
    img_secs.append(args.batch_size * args.num_batches_per_iter / time)
if hvd.rank() == 0:
    print(f"Img/sec per rank: {np.mean(img_secs):.1f}")
    with open(args.losses, "w") as file:
        json.dump({"losses": losses}, file)
