"""``hal run --split 1,1 --launcher ray`` on two hosts prints the output of one process, whatever the cable does."""

import contextlib
import json
import secrets
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.namespaces.hosts import Hosts, why_not

pytestmark = [pytest.mark.long(80), pytest.mark.conform]
HAL = ("-W", "ignore", "-c", "from hal.cli import main; main()")
RAY = Path(sys.executable).with_name("ray")
PROMPTS = tuple(
    part
    for text in ("def main(", "import os", "class Reader:\n    def ", "x = [", "for")
    for part in ("--prompt", text)
)
LONG = (
    "-v",
    "--slots",
    "2",
    "--temperature=0",
    "--max-tokens",
    "40",
    "--json",
    "--logprobs",
    "1",
    "--speculate",
    "mtp",
    "--chunk",
    "3",
)
PATIENCE = 600


@pytest.fixture(scope="module")
def alone():
    """The output of one process."""
    done = subprocess.run([sys.executable, *HAL, "run", *PROMPTS, *LONG], capture_output=True, timeout=PATIENCE)
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture
def hosts():
    pytest.importorskip("ray", reason="ray is not installed: pip install 'ray>=2.40'")
    if why_not():
        pytest.skip(why_not())
    with Hosts() as made:
        yield made


class Nodes:
    """A Ray cluster of both hosts, with ``cpus`` each, that refuses clients without its token."""

    def __init__(self, hosts, cpus):
        self.hosts, self._cpus, self._stack = hosts, cpus, contextlib.ExitStack()
        self._address = f"{hosts.all[0].address}:6379"

    def __enter__(self):
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="ray-"))  # its sockets' paths are short
        token = secrets.token_hex(32)
        known = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, "RAY_USAGE_STATS_ENABLED": "0"}
        self.env = known | {"RAY_ADDRESS": "", "PYTHONUNBUFFERED": "1"}
        head = ("--head", "--port", "6379", "--include-dashboard", "false", "--temp-dir", folder)
        with contextlib.ExitStack() as started:
            for host, more in zip(self.hosts.all, (head, ("--address", self._address)), strict=True):
                node = ("--node-ip-address", host.address, "--num-cpus", self._cpus, "--block")
                self._start(started, host, *more, *node)
            self._stack.push(started.pop_all())
        return self

    def _start(self, stack, host, *arguments):
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        node = stack.enter_context(host.start(RAY, "start", *arguments, env=self.env, **pipes))
        stack.callback(node.terminate)
        printed = ""
        while "Ray runtime started" not in (line := node.stdout.readline()):
            printed += line
            assert line, printed

    def __exit__(self, *ended):
        self._stack.__exit__(*ended)

    def run(self, *arguments):
        """Start the engine on the first host."""
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        on_ray = ("--split", "1,1", "--launcher", "ray", "--ray-address", self._address)
        return self.hosts.all[0].start(*HAL, "run", *PROMPTS, *LONG, *on_ray, *arguments, env=self.env, **pipes)


def compare(out, alone):
    """The same tokens, and log-probabilities within 1e-4."""
    found = [json.loads(line) for line in out.splitlines()]
    assert [one["token_ids"] for one in found] == [one["token_ids"] for one in alone]
    for one, other in zip(found, alone, strict=True):
        for its, mine in zip(one["logprobs"], other["logprobs"], strict=True):
            assert its["logprob"] == pytest.approx(mine["logprob"], abs=1e-4)


def test_two_hosts_print_what_one_process_does_whatever_the_cable_does(hosts, alone):
    """It loses 5 % of the packets all the time, and is pulled for 3 s when the first answer has arrived."""
    with Nodes(hosts, 1) as nodes:
        hosts.lose(20)
        engine = nodes.run()
        first = engine.stdout.readline()  # the remaining requests are in flight, or wait for a slot
        hosts.cut(3)
        out, err = engine.stdout.read(), engine.stderr.read()  # communicate() would miss the bytes that were read ahead
        with engine:
            assert engine.wait(PATIENCE) == 0, err
        compare(first + out, alone)
        assert "split 1,1" in err
        assert "lost" not in err
    assert sum(host.sent_again() for host in hosts.all) > 0


def test_two_hosts_with_two_ranks_each(hosts, alone):
    with Nodes(hosts, 2) as nodes, nodes.run("--tp", "2") as engine:
        out, err = engine.communicate(timeout=PATIENCE)
        assert engine.returncode == 0, err
        compare(out, alone)
