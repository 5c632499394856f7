"""The groups of a job's ranks, over every library that its tensors need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hal_core.devices import open_groups


def open_job(device: Any, groups: Sequence[Sequence[int]], *, timeout: float | None = None) -> None:  # noqa: ANN401 (a device)
    """Open groups of global ranks over hal's own collectives, and over the device's library if it has ``make_group``.

    ``device``: opened, bound or not. Every rank of the job makes the same call, whether or not it is a member; see
    :func:`hal_core.devices.open_groups`.
    """
    open_groups(groups, timeout=timeout)
    device = getattr(device, "device", device)
    make = getattr(device, "make_group", None)
    if make is not None:
        open_groups(groups, backend=device.groups_by, timeout=timeout, make=make)
