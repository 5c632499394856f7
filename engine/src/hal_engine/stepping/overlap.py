"""Whether the host may prepare the next step while the device runs one, and why not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hal_core import CapabilityMissing, InvalidValue

if TYPE_CHECKING:
    from hal_core import BoundDevice

OVERLAPS = ("auto", "on", "off")
"""Values of ``--overlap``: if possible, with a note if not; always, or an error; never."""


def check_overlap(wanted: str) -> None:
    """Raise :class:`InvalidValue` for a name outside :data:`OVERLAPS`."""
    if wanted not in OVERLAPS:
        raise InvalidValue(f"{wanted!r}", cure=f"give {', '.join(OVERLAPS)}", argument="--overlap")


def overlap_of(wanted: str, device: BoundDevice | None, runner: str, needs_host: str) -> tuple[bool, str]:
    """Return whether steps overlap and, if ``auto`` was given and they do not, why in a few words; else "".

    :param device: None if it is not known yet; then the runner alone decides.
    :param runner: the runner's name; ``needs_host``: its attribute, see :class:`hal_engine.stepping.Runner`.
    :raises InvalidValue: for a name outside :data:`OVERLAPS`.
    :raises CapabilityMissing: if ``on`` is not possible, with the reason and the cure.
    """
    check_overlap(wanted)
    if wanted == "off":
        return False, ""
    why, cure = _hindrance(device, runner, needs_host)
    if wanted == "on" and why:
        raise CapabilityMissing(why, cure=cure, argument="--overlap")
    return not why, why


def _hindrance(device: BoundDevice | None, runner: str, needs_host: str) -> tuple[str, str]:
    """Return why overlap is not possible, and the cure; two times "" if it is."""
    if needs_host:
        cure = "give a --runner whose steps are work of the device alone, or leave --overlap at auto"
        return f"{runner} needs the host between two steps: {needs_host}", cure
    if device is None:
        return "", ""
    able = device.capabilities
    if not (able.async_h2d and able.async_d2h):
        cure = "choose a device whose copies are asynchronous (hal devices --open), or leave --overlap at auto"
        return f"device {device.name} copies while the host waits", cure
    if not able.async_update:
        cure = "choose a device that has a kernel for update_inputs (async_update), or leave --overlap at auto"
        return f"device {device.name} has no kernel for update_inputs: the host waits for the step to compute it", cure
    return "", ""
