"""Opening of the device under test, by the metadata of installed distributions or by ``module:attribute``."""

from __future__ import annotations

import difflib
from dataclasses import replace
from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

from hal_core.contract.support import Support
from hal_core.errors import DeviceNotFound, InvalidValue, Unavailable

from .harness.subject import Recipe, Subject

if TYPE_CHECKING:
    from hal_core.runtime.policy import Policy

    from .liars import Liar

DEVICES, SUPPORTS = "hal.devices", "hal.conformance"


def subject_of(recipe: Recipe) -> Subject:
    """Return the subject of a recipe, in this process."""
    return subject(**vars(recipe))


def attribute(path: str, option: str = "path") -> Any:  # noqa: ANN401 (whatever the path names)
    """Return the object at ``module:attribute``; ``option``: the option with the path. Raises :class:`InvalidValue`."""
    module, _, name = path.partition(":")
    if not module or not name:
        raise InvalidValue(f"{path!r} names no attribute", cure="write module:attribute", argument=option)
    try:
        found: Any = import_module(module)
    except Exception as error:
        raise InvalidValue(
            f"{path!r}: importing {module} failed: {type(error).__name__}: {error}",
            cure="mend the name or the module; its folder must be on PYTHONPATH",
            argument=option,
        ) from error
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError as error:
            raise InvalidValue(f"{path!r}: {error}", cure="mend the name", argument=option) from None
    return found


def subject(
    name: str = "", *, factory: str = "", policy: str = "", liar: str = "", fault: str = "", target: str = ""
) -> Subject:
    """Return the device called ``name``, or made by ``factory``, optionally with another policy, as a liar, or with a
    fault.

    ``target``: the value of the entry point, if the caller has chosen it; else ``name`` must be unique.
    """
    found = _by_factory(factory) if factory else _by_name(name, target)
    if policy:
        found = replace(found, policy=_policy(policy))
    if liar:
        found = liar_at(liar).corrupt(found)
    if fault:
        from .liars.faults import lay, named

        honest, chosen = found, named(fault)
        found = replace(found, open=lambda: lay(honest.open(), chosen))
    return replace(found, recipe=Recipe(name, factory, policy, liar, fault, target))


def liar_at(name: str) -> Liar:
    """Return the kit's liar of that name, or one's own at ``module:class``."""
    from .liars import by_class, by_name

    return by_class(attribute(name, "--liar"), name) if ":" in name else by_name(name)


def _policy(path: str) -> Policy:
    """Return the policy at ``module:attribute``, or one made by the class there."""
    from hal_core.runtime.policy import Policy

    made = attribute(path, "--policy")
    try:
        made = made() if isinstance(made, type) else made
    except Exception as error:
        what = f"{path!r} was not made: {type(error).__name__}: {error}"
        raise InvalidValue(what, cure="a policy is made without arguments", argument="--policy") from error
    if not isinstance(made, Policy):
        cure = "name a class derived from hal_core.runtime.policy.Policy, or an object of one"
        raise InvalidValue(f"{path!r} is not a Policy, but {type(made).__name__}", cure=cure, argument="--policy")
    return made


def _by_name(name: str, target: str) -> Subject:
    """Open by entry point. The name may contain an index: ``name:1``."""
    name, _, index = name.partition(":")
    points = [point for point in metadata.entry_points(group=DEVICES) if point.name == name]
    if target:
        points = [point for point in points if point.value == target][:1]
    if len(points) != 1:
        known = sorted({point.name for point in metadata.entry_points(group=DEVICES)})
        close = difflib.get_close_matches(name.lower(), () if points else known)
        cure = f"did you mean {' or '.join(map(repr, close))}?" if close else "install one plugin that provides it"
        how = "is installed more than once" if points else f"is not installed; installed: {', '.join(known) or 'none'}"
        raise DeviceNotFound(f"device {name!r} {how}", cure=cure, argument="name")
    plugin = points[0].load()
    probe = plugin.probe()
    if not probe.available:
        raise Unavailable(probe.reason, cure=probe.cure, device=name)
    dist = points[0].dist
    origin = f"{dist.name} {dist.version}" if dist else points[0].value
    return Subject(name, lambda: plugin.open(int(index or 0), {}), _support(name), origin=origin)


def _support(name: str) -> Support:
    points = [point for point in metadata.entry_points(group=SUPPORTS) if point.name == name]
    if not points:
        return Support()
    made = points[0].load()()
    if not isinstance(made, Support):
        raise InvalidValue(f"{points[0].value} is not a Support", cure="derive it from hal_conformance.Support")
    return made


def _by_factory(path: str) -> Subject:
    """Open by a factory, called without arguments; its optional attribute ``support`` is the plugin's support, or the
    class of it."""
    factory = attribute(path, "--device-factory")
    if not callable(factory):
        cure = "name a function that opens the device"
        raise InvalidValue(f"{path!r} cannot be called", cure=cure, argument="--device-factory")
    support = getattr(factory, "support", Support)
    support = support() if isinstance(support, type) else support
    if not isinstance(support, Support):
        cure = "its attribute support is an object or a class of hal_conformance.Support"
        raise InvalidValue(f"{path!r} has a support that is none", cure=cure, argument="--device-factory")
    return Subject(path, factory, support, origin=path)
