"""Runners by name, as ``--runner`` gives them: an installed one (entry-point group ``hal.runners``), or MODULE:NAME.

An installed runner is a class or function that makes a runner of a :class:`RunnerSetup`. It may have:

- ``why_not(device, model)``: returns "" or why it cannot run a checkpoint on a device; ``auto`` calls it before
  anything is loaded.
- ``check_runs()``: raises if it cannot run in this process, as its framework is missing; called before a device is
  opened. (``check`` is the runner's own: a class is a maker too.)
- ``needs_host``: that of the runners that it makes, if it is known before they are made.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, cast

from hal_core import InvalidValue, PluginError, SamplingParams

from hal.contract import normalized
from hal.discovery import AUTOMATIC, RUNNER, RUNNERS, Entry, installed_in, load_and_make, load_maker, named
from hal_engine.object_loader import check_maker, make

if TYPE_CHECKING:
    from hal_core import BoundDevice

    from .runner import Runner, RunnerSetup

AUTO, DEFAULT = "auto", "paddle"
"""The device's installed runner if it can run, else the default one; and the default one's name."""
DEFAULT_TITLE = "the Paddle model"
"""Name of the default runner in messages."""
DTYPES = ("auto", "float32")
"""Types of computation for ``--dtype``: the checkpoint's, or float32."""
_METHODS = ("check", "launch", "propose")
_OWN = "paddle-hal-engine"
"""The distribution whose runner's errors are raised as they are, and not as a plugin's."""


def title_of(name: str) -> str:
    """Return the name of a runner in messages."""
    return DEFAULT_TITLE if name == DEFAULT else name


def check_runner_name(name: str) -> None:
    """Raise :class:`InvalidValue` for a name that is neither an installed runner nor MODULE:NAME."""
    if ":" in name:
        check_maker(name, RUNNER, "my_runners:MyRunner")
    elif name not in (AUTO, DEFAULT):
        _entry(name)


def check_dtype(dtype: str) -> None:
    """Raise :class:`InvalidValue` for a name outside :data:`DTYPES`."""
    if dtype not in DTYPES:
        raise InvalidValue(f"{dtype!r}", cure=f"give {' or '.join(DTYPES)}", argument="--dtype")


def choose_runner(wanted: str, device: BoundDevice, model: Path) -> tuple[str, str]:
    """Return the runner's name, and why ``auto`` chose the :data:`DEFAULT`, or "".

    :raises InvalidValue: if two distributions claim the device, or the runner's name.
    :raises PluginError: for a runner that cannot be imported, or is made for another contract version.
    """
    if wanted != AUTO:
        return wanted, ""
    kind = device.name.rpartition(":")[0]
    claims = [entry for entry in installed_in(AUTOMATIC) if entry.name == kind]
    if not claims:
        return DEFAULT, f"no installed runner is for device {kind}"
    chosen = named(kind, claims, kind="runner for device", argument=RUNNER, cure=f"name one with {RUNNER}").target
    why_not = getattr(load_maker(_entry(chosen)), "why_not", None)
    why = "" if why_not is None else cast("Callable[[BoundDevice, Path], str]", why_not)(device, model)
    return (DEFAULT, f"runner {chosen} cannot run here: {why}") if why else (chosen, "")


def check_runs(name: str) -> None:
    """Raise what the runner's maker raises if it cannot run in this process. MODULE:NAME is not imported for this."""
    if ":" not in name and (check := getattr(load_maker(_entry(name)), "check_runs", None)) is not None:
        check()


def needs_host(name: str) -> str:
    """Return the ``needs_host`` of the runner's maker, "" for one that does not say. MODULE:NAME is not imported for
    this."""
    return "" if ":" in name else str(getattr(load_maker(_entry(name)), "needs_host", ""))


def make_runner(name: str, setup: RunnerSetup) -> Runner:
    """Import the runner's maker, for MODULE:NAME also from the working directory, and call it.

    :raises InvalidValue: for a missing module or name, and as the maker raises it.
    :raises PluginError: for one that fails, or makes no runner.
    """
    check_runner_name(name)
    made = make(name, RUNNER, "runner", setup) if ":" in name else _made(_entry(name), setup)
    lacks = [method for method in _METHODS if not callable(getattr(made, method, None))]
    if not isinstance(getattr(made, "needs_host", None), str):
        lacks.append("needs_host (a text)")
    vocab = getattr(made, "vocab_size", None)
    if not isinstance(vocab, int) or isinstance(vocab, bool) or vocab < 1:
        lacks.append("vocab_size (a whole number of at least 1)")
    supports = getattr(made, "supports", None)
    if not isinstance(supports, Collection) or not all(one in SamplingParams.__slots__ for one in supports):
        lacks.append("supports (names of fields of hal_core.SamplingParams, which it does not refuse)")
    if lacks:
        what = f"{name} made {type(made).__name__}, which has no {', '.join(lacks)}"
        raise PluginError(what, cure="see class Runner in engine/src/hal_engine/stepping/runner.py", argument=RUNNER)
    return cast("Runner", made)


def _made(entry: Entry, setup: RunnerSetup) -> object:
    if normalized(entry.distribution) != _OWN:
        return load_and_make(entry, setup)
    return cast("Callable[[RunnerSetup], object]", load_maker(entry))(setup)


def check_drafts(name: str, runner: Runner, drafts: int) -> None:
    """Raise :class:`InvalidValue` if ``drafts`` a step are requested of a runner that makes none."""
    if drafts and not getattr(runner, "drafts_on_device", False):
        cure = "leave it out, or give a --runner that drafts on the device"
        raise InvalidValue(f"runner {name} makes no drafts", cure=cure, argument="--drafts")


def _entry(name: str) -> Entry:
    cure = f"give one of them, {AUTO}, {DEFAULT}, or MODULE:NAME, as my_runners:MyRunner"
    module, _, maker = name.rpartition(".")
    if module:
        cure = f"did you mean {module}:{maker}?"
    elif Path(f"hal-{name}", "pyproject.toml").is_file():
        cure = f"pip install -e hal-{name}"
    return named(name, installed_in(RUNNERS), kind="runner", argument=RUNNER, cure=cure)
