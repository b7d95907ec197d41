"""Trains a residual net on generated images, and keeps the best weights: AverageMeter, accuracy, a checkpoint."""

import argparse
import os

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


class Images(Dataset):
    """Image i of class i % 4, drawn anew whenever it is read."""

    def __init__(self, number, first):
        self.number, self.first = number, first

    def __len__(self):
        return self.number

    def __getitem__(self, i):
        noise = torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(self.first + i))
        return noise + (i % 4) * torch.linspace(-1, 1, 8), i % 4


class BasicBlock(nn.Module):
    def __init__(self, inplanes, planes, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inplanes, planes, 3, stride, 1, bias=False)
        self.bn1 = nn.GroupNorm(2, planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.bn2 = nn.GroupNorm(2, planes)
        self.downsample = nn.Conv2d(inplanes, planes, 1, stride, bias=False)

    def forward(self, x):
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(out + self.downsample(x))


class ResNet(nn.Module):
    def __init__(self, num_classes=4):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, 1, 1, bias=False)
        self.layer1 = nn.Sequential(BasicBlock(8, 8, 1), BasicBlock(8, 8, 1))
        self.layer2 = nn.Sequential(BasicBlock(8, 16, 2), BasicBlock(16, 16, 1))
        self.fc = nn.Linear(16, num_classes)

    def forward(self, x):
        x = self.layer2(self.layer1(F.relu(self.conv1(x))))
        return self.fc(x.mean((2, 3)))


class AverageMeter:
    """Computes and stores the average and current value"""

    def __init__(self):
        self.val = self.sum = self.count = 0.0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n

    @property
    def avg(self):
        return self.sum / self.count


def accuracy(output, target):
    return (output.argmax(1) == target).float().mean().item()


def train(loader, model, criterion, optimizer, epoch, args):
    losses, top1 = AverageMeter(), AverageMeter()
    model.train()
    for images, target in loader:
        output = model(images)
        loss = criterion(output, target)
        losses.update(loss.item(), len(images))
        top1.update(accuracy(output, target), len(images))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"Epoch [{epoch}] Acc@1 {top1.avg:.3f} loss {losses.val!r}")


def validate(val_loader, model):
    top1 = AverageMeter()
    model.eval()
    with torch.no_grad():
        for images, target in val_loader:
            top1.update(accuracy(model(images), target), len(images))
    return top1.avg


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", default=2, type=int)
    parser.add_argument("--batch-size", default=12, type=int)
    parser.add_argument("--lr", default=0.05, type=float)
    parser.add_argument("--output", default="output")
    args = parser.parse_args()

    torch.manual_seed(0)
    os.makedirs(args.output, exist_ok=True)
    model = ResNet()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[1])
    loader = DataLoader(Images(48, 0), batch_size=args.batch_size, shuffle=True)
    val_loader = DataLoader(Images(20, 1000), batch_size=20)
    best_acc1 = 0.0

    for epoch in range(args.epochs):
        train(loader, model, criterion, optimizer, epoch, args)
        acc1 = validate(val_loader, model)
        scheduler.step()
        if acc1 >= best_acc1:
            best_acc1 = acc1
            torch.save(model.state_dict(), os.path.join(args.output, "best.pt"))


if __name__ == "__main__":
    main()
