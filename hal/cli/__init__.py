"""Entry point of the command line: signals, standard streams and exit statuses around the command tree
(:mod:`hal.cli.tree`)."""

from __future__ import annotations

import os
import sys

from . import signals  # imported first: until main() installs its handlers, the interpreter handles Ctrl-C

TYPE_CHECKING = False  # saves the import of typing, as in hal/__init__.py
if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the ``hal`` command. Errors of the user or the system are one line on stderr and exit status 2.

    After a signal the exit status is 128 + its number. With ``arguments`` the process continues after the command.
    """
    from .console import occupy

    occupy()  # before the signal pipe can take these numbers
    with signals.watched(to_the_end=arguments is None):
        _main([*sys.argv[1:]] if arguments is None else [*arguments])


def _main(arguments: list[str]) -> None:
    from . import console, failures
    from .console import prepared, say

    failures.verbose = console.quiet = False
    ended: SystemExit | None = None
    message: str | None = ""
    trace = ""
    with prepared() as output:
        try:
            try:
                _dispatch(arguments)
            finally:
                output.finish(wanted=signals.came() is None)  # the interpreter itself reports what fails at exit
        except SystemExit as end:
            ended = end
        except (signals.Interrupted, KeyboardInterrupt):
            console.status("")
            ended = SystemExit(signals.status())
        except Exception as error:
            ended, message, trace = failures.exit_of(error), failures.message(error), failures.trace(error)
            if message is None and output.failure is None and signals.came() is None:
                raise
        if signals.came() is not None:  # a signal explains any other failure
            if ended is not None:
                ended, message = SystemExit(signals.status()), ""
        # `hal devices | head`: the reader closed the pipe, which is no error
        elif isinstance(output.failure, BrokenPipeError):
            ended, message = SystemExit(1), ""
        elif output.failure is not None:  # this failure explains any other one
            why = f"cannot be written: {output.failure.strerror} (make room there, or send it elsewhere)"
            ended, message = SystemExit(2), f"standard output: {why}"
        if message:
            say(f"{trace}hal: error: {message}")
    if ended is not None:
        raise ended


def _dispatch(arguments: list[str]) -> None:
    from .imports import uncollected

    with uncollected():  # to collect among typer's objects takes an eighth of `hal --help`
        from .tree import invoke

    if not os.environ.get("HAL_LOG") or arguments[:1] == ["conform"]:  # pytest prints logs itself
        invoke(arguments)
        return
    from . import logs

    with logs.printed(logs.level()):
        invoke(arguments)
