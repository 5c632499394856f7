"""Keys of the kit in a pytest run. Every pytest with the kit installed imports this: keep it light."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .findings import Findings
    from .report import Recorder

KEY: pytest.StashKey[Recorder] = pytest.StashKey()
"""The kit's recorder."""
FINDINGS: pytest.StashKey[Findings] = pytest.StashKey()
"""Of a run that a supervisor follows: what is known of it already. The supervisor reports it."""
