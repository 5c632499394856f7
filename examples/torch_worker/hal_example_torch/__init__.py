"""A Llama-style decoder in torch as a runner of hal: it reads and writes the slot state in place, on the device alone.

    hal run --device cuda --runner hal_example_torch:TorchRunner --prompt "def main("

The decode step is captured as CUDA graphs and samples on the device, so steps overlap with what the host does.
"""

from __future__ import annotations

from .model import Decoder
from .runner import TorchRunner, bfloat16

__all__ = ["Decoder", "TorchRunner", "bfloat16"]
