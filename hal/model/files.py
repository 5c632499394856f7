"""Files of a checkpoint."""

from __future__ import annotations

import stat
from pathlib import Path

from hal_core import InvalidValue


def check_regular(path: Path) -> None:
    """Raise InvalidValue for a pipe, a device or a folder: to open a pipe may wait for ever. A missing file is not
    refused here."""
    try:
        mode = path.stat().st_mode
    except OSError:  # opening it tells why
        return
    if not stat.S_ISREG(mode):
        raise InvalidValue("is no regular file", cure="put the file itself there", argument=str(path))
