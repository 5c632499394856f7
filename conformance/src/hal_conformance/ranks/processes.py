"""A pool of worker processes, each one rank of a job, that run given functions: for tests and benchmarks.

Starting a rank costs seconds (the import of Paddle, joining), so one pool serves many tests. Needs only the standard
library; the functions import the rest.

    with RankPool(4) as pool:
        pool.run(check, "cpu", 8)               # check(rank, "cpu", 8) on every rank; results by rank
        pool.run(check, "cpu", 8, ranks=[0, 1])

A function is sent as its module's name, or as its file if the module cannot be imported by name; its arguments and
result are pickled. Its first argument is a :class:`Rank`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.util
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from time import monotonic
from typing import Any

from hal_core.errors import GroupLost, HalError, InvalidValue, TicketTimeout
from hal_core.ranks.ports import HeldPort

from ..harness.processor import kept_waiting

Environment = Callable[[int, Sequence[str]], Mapping[str, str]]
"""From a rank and all endpoints to the variables of this rank."""


LEAVING = 4
"""Seconds in which a rank's process must end once its pipe is closed."""


@dataclass(slots=True)
class Rank:
    """The rank that runs a function; ``kept`` keeps its objects between calls."""

    rank: int
    size: int
    kept: dict[str, Any] = field(default_factory=dict)


class RankFailed(HalError, RuntimeError):
    """A function raised on some ranks, or a rank ended. ``errors``: rank to the exception; ``results`` of the rest."""

    def __init__(self, what: str, errors: Mapping[int, BaseException], results: Mapping[int, Any]) -> None:
        super().__init__(what, cure="see the errors of the ranks")
        self.errors, self.results = dict(errors), dict(results)


def job_variables(rank: int, endpoints: Sequence[str]) -> dict[str, str]:
    """Return the variables of a rank of a job (:mod:`hal_core.ranks.job`)."""
    return {
        "PADDLE_TRAINER_ID": str(rank),
        "PADDLE_TRAINERS_NUM": str(len(endpoints)),
        "PADDLE_CURRENT_ENDPOINT": endpoints[rank],
        "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
    }


gloo = job_variables
"""Its name in version 1.1, for one release."""


