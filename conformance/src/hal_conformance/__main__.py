"""``python -m hal_conformance NAME``."""

from __future__ import annotations

import sys

from hal_core.errors import HalError

from .report.command import main


def run() -> int:
    """Run the command; return its exit status."""
    try:
        return main()
    except HalError as error:
        print(f"hal conform: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(run())
