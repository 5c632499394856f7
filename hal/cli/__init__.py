"""The command line: ``hal devices``, ``hal run``, ``hal --version``.

Each command's module is imported when that command is invoked, so that a listing costs no framework import.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """The entry point of the ``hal`` command. An error of ours is one line on stderr and exit status 2."""
    from hal_core.errors import HalError

    from .application import application

    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # text in another script must not break a listing
    try:
        application(args=None if arguments is None else [*arguments], prog_name="hal")
    except HalError as error:
        print(f"hal: error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
