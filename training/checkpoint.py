"""Writes the trained vector in the layout of Llama checkpoints, with the MTP layer named as DeepSeek-V3 names it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save
from tokenizers import Tokenizer

from training.network import Shape

Named = dict[str, np.ndarray]


def named_tensors(shape: Shape, vector: np.ndarray) -> Named:
    """The flat float32 ``[count]`` vector as the checkpoint's tensors, matrices ``[out, in]``."""
    weights: Named = {}
    start = 0
    for name, size in shape.weights().items():
        stop = start + int(np.prod(size))
        weights[name] = vector[start:stop].reshape(size)
        start = stop
    tensors = {"model.embed_tokens.weight": weights["embed"], "model.norm.weight": weights["norm"]}
    for layer in range(shape.layers + 1):
        tensors |= _layer_tensors(shape, weights, layer)
    mtp, last = shape.layers, f"model.layers.{shape.layers}"
    tensors |= {f"{last}.{name}.weight": weights[f"{mtp}.{name}"] for name in ("enorm", "hnorm")}
    tensors[f"{last}.eh_proj.weight"] = weights[f"{mtp}.eh_proj"].T
    tensors[f"{last}.shared_head.norm.weight"] = weights[f"{mtp}.head_norm"]
    return tensors


def _layer_tensors(shape: Shape, weights: Named, layer: int) -> Named:
    prefix = f"model.layers.{layer}"
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    q, k, v = np.split(weights[f"{layer}.qkv"].T, [queries, queries + keys])
    gate, up = np.split(weights[f"{layer}.gate_up"].T, 2)
    return {
        f"{prefix}.input_layernorm.weight": weights[f"{layer}.norm1"],
        f"{prefix}.post_attention_layernorm.weight": weights[f"{layer}.norm2"],
        f"{prefix}.self_attn.q_proj.weight": q,
        f"{prefix}.self_attn.k_proj.weight": k,
        f"{prefix}.self_attn.v_proj.weight": v,
        f"{prefix}.self_attn.o_proj.weight": weights[f"{layer}.o"].T,
        f"{prefix}.mlp.gate_proj.weight": gate,
        f"{prefix}.mlp.up_proj.weight": up,
        f"{prefix}.mlp.down_proj.weight": weights[f"{layer}.down"].T,
    }


def config(shape: Shape, end_of_text: int) -> dict[str, Any]:
    """The fields of ``config.json``."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "max_position_embeddings": shape.context,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "num_nextn_predict_layers": 1,
        "torch_dtype": "float16",
    }


def write_checkpoint(
    directory: Path, shape: Shape, vector: np.ndarray, tokenizer: Tokenizer, end_of_text: int, record: dict[str, Any]
) -> None:
    """Write the directory's files, each replaced whole, so that a reader never sees half a file."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: np.ascontiguousarray(value.astype(np.float16)) for name, value in named_tensors(shape, vector).items()
    }
    generation = {"bos_token_id": end_of_text, "eos_token_id": end_of_text, "temperature": 0.7, "top_p": 0.9}
    files = {
        "config.json": _json(config(shape, end_of_text)),
        "generation_config.json": _json(generation),
        "training.json": _json(record),
        "tokenizer.json": tokenizer.to_str(pretty=False).encode(),
        "model.safetensors": save(tensors, metadata={"format": "pt"}),
    }
    for name, content in files.items():
        temporary = directory / f".{name}.partial"
        temporary.write_bytes(content)
        os.replace(temporary, directory / name)


def _json(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()
