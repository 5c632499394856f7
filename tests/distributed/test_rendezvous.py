"""Ranks of a user's own launcher meet in Paddle's store, in which every peer can read and overwrite."""

from __future__ import annotations

import contextlib
import socket
import threading

import pytest
from hal_core import GroupLost, InvalidValue, Unavailable
from hal_core.devices import HeldPort

from hal.distributed.rendezvous import SECRET, Launched, Present, Read, Rendezvous, Seal, Where
from hal.transport.urls import private_ipc_url, release_folder

KEY = "k" * 32
SEVERAL = Launched(0, ("10.0.0.1:7000", "10.0.0.2:7000", "10.0.0.2:7001"))
ENGINE = Where("tcp://10.0.0.1:9", "engine's")
PATIENCE = 60.0


class SharedStore:
    """A store without a network. ``get`` waits until the place was written, as Paddle's does. ``on_set`` is called
    after each value that is set, with its place."""

    def __init__(self, on_set=lambda store, place: None):
        self.values, self._changed, self._on_set = {}, threading.Condition(), on_set

    def set(self, place, value):
        self.forge(place, value)
        self._on_set(self, place)

    def forge(self, place, value):
        with self._changed:
            self.values[place] = value
            self._changed.notify_all()

    def get(self, place):
        with self._changed:
            assert self._changed.wait_for(lambda: place in self.values, PATIENCE)
            return self.values[place].encode()


def rendezvous(rank, store, launched=SEVERAL, secret=KEY, seconds=PATIENCE):
    return Rendezvous(Launched(rank, launched.endpoints), secret, seconds, lambda: None, store)


def meet(store, launched=SEVERAL, secret=KEY, where=ENGINE):
    """All ranks meet; return the keys that rank 0 has read, and the messages that each further rank has read."""
    found = {}

    def answer(rank):
        found[rank] = rendezvous(rank, store, launched, secret).answer(f"rank {rank}'s")

    ranks = [threading.Thread(target=answer, args=(rank,), daemon=True) for rank in range(1, launched.size)]
    for one in ranks:
        one.start()
    first = rendezvous(0, store, launched, secret)
    keys = first.keys()
    first.tell(where)
    for one in ranks:
        one.join(PATIENCE)
    return keys, found


def test_all_ranks_learn_where_the_engine_listens():
    assert meet(SharedStore()) == (["rank 1's", "rank 2's"], {1: ENGINE, 2: ENGINE})


FORGED = {
    "another secret": lambda place, word: Seal("x" * 32, SEVERAL).pack(word, place),
    "another job": lambda place, word: Seal(KEY, Launched(0, ("a:1", "b:2", "c:3"))).pack(word, place),
    "another place": lambda place, word: Seal(KEY, SEVERAL).pack(word, "present/9"),
    "no secret": lambda place, word: Seal("", SEVERAL).pack(word, place),
    "other bytes": lambda place, word: "\0 no message",
}


@pytest.mark.parametrize("how", FORGED)
def test_forged_messages_are_ignored(how):
    """A peer overwrites each message of a rank once, as soon as it was written, with one of its own."""
    overwritten = set()

    def overwrite(store, place):
        name, _, rank = place.partition("/")
        own = {"present": Present(int(rank), "forger's"), "where": Where("tcp://forger:1", "forger's"), "read": Read(9)}
        if store.values[place] and name != "read" and place not in overwritten:
            overwritten.add(place)
            store.forge(place, FORGED[how](place, own[name]))

    assert meet(SharedStore(overwrite)) == (["rank 1's", "rank 2's"], {1: ENGINE, 2: ENGINE})
    assert overwritten == {"present/1", "present/2", "where/1", "where/2"}


@pytest.mark.parametrize("rank", [0, 2, 5, -1])
def test_a_message_that_names_another_rank_is_ignored(rank):
    """It even has the secret: a rank number beyond the last one ended rank 0 with a KeyError."""
    store = SharedStore()
    first = rendezvous(0, store, seconds=0.3)
    foreign = Seal(KEY, SEVERAL).pack(Present(rank, "foreign"), "present/1")
    for place in ("present/1", "present/5"):
        store.forge(place, foreign)
    store._on_set = lambda store, place: store.forge("present/1", foreign)  # also where rank 0 has cleared it
    with pytest.raises(GroupLost, match=r"no message of rank\(s\) \[1, 2\]"):
        first.keys()


