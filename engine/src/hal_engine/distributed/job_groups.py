"""The groups of a job's ranks, over every library that its tensors need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hal_core.devices import open_groups, paddle_device


def open_job(device: Any, groups: Sequence[Sequence[int]], *, timeout: float | None = None) -> None:  # noqa: ANN401 (a device)
    """Open groups of global ranks over gloo and over the device's library.

    The device opens them if it has ``make_group``. Paddle also opens them, for a model's tensors, if it has the library
    (a device that makes groups itself reports this by ``paddle_has_library``).

    ``device``: opened, bound or not. Every rank of the job makes the same call, whether or not it is a member; see
    :func:`hal_core.devices.open_groups`.
    """
    open_groups(groups, timeout=timeout)
    device = getattr(device, "device", device)
    make = getattr(device, "make_group", None)
    if make is not None:
        open_groups(groups, backend=device.groups_by, timeout=timeout, make=make)
    kind = _KINDS.get(device.capabilities.collective)
    if kind is not None and getattr(device, "paddle_has_library", True):
        with paddle_device(f"{kind}:{device.index}" if kind else device.place):
            open_groups(groups, backend=device.capabilities.collective, timeout=timeout)


_KINDS = {"nccl": "gpu", "bkcl": "", "xccl": ""}
"""Library to the kind of Paddle device for it; "" if a device over Paddle itself gives its place."""
