"""Check that torch can run a checkpoint on a device: torch's build, the card, its types, its memory. No weight is
read."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import torch
from hal_core import InvalidValue, OutOfMemory, Unavailable
from hal_engine.model.loading import expected_tensors

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hal_core import BoundDevice
    from hal_engine.model.config import LlamaConfig

STORED = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""The types of a checkpoint's tensors, by their names in its files."""
_BF16_CARDS = (8, 0)
"""Compute capability from which a GPU has bfloat16."""


def check_sees(device: BoundDevice) -> None:
    """Raise :class:`Unavailable` unless torch can compute on the memory of a hal device: a GPU, or the host's."""
    kind = device.name.rpartition(":")[0]
    if kind == "cpu":
        return
    if kind != "cuda":
        cure = "give --device cuda, or cpu for torch's CPU"
        raise Unavailable(f"torch does not compute on device {kind}", cure=cure, argument="--runner")
    if why := _why_no_gpu(device.index):
        cure = "install a build of torch for the driver and the card (nvidia-smi shows them), or give --runner paddle"
        raise Unavailable(why, cure=cure, argument="--runner")


def _why_no_gpu(index: int) -> str:
    version = torch.__version__
    if torch.version.cuda is None:
        return f"torch {version} is built without CUDA"
    if not hasattr(torch.cuda.CUDAGraph, "raw_cuda_graph_exec"):  # by which the device launches a step's graphs
        return f"torch {version} does not expose the handles of its CUDA graphs, as 2.11 does"
    if not torch.cuda.is_available():
        try:
            torch.cuda.init()
        except (RuntimeError, AssertionError) as error:
            return f"torch {version}, built for CUDA {torch.version.cuda}, cannot use the GPU: {_line(error)}"
        return f"torch {version}, built for CUDA {torch.version.cuda}, sees no GPU"
    if index >= (count := torch.cuda.device_count()):
        return f"torch sees {count} GPU(s), so none of index {index}"
    card, built = torch.cuda.get_device_capability(index), torch.cuda.get_arch_list()
    if not any(_runs_on(name, card) for name in built):
        name = torch.cuda.get_device_name(index)
        return f"torch {version} is built for {' '.join(built)}, and {name} is sm_{card[0]}{card[1]}"
    return ""


def _runs_on(built: str, card: tuple[int, int]) -> bool:
    """Whether code built for an architecture, as ``sm_90`` or ``compute_90``, runs on a card of that capability."""
    kind, _, digits = built.partition("_")
    number = int("".join(digit for digit in digits if digit.isdigit()))
    major, minor = divmod(number, 10)
    if kind == "compute":
        return (major, minor) <= card
    return major == card[0] and minor <= card[1]


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())


def computing_dtype(wanted: str, stored: str, device: torch.device) -> torch.dtype:
    """Return the type to compute in: ``wanted`` is "auto" or "float32", ``stored`` the checkpoint's, as "BF16".

    :raises InvalidValue: for a type that the card lacks.
    """
    dtype = torch.float32 if wanted == "float32" else STORED[stored]
    if device.type == "cuda" and dtype == torch.bfloat16:
        card = torch.cuda.get_device_capability(device)
        if card < _BF16_CARDS:
            what = f"the checkpoint is bfloat16, which {torch.cuda.get_device_name(device)} lacks"
            raise InvalidValue(what, cure="give --dtype float32", argument="--dtype")
    return dtype


def needed_tensors(config: LlamaConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the tensors that are used: all but the layer that predicts further tokens."""
    beyond = f"model.layers.{config.num_hidden_layers}."
    return ((name, shape) for name, shape in expected_tensors(config) if not name.startswith(beyond))


def check_room(config: LlamaConfig, dtype: torch.dtype, tokens: int, device: torch.device, shares: int = 1) -> None:
    """Raise :class:`OutOfMemory` unless the weights and a cache of ``tokens`` tokens fit into the free memory.

    ``shares``: ranks that have a part of them each. A step needs more for its computations; the bound covers permanent
    memory.
    """
    weights = sum(prod(shape) for _, shape in needed_tensors(config)) * dtype.itemsize // shares
    width = 2 * config.num_key_value_heads * config.head_dim * config.num_hidden_layers
    cache, free = tokens * width * dtype.itemsize // shares, free_bytes(device)
    if weights + cache > free:
        parts = f"{weights:,} for weights and {cache:,} for the cache of {tokens:,} tokens"
        what = f"{weights + cache:,} bytes are needed ({parts}), {free:,} are free on {device}"
        cure = "give fewer --blocks or --slots, a smaller model, or free memory"
        raise OutOfMemory(what, cure=cure, argument="--model")


def free_bytes(device: torch.device) -> int:
    """Return the free memory of a device: the GPU's, or what the host can still allocate."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    with open("/proc/meminfo", encoding="ascii") as table:
        line = next(line for line in table if line.startswith("MemAvailable:"))
    return int(line.split()[1]) * 1024
