"""``hal run --launcher ray`` on Ray's own test cluster: several nodes on this host, some of them killed."""

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile

import pytest

import hal
from tests.commands import RUN, environment, left_in

PROMPTS = [f"def function_{number}(" for number in range(24)]
SAMPLING = ("--temperature", "0.7", "--seed", "1", "--max-tokens", "72", "--slots", "2", "--json", "-v")
KILLS = int(os.environ.get("HAL_TEST_KILLS", "2"))
"""Nodes that are killed in one run."""


@pytest.fixture(scope="module")
def cluster():
    """A head without CPUs, and two nodes of one CPU each: two ranks never share a node."""
    pytest.importorskip("ray", reason="ray is not installed: pip install 'ray>=2.40'")
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    for _ in range(2):
        made.add_node(num_cpus=1)
    yield made
    made.shutdown()


@contextlib.contextmanager
def nodes(cluster, count):
    """``count`` nodes, and two afterwards."""
    for _ in range(count - 2):
        cluster.add_node(num_cpus=1)
    try:
        yield
    finally:
        for _ in range(count - 2):
            cluster.remove_node(next(iter(cluster.worker_nodes)))


def kill_nodes(cluster, count, process):
    """``count`` nodes are killed and others added; ``process`` is stopped meanwhile: a fast model would end."""
    process.send_signal(signal.SIGSTOP)
    for _ in range(count):
        cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
    for _ in range(count):
        cluster.add_node(num_cpus=1)
    process.send_signal(signal.SIGCONT)


def start(folder, *arguments, stderr=subprocess.PIPE, **variables):
    command = [sys.executable, "-c", RUN, "run", *arguments]
    more = environment(folder, **variables)
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=more)


def finished(folder, *arguments, **variables):
    """Run a command to its end: status, standard output, standard error."""
    process = start(folder, *arguments, **variables)
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def answers(out):
    found = [json.loads(line) for line in out.splitlines()]
    return {one["prompt"]: one["token_ids"] for one in found}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The answers of one process."""
    status, out, err = finished(tmp_path_factory.mktemp("alone"), *prompts(), *SAMPLING)
    assert status == 0, err
    return answers(out)


def prompts():
    return [word for text in PROMPTS for word in ("--prompt", text)]


def on_ray(cluster, *arguments):
    return [*prompts(), *SAMPLING, "--launcher", "ray", "--ray-address", cluster.address, *arguments]


TP = ("--tp", "2", "--ray-placement", "strict-spread")


@pytest.mark.conform
@pytest.mark.parametrize(
    ("count", "how"),
    [(2, TP), (2, ("--split", "1,1")), (2, ("--dp", "2")), (3, ("--split", "2,1")), (3, ("--dp", "3"))],
)
def test_ranks_on_several_nodes_give_the_tokens_of_one_process(cluster, alone, tmp_path, count, how):
    with nodes(cluster, count):
        status, out, err = finished(tmp_path, *on_ray(cluster, *how))
    assert status == 0, err
    assert answers(out) == alone
    assert left_in(tmp_path) == []


@pytest.mark.conform
@pytest.mark.parametrize(("count", "how"), [(2, TP), (2, ("--split", "1,1")), (3, TP), (3, ("--split", "2,1"))])
def test_killed_nodes_lose_and_double_no_token(cluster, alone, tmp_path, count, how):
    """After each answer that is shown all nodes but one are killed, so a rank's is among them, and others added.

    A dead node that Ray has not reported yet may get a rank again, which costs one more restart."""
    with nodes(cluster, count), (tmp_path / "err").open("w+") as err:
        process = start(tmp_path, *on_ray(cluster, *how, "--restart", str(3 * KILLS * (count - 1))), stderr=err)
        lines = []
        for _ in range(KILLS):
            lines.append(process.stdout.readline())
            assert lines[-1], (process.wait(60), (tmp_path / "err").read_text())
            kill_nodes(cluster, count - 1, process)
        out, _ = process.stdout.read(), process.stdout.close()
        assert process.wait(60) == 0, (tmp_path / "err").read_text()
        assert "started again" in (tmp_path / "err").read_text()
    assert answers("".join(lines) + out) == alone


@pytest.mark.conform
def test_a_lost_node_is_named(cluster, tmp_path):
    process = start(tmp_path, *on_ray(cluster, *TP))
    process.stdout.readline()
    kill_nodes(cluster, 1, process)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 1
    assert re.search(r"rank \d \(node [\d.]+ [0-9a-f]{12}\) was lost", err)
    assert "not delivered" in err


@pytest.mark.conform
def test_a_placement_that_cannot_be_met_names_what_the_nodes_have(cluster, tmp_path):
    status, _, err = finished(tmp_path, *on_ray(cluster, "--tp", "2"), HAL_RANKS_STARTING="10")  # both on one node
    assert status == 1
    assert "were not placed within 10 s: a group needs 2 times 1 CPU (STRICT_PACK)" in err
    assert "the nodes have" in err


@pytest.mark.conform
def test_a_cluster_of_its_own_names_the_missing_resource_at_once(tmp_path):
    """It fails at once: no node will join a cluster that the command has started itself."""
    pytest.importorskip("ray", reason="ray is not installed: pip install 'ray>=2.40'")
    pytest.importorskip("hal_cuda", reason="hal_cuda is not installed: pip install ./plugins/cuda")
    given = ("--prompt", "x", "--tp", "2", "--launcher", "ray", "--device", "cuda")
    more = {"RAY_ADDRESS": "", "CUDA_VISIBLE_DEVICES": "", "HAL_RANKS_STARTING": "3600"}
    with tempfile.TemporaryDirectory(prefix="hal-") as short:  # contains Ray's sockets, whose paths have 107 bytes
        status, out, err = finished(tmp_path, *given, TMPDIR=short, **more)
    assert (status, out) == (1, ""), err
    assert "the Ray cluster has 0 GPU, and the ranks need 2" in err


def test_an_asyncio_engine_on_ray_gives_the_text_of_one_process(cluster):
    async def texts():
        ranks = hal.Ranks(tp=2, launcher="ray", ray_address=cluster.address, ray_placement="strict-spread")
        async with hal.AsyncEngine(device="cpu", executor=ranks) as engine:
            return await asyncio.gather(*(text_of(engine, prompt) for prompt in PROMPTS[:3]))

    async def text_of(engine, prompt):
        params = {"max_tokens": 12, "temperature": 0.0}
        return "".join([part.text async for part in engine.generate(prompt, params)])

    assert asyncio.run(texts()) == hal.generate(PROMPTS[:3], device="cpu", max_tokens=12, temperature=0.0)


def test_nothing_imports_ray_without_the_option(tmp_path):
    code = """
