"""The checkpoint's tensors as Paddle's operators use them: joined, on a place."""

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

from .joining import join_layer, join_prediction

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
    """See :class:`hal_paddle_runner.joining.JoinedPrediction`."""

    join: Tensor
    layer: LayerWeights
    norm: Tensor


@dataclass(frozen=True)
class DecoderWeights:
    """All weights; ``head`` is ``embedding`` itself where the two are tied."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Tensor
    """``[vocab, hidden]``."""
    prediction: PredictionWeights | None
    """None where the checkpoint has none."""


def prepare_weights(config: LlamaConfig, tensors: Mapping[str, np.ndarray], place: str) -> DecoderWeights:
    """Join, fold and place the tensors of a validated checkpoint."""

    def put(array: np.ndarray) -> Tensor:
        return paddle.to_tensor(np.ascontiguousarray(array), place=place)

    def layer(arrays: Mapping[str, np.ndarray | None]) -> LayerWeights:
        return LayerWeights(**{name: None if array is None else put(array) for name, array in arrays.items()})

    layers = (join_layer(config, tensors, f"model.layers.{number}") for number in range(config.num_hidden_layers))
    last = join_prediction(config, tensors)
    embedding = put(tensors["model.embed_tokens.weight"])
    return DecoderWeights(
        embedding=embedding,
        layers=tuple(layer(arrays) for arrays in layers),
        norm=put(tensors["model.norm.weight"]),
        head=embedding if config.tie_word_embeddings else put(tensors["lm_head.weight"]),
        prediction=None if last is None else PredictionWeights(put(last.join), layer(last.layer), put(last.norm)),
    )


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
