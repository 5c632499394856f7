"""hal's engine: scheduler, sampling, proposers, ranks, transports and serving over the devices of :mod:`hal`.

Its names for users are those of :mod:`hal`: ``hal.generate``, ``hal.AsyncEngine``, ``hal.Worker``,
``hal.OutputReader``.
"""
