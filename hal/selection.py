"""Selection of a device: the argument, then ``HAL_DEVICE``, then by declared priority, loading one at a time."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from hal_core import DeviceNotFound, HalError, InvalidValue, Unavailable

from .contract import CORE
from .discovery import ALLOW_LIST, Entry, installed, load, probe, same_name

if TYPE_CHECKING:
    from hal_core import Plugin, Probe

T = TypeVar("T")
ENVIRONMENT = "HAL_DEVICE"
#: The core, which is in the same checkout, brings a device.
NOTHING_INSTALLED = f"reinstall {CORE}: pip install ./core in hal's checkout"
_LOG = logging.getLogger("hal")
_NAME = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9_.-]*)(?P<colon>:(?P<index>[0-9]{1,9})?)?")


@dataclass(frozen=True, slots=True)
class Choice:
    """A device that was found available: its metadata, its loaded plugin, and the index to open."""

    entry: Entry
    plugin: type[Plugin]
    index: int


@dataclass(frozen=True, slots=True)
class DeviceRequest:
    """A request for a device: its name (None: choose one), an index, and the origin of the request."""

    name: str | None
    index: int
    source: str


def select(name: str | None = None, *, index: int | None = None) -> Choice:
    """Choose a device without opening it: ``name`` ("cpu", "name:1"), else ``HAL_DEVICE``, else by priority.

    Raises :class:`DeviceNotFound`, :class:`Unavailable`, :class:`PluginError` or :class:`InvalidValue`.
    """
    return use_first(lambda choice: choice, name, index)


def use_first(use: Callable[[Choice], T], name: str | None = None, index: int | None = None) -> T:
    """Call ``use`` with the requested device, or with the first available one by priority.

    A device is skipped with one warning if it is unavailable (by its probe, or because ``use`` raises
    :class:`Unavailable`); without a warning, at level INFO, if its chip is not on this machine. Every other error of a
    plugin is raised, because another device must not run in its place.
    """
    request = requested(name, index)
    entries = installed()
    if request.name is not None:
        entry = _find(entries, request)
        return _use(use, entry, *_probed(entry), request.index)
    reasons = []
    for entry in _ranked(entries):
        plugin, answer = _probed(entry)
        try:
            return _use(use, entry, plugin, answer, request.index)
        except Unavailable as error:
            level = logging.WARNING if answer.present else logging.INFO
            _LOG.log(level, "%s; trying the next device", _one_line(error))
            reasons.append(_one_line(error))
    raise Unavailable(f"no device can be used here: {'; '.join(reasons)}", cure="hal devices shows each")


def plugin_of(name: str) -> type[Plugin]:
    """Return the plugin of a named device, which need not be usable on this host. Raises as :func:`select`."""
    return load(_find(installed(), requested(name)))


def _probed(entry: Entry) -> tuple[type[Plugin], Probe]:
    plugin = load(entry)
    return plugin, probe(entry, plugin)


def _use(use: Callable[[Choice], T], entry: Entry, plugin: type[Plugin], answer: Probe, index: int) -> T:
    if not answer.available:
        raise Unavailable(answer.reason or "not available here", cure=answer.cure, device=entry.name)
    try:
        return use(Choice(entry, plugin, index))
    except HalError as error:
        error.located(device=entry.name)
        raise


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def requested(name: str | None, index: int | None = None) -> DeviceRequest:
    """Read the request from the arguments or ``HAL_DEVICE`` (empty: unset), without looking the name up."""
    if index is not None and (type(index) is not int or index < 0):
        raise InvalidValue(f"{index!r} is no device index", cure="give a whole number from 0", argument="index")
    text, source = name, "name"
    if name is None:
        text, source = os.environ.get(ENVIRONMENT, "").strip() or None, ENVIRONMENT
    if text is None:
        return DeviceRequest(None, index or 0, "priority")
    match = _NAME.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        cure = "give a name that hal devices lists, or name:index with a whole number from 0"
        raise InvalidValue(f"{text!r} is no device name", cure=cure, argument=source)
    stated = match["index"]
    if match["colon"] and not stated:
        cure = f"give {match['name']} or {match['name']}:0"
        raise InvalidValue(f"{text!r} has no index after the colon", cure=cure, argument=source)
    if stated and index is not None and int(stated) != index:
        raise InvalidValue(
            f"{text!r} and index={index} contradict each other", cure="give the index once", argument=source
        )
    return DeviceRequest(match["name"], int(stated) if stated else index or 0, source)


def _find(entries: Sequence[Entry], request: DeviceRequest) -> Entry:
    name = request.name or ""
    claims = [entry for entry in entries if entry.name == name]
    allowed = [entry for entry in claims if entry.allowed]
    if len(allowed) > 1:
        raise same_name(entries, name)
    if allowed:
        return allowed[0]
    if claims:
        raise DeviceNotFound(
            f"no device {name!r}: {ALLOW_LIST} leaves {claims[0].distribution} out",
            cure=f"add {claims[0].distribution} to {ALLOW_LIST}",
            argument=request.source,
        )
    known = sorted({entry.name for entry in entries if entry.allowed and not entry.problem})
    cure = "name one of those, or install the plugin that provides it" if known else NOTHING_INSTALLED
    raise DeviceNotFound(
        f"no device {name!r}; installed: {', '.join(known) or 'none'}", cure=cure, argument=request.source
    )


def _ranked(entries: Sequence[Entry]) -> list[Entry]:
    """Return the devices that may be selected automatically, best first; equal priorities by name.

    A plugin with unusable metadata is left out with a warning and does not block others. A name that two valid plugins
    claim is an error, before any is loaded.
    """
    allowed = [entry for entry in entries if entry.allowed]
    for entry in allowed:
        if entry.problem:
            _LOG.warning("%s; it is left out", _one_line(entry.error(entry.problem)))
    allowed = [entry for entry in allowed if not entry.problem]
    ranked = [entry for entry in allowed if entry.priority >= 0]
    for entry in ranked:
        if sum(other.name == entry.name for other in allowed) > 1:
            raise same_name(entries, entry.name)
    if not ranked:
        others = ", ".join(sorted({entry.name for entry in allowed}))
        what = f"no device is selected automatically; installed: {others}" if others else "no device is installed"
        cure = f"name one in {ENVIRONMENT}" if others else NOTHING_INSTALLED
        raise DeviceNotFound(what, cure=cure)
    return ranked
