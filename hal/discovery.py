"""Discovery: finds installed device plugins by their metadata alone, and loads the chosen one.

This is the one file that uses stevedore. Listing, the allow-list, contract ranges and duplicates use
``importlib.metadata`` before any code of a plugin is imported (docs/decisions/03).
"""

from __future__ import annotations

import inspect
import logging
import os
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import metadata
from traceback import walk_tb

from hal_core import ContractMismatch, HalError, InvalidValue, Plugin, PluginError, Probe, Unavailable

from . import contract
from .contract import CORE, normalized
from .timeouts import TIMEOUTS

_LOG = logging.getLogger("hal")
GROUP = "hal.devices"
#: A device's priority, where code need not be imported to read it: ``name = "priority_100"``; no line: never
#: automatic. (Not plain digits: setuptools accepts only values that could be the name of a module.)
PRIORITIES = "hal.priorities"
ALLOW_LIST = "HAL_PLUGINS"
#: Observers, and the variable that names those to use (:mod:`hal.observing`).
OBSERVERS = "hal.observers"
OBSERVED = "HAL_OBSERVERS"
#: Proposers, and the option that names the one to use (:mod:`hal_engine.proposers`).
PROPOSERS = "hal.proposers"
SPECULATE = "--speculate"
#: Runners, the option that names the one to use, and by device the runner that ``--runner auto`` takes
#: (:mod:`hal_engine.stepping.loading`): ``device = "runner"``.
RUNNERS = "hal.runners"
RUNNER = "--runner"
AUTOMATIC = "hal.automatic"
#: Commands, by name: modules with a function ``command`` for typer, or with ``run(arguments)`` and ``TYPED``, inner
#: argument names to options (:mod:`hal.cli.tree`).
COMMANDS = "hal.commands"
#: Transports, by the scheme of their urls (:mod:`hal_engine.transport.loading`).
TRANSPORTS = "hal.transports"
NEVER = -1
"""Priority of a device that declares none. Devices below 0 are not selected automatically."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One device name that an installed distribution provides. Its code has not been imported.

    ``problem``: "" or why the metadata cannot be used. ``allowed``: False if ``HAL_PLUGINS`` leaves it out.
    """

    name: str
    distribution: str
    version: str
    target: str
    priority: int = NEVER
    requires: tuple[str, ...] = ()
    allowed: bool = True
    problem: str = ""
    point: metadata.EntryPoint | None = field(default=None, repr=False, compare=False)
    group: str = GROUP

    @property
    def who(self) -> str:
        """The distribution and its version, for error messages."""
        return f"{self.distribution} {self.version}"

    @property
    def embedded(self) -> bool:
        """True for a device of the core itself."""
        return normalized(self.distribution) == CORE

    @property
    def verdict(self) -> contract.Verdict:
        """The range of contract versions that the distribution states; the core's own device needs none."""
        if self.embedded:
            return contract.Verdict("embedded")
        return contract.verdict(self.distribution, self.requires)

    def error(self, what: str, cure: str = "", *, own: BaseException | None = None) -> PluginError:
        """Return a :class:`PluginError` that names the device, the distribution and a cure. ``own``: the exception of
        its code."""
        way_out = f"reinstall or update {self.distribution}"
        if own is not None:
            where = [frame.f_code.co_name for frame, _ in walk_tb(own.__traceback__)][-1:]  # for an error without text
            what = f"{what}: {type(own).__name__}: {str(own) or ' '.join(where)}".rstrip(": ")
            way_out = f"{self.distribution} itself failed: mend it (-v shows its traceback)"
        if self.group == OBSERVERS:
            what, way_out = f"observer {self.name}: {what}", f"{way_out}, or take {self.name} out of {OBSERVED}"
        elif self.group == PROPOSERS:
            what, way_out = f"proposer {self.name}: {what}", f"{way_out}, or name another one with {SPECULATE}"
        elif self.group in (RUNNERS, AUTOMATIC):
            what, way_out = f"runner {self.name}: {what}", f"{way_out}, or name another one with {RUNNER}"
        elif self.group == TRANSPORTS:
            what, way_out = f"transport {self.name}: {what}", f"{way_out}, or give a url of another scheme"
        elif not self.embedded:
            way_out += f", or leave it out with {ALLOW_LIST}"
        return PluginError(f"{self.who}: {what}", cure=cure or way_out, device=self.name if self.group == GROUP else "")


def installed() -> tuple[Entry, ...]:
    """Return every device that an installed distribution declares, in the order of selection.

    Raises :class:`InvalidValue` if ``HAL_PLUGINS`` names a distribution that is not an installed plugin.
    """
    found = _distributions(GROUP)
    allowed = _allow_list({normalized(name) for name, _, _ in found})
    entries = [entry for name, version, dist in found for entry in _entries(name, version, dist, allowed)]
    return tuple(sorted(entries, key=lambda entry: (-entry.priority, entry.name, entry.distribution)))


