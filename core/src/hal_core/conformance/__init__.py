"""The conformance kit: properties that prove, on any device, what :mod:`hal_core.hookspecs` promises.

Run it with ``pytest --pyargs hal_core.conformance --hal-device=NAME``, ``hal conform NAME`` or
``python -m hal_core.conformance NAME``; in a plugin's own tests, ``from hal_core.conformance.suite import *``.
It needs the extra ``paddle-hal-core[conformance]``. ``docs/conformance.md`` says how to read what it reports.

This module imports nothing, so that a pytest that does not use the kit stays as quick as it was.
"""
