"""Where a pytest run keeps the kit's recorder. Every pytest beside the kit imports this: keep it light."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .report import Recorder

KEY: pytest.StashKey[Recorder] = pytest.StashKey()
