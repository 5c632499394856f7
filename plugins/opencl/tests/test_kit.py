"""The conformance kit and the main job on the opencl device, in separate processes."""

import json
import os
import re

import pytest
from hal_conformance.harness.isolated import KitProcess

from tests.commands import LIBRARIES

pytestmark = pytest.mark.long(30)
HANGS = 900
"""Seconds after which a run of the kit counts as hung, on a busy machine."""
SOME = "G1,G2,G3,G4,G5,G6,G9"
SKIPPED_BY_NEED = {"several_ranks", "several_memories", "four_ranks", "not async_h2d", "not can_hold_stream"}
SKIPPED_BY_NEED |= {"timed_events"}


@pytest.mark.whole_kit
@pytest.mark.parametrize(
    "options", [(f"--hal-only={SOME}", "--hal-examples=2"), pytest.param((), marks=pytest.mark.conform)]
)
def test_the_conformance_kit_on_an_opencl_driver(runtime, options):
    # g27 reads the sources of the core: once, for cpu, is enough
    with KitProcess("opencl", "--hal-profile=quick", "--hal-hang=60", "-k", "not g27", *options) as run:
        found = run.report(HANGS)
    assert (found["header"]["device"], found["header"]["capabilities"]["substituted"]) == ("opencl:0", "")
    tests = [test for entry in found["guarantees"] for test in entry["tests"]]
    reasons = {test["reason"].removeprefix("needs ") for test in tests if test["outcome"] == "skipped"}
    # what a machine has too little memory for: PoCL gives one buffer at most a share of the host's memory
    allowed = re.compile(
        r"several ranks|bytes of a state that steps: past 2 GiB"
        r"|opencl:0: frameworks cannot use the addresses of its memory|\d+ GiB of free memory"
        r"|a device with \d+ GiB to give: opencl:0: .* \(BUFFER_SIZE\)"
    )
    assert {reason for reason in reasons if not allowed.match(reason)} <= SKIPPED_BY_NEED
    assert {test["outcome"] for test in tests} <= {"passed", "skipped"}


WARM = LIBRARIES
RUN = "from hal.cli import main; main()"


def test_the_main_job_gives_the_tokens_of_the_cpu(runtime, warm):
    prompts = ["--prompt", "def main(", "--prompt", "for i in range(", "--prompt", "with open("]
    options = [*prompts, "--max-tokens", "12", "--slots", "2", "--json", "--temperature", "0.8", "--seed", "7"]
    answers = {}
    for device in ("cpu", "opencl"):
        done = warm.run("run", "--device", device, *options, code=RUN, env=dict(os.environ))
        assert done.returncode == 0, done.stderr[-2000:]
        answers[device] = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        assert {answer["device"]["name"] for answer in answers[device]} == {f"{device}:0"}
    tokens = {device: [answer["token_ids"] for answer in answers[device]] for device in answers}
    assert [len(row) for row in tokens["cpu"]] == [12, 12, 12]
    assert tokens["opencl"] == tokens["cpu"]
