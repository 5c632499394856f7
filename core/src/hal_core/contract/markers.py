"""The pluggy markers of the project: devices mark their hooks with :data:`hookimpl`."""

from __future__ import annotations

import pluggy

PROJECT = "hal"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
