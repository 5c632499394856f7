"""What a user brings by the name of what makes it: MODULE:NAME, as ``--runner`` and ``--transfer`` take it."""

from __future__ import annotations

import os
import sys
from importlib import import_module

from hal_core import HalError, InvalidValue, PluginError


def check_maker(name: str, option: str, example: str) -> None:
    """Raise :class:`InvalidValue` for what is no MODULE:NAME."""
    module, _, maker = name.partition(":")
    if not maker.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
        raise InvalidValue(f"{name!r}", cure=f"give MODULE:NAME, as {example}", argument=option)


def make(name: str, option: str, what: str, setup: object) -> object:
    """Import what ``name`` says, from the working directory too, and have it make ``what`` it is to, of ``setup``.

    :raises InvalidValue: for a module or name that is not there, and what the maker refuses.
    :raises PluginError: for one that fails, the import of its module too.
    """
    module, _, maker = name.partition(":")
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)  # behind all else, so that nothing there hides what is installed
    misspelt = "install it, or see how it is spelt"
    try:
        imported = import_module(module)
    except ImportError as error:
        raise InvalidValue(f"{name}: {error}", cure=misspelt, argument=option) from error
    except (Exception, SystemExit) as error:  # a script that runs when it is imported may even exit
        raise _failed(f"importing {module} failed", error, option) from error
    try:
        found = getattr(imported, maker)
    except AttributeError as error:
        raise InvalidValue(f"{name}: {error}", cure=misspelt, argument=option) from error
    try:
        made: object = found(setup)
    except HalError:
        raise
    except (Exception, SystemExit) as error:
        raise _failed(f"{name} could not make a {what}", error, option) from error
    return made


def _failed(what: str, error: BaseException, option: str) -> PluginError:
    told = f"{what}: {type(error).__name__}: {error}".rstrip(": ")
    return PluginError(told, cure="mend it, or give another one", argument=option)
