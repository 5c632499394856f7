"""The checkpoint's tensors as a decoder computes with them: joined where one product serves several.

Each norm's weight, and the attention's ``head_dim ** -0.5``, are multiplied into the matrix that follows, which saves
operators and changes results by rounding only. Where queries and keys are normed themselves, that factor is in the
weight of their norm, because a factor before a norm is lost in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from hal_engine.model.config import LlamaConfig


def join_layer(config: LlamaConfig, tensors: Mapping[str, np.ndarray], prefix: str) -> dict[str, np.ndarray | None]:
    """Return the arrays of a layer, by the names of :class:`hal_paddle_runner.weights.LayerWeights`."""

    def weight(name: str, kind: str = "weight") -> np.ndarray:
        return tensors[f"{prefix}.{name}.{kind}"]

    scale = np.float32(config.head_dim**-0.5)
    before_norm = np.float32(1) if config.qk_norm else scale

    def qkv(kind: str) -> np.ndarray:
        parts = [weight(f"self_attn.{name}_proj", kind) for name in ("q", "k", "v")]
        return np.concatenate([parts[0] * before_norm, *parts[1:]])

    return {
        "qkv": (qkv("weight") * weight("input_layernorm")).T,
        "qkv_bias": qkv("bias") if config.qkv_bias else None,
        "q_norm": weight("self_attn.q_norm") * scale if config.qk_norm else None,
        "k_norm": weight("self_attn.k_norm") if config.qk_norm else None,
        "output": weight("self_attn.o_proj").T,
        "output_bias": weight("self_attn.o_proj", "bias") if config.output_bias else None,
        "gate": (weight("mlp.gate_proj") * weight("post_attention_layernorm")).T,
        "up": (weight("mlp.up_proj") * weight("post_attention_layernorm")).T,
        "down": weight("mlp.down_proj").T,
    }


@dataclass(frozen=True)
class JoinedPrediction:
    """The multi-token-prediction layer (DeepSeek-AI 2024, DeepSeek-V3, section 2.2); embedding and head are shared."""

    join: np.ndarray
    """``[2 * hidden, hidden]``: of the next token's embedding and the hidden state, their norms folded in."""
    layer: Mapping[str, np.ndarray | None]
    norm: np.ndarray


def join_prediction(config: LlamaConfig, tensors: Mapping[str, np.ndarray]) -> JoinedPrediction | None:
    """Return the arrays of the prediction layer; None for a checkpoint without one."""
    if not config.num_nextn_predict_layers:
        return None
    prefix = f"model.layers.{config.num_hidden_layers}"
    norms = np.concatenate([tensors[f"{prefix}.{name}.weight"] for name in ("enorm", "hnorm")])
    join = (tensors[f"{prefix}.eh_proj.weight"] * norms).T
    return JoinedPrediction(join, join_layer(config, tensors, prefix), tensors[f"{prefix}.shared_head.norm.weight"])
