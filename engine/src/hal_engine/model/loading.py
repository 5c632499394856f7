"""Loading of a checkpoint's tensors (``model.safetensors``, whole or sharded) as float32, checked before use.

A checkpoint is accepted only if it has every tensor of the configuration, with its shape and finite, and no other one.
bfloat16 is widened by a shift: it is the upper half of a float32, and NumPy has no such type.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from hal_core import InvalidValue
from safetensors import SafetensorError, safe_open

from hal_engine.model.config import LlamaConfig
from hal_engine.model.fields import read_json
from hal_engine.model.files import check_regular
from hal_engine.model.split import UNSPLIT, Shard, filled_up, part_of

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_STORED: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}


@dataclass(frozen=True)
class Entry:
    """The place of one tensor: bytes ``start`` to ``stop`` of ``path``."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def read_tensors(directory: Path, config: LlamaConfig, shard: Shard = UNSPLIT) -> dict[str, np.ndarray]:
    """Return all tensors of the checkpoint by their usual names, float32, matrices ``[out, in]``; for a shard only its
    parts.

    Raises ``InvalidValue`` as :func:`checked_entries`, and for a tensor that is not finite.
    """
    entries, aliases = checked_entries(directory, config), tied_names(config)
    names = sorted(entries.keys() - aliases.keys())
    tensors = {name: _read(name, entries[name], config, shard) for name in names}
    for name in aliases.keys() & entries.keys():
        if not np.array_equal(_read(name, entries[name], config, shard), tensors[aliases[name]]):
            raise differs(name, aliases[name], entries[name])
    return tensors


def differs(name: str, other: str, entry: Entry) -> InvalidValue:
    """Return the error for a tensor that a file holds twice with different contents."""
    return InvalidValue(
        f"tensor {name!r} differs from {other!r}, though config.json ties the two",
        cure="set tie_word_embeddings to false if they are meant to differ",
        argument=str(entry.path),
    )


def not_finite(name: str, entry: Entry, dtype: str = "float32") -> InvalidValue:
    """Return the error for a tensor with NaN or infinity in ``dtype``, that of the computations."""
    what = f"tensor {name!r} ({entry.dtype}) holds NaN or infinity in {dtype}"
    cure = "restore the file" + (", or give --dtype float32" if dtype != "float32" else "")
    return InvalidValue(what, cure=cure, argument=str(entry.path))


def checked_entries(directory: Path, config: LlamaConfig) -> dict[str, Entry]:
    """Return the place of each tensor of the model, including those of :func:`tied_names` in the file; no weight is
    read.

    Raises ``InvalidValue`` naming the file, and the tensor if there is one, for a file that is missing, truncated or
    has trailing bytes, and for a tensor that is missing, unknown, or of another shape or dtype.
    """
    entries, aliases = _entries(directory), tied_names(config)
    expected: set[str] = set()
    for name, shape in expected_tensors(config):
        entry = entries.get(name)
        if entry is None:
            raise InvalidValue(
                f"tensor {name!r} is missing",
                cure="restore the file, or make config.json match it",
                argument=str(directory),
            )
        _check_shape(name, entry, shape)
        expected.add(name)
    for name, entry in entries.items():
        if name in aliases:
            _check_shape(name, entry, entries[aliases[name]].shape)
        # inv_freq is computed here; old files contain it.
        elif name not in expected and not name.endswith(".rotary_emb.inv_freq"):
            raise InvalidValue(
                f"tensor {name!r} does not belong to the model that config.json describes",
                cure="make config.json match the file",
                argument=str(entry.path),
            )
    return {name: entry for name, entry in entries.items() if name in expected or name in aliases}


