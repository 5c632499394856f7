"""Starts ranks on this host through Paddle's launcher, and ends them.

    python -m paddle.distributed.launch --nproc_per_node N … python -c "… hal_engine.distributed.process.main()"

The launcher runs in a session of its own. A Ctrl-C in the terminal therefore reaches the engine alone, which ends the
ranks in order. The ranks' output goes to files in a private folder that is removed at the end; errors quote the lines
that matter.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Protocol

from hal_core import Unavailable
from hal_core.devices import HeldPort, check_processor

from hal.local_rank import AMONG
from hal_engine.children import TIED, environment
from hal_engine.timeouts import TIMEOUTS
from hal_engine.transport.urls import private_folder, release_private, socket_of

URL = "HAL_RANKS_URL"
"""Variable with the engine's address, for ranks."""
STORE = "HAL_RANKS_STORE"
"""Variable with the address where the ranks meet. The port is reserved until the first rank listens."""
_LAUNCHER = TIED + "from hal_engine.distributed.launcher import main; main()"
_RANK = TIED + "import sys; from hal_engine.distributed.process import main; sys.exit(main())"
_TAIL = 600
"""Characters of the launcher's last output that an error quotes if no line is known to matter more."""
_FAILED = re.compile(r"^Container rank (\d+) status failed cmd .* code (-?\d+) log ", re.MULTILINE)
"""The launcher's line about a rank that ended with an error."""


class Starter(Protocol):
    """Starts an engine's ranks."""

    def start(self, url: str) -> None:
        """Start all ranks; they connect to the engine at ``url``."""

    def ended(self) -> str:
        """Return an exit description, or "" while running."""

    def end(self, patience: float) -> None:
        """Wait up to ``patience`` seconds for their end, then end them by force. Idempotent."""


class PaddleLaunch:
    """Starts ``size`` ranks on this host with Paddle's launcher. ``before``: ranks of other workers on this host that
    are numbered before these. ``among``: all ranks of this host; by default these alone."""

    def __init__(self, size: int, *, before: int = 0, among: int | None = None) -> None:
        self.size, self._before, self._among = size, before, among or size
        self._process: subprocess.Popen[bytes] | None = None
        self._port: HeldPort | None = None
        self._folder: Path | None = None
        self._private: Path | None = None

    def start(self, url: str) -> None:
        """Start the launcher, which starts the ranks. Raises :class:`Unavailable` if it cannot run."""
        check_processor()
        socket = socket_of(url)  # in a private folder, which is removed after its process has gone, however it ended
        if socket is None:
            self._private = private_folder()
        parent = self._private if socket is None else socket.parent
        self._folder = Path(tempfile.mkdtemp(prefix="hal-ranks-", dir=parent))
        self._port = HeldPort()
        launcher = [sys.executable, "-P", "-c", _LAUNCHER, "--nproc_per_node", str(self.size)]
        launcher += ["--log_dir", str(self._folder), "--job_id", "hal", "--max_restart", "0", "--log_level", "WARNING"]
        rank = [sys.executable, "-P", "-c", _RANK]
        theirs = ("PADDLE_TRAINER", "MASTER_", "FLAGS_selected_")  # of another job: its rendezvous, its device
        alone = {name: value for name, value in environment().items() if not name.startswith(theirs)}
        threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // self._among))
        told = {
            URL: url,
            STORE: f"127.0.0.1:{self._port.number}",
            AMONG: f"{self._before}/{self._among}",
            "OMP_NUM_THREADS": threads,
        }
        try:
            with (self._folder / "launcher").open("wb") as log:
                self._process = subprocess.Popen(
                    [*launcher, *rank],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=alone | told,
                    start_new_session=True,
                )
        except OSError as error:
            self.end(0.0)
            raise Unavailable(f"Paddle's launcher cannot be started: {error}", argument="--tp") from error

    def ended(self) -> str:
        """Return how the launcher ended, with the ranks' last lines."""
        if self._process is None or (code := self._process.poll()) is None:
            return ""
        printed = self._printed("launcher")
        failed = _FAILED.findall(printed)
        said = [f"rank {rank} ended with code {its}" for rank, its in failed]
        for rank in range(self.size):
            if told := _telling(self._printed(f"workerlog.{rank}")):
                said.append(told if told.startswith(f"rank {rank}:") else f"rank {rank}: {told}")
        return f"Paddle's launcher ended with status {code}; " + ("; ".join(said) or " ".join(printed[-_TAIL:].split()))

    def end(self, patience: float) -> None:
        """Wait, then have the launcher end its ranks, then end it; its ranks end with it."""
        process, self._process = self._process, None
        if process is not None:
            for number, seconds in ((None, patience), (signal.SIGTERM, TIMEOUTS.launcher_end), (signal.SIGKILL, None)):
                if number is not None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(seconds)
                    break
        if self._port is not None:
            self._port.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
        if self._private is not None:
            release_private(self._private)
            self._private = None

    def _printed(self, name: str) -> str:
        assert self._folder is not None
        try:
            return (self._folder / name).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""


def _telling(printed: str) -> str:
    """Return the line that explains a rank's end: hal's last line, else the error of the last traceback, or ""."""
    own = [line for line in printed.splitlines() if line.startswith("hal:")]
    if own:
        return own[-1].removeprefix("hal:").strip()
    _, found, trace = printed.rpartition("Traceback (most recent call last):\n")
    return next((line for line in trace.splitlines() if found and line and not line.startswith(" ")), "")
