"""Everything that proves the cuda device on the hardware, in one go; what cannot run here says why.

    python plugins/cuda/proof/prove.py [evidence.json]

Run it where GPU Paddle is installed for the kit with Paddle tensors, the main job and NCCL (two GPUs), and where it is
not for CuPy tensors (numpy 2). Steps that lack something are listed as "not here", never as passed.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import time
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
PYTEST = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, "--import-mode=importlib"]
KIT = [*PYTEST, "--pyargs", "hal_core.conformance", "--hal-device=cuda"]
HAL = "import sys; from hal.cli import main; sys.argv[0] = 'hal'; main()"


def installed(name: str) -> str:
    """The version of a distribution, or a dash."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "-"


def gpus() -> list[str]:
    """The names of the GPUs, by nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    found = subprocess.run(query, capture_output=True, text=True, check=False)
    return found.stdout.strip().splitlines() if found.returncode == 0 else []


def paddle_with_cuda() -> bool:
    """True where Paddle imports and was built for CUDA."""
    if find_spec("paddle") is None:
        return False
    check = [sys.executable, "-c", "import paddle, sys; sys.exit(0 if paddle.is_compiled_with_cuda() else 1)"]
    return subprocess.run(check, capture_output=True, check=False).returncode == 0


def steps() -> list[tuple[str, list[str], dict[str, str], str]]:
    """``(name, arguments of python, environment, "" or why it cannot run here)``."""
    count, paddle = len(gpus()), paddle_with_cuda()
    no_gpu = "" if count else "no GPU"
    no_paddle = no_gpu or ("" if paddle else "no CUDA build of Paddle")
    cupy = no_gpu or ("CuPy does not import beside numpy 1.26" if paddle or find_spec("cupy") is None else "")
    sanitizer = no_gpu or ("" if shutil.which("compute-sanitizer") else "no compute-sanitizer")
    counted = {"HAL_CUDA_COUNT": "1"}
    profile = ["--hal-profile=quick"]
    job = ["run", "--model-place", "cpu", "--prompt", "def main(", "--prompt", "import", "--max-tokens", "48", "--json"]
    return [
        ("tests of the plugin", [*PYTEST, str(HERE.parent / "tests")], {}, ""),
        ("kit, CuPy tensors", [*KIT, *profile], counted | {"HAL_CUDA_TENSORS": "cupy"}, cupy),
        ("kit, Paddle tensors", [*KIT, *profile], counted | {"HAL_CUDA_TENSORS": "paddle"}, no_paddle),
        (
            "memcheck",
            ["compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 1", str(HERE / "exercise.py")],
            {},
            sanitizer,
        ),
        (
            "racecheck",
            ["compute-sanitizer --tool racecheck --error-exitcode 1", str(HERE / "exercise.py")],
            {},
            sanitizer,
        ),
        ("main job, cpu", ["-c", HAL, *job, "--device", "cpu"], {}, no_paddle),
        ("main job, cuda", ["-c", HAL, *job, "--device", "cuda"], {}, no_paddle),
        ("NCCL, two GPUs", [str(HERE / "nccl_ranks.py")], {}, no_paddle or ("" if count > 1 else "one GPU")),
    ]


def run(arguments: list[str], extra: dict[str, str]) -> tuple[int, str]:
    """Exit status and output of one step, at most four minutes."""
    command = [sys.executable, *arguments]
    if arguments[0].startswith("compute-sanitizer"):
        command = [*arguments[0].split(), sys.executable, *arguments[1:]]
    env = os.environ | extra
    paths = [str(ROOT / "core" / "src"), str(ROOT / "plugins" / "cuda" / "src"), str(ROOT)]
    env["PYTHONPATH"] = os.pathsep.join([*paths, env.get("PYTHONPATH", "")])
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False, cwd=ROOT)
    except subprocess.TimeoutExpired as error:
        return 124, str(error)
    return done.returncode, done.stdout + ("" if done.returncode == 0 else done.stderr)


def main(target: str) -> int:
    """Run every step; 1 when one that could run failed."""
    rows, outputs, failed = [], {}, 0
    for name, arguments, extra, missing in steps():
        begin = time.monotonic()
        if missing:
            rows.append({"step": name, "result": "not here", "detail": missing})
        else:
            status, output = run(arguments, extra)
            outputs[name] = output
            lines = [line for line in output.strip().splitlines() if line.strip()]
            detail = lines[-1][:160] if lines else ""
            rows.append({"step": name, "result": "ok" if status == 0 else "FAILED", "detail": detail})
            failed |= status != 0
            if status:
                print(f"--- {name}\n{output[-3000:]}", flush=True)
        row = rows[-1]
        print(f"{row['step']:22s} {row['result']:9s} {time.monotonic() - begin:6.1f} s  {row['detail']}", flush=True)
    if "main job, cuda" in outputs:
        same = outputs["main job, cpu"] == outputs["main job, cuda"]
        rows.append({"step": "same tokens", "result": "ok" if same else "FAILED", "detail": "cpu against cuda"})
        print(f"{'same tokens':22s} {rows[-1]['result']}")
        failed |= not same
    names = ("paddlepaddle-gpu", "numpy", "torch", "cupy-cuda13x", "cuda-core", "cuda-bindings", "paddle-hal-core")
    evidence = {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "command": "python plugins/cuda/proof/prove.py",
        "python": platform.python_version(),
        "gpus": gpus(),
        "versions": {name: installed(name) for name in names},
        "rows": rows,
        "kit": {name: output.splitlines()[-40:] for name, output in outputs.items() if name.startswith("kit")},
        "nccl": outputs.get("NCCL, two GPUs", ""),
    }
    if target:
        Path(target).write_text(json.dumps(evidence, indent=1) + "\n", encoding="utf-8")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else ""))
