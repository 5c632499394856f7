"""An example: Paddle's CustomDevice ``npu`` as a device of hal. Verified on the simulated accelerator alone."""

from types import MappingProxyType

from hal_paddle import CustomDevicePlugin


class NpuPlugin(CustomDevicePlugin):
    """The entry point ``npu`` of group ``hal.devices``."""

    name = "npu"  # the user's name, and the entry point's
    kind = "npu"  # Paddle's name: paddle.CustomPlace("npu", 0)
    collective = "xccl"  # the library of Paddle's groups there; "" for none
    cure = "install Paddle and the CustomDevice plugin for npu"
    stand_ins = MappingProxyType({"sim": "hal_sim"})  # HAL_NPU_PLACE=sim runs the same code without the chip
