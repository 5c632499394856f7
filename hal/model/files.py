"""Files of a checkpoint."""

from __future__ import annotations

import stat
from pathlib import Path

from hal_core import InvalidValue


def check_regular(path: Path) -> None:
    """Raise InvalidValue for a pipe, a device or a folder, as opening a pipe may never return. A missing file is not
    refused here."""
    try:
        mode = path.stat().st_mode
    except OSError:  # opening it raises the reason
        return
    if not stat.S_ISREG(mode):
        raise InvalidValue("is not a regular file", cure="put the file itself there", argument=str(path))
