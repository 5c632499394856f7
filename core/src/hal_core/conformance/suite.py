"""Former name of :mod:`hal_conformance.suite`."""

from __future__ import annotations

from . import kit

_suite = kit(".suite")
globals().update({_name: getattr(_suite, _name) for _name in _suite.__all__})
__all__ = list(_suite.__all__)
