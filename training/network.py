"""The trainable network: a Llama decoder and one multi-token-prediction layer over one flat parameter vector.

All weights are slices of one vector, so the gradient arrives as one vector and the optimizer is a handful of operators,
however many weights there are. The shapes are ``[in, out]`` and query, key and value (and gate and up) are one matrix
each; ``training.checkpoint`` gives them the names, shapes and order that checkpoints have.

Sources: RMSNorm, Zhang & Sennrich 2019; rotary positions, Su et al. 2021; grouped queries, Ainslie et al. 2023; SwiGLU,
Shazeer 2020; multi-token prediction, DeepSeek-V3 report 2024, section 2.2.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import paddle
import paddle.nn.functional as functional

if TYPE_CHECKING:
    from paddle import Tensor

Weights = dict[str, "Tensor"]


@dataclass(frozen=True)
class Shape:
    """Sizes of the network (counts, except ``rope_theta`` and ``eps``)."""

    vocab: int = 2048
    hidden: int = 128
    intermediate: int = 448
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    context: int = 512
    rope_theta: float = 10000.0
    eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden // self.heads

    def weights(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every weight, in the order of the flat vector."""
        table: dict[str, tuple[int, ...]] = {"embed": (self.vocab, self.hidden), "norm": (self.hidden,)}
        for layer in range(self.layers + 1):
            if layer == self.layers:  # the MTP layer
                table[f"{layer}.enorm"] = table[f"{layer}.hnorm"] = (self.hidden,)
                table[f"{layer}.eh_proj"] = (2 * self.hidden, self.hidden)
                table[f"{layer}.head_norm"] = (self.hidden,)
            table[f"{layer}.norm1"] = table[f"{layer}.norm2"] = (self.hidden,)
            table[f"{layer}.qkv"] = (self.hidden, (self.heads + 2 * self.kv_heads) * self.head_dim)
            table[f"{layer}.o"] = (self.heads * self.head_dim, self.hidden)
            table[f"{layer}.gate_up"] = (self.hidden, 2 * self.intermediate)
            table[f"{layer}.down"] = (self.intermediate, self.hidden)
        return table

    def count(self) -> int:
        """Number of parameters."""
        return sum(math.prod(shape) for shape in self.weights().values())


def initial_vector(shape: Shape, seed: int) -> np.ndarray:
    """float32 ``[count]``: norms 1, matrices normal with deviation 0.02, smaller where they end a residual branch."""
    rng = np.random.default_rng(seed)
    parts = []
    for name, size in shape.weights().items():
        if len(size) == 1:
            parts.append(np.ones(size, np.float32))
            continue
        ends_branch = name.endswith((".o", ".down"))
        deviation = 0.02 / math.sqrt(2 * shape.layers) if ends_branch else 0.02
        parts.append(rng.normal(0.0, deviation, math.prod(size)).astype(np.float32))
    return np.concatenate(parts)


def decay_mask(shape: Shape) -> np.ndarray:
    """float32 ``[count]``: 1 where weight decay applies (matrices), 0 on norms."""
    return np.concatenate(
        [np.full(math.prod(size), float(len(size) > 1), np.float32) for size in shape.weights().values()]
    )


