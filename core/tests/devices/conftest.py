"""Makes the latched runtime importable, and a fixture for a device over it."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from blocks_of_latched import RING
from latched import LatchedDevice


@pytest.fixture
def device():
    found = LatchedDevice(**RING)
    yield found
    assert found.primitives.wrong == []
