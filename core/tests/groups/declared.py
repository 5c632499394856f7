"""Functions that two ranks run in the tests of declared fields."""

import numpy as np
from hal_core import StateField
from hal_core.devices.cpu import CpuPlugin
from hal_core.devices.cpu.device import host_view
from hal_core.errors import HalError
from hal_core.group import Group
from hal_core.runtime.bound import bind
from hal_core.slots.fields import StateConfig

GROUP = (0, 1)


def fields(change):
    """One row that ranks agree on, and one that each rank keeps for itself."""
    return [
        StateField("agreed", "int16", 3, groups="broadcast", **change),
        StateField("own", "float32", groups="output"),
    ]


def agree(rank, drafts):
    """Write the rank's number into both fields, broadcast, and return both values."""
    if rank.rank not in GROUP:
        return None
    with bind(CpuPlugin.open(0, {})) as device:
        sizes = StateConfig(num_slots=2, max_model_len=8, max_draft_tokens=drafts)
        state = device.state(sizes, fields=fields({}))
        for name in ("agreed", "own"):
            host_view(state.view(name))[...] = rank.rank + 1
        group = Group(GROUP, rank.rank)
        device.broadcast_tokens(state=state, group=group, stream=device.default_stream).wait(10)
        return [np.unique(host_view(state.view(name))).tolist() for name in ("agreed", "own")]


def differ(rank, change):
    """Open a state whose declared fields differ on rank 1; return the error."""
    if rank.rank not in GROUP:
        return None
    with bind(CpuPlugin.open(0, {})) as device:
        state = device.state(
            StateConfig(num_slots=2, max_model_len=8), fields=fields(change if rank.rank else {}), name=str(change)
        )
        try:
            device.open_group(state=state, group=Group(GROUP, rank.rank))
        except HalError as error:
            return type(error).__name__
        return ""