class Network:
    """The forward pass. ``losses`` takes the flat vector, so that autograd returns one flat gradient."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self._tables: dict[tuple[int, int], tuple[Tensor, ...]] = {}

    def split(self, vector: Tensor) -> Weights:
        """The named weights as differentiable slices of the flat vector."""
        table = self.shape.weights()
        pieces = paddle.split(vector, [math.prod(size) for size in table.values()])
        return {name: piece.reshape(list(size)) for (name, size), piece in zip(table.items(), pieces, strict=True)}

    def losses(self, vector: Tensor, window: Tensor, mtp_rows: int = 0) -> tuple[Tensor, Tensor]:
        """Mean cross-entropy (nats a token) of the next token and, by the MTP layer, of the one after it.

        ``window`` is int64 ``[rows, length + 2]``. The second loss is taken over the first ``mtp_rows`` rows (0: all).
        """
        weights = self.split(vector)
        length = window.shape[1] - 2
        embedded = functional.embedding(window[:, : length + 1], weights["embed"])
        hidden = self.hidden(weights, embedded[:, :length])
        main = self._loss(weights, hidden, window[:, 1 : length + 1])
        rows = mtp_rows or window.shape[0]
        extra = self.predicted(weights, hidden[:rows], embedded[:rows, 1:], self._attention)
        return main, self._loss(weights, extra, window[:rows, 2:])

    def hidden(self, weights: Weights, embedded: Tensor) -> Tensor:
        """Return the main model's output for each token, normed; ``embedded`` ``[rows, length, hidden]``."""
        for layer in range(self.shape.layers):
            embedded = self._layer(weights, layer, embedded)
        return self._scaled(self._normed(embedded), weights["norm"])

    def predicted(
        self, weights: Weights, hidden: Tensor, following: Tensor, attention: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        """The MTP layer's output at position i, normed, from ``hidden`` at i (the main model's, or the layer's own)
        and the embedding of token i + 1."""
        layer = self.shape.layers
        both = [
            self._scaled(self._normed(following), weights[f"{layer}.enorm"]),
            self._scaled(self._normed(hidden), weights[f"{layer}.hnorm"]),
        ]
        joined = paddle.matmul(paddle.concat(both, axis=-1), weights[f"{layer}.eh_proj"])
        return self._scaled(self._normed(self.layer(weights, layer, joined, attention)), weights[f"{layer}.head_norm"])

    def _loss(self, weights: Weights, hidden: Tensor, targets: Tensor) -> Tensor:
        logits = paddle.matmul(hidden.reshape([-1, self.shape.hidden]), weights["embed"], transpose_y=True)
        return functional.cross_entropy(logits, targets.reshape([-1]))

    def _normed(self, x: Tensor) -> Tensor:
        """RMSNorm without its weight, which is folded into the matrix that follows: the gradient of a broadcast
        over all tokens took longer than the rest of the norm."""
        return x * paddle.rsqrt(paddle.mean(x * x, axis=-1, keepdim=True) + self.shape.eps)

    def _scaled(self, x: Tensor, weight: Tensor) -> Tensor:
        """``x * weight`` as a product with a diagonal matrix, for the same reason."""
        return paddle.matmul(x, paddle.diag(weight))

    def _layer(self, weights: Weights, layer: int, x: Tensor) -> Tensor:
        return self.layer(weights, layer, x, self._attention)

    def layer(self, weights: Weights, layer: int, x: Tensor, attention: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """One decoder layer; ``attention`` is given the normed ``x`` and the joined matrix of queries, keys, values."""

        def weight(name: str, norm: str) -> Tensor:
            return weights[f"{layer}.{norm}"].reshape([-1, 1]) * weights[f"{layer}.{name}"]

        x = x + paddle.matmul(attention(self._normed(x), weight("qkv", "norm1")), weights[f"{layer}.o"])
        gate, up = paddle.split(paddle.matmul(self._normed(x), weight("gate_up", "norm2")), 2, axis=-1)
        return x + paddle.matmul(functional.silu(gate) * up, weights[f"{layer}.down"])

    def _attention(self, x: Tensor, qkv: Tensor) -> Tensor:
        """Causal grouped-query attention of ``x`` ``[rows, length, hidden]``, before the output projection."""
        q, k, v = self.projected(x, qkv)
        mask = self._table(x.shape[0], x.shape[1])[2]
        scores = functional.softmax(paddle.matmul(q, k, transpose_y=True) + mask, axis=-1)
        return self.merged(paddle.matmul(scores, v))

    def projected(self, x: Tensor, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries ``[rows, kv_heads, group * length, head_dim]`` (scaled) and keys, at their positions, and values
        ``[rows, kv_heads, length, head_dim]`` of ``x`` ``[rows, length, hidden]``."""
        s = self.shape
        rows, length, _ = x.shape
        cos, sin, _, turn = self._table(rows, length)
        heads = s.heads + s.kv_heads
        wide = heads * s.head_dim
        # rotate_half is linear, so it is applied to the weights: one wider product instead of slices of activations.
        qk = qkv[:, :wide]
        turned = paddle.matmul(qk.reshape([-1, s.head_dim]), turn).reshape([-1, wide])
        product = paddle.matmul(x, paddle.concat([qk, turned, qkv[:, wide:]], axis=1))
        plain, rotated, v = paddle.split(product, [wide, wide, s.kv_heads * s.head_dim], axis=-1)
        qk = (plain * cos + rotated * sin).reshape([rows, length, heads, s.head_dim]).transpose([0, 2, 1, 3])
        q, k = paddle.split(qk, [s.heads, s.kv_heads], axis=1)
        # Heads of one group lie side by side, so a group's queries are rows of one product with its keys.
        q = q.reshape([rows, s.kv_heads, -1, s.head_dim])
        v = v.reshape([rows, length, s.kv_heads, s.head_dim]).transpose([0, 2, 1, 3])
        return q, k, v

    def merged(self, attended: Tensor) -> Tensor:
        """``[rows, kv_heads, group * length, head_dim]`` as ``[rows, length, heads * head_dim]``."""
        s, rows = self.shape, attended.shape[0]
        length = attended.shape[2] * s.kv_heads // s.heads
        out = attended.reshape([rows, s.heads, length, s.head_dim]).transpose([0, 2, 1, 3])
        return out.reshape([rows, length, s.heads * s.head_dim])

    def _table(self, rows: int, length: int) -> tuple[Tensor, ...]:
        """cos and sin ``[rows, length, (heads + kv_heads) * head_dim]`` (the queries' scaled by ``head_dim ** -0.5``),
        the causal mask ``[group * length, length]`` and rotate_half as a matrix ``[head_dim, head_dim]``."""
        if (rows, length) not in self._tables:
            s = self.shape
            frequencies = s.rope_theta ** (-np.arange(0, s.head_dim, 2) / s.head_dim)
            angles = np.tile(np.outer(np.arange(length), frequencies), (1, 2 * (s.heads + s.kv_heads)))
            scale = np.repeat([s.head_dim**-0.5, 1.0], [s.heads * s.head_dim, s.kv_heads * s.head_dim])
            # Written out for every row: a broadcast costs seven times a product of equal shapes.
            cos, sin = (np.tile(f(angles) * scale, (rows, 1, 1)).astype(np.float32) for f in (np.cos, np.sin))
            mask = np.tile(np.triu(np.full((length, length), -1e9, np.float32), 1), (s.heads // s.kv_heads, 1))
            half = s.head_dim // 2
            turn = np.zeros((s.head_dim, s.head_dim), np.float32)
            turn[np.arange(half), np.arange(half) + half] = 1.0
            turn[np.arange(half) + half, np.arange(half)] = -1.0
            self._tables[rows, length] = tuple(map(paddle.to_tensor, (cos, sin, mask, turn)))
        return self._tables[rows, length]
