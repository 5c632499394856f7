"""A digest of a checkpoint, by which ranks on several hosts check that they have loaded the same one."""

from __future__ import annotations

import hashlib
from pathlib import Path

from hal_core import InvalidValue

from hal_engine.model.files import check_regular

_NAMES = ("config.json", "*.safetensors", "*.safetensors.index.json")


def checkpoint_digest(directory: Path) -> str:
    """Return the SHA-256 of a checkpoint's configuration and weights, as hexadecimal text; each byte is read once.

    Raises ``InvalidValue`` for a file that cannot be read.
    """
    digest = hashlib.sha256()
    for path in sorted({found for name in _NAMES for found in directory.glob(name)}):
        check_regular(path)
        try:
            with path.open("rb") as file:
                part = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise InvalidValue(f"cannot be read: {error.strerror}", cure="restore it", argument=str(path)) from error
        digest.update(f"{path.name} {part}\n".encode())
    return digest.hexdigest()
