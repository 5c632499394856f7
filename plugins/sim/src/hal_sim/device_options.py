"""What ``open_device("sim", …)`` takes: how the accelerator behaves, and the size of the staging ring."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hal_core import InvalidValue

from hal_sim._native import native
from hal_sim.settings import Mode, set_option

OWN = ("ring_start", "ring_limit", "deadline", "job")
MODES = {mode.name.lower(): int(mode) for mode in Mode}


@dataclass(frozen=True, slots=True)
class Options:
    """The device's own options: bytes of staging memory at first and at most, seconds to wait for it, the job's name.

    ``job`` is the same on all ranks of a job and differs between jobs; see :func:`hal_sim.communicator.job_name`.
    """

    ring_start: int = 1 << 20
    ring_limit: int = 64 << 20
    deadline: float = 30.0
    job: str = ""

    @classmethod
    def of(cls, given: Mapping[str, object]) -> Options:
        """The device's own options, after setting the accelerator's (``mode="lazy"``, ``staged=0``, ``devices=4``, …).

        Those hold for the whole process, as the variables ``HALSIM_MODE`` and its like do. Raises
        :class:`InvalidValue` for an unknown or senseless one, before anything is set.
        """
        known = _accelerator_options()
        unknown = sorted(set(given) - set(OWN) - set(known))
        if unknown:
            raise _invalid(f"unknown options {unknown}", f"known: {', '.join((*OWN, *known))}")
        numbers = {name: _number(name, value) for name, value in given.items() if name not in OWN}
        options = cls(**{name: value for name, value in given.items() if name in OWN})  # type: ignore[arg-type]
        for name in ("ring_start", "ring_limit"):
            if type(getattr(options, name)) is not int or getattr(options, name) < 4096:
                raise _invalid(f"{name} = {getattr(options, name)!r}", "give at least 4096")
        if options.ring_start > options.ring_limit or not options.deadline > 0:
            raise _invalid("ring_start over ring_limit, or no deadline", "mend them")
        for name, number in numbers.items():
            set_option(name, number)
        return options


def _accelerator_options() -> list[str]:
    names: list[str] = []
    while (name := native().option_name(len(names))) is not None:
        names.append(name.decode())
    return names


def _number(name: str, value: object) -> int:
    if name == "mode" and isinstance(value, str):
        if value not in MODES:
            raise _invalid(f"mode = {value!r}", f"give one of {', '.join(MODES)}")
        return MODES[value]
    if not isinstance(value, int) or value < 0:
        raise _invalid(f"{name} = {value!r}", "give a whole number, not negative")
    return int(value)


def _invalid(what: str, cure: str) -> InvalidValue:
    return InvalidValue(what, cure=cure, device="sim", argument="options")
