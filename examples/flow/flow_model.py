"""A flow-matching model of points in the plane, and the Gaussian steps that make a policy of it.

    x_t = (1 - t) x_0 + t x_1       x_0 from the data, x_1 noise, and v(x_t, t, prompt) the velocity dx_t/dt

A model is sampled from t = 1 to t = 0. Flow-GRPO (2505.05470) replaces the ODE dx = v dt by an SDE with the same
marginals (eq. 8), in T steps of dt = 1 / T (eq. 9, with its dt < 0 written as -dt):

    x_{t-dt} = x_t - [v + s^2 / (2 t) (x_t + (1 - t) v)] dt + s sqrt(dt) e        e ~ N(0, 1),  s = a sqrt(t / (1 - t))

At t = 1, where s is infinite, the denominator is that of the second step. Each step is an action of the policy, with a
Gaussian density; a = 0 is the ODE. DanceGRPO (2505.07818) does the same with a constant s.
"""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn

NUM_PROMPTS = 8
"""Prompt k asks for a point in the direction 2 pi k / 8."""
MAX_STEPS = 64
"""The most steps of one sample."""
WEIGHTS = "velocity.pt"
RADII = (1.0, 2.0)
"""The data of each prompt: half of its points lie around one of these, half around the other."""


def directions() -> torch.Tensor:
    """float32[8, 2]: the unit vector of each prompt."""
    angles = torch.arange(NUM_PROMPTS) * (2 * math.pi / NUM_PROMPTS)
    return torch.stack([angles.cos(), angles.sin()], dim=1)


class Velocity(nn.Module):
    """v(x, t, prompt), a network of some 5,200 parameters."""

    def __init__(self) -> None:
        super().__init__()
        sizes = 2 + NUM_PROMPTS + 3, 64, 64, 2
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))

    def forward(self, x: torch.Tensor, t: torch.Tensor, prompts: torch.Tensor) -> torch.Tensor:
        """x: float32[N, 2]. t: float32[N]. prompts: int64[N]."""
        clock = torch.stack([t, (math.pi * t).sin(), (math.pi * t).cos()], dim=1)
        hidden = torch.cat([x, nn.functional.one_hot(prompts, NUM_PROMPTS).to(x.dtype), clock], dim=1)
        *inner, last = self.layers
        for layer in inner:
            hidden = nn.functional.silu(layer(hidden))
        return last(hidden)

    def write(self, directory: Path) -> int:
        """Write a model directory, whole or not at all; returns its bytes."""
        directory.mkdir(parents=True, exist_ok=True)
        aside, path = directory / f".{WEIGHTS}", directory / WEIGHTS
        torch.save(self.state_dict(), aside)
        aside.replace(path)
        return path.stat().st_size

    def read(self, directory: str | Path) -> Velocity:
        """Take the weights of a model directory. Raises OSError and RuntimeError."""
        self.load_state_dict(torch.load(Path(directory) / WEIGHTS, weights_only=True))
        return self


def transition(
    velocity: nn.Module,
    x: torch.Tensor,
    prompts: torch.Tensor,
    steps: torch.Tensor,
    num_steps: torch.Tensor,
    a: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean float32[N, 2] and the standard deviation float32[N] of x_{t-dt} given x, of eq. 9 above.

    steps: int64[N], from 0, of so many steps num_steps int64[N]. a: float32[N], the noise level.
    """
    dt = 1 / num_steps.to(x.dtype)
    t = 1 - steps.to(x.dtype) * dt
    s = a * (t / (1 - torch.minimum(t, 1 - dt))).sqrt()
    v = velocity(x, t, prompts)
    t, dt, square = t[:, None], dt[:, None], s.square()[:, None]
    mean = x - (v + square / (2 * t) * (x + (1 - t) * v)) * dt
    return mean, s * dt[:, 0].sqrt()


def step_logprobs(x: torch.Tensor, mean: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
    """float32[N]: the logarithm of the step's density, over both coordinates; 0 for a step of the ODE."""
    std = std[:, None]
    density = -((x - mean) / std).square() / 2 - std.log() - math.log(2 * math.pi) / 2
    return torch.where(std[:, 0] > 0, density.sum(1), 0.0)


def step_entropy(std: torch.Tensor) -> torch.Tensor:
    """float32[N]: of the step's distribution, in nats. The weights do not change it."""
    return 2 * std.log() + 1 + math.log(2 * math.pi)


def pretrained(directory: Path, seed: int = 0, num_updates: int = 1500) -> Path:
    """Write a model that was trained by flow matching (2210.02747) on the data, unless it is there."""
    if (directory / WEIGHTS).exists():
        return directory
    draw = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        velocity = Velocity()
    optimizer = torch.optim.Adam(velocity.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_updates)
    units, radii = directions(), torch.tensor(RADII)
    for _ in range(num_updates):
        prompts = torch.randint(NUM_PROMPTS, (256,), generator=draw)
        radius = radii[torch.randint(2, (256,), generator=draw)]
        data = units[prompts] * radius[:, None] + 0.1 * torch.randn(256, 2, generator=draw)
        noise, t = torch.randn(256, 2, generator=draw), torch.rand(256, generator=draw)
        v = velocity(data + t[:, None] * (noise - data), t, prompts)
        optimizer.zero_grad()
        (v - (noise - data)).square().mean().backward()
        optimizer.step()
        schedule.step()
    velocity.write(directory)
    return directory
