"""``hal run`` as ranks that a launcher of the user's has started: each is a process with the launcher's variables."""

from __future__ import annotations

import contextlib
import json
import socket

import pytest
from hal_core.devices import HeldPort

from hal.cli import main
from tests.commands import environment, left_in, start

PROMPT = ("--prompt", "def main(", "--temperature=0", "--max-tokens", "6", "--json")
PATIENCE = 120


def ranks(folder, *arguments, hosts=("127.0.0.1", "127.0.0.1"), first=None, **more):
    """Start two ranks with these arguments, one list for both or one for each; status and both outputs of each.
    ``first``: the port of the first one's endpoint, unless a free one will do."""
    with contextlib.ExitStack() as stack:
        ports = [stack.enter_context(HeldPort()).number for _ in range(3)]
        return on_ports(folder, arguments, hosts, [first or ports[0], *ports[1:]], more)


def on_ports(folder, arguments, hosts, ports, more):
    endpoints = [f"{host}:{port}" for host, port in zip(hosts, ports, strict=False)]
    processes = []
    for rank in range(2):
        told = {
            "PADDLE_TRAINER_ID": str(rank),
            "PADDLE_TRAINERS_NUM": "2",
            "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
            "PADDLE_CURRENT_ENDPOINT": endpoints[rank],
            "PADDLE_MASTER": f"127.0.0.1:{ports[2]}",
            "PADDLE_DISTRI_BACKEND": "gloo",
            "OMP_NUM_THREADS": "1",
            **more,
        }
        own = arguments if isinstance(arguments[0], str) else arguments[rank]
        processes.append(start(folder, "run", *own, env=environment(folder, **told)))
    answers = []
    for process in processes:
        with process:
            out, err = process.communicate(timeout=PATIENCE)
            answers.append((process.returncode, out, err))
    assert left_in(folder) == []
    return answers


@pytest.mark.conform
@pytest.mark.parametrize("hosts", [("127.0.0.1", "127.0.0.1"), ("127.0.0.1", "127.0.0.2")])
def test_they_print_what_one_rank_does(tmp_path, capsys, hosts):
    """On one host over ipc; on several, of which one has two names here, over tcp with keys and a secret."""
    with contextlib.suppress(SystemExit):
        main(["run", "--device", "cpu", *PROMPT])
    alone = json.loads(capsys.readouterr().out)
    (status, out, err), (other, silent, _) = ranks(
        tmp_path, *PROMPT, "--tp", "2", hosts=hosts, HAL_RANKS_SECRET="s" * 32 * (hosts[0] != hosts[1])
    )
    assert (status, other) == (0, 0), err
    assert json.loads(out)["token_ids"] == alone["token_ids"]
    assert silent == ""


def refused(answers):
    """The one error with which all ranks have ended."""
    assert [status for status, *_ in answers] == [2, 2]
    told = [{line for line in err.splitlines() if line.startswith("hal: error")} for *_, err in answers]
    assert told[0] == told[1]
    assert len(told[0]) == 1
    return told[0].pop()


def test_another_number_of_ranks_is_refused_on_each(tmp_path):
    said = refused(ranks(tmp_path, *PROMPT, "--tp", "2", "--dp", "2"))
    assert said.startswith("hal: error: --tp: --tp times --dp is 4, and the launcher has started 2 ranks")


@pytest.mark.conform
def test_a_world_that_cannot_share_out_the_heads_is_refused_on_each(tmp_path):
    said = refused(ranks(tmp_path, *PROMPT, "--tp", "3"))
    assert "3 ranks cannot share out num_attention_heads = 4" in said


@pytest.mark.conform
def test_ranks_that_were_told_different_things_are_refused_on_each(tmp_path):
    said = refused(ranks(tmp_path, [*PROMPT, "--tp", "2"], [*PROMPT, "--tp", "1", "--dp", "2"]))
    assert "the ranks differ in their options: rank 0 has" in said


def test_several_hosts_without_a_secret_are_refused_on_each(tmp_path):
    said = refused(ranks(tmp_path, *PROMPT, "--tp", "2", hosts=("127.0.0.1", "127.0.0.2"), HAL_RANKS_SECRET=""))
    assert "HAL_RANKS_SECRET: the ranks are on 2 hosts (127.0.0.1, 127.0.0.2), and it is not set" in said


def test_a_busy_port_is_refused_by_name(tmp_path):
    """Another program listens on rank 0's endpoint, accepts connections, and sends no data."""
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        more = {"HAL_RANKS_STARTING": "1"}
        (first, _, said), (other, _, waited) = ranks(tmp_path, *PROMPT, "--tp", "2", first=port, **more)
    assert first == 2
    assert f"port {port} of 127.0.0.1, rank 0's endpoint, is taken by another program" in said
    assert other != 0
    assert f"rank 1 did not meet the others within 1 s at rank 0's endpoint 127.0.0.1:{port}" in waited
