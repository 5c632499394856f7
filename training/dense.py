"""The oracle: the same architecture as one plain forward pass over one sequence, in NumPy and float32.

Written as the papers write it (``hal.model.llama`` names them), with neither cache nor batch nor joined weights, and
sharing no code with the decoder that it checks. Slow: for evaluation, and for the decoder's tests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from hal_core import InvalidValue

from hal.model.config import LlamaConfig, read_config
from hal.model.loading import read_tensors

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]


class DenseModel:
    """``tensors`` are a checkpoint's, float32, by their usual names (``hal.model.loading.read_tensors``). Raises
    InvalidValue for what this pass leaves out: scaled positions, and norms of queries and keys."""

    def __init__(self, config: LlamaConfig, tensors: Mapping[str, Floats]) -> None:
        if config.qk_norm or config.rope.scaling is not None:
            raise InvalidValue(
                "the dense pass has neither normed queries and keys nor scaled positions",
                cure="give a checkpoint without them",
                argument="config",
            )
        self.config = config
        self.tensors = tensors

    @classmethod
    def load(cls, directory: Path) -> DenseModel:
        """Read the checkpoint in ``directory``. Raises InvalidValue for one that :mod:`hal.model.loading` refuses."""
        config = read_config(directory)
        return cls(config, read_tensors(directory, config))

    def logits(self, token_ids: Sequence[int] | Ids) -> Floats:
        """float32 ``[n, vocab]``: the logits after each of ``n`` tokens."""
        return self._hidden(self._ids(token_ids)) @ self._head().T

    def mtp_logits(self, token_ids: Sequence[int] | Ids) -> Floats:
        """float32 ``[n - 1, vocab]``: the prediction layer's logits for token i + 2 at entry i."""
        if not self.config.num_nextn_predict_layers:
            raise InvalidValue(
                "the checkpoint has no multi-token-prediction layer", argument="num_nextn_predict_layers"
            )
        ids = self._ids(token_ids)
        number = self.config.num_hidden_layers
        prefix = f"model.layers.{number}"
        following = self._norm(self.tensors["model.embed_tokens.weight"][ids[1:]], f"{prefix}.enorm")
        hidden = self._norm(self._hidden(ids)[:-1], f"{prefix}.hnorm")
        joined = np.concatenate([following, hidden], axis=1) @ self.tensors[f"{prefix}.eh_proj.weight"].T
        return self._norm(self._layer(joined, number), f"{prefix}.shared_head.norm") @ self._head().T

    def _ids(self, token_ids: Sequence[int] | Ids) -> Ids:
        ids = np.asarray(token_ids, np.int64)
        if ids.ndim != 1 or not ids.size or ids.min() < 0 or ids.max() >= self.config.vocab_size:
            raise InvalidValue(
                "must be one sequence of token ids of the vocabulary", cure="encode a text", argument="token_ids"
            )
        if ids.size > self.config.max_position_embeddings:
            raise InvalidValue(
                f"{ids.size} tokens are more than max_position_embeddings={self.config.max_position_embeddings}",
                cure="shorten the sequence",
                argument="token_ids",
            )
        return ids

    def _head(self) -> Floats:
        tied = self.config.tie_word_embeddings
        return self.tensors["model.embed_tokens.weight" if tied else "lm_head.weight"]

    def _hidden(self, ids: Ids) -> Floats:
        x = self.tensors["model.embed_tokens.weight"][ids]
        for number in range(self.config.num_hidden_layers):
            x = self._layer(x, number)
        return self._norm(x, "model.norm")

    def _norm(self, x: Floats, name: str) -> Floats:
        mean_square = np.mean(x * x, axis=-1, keepdims=True, dtype=np.float32)
        scaled = (x / np.sqrt(mean_square + np.float32(self.config.rms_norm_eps))).astype(np.float32, copy=False)
        return scaled * self.tensors[f"{name}.weight"]

    def _linear(self, x: Floats, name: str) -> Floats:
        y = x @ self.tensors[f"{name}.weight"].T
        bias = self.tensors.get(f"{name}.bias")
        return y if bias is None else y + bias

    def _layer(self, x: Floats, number: int) -> Floats:
        prefix = f"model.layers.{number}"
        x = x + self._attention(self._norm(x, f"{prefix}.input_layernorm"), f"{prefix}.self_attn")
        y = self._norm(x, f"{prefix}.post_attention_layernorm")
        gate = self._linear(y, f"{prefix}.mlp.gate_proj")
        with np.errstate(over="ignore"):  # exp(-gate) may be infinite: the sigmoid is then 0, as it should
            gate = gate / (1 + np.exp(-gate))
        return x + self._linear(gate * self._linear(y, f"{prefix}.mlp.up_proj"), f"{prefix}.mlp.down_proj")

    def _attention(self, x: Floats, prefix: str) -> Floats:
        config, count = self.config, len(x)
        query = self._rotate(self._linear(x, f"{prefix}.q_proj").reshape(count, -1, config.head_dim))
        key = self._rotate(self._linear(x, f"{prefix}.k_proj").reshape(count, -1, config.head_dim))
        value = self._linear(x, f"{prefix}.v_proj").reshape(count, -1, config.head_dim)
        future = np.triu(np.ones((count, count), bool), 1)
        heads = []
        for head in range(config.num_attention_heads):
            shared = head // config.heads_per_group
            scores = query[:, head] @ key[:, shared].T / np.float32(np.sqrt(config.head_dim))
            scores = np.where(future, np.float32(-np.inf), scores)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            heads.append(weights / weights.sum(axis=1, keepdims=True) @ value[:, shared])
        return self._linear(np.concatenate(heads, axis=1), f"{prefix}.o_proj")

    def _rotate(self, x: Floats) -> Floats:
        """Turn the pairs (i, i + head_dim / 2) of ``[n, heads, head_dim]`` by position x theta ** (-2 i / head_dim)."""
        half = self.config.head_dim // 2
        rates = self.config.rope.theta ** (-2 * np.arange(half) / self.config.head_dim)
        angle = (np.arange(len(x))[:, None] * rates)[:, None, :]
        cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
        first, second = x[..., :half], x[..., half:]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
