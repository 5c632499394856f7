"""A runner by the name of what makes it, as ``--runner MODULE:NAME`` gives it."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from hal_core import PluginError

from hal.makers import check_maker, make

if TYPE_CHECKING:
    from .runner import Runner, RunnerSetup

_OPTION = "--runner"
_METHODS = ("check", "launch", "propose")


def check_runner_name(name: str) -> None:
    """Raise :class:`InvalidValue` for what is no MODULE:NAME."""
    check_maker(name, _OPTION, "my_runners:MyRunner")


def make_runner(name: str, setup: RunnerSetup) -> Runner:
    """Import what ``name`` says, from the working directory too, and have it make a runner.

    :raises InvalidValue: for a module or name that is not there, and what the maker refuses.
    :raises PluginError: for one that fails, or makes no runner.
    """
    check_runner_name(name)
    made = make(name, _OPTION, "runner", setup)
    lacks = [method for method in _METHODS if not callable(getattr(made, method, None))]
    if not isinstance(getattr(made, "needs_host", None), str):
        lacks.append("needs_host (a text)")
    vocab = getattr(made, "vocab_size", None)
    if not isinstance(vocab, int) or isinstance(vocab, bool) or vocab < 1:
        lacks.append("vocab_size (a whole number of at least 1)")
    if lacks:
        what = f"{name} made {type(made).__name__}, which has no {', '.join(lacks)}"
        raise PluginError(what, cure="see hal/stepping/runner.py for what a runner is", argument=_OPTION)
    return cast("Runner", made)
