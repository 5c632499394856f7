"""Paddle on this host: the installed build, its current device, and groups of ranks over ``paddle.distributed``.

Paddle is imported inside functions, so importing these modules does not need it. The devices on a place of Paddle are
in the distribution ``paddle-hal-paddle``.
"""
