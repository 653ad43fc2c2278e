"""Policy gradients with PPO's clipping: seeds of episodes come from the loader, rollouts are made in the loop's body.

paceline run --workers 2 examples/cookbook/rl.py
"""

import copy

import torch
from torch import nn
from torch.distributions import Categorical

import paceline
from paceline.data import StepSource

EPISODES, LENGTH, REFRESH = 16, 10, 4


@torch.no_grad()
def rollout(policy: nn.Module, at: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A walk on a line; each step pays the way that it comes nearer to 0."""
    states, actions, chances, rewards = [], [], [], []
    for _ in range(LENGTH):
        choice = Categorical(logits=policy(at))
        action = choice.sample()  # the engine seeded torch for this lane and step
        after = at + 0.5 * (2 * action[:, None] - 1)
        states.append(at)
        actions.append(action)
        chances.append(choice.log_prob(action))
        rewards.append((at.abs() - after.abs())[:, 0])
        at = after
    gains = torch.stack(rewards).flip(0).cumsum(0).flip(0)
    gains = (gains - gains.mean()) / (gains.std() + 1e-6)
    return torch.stack(states), torch.stack(actions), torch.stack(chances), gains


engine = paceline.Engine(seed=0)
policy = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 2))
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
episodes = StepSource(lambda place: 4 * torch.rand(EPISODES, 1) - 2, steps=20)  # where they start: a function of place
policy, optimizer, episodes = engine.prepare(policy, optimizer, episodes)
old = copy.deepcopy(policy)  # made the rollouts; REFRESH steps behind at most
engine.register_for_checkpointing(old)

for starts in episodes:
    states, actions, chances, gains = rollout(old, starts)
    ratio = (Categorical(logits=policy(states)).log_prob(actions) - chances).exp()
    loss = -torch.minimum(ratio * gains, ratio.clamp(0.8, 1.2) * gains).mean()
    engine.mean("distance", (starts + (2.0 * actions - 1).sum(0)[:, None] / 2).abs().mean())
    engine.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    if engine.stepped and engine.step % REFRESH == 0:
        old.load_state_dict(policy.state_dict())
engine.print(f"distance from 0 in the end {engine.means['distance']:.3f}")
engine.print("weights", engine.weights_hash())
