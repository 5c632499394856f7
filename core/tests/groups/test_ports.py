"""A held port is given to no other process, and Paddle's store can still bind it."""

import socket
import subprocess
import sys

import pytest
from hal_core.ranks.ports import HeldPort

STORE = """
import sys
from hal_core.ranks.ports import HeldPort
from paddle.base import core
held = HeldPort()
store = core.TCPStore("127.0.0.1", held.number, True, 1, 20)
held.close()
store.add("here", 1)
assert core.TCPStore("127.0.0.1", held.number, False, 1, 20).add("here", 1) == 2
sys.stdout.write("both")
"""


@pytest.mark.parametrize("address", ["127.0.0.1", ""])
def test_nobody_else_can_bind_a_port_that_is_held(address):
    with HeldPort() as held, socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind((address, held.number))
    with socket.socket() as other:
        other.bind((address, held.number))


def test_a_held_port_is_no_free_one():
    """A bind to any port gets another one, with and without address reuse; 100 binds at once, as the range is wide."""
    with HeldPort() as held:
        servers = [socket.create_server(("", 0)) for _ in range(100)]
        assert held.number not in [server.getsockname()[1] for server in servers]
        for server in servers:
            server.close()


@pytest.mark.steady
@pytest.mark.conform
def test_paddles_store_binds_a_port_that_is_held():
    """In a separate process, which Paddle ends if the port belongs to another process."""
    ran = subprocess.run([sys.executable, "-c", STORE], capture_output=True, text=True, timeout=60, check=False)
    assert ran.stdout == "both", ran.stderr
