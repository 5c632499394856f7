"""Durations of hal: named, documented, and overridden by environment variables, as those of the core.

    from hal.timeouts import TIMEOUTS

    child.wait(TIMEOUTS.plugin_check)

The variable of a field is ``HAL_SECONDS_`` and its name in capitals, unless it names another. docs/timeouts.md lists
all of them; ``python -m hal.timeouts`` prints the table of these. Only the core's timeouts are imported here.
"""

from __future__ import annotations

from hal_core import CoreTimeouts, Seconds


class Timeouts(CoreTimeouts):
    """Seconds. A field may be set, as tests do; its variable takes precedence."""

    signal: Seconds = Seconds(
        8.0, "from a signal to the end of a command by force; Docker kills after 10, Kubernetes after 30"
    )
    second_signal: Seconds = Seconds(1.0, "signals that come sooner after the first count as the same")
    tidying: Seconds = Seconds(1.0, "removing folders when a command is ended by force")
    interpreter_end: Seconds = Seconds(60.0, "the interpreter's own end, in which a process answers no signal")
    device_open: Seconds = Seconds(120.0, "opening one device (`hal devices --open`, `--timeout`)")
    plugin_slow: Seconds = Seconds(10.0, "a plugin's import or probe, before a line of the log names it")
    plugin_check: Seconds = Seconds(30.0, "the check of one plugin (`hal doctor`, `--timeout`)")


TIMEOUTS = Timeouts()


if __name__ == "__main__":
    Timeouts.print_table()
