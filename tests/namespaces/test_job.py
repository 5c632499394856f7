"""``hal run --workers`` on two hosts: the tokens of one process, whatever the cable between them does."""

import json
import subprocess
import sys

import pytest

from tests.namespaces.hosts import Hosts, why_not

pytestmark = [pytest.mark.long(80), pytest.mark.conform]
HAL = ("-W", "ignore", "-c", "from hal.cli import main; main()")
PROMPTS = tuple(
    part
    for text in ("def main(", "import os", "class Reader:\n    def ", "x = [", "for")
    for part in ("--prompt", text)
)
LONG = ("--slots", "2", "--max-tokens", "40", "--json", "--logprobs", "1", "--speculate", "mtp", "--chunk", "3")
PATIENCE = 240


@pytest.fixture(scope="module")
def alone():
    """What one process prints."""
    done = subprocess.run([sys.executable, *HAL, "run", *PROMPTS, *LONG], capture_output=True, timeout=PATIENCE)
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture
def hosts():
    if why_not():
        pytest.skip(why_not())
    with Hosts() as made:
        yield made


class Job:
    """A prefill worker beside the engine, a decode worker on the other host."""

    def __init__(self, hosts, tmp_path, *more):
        self.key, self.hosts = tmp_path / "key", hosts
        self.workers, self.urls = [], []
        for host, role in zip(hosts.all, ("prefill", "decode"), strict=True):
            arguments = ("worker", "--role", role, "--listen", f"tcp://{host.address}:*", "--key", self.key, *more)
            self.workers.append(self.start(host, *arguments))
            self.urls.append(self.workers[-1].stderr.readline().split()[-1])

    def start(self, host, *arguments, **options):
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return host.start(*HAL, *arguments, text=True, **pipes, **options)

    def run(self, *arguments, urls=None, **options):
        """The engine, on the first host."""
        told = ("--workers", ",".join(urls or self.urls), "--key", self.key)
        return self.start(self.hosts.all[0], "run", *told, *arguments, **options)

    def check_ended(self):
        """All workers have ended well."""
        for worker in self.workers:
            assert worker.wait(PATIENCE) == 0, worker.stderr.read()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for worker in self.workers:
            worker.kill()
            with worker:
                pass


def compare(out, alone):
    """The same tokens, and log-probabilities within 1e-4."""
    found = [json.loads(line) for line in out.splitlines()]
    assert [one["token_ids"] for one in found] == [one["token_ids"] for one in alone]
    for one, other in zip(found, alone, strict=True):
        for its, mine in zip(one["logprobs"], other["logprobs"], strict=True):
            assert its["logprob"] == pytest.approx(mine["logprob"], abs=1e-4)


def test_the_job_on_two_hosts_prints_what_one_process_does_whatever_the_cable_does(hosts, tmp_path, alone):
    """It loses 5 % of the packets all the time, and is pulled for 3 s when the first answer is there."""
    with Job(hosts, tmp_path) as job:
        hosts.lose(20)
        engine = job.run(*PROMPTS, *LONG)
        first = engine.stdout.readline()  # the others are under way, or wait for a slot
        hosts.cut(3)
        out, err = engine.stdout.read(), engine.stderr.read()  # communicate() would not see what was read ahead
        with engine:
            assert engine.wait(PATIENCE) == 0, err
        job.check_ended()
        compare(first + out, alone)
        assert "split 1,1 of tp 1" in err
        assert "lost" not in err
    assert sum(host.sent_again() for host in hosts.all) > 0


def test_the_job_on_two_hosts_of_two_ranks_each(hosts, tmp_path, alone):
    with Job(hosts, tmp_path, "--tp", "2") as job:
        engine = job.run(*PROMPTS, *LONG, "--tp", "2")
        out, err = engine.communicate(timeout=PATIENCE)
        assert engine.returncode == 0, err
        job.check_ended()
        compare(out, alone)
