"""One process that has imported the commands' modules, and forks for each command that a test starts.

``hal run`` takes four seconds of processor time, of which three are imports. Few tests of a command concern its start;
those that do start a separate process. A forked command has its own arguments, environment, folder, standard streams
and dispositions of signals, and ends as the interpreter ends.
"""

import contextlib
import gc
import importlib
import io
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from pathlib import Path

LENGTH = 8
"""The length of a message, as bytes before it."""


class Warm:
    """The process, from the test's side: ``start()`` is like ``subprocess.Popen([python, "-c", code, ...])``.

    ``modules``: its imports beforehand. ``under``: a command that starts it, such as ``unshare``.
    """

    def __init__(self, modules, under=()):
        self._ours, theirs = socket.socketpair()
        with theirs:
            command = [*under, sys.executable, str(Path(__file__)), str(theirs.fileno()), *modules]
            self._server = subprocess.Popen(command, pass_fds=[theirs.fileno()], start_new_session=True)

    def start(self, *arguments, code, **options):
        """Start ``code`` with arguments; options are those of ``Popen``, except for actions before an exec."""
        return Forked(self, [sys.executable, "-c", code, *arguments], **options)

    def run(self, *arguments, code, timeout=120, **options):
        """The same, with its output, until it has ended."""
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options
        with self.start(*arguments, code=code, **options) as process:
            try:
                out, err = process.communicate(timeout=timeout)
            except BaseException:
                process.kill()
                raise
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def fork(self, request, streams):
        """Fork in the process. Return the descriptor that reports the end, and the child's number."""
        reading, writing = os.pipe()
        try:
            data = json.dumps(request).encode()
            socket.send_fds(self._ours, [len(data).to_bytes(LENGTH, "little")], [*streams, writing])
            self._ours.sendall(data)
        finally:
            os.close(writing)
        number = os.read(reading, LENGTH)
        assert number, "the warm process has ended"
        return reading, int.from_bytes(number, "little")

    def close(self):
        """End it, and its children."""
        self._ours.close()
        try:
            self._server.wait(20)
        finally:
            self._server.kill()  # without effect on a process that has ended


class Forked(subprocess.Popen):
    """A command that the warm process has forked. It is not a child of this process, so a pipe reports its end."""

    def __init__(self, warm, command, *, closed=(), **options):
        """``closed``: numbers of standard streams that it does not have."""
        assert not {"preexec_fn", "pass_fds", "start_new_session"} & {*options}, "only an exec does that"
        self._warm, self._end, self._closed = warm, -1, [*closed]
        self._ending, self._status = threading.Lock(), None
        super().__init__(command, **options)

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest):
        given, out, err = rest[3], rest[6], rest[8]
        streams = [mine if one == -1 else one for mine, one in enumerate((given, out, err))]
        environment = dict(os.environ if env is None else env)
        request = {"code": args[2], "arguments": args[3:], "folder": cwd and str(cwd), "environment": environment}
        request["closed"] = self._closed
        self._end, self.pid = self._warm.fork(request, streams)
        self._child_created = True
        self._close_pipe_fds(*rest[3:9])

    def _internal_poll(self, *_, **__):
        if self._ending.acquire(blocking=False):  # another thread may be waiting for the end
            try:
                self._take(block=False)
            finally:
                self._ending.release()
        return self.returncode

    def _try_wait(self, flags):
        with self._ending:
            self._take(block=not flags & os.WNOHANG)
        return (0, 0) if self._status is None else (self.pid, self._status)

    def _take(self, *, block):
        """Read how it has ended, once; the status as ``waitpid`` gives it."""
        if self._status is not None or not (block or select.select([self._end], [], [], 0)[0]):
            return
        data = os.read(self._end, LENGTH)
        assert data, "the warm process has ended"
        os.close(self._end)
        self._status = int.from_bytes(data, "little")
        self.returncode = os.waitstatus_to_exitcode(self._status)


# -- in the process itself --------------------------------------------------------------------------------------------


def serve(sock):
    """Fork until the connection closes. Returns in each child, with its code and settings."""
    ends, (waking, woken) = {}, os.pipe()
    os.set_blocking(waking, False)
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready = select.select([sock, waking], [], [])[0]
        if waking in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(waking, 4096)
            tell_ends(ends)
        if sock not in ready:
            continue
        request, descriptors = receive(sock)
        if request is None:
            break
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for one in (sock.detach(), waking, woken, descriptors[3], *ends.values()):
                os.close(one)
            become(request, descriptors[:3])
            return request["code"]
        for one in descriptors[:3]:
            os.close(one)
        ends[pid] = descriptors[3]
        os.write(ends[pid], pid.to_bytes(LENGTH, "little"))
    for pid in ends:
        os.kill(pid, signal.SIGKILL)
    for pid in ends:
        os.waitpid(pid, 0)
    return None


def receive(sock):
    """Return a request with its descriptors; None at the end."""
    data, descriptors, _, _ = socket.recv_fds(sock, LENGTH, 4)
    if not data:
        return None, ()
    left, parts = int.from_bytes(data, "little"), []
    while left:
        parts.append(sock.recv(left))
        left -= len(parts[-1])
    return json.loads(b"".join(parts)), descriptors


def tell_ends(ends):
    """Report the exit of each child that has ended."""
    while ends:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        with contextlib.suppress(BrokenPipeError):  # the caller has closed its end
            os.write(ends[pid], status.to_bytes(LENGTH, "little"))
        os.close(ends.pop(pid))


def become(request, streams):
    """Set everything that belongs to a separate process."""
    for number, one in enumerate(streams):
        os.dup2(one, number)
    for one in streams:
        if one > 2:
            os.close(one)
    os.environ.clear()
    os.environ.update(request["environment"])
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if number in request["closed"]:
            os.close(number)
        setattr(sys, name, None if number in request["closed"] else stream(getattr(sys, name), mode))
        setattr(sys, f"__{name}__", getattr(sys, name))
    if request["folder"]:
        os.chdir(request["folder"])
    sys.argv = ["-c", *request["arguments"]]
    wanted = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[1:1] = [folder for folder in wanted if folder not in sys.path]
    tempfile.tempdir = None
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def stream(former, mode):
    """A standard stream as the interpreter would make it for the descriptor's present file."""
    at_once = mode == "w" and bool(os.environ.get("PYTHONUNBUFFERED"))
    binary = open(former.fileno(), f"{mode}b", 0 if at_once else -1, closefd=False)  # noqa: SIM115 (it stays open)
    lines = mode == "w" and (binary.isatty() or former is sys.stderr)
    made = io.TextIOWrapper(binary, former.encoding, former.errors, line_buffering=lines, write_through=at_once)
    made.mode = mode
    return made


if __name__ == "__main__":
    del sys.path[0]  # the folder of this file; a command has its current folder there
    sys.path.insert(0, "")
    for name in sys.argv[2:]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # and no collection in a child, least of all at its end, copies the pages of all imports
    code = serve(socket.socket(fileno=int(sys.argv[1])))
    if code is not None:
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(code, "<string>", "exec"), vars(main))
