"""The key of the kit's recorder in a pytest run. Every pytest with the kit installed imports this: keep it light."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .report import Recorder

KEY: pytest.StashKey[Recorder] = pytest.StashKey()
