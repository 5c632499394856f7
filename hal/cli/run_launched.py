"""``hal run`` as a rank that the user's own launcher started (``python -m paddle.distributed.launch … hal run …``).

Every rank gets the same command. The engine is a child of rank 0 in a session of its own and outlives the ranks. Its
output goes where rank 0's output goes.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from typing import IO, TYPE_CHECKING

from hal_core import GroupLost, InvalidValue, Unavailable

from hal.distributed.rank_executor import RankExecutor
from hal.distributed.rendezvous import SECRET, Launched, Rendezvous, Where
from hal.timeouts import TIMEOUTS
from hal.transport.curve import CurveKeys

from . import signals
from .console import say

if TYPE_CHECKING:
    from hal.distributed.control_messages import Setup

    from .run_options import Options

VARIABLE = "HAL_ENGINE_OF"
"""Variable with rank 0's settings for the engine, as JSON: report pipe, host to listen on, known keys."""
LOST = 1


def take_part(launched: Launched, options: Options) -> int:
    """Run as one of the ranks. Return the exit status; on rank 0, the engine's."""
    launched.check_size(options.ranks.size)
    if options.ranks.restart:
        raise InvalidValue(
            "the engine cannot restart ranks that your own launcher started",
            cure="leave it out (paddle.distributed.launch has --max_restart), or run hal run without that launcher",
            argument="--restart",
        )
    keys = CurveKeys.new() if len(launched.hosts) > 1 else None
    secret = launched.secret(os.environ)
    with signals.kept():
        import paddle  # noqa: F401 (whose store is used, in a thread)
    rendezvous = Rendezvous(launched, secret, TIMEOUTS.starting, signals.check)
    engine: subprocess.Popen[bytes] | None = None
    if launched.rank:
        where = rendezvous.answer("" if keys is None else keys.public)
    else:
        known = [*rendezvous.keys(), *([] if keys is None else [keys.public])]
        engine, where = _start_engine(launched, known, rendezvous.end)
        try:
            rendezvous.tell(where)
        except BaseException:  # otherwise the engine would wait for ranks that never connect
            engine.terminate()
            engine.wait()
            raise
    try:
        status = _serve(launched, where, keys, engine)
    except BaseException:
        if engine is not None and engine.poll() is None:
            engine.wait()  # the engine reports the error, and ends
        raise
    return status if engine is None else engine.wait()


def _serve(launched: Launched, where: Where, keys: CurveKeys | None, engine: subprocess.Popen[bytes] | None) -> int:
    from hal.distributed.rank import serve

    over = threading.Event()
    threading.Thread(target=_forward_signals, args=(engine, over), name="hal-run-signals", daemon=True).start()
    try:
        serve(
            where.url,
            launched.rank,
            launched.size,
            facts={"options": " ".join(sys.argv[1:])},
            curve=None if keys is None else keys.knowing(where.key),
        )
    except GroupLost as error:
        say(f"hal: rank {launched.rank}: {error}")
        return LOST
    finally:
        over.set()
    return 0


def _forward_signals(engine: subprocess.Popen[bytes] | None, over: threading.Event) -> None:
    """Forward a signal to the engine, which ends the ranks. If the engine has ended but this rank hangs in a step, end
    the rank by force, because no launcher ends the rank that it waits for."""
    while not over.wait(TIMEOUTS.look):
        if engine is not None and (status := engine.poll()) is not None:
            if not over.wait(TIMEOUTS.rank_exit_lost if status else TIMEOUTS.rank_exit):
                os._exit(status)
            return
        if signals.came() is not None:
            if engine is not None and engine.poll() is None:
                engine.send_signal(signal.SIGTERM)
            return


def _start_engine(launched: Launched, known: list[str], end: float) -> tuple[subprocess.Popen[bytes], Where]:
    """Start the engine with this command's own arguments. Return the address that it reports before ``end``."""
    reads, writes = os.pipe()
    told = {"report": writes, "host": launched.rank_zero[0] if len(launched.hosts) > 1 else "", "keys": known}
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PADDLE_", SECRET))}
    command = [sys.executable, "-P", "-c", "from hal.cli import main; main()", *sys.argv[1:]]
    paths = os.pathsep.join(path for path in sys.path if path)
    try:
        engine = subprocess.Popen(
            command,
            env=kept | {VARIABLE: json.dumps(told), "PYTHONPATH": paths},
            pass_fds=[writes],
            start_new_session=True,
        )
    finally:
        os.close(writes)
    try:
        with os.fdopen(reads, "rb") as pipe:
            said = _reported(pipe, end)
        if not said:
            raise Unavailable(
                f"the engine, a child of rank 0, ended with status {engine.wait()} before it listened",
                cure="see its output above",
            )
    except BaseException:
        engine.kill()
        engine.wait()
        raise
    return engine, Where(**json.loads(said))


def _reported(pipe: IO[bytes], end: float) -> bytes:
    """Read the engine's whole report. Raises :class:`GroupLost` after ``end``."""
    said = b""
    while True:
        signals.check()
        if select.select([pipe], [], [], TIMEOUTS.look)[0]:
            if not (part := os.read(pipe.fileno(), 1 << 16)):
                return said
            said += part
        if time.monotonic() > end:
            raise GroupLost("the engine, a child of rank 0, did not report its address in time", argument="engine")


class _Launched:
    """Starter of an engine whose ranks are already running: it only reports the engine's address."""

    def __init__(self, report: int, key: str) -> None:
        self._report, self._key = report, key

    def start(self, url: str) -> None:
        """Report the address to rank 0."""
        with os.fdopen(self._report, "wb") as pipe:
            pipe.write(json.dumps({"url": url, "key": self._key}).encode())

    def ended(self) -> str:
        """Return "": these ranks are not children of the engine."""
        return ""

    def end(self, patience: float) -> None:
        """Return at once: these ranks end with their launcher."""


def launched_executor(setup: Setup) -> RankExecutor | None:
    """Return the rank_executor of an engine that rank 0 started; None in any other process."""
    if VARIABLE not in os.environ:
        return None
    told = json.loads(os.environ[VARIABLE])
    if not told["host"]:
        return RankExecutor(setup, _Launched(told["report"], ""), look=signals.check)
    keys = CurveKeys.new(*told["keys"])
    address = f"tcp://{told['host']}:*"
    starter = _Launched(told["report"], keys.public)
    return RankExecutor(setup, starter, url=address, records=address, curve=keys, look=signals.check)
