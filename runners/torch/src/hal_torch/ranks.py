"""Torch's own group of the ranks of one host, which sum up their parts of a layer."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from hal_core import TIMEOUTS, GroupLost
from torch import Tensor, distributed

if TYPE_CHECKING:
    from hal_engine.model.split import Shard
    from hal_engine.stepping import RunnerSetup


def meet(setup: RunnerSetup, shard: Shard) -> None:
    """Open the group at the address of its first rank, which hal's broadcast sends to the others. Fails on another
    host."""
    tokens = setup.state.tensor("sampled_token_ids", "torch")[:, 0]
    within = {"timeout": timedelta(seconds=TIMEOUTS.collective)}
    if setup.group.is_first:
        store = distributed.TCPStore("127.0.0.1", 0, shard.size, True, wait_for_workers=False, **within)
        tokens[0] = store.port
    setup.device.broadcast_tokens(state=setup.state, group=setup.group, stream=setup.device.default_stream).wait()
    if not setup.group.is_first:
        store = distributed.TCPStore("127.0.0.1", int(tokens[0]), shard.size, **within)
    tokens.fill_(-1)  # as of empty slots
    backend = "nccl" if tokens.device.type == "cuda" else "gloo"
    distributed.init_process_group(backend, store=store, rank=shard.index, world_size=shard.size)


def add_up(part: Tensor) -> None:
    """Sum over the ranks, in place. Raises :class:`GroupLost`: after a failure the ranks may have made different
    collectives."""
    try:
        distributed.all_reduce(part)
    except RuntimeError as error:
        raise GroupLost(f"torch's all-reduce failed: {error}", cure="see the other ranks' output") from error
