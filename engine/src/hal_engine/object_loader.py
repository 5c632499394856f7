"""Objects that a user names as MODULE:NAME, for ``--runner`` and ``--transfer``."""

from __future__ import annotations

import difflib
import os
import sys
from importlib import import_module

from hal_core import HalError, InvalidValue, PluginError


def check_maker(name: str, option: str, example: str) -> None:
    """Raise :class:`InvalidValue` unless ``name`` is MODULE:NAME."""
    module, _, maker = name.partition(":")
    if not maker.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
        raise InvalidValue(f"{name!r}", cure=f"give MODULE:NAME, as {example}", argument=option)


def make(name: str, option: str, what: str, setup: object) -> object:
    """Import ``name``, also from the working directory, and call it with ``setup``. ``what``: the kind of object, for
    errors.

    :raises InvalidValue: for a missing module or name, and as the maker raises it.
    :raises PluginError: for a maker that fails, or a module that cannot be imported.
    """
    module, _, maker = name.partition(":")
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)  # last on the path, so that it hides no installed module
    misspelt = "install it, or see how it is spelt"
    try:
        imported = import_module(module)
    except ImportError as error:
        raise InvalidValue(f"{name}: {error}", cure=misspelt, argument=option) from error
    except (Exception, SystemExit) as error:  # a script without a main guard may even exit the process
        raise _failed(f"importing {module} failed", error, option) from error
    try:
        found = getattr(imported, maker)
    except AttributeError as error:
        near = difflib.get_close_matches(maker, vars(imported), 1)
        cure = f"{module} has {near[0]}" if near else misspelt
        raise InvalidValue(f"{name}: {error}", cure=cure, argument=option) from error
    try:
        made: object = found(setup)
    except HalError:
        raise
    except (Exception, SystemExit) as error:
        raise _failed(f"{name} could not make a {what}", error, option) from error
    return made


def _failed(what: str, error: BaseException, option: str) -> PluginError:
    message = f"{what}: {type(error).__name__}: {error}".rstrip(": ")
    return PluginError(message, cure="correct it, or give another one", argument=option)
