"""``python -m hal_sim``: build the simulator and its Paddle device, and print their paths."""

import sys

from hal_sim.build import core_library, paddle_device

sys.stdout.write(f"{core_library()}\n{paddle_device()}\n")
