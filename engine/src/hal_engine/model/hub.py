"""Checkpoints by name, as ``ORG/NAME``, from the Hugging Face cache, without a download."""

from __future__ import annotations

import os
import re
from pathlib import Path

from hal_core import InvalidValue

_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def find_checkpoint(given: str) -> Path:
    """Return the folder that ``given`` names, else that of the model ``ORG/NAME`` in the cache.

    Raises :class:`InvalidValue` with the command that fetches the model where the cache has none.
    """
    folder = Path(os.path.expanduser(given))  # unlike Path's, no error for a user who does not exist
    if folder.exists() or not _NAME.fullmatch(given):
        return folder  # the error comes when its configuration is read
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(given, "config.json")
    except HFValidationError:
        return folder
    if isinstance(found, str):
        return Path(found).parent
    what = f"neither a folder {given!r} here, nor a model {given} in the Hugging Face cache"
    raise InvalidValue(what, cure=f"fetch it: hf download {given}", argument="--model")
