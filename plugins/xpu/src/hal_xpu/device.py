"""The xpu device: its differences from other synchronous Paddle places, and why its calls are synchronous."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from hal_core import Capabilities, Unavailable
from hal_core.devices import HOST, check_index
from hal_paddle.places import custom_place, import_paddle, paddle_core
from hal_paddle.scatter_probe import Candidates
from hal_paddle.sync_place import PaddleDevice

from . import XpuPlugin

COLLECTIVES = {"": "bkcl", "cpu": HOST, "sim": "xccl"}
WRITES = "Paddle offers XPU no asynchronous upload from host memory: every copy waits, pinned memory or not"
READS = "Paddle offers XPU no asynchronous copy to host memory: the step's output is there when the call returns"


class XpuDevice(PaddleDevice):
    """One XPU, or its substitute."""

    # The in-place scatters that XPU's own sources register (paddle/phi/kernels/xpu/scatter_kernel.cc: float and int64,
    # read but not run). The substituted places may have more, but use only these.
    candidates: ClassVar[Candidates] = {8: (("scatter_", "int64"),), 4: (("scatter_", "float32"),)}

    def __init__(self, index: int, options: Mapping[str, object]) -> None:
        self.name, substitute = XpuPlugin.shown(), XpuPlugin.substituted()
        reasons = {"async_set_value": WRITES, "insert_tasks": WRITES, "save_output": READS}
        if substitute:
            stand_in = COLLECTIVES[substitute]
            reasons["broadcast_tokens"] = f"{stand_in} replaces BKCL, which is not verified"
        capabilities = Capabilities(
            async_h2d=False,
            async_d2h=False,
            fused_scatter=False,
            pinned_host=False,
            can_hold_stream=False,
            collective=COLLECTIVES[substitute],
            fallbacks=reasons,
            substituted=substitute,
        )
        super().__init__(index, _place(self.name, index, substitute), options, capabilities)


def _place(name: str, index: int, substitute: str) -> Any:  # noqa: ANN401 (a Paddle place)
    if substitute == "sim":
        from hal_sim import paddle_env

        paddle_env.announce()
        return custom_place(name, paddle_env.DEFAULT_NAME, index, XpuPlugin.cure)
    paddle = import_paddle(name, XpuPlugin.cure)
    if substitute == "cpu":
        check_index(name, index, 1)
        return paddle.CPUPlace()
    if not paddle.is_compiled_with_xpu():
        raise Unavailable("this Paddle was not compiled with XPU", cure=XpuPlugin.cure, device=name)
    check_index(name, index, int(paddle_core().get_xpu_device_count()))
    return paddle.XPUPlace(index)
