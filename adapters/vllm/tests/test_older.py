"""vLLM 0.24, as its wheel's Python files are, beside the installed torch: what its workers do. Nothing of it is run."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
OLDER = Path(os.environ.get("HAL_VLLM_OLDER") or ROOT / ".venv-vllm/vllm-0.24.0")
pytestmark = pytest.mark.skipif(
    not (OLDER / "vllm").is_dir() or find_spec("vllm") is None, reason="vLLM 0.24's wheel is not here: make vllm"
)

WORKER = """
import os, sys
sys.path.insert(0, sys.argv[1])
from hal_vllm.checking import interpreted
if sys.argv[3] == "triton":
    interpreted()
os.environ["HAL_VLLM"] = "on"
import vllm.platforms
type(vllm.platforms.current_platform).device_type = sys.argv[2]
from vllm.v1.worker.gpu import buffer_utils
{change}
from hal_vllm.plugin import register
register()
register()
import vllm.v1.worker.worker_base as worker
for _ in range(2):
    try:
        worker.resolve_obj_by_qualname("vllm.v1.worker.gpu.model_runner.GPUModelRunner")
    except Exception as error:
        print("REFUSED", type(error).__name__, error)
from vllm.v1.worker.gpu import block_table, states
classes = {{each.StagedWriteTensor.__module__ for each in (block_table, buffer_utils, states)}}
print("CLASS", classes, worker.resolve_obj_by_qualname.__module__)
"""
OURS = "CLASS {'hal_vllm.buffers'}"


def worker(device="cpu", triton="triton", change="", **environment):
    """Run what a worker of vLLM 0.24 runs before its class is imported, twice, on a platform of this torch device."""
    given = {"VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1", "HAL_VLLM_REQUIRE": "1"} | environment
    command = [sys.executable, "-c", WORKER.format(change=change), str(OLDER), device, triton]
    return subprocess.run(
        command, env=os.environ | given, capture_output=True, text=True, timeout=600, check=False
    ).stdout


def test_a_worker_takes_hals_classes():
    assert OURS in (out := worker()), out
    assert "REFUSED" not in out


@pytest.mark.parametrize(
    ("device", "triton", "change", "named"),
    [
        ("", "triton", "", "Unavailable vLLM 0.24.0 found no device of torch's on this machine (install"),
        ("cpu", "no", "", "Unavailable hal's kernels need vLLM's register_kernels, which this version lacks (in"),
        ("cpu", "triton", "buffer_utils.UvaBackedTensor.more = lambda self: None", "UvaBackedTensor.more: hal has no"),
    ],
)
def test_what_cannot_be_replaced_is_named_and_nothing_is(device, triton, change, named):
    out = worker(device, triton, change)
    assert f"REFUSED {named}" in out or (named in out and "REFUSED Unavailable vLLM 0.24.0 differs" in out), out
    assert OURS not in out


def test_an_unknown_signature_is_taken_when_it_is_wanted():
    change = "buffer_utils.UvaBackedTensor.more = lambda self: None"
    assert OURS in worker(change=change, HAL_VLLM_UNTESTED="1")
