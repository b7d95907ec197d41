"""A generator and a discriminator of points on a circle: two models, two optimizers, two losses a batch."""

import math

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
nz, num_epochs, batch_size = 4, 2, 12

netG = nn.Sequential(nn.Linear(nz, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
netD = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-3, betas=(0.5, 0.999))
optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-3, betas=(0.5, 0.999))
criterion = nn.BCEWithLogitsLoss()

angle = torch.rand(48) * 2 * math.pi
points = torch.stack([angle.cos(), angle.sin()], 1)
latents = torch.randn(48, nz)
dataloader = DataLoader(TensorDataset(points, latents), batch_size=batch_size, shuffle=True)

for epoch in range(num_epochs):
    for real, noise in dataloader:
        # (1) update D: maximize log(D(x)) + log(1 - D(G(z)))
        netD.zero_grad()
        fake = netG(noise)
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        errD = criterion(netD(real), ones) + criterion(netD(fake.detach()), zeros)
        errD.backward()
        optimizerD.step()
        # (2) update G: maximize log(D(G(z)))
        netG.zero_grad()
        errG = criterion(netD(fake), ones)
        errG.backward()
        optimizerG.step()
        print(f"epoch {epoch} loss {errD.item() + errG.item()!r}")
