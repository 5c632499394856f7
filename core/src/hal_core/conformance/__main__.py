"""Former name of ``python -m hal_conformance``."""

from __future__ import annotations

import sys

from . import kit

if __name__ == "__main__":
    sys.exit(kit(".__main__").run())
