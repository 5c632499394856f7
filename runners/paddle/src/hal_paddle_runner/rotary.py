"""Rotary positions (Su et al. 2021), in the half-split layout of Llama checkpoints: tables that grow."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from hal_engine.model.config import LlamaConfig


class Rotary:
    """The rotations of a model's heads, by position."""

    def __init__(self, config: LlamaConfig) -> None:
        self._frequencies = config.rope.frequencies(config.head_dim)
        self._most, self._half = config.max_position_embeddings, config.head_dim // 2
        self._rotations = self._table(0)
        self._factors = np.zeros((0, self._half), np.complex64)

    def rotations(self, positions: np.ndarray) -> np.ndarray:
        """Return float32 ``[2, ..., head_dim]``: cosines at ``positions`` int64 ``[...]``, and sines with their
        signs."""
        most = int(positions.max()) + 1
        if most > self._rotations.shape[1]:  # twice as many as needed, so that it rarely grows
            self._rotations = self._table(min(2 * most, self._most))
        found: np.ndarray = self._rotations[:, positions]
        return found

    def factors(self, positions: np.ndarray) -> np.ndarray:
        """Return the same rotations as factors of a head's halves as complex numbers, complex64 ``[n, 1, head_dim /
        2]``."""
        most = int(positions.max()) + 1
        if most > len(self._factors):
            cos, sin = self._table(min(2 * most, self._most))
            self._factors = (cos[:, : self._half] + 1j * sin[:, self._half :]).astype(np.complex64)
        found: np.ndarray = self._factors[positions][:, None]
        return found

    def _table(self, positions: int) -> np.ndarray:
        """Return float32 ``[2, positions, head_dim]``: the cosines, and the sines with their signs."""
        angles = np.arange(positions)[:, None] * self._frequencies
        cos, sin = np.cos(angles), np.sin(angles)
        table = [np.concatenate([cos, cos], axis=-1), np.concatenate([-sin, sin], axis=-1)]
        return np.stack(table).astype(np.float32)
