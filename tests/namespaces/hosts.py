"""Two hosts of one machine: network namespaces connected only to each other, and faults between them.

A separate process holds each, so they vanish when that process ends, however it ends. All traffic stays inside.
"""

import functools
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ADDRESSES = ("10.71.0.1", "10.71.0.2")


class Host:
    """A network namespace with the address ``address``."""

    def __init__(self, address):
        self.address = address
        # The holder ends with this process: its standard input is then at its end.
        self._holder = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "echo up; cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        if self._holder.stdout.readline() != b"up\n":
            with self._holder:
                raise OSError(self._holder.stderr.read().decode().strip())

    @property
    def pid(self):
        """The process id of its holder."""
        return self._holder.pid

    def command(self, *arguments):
        """The command line that runs a command inside."""
        return ["nsenter", f"--net=/proc/{self.pid}/ns/net", *map(str, arguments)]

    def run(self, *arguments):
        """Run a command inside and return its output."""
        done = subprocess.run(self.command(*arguments), capture_output=True, text=True, timeout=30)
        if done.returncode:
            raise OSError(f"{' '.join(map(str, arguments))}: {done.stderr.strip()}")
        return done.stdout

    def start(self, *arguments, **options):
        """Start a Python process inside, with the repository on its path."""
        paths = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
        environment = os.environ | {"PYTHONPATH": paths} | options.pop("env", {})
        return subprocess.Popen(self.command(sys.executable, *arguments), env=environment, **options)

    def lose(self, one_of):
        """Drop one of ``one_of`` incoming packets, by chance; 0: drop none."""
        self.run(sys.executable, HERE / "loss.py", one_of)

    def sent_again(self):
        """Segments that this host's TCP had to send again."""
        names, values = (line.split() for line in self.run("cat", "/proc/net/snmp").splitlines() if line[:4] == "Tcp:")
        return int(dict(zip(names, values, strict=True))["RetransSegs"])

    def end(self):
        """Release the namespace."""
        with self._holder:  # which closes its pipes, and so ends it
            pass


class Hosts:
    """Two hosts with one cable between them. A context manager."""

    def __init__(self):
        self.all = []

    def __enter__(self):
        try:
            for address in ADDRESSES:
                self.all.append(Host(address))
            one, other = self.all
            one.run("ip", "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", other.pid)
            for host in self.all:
                host.run("ip", "address", "add", f"{host.address}/24", "dev", "eth0")
                host.run("ip", "link", "set", "eth0", "gso_max_segs", 1)  # else 64 KiB at once count as one packet
                for name in ("lo", "eth0"):
                    host.run("ip", "link", "set", name, "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        while self.all:
            self.all.pop().end()

    def lose(self, one_of):
        """Drop one of so many packets in both directions."""
        for host in self.all:
            host.lose(one_of)

    def cut(self, seconds):
        """Pull the cable, and reconnect it."""
        self.all[0].run("ip", "link", "set", "eth0", "down")
        time.sleep(seconds)
        self.all[0].run("ip", "link", "set", "eth0", "up")


@functools.cache
def why_not():
    """Return why such hosts cannot exist on this machine, or ""."""
    missing = [tool for tool in ("unshare", "nsenter", "ip") if shutil.which(tool) is None]
    if missing:
        return f"{missing[0]} is not installed (util-linux, iproute2)"
    try:
        with Hosts() as hosts:
            hosts.lose(20)
    except OSError as error:
        return f"network namespaces, or netfilter rules in them, cannot be made here: {error}"
    return ""