def expected_tensors(config: LlamaConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of every tensor of this configuration (a generator, so that a bad file with a huge layer
    count ends at the first missing tensor)."""
    hidden = config.hidden_size
    yield "model.embed_tokens.weight", (config.vocab_size, hidden)
    yield "model.norm.weight", (hidden,)
    if not config.tie_word_embeddings:
        yield "lm_head.weight", (config.vocab_size, hidden)
    for layer in range(config.num_hidden_layers):
        yield from _layer_tensors(config, f"model.layers.{layer}")
    for layer in range(config.num_hidden_layers, config.num_hidden_layers + config.num_nextn_predict_layers):
        prefix = f"model.layers.{layer}"
        yield from _layer_tensors(config, prefix)
        yield f"{prefix}.enorm.weight", (hidden,)
        yield f"{prefix}.hnorm.weight", (hidden,)
        yield f"{prefix}.eh_proj.weight", (hidden, 2 * hidden)
        yield f"{prefix}.shared_head.norm.weight", (hidden,)


def tied_names(config: LlamaConfig) -> dict[str, str]:
    """Return tensors that a file may hold a second time, each with the one it must equal: tied heads, and the embedding
    and head that DeepSeek-V3 checkpoints repeat in the prediction layer."""
    embedding = "model.embed_tokens.weight"
    head = embedding if config.tie_word_embeddings else "lm_head.weight"
    names = {"lm_head.weight": embedding} if config.tie_word_embeddings else {}
    for layer in range(config.num_hidden_layers, config.num_hidden_layers + config.num_nextn_predict_layers):
        names[f"model.layers.{layer}.embed_tokens.weight"] = embedding
        names[f"model.layers.{layer}.shared_head.head.weight"] = head
    return names


def _layer_tensors(config: LlamaConfig, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, intermediate = config.hidden_size, config.intermediate_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    yield f"{prefix}.input_layernorm.weight", (hidden,)
    yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
    for name, width in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
        yield f"{prefix}.self_attn.{name}.weight", (width, hidden)
        if config.qkv_bias:
            yield f"{prefix}.self_attn.{name}.bias", (width,)
    if config.qk_norm:
        yield f"{prefix}.self_attn.q_norm.weight", (config.head_dim,)
        yield f"{prefix}.self_attn.k_norm.weight", (config.head_dim,)
    yield f"{prefix}.self_attn.o_proj.weight", (hidden, queries)
    if config.output_bias:
        yield f"{prefix}.self_attn.o_proj.bias", (hidden,)
    yield f"{prefix}.mlp.gate_proj.weight", (intermediate, hidden)
    yield f"{prefix}.mlp.up_proj.weight", (intermediate, hidden)
    yield f"{prefix}.mlp.down_proj.weight", (hidden, intermediate)


def _entries(directory: Path) -> dict[str, Entry]:
    """Return the tensors of all files of the checkpoint, by name."""
    if (directory / _SINGLE).exists() or not (directory / _INDEX).exists():
        return _file_entries(directory / _SINGLE)
    index = directory / _INDEX
    files = read_json(index).get("weight_map")
    if not isinstance(files, dict) or not files or not all(_plain_name(name) for name in files.values()):
        raise InvalidValue(
            "weight_map must map tensor names to names of files beside the index",
            cure="restore the index",
            argument=str(index),
        )
    entries: dict[str, Entry] = {}
    for name in sorted(set(files.values())):
        for tensor, entry in _file_entries(directory / name).items():
            if files.get(tensor) != name:
                raise InvalidValue(
                    f"holds tensor {tensor!r}, which {_INDEX} does not place there",
                    cure="restore the index or the file",
                    argument=str(entry.path),
                )
            entries[tensor] = entry
    _check_index(files, entries, index)
    return entries


def _check_index(files: Mapping[str, str], entries: Mapping[str, Entry], index: Path) -> None:
    for tensor, name in files.items():
        if tensor not in entries:
            raise InvalidValue(
                f"tensor {tensor!r} is not in {name}, where the index places it",
                cure="restore the index or the file",
                argument=str(index),
            )


def _plain_name(name: object) -> bool:
    """Return whether a file name remains inside the checkpoint's directory."""
    return isinstance(name, str) and name not in ("", ".", "..") and not set(name) & set("/\\\0")


def _file_entries(path: Path) -> dict[str, Entry]:
    """Return the tensors of one safetensors file. The library checks the header, the offsets and the file's exact
    length."""
    check_regular(path)
    try:
        with safe_open(path, framework="numpy") as opened:
            names = set(opened.keys())
        with path.open("rb") as file:
            header = int.from_bytes(file.read(8), "little")
            table = json.loads(file.read(header))
    except FileNotFoundError:
        raise InvalidValue("no such file", cure="a checkpoint directory needs it", argument=str(path)) from None
    except (SafetensorError, OSError, ValueError) as error:
        raise InvalidValue(
            f"not a whole safetensors file: {error}",
            cure="it is truncated, has trailing bytes or is another kind of file: restore it",
            argument=str(path),
        ) from None
    entries = {}
    for name in names:
        start, stop = table[name]["data_offsets"]
        entries[name] = Entry(
            path, table[name]["dtype"], tuple(table[name]["shape"]), 8 + header + start, 8 + header + stop
        )
    return entries


def _check_shape(name: str, entry: Entry, shape: tuple[int, ...]) -> None:
    if entry.dtype not in _STORED:
        raise InvalidValue(
            f"tensor {name!r} has dtype {entry.dtype}",
            cure=f"only {', '.join(_STORED)} are supported",
            argument=str(entry.path),
        )
    if entry.shape != shape:
        raise InvalidValue(
            f"tensor {name!r} has shape {list(entry.shape)}, but config.json calls for {list(shape)}",
            cure="make config.json match the file",
            argument=str(entry.path),
        )


def _read(name: str, entry: Entry, config: LlamaConfig, shard: Shard) -> np.ndarray:
    """Return a rank's part of one tensor as float32, read through a mapping so that only that part is in memory
    twice."""
    stored = _STORED[entry.dtype]
    count = (entry.stop - entry.start) // stored.itemsize
    mapped = np.memmap(entry.path, dtype=stored, mode="r", offset=entry.start, shape=(count,)).reshape(entry.shape)
    raw = mapped[part_of(name, entry.shape, shard)]
    if entry.dtype == "BF16":
        values: np.ndarray = (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)
    else:
        values = np.array(raw, dtype=np.float32)
    if not np.isfinite(values).all():
        raise not_finite(name, entry)
    return filled_up(name, values, config.vocab_size, shard)
