"""Processes of an episode (``episodes.py``): forks that get commands, are killed, and waited for."""

import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import episode_roles as roles

PATIENCE = 90.0  #: seconds until a process that should end counts as hung


class Child:
    """A forked process, and the pipe for its commands."""

    def __init__(self, role, *arguments):
        self.role, self.killed, self.expected = role.__name__, False, (0,)
        heard, self._told = os.pipe()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # until the role can answer it
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._told)
            roles.play(role, heard, *arguments)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        os.close(heard)
        self.status = None

    def tell(self, word):
        if not self.is_over():
            os.write(self._told, f"{word}\n".encode())

    def signal(self, number):
        if not self.is_over():
            os.kill(self.pid, number)

    def is_over(self):
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
                os.close(self._told)
        return self.status is not None

    def kill(self):
        self.signal(signal.SIGKILL)
        self.wait()
        self.killed = self.status == -signal.SIGKILL

    def wait(self):
        end = time.monotonic() + PATIENCE
        while not self.is_over():
            if time.monotonic() > end:
                os.kill(self.pid, signal.SIGKILL)
                self.wait()
                raise AssertionError(f"{self.role} hangs")
            time.sleep(0.001)

    def check(self):
        self.wait()
        assert self.killed or self.status in self.expected, f"{self.role} ended with {self.status}"
