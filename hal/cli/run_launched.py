"""``hal run`` as a rank of the user's own ``python -m paddle.distributed.launch … hal run …``.

Every rank is given the same command. The engine is a child of rank 0, in a session of its own, and outlives the ranks;
what it prints goes where rank 0 prints.
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

from hal.distributed.crew import Crew
from hal.distributed.rendezvous import SECRET, Launched, Rendezvous, Where
from hal.timeouts import TIMEOUTS
from hal.transport.curve import CurveKeys

from . import signals
from .console import say

if TYPE_CHECKING:
    from hal.distributed.words import Setup

    from .run_options import Options

VARIABLE = "HAL_ENGINE_OF"
"""What rank 0 tells the engine, as JSON: where to report its address, on which host to listen, whose keys it knows."""
LOST = 1


def take_part(launched: Launched, options: Options) -> int:
    """Be one of the ranks; the exit status, of rank 0 the engine's."""
    launched.check_size(options.ranks.size)
    if options.ranks.restart:
        raise InvalidValue(
            "these ranks are started by a launcher of yours, which the engine cannot ask for others",
            cure="leave it out (paddle.distributed.launch has --max_restart), or start hal run by itself",
            argument="--restart",
        )
    keys = CurveKeys.new() if len(launched.hosts) > 1 else None
    secret = launched.secret(os.environ)
    with signals.kept():
        import paddle  # noqa: F401 (whose store is used, in a thread)
    meeting = Rendezvous(launched, secret, TIMEOUTS.starting, signals.check)
    engine: subprocess.Popen[bytes] | None = None
    if launched.rank:
        where = meeting.answer("" if keys is None else keys.public)
    else:
        known = [*meeting.keys(), *([] if keys is None else [keys.public])]
        engine, where = _start_engine(launched, known, meeting.end)
        try:
            meeting.tell(where)
        except BaseException:  # else it would wait for ranks that do not come
            engine.terminate()
            engine.wait()
            raise
    try:
        status = _serve(launched, where, keys, engine)
    except BaseException:
        if engine is not None and engine.poll() is None:
            engine.wait()  # it tells what has happened, and ends
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
    """A signal ends the engine in order, and it the ranks. A rank that has not ended though its engine has, as it hangs
    in a step, is ended by force: no launcher ends the rank that it waits for."""
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
    """Start the engine with this command's own arguments; where it listens, which it reports before ``end``."""
    reads, writes = os.pipe()
    told = {"report": writes, "host": launched.meeting[0] if len(launched.hosts) > 1 else "", "keys": known}
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
                cure="see what it says above",
            )
    except BaseException:
        engine.kill()
        engine.wait()
        raise
    return engine, Where(**json.loads(said))


def _reported(pipe: IO[bytes], end: float) -> bytes:
    """Read the engine's report to its end. Raises :class:`GroupLost` when the time is over."""
    said = b""
    while True:
        signals.check()
        if select.select([pipe], [], [], TIMEOUTS.look)[0]:
            if not (part := os.read(pipe.fileno(), 1 << 16)):
                return said
            said += part
        if time.monotonic() > end:
            raise GroupLost("the engine, a child of rank 0, did not say in time where it listens", argument="engine")


class _Launched:
    """The starter of an engine whose ranks are there already: it only says where it listens."""

    def __init__(self, report: int, key: str) -> None:
        self._report, self._key = report, key

    def start(self, url: str) -> None:
        """Report the address to rank 0."""
        with os.fdopen(self._report, "wb") as pipe:
            pipe.write(json.dumps({"url": url, "key": self._key}).encode())

    def ended(self) -> str:
        """Not known here: they are not children of the engine."""
        return ""

    def end(self, patience: float) -> None:
        """They end by themselves."""


def launched_crew(setup: Setup) -> Crew | None:
    """The crew of an engine that rank 0 has started; None for any other process."""
    if VARIABLE not in os.environ:
        return None
    told = json.loads(os.environ[VARIABLE])
    if not told["host"]:
        return Crew(setup, _Launched(told["report"], ""), look=signals.check)
    keys = CurveKeys.new(*told["keys"])
    address = f"tcp://{told['host']}:*"
    starter = _Launched(told["report"], keys.public)
    return Crew(setup, starter, url=address, records=address, curve=keys, look=signals.check)