def identity(dist: metadata.Distribution) -> tuple[str, str] | None:
    """Return name and version; None for damaged metadata (as an interrupted uninstall leaves behind)."""
    try:
        fields = dist.metadata
        return (fields["Name"], fields["Version"]) if "Name" in fields and "Version" in fields else None
    except (OSError, UnicodeError, TypeError, AttributeError):
        return None


def installed_in(group: str) -> tuple[Entry, ...]:
    """Return every entry of another group (observers, proposers, runners, transports, commands), by name.

    Their code is not imported. ``HAL_PLUGINS`` applies to devices alone, because of these only the named ones are used.
    """
    found = [entry for dist in _distributions(group) for entry in _entries(*dist, None, group)]
    return tuple(sorted(found, key=lambda entry: (entry.name, entry.distribution)))


def named(name: str, there: Sequence[Entry], *, kind: str, argument: str, cure: str) -> Entry:
    """Return the entry of that name. Raises :class:`InvalidValue` if it is missing, or two distributions claim it.

    ``kind``: the word for the entry in errors. ``argument``, ``cure``: where it was named, and how to name one.
    """
    claims = [entry for entry in there if entry.name == name]
    if not claims:
        known = ", ".join(f"{entry.name} ({entry.who})" for entry in there) or "none"
        what = f"no installed {kind} is called {name!r}; installed: {known}"
        raise InvalidValue(what, cure=cure, argument=argument)
    if len(claims) > 1:
        what = f"the {kind} {name!r} is provided by {' and '.join(entry.who for entry in claims)}"
        raise InvalidValue(what, cure="uninstall one of them", argument=argument)
    return claims[0]


def _distributions(group: str) -> list[tuple[str, str, metadata.Distribution]]:
    """Return name, version and distribution of each distribution that has entry points in a group.

    A damaged distribution elsewhere on the path does not matter.
    """
    names = set()
    for dist in metadata.distributions():
        try:
            declares = group in (dist.read_text("entry_points.txt") or "")
        except (OSError, UnicodeError):
            continue
        who = identity(dist) if declares else None
        if who:
            names.add(normalized(who[0]))
    found = []
    for name in sorted(names):
        try:  # the first on the path is the one that imports find; a shadowed older one does not count
            dist = metadata.distribution(name)
        except metadata.PackageNotFoundError:  # a folder that pip has renamed for removal
            continue
        who = identity(dist)
        if who:
            found.append((*who, dist))
    return found


def _entries(
    name: str, version: str, dist: metadata.Distribution, allowed: frozenset[str] | None, group: str = GROUP
) -> list[Entry]:
    is_allowed = allowed is None or normalized(name) == CORE or normalized(name) in allowed
    try:
        points = [*dist.entry_points]
        requires = tuple(dist.requires or ())
    except Exception as error:  # noqa: BLE001 (whatever damaged metadata provokes is reported, not raised)
        why = f"its metadata cannot be read: {type(error).__name__}: {error}"
        return [Entry("?", name, version, "", allowed=is_allowed, problem=why, group=group)]
    entries = []
    for point in points:
        if point.group == group:
            declared = [other.value for other in points if other.group == PRIORITIES and other.name == point.name]
            priority, problem = _priority(declared)
            entries.append(
                Entry(point.name, name, version, point.value, priority, requires, is_allowed, problem, point, group)
            )
    return entries


def _priority(declared: Sequence[str]) -> tuple[int, str]:
    if not declared:
        return NEVER, ""
    match = re.fullmatch(r"priority_([0-9]{1,9})", declared[0])
    if len(declared) == 1 and match:
        return int(match[1]), ""
    wanted = "one like priority_100 (no line for a device that is never selected automatically)"
    return NEVER, f"the entry-point group {PRIORITIES} gives priority {', '.join(declared)!r}, not {wanted}"


def _allow_list(plugins: set[str]) -> frozenset[str] | None:
    """Return the normalised names in ``HAL_PLUGINS``; None: all. An empty list leaves the embedded core alone."""
    text = os.environ.get(ALLOW_LIST)
    if text is None:
        return None
    names = frozenset(normalized(name.strip()) for name in text.split(",") if name.strip())
    unknown = sorted(names - plugins)
    if unknown:
        raise InvalidValue(
            f"no installed plugin is called {', '.join(unknown)}; installed: {', '.join(sorted(plugins)) or 'none'}",
            cure="list distribution names separated by commas, or unset it to allow all",
            argument=ALLOW_LIST,
        )
    return names


