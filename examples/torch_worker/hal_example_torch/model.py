"""The decoder of ``hal.model`` in torch (Llama, Mistral, Qwen2, Qwen3), and its weights: a checkpoint's, or random."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, distributed
from torch.nn import functional

from hal.model.config import LlamaConfig, read_config
from hal.model.loading import expected_tensors, read_tensors
from hal.model.split import BY_VOCABULARY, WHOLE, Shard, local_config, part_of

from .attention import Attention, Pair, Tokens


class Decoder:
    """Weights and the paged cache on one device. Not thread-safe."""

    def __init__(self, config: LlamaConfig, tensors: Mapping[str, Tensor], shard: Shard = WHOLE) -> None:
        """``tensors``: of a checkpoint, by their usual names; on the device, in the type that is computed in. Of a
        shard its parts, vocabularies whole; torch's default group are the ranks, which sum up what each has."""
        self.config, self.tensors, self._shard = local_config(config, shard), dict(tensors), shard
        layers = [f"model.layers.{number}." for number in range(config.num_hidden_layers)]
        kinds = ("weight", "bias") if config.qkv_bias else ("weight",)
        for layer in layers:  # what is multiplied by the same is one matrix
            for kind in kinds:
                self._join(layer + "qkv." + kind, (f"{layer}self_attn.{name}_proj.{kind}" for name in "qkv"))
            self._join(layer + "gate_up.weight", (f"{layer}mlp.{name}_proj.weight" for name in ("gate", "up")))
        self._layers = layers
        embedding = self.tensors["model.embed_tokens.weight"]
        self.device, self.dtype = embedding.device, embedding.dtype
        self._head = embedding if config.tie_word_embeddings else self.tensors["lm_head.weight"]
        frequencies = torch.tensor(config.rope.frequencies(config.head_dim).tolist(), dtype=torch.float64)
        angles = torch.arange(config.max_position_embeddings).double()[:, None] * frequencies
        self._cos, self._sin = (turn(angles).float().to(self.device) for turn in (torch.cos, torch.sin))
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    @classmethod
    def load(cls, directory: Path, device: str, dtype: torch.dtype = torch.float32, shard: Shard = WHOLE) -> Decoder:
        """A checkpoint's; :class:`hal_core.errors.InvalidValue` names what is missing, broken or not supported."""
        config, tensors = read_config(Path(directory)), {}
        arrays = read_tensors(Path(directory), config)
        for name, shape in _needed(config):
            part = () if name.endswith(BY_VOCABULARY) else part_of(name, shape, shard)
            tensors[name] = torch.from_dlpack(arrays.pop(name))[part].to(device, dtype, copy=True)
            if name.endswith("o_proj.bias") and shard.index:
                tensors[name].zero_()  # it is added once
        return cls(config, tensors, shard)

    @classmethod
    def random(cls, config: LlamaConfig, device: str, dtype: torch.dtype, seed: int = 0) -> Decoder:
        """Of that shape, with weights that mean nothing: norms of ones, small numbers drawn from ``seed`` else."""
        generator = torch.Generator(device).manual_seed(seed)
        made = {}
        for name, shape in _needed(config):
            values = torch.empty(shape, dtype=dtype, device=device)
            made[name] = values.fill_(1) if "norm" in name else values.normal_(0, 0.02, generator=generator)
        return cls(config, made)

    def allocate_cache(self, blocks: int, block_size: int) -> None:
        """Room for ``blocks`` blocks, and one that is nobody's."""
        shape = (blocks + 1, block_size, self.config.num_key_value_heads, self.config.head_dim)
        for cache in (self.keys, self.values):
            cache[:] = [torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in self._layers]

    def run(self, tokens: Tokens, attention: Attention) -> Tensor:
        """Store the tokens' keys and values; the hidden states before the last norm, ``[rows, queries, hidden]``."""
        hidden = functional.embedding(tokens.ids, self.tensors["model.embed_tokens.weight"])
        at = tokens.positions.clamp(0, len(self._cos) - 1)
        turns = (self._cos[at][:, :, None], self._sin[at][:, :, None])
        for number, layer in enumerate(self._layers):
            hidden = hidden + self._whole(self._attended(hidden, number, tokens, turns, attention))
            inner = self._linear(self._normed(hidden, layer + "post_attention_layernorm"), layer + "gate_up")
            gate, up = inner.chunk(2, -1)
            hidden = hidden + self._whole(self._linear(functional.silu(gate) * up, layer + "mlp.down_proj"))
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 ``[n, vocab]`` of hidden states ``[n, hidden]``."""
        return functional.linear(self._normed(hidden, "model.norm"), self._head).float()

    def _attended(self, hidden: Tensor, number: int, tokens: Tokens, turns: Pair, attention: Attention) -> Tensor:
        config, width, layer = self.config, self.config.head_dim, self._layers[number]
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        qkv = self._linear(self._normed(hidden, layer + "input_layernorm"), layer + "qkv").unflatten(-1, (-1, width))
        query, key, value = qkv.split([heads, kv_heads, kv_heads], 2)
        if config.qk_norm:
            query = self._normed(query, layer + "self_attn.q_norm")
            key = self._normed(key, layer + "self_attn.k_norm")
        cache = self.keys[number], self.values[number]
        mixed = attention(query, key, value, cache, tokens, turns)
        return self._linear(mixed.flatten(2), layer + "self_attn.o_proj")

    def _whole(self, part: Tensor) -> Tensor:
        """The sum over the ranks."""
        if self._shard.size > 1:
            distributed.all_reduce(part)
        return part

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return functional.linear(x, self.tensors[name + ".weight"], self.tensors.get(name + ".bias"))

    def _normed(self, x: Tensor, name: str) -> Tensor:
        weight = self.tensors[name + ".weight"]
        return functional.rms_norm(x, weight.shape, weight, self.config.rms_norm_eps)

    def _join(self, name: str, parts: Iterable[str]) -> None:
        self.tensors[name] = torch.cat([self.tensors.pop(part) for part in parts])


def _needed(config: LlamaConfig) -> Iterable[tuple[str, tuple[int, ...]]]:
    """Names and shapes of what is used: all but the layer that predicts further tokens."""
    beyond = f"model.layers.{config.num_hidden_layers}."
    return ((name, shape) for name, shape in expected_tensors(config) if not name.startswith(beyond))
