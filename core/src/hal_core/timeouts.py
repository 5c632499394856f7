"""Every duration of the core and of device plugins: named, documented, and overridden by environment variables.

    from hal_core import TIMEOUTS

    event.wait(TIMEOUTS.group_end)

The variable of a field is ``HAL_SECONDS_`` and its name in capitals, unless the field names another. The host adds its
own fields (``hal/timeouts.py``), and the conformance kit too. docs/timeouts.md lists all of them. This module imports
only the standard library.
"""

from __future__ import annotations

import math
import os

TYPE_CHECKING = False  # saves the import of typing
if TYPE_CHECKING:
    from typing import overload


MOST = 1e6
"""Upper bound of a variable's seconds, 11 days: poll and TCP_USER_TIMEOUT count milliseconds in a C int."""


class Seconds:
    """A field of :class:`CoreTimeouts` or a class derived from it: its default, what it limits, and the variable that
    overrides it. Setting it in one of these classes sets it in all of them."""

    def __init__(self, default: float, what: str, variable: str = "") -> None:
        self.default, self.what, self.variable = default, what, variable
        self._value = default

    def __set_name__(self, owner: type, name: str) -> None:
        self.variable = self.variable or f"HAL_SECONDS_{name.upper()}"

    if TYPE_CHECKING:

        @overload
        def __get__(self, instance: None, owner: type) -> Seconds: ...
        @overload
        def __get__(self, instance: CoreTimeouts, owner: type) -> float: ...

    def __get__(self, instance: CoreTimeouts | None, owner: type) -> Seconds | float:
        """Return the seconds now; ``MOST`` for a variable with more. Raises :class:`hal_core.InvalidValue` if the
        variable holds no number above 0."""
        if instance is None:
            return self
        given = os.environ.get(self.variable)
        if not given:
            return self._value
        try:
            seconds = float(given)
        except ValueError:
            seconds = 0.0
        if not 0 < seconds < math.inf:
            from .errors import InvalidValue

            raise InvalidValue(f"{given!r}", cure="give seconds above 0, as 30", argument=self.variable)
        return min(seconds, MOST)

    def __set__(self, instance: CoreTimeouts, value: float) -> None:
        self._value = value


class CoreTimeouts:
    """Seconds. A field may be set, as tests do; its variable takes precedence."""

    collective: Seconds = Seconds(30.0, "a collective of ranks", "HAL_RANKS_TIMEOUT")
    starting: Seconds = Seconds(
        300.0, "the start of all ranks: each imports its framework, perhaps on a busy machine", "HAL_RANKS_STARTING"
    )
    connecting: Seconds = Seconds(60.0, "the connection of a group's ranks, at least: NCCL's start alone takes some")
    loss_reason: Seconds = Seconds(
        0.5, "the arrival of the reason, after a rank was lost or a collective failed; the engine waits twice as long"
    )
    group_end: Seconds = Seconds(5.0, "the end of a group that is lost or closed, before its process continues without")
    silence: Seconds = Seconds(20.0, "a channel without a sign of life; then the other side counts as lost, or stopped")
    pause: Seconds = Seconds(
        0.02,
        "until the next attempt where another process acts first; and how long what may go with a later message waits",
    )
    look: Seconds = Seconds(0.1, "between two looks of what waits: for signals, processes, ranks and peers")
    poll: Seconds = Seconds(50e-6, "between two queries of an event, at first")
    poll_most: Seconds = Seconds(2e-3, "the same in a long wait, at most")
    poll_background: Seconds = Seconds(
        500e-6,
        "the same by threads other than the one that submits work: if the driver woke all of them at once, they "
        "would take the GIL when the next step needs it",
    )
    output_look: Seconds = Seconds(5e-3, "between two looks of a sink's thread for an output that the worker may take")
    ring: Seconds = Seconds(
        30.0,
        "a device's work that something waits for: room in its staging ring or launch queue (its option `deadline`), "
        "its close, a runner that raised",
    )
    peer_deadline: Seconds = Seconds(300.0, "sealing reserved blocks of a KV transfer, and the answer to sealed keys")

    def check(self) -> None:
        """Raise :class:`hal_core.InvalidValue` for the first variable that holds no number above 0, also of classes
        derived from this one."""
        for name in self.names():
            getattr(self, name)
        for derived in type(self).__subclasses__():
            derived().check()

    @classmethod
    def names(cls) -> list[str]:
        """Return the names of the fields, with those of its bases."""
        classes = [vars(one).items() for one in reversed(cls.__mro__)]
        return [name for named in classes for name, found in named if isinstance(found, Seconds)]

    @classmethod
    def table(cls) -> str:
        """Return the fields of this class, without those of its bases, as a table of docs/timeouts.md."""
        own = [found for found in vars(cls).values() if isinstance(found, Seconds)]
        rows = [f"| `{one.variable}` | {one.default:g} | {one.what} |" for one in own]
        return "\n".join(["| variable | seconds | what it limits |", "|---|---|---|", *rows])

    @classmethod
    def print_table(cls) -> None:
        """Print the table. A reader that has closed the pipe is no error (``| head``)."""
        try:
            print(cls.table(), flush=True)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the interpreter flushes again when it exits


TIMEOUTS = CoreTimeouts()

if __name__ == "__main__":
    CoreTimeouts.print_table()