import importlib, pkgutil, sys
import hal.cli, hal_engine.distributed
for package in (hal.cli, hal_engine.distributed):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
print("ray" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60, env=environment(tmp_path)
    )
    assert done.stdout == "False\n"


@pytest.mark.conform
def test_no_cluster_at_an_address_is_one_line(tmp_path):
    pytest.importorskip("ray", reason="ray is not installed: pip install 'ray>=2.40'")
    given = ("--prompt", "x", "--tp", "2", "--launcher", "ray", "--ray-address", "127.0.0.1:1")
    status, _, err = finished(tmp_path, *given)
    assert (status, err.count("\n")) == (2, 1), err
    assert "no Ray cluster at 127.0.0.1:1" in err


@pytest.mark.parametrize(
    ("arguments", "refusal"),
    [
        (("--launcher", "slurm", "--tp", "2"), "--launcher: 'slurm' (give local or ray)"),
        (("--launcher", "ray"), "--launcher: needs more than one rank"),
        (("--ray-address", "auto", "--tp", "2"), "--ray-address: needs --launcher ray"),
        (("--ray-placement", "spread", "--tp", "2"), "--ray-placement: needs --launcher ray"),
        (("--ray-placement", "wide", "--tp", "2", "--launcher", "ray"), "--ray-placement: 'wide'"),
        (("--launcher", "ray", "--tp", "2", "--share-devices"), "--share-devices: it does not go with --launcher ray"),
        (("--launcher", "ray", "--tp", "2", "--device", "xpu"), "--launcher: Ray does not assign devices of kind xpu"),
    ],
)
def test_options_that_do_not_fit_are_refused_by_name(capsys, arguments, refusal):
    from hal.cli import main

    with pytest.raises(SystemExit) as end:
        main(["run", "--prompt", "x", *arguments])
    assert end.value.code == 2
    assert refusal in capsys.readouterr().err
