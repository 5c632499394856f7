"""Options of ``open_device("sim", …)``: the accelerator's behaviour, and the size of the staging ring."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from hal_core import InvalidValue
from hal_core.devices import RingOptions, check_options

from hal_sim._native import native
from hal_sim.settings import Mode, set_option

MODES = {mode.name.lower(): int(mode) for mode in Mode}


@dataclass(frozen=True, slots=True)
class Options(RingOptions):
    """The device's own options: those of its ring, and the job's name.

    ``job`` is equal on all ranks of a job and differs between jobs; see :func:`hal_sim.communicator.job_name`.
    """

    job: str = ""

    @classmethod
    def taken(cls, given: Mapping[str, object]) -> Options:
        """Set the accelerator's options (``mode="lazy"``, ``staged=0``, ``devices=4``, …) and return the device's own.

        The former hold for the whole process, as do variables such as ``HALSIM_MODE``. Raises :class:`InvalidValue` for
        an unknown or invalid option, before any is set.
        """
        own = [field.name for field in fields(cls)]
        check_options("sim", given, (*own, *_accelerator_options()))
        numbers = {name: _number(name, value) for name, value in given.items() if name not in own}
        options = cls.of("sim", {name: value for name, value in given.items() if name in own})
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
        raise _invalid(f"{name} = {value!r}", "give a non-negative whole number")
    return int(value)


def _invalid(what: str, cure: str) -> InvalidValue:
    return InvalidValue(what, cure=cure, device="sim", argument="options")
