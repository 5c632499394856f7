"""The decoder of ``hal_engine.model`` in torch (Llama, Mistral, Qwen2, Qwen3): weights and the paged cache on one
device."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from hal_engine.model.config import LlamaConfig, read_config
from hal_engine.model.split import UNSPLIT, Shard, local_config
from torch import Tensor
from torch.nn import functional

from .attention import Kernels, Pair, Tokens, attend
from .loading import load, random
from .ranks import add_up


class Decoder:
    """Weights and the paged cache on one device. Not thread-safe."""

    def __init__(self, config: LlamaConfig, tensors: Mapping[str, Tensor], shard: Shard = UNSPLIT) -> None:
        """``tensors``: as :mod:`hal_torch.loading` makes them, in the type of computation. For a shard, its parts;
        torch's default group has the ranks that sum their results."""
        self.config, self.tensors, self._shard = local_config(config, shard), dict(tensors), shard
        self._layers = [f"model.layers.{number}." for number in range(config.num_hidden_layers)]
        embedding = self.tensors["model.embed_tokens.weight"]
        self.device, self.dtype = embedding.device, embedding.dtype
        self._head = embedding if config.tie_word_embeddings else self.tensors["lm_head.weight"]
        frequencies = torch.tensor(config.rope.frequencies(config.head_dim).tolist(), dtype=torch.float64)
        angles = torch.arange(config.max_position_embeddings).double()[:, None] * frequencies
        self._cos, self._sin = (turn(angles).float().to(self.device) for turn in (torch.cos, torch.sin))
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    @classmethod
    def load(cls, directory: Path, device: str, dtype: torch.dtype = torch.float32, shard: Shard = UNSPLIT) -> Decoder:
        """Load a checkpoint; :class:`hal_core.errors.InvalidValue` names a missing, broken or unsupported part."""
        config = read_config(directory)
        return cls(config, load(directory, config, torch.device(device), dtype, shard), shard)

    @classmethod
    def random(cls, config: LlamaConfig, device: str, dtype: torch.dtype, seed: int = 0) -> Decoder:
        """Return a model of that shape with random weights."""
        return cls(config, random(config, torch.device(device), dtype, seed))

    def allocate_cache(self, blocks: int, block_size: int) -> None:
        """Room for ``blocks`` blocks and the two of :mod:`hal_torch.attention`."""
        shape = (blocks + 2, block_size, self.config.num_key_value_heads, self.config.head_dim)
        for cache in (self.keys, self.values):
            cache[:] = [torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in self._layers]

    @property
    def nobody(self) -> int:
        """The block that takes discarded writes; the one after it is never written."""
        return int(self.keys[0].shape[0]) - 2

    def run(self, tokens: Tokens, kernels: Kernels) -> Tensor:
        """Store the tokens' keys and values; the hidden states before the last norm, ``[n, hidden]``."""
        hidden = functional.embedding(tokens.ids, self.tensors["model.embed_tokens.weight"])
        at = tokens.positions.clamp(0, len(self._cos) - 1)
        turns = (self._cos[at], self._sin[at])
        for number, layer in enumerate(self._layers):
            mixed = self._attended(hidden, number, tokens, turns, kernels)
            hidden = self._plus(hidden, mixed, layer + "self_attn.o_proj")
            inner = self._linear(self._normed(hidden, layer + "post_attention_layernorm"), layer + "mlp.gate_up")
            hidden = self._plus(hidden, kernels.gated(inner), layer + "mlp.down_proj")
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 ``[n, vocab]`` of hidden states ``[n, hidden]``."""
        return functional.linear(self._normed(hidden, "model.norm"), self._head).float()

    def _attended(self, hidden: Tensor, number: int, tokens: Tokens, turns: Pair, kernels: Kernels) -> Tensor:
        config, width, layer = self.config, self.config.head_dim, self._layers[number] + "self_attn."
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        normed = self._normed(hidden, self._layers[number] + "input_layernorm")
        qkv = self._linear(normed, layer + "qkv").unflatten(-1, (-1, width))
        query, key, value = qkv.split([heads, kv_heads, kv_heads], 1)
        if config.qk_norm:
            query, key = self._normed(query, layer + "q_norm"), self._normed(key, layer + "k_norm")
        mixed = attend(query, key, value, (self.keys[number], self.values[number]), tokens, turns, kernels)
        return mixed.flatten(1)

    def _plus(self, hidden: Tensor, x: Tensor, name: str) -> Tensor:
        """``hidden`` and the product of ``x``, summed over the ranks. On one rank the product adds to ``hidden`` in
        place: a kernel less, of which a short prompt's step has two a layer."""
        if self._shard.size > 1:
            part = self._linear(x, name)
            add_up(part)
            return hidden + part
        bias = self.tensors.get(name + ".bias")
        hidden.addmm_(x, self.tensors[name + ".weight"].t())
        return hidden if bias is None else hidden.add_(bias)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return functional.linear(x, self.tensors[name + ".weight"], self.tensors.get(name + ".bias"))

    def _normed(self, x: Tensor, name: str) -> Tensor:
        weight = self.tensors[name + ".weight"]
        return functional.rms_norm(x, weight.shape, weight, self.config.rms_norm_eps)
