"""Observers from entry points: those of the group ``hal.observers`` that the user names in ``HAL_OBSERVERS``.

None is used by default, because the user and not an installed package decides what observes every hook call. How to
write one: :mod:`hal_core.runtime.observers`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hal_core import HalError

from .discovery import OBSERVED, OBSERVERS, Entry, installed_in, load_and_make, named

if TYPE_CHECKING:
    from hal_core import BoundDevice


def chosen() -> tuple[Entry, ...]:
    """Return the observers that ``HAL_OBSERVERS`` names, in its order, without importing them.

    :raises InvalidValue: for a name that no installed observer has, or that two distributions claim.
    """
    names = dict.fromkeys(name.strip() for name in os.environ.get(OBSERVED, "").split(",") if name.strip())
    if not names:
        return ()
    there, cure = installed_in(OBSERVERS), "list names of observers separated by commas, or unset it to have none"
    return tuple(named(name, there, kind="observer", argument=OBSERVED, cure=cure) for name in names)


def observe(bound: BoundDevice, entries: Sequence[Entry]) -> None:
    """Attach the observers to a device, so that they see each of its hook calls.

    :raises PluginError: naming the distribution, for one that cannot be imported, is made for another contract, or is
        not an observer.
    """
    for entry in entries:
        observer = load_and_make(entry)
        try:
            bound.observe(observer, name=f"{entry.name} ({entry.who})")
        except HalError as error:
            raise entry.error(error.what, cure=error.cure) from error
