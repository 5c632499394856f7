"""In vLLM itself: the same bytes as its own, and what its workers do. Skipped where it is missing."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: make vllm")
ROOT = Path(__file__).parents[3]
COUNT = os.environ.get("HAL_VLLM_COUNT", "30")
QUIET = {"VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "INFO"}


def run(*arguments, timeout=600, **environment):
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, env=os.environ | QUIET | environment, capture_output=True, text=True, timeout=timeout, check=False
    )


def in_worker(code="", **environment):
    """Run what a worker runs before its class is imported, and ``code``."""
    start = "from hal_vllm.plugin import register\nfrom vllm.platforms import current_platform as platform\n"
    start += "import vllm.logger\nvllm.logger._configure_vllm_root_logger()\nregister()\n"
    return run("-c", start + (code or "platform.register_triton_kernel_overrides()\n") + SHOWN, **environment)


SHOWN = """
import sys
from vllm.v1.worker.gpu import block_table, buffer_utils, states
import vllm.config.vllm as config
print("CLASS", {module.StagedWriteTensor.__module__ for module in (block_table, buffer_utils, states)})
"""
OURS, THEIRS = "CLASS {'hal_vllm.buffers'}", "CLASS {'vllm.v1.worker.gpu.buffer_utils'}"


@pytest.mark.parametrize("device", ["cpu", "torch_cpu"])
def test_the_same_bytes_as_vllms_own(device):
    count = COUNT if device == "cpu" else "5"
    done = run("-m", "hal", "vllm", "check", "--device", device, "--count", count, "--first", "100", timeout=7200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "same             _post_update_kernel" in done.stdout


@pytest.mark.conform
def test_the_thirty_sequences_find_every_fault():
    script = str(Path(__file__).with_name("liars.py"))
    done = run(script, timeout=3600)
    assert done.returncode == 0, done.stderr
    found = [line.split()[1].rstrip(":") for line in done.stdout.splitlines() if line.startswith("KILLED")]
    assert found == list(runpy.run_path(script)["LIARS"]), done.stdout


AUTHORS = """
from hal_vllm.batch_kernels import _get_num_sampled_and_rejected_kernel as right
def mine(sampled, rejected, *others):
    right(sampled, rejected, *others)
    rejected += WRONG
KERNELS = {"vllm.v1.worker.gpu.input_batch._get_num_sampled_and_rejected_kernel": mine}
"""


@pytest.mark.parametrize("wrong", [0, 1])
def test_an_authors_kernel_names_its_parameters_as_it_likes_and_a_wrong_one_is_named(tmp_path, wrong):
    (tmp_path / "mine.py").write_text(AUTHORS.replace("WRONG", str(wrong)))
    options = ("--count", "3", "--kernels", "mine:KERNELS")
    done = run("-m", "hal", "vllm", "check", *options, PYTHONPATH=str(tmp_path))
    assert done.returncode == wrong, done.stdout + done.stderr
    assert ("differs          _get_num_sampled_and_rejected_kernel (sequence" in done.stdout) == bool(wrong)
    assert "looks otherwise" not in done.stdout


def test_a_worker_takes_hals_classes_and_says_so_in_one_line():
    done = in_worker()
    assert OURS in done.stdout, done.stderr
    (line,) = [line for line in (done.stdout + done.stderr).splitlines() if "hal (paddle-hal-vllm" in line]
    assert "StagedWriteTensor, UvaBackedTensor, FusedStagedWriter write over cpu" in line
    assert "kernels are torch's operations" in line


def test_twice_changes_nothing():
    done = in_worker("register()\nplatform.register_triton_kernel_overrides()\n" * 2)
    assert done.returncode == 0, done.stderr
    assert OURS in done.stdout
    assert (done.stdout + done.stderr).count("hal (paddle-hal-vllm") == 1


@pytest.mark.parametrize("environment", [{"HAL_VLLM": "off"}, {"VLLM_USE_V2_MODEL_RUNNER": "0"}])
def test_off_gives_vllm_back(environment):
    code = "platform.register_triton_kernel_overrides()\nimport vllm.config.vllm as c; assert not c.HAS_TRITON\n"
    done = in_worker(code, **environment)
    assert done.returncode == 0, done.stderr
    assert THEIRS in done.stdout
    assert "hal (paddle-hal-vllm" not in done.stdout + done.stderr


def test_other_processes_keep_vllms_classes():
    done = in_worker("pass\n")
    assert THEIRS in done.stdout, done.stderr


CHANGED = "import vllm.v1.worker.gpu.input_batch as i\ni._post_update_kernel = lambda x: None\n"
KEPT = """
try:
    platform.register_triton_kernel_overrides()
except Exception as error:
    print("REFUSED", type(error).__name__, error)
import vllm.v1.worker.gpu.sample.gumbel as gumbel
print("KERNEL", type(gumbel._temperature_kernel).__name__)
"""


@pytest.mark.parametrize(
    ("before", "environment", "named"),
    [
        ("", {"HAL_VLLM_DEVICE": "nowhere"}, "DeviceNotFound"),
        ("", {"HAL_VLLM_DEVICE": "torch_cuda"}, "Unavailable torch_cuda"),
        ("type(platform).device_type = ''\n", {}, "Unavailable vLLM 0.32.0 found no device of torch's"),
        (
            "b.UvaBackedTensor = type('Other', (), {})\n",
            {},
            "buffer_utils.UvaBackedTensor is __main__.Other already",
        ),
        ("b.UvaBackedTensor.more = lambda self: None\n", {}, "UvaBackedTensor.more: hal has none"),
        (
            CHANGED,
            {},
            "_post_update_kernel(x): hal knows (idx_mapping_ptr",
        ),
    ],
)
def test_what_cannot_be_replaced_is_named_and_nothing_is(before, environment, named):
    start = "import vllm.v1.worker.cpu.shm\nimport vllm.v1.worker.gpu.buffer_utils as b\n"
    done = in_worker(start + before + KEPT, **environment)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("REFUSED")]
    assert named in line, done.stdout + done.stderr
    assert "(" in line, "no cure"
    assert "KERNEL function" in done.stdout
    assert "hal_vllm.buffers" not in done.stdout


def test_a_request_that_needs_another_kernel_is_refused_where_it_arrives():
    code = "from vllm.sampling_params import SamplingParams as Params\nplatform.validate_request({}, Params())\n"
    done = in_worker(code + "platform.validate_request({}, Params(thinking_token_budget=5))\n")
    assert done.returncode == 1
    assert "thinking_token_budget: it needs the kernel vllm.v1.worker.gpu.sample.thinking_budget._thin" in done.stderr


def test_an_unknown_signature_is_taken_when_it_is_wanted():
    start = "import vllm.v1.worker.cpu.shm\nimport vllm.v1.worker.gpu.buffer_utils as b\n"
    more = "b.UvaBackedTensor.more = lambda self: None\nplatform.register_triton_kernel_overrides()\n"
    assert OURS in in_worker(start + more, HAL_VLLM_UNTESTED="1").stdout


@pytest.mark.conform
def test_the_same_tokens_in_the_engine():
    script, model = ROOT / "adapters/vllm/proof/engine.py", ROOT / "engine/src/hal_engine/model/default"
    done = run(str(script), str(model), timeout=3600, VLLM_LOGGING_LEVEL="ERROR")
    assert done.returncode == 0, done.stdout[-4000:]
