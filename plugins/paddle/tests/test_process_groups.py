"""Groups over a chip's library through Paddle, without a chip: how the first collective of a group ends (G16)."""

import threading
from time import monotonic
from types import SimpleNamespace

import pytest
from hal_core import TIMEOUTS, GroupLost, InvalidValue
from hal_paddle import process_groups
from hal_paddle.process_groups import connect


class Library:
    """A process group whose first collective ends in a given way."""

    def __init__(self, call=lambda: None, completed=lambda: True):
        self.call, self.completed = call, completed

    def broadcast(self, tensor, source, sync):
        self.call()
        return SimpleNamespace(is_completed=self.completed)


@pytest.fixture
def cpu_place():
    return pytest.importorskip("paddle").CPUPlace()


def test_a_group_is_connected_when_its_first_collective_has_ended(cpu_place):
    looks = iter([False, False, True])
    connect(Library(completed=lambda: next(looks)), cpu_place, 5.0)
    assert next(looks, None) is None


@pytest.mark.parametrize("where", ["in the call", "on the device"])
def test_g16_a_rank_missing_at_the_first_collective_is_an_error_in_time(cpu_place, where):
    release = threading.Event()
    stuck = Library(call=release.wait) if where == "in the call" else Library(completed=lambda: False)
    began = monotonic()
    with pytest.raises(GroupLost, match=r"did not find each other within 0\.3 s") as raised:
        connect(stuck, cpu_place, 0.3)
    assert monotonic() - began < 5.0
    assert "end this process" in raised.value.cure
    release.set()


def test_what_the_library_says_of_the_first_collective_is_passed_on(cpu_place):
    def call():
        raise ValueError("Duplicate GPU detected")

    with pytest.raises(RuntimeError, match="Duplicate GPU detected"):
        connect(Library(call=call), cpu_place, 5.0)


def test_a_group_over_nccl_is_made_as_paddles_own_and_connected(monkeypatch):
    """Paddle's Python code counts the arguments that its class takes; the first four mean the same in all versions."""
    core = process_groups.paddle_core()
    made, connected = [], []

    class ProcessGroupNCCL:
        @staticmethod
        def create(*arguments):
            made.append(arguments)
            return "the group"

    monkeypatch.setattr(core, "ProcessGroupNCCL", ProcessGroupNCCL, raising=False)
    place = SimpleNamespace(get_device_id=lambda: 0)
    monkeypatch.setattr(process_groups, "_current_gpu", lambda: place)
    monkeypatch.setattr(process_groups, "connect", lambda *arguments: connected.append(arguments))
    monkeypatch.setattr(process_groups, "make_group", lambda create, *_: create("the store", 1, 2, 1234))
    assert process_groups.nccl((0, 1), 1, None, 5.0) == "the group"
    assert connected == [("the group", place, TIMEOUTS.connecting)]
    assert made[0][:4] == ("the store", 1, 2, 1234)


def test_the_store_of_a_group_is_found_by_an_address_however_long_the_hosts_name_is(monkeypatch):
    name = "trainer-0.trainers-of-a-long-job.a-namespace.svc.cluster.local"
    monkeypatch.setenv("PADDLE_CURRENT_ENDPOINT", f"{name}:8000")
    monkeypatch.setattr("socket.gethostbyname", {name: "127.0.0.1"}.__getitem__)
    stores, sent = [], []
    core = SimpleNamespace(TCPStore=lambda *arguments: stores.append(arguments))
    monkeypatch.setattr(process_groups, "paddle_core", lambda: core)
    process_groups.make_group(lambda *_: None, (0, 1), 0, lambda data: sent.append(data) or data, 5.0)
    assert process_groups.WHERE.unpack(sent[0])[0].rstrip(b"\0") == b"127.0.0.1"
    assert stores[0][0] == "127.0.0.1"


def test_a_group_over_nccl_needs_a_gpu_to_be_paddles_current_device():
    pytest.importorskip("paddle")
    with pytest.raises(InvalidValue, match=r"current place is Place\(cpu\)") as raised:
        process_groups._current_gpu()
    assert "paddle.set_device('gpu:N')" in raised.value.cure
