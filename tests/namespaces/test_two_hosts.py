"""Handovers between two hosts: with keys, on a cable that loses packets or is pulled, and to an unused address."""

import contextlib
import json
import subprocess

import pytest

from tests.namespaces.hosts import Hosts, why_not

pytestmark = pytest.mark.long(15)
REQUESTS, EACH = 8, 8
"""Requests that are handed over, and blocks of 40 KiB of each."""


class Side:
    """A role in a host, with commands through its standard input."""

    def __init__(self, host, seed, silence=20.0):
        arguments = ("-m", "tests.namespaces.role", f"tcp://{host.address}:*", str(seed), str(silence))
        self.process = host.start(*arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.description = self.answer()

    def answer(self):
        return json.loads(self.process.stdout.readline())

    def tell(self, *words):
        self.process.stdin.write(json.dumps(words).encode() + b"\n")
        self.process.stdin.flush()

    def ask(self, *words):
        self.tell(*words)
        return self.answer()

    def end(self):
        self.process.stdin.close()
        if self.process.wait(30):
            raise AssertionError("a role ended with an error")


@pytest.fixture
def hosts():
    if why_not():
        pytest.skip(why_not())
    with Hosts() as made:
        yield made


@contextlib.contextmanager
def sides(hosts, **more):
    p, d = (Side(host, seed, **more) for seed, host in enumerate(hosts.all))
    try:
        yield p, d
        p.end()
        d.end()
    finally:
        for side in (p, d):
            side.process.kill()
            with side.process:
                pass


def hand_over(p, d, number):
    """Promise, send in two chunks and seal."""
    name, blocks = f"r{number}", [EACH * number + place for place in range(EACH)]
    assert d.ask("reserve", name, blocks, p.description) is None
    for first in (0, EACH // 2):
        assert p.ask("send", name, d.description, first, blocks[first : first + EACH // 2]) is None
    assert p.ask("seal", name, d.description, EACH) is None


def check(p, d):
    """All have arrived, once, and whole."""
    should = [["Arrived", f"r{number}", ""] for number in range(REQUESTS)]
    for side in (p, d):
        assert sorted(side.ask("ended", REQUESTS)) == should
    blocks = list(range(REQUESTS * EACH))
    assert d.ask("digest", blocks) == p.ask("digest", blocks)


def test_requests_are_handed_over_between_two_hosts(hosts):
    with sides(hosts) as (p, d):
        for number in range(REQUESTS):
            hand_over(p, d, number)
        check(p, d)


def test_a_cable_that_loses_one_packet_of_twenty_costs_nothing_but_time(hosts):
    hosts.lose(20)
    with sides(hosts) as (p, d):
        for number in range(REQUESTS):
            hand_over(p, d, number)
        check(p, d)
    assert sum(host.sent_again() for host in hosts.all) > 0, "no packet was lost"


def test_a_cable_that_is_pulled_for_three_seconds_costs_nothing_but_time(hosts):
    with sides(hosts) as (p, d):
        hand_over(p, d, 0)
        assert p.ask("ended", 1) == [["Arrived", "r0", ""]]
        d.ask("reserve", "r1", list(range(EACH, 2 * EACH)), p.description)
        p.ask("send", "r1", d.description, 0, [EACH])
        hosts.all[0].run("ip", "link", "set", "eth0", "down")
        assert p.ask("send", "r1", d.description, 1, list(range(EACH + 1, 2 * EACH))) is None
        assert p.ask("seal", "r1", d.description, EACH) is None
        for number in range(2, REQUESTS):  # messages that are sent while it is pulled
            hand_over(p, d, number)
        hosts.cut(3)
        check(p, d)


def test_a_pulled_cable_is_a_lost_peer_on_both_sides_until_it_returns(hosts):
    with sides(hosts, silence=3.0) as (p, d):
        d.ask("reserve", "r0", [0, 1], p.description)
        p.ask("send", "r0", d.description, 0, [0])
        hosts.all[0].run("ip", "link", "set", "eth0", "down")
        assert p.ask("ended", 1) == [["PeerLost", "r0", d.description[0]]]
        assert d.ask("ended", 1) == [["PeerLost", "r0", p.description[0]]]
        hosts.all[0].run("ip", "link", "set", "eth0", "up")
        hand_over(p, d, 1)
        assert p.ask("ended", 2)[1:] == d.ask("ended", 2)[1:] == [["Arrived", "r1", ""]]


def test_unreachable_addresses_and_wrong_keys_are_lost_peers(hosts):
    with sides(hosts, silence=1.0) as (p, d):
        url, key, facts, session = d.description
        nowhere = url.replace("10.71.0.2", "10.71.0.9")
        p.ask("send", "r0", [nowhere, key, facts, 77], 0, [0])
        p.ask("send", "r1", [url, p.description[1], facts, session], 0, [0])
        assert sorted(p.ask("ended", 2)) == [["PeerLost", "r0", nowhere], ["PeerLost", "r1", url]]
        differs = {**facts, "layout": "another"}
        refusal = p.ask("send", "r2", [url, key, differs, session], 0, [0])
        assert "layout: 'test' here, 'another' there" in refusal["error"]
        refusal = d.ask("reserve", "r2", [0], [p.description[0], p.description[1], differs, 5])
        assert "layout: 'test' here, 'another' there" in refusal["error"]
