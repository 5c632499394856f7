"""The scenarios of four pull requests, replayed through the drop-in, with and without each one's fix."""

import importlib.util
import shutil
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import hal
from tests.ranks import ForkedRanks

HERE = Path(__file__).parent


def module(name):
    """A module of this folder."""
    spec = importlib.util.spec_from_file_location(f"seeds_{name}", HERE / f"{name}.py")
    found = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.fixture(scope="module")
def pair():
    with ForkedRanks(2) as pool:
        yield pool


def ranks_agree(found):
    """Seed 000: both ranks feed the same tokens, counts, steps and flags."""
    (first, *_), (second, *_) = found.values()
    assert first == second, "the ranks sampled apart"


def one_rank_sends(found):
    """Seed 001: the engine gets each step once, and the launch is predicted from the slots."""
    (_, first, counted), (_, second, also) = found.values()
    assert (len(first), len(second)) == (3, 0), "a step was sent more than once"
    assert counted[0] == counted[1] == also[0] == 16


SCENARIOS = {"000": ranks_agree, "001": one_rank_sends}


@pytest.mark.parametrize("seed", SCENARIOS)
def test_two_ranks_agree(pair, seed):
    """Pull requests 7096 (tokens broadcast after sampling) and 7172 (other ranks sent too; launch prediction)."""
    pytest.importorskip("paddle")
    SCENARIOS[seed](pair.run(module("ranks_of_seeds").run, ""))


@pytest.mark.parametrize("seed", SCENARIOS)
def test_two_ranks_fail_without_the_fix(pair, seed):
    pytest.importorskip("paddle")
    found = pair.run(module("ranks_of_seeds").run, seed)
    with pytest.raises(AssertionError, match=r"sampled apart|more than once"):
        SCENARIOS[seed](found)


# The large message needs raised limits, in an IPC namespace of its own.
FIRST_TOKENS = """
    import os, sys, tempfile
    import numpy as np
    folder, fixed = sys.argv[1:]
    sys.path.insert(0, folder)
    for name, value in (("msgmax", "1048576"), ("msgmnb", "16777216")):
        open(f"/proc/sys/kernel/{name}", "w").write(value)
    import legacy_reader as legacy
    from hal_fastdeploy import saving
    from hal_engine.transport import open_sink
    if fixed == "False":
        saving._logprobs = lambda *given: {}
    here = tempfile.mkdtemp()
    reader = legacy.LegacyQueue(legacy.custom_ftok(here, 5), "speculate_get_output_topk")
    operations = saving.SaveOutput(lambda layout: open_sink(f"sysv://{here}?layout={layout}&id=5"))
    rows = lambda *values: np.array(values, np.int64)
    ids, scores = rows([1, 20], [5, 21]), np.array([[-1, -2], [-3, -4]], np.float32)
    operations.mtp_save_first_token_with_topk(
        rows([1, 2], [3, 4], [5, 6]), ids, scores, rows(0, 3), rows(1, 0, 1), rows(0, 1, 1), np.array([True]),
        rows([4], [2], [4]), rows([4], [4], [4]), np.zeros((3, 1), np.int32), 3, 0, False,
    )
    found = legacy.parse_speculative_topk_today(reader.receive(wait=True))
    operations.close(5)
    assert found["counts"] == [2, 0, 2], found["counts"]
    assert [slot[0] for slot in (found["scores"][0], found["scores"][2])] == [[-1.0, -2.0], [-3.0, -4.0]], "no scores"
    assert found["tokens"] == [[[1, 20], [2, -1]], [], [[5, 21], [6, -1]]]
"""


@pytest.mark.parametrize("fixed", [True, False])
def test_first_tokens_of_a_prefill_node_have_log_probabilities(fixed):
    """Pull request 7442, read from the queue as FastDeploy reads it: without the fix the first token has no scores."""
    pytest.importorskip("sysv_ipc")
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-i", "true"], check=False).returncode:
        pytest.skip("no IPC namespace can be made here")
    command = ["unshare", "-i", sys.executable, "-c", textwrap.dedent(FIRST_TOKENS), str(HERE), str(fixed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == (0 if fixed else 1), done.stderr
    assert ("no scores" in done.stderr) is not fixed, done.stderr


def decode_requests_enter(device, up):
    """Seed 003: 128 requests of the decode role enter beside a held step, without any wait."""
    from hal_fastdeploy import Insertion

    tensors, own = up.target_arrays("mtp"), up.proposer_arrays("mtp")
    placed, placed_own = up.OnDevice(device, tensors), up.OnDevice(device, own)
    options = {"method": "mtp", "role": "decode", "cached": 8}
    runner, reference = (
        up.runner_of(placed.views, placed_own.views, **options),
        up.runner_of(tensors, own, **options),
    )
    insertion = Insertion(device, runner, lambda *given: None)
    requests = [
        up.Request(
            up.PREFILL, slot, f"r{slot}", prompt_token_ids=[4, 5, 6], output_token_ids=[9], prefill_start_index=3,
            prefill_end_index=4, block_tables=[slot], eos_token_ids=[2, 5], draft_token_ids=[9, 7],
        )
        for slot in range(128)
    ]  # fmt: skip
    with device.device.hold_stream(device.default_stream):
        before = device.counters()
        ticket = insertion(requests, 128)
        cost = device.counters() - before
        assert not ticket.done()
    assert (cost.launches, cost.submissions <= 2, cost.host_waits) == (1, True, 0), "more than one submission"
    ticket.wait()
    up.insert(reference, requests, 128)
    for name, array in placed.read().items():
        np.testing.assert_array_equal(array, reference.share_inputs[name], err_msg=name)


@pytest.mark.parametrize("fixed", [True, False])
def test_128_decode_requests_are_one_submission_beside_a_held_step(monkeypatch, fixed):
    """Pull request 7323; without the fix every tensor is a submission."""
    pytest.importorskip("hal_sim", reason="paddle-hal-sim is not installed: pip install ./plugins/sim")
    up = module("upstream")
    monkeypatch.setitem(up.SIZES, "n", 128)
    with hal.open_device("sim") as device:
        if fixed:
            decode_requests_enter(device, up)
            return
        alone = replace(device.device.capabilities, several_memories=False)
        monkeypatch.setattr(device.device, "capabilities", alone)
        with pytest.raises(AssertionError, match="more than one submission"):
            decode_requests_enter(device, up)
