"""vLLM's server in its three processes, over hal, under the openai client. Skipped where vLLM is missing."""

from __future__ import annotations

import contextlib
import os
import re
import runpy
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: make vllm"),
    pytest.mark.conform,
]
ROOT = Path(__file__).parents[3]
V2 = {"VLLM_USE_V2_MODEL_RUNNER": "1", "HAL_VLLM_REQUIRE": "1"}
PROMPTS = ["def main(", "class Stack:", "import os\n", "    return self.", "for i in range("]
READY = "Application startup complete"


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    runnable = runpy.run_path(str(ROOT / "adapters/vllm/proof/engine.py"))["runnable"]
    return runnable(ROOT / "engine/src/hal_engine/model/default", tmp_path_factory.mktemp("model"))


def started(model, *options, **environment):
    """Start a server, and return its process, its port and its log up to the start, or to its end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    quiet = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    quiet["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # else vLLM asks for a NUMA node for each rank
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port)]
    command += ["--host", "127.0.0.1", "--dtype", "float32", "--max-model-len", "512", "--block-size", "32"]
    command += ["--enforce-eager", "--kv-cache-memory-bytes", str(64 << 20), "--served-model-name", "m", *options]
    process = subprocess.Popen(
        command, env=os.environ | quiet | environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    log = ""
    for line in process.stdout:
        log += line
        if READY in line:
            break
    return process, port, log


@contextlib.contextmanager
def serving(model, *options, **environment):
    """Yield the port and the log of a server that started."""
    process, port, log = started(model, *options, **environment)
    try:
        assert READY in log, log[-4000:]
        while process.poll() is None:  # it listens a moment later
            with contextlib.suppress(urllib.error.URLError), page(port, "health"):
                break
        yield port, log
    finally:
        process.terminate()
        process.communicate(timeout=120)


def answers(port):
    """Return the texts of greedy requests of several kinds, and of seeded ones; one request is left in the middle."""
    import openai

    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=300) as client:
        greedy = {"model": "m", "temperature": 0}
        left = client.completions.create(prompt="while True:", max_tokens=400, stream=True, **greedy)
        next(iter(left))
        left.close()
        texts = [one.text for one in client.completions.create(prompt=PROMPTS, max_tokens=40, **greedy).choices]
        for options in ({"presence_penalty": 0.9}, {"logit_bias": {"40": 5}}, {"logprobs": 3}, {"stop": ["\n"]}):
            texts.append(
                client.completions.create(prompt=PROMPTS[0], max_tokens=30, **options, **greedy).choices[0].text
            )
        streamed = client.completions.create(prompt=PROMPTS[1], max_tokens=40, stream=True, **greedy)
        texts.append("".join(part.choices[0].text for part in streamed))
        several = {"model": "m", "prompt": PROMPTS, "max_tokens": 30, "n": 4, "seed": 7, "top_p": 0.9}
        return texts, [one.text for one in client.completions.create(**several).choices]


def page(port, name):
    """Open a page of a server."""
    return urllib.request.urlopen(f"http://127.0.0.1:{port}/{name}", timeout=60)


def figures(port):
    """Return hal's figures under /metrics, summed over the workers."""
    with page(port, "metrics") as read:
        found = re.findall(r"^hal_vllm_(\w+)_total\{.*\} (\S+)$", read.read().decode(), re.MULTILINE)
    return {name: sum(float(value) for other, value in found if other == name) for name, _ in found}


@pytest.fixture(scope="session")
def own(model):
    """The answers over vLLM's own buffers."""
    with serving(model, **V2, HAL_VLLM="kernels") as (port, log):
        assert "left: vLLM's own buffers" in log
        assert figures(port) == {}
        return answers(port)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_server_gives_the_texts_of_vllms_own_buffers(model, own, ranks):
    with serving(model, "--tensor-parallel-size", str(ranks), **V2) as (port, log):
        assert log.count("hal (paddle-hal-vllm") == ranks
        greedy, seeded = answers(port)
        assert greedy == own[0]
        assert seeded == own[1] or ranks > 1, "the sums of two ranks are not those of one"
        shown = figures(port)
    assert shown["steps"] >= shown["submissions"] > 10 * ranks
    assert shown["tensors"] > shown["submissions"]


def test_a_device_that_fails_to_open_ends_the_server_with_its_name_and_the_cure(model):
    process, _, log = started(model, HAL_VLLM_DEVICE="torch_cuda", **V2)
    process.communicate(timeout=120)
    assert process.returncode != 0
    assert READY not in log
    assert re.search(r"hal_core\S*Unavailable: torch_cuda: .*\(.*\)", log), log[-4000:]
