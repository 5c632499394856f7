"""Devices on a place of Paddle, for hal: Paddle moves the bytes.

Such a device defines its place, the behaviour of its copies and its collective library. Memory, views, plans, copies,
streams and targets are shared. This module has the plugin classes and imports the standard library and light parts of
``hal_core`` alone, as a plugin class must.

- ``custom_device``: :class:`~hal_paddle.custom_device.CustomDevice`, asynchronous, on a third-party CustomDevice.
- ``sync_place``: :class:`~hal_paddle.sync_place.PaddleDevice`, whose calls are done when they return.
- ``place``: their common base; ``places``: Paddle's places by name.
- ``writer``, ``scatter_probe``: write plans as in-place scatters of elements.
- ``conformance``: support of such devices for the conformance kit.
"""

from .custom_plugin import CustomDevicePlugin
from .plugin import PaddlePlugin

__all__ = ["CustomDevicePlugin", "PaddlePlugin"]
