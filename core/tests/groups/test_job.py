"""Joining a job without any framework, and exchanging blocks: late ranks, strangers, lost ranks."""

import contextlib
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from hal_core.devices import HeldPort, join_world
from hal_core.errors import GroupLost, InvalidValue
from hal_core.group import ALONE
from hal_core.ranks import job
from hal_core.ranks.groups import opened

PATIENCE = 60.0


@pytest.fixture
def hello():
    """A free address, and the greeting of a rank."""
    with HeldPort() as port:
        yield ("127.0.0.1", port.number), lambda rank: job.HELLO.pack(job.MAGIC, b"x" * 16, rank)


@pytest.fixture
def jobs(hello):
    """Make a job of some ranks in this process."""
    made = []

    def make(size):
        address, greeting = hello
        with ThreadPoolExecutor(size) as pool:
            first = pool.submit(job._meet_all, address, greeting(0), size, PATIENCE)
            links = []
            for rank in range(1, size):
                links.append(job.wait_for_listener(*address, PATIENCE, 0))
                links[-1].sendall(greeting(rank))
            made.append(job.Job(0, size, first.result(PATIENCE)))
            for rank, link in enumerate(links, 1):
                assert link.recv(len(job.MAGIC), socket.MSG_WAITALL) == job.MAGIC
                made.append(job.Job(rank, size, {0: link}))
        return made[-size:]

    yield make
    for one in made:
        for link in one.links.values():
            link.close()


def together(jobs, block, timeout=PATIENCE):
    def exchanged(one):
        try:
            return one.exchange(block(one.rank), timeout)
        except GroupLost as error:
            return str(error)

    with ThreadPoolExecutor(len(jobs)) as pool:
        return list(pool.map(exchanged, jobs))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_rank_gets_every_block(jobs, size):
    made = jobs(size)
    for turn in range(2):
        found = together(made, lambda rank, turn=turn: bytes([rank, turn]) * 3000)
        assert found == [{rank: bytes([rank, turn]) * 3000 for rank in range(size)}] * size


def test_a_rank_that_ended_is_named_on_all_and_the_exchange_is_over_for_good(jobs):
    first, gone, other = jobs(3)
    gone.links[0].close()
    for _ in range(2):
        for message in together([first, other], lambda rank: b"block"):
            assert "rank 1 has ended" in message


def test_a_rank_that_does_not_come_is_named(jobs):
    first, _, other = jobs(3)
    for message in together([first, other], lambda rank: b"block", 0.3):
        assert "rank 1 did not come in time" in message


def test_a_stranger_is_turned_away_and_the_ranks_meet(hello):
    address, greeting = hello
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(job._meet_all, address, greeting(0), 2, PATIENCE)
        strangers = [job.wait_for_listener(*address, PATIENCE, 0) for _ in range(3)]
        strangers[0].sendall(job.HELLO.pack(job.MAGIC, b"of another job..", 1))
        strangers[1].sendall(greeting(7))
        strangers[2].close()
        rank = job.wait_for_listener(*address, PATIENCE, 0)
        rank.sendall(greeting(1))
        (link,) = first.result(PATIENCE).values()
        assert rank.recv(len(job.MAGIC), socket.MSG_WAITALL) == job.MAGIC
        assert strangers[0].recv(1) == strangers[1].recv(1) == b""
        for one in (*strangers, rank, link):
            one.close()


def test_missing_ranks_are_named(hello):
    address, greeting = hello
    with pytest.raises(GroupLost, match=r"rank\(s\) \[1, 2\] did not come to the job within 0\.1 s"):
        job._meet_all(address, greeting(0), 3, 0.1)


def test_a_port_that_is_taken_is_an_error_with_its_address(hello):
    _, greeting = hello
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(InvalidValue, match="cannot listen at 127"):
        job._meet_all(taken.getsockname(), greeting(0), 2, PATIENCE)


def test_a_first_rank_that_never_listens_is_an_error_in_time(hello):
    with pytest.raises(GroupLost, match=r"rank 0 did not listen at 127\.0\.0\.1:\d+ within 0\.1 s"):
        job.wait_for_listener(*hello[0], 0.1, 0)


def test_what_a_process_of_no_job_lacks_is_named(monkeypatch):
    for name in job._VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(InvalidValue, match=r"PADDLE_TRAINER_ID, .* not set") as raised:
        join_world()
    assert "hal run" in raised.value.cure


@pytest.mark.parametrize("given", [("one", "2", "10.0.0.1:5"), ("1", "", "10.0.0.1:5"), ("1", "2", "10.0.0.1")])
def test_variables_that_describe_no_job_are_named(monkeypatch, given):
    for name, value in zip(job._VARIABLES, (*given, "10.0.0.1:6"), strict=True):
        monkeypatch.setenv(name, value)
    with pytest.raises(InvalidValue, match="PADDLE_TRAINERS_NUM"):
        join_world()


@pytest.mark.parametrize(("endpoint", "host"), [("[::1]:5", "::1"), ("127.0.0.1:5", "127.0.0.1"), (":5", "127.0.0.1")])
def test_a_rank_listens_at_its_own_address(monkeypatch, endpoint, host):
    monkeypatch.setenv("PADDLE_CURRENT_ENDPOINT", endpoint)
    assert job.own_host() == host


def test_a_group_of_one_rank_has_no_collectives():
    with pytest.raises(InvalidValue, match=r"the group \(0,\) has one rank"):
        opened(ALONE)


WORKER = """
import sys
from hal_core import Group, StateConfig
from hal_core.devices import join_world, open_groups
from hal_core.devices.cpu import CpuPlugin
from hal_core.runtime.bound import bind
rank, size = join_world(backend="gloo", timeout=60)
open_groups([range(size)], backend="gloo")
with bind(CpuPlugin.open(0, {})) as device:
    state, group = device.state(StateConfig(num_slots=2, max_model_len=8)), Group(tuple(range(size)), rank)
    stream = device.default_stream
    device.async_set_value(target=state.view("sampled_token_ids"), value=rank + 5, stream=stream).wait()
    device.broadcast_tokens(state=state, group=group, stream=stream).wait()
    copied = device.device.copy_out(state.memory, [state.broadcast_range()], stream)
    copied.wait()
print(rank, int(copied.data[0][64:72].view("i8")[0]), sorted({"paddle", "torch"} & sys.modules.keys()))
"""


def test_a_worker_of_ones_own_opens_its_group_and_imports_no_framework():
    """With the names of version 1.1."""
    with contextlib.ExitStack() as stack:
        ends = [f"127.0.0.1:{stack.enter_context(HeldPort()).number}" for _ in range(3)]
        workers = []
        for rank in range(3):
            variables = {
                "PADDLE_TRAINER_ID": str(rank),
                "PADDLE_TRAINERS_NUM": "3",
                "PADDLE_TRAINER_ENDPOINTS": ",".join(ends),
                "PADDLE_CURRENT_ENDPOINT": ends[rank],
            }
            command = [sys.executable, "-W", "ignore", "-c", WORKER]
            workers.append(subprocess.Popen(command, env=os.environ | variables, stdout=subprocess.PIPE, text=True))
        assert [one.communicate(timeout=PATIENCE)[0] for one in workers] == [f"{rank} 5 []\n" for rank in range(3)]
