"""Every test of the kit, for a plugin's own test file::

    from hal_core.conformance.suite import *

with the device named by ``--hal-device=NAME`` or, in the plugin's pytest settings, ``hal_device = NAME``.
"""

from __future__ import annotations

from .test_async_set_value import *
from .test_asynchrony import *
from .test_broadcast_tokens import *
from .test_conversion import *
from .test_delivery import *
from .test_every_hook import *
from .test_insert_tasks import *
from .test_invalid_batches import *
from .test_machine import *
from .test_primitives import *
from .test_save_output import *
from .test_submissions import *

__all__ = [name for name in dir() if name.startswith("test_g")]
