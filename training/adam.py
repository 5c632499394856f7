"""Adam with decoupled weight decay over one flat vector, in Paddle operators.

Paddle's built-in CPU Adam makes every later matrix product of the process several times slower (measured: six times),
so it is not used. Sources: Kingma & Ba 2015; decoupled decay, Loshchilov & Hutter 2019; clipping of the gradient's
norm, Pascanu et al. 2013.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import paddle

if TYPE_CHECKING:
    from paddle import Tensor


class Adam:
    """Moments of the flat vector; ``step`` returns the new vector (a new leaf tensor)."""

    def __init__(
        self,
        decay_mask: np.ndarray,
        *,
        betas: tuple[float, float] = (0.9, 0.98),
        weight_decay: float = 0.1,
        clip: float = 1.0,
        eps: float = 1e-8,
    ) -> None:
        self.betas, self.clip, self.eps, self.steps = betas, clip, eps, 0
        self._decay = paddle.to_tensor(decay_mask) * weight_decay
        self._mean = paddle.zeros_like(self._decay)
        self._square = paddle.zeros_like(self._decay)

    def step(self, vector: Tensor, gradient: Tensor, rate: float) -> Tensor:
        """One update of float32 ``[count]`` by its gradient at learning rate ``rate``."""
        self.steps += 1
        with paddle.no_grad():
            norm = math.sqrt(paddle.sum(gradient * gradient).item())
            gradient = gradient * min(1.0, self.clip / (norm + 1e-12))
            first, second = self.betas
            self._mean = self._mean * first + gradient * (1 - first)
            self._square = self._square * second + gradient * gradient * (1 - second)
            mean = self._mean * (1 / (1 - first**self.steps))
            square = self._square * (1 / (1 - second**self.steps))
            updated = vector - (mean / (paddle.sqrt(square) + self.eps) + vector * self._decay) * rate
        updated = updated.detach()
        updated.stop_gradient = False
        return updated


def cosine_rate(step: int, steps: int, *, peak: float, warmup: int, floor: float) -> float:
    """Learning rate: linear to ``peak`` over ``warmup`` steps, then half a cosine down to ``floor``."""
    if step < warmup:
        return peak * (step + 1) / warmup
    part = (step - warmup) / max(1, steps - warmup)
    return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * part))
