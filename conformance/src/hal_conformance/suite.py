"""Every test of the kit, for a plugin's own test file::

    from hal_conformance.suite import *

with the device named by ``--hal-device=NAME`` or, in the plugin's pytest settings, ``hal_device = NAME``.
"""

from importlib import import_module
from pathlib import Path

for _path in sorted(Path(__file__).parent.glob("test_*.py")):
    _tests = vars(import_module(f"{__package__}.{_path.stem}"))
    globals().update({_name: _test for _name, _test in _tests.items() if _name.startswith("test_g")})

__all__ = sorted(_name for _name in globals() if _name.startswith("test_g"))
