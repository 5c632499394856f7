"""The checkpoint's tensors as the decoder uses them: on a Paddle place, joined where one product serves several.

Each norm's weight, and the attention's ``head_dim ** -0.5``, are multiplied into the matrix that follows, which saves
operators and changes results by rounding only. Where queries and keys are normed themselves, that factor is in the
weight of their norm, because a factor before a norm is lost in it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import paddle
from hal_core import InvalidValue
from hal_core.devices import X86
from hal_engine.model.config import LlamaConfig

from hal.local_rank import HOST_PLACE

if TYPE_CHECKING:
    from paddle import Tensor


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer, float32, matrices ``[in, out]``."""

    qkv: Tensor
    """``[hidden, (heads + 2 kv_heads) * head_dim]``; input norm folded in, queries scaled unless they are normed."""
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    """``[head_dim]``: weight of the norm of each query, scaled; None where there is none."""
    k_norm: Tensor | None
    """``[head_dim]``: the same for each key, not scaled."""
    output: Tensor
    """``[heads * head_dim, hidden]``."""
    output_bias: Tensor | None
    gate: Tensor
    """``[hidden, intermediate]``; post-attention norm folded in. Apart from ``up``: a second product costs a CPU
    less than the split of a joined one."""
    up: Tensor
    """``[hidden, intermediate]``; the same."""
    down: Tensor
    """``[intermediate, hidden]``."""


@dataclass(frozen=True)
class PredictionWeights:
    """The multi-token-prediction layer (DeepSeek-AI 2024, DeepSeek-V3, section 2.2); embedding and head are shared."""

    join: Tensor
    """``[2 * hidden, hidden]``: of the next token's embedding and the hidden state, their norms folded in."""
    layer: LayerWeights
    norm: Tensor


@dataclass(frozen=True)
class DecoderWeights:
    """All weights; ``head`` is ``embedding`` itself where the two are tied. Where layers and head are packed
    (:mod:`hal_paddle_runner.packed`), ``layers`` is empty and ``head`` not used."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Tensor
    """``[vocab, hidden]``."""
    prediction: PredictionWeights | None
    """None where the checkpoint has none."""


def prepare_weights(
    config: LlamaConfig, tensors: Mapping[str, np.ndarray], place: str, *, packed: bool = False
) -> DecoderWeights:
    """Join, fold and place the tensors of a validated checkpoint; ``packed``: but layers and head."""

    def put(array: np.ndarray) -> Tensor:
        return paddle.to_tensor(np.ascontiguousarray(array), place=place)

    def layer(number: int) -> LayerWeights:
        arrays = join_layer(config, tensors, f"model.layers.{number}")
        return LayerWeights(**{name: None if array is None else put(array) for name, array in arrays.items()})

    def prediction(number: int) -> PredictionWeights:
        prefix = f"model.layers.{number}"
        norms = np.concatenate([tensors[f"{prefix}.{name}.weight"] for name in ("enorm", "hnorm")])
        join = (tensors[f"{prefix}.eh_proj.weight"] * norms).T
        return PredictionWeights(put(join), layer(number), put(tensors[f"{prefix}.shared_head.norm.weight"]))

    embedding = put(tensors["model.embed_tokens.weight"])
    return DecoderWeights(
        embedding=embedding,
        layers=() if packed else tuple(layer(number) for number in range(config.num_hidden_layers)),
        norm=put(tensors["model.norm.weight"]),
        head=embedding if packed or config.tie_word_embeddings else put(tensors["lm_head.weight"]),
        prediction=prediction(config.num_hidden_layers) if config.num_nextn_predict_layers else None,
    )


def join_layer(config: LlamaConfig, tensors: Mapping[str, np.ndarray], prefix: str) -> dict[str, np.ndarray | None]:
    """Return the arrays of :class:`LayerWeights`, by name."""

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


def check_place(place: str) -> None:
    """Raise :class:`InvalidValue` for a place that this Paddle build does not have."""
    try:
        paddle.to_tensor(0, place=place)
    except (ValueError, RuntimeError, OSError, AttributeError) as error:
        why = str(error).strip().splitlines()[-1]
        if isinstance(error, AttributeError):  # Paddle's own error, for a kind without the number
            why = "it is built without this kind"
        raise InvalidValue(
            f"{place!r} is not a place of this Paddle build: {why}", cure="use 'cpu'", argument="--model-place"
        ) from None


def has_fused_norm(place: str, features: frozenset[str]) -> bool:
    """Whether Paddle's one operator for RMSNorm can be used on a place.

    It is not tried out: on an x86 CPU its kernel is compiled for AVX-512 and ends the process with SIGILL where that is
    missing, and for a place that has no kernel Paddle runs the CPU's. ``features``: of the host's processor.
    """
    kind = place.partition(":")[0]
    if kind == HOST_PLACE and X86 in features and "AVX512F" not in features:
        return False
    wanted = re.compile(rf"data_type\[float\].*place\[Place\({re.escape(kind)}\b")
    return any(wanted.search(kernel) for kernel in registered_kernels(norm_operator()))


def norm_operator() -> str:
    """The operator behind ``fused_rms_norm``, by the name that this version of Paddle has for it."""
    return "fused_rms_norm_quant" if hasattr(paddle._C_ops, "fused_rms_norm_quant") else "rms_norm"


def registered_kernels(operator: str) -> list[str]:
    """The kernels of an operator in this build of Paddle, each as Paddle writes its data type and place."""
    found: list[str] = paddle.base.core._get_all_register_op_kernels("phi").get(operator, [])
    return found
