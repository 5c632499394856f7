"""``python -m hal_core.conformance NAME``."""

from __future__ import annotations

import sys

from ..errors import HalError
from .report.command import main

if __name__ == "__main__":
    try:
        sys.exit(main())
    except HalError as error:
        print(f"hal conform: error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
