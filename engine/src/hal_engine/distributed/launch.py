"""Starts ranks on this host, and ends them.

Each rank is a process in a session of its own. A Ctrl-C in the terminal therefore reaches the engine alone, which ends
the ranks in order. The ranks' output goes to files in a private folder that is removed at the end; errors quote the
lines that matter.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from time import monotonic
from typing import Protocol

from hal_core import Unavailable
from hal_core.devices import HeldPort

from hal.local_rank import AMONG
from hal_engine.children import TIED, environment
from hal_engine.timeouts import TIMEOUTS
from hal_engine.transport.urls import private_folder, release_private, remove_folders_of_killed, socket_of

URL = "HAL_RANKS_URL"
"""Variable with the engine's address, for ranks."""
_RANK = TIED + "import sys; from hal_engine.distributed.process import main; sys.exit(main())"
_TAIL = 600
"""Characters of a rank's last output that an error quotes if no line is known to matter more."""
_OF_ANOTHER_JOB = ("PADDLE_TRAINER", "PADDLE_CURRENT_ENDPOINT", "PADDLE_MASTER", "MASTER_", "FLAGS_selected_")
"""Beginnings of variables that a launcher sets: a job's ranks, its meeting place, a rank's device."""


class Starter(Protocol):
    """Starts an engine's ranks."""

    def start(self, url: str) -> None:
        """Start all ranks; they connect to the engine at ``url``."""

    def ended(self) -> str:
        """Return an exit description, or "" while running."""

    def end(self, patience: float) -> None:
        """Wait up to ``patience`` seconds for their end, then end them by force. Idempotent."""


class LocalLaunch:
    """Starts ``size`` ranks on this host. ``before``: ranks of other workers on this host that are numbered before
    these. ``among``: all ranks of this host; by default these alone."""

    def __init__(self, size: int, *, before: int = 0, among: int | None = None) -> None:
        self.size, self._before, self._among = size, before, among or size
        self._processes: list[subprocess.Popen[bytes]] = []
        self._failed_at, self._how = 0.0, ""
        self._port: HeldPort | None = None
        self._folder: Path | None = None
        self._private: Path | None = None

    def start(self, url: str) -> None:
        """Start the ranks. Raises :class:`Unavailable` if a process cannot be started."""
        socket = socket_of(url)  # in a private folder, which is removed after its process has gone, however it ended
        if socket is None:
            self._private = private_folder()
        parent = self._private if socket is None else socket.parent
        try:
            self._folder = Path(tempfile.mkdtemp(prefix="hal-ranks-", dir=parent))
            self._port = HeldPort()
            for rank in range(self.size):
                with (self._folder / f"rank.{rank}").open("wb") as log:
                    started = subprocess.Popen(
                        [sys.executable, "-P", "-c", _RANK],
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        env=self._environment(url, rank, self._port.number),
                        start_new_session=True,
                    )
                self._processes.append(started)
        except OSError as error:
            self.end(0.0)
            raise Unavailable(f"the ranks cannot be started: {error}", argument="--tp") from error

    def _environment(self, url: str, rank: int, port: int) -> dict[str, str]:
        """Return the variables of a rank (:mod:`hal_core.ranks.job` reads them). The ranks meet at ``port``, which is
        reserved until the first of them listens."""
        ends = [f"127.0.0.1:{port}"] * self.size
        threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // self._among))
        kept = {name: value for name, value in environment().items() if not name.startswith(_OF_ANOTHER_JOB)}
        return kept | {
            URL: url,
            AMONG: f"{self._before}/{self._among}",
            "PADDLE_TRAINER_ID": str(rank),
            "PADDLE_TRAINERS_NUM": str(self.size),
            "PADDLE_TRAINER_ENDPOINTS": ",".join(ends),
            "PADDLE_CURRENT_ENDPOINT": ends[rank],
            "OMP_NUM_THREADS": threads,
        }

    def ended(self) -> str:
        """Return how the ranks ended, with their last lines: once all have, or one has failed and the others had
        twice ``TIMEOUTS.loss_reason`` seconds to say why. Those are ended then."""
        if self._how:
            return self._how
        codes = [process.poll() for process in self._processes]
        failed = any(codes)
        if not codes or (None in codes and not failed):
            return ""
        self._failed_at = self._failed_at or monotonic()
        if None in codes and monotonic() - self._failed_at < 2 * TIMEOUTS.loss_reason:
            return ""
        self._kill()
        found = [f"rank {rank} ended with code {code}" for rank, code in enumerate(codes) if code]
        for rank in range(self.size):
            if line := _telling(self._printed(rank)):
                found.append(line if line.startswith(f"rank {rank}:") else f"rank {rank}: {line}")
        printed = next(filter(None, map(self._printed, range(self.size))), "")
        self._how = "; ".join(found) or "the ranks have ended; " + " ".join(printed[-_TAIL:].split())
        return self._how

    def end(self, patience: float) -> None:
        """Wait for the ranks, then end those that are left by force."""
        deadline = monotonic() + patience
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - monotonic()))
        self._kill()
        self._processes = []
        if self._port is not None:
            self._port.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
        if self._private is not None:
            release_private(self._private)
            self._private = None

    def _kill(self) -> None:
        """End the ranks that are left, and remove their folders. Their children are tied to them."""
        for process in self._processes:
            process.kill()
        if -signal.SIGKILL in {process.wait() for process in self._processes}:
            remove_folders_of_killed()

    def _printed(self, rank: int) -> str:
        assert self._folder is not None
        try:
            return (self._folder / f"rank.{rank}").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""


def _telling(printed: str) -> str:
    """Return the line that explains a rank's end: hal's last line, else the error of the last traceback, or ""."""
    own = [line for line in printed.splitlines() if line.startswith("hal:")]
    if own:
        return own[-1].removeprefix("hal:").strip()
    _, found, trace = printed.rpartition("Traceback (most recent call last):\n")
    return next((line for line in trace.splitlines() if found and line and not line.startswith(" ")), "")
