"""Connections between the members of a group: what kind of socket they have, by the address at which they meet."""

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
from hal_core.ranks.peers import Endpoint, Listener, receive

PATIENCE = 60.0


@pytest.mark.parametrize(
    ("host", "family"), [("127.0.0.1", socket.AF_UNIX), ("::1", socket.AF_UNIX), ("0.0.0.0", socket.AF_INET)]
)
def test_members_at_a_loopback_address_have_unix_sockets(host, family):
    with Listener(host) as one, Listener(host) as other, ThreadPoolExecutor(2) as pool:
        ends = {rank: Endpoint.unpack(each.endpoint.pack()) for rank, each in enumerate((one, other))}
        made = [pool.submit(each.meet, rank, [(0, 1)], ends, PATIENCE) for rank, each in enumerate((one, other))]
        links = [found.result(PATIENCE)[0][1 - rank] for rank, found in enumerate(made)]
    assert [link.family for link in links] == [family, family]
    links[0].send(b"four")
    assert receive(links[1], 4, PATIENCE) == b"four"
    for link in links:
        link.close()
