"""The Paddle runner: Llama, Mistral, Qwen2 and Qwen3 checkpoints in Paddle, float32, sampled and drafted on the host.

    hal run "def main("      # the default runner, for every device without an installed runner of its own

Importing this package imports no Paddle; ``hal_paddle_runner.llama`` and what it uses do, which a model in host memory
does without.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from hal_core.devices import check_processor

if TYPE_CHECKING:
    from hal_engine.stepping import RunnerSetup

    from .runner import ModelRunner as ModelRunner
    from .worker import Worker as Worker

_HOME = {"ModelRunner": "runner", "Worker": "worker"}
__all__ = ["RUNNER", "Paddle", *_HOME]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


class Paddle:
    """Maker of the runner called ``paddle`` (entry-point group ``hal.runners``)."""

    @property
    def needs_host(self) -> str:
        """That of its runners."""
        from .runner import ModelRunner

        return ModelRunner.needs_host

    def check_runs(self) -> None:
        """Raise :class:`ModuleNotFoundError` without Paddle, and :class:`hal_core.Unavailable` if it cannot run on this
        processor."""
        if find_spec("paddle") is None:
            raise ModuleNotFoundError("No module named 'paddle'", name="paddle")
        check_processor()

    def __call__(self, setup: RunnerSetup) -> ModelRunner:
        """Load the model, or this rank's part of it, and return a runner. Raises :class:`hal_core.Unavailable` if
        Paddle is needed and cannot be imported, and :class:`hal_core.InvalidValue` for a checkpoint or a proposer that
        cannot be."""
        setup.status("reading the model")
        with setup.importing():
            from .making import make
        return make(setup)


RUNNER = Paddle()
