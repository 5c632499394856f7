"""Weights from a checkpoint's files to a device, tensor by tensor, in the files' type, without a copy on the host."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hal_engine.model.config import LlamaConfig
from hal_engine.model.loading import Entry, checked_entries, differs, not_finite, tied_names
from hal_engine.model.split import BY_VOCABULARY, UNSPLIT, Shard, part_of
from safetensors import safe_open
from torch import Tensor

from .support import needed_tensors

_JOINED = {
    **{f"self_attn.{name}_proj": ("self_attn.qkv", at) for at, name in enumerate("qkv")},
    "mlp.gate_proj": ("mlp.gate_up", 0),
    "mlp.up_proj": ("mlp.gate_up", 1),
}
"""Matrices that are multiplied by the same, so they are one on the device: its name, and the part's number in it."""


@dataclass(frozen=True, eq=False)
class Weights:
    """Tensors on the device by name, and ``places``: where each tensor of a checkpoint lies in them."""

    tensors: Mapping[str, Tensor]
    places: Mapping[str, Tensor]


def allocate(config: LlamaConfig, device: torch.device, dtype: torch.dtype, shard: Shard = UNSPLIT) -> Weights:
    """Room for the weights of a rank: the tensors of a checkpoint, or its parts of them, of which some are joined."""
    shapes = {name: _part_shape(name, shape, shard) for name, shape in needed_tensors(config)}
    joined: dict[str, list[str]] = {}
    for name in shapes:
        joined.setdefault(_joined(name)[0], []).append(name)
    tensors: dict[str, Tensor] = {}
    places: dict[str, Tensor] = {}
    for target, names in joined.items():
        names.sort(key=lambda name: _joined(name)[1])
        rows = [shapes[name][0] for name in names]
        tensors[target] = torch.empty((sum(rows), *shapes[names[0]][1:]), dtype=dtype, device=device)
        places |= zip(names, tensors[target].split(rows), strict=True)
    return Weights(tensors, places)


def load(
    directory: Path, config: LlamaConfig, device: torch.device, dtype: torch.dtype, shard: Shard = UNSPLIT
) -> Mapping[str, Tensor]:
    """The weights of a checkpoint on a device, of a shard its parts, vocabularies whole.

    A file is mapped, not read into memory: the host holds no copy of a tensor, whose bytes go to the device as they are
    in the file and are converted there. Raises ``InvalidValue`` as :func:`hal_engine.model.loading.read_tensors`.
    """
    entries, aliases = checked_entries(directory, config), tied_names(config)
    weights, finite = allocate(config, device, dtype, shard), {}
    used = [name for name in entries if name in weights.places or aliases.get(name) in weights.places]
    for path in sorted({entries[name].path for name in used}):
        with safe_open(path, framework="pt") as file:
            for name in (name for name in used if entries[name].path == path and name in weights.places):
                placed = _placed(file, name, entries[name], device, shard)
                target = weights.places[name].copy_(placed)
                finite[name] = torch.stack(target.aminmax()).isfinite().all()  # without a copy; NaN is in both
                if name.endswith("o_proj.bias") and shard.index:
                    target.zero_()  # it is added once
    _check_finite(finite, entries, str(dtype).removeprefix("torch."))
    for name in (name for name in used if name in aliases):
        with safe_open(entries[name].path, framework="pt") as file:
            second = _placed(file, name, entries[name], device, shard).to(dtype)
        if not torch.equal(second, weights.places[aliases[name]]):
            raise differs(name, aliases[name], entries[name])
    return weights.tensors


def _placed(file: Any, name: str, entry: Entry, device: torch.device, shard: Shard) -> Tensor:  # noqa: ANN401
    """A rank's part of one tensor on the device, in the file's type."""
    return to_device(file.get_slice(name)[_part(name, entry.shape, shard)], device)


def to_device(mapped: Tensor, device: torch.device) -> Tensor:
    """Copy a mapped part of a file to the device."""
    return mapped.to(device)


def _check_finite(finite: Mapping[str, Tensor], entries: Mapping[str, Entry], dtype: str) -> None:
    """Wait for the device once, and raise for the first tensor that has NaN or infinity in ``dtype``."""
    names = list(finite)
    for name, sound in zip(names, torch.stack([finite[name] for name in names]).tolist(), strict=True):
        if not sound:
            raise not_finite(name, entries[name], dtype)


def _joined(name: str) -> tuple[str, int]:
    """Of which tensor on the device a checkpoint's is a part, and which part."""
    for part, (target, at) in _JOINED.items():
        if f".{part}." in name:
            return name.replace(part, target), at
    return name, 0


def _part(name: str, shape: tuple[int, ...], shard: Shard) -> tuple[slice, ...]:
    return part_of(name, shape, UNSPLIT if name.endswith(BY_VOCABULARY) else shard)


def _part_shape(name: str, shape: tuple[int, ...], shard: Shard) -> tuple[int, ...]:
    return tuple(part.stop - part.start for part in _part(name, shape, shard))


def random(config: LlamaConfig, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Mapping[str, Tensor]:
    """Return random weights: norms of ones, otherwise small numbers drawn from ``seed``."""
    generator, weights = torch.Generator(device).manual_seed(seed), allocate(config, device, dtype)
    _fill(weights.tensors.items(), generator)
    return weights.tensors


def _fill(tensors: Iterable[tuple[str, Tensor]], generator: torch.Generator) -> None:
    for name, tensor in tensors:
        tensor.fill_(1) if "norm" in name else tensor.normal_(0, 0.02, generator=generator)
