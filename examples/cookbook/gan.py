"""A GAN: two optimizers that take turns inside one step.

paceline run --workers 2 examples/cookbook/gan.py
"""

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, softplus
from torch.utils.data import DataLoader

import paceline

NOISE = 4

engine = paceline.Engine(seed=0)
real = torch.randn(256, 2) * 0.1 + torch.tensor([1.0, -1.0])
loader = DataLoader(real, batch_size=8, shuffle=True)
generator = nn.Sequential(nn.Linear(NOISE, 16), nn.ReLU(), nn.Linear(16, 2))
critic = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
opt_g = torch.optim.Adam(generator.parameters(), lr=1e-2, betas=(0.5, 0.9))
opt_c = torch.optim.Adam(critic.parameters(), lr=1e-2, betas=(0.5, 0.9))
generator, critic, opt_g, opt_c, loader = engine.prepare(generator, critic, opt_g, opt_c, loader)


def critic_loss(batch):
    fake = generator(torch.randn(len(batch), NOISE)).detach()
    return softplus(-critic(batch)).mean() + softplus(critic(fake)).mean()


def generator_loss(batch):
    judged = critic(generator(torch.randn(len(batch), NOISE)))
    return binary_cross_entropy_with_logits(judged, torch.ones_like(judged))


for _ in range(4):
    for _ in loader:  # the body runs once a step: the updates below go through the step's micro-batches themselves
        engine.update(opt_c, critic_loss)
        engine.update(opt_g, generator_loss)
with torch.no_grad():
    center = generator(torch.randn(256, NOISE)).mean(dim=0)
engine.print(f"generated around {center[0]:.4f}, {center[1]:.4f}")
engine.print("weights", engine.weights_hash())