def test_an_old_message_for_another_key_is_ignored():
    """A peer replays the address of an earlier engine of the same job; the rank has a new key since."""
    store = SharedStore()
    store.forge("where/1", Seal(KEY, SEVERAL).pack(ENGINE, "where/1", "the key before"))
    with pytest.raises(GroupLost, match=r"no message of rank\(s\) \[0\]"):
        rendezvous(1, store, seconds=0.3).answer("the key now")


def test_a_peer_that_always_overwrites_ends_it_at_the_deadline_by_name():
    def overwrite(store, place):
        store.forge("present/1", "")

    store = SharedStore(overwrite)
    store.forge("present/2", Seal(KEY, SEVERAL).pack(Present(2, "rank 2's"), "present/2"))
    with pytest.raises(
        GroupLost, match=r"did not meet the others within 0.3 s .*rank\(s\) \[1(, 2)?\].*HAL_RANKS_SECRET"
    ):
        rendezvous(0, store, seconds=0.3).keys()


def test_several_hosts_need_a_secret():
    with pytest.raises(InvalidValue, match=rf"{SECRET}: the ranks are on 2 hosts \(10.0.0.1, 10.0.0.2\)"):
        SEVERAL.secret({})
    with pytest.raises(InvalidValue, match="fewer than 16 characters"):
        SEVERAL.secret({SECRET: "short"})
    assert SEVERAL.secret({SECRET: KEY}) == KEY
    assert Launched(0, ("127.0.0.1:1", "127.0.0.1:2")).secret({}) == ""


ALONE = Launched(0, ("127.0.0.1:7000", "127.0.0.1:7001"))


def test_without_a_secret_only_an_ipc_folder_of_this_user_is_accepted(tmp_path):
    url = private_ipc_url()
    open_to_all = tmp_path / "open"
    open_to_all.mkdir(mode=0o755)
    bad = ("tcp://10.9.9.9:1", f"ipc://{open_to_all}/s", f"ipc://{tmp_path}/none/s")
    forged, left = [Seal("", ALONE).pack(Where(one, ""), "where/1", "rank 1's") for one in bad], list(bad)

    def overwrite(store, place):
        if place == "where/1" and store.values[place] and left:
            left.pop()
            store.forge(place, forged[len(left)])

    try:
        engine = Where(url, "")
        assert meet(SharedStore(overwrite), ALONE, "", engine) == (["rank 1's"], {1: engine})
    finally:
        release_folder(url)
    assert left == []


# -- Paddle's own store -----------------------------------------------------------------------------------------------


@pytest.fixture
def free():
    """Two ranks of this host; their endpoints have no listeners."""
    with HeldPort() as one, HeldPort() as other:
        ports = one.number, other.number
    return Launched(0, tuple(f"127.0.0.1:{port}" for port in ports))


def test_they_meet_in_paddles_store_whatever_a_peer_drips_into_it(free):
    """A peer has sent part of a command, and sends no more; it is connected all the time."""
    found, first = {}, rendezvous(0, None, free)
    first._store = first._served()
    with socket.create_connection(free.rank_zero) as peer:
        peer.sendall(b"\1")
        one = threading.Thread(target=lambda: found.update({1: rendezvous(1, None, free).answer("rank 1's")}))
        one.start()
        assert first.keys() == ["rank 1's"]
        first.tell(ENGINE)
        one.join(PATIENCE)
    assert found == {1: ENGINE}


@pytest.mark.parametrize("said", [b"", b"\0" * 1000, b"SSH-2.0-x\r\n"], ids=("nothing", "a drip", "words"))
def test_whatever_listens_in_place_of_rank_0_the_wait_ends(free, said):
    """The first connection only probes for a listener; on the second it sends one byte at a time."""
    over = threading.Event()

    def serve():
        with stranger.accept()[0], stranger.accept()[0] as link, contextlib.suppress(OSError):
            for at in range(len(said)):
                link.sendall(said[at : at + 1])
                over.wait(0.05)
            over.wait(PATIENCE)

    with socket.create_server(free.rank_zero) as stranger:
        one = threading.Thread(target=serve)
        one.start()
        with pytest.raises(GroupLost, match=r"did not meet the others within 0.5 s|store at .* failed"):
            rendezvous(1, None, free, seconds=0.5).answer("rank 1's")
        over.set()
        one.join(PATIENCE)


def test_where_nothing_listens_the_wait_ends(free):
    with pytest.raises(GroupLost, match=r"did not meet the others within 0.3 s .*: it does not listen there|failed: "):
        rendezvous(1, None, free, seconds=0.3).answer("rank 1's")


def test_a_busy_port_is_refused_by_name(free):
    with socket.create_server(free.rank_zero), pytest.raises(Unavailable, match="is taken by another program"):
        rendezvous(0, None, free).keys()
