"""Lets the tests here import the runtime that they control."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
