"""The shared base of devices that are reached through Paddle.

A device of this kind says its place, how its copies behave and which collective it has; memory, views, plans, copies,
streams and targets are here, once. Paddle is imported inside functions: importing these modules does not need it.

- ``probing``: what is installed, from files alone (standard library).
- ``device``: what they share, and :class:`~hal_core.devices.paddle.device.PaddleDevice`, every call done when it
  returns.
- ``plugins``: the plugin class, which looks for Paddle and for what may stand in.
- ``custom``: a plugin class for a CustomDevice of somebody else, in a few lines; ``custom_device``: its device,
  asynchronous, over the streams and events of :mod:`hal_core.devices`.
"""
