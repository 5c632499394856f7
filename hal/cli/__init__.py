"""The command line: signals, standard streams and exit statuses around the tree of commands (:mod:`hal.cli.tree`)."""

from __future__ import annotations

import os
import sys

from . import signals  # at once: before main() has taken the signals over, Ctrl-C is answered by the interpreter

TYPE_CHECKING = False  # as in hal
if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """The entry point of the ``hal`` command. What is no fault of ours is one line on stderr and exit status 2.

    After a signal the exit status is 128 + its number. With ``arguments`` the process goes on after the command.
    """
    if arguments is None:  # the process is the command's own, and its ranks inherit what is set here
        from hal.mkl import choose_kernels

        choose_kernels(os.environ)
    from .console import occupy

    occupy()  # before the signals' pipe would take the numbers
    with signals.watched(to_the_end=arguments is None):
        _main([*sys.argv[1:]] if arguments is None else [*arguments])


def _main(arguments: list[str]) -> None:
    from . import console, failures
    from .console import prepared, say

    failures.verbose = console.quiet = False
    ended: SystemExit | None = None
    told: str | None = ""
    trace = ""
    with prepared() as output:
        try:
            try:
                _dispatch(arguments)
            finally:
                output.finish(
                    wanted=signals.came() is None
                )  # what fails at the exit is told in the interpreter's words
        except SystemExit as end:
            ended = end
        except (signals.Interrupted, KeyboardInterrupt):
            ended = SystemExit(signals.status())
        except Exception as error:
            ended, told, trace = failures.exit_of(error), failures.told(error), failures.trace(error)
            if told is None and output.failure is None and signals.came() is None:
                raise
        if signals.came() is not None:  # whatever else came of it, that is why
            if ended is not None:
                ended, told = SystemExit(signals.status()), ""
        elif isinstance(output.failure, BrokenPipeError):  # `hal devices | head`: who reads has seen enough
            ended, told = SystemExit(1), ""
        elif output.failure is not None:  # whatever else came of it
            why = f"cannot be written: {output.failure.strerror} (make room there, or send it elsewhere)"
            ended, told = SystemExit(2), f"standard output: {why}"
        if told:
            say(f"{trace}hal: error: {told}")
    if ended is not None:
        raise ended


def _dispatch(arguments: list[str]) -> None:
    from hal.timeouts import TIMEOUTS

    from .tree import invoke

    TIMEOUTS.check()
    if not os.environ.get("HAL_LOG") or arguments[:1] == ["conform"]:  # pytest has an order of its own for logs
        invoke(arguments)
        return
    from . import logs

    with logs.said(logs.level()):
        invoke(arguments)
