"""The command line: ``hal devices``, ``hal run``, ``hal tail``, ``hal conform``, ``hal --version``.

What only lists is read with argparse and costs no framework import; ``hal run`` with its many options is a typer
command, imported when it is invoked (typer's own imports would be half the time of a listing).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """The entry point of the ``hal`` command. An error of ours is one line on stderr and exit status 2."""
    from hal_core.errors import HalError

    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # text in another script must not break a listing
    try:
        _dispatch([*sys.argv[1:]] if arguments is None else [*arguments])
        sys.stdout.flush()
    except HalError as error:
        print(f"hal: error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:  # `hal devices | head`: who reads has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def _dispatch(arguments: list[str]) -> None:
    if arguments[:1] == ["run"]:
        _run(arguments[1:])
        return
    if arguments[:1] == ["tail"]:
        from .tail import run as tail

        tail(arguments[1:])
        return
    if arguments[:1] == ["conform"]:
        from .conform import run as conform

        conform(arguments[1:])
        return
    from .arguments import parse

    options = parse(arguments)
    if options.version:
        from .versions import lines

        print("\n".join(lines()))
    else:
        from .devices import show

        show(as_json=options.json, opened=options.open, timeout=options.timeout)


def _run(arguments: list[str]) -> None:
    import typer

    from .run import run

    command = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    command.command("run")(run)
    command(args=arguments, prog_name="hal run")
