"""The maca device of hal (MetaX chips): Paddle's CustomDevice ``metax_gpu``. Imports the standard library alone.

``HAL_MACA_PLACE=sim`` declares a substitution: the same code on the simulated accelerator under the type name
``metax_gpu``. The device is then named ``maca (substituted: sim)``.

MetaX has a CUDA-compatible layer (its runtime libraries, a Triton, perhaps page-locked host memory). It can be added
here by anyone with access to the chip: override :meth:`MacaPlugin.make` and return a class derived from
``hal_paddle.custom_device.CustomDevice`` that writes a plan with one kernel (``submit``), stages in locked memory
(``staging``) and declares both in its capabilities (``fused_scatter``, ``pinned_host``). None of it is assumed here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import ClassVar

from hal_paddle import CustomDevicePlugin


class MacaPlugin(CustomDevicePlugin):
    """The entry point ``maca`` of group ``hal.devices``; selected by name only."""

    name = "maca"
    kind = "metax_gpu"
    collective = "xccl"
    stand_ins: ClassVar[Mapping[str, str]] = {"sim": "hal_sim"}
    cure = (
        "install Paddle with MetaX's CustomDevice plugin (metax_gpu of PaddleCustomDevice), "
        "or run the same code without the chip: HAL_MACA_PLACE=sim"
    )

    @classmethod
    def substituted(cls) -> str:
        """Return the substitute: declared by ``HAL_MACA_PLACE``, or implied by the type name of the simulated
        accelerator."""
        simulated = "sim" if os.environ.get("HALSIM_NAME") == cls.kind else ""
        return super().substituted() or simulated
