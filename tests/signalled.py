"""In a command's process: one of its moments sends a signal to the process, or never ends."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import os
import signal
import sys
import threading
import time
from pathlib import Path


def main() -> None:
    """``ACTION KIND WHERE`` and a command's arguments. KIND: ``import`` of the module WHERE, or ``call`` or ``return``
    of the functions and methods of that dotted name. ACTION, at the first such moment:

    - a number: send this signal to the process;
    - ``python``, ``c``: wait for ever, where the interpreter runs handlers or in a library;
    - ``tell``: print the moment, and go on.

    With ``ranks`` in ACTION the ranks are threads that never return from their first step.
    """
    action, kind, where = sys.argv[1:4]
    del sys.argv[1:4]
    actions = {"python": in_python, "c": in_c, "tell": hangs}
    if (name := action.removeprefix("ranks ")) in actions:
        from hal_engine.timeouts import TIMEOUTS

        TIMEOUTS.signal = 0.3
    if name != action:
        replace_ranks()
    if where.startswith("paddle"):
        from hal_paddle_runner import onednn

        onednn.NAME = "missing.so"  # the model runs in Paddle's operators, and Paddle is imported
    sys.meta_path.insert(0, Moment(kind, where, actions.get(name) or functools.partial(send, int(name))))
    from hal.cli import main

    main()


class Moment:
    """Module finder that acts at a module's import, or has its functions act."""

    def __init__(self, kind, where, act):
        self._kind, self._act, self._acted = kind, act, False
        self._module, _, self._function = (where, "", "") if kind == "import" else where.rpartition(".")
        if self._module in sys.modules:
            self._patch(sys.modules[self._module])

    def find_spec(self, name, path, target=None):
        if name != self._module:
            return None
        sys.meta_path.remove(self)
        if self._kind == "import":
            return self._act()
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module
        spec.loader.exec_module = lambda made: (execute(made), self._patch(made))
        return spec

    def _patch(self, owner):
        for name, value in list(vars(owner).items()):
            if name == self._function and isinstance(value, classmethod):
                setattr(owner, name, classmethod(self._around(value.__func__)))
            elif name == self._function and callable(value):
                setattr(owner, name, self._around(value))
            elif isinstance(value, type) and value.__module__ == self._module and owner.__name__ == self._module:
                self._patch(value)

    def _around(self, function):
        @functools.wraps(function)
        def around(*arguments, **options):
            if self._kind == "call":
                self._once()
            try:
                return function(*arguments, **options)
            finally:
                if self._kind == "return":
                    self._once()

        return around

    def _once(self):
        if not self._acted:
            self._acted = True
            self._act()


def send(number):
    os.write(2, b"sent\n")
    os.kill(os.getpid(), number)


def hangs():
    os.write(1, b"hangs\n")


def in_python():
    """It tells once it waits."""
    (reading, _), where = os.pipe(), Path(f"/proc/self/task/{threading.get_native_id()}/wchan")

    def tell():
        while "pipe" not in where.read_text():
            time.sleep(0.01)
        hangs()

    threading.Thread(target=tell, daemon=True).start()
    os.read(reading, 1)


def in_c():
    """No signal ends the wait, and no handler runs. It lets the mutex go once it waits: the other thread tells then."""
    mutex, never, library = ctypes.create_string_buffer(64), ctypes.create_string_buffer(64), ctypes.CDLL(None)
    library.pthread_mutex_lock(mutex)
    threading.Thread(target=lambda: (library.pthread_mutex_lock(mutex), hangs()), daemon=True).start()
    library.pthread_cond_wait(never, mutex)


def replace_ranks():
    """Ranks that are threads of this process: they come up, and never return from their first step; with ``--restart``
    the restarted ones never come up, and the first fail at their start."""
    import hal_engine.distributed.starting
    from hal_engine.distributed.control_messages import Failed, Stop
    from hal_engine.distributed.steps import StepOrder

    from tests.distributed.test_start import Actors

    class Idle(Actors):
        def __init__(self, size, **_):
            super().__init__(*[None] * size)

        def _wait(self, line, rank, wanted):
            if wanted is not Stop:
                return super()._wait(line, rank, wanted)
            while not isinstance(line.receive(60.0), StepOrder):
                pass
            return in_python()

        def end(self, patience):
            pass

    class Failing(Idle):
        starts = 0

        def start(self, url):
            Failing.starts += 1
            if Failing.starts > 1:
                in_c()
            self.failed = [Failed(0, "gone"), None]
            super().start(url)

    hal_engine.distributed.starting.LocalLaunch = Failing if "--restart" in sys.argv else Idle


def begin() -> None:
    """A command that prints when its handlers are installed; before that, the interpreter handles signals."""
    from hal.cli import main, signals

    install = signals._install

    def tell():
        former, signals._install = install(), install
        os.write(2, b"begun\n")
        return former

    signals._install = tell
    main()


def ignoring() -> None:
    """A command as ``nohup`` and a shell start it."""
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    os.write(2, b"begun\n")
    from hal.cli import main

    main()


def last() -> None:
    """``NUMBER`` and a command, with that signal sent while the interpreter goes."""

    class Last:
        def __del__(self, kill=os.kill, me=os.getpid(), number=int(sys.argv.pop(1))):  # noqa: B008 (gone by then)
            kill(me, number)

    sys.last = Last()
    from hal.cli import main

    main()


def swallowing() -> None:
    """``hal conform`` with a signal that each test of the kit takes for an exception of its own."""
    from hal_conformance.report import command

    run = command.main

    class Swallows:
        def pytest_runtest_call(self):
            with contextlib.suppress(KeyboardInterrupt):
                os.kill(os.getppid(), signal.SIGTERM)  # the command, which passes it on to the tests' process
                threading.Event().wait(60)

    command.main = lambda given, **more: run(given, [Swallows()], **more)
    from hal.cli import main

    main()
