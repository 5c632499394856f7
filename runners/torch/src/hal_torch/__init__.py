"""The torch runner: checkpoints of ``hal_engine.model.config`` in torch, with CUDA graphs and sampling on the device.

    hal run --device cuda --prompt "def main("            # --runner auto selects it
    hal run --device cpu --runner torch --prompt "def main("   # on torch's CPU, for tests

Importing this package imports no torch; ``hal_torch.runner``, ``hal_torch.model`` and its other modules do.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hal_core import HalError, Unavailable

if TYPE_CHECKING:
    from hal_core import BoundDevice
    from hal_engine.stepping import RunnerSetup

    from .runner import TorchRunner

__all__ = ["RUNNER", "Torch"]


class Torch:
    """Maker of the runner called ``torch`` (entry-point group ``hal.runners``)."""

    def __call__(self, setup: RunnerSetup) -> TorchRunner:
        """Return a runner. Raises :class:`HalError`, before anything is loaded, if it cannot run."""
        _import_torch()
        from .runner import TorchRunner

        return TorchRunner(setup)

    def why_not(self, device: BoundDevice, model: Path) -> str:
        """Return "" or why it cannot run on a device. It supports every checkpoint that ``hal_engine.model.config``
        reads."""
        try:
            _import_torch()
            from .support import check_sees

            check_sees(device)
        except HalError as error:
            return error.what
        return ""


RUNNER = Torch()


def _import_torch() -> None:
    try:
        import torch  # noqa: F401
    except ImportError as error:
        cure = "install a build of torch for your GPU, as pip install './runners/torch[torch]'"
        raise Unavailable(f"torch cannot be imported: {error}", cure=cure, argument="--runner") from error
