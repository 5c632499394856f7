"""The published definitions as one plain float64 pass over one sequence, in NumPy. Slow, and shares no code with hal.

It reads the checkpoint's own files, so that the values of ``hal_engine.model.config`` are checked too. Sources, in
transformers' names of tensors: Llama (Touvron et al. 2023), its positions scaled as in Meta's code for Llama 3.1
(``apply_scaling``), Mistral 7B (Jiang et al. 2023), Qwen2 and Qwen2.5 (2024) and Qwen3 (2025) technical reports.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file


class Reference:
    """The checkpoint in ``directory``, whose tensors are float32 or float16."""

    def __init__(self, directory: Path) -> None:
        self.fields = json.loads((directory / "config.json").read_text())
        files = [load_file(path) for path in sorted(directory.glob("*.safetensors"))]
        self.tensors = {name: value.astype(np.float64) for file in files for name, value in file.items()}
        self.heads = self.fields["num_attention_heads"]
        self.kv_heads = self.fields.get("num_key_value_heads") or self.heads
        width = 128 if self.fields["model_type"] == "qwen3" else self.fields["hidden_size"] // self.heads
        self.width = self.fields.get("head_dim") or width

    def logits(self, ids) -> np.ndarray:
        """float64 ``[tokens, vocab]``."""
        return self._hidden(ids) @ self._head().T

    def mtp_logits(self, ids) -> np.ndarray:
        """float64 ``[tokens - 1, vocab]``: the prediction layer's logits for token i + 2 at entry i.

        As the technical report of DeepSeek-V3 (2024) defines the layer.
        """
        layer = f"model.layers.{self.fields['num_hidden_layers']}"
        following = self._norm(self.tensors["model.embed_tokens.weight"][np.asarray(ids)[1:]], f"{layer}.enorm")
        hidden = self._norm(self._hidden(ids)[:-1], f"{layer}.hnorm")
        joined = self._linear(np.concatenate([following, hidden], axis=1), f"{layer}.eh_proj")
        return self._norm(self._layer(joined, layer), f"{layer}.shared_head.norm") @ self._head().T

    def generate(self, prompt, count: int) -> tuple[tuple[int, ...], float]:
        """The ``count`` greedy tokens, and the smallest lead of any of them over the second best."""
        ids, lead = list(prompt), math.inf
        for _ in range(count):
            last = self.logits(ids)[-1]
            second, best = np.sort(last)[-2:]
            lead = min(lead, float(best - second))
            ids.append(int(np.argmax(last)))
        return tuple(ids[len(prompt) :]), lead

    def frequencies(self) -> list[float]:
        """Radians a position of each pair of a head's numbers."""
        given = {}
        for name in ("rope_scaling", "rope_parameters"):
            given |= self.fields.get(name) or {}
        theta = given.get("rope_theta") or self.fields.get("rope_theta", 10000.0)
        plain = [1 / theta ** (2 * pair / self.width) for pair in range(self.width // 2)]
        return [_scaled(frequency, given) for frequency in plain] if given.get("rope_type") == "llama3" else plain

    def _head(self) -> np.ndarray:
        tied = self.fields.get("tie_word_embeddings", False)
        return self.tensors["model.embed_tokens.weight" if tied else "lm_head.weight"]

    def _hidden(self, ids) -> np.ndarray:
        x = self.tensors["model.embed_tokens.weight"][np.asarray(ids)]
        for number in range(self.fields["num_hidden_layers"]):
            x = self._layer(x, f"model.layers.{number}")
        return self._norm(x, "model.norm")

    def _layer(self, x: np.ndarray, layer: str) -> np.ndarray:
        x = x + self._attention(self._norm(x, f"{layer}.input_layernorm"), f"{layer}.self_attn")
        y = self._norm(x, f"{layer}.post_attention_layernorm")
        gate = self._linear(y, f"{layer}.mlp.gate_proj")
        with np.errstate(over="ignore"):  # exp(-gate) may be infinite: the sigmoid is then 0, as it should
            gate = gate / (1 + np.exp(-gate))
        return x + self._linear(gate * self._linear(y, f"{layer}.mlp.up_proj"), f"{layer}.mlp.down_proj")

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        mean_square = np.mean(x**2, axis=-1, keepdims=True)
        return x / np.sqrt(mean_square + self.fields["rms_norm_eps"]) * self.tensors[f"{name}.weight"]

    def _linear(self, x: np.ndarray, name: str) -> np.ndarray:
        return x @ self.tensors[f"{name}.weight"].T + self.tensors.get(f"{name}.bias", 0.0)

    def _attention(self, x: np.ndarray, prefix: str) -> np.ndarray:
        count = len(x)
        query, key, value = (
            self._linear(x, f"{prefix}.{name}_proj").reshape(count, -1, self.width) for name in ("q", "k", "v")
        )
        if self.fields["model_type"] == "qwen3":
            query, key = self._norm(query, f"{prefix}.q_norm"), self._norm(key, f"{prefix}.k_norm")
        query, key = self._turned(query), self._turned(key)
        joined = np.empty((count, self.heads, self.width))
        for head in range(self.heads):
            shared = head * self.kv_heads // self.heads
            for token in range(count):
                scores = key[: token + 1, shared] @ query[token, head] / math.sqrt(self.width)
                weights = np.exp(scores - scores.max())
                joined[token, head] = weights / weights.sum() @ value[: token + 1, shared]
        return self._linear(joined.reshape(count, -1), f"{prefix}.o_proj")

    def _turned(self, x: np.ndarray) -> np.ndarray:
        """Each pair (i, i + width / 2) of ``[tokens, heads, width]`` as one complex number, turned by its position."""
        half = self.width // 2
        angles = np.outer(np.arange(len(x)), self.frequencies())[:, None, :]
        turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)
        return np.concatenate([turned.real, turned.imag], axis=-1)


def _scaled(frequency: float, given: dict) -> float:
    """As Meta's code for Llama 3.1 does it, one frequency at a time."""
    low, high, context = given["low_freq_factor"], given["high_freq_factor"], given["original_max_position_embeddings"]
    wavelength = 2 * math.pi / frequency
    if wavelength < context / high:
        return frequency
    if wavelength > context / low:
        return frequency / given["factor"]
    smooth = (context / wavelength - low) / (high - low)
    return (1 - smooth) * frequency / given["factor"] + smooth * frequency
