"""The shared base of devices that use Paddle.

Such a device defines its place, the behaviour of its copies and its collective library; memory, views, plans, copies,
streams and targets are shared. Paddle is imported inside functions, so importing these modules does not need it.

- ``probing``: the installed Paddle, read from files alone (standard library).
- ``device``: the common base, and :class:`~hal_core.devices.paddle.device.PaddleDevice`, whose calls are done when they
  return.
- ``plugins``: the plugin class, which looks for Paddle and for a substitute.
- ``custom``: a plugin class for a third-party CustomDevice, in a few lines; ``custom_device``: its device,
  asynchronous, over the streams and events of :mod:`hal_core.devices`.
"""
