"""What the environment sets. Read once, in each process of vLLM."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from hal_core import InvalidValue

MODES = ("", "on", "kernels", "off")
"""Twice: buffers over a hal device and, without Triton, torch's kernels. Then those kernels alone, and neither."""


@dataclass(frozen=True, slots=True)
class Settings:
    """``mode``: HAL_VLLM (:data:`MODES`). ``device``: HAL_VLLM_DEVICE, a hal device, or "" for that of vLLM's platform.

    ``require``: HAL_VLLM_REQUIRE=1, refuse to start where hal cannot take part, in place of one warning.
    ``untested``: HAL_VLLM_UNTESTED=1, take classes and kernels of signatures that hal was not compared with.
    ``uva``: not HAL_VLLM_UVA=0, which keeps every tensor on the device (Confidential Computing, WSL2).
    """

    mode: str = ""
    device: str = ""
    require: bool = False
    untested: bool = False
    uva: bool = True

    @classmethod
    def of(cls, environment: Mapping[str, str] = os.environ) -> Settings:
        """Return the settings of an environment. Raises :class:`InvalidValue` for a mode that does not exist."""
        mode = environment.get("HAL_VLLM", "").strip().lower()
        if mode not in MODES:
            cure = f"give one of {', '.join(known for known in MODES if known)}, or unset it"
            raise InvalidValue(f"{mode!r} is no mode", cure=cure, argument="HAL_VLLM")
        return cls(
            mode=mode,
            device=environment.get("HAL_VLLM_DEVICE", "").strip(),
            require=_flag(environment, "HAL_VLLM_REQUIRE", default=False),
            untested=_flag(environment, "HAL_VLLM_UNTESTED", default=False),
            uva=_flag(environment, "HAL_VLLM_UVA", default=True),
        )


def _flag(environment: Mapping[str, str], name: str, *, default: bool) -> bool:
    text = environment.get(name, "").strip()
    if text not in ("", "0", "1"):
        raise InvalidValue(f"{text!r} is neither 0 nor 1", cure="give 1 or 0, or unset it", argument=name)
    return default if text == "" else text == "1"
