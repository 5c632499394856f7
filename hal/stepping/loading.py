"""A runner by the name of what makes it, as ``--runner MODULE:NAME`` gives it."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, cast

from hal_core import HalError, InvalidValue, PluginError

if TYPE_CHECKING:
    from .runner import Runner, RunnerSetup

_OPTION = "--runner"
_METHODS = ("check", "launch", "propose")


def check_runner_name(name: str) -> None:
    """Raise :class:`InvalidValue` for what is no MODULE:NAME."""
    module, _, maker = name.partition(":")
    if not maker.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
        raise InvalidValue(f"{name!r}", cure="give MODULE:NAME, as my_runners:MyRunner", argument=_OPTION)


def make_runner(name: str, setup: RunnerSetup) -> Runner:
    """Import what ``name`` says, from the working directory too, and have it make a runner.

    :raises InvalidValue: for a module or name that is not there, and what the maker refuses.
    :raises PluginError: for one that fails, or makes no runner.
    """
    check_runner_name(name)
    module, _, maker = name.partition(":")
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)  # behind all else, so that nothing there hides what is installed
    try:
        make = getattr(import_module(module), maker)
    except (ImportError, AttributeError) as error:
        raise InvalidValue(f"{name}: {error}", cure="install it, or see how it is spelt", argument=_OPTION) from error
    try:
        made: object = make(setup)
    except HalError:
        raise
    except Exception as error:
        what = f"{name} could not make a runner: {type(error).__name__}: {error}"
        raise PluginError(what, cure="mend it, or give another one", argument=_OPTION) from error
    lacks = [method for method in _METHODS if not callable(getattr(made, method, None))]
    if not isinstance(getattr(made, "needs_host", None), str):
        lacks.append("needs_host (a text)")
    if not isinstance(getattr(made, "vocab_size", None), int):
        lacks.append("vocab_size (a whole number)")
    if lacks:
        what = f"{name} made {type(made).__name__}, which has no {', '.join(lacks)}"
        raise PluginError(what, cure="see hal/stepping/runner.py for what a runner is", argument=_OPTION)
    return cast("Runner", made)
