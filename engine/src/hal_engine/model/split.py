"""Tensor parallelism: the part of each tensor of a checkpoint that a rank holds (Shoeybi et al. 2019, Megatron-LM).

Attention is split by heads and the MLP by its inner width: a rank computes with its part, and the sum over the ranks is
the whole (one all-reduce each). Embedding and head are split by vocabulary, in equal shares of which the last is padded
with zeros. Each rank holds all other tensors whole.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from hal_core import InvalidValue

from hal_engine.model.config import LlamaConfig


@dataclass(frozen=True, slots=True)
class Shard:
    """Part ``index`` of ``size`` equal ones."""

    index: int = 0
    size: int = 1

    def share(self, count: int) -> int:
        """Return the share of ``count`` per part, including the padding of the last one."""
        return -(-count // self.size)

    def part(self, count: int) -> slice:
        """Return this part's slice of ``count``; the last parts may hold fewer, or none."""
        share = self.share(count)
        return slice(min(self.index * share, count), min((self.index + 1) * share, count))


UNSPLIT = Shard()
_SPLIT = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
_BY_ROWS = ("q_proj.", "k_proj.", "v_proj.", "gate_proj.", "up_proj.")
_BY_COLUMNS = ("o_proj.weight", "down_proj.weight")
BY_VOCABULARY = ("embed_tokens.weight", "lm_head.weight", "shared_head.head.weight")


def check_split(config: LlamaConfig, size: int, *, argument: str = "--tp") -> None:
    """Raise ``InvalidValue`` naming the field of ``config.json`` that ``size`` ranks cannot share evenly."""
    for name in _SPLIT:
        if (count := getattr(config, name)) % size:
            divisors = [n for n in range(1, size) if all(getattr(config, field) % n == 0 for field in _SPLIT)]
            raise InvalidValue(
                f"{size} ranks cannot share out {name} = {count}",
                cure=f"give a number that divides it, as {divisors[-1] if divisors else 1}",
                argument=argument,
            )


def local_config(config: LlamaConfig, shard: Shard) -> LlamaConfig:
    """Return the configuration of one rank's computation; the vocabulary and the widths between layers are the whole
    ones."""
    if shard.size == 1:
        return config
    return replace(config, **{name: getattr(config, name) // shard.size for name in _SPLIT})


def part_of(name: str, shape: tuple[int, ...], shard: Shard) -> tuple[slice, ...]:
    """Return the part of the tensor ``name`` with this (whole) shape that a rank holds."""
    full = tuple(slice(0, count) for count in shape)
    if shard.size == 1:
        return full
    if name.endswith(_BY_COLUMNS):
        return full[0], shard.part(shape[1])
    if any(word in name for word in _BY_ROWS) or name.endswith(BY_VOCABULARY):
        return shard.part(shape[0]), *full[1:]
    return full


def filled_up(name: str, array: np.ndarray, vocab_size: int, shard: Shard) -> np.ndarray:
    """Return the rank's part of an embedding or head, padded with zero rows to the common share; other tensors
    unchanged."""
    missing = shard.share(vocab_size) - len(array) if name.endswith(BY_VOCABULARY) else 0
    return np.concatenate([array, np.zeros((missing, *array.shape[1:]), array.dtype)]) if missing else array