class RankPool:
    """``size`` processes on this host. A context manager; every process ends with it, and with this process."""

    def __init__(self, size: int, *, environment: Environment = job_variables) -> None:
        self.size = size
        self._ports = [HeldPort() for _ in range(size)]  # held, so that no other pool's ranks use them
        endpoints = [f"127.0.0.1:{port.number}" for port in self._ports]
        self._links: dict[int, Connection] = {}
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._logs = {rank: tempfile.TemporaryFile() for rank in range(size)}  # noqa: SIM115 (closed by close)
        try:
            for rank in range(size):
                self._start(rank, environment(rank, endpoints))
        except BaseException:
            self.close()
            raise

    def _start(self, rank: int, variables: Mapping[str, str]) -> None:
        here, there = socket.socketpair()
        with there:
            self._links[rank] = Connection(here.detach())
            environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"} | dict(variables)
            self._processes[rank] = self._process(rank, there, environment)

    def _process(self, rank: int, link: socket.socket, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Start the process of a rank, which runs :func:`main` on its end of the pipe."""
        module = "hal_conformance.ranks.processes"
        return subprocess.Popen(
            [sys.executable, "-m", module, str(link.fileno()), str(rank), str(self.size)],
            env=environment,
            pass_fds=[link.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=self._logs[rank],
            stderr=subprocess.STDOUT,
        )

    def run(
        self,
        function: Callable[..., Any],
        *arguments: object,
        ranks: Iterable[int] | None = None,
        timeout: float = 60.0,
    ) -> dict[int, Any]:
        """Run ``function(rank, *arguments)`` on all (or the given) ranks at once, and return the results by rank.

        Raises :class:`RankFailed` with the exception of each rank that raised or ended, once all have answered. Raises
        :class:`TicketTimeout` after ``timeout`` seconds, not counting time in which a rank waited for a processor.
        """
        chosen = list(range(self.size)) if ranks is None else list(ranks)
        self.begin(function, *arguments, ranks=chosen)
        return self.finish(chosen, timeout)

    def begin(self, function: Callable[..., Any], *arguments: object, ranks: Iterable[int]) -> None:
        """Start a function on ranks and return at once; :meth:`finish` collects."""
        message = pickle.dumps((function.__module__, function.__code__.co_filename, function.__qualname__, arguments))
        for rank in ranks:
            with contextlib.suppress(OSError):  # finish reports an ended rank
                self._links[rank].send_bytes(message)

    def finish(self, ranks: Iterable[int], timeout: float = 60.0) -> dict[int, Any]:
        """Return the results of :meth:`begin`, by rank; raises as :meth:`run` does."""
        began, kept_waiting = monotonic(), self._kept_waiting()
        results: dict[int, Any] = {}
        errors: dict[int, BaseException] = {}
        for rank in ranks:
            try:
                while not self._links[rank].poll(max(0.0, began + timeout - monotonic())):
                    began += (now := self._kept_waiting()) - kept_waiting
                    kept_waiting = now
                    if monotonic() >= began + timeout:
                        raise TicketTimeout(
                            f"rank {rank} did not answer within {timeout:g} s", cure=f"it is here: {self._stacks(rank)}"
                        )
                good, value = pickle.loads(self._links[rank].recv_bytes())
            except (EOFError, OSError) as error:
                if isinstance(error, TicketTimeout):
                    raise
                code = self._processes[rank].wait(10.0)
                value = GroupLost(f"the process of rank {rank} ended with {code}; its output: {self.output(rank)}")
                good = False
            (results if good else errors)[rank] = value
        if errors:
            errors_text = "; ".join(f"rank {rank}: {type(error).__name__}: {error}" for rank, error in errors.items())
            raise RankFailed(errors_text, errors, results) from next(iter(errors.values()))
        return results

    def _kept_waiting(self) -> float:
        """Return the longest time in seconds that a runnable rank had no processor, which a busy machine causes."""
        return max((kept_waiting(process.pid) for process in self._processes.values()), default=0.0)

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Send one rank a signal: ``SIGSTOP`` and ``SIGCONT`` for a hung rank, ``SIGKILL`` for a lost one."""
        self._processes[rank].send_signal(number)
        if number == signal.SIGKILL:
            self._processes[rank].wait()

    def output(self, rank: int, most: int = 2000) -> str:
        """Return the end of a rank's printed output."""
        log = self._logs[rank]
        log.flush()
        size = os.fstat(log.fileno()).st_size
        return os.pread(log.fileno(), most, max(0, size - most)).decode(errors="replace")

    def _stacks(self, rank: int) -> str:
        """Return the stack of every thread of a rank, printed by the rank itself; for errors."""
        before = os.fstat(self._logs[rank].fileno()).st_size
        with contextlib.suppress(OSError):
            self._processes[rank].send_signal(signal.SIGUSR1)
        deadline = monotonic() + 2.0
        pause = threading.Event()
        while monotonic() < deadline and os.fstat(self._logs[rank].fileno()).st_size == before:
            pause.wait(0.05)
        return self.output(rank)

    def kill(self, ranks: Iterable[int] | None = None) -> None:
        """End all (or the given) ranks, including stopped and hung ones, without waiting for their end."""
        for rank in range(self.size) if ranks is None else ranks:
            self._processes[rank].kill()

    def close(self) -> None:
        """End every rank: by closing its pipe, and after 5 s by force. Idempotent."""
        for link in self._links.values():
            link.close()
        deadline = monotonic() + 5.0
        for process in self._processes.values():
            try:
                process.wait(max(0.0, deadline - monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for log in self._logs.values():
            log.close()
        for port in self._ports:
            port.close()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# -- in the rank ------------------------------------------------------------------------------------------------


def serve(link: Connection, rank: Rank) -> None:
    """Run the functions received over the pipe until it closes."""
    while True:
        try:
            module, file, name, arguments = pickle.loads(link.recv_bytes())
        except (EOFError, OSError):
            return
        try:
            answer = (True, _find(module, file, name)(rank, *arguments))
            message = pickle.dumps(answer)
        except BaseException as error:  # noqa: BLE001 (it is the answer)
            traceback.print_exc()
            message = pickle.dumps((False, portable(error)))
        with contextlib.suppress(OSError):
            link.send_bytes(message)


def _find(module: str, file: str, name: str) -> Callable[..., Any]:
    """Return a function from a module that can be imported, else from a file."""
    found: Any = sys.modules.get(f"hal_ranks:{file}")
    if found is None:
        with contextlib.suppress(ImportError, ValueError):
            spec = importlib.util.find_spec(module)
            if spec is not None and spec.origin and Path(spec.origin) == Path(file):
                found = importlib.import_module(module)
    if found is None:
        spec = importlib.util.spec_from_file_location(f"hal_ranks:{file}", file)
        if spec is None or spec.loader is None:
            raise InvalidValue(f"no module {module} and no file {file}", cure="give a function of a file")
        found = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found)
    for part in name.split("."):
        found = getattr(found, part)
    return found  # type: ignore[no-any-return]


def portable(error: BaseException) -> BaseException:
    """Return the error itself if it survives pickling, else one with the same text."""
    try:
        copy = pickle.loads(pickle.dumps(error))
        return error if str(copy) == str(error) else RuntimeError(f"{type(error).__name__}: {error}")
    except Exception:  # noqa: BLE001 (any class may fail in its own way)
        return RuntimeError(f"{type(error).__name__}: {error}")


def main(arguments: Sequence[str]) -> None:
    """Run one rank; arguments: the descriptor of its pipe, its rank, the number of ranks."""
    descriptor, rank, size = map(int, arguments)
    faulthandler.register(signal.SIGUSR1)
    serve(Connection(descriptor), Rank(rank, size))
    # The pool is gone. Closing a device may wait for a collective that never ends: then the kernel ends the process.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(LEAVING)


if __name__ == "__main__":
    main(sys.argv[1:])
