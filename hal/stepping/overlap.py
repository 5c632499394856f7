"""Whether the host may prepare the next step while the device runs one, and why not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hal_core import CapabilityMissing, InvalidValue

if TYPE_CHECKING:
    from hal_core import BoundDevice

OVERLAPS = ("auto", "on", "off")
"""What may be asked for: to overlap where it can be, which is said; always, or an error; never."""


def check_overlap(wanted: str) -> None:
    """Raise :class:`InvalidValue` for a word that is none of :data:`OVERLAPS`."""
    if wanted not in OVERLAPS:
        raise InvalidValue(f"{wanted!r}", cure=f"give {', '.join(OVERLAPS)}", argument="--overlap")


def overlap_of(wanted: str, device: BoundDevice | None, runner: str, needs_host: str) -> tuple[bool, str]:
    """Whether steps overlap, and, where ``auto`` was asked for and they do not, why not in a few words; else "".

    :param device: None where it is not known yet, and the runner alone is asked.
    :param runner: what the runner is called; ``needs_host``: of it, see :class:`hal.stepping.Runner`.
    :raises InvalidValue: for a word that is none of :data:`OVERLAPS`.
    :raises CapabilityMissing: where ``on`` cannot be had: who, what, and the cure.
    """
    check_overlap(wanted)
    if wanted == "off":
        return False, ""
    why, cure = _hindrance(device, runner, needs_host)
    if wanted == "on" and why:
        raise CapabilityMissing(why, cure=cure, argument="--overlap")
    return not why, why


def _hindrance(device: BoundDevice | None, runner: str, needs_host: str) -> tuple[str, str]:
    """What forbids overlap, and the cure; two times "" where nothing does."""
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
