"""Small random checkpoints, written the way users' checkpoints are laid out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hal_engine.model.config import LlamaConfig, parse_config
from hal_engine.model.loading import expected_tensors

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "one key/value head": {"num_key_value_heads": 1},
    "no grouping, own head width": {"num_key_value_heads": 4, "head_dim": 6},
    "llama with bias, tied": {"attention_bias": True, "tie_word_embeddings": True},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 6},
    "scaled positions": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
        "rope_theta": 30.0,
    },
    "with a prediction layer": {"num_nextn_predict_layers": 1, "rope_theta": 500.0},
}


def tensors(config: LlamaConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 tensors, large enough that every part of the network matters."""
    rng = np.random.default_rng(seed)
    scale = {1: 0.5, 2: 0.3}
    values = {name: rng.normal(0, scale[len(shape)], shape) for name, shape in expected_tensors(config)}
    return {name: (value + name.endswith("norm.weight")).astype(np.float32) for name, value in values.items()}


STORED = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def to_bytes(values: Mapping[str, np.ndarray], dtype: str = "float32") -> bytes:
    """A safetensors file, written by hand from the format's description (length, JSON header, data), because the
    library's writers know no bfloat16 in NumPy; ``bfloat16`` is cut, not rounded."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, value in values.items():
        if dtype == "bfloat16":
            stored = (value.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()
        else:
            stored = value.astype(dtype).tobytes()
        offsets = [len(data), len(data) + len(stored)]
        header[name] = {"dtype": STORED[dtype], "shape": list(value.shape), "data_offsets": offsets}
        data += stored
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data


def write(
    directory: Path,
    fields: Mapping[str, Any],
    values: Mapping[str, np.ndarray],
    *,
    dtype: str = "float32",
    shards: int = 1,
) -> Path:
    """Write ``config.json`` and the tensors, in one file or sharded with an index."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(fields))
    if shards == 1:
        (directory / "model.safetensors").write_bytes(to_bytes(values, dtype))
        return directory
    weight_map = {}
    for shard in range(shards):
        name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {key: values[key] for key in sorted(values)[shard::shards]}
        (directory / name).write_bytes(to_bytes(part, dtype))
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


@pytest.fixture(scope="session")
def checkpoints() -> SimpleNamespace:
    """The helpers above."""

    def make(directory: Path, *, seed: int = 0, **changes: Any) -> Path:
        fields = LLAMA | changes
        return write(directory, fields, tensors(parse_config(fields), seed))

    return SimpleNamespace(llama=LLAMA, variants=VARIANTS, tensors=tensors, to_bytes=to_bytes, write=write, make=make)