def same_name(entries: Sequence[Entry], name: str) -> PluginError:
    """Return the error for one device name that is declared more than once."""
    claims = [entry for entry in entries if entry.name == name and entry.allowed]
    both = " and ".join(f"{claim.who} ({claim.target})" for claim in claims)
    cure = f"uninstall one of them, or name the one to use in {ALLOW_LIST}"
    if len({claim.distribution for claim in claims}) == 1:
        cure = f"mend the entry points of {claims[0].distribution}"
    return PluginError(f"the device name is provided by {both}", cure=cure, device=name)


def load(entry: Entry) -> type[Plugin]:
    """Check the contract range of ``entry``, import its plugin, and check the plugin's declarations.

    Raises :class:`PluginError` (of which :class:`ContractMismatch` is one) with the distribution and the cure.
    """
    plugin = load_maker(entry)
    if not (isinstance(plugin, type) and issubclass(plugin, Plugin)):
        raise entry.error(f"{entry.target} is not a class derived from hal_core.Plugin")
    if inspect.isabstract(plugin):
        missing = ", ".join(sorted(plugin.__abstractmethods__))
        raise entry.error(f"{entry.target} does not implement {missing}")
    if getattr(plugin, "name", None) != entry.name:
        stated = getattr(plugin, "name", None)
        raise entry.error(f"the entry point is called {entry.name!r}, {entry.target}.name is {stated!r}")
    return plugin


def load_and_make(entry: Entry, *arguments: object) -> object:
    """Import an observer, a proposer, a runner or a transport, and call it if it is callable.

    An observer may be an object instead of a class. ``arguments``: those of the call. Raises :class:`PluginError`.
    """
    found = load_maker(entry)
    if entry.group == OBSERVERS and not isinstance(found, type):
        return found
    if not callable(found):
        raise entry.error(f"{entry.target} is no class and no function that makes one")
    try:
        return found(*arguments)
    except HalError:
        raise
    except (Exception, SystemExit) as error:
        with_what = ", ".join(type(argument).__name__ for argument in arguments) or "no arguments"
        cure = f"it is made with {with_what}; mend {entry.distribution}"
        raise entry.error(f"{entry.target} was not made", cure=cure, own=error) from error


@contextmanager
def _named_if_slow(entry: Entry, what: str) -> Iterator[None]:
    """Log which plugin is running if its code takes long: it runs in this process and may hang."""
    seconds = TIMEOUTS.plugin_slow
    line = "%s: %s: %s has run for %g s; it may hang (wait, or end this and run hal doctor; HAL_PLUGINS leaves it out)"
    timer = threading.Timer(seconds, _LOG.warning, (line, entry.name, entry.who, what, seconds))
    timer.daemon = True
    with suppress(RuntimeError):  # no thread can be started: only this line is missing then
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def load_maker(entry: Entry) -> object:
    """Check the contract range of an entry and import its object. Raises :class:`PluginError`."""
    from stevedore.driver import DriverManager

    if entry.problem:
        raise entry.error(entry.problem)
    if (verdict := entry.verdict).problem:
        raise ContractMismatch(f"{entry.who}: {verdict.problem}", cure=verdict.cure, device=entry.name)

    class Fresh(DriverManager):  # type: ignore[misc]  # stevedore counts as untyped here (pyproject)
        """Driver manager without stevedore's disk cache, which can be two minutes behind an installation."""

        def list_entry_points(self) -> list[metadata.EntryPoint]:
            return [entry.point] if entry.point else []

    try:
        with _named_if_slow(entry, f"importing {entry.target}"):
            manager = Fresh(entry.group, entry.name)
        extension = manager.extensions[0]
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # importing a plugin may even exit the process; the error must name the plugin
        raise entry.error(f"importing {entry.target} failed", own=error) from error
    if extension.entry_point.value != entry.target:  # only if a later stevedore no longer calls list_entry_points
        raise entry.error(
            f"stevedore loaded {extension.entry_point.value}, the metadata says {entry.target}",
            cure="stevedore's cache is stale: remove ~/.cache/python-entrypoints",
        )
    return extension.plugin


def probe(entry: Entry, plugin: type[Plugin]) -> Probe:
    """Return a loaded plugin's probe. Raises :class:`PluginError` if the probe fails."""
    try:
        with _named_if_slow(entry, "probe()"):
            answer: object = plugin.probe()
    except Unavailable as error:
        return Probe.no(error.what, error.cure)
    except KeyboardInterrupt:
        raise
    except HalError as error:
        error.located(device=entry.name)
        raise
    except BaseException as error:
        raise entry.error("probe() failed", own=error) from error
    if not isinstance(answer, Probe):
        raise entry.error(f"probe() returned {answer!r}, not a hal_core.Probe")
    return answer
