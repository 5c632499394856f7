"""An engine and a rank on two hosts, of which one vanishes: no connection ends, and each notices the silence."""

import subprocess

import pytest
from hal_engine.transport.curve import CurveKeys

from tests.namespaces.hosts import Hosts, why_not

pytestmark = pytest.mark.long(10)
ENGINE = """
import sys
from hal_engine.distributed.control_channel import EngineChannel
from hal_engine.distributed.control_messages import Agreed
from hal_engine.transport.curve import CurveKeys
address, public, secret, rank = sys.argv[1:]
channel = EngineChannel(f"tcp://{address}:*", CurveKeys(public, secret, (rank,)), lambda _: rank)
print(channel.url, flush=True)
while not channel.receive(0.1):
    pass
channel.send(Agreed())
print("met", flush=True)
while not channel.silent():
    channel.receive(0.1)
print(channel.silent(), flush=True)
"""
RANK = """
import sys
from hal_core import GroupLost
from hal_engine.distributed.control_channel import RankChannel
from hal_engine.distributed.control_messages import Agreed, Hello
from hal_engine.transport.curve import CurveKeys
url, public, secret, engine = sys.argv[1:]
channel = RankChannel(url, 0, CurveKeys(public, secret, (engine,)))
channel.send(Hello(0, 1, {}))
assert channel.receive(60.0) == Agreed()
print("met", flush=True)
try:
    channel.receive(600.0)
except GroupLost as error:
    print(error, flush=True)
"""


@pytest.fixture
def hosts():
    if why_not():
        pytest.skip(why_not())
    with Hosts() as made:
        yield made


def test_each_side_notices_that_the_other_host_has_vanished(hosts):
    engine_keys, rank_keys = CurveKeys.new(), CurveKeys.new()
    options = {"stdout": subprocess.PIPE, "text": True, "env": {"HAL_SECONDS_SILENCE": "2"}}
    one, other = hosts.all
    given = (one.address, engine_keys.public, engine_keys.secret, rank_keys.public)
    with one.start("-c", ENGINE, *given, **options) as engine:
        url = engine.stdout.readline().strip()
        with other.start("-c", RANK, url, rank_keys.public, rank_keys.secret, engine_keys.public, **options) as rank:
            try:
                assert (engine.stdout.readline(), rank.stdout.readline()) == ("met\n", "met\n")
                one.run("ip", "link", "set", "eth0", "down")
                assert engine.stdout.readline().startswith("{0: ")  # its silence, or the kernel's equal limit
                assert "rank 0 has lost the engine: " in rank.stdout.readline()
            finally:
                engine.kill()
                rank.kill()
