"""A worker that was started by itself and lost, and that whoever started it starts again: it is taken up under its url.

A supervisor (systemd, Kubernetes) does not know of hal, nor hal of it: what they have in common is the address. So the
engine asks there until a worker says what it is, and has that start its ranks. One whose ranks were lost still listens
for a moment, and answers that it is taken: it is asked again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from hal_core import InvalidValue

from .hiring import Begin, Dismissed, Meet, Met, RemoteWorker

if TYPE_CHECKING:
    from hal.transport.curve import CurveKeys

_ASK_SECONDS = 1.0


class ReturningWorker(RemoteWorker):
    """Is asked for, by ``ended``, from ``start`` on; nobody waits for it meanwhile. ``check`` raises
    :class:`InvalidValue` for a worker that is not what was lost."""

    def __init__(
        self, url: str, keys: CurveKeys | None, versions: dict[str, str], check: Callable[[Met], None]
    ) -> None:
        """Raises as :class:`RemoteWorker`."""
        super().__init__(url, keys)
        self._versions, self._check = versions, check
        self._engine_url, self._begun, self._ask_at = "", False, 0.0

    def start(self, url: str) -> None:
        """See :class:`hal.distributed.launch.Starter`: when the worker is there."""
        self._engine_url = url

    def ended(self) -> str:
        """See :class:`hal.distributed.launch.Starter`."""
        if self._begun or self._closed or self._how:
            return super().ended()
        now = time.monotonic()
        if now >= self._ask_at and self._say(Meet(self._versions)):
            self._ask_at = now + _ASK_SECONDS
        self._hear(0.0)
        self._heard = now  # its silence counts from when it is there
        if self._met is not None and not self._how:
            try:
                self._check(self._met)
            except InvalidValue as error:
                self._how = f"the worker that came to {self.url} does not fit: {error.what}"
                self.dismiss(error.what, error.cure)
            else:
                self._begun = self._say(Begin(self._engine_url))
        return self._how

    def end(self, patience: float) -> None:
        """See :class:`hal.distributed.launch.Starter`."""
        super().end(patience if self._begun else 0.0)

    def _refused(self, said: Dismissed) -> None:
        if not said.busy:
            super()._refused(said)
