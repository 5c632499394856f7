"""The four hazards of Paddle (docs/conformance.md), pinned on the shared base of our Paddle-backed devices.

The base runs on the simulated accelerator, as late as possible and with pageable memory read when the copy runs, which
is where each hazard shows. Without Paddle or a compiler these tests are skipped.
"""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ADVERSARIAL = {"HALSIM_MODE": "2", "HALSIM_STAGED": "0", "HALSIM_SYNC_DRAINS": "0", "HALSIM_DEVICES": "2"}


@pytest.fixture(scope="module")
def answers():
    """The answers of the probes, by name: all from one process, which imports Paddle."""
    pytest.importorskip("paddle")
    build = pytest.importorskip("hal_sim.build")
    from hal_core.errors import HalError

    try:
        build.paddle_device()
    except HalError as error:
        pytest.skip(str(error))

    environment = os.environ | ADVERSARIAL | {"HAL_HAL_SIM_PLACE": "sim", "GLOG_minloglevel": "1"}
    command = [sys.executable, str(HERE / "paddle_hazards.py"), "views", "lifetime", "between"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_copies_go_into_contiguous_targets_alone(answers):
    """``strided_view.copy_(cpu_tensor)`` runs a CPU kernel on device memory, or writes over the neighbours."""
    found = answers["views"]
    assert found["copies"] > 0, "the probe saw no copy, so it shows nothing"
    assert found["strided"] == 0
    assert found["wrong"] == []


def test_no_device_of_ours_gathers_into_a_list():
    """``paddle.distributed.all_gather`` copies out before the communication stream is done: poison, or stale data."""
    callers = []
    for path in [
        *ROOT.glob("core/src/**/*.py"),
        *ROOT.glob("plugins/*/src/**/*.py"),
        *ROOT.glob("hal/**/*.py"),
        *ROOT.glob("engine/src/**/*.py"),
        *ROOT.glob("adapters/*/src/**/*.py"),
    ]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr == "all_gather":
                callers.append((str(path.relative_to(ROOT)), ast.unparse(node.value)))
    assert [one for one in callers if "dist" in one[1] or "paddle" in one[1]] == []


def test_what_is_uploaded_lives_in_the_staging_ring_until_it_has_been_read(answers):
    """Paddle does not keep the host source of an asynchronous copy alive."""
    found = answers["lifetime"]
    assert found["uploads"] > 0, "the probe saw no upload, so it shows nothing"
    assert found["outside"] == 0
    assert found["wrong"] == []


def test_a_tensor_of_another_device_is_refused_or_waited_for(answers):
    """``_copy_to(other_device, False)`` is not ordered after pending work on the source's own stream."""
    found = answers["between"]
    assert found["queued"] == [], "an unordered copy between devices"
    assert found["said"] != "taken" or found["got"] == [5, 6, 7, 8]
