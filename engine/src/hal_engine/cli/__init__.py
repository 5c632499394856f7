"""Commands of the engine (entry-point group ``hal.commands``): ``hal run``, ``hal serve``, ``hal tail``."""

from __future__ import annotations

import os

from hal.cli import signals
from hal_engine import timeouts as timeouts  # hal checks its variables before a command begins
from hal_engine.mkl import choose_kernels

if signals.ends_process():  # the command owns this process, and its ranks inherit what is set here
    choose_kernels(os.environ)
