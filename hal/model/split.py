"""Tensor parallelism: which part of each tensor of a checkpoint a rank holds (Shoeybi et al. 2019, Megatron-LM).

Attention is split by heads and the MLP by its inner width: a rank computes with its part, and the sum over the ranks is
the whole (one all-reduce each). Embedding and head are split by vocabulary, in equal shares of which the last is filled
up with zeros. All else each rank holds whole.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
from hal_core import InvalidValue

from hal.model.config import LlamaConfig

if TYPE_CHECKING:
    from paddle import Tensor


class Ranks(Protocol):
    """What the model asks of its group; :class:`hal_core.devices.TensorRanks` is one."""

    @property
    def size(self) -> int: ...

    @property
    def index(self) -> int: ...

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, in place."""

    def gather(self, tensor: Tensor) -> Tensor | None:
        """``[size, *shape]`` on the first rank, None on the others."""

    def all_gather(self, tensor: Tensor) -> Tensor:
        """``[size, *shape]`` on every rank."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Part ``index`` of ``size`` equal ones."""

    index: int = 0
    size: int = 1

    def share(self, count: int) -> int:
        """How many of ``count`` a part holds, the last one with what fills it up."""
        return -(-count // self.size)

    def part(self, count: int) -> slice:
        """Which of ``count`` this part holds; the last parts may hold fewer, or none."""
        share = self.share(count)
        return slice(min(self.index * share, count), min((self.index + 1) * share, count))


WHOLE = Shard()
_SPLIT = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
_BY_ROWS = ("q_proj.", "k_proj.", "v_proj.", "gate_proj.", "up_proj.")
_BY_COLUMNS = ("o_proj.weight", "down_proj.weight")
BY_VOCABULARY = ("embed_tokens.weight", "lm_head.weight", "shared_head.head.weight")


def check_split(config: LlamaConfig, size: int, *, argument: str = "--tp") -> None:
    """Raise ``InvalidValue`` naming the field of ``config.json`` that ``size`` ranks cannot share out."""
    for name in _SPLIT:
        if (count := getattr(config, name)) % size:
            divisors = [n for n in range(1, size) if all(getattr(config, field) % n == 0 for field in _SPLIT)]
            raise InvalidValue(
                f"{size} ranks cannot share out {name} = {count}",
                cure=f"give a number that divides it, as {divisors[-1] if divisors else 1}",
                argument=argument,
            )


def local_config(config: LlamaConfig, shard: Shard) -> LlamaConfig:
    """The configuration of what one rank computes; the vocabulary and the widths between layers are the whole ones."""
    if shard.size == 1:
        return config
    return replace(config, **{name: getattr(config, name) // shard.size for name in _SPLIT})


def part_of(name: str, shape: tuple[int, ...], shard: Shard) -> tuple[slice, ...]:
    """Which part of the tensor ``name`` of this (whole) shape a rank holds."""
    whole = tuple(slice(0, count) for count in shape)
    if shard.size == 1:
        return whole
    if name.endswith(_BY_COLUMNS):
        return whole[0], shard.part(shape[1])
    if any(word in name for word in _BY_ROWS) or name.endswith(BY_VOCABULARY):
        return shard.part(shape[0]), *whole[1:]
    return whole


def filled_up(name: str, array: np.ndarray, vocab_size: int, shard: Shard) -> np.ndarray:
    """The rank's part of an embedding or head with rows of zeros up to the share that all have; others as they are."""
    missing = shard.share(vocab_size) - len(array) if name.endswith(BY_VOCABULARY) else 0
    return np.concatenate([array, np.zeros((missing, *array.shape[1:]), array.dtype)]) if missing else array
