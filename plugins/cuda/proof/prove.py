"""Runs all proofs of the cuda device on the hardware; steps that cannot run here give the reason.

    python plugins/cuda/proof/prove.py [evidence.json] [--only NAME] [--only NAME] [--within SECONDS] [--list]

Run it where GPU Paddle is installed for the kit with Paddle tensors and the main job, and where it is not for CuPy
tensors (numpy 2); with two GPUs for the ranks. The main job and the recorded logits are of Paddle's model. Steps with
missing requirements are listed as "not here", never as passed. ``--only`` selects the steps whose name contains its
text. hal itself need not be installed: entry points are then written from each pyproject.toml. The plugin of this tree
is proved, or the installed one where only that has its native part; the first lines say which, and on which path. Every
step has a limit, after which its processes, stopped ranks too, are ended.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
PYTEST = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, "--import-mode=importlib"]
KIT = [*PYTEST, "--pyargs", "hal_conformance"]
COUNTED = [*KIT, "--hal-device-factory=counted:opened"]
"""Submissions are also counted below the plugin (``counted.py``)."""
LEAST = 20
"""No step is begun with fewer seconds left."""
HAL = "import sys; from hal.cli import main; sys.argv[0] = 'hal'; main()"


def installed(name: str) -> str:
    """Return the version of a distribution, or a dash."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "-"


def gpus() -> list[str]:
    """Return the names of the GPUs, by nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    found = subprocess.run(query, capture_output=True, text=True, check=False)
    return found.stdout.strip().splitlines() if found.returncode == 0 else []


def paddle_with_cuda() -> bool:
    """Return True if Paddle imports and was built for CUDA."""
    if find_spec("paddle") is None:
        return False
    check = [sys.executable, "-c", "import paddle, sys; sys.exit(0 if paddle.is_compiled_with_cuda() else 1)"]
    return subprocess.run(check, capture_output=True, check=False).returncode == 0


@dataclass(frozen=True)
class Step:
    """A program to run: python's ``arguments``, additional environment, why it cannot run here (or ""), seconds at
    most."""

    name: str
    arguments: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    missing: str = ""
    limit: int = 240


def steps(out: Path) -> list[Step]:
    """Return all steps, in order; their measurements are written to ``out``."""
    count, paddle = len(gpus()), paddle_with_cuda()
    no_gpu = "" if count else "no GPU"
    no_paddle = no_gpu or ("" if paddle else "no CUDA build of Paddle")
    cupy = no_gpu or ("CuPy does not import beside numpy 1.26" if paddle or find_spec("cupy") is None else "")
    no_torch = no_gpu or ("" if find_spec("torch") else "no torch")
    sanitizer = no_gpu or ("" if shutil.which("compute-sanitizer") else "no compute-sanitizer")
    no_model = no_gpu or ("" if find_spec("paddle") else "no Paddle, whose model runs")
    no_pair = no_gpu or ("" if count > 1 else "one GPU")
    no_models, one = no_model or no_pair, "one_gpu:opened"
    quick = ["--hal-profile=quick"]

    def kept(name: str) -> str:
        return f"--hal-report={out / name}.kit.json"

    typed = ["-c", HAL, "conform", "cuda", f"--report={out / 'user.kit.json'}"]
    guarantees = "--hal-only=G13,G14,G15,G16,G17,G18"
    ranks = [*KIT, *quick, "--hal-device=cuda", guarantees]
    shared = [*KIT, *quick, f"--hal-device-factory={one}", guarantees]
    job = [
        "run",
        "--model-place",
        "cpu",
        "--prompt",
        "def main(",
        "--prompt",
        "import",
        "--temperature=0",
        "--max-tokens",
        "48",
        "--json",
    ]
    pair = [*job, "--device", "cuda", "--tp", "2"]
    by_step, recorded, logits = str(HERE / "nccl_ranks.py"), str(HERE / "recorded_ranks.py"), str(out / "recorded")
    check = "compute-sanitizer --tool"
    exercise = str(HERE / "exercise.py")
    bench = ["-m", "benchmarks.gpu.broadcast", "--rounds", "200", "--out", str(out)]
    return [
        Step("ranks, step by step", [by_step], {}, no_pair),
        Step("recorded logits, cpu", [recorded, "record", logits], {}, no_model),
        Step("recorded logits, ranks over NCCL", [recorded, "replay", logits], {}, no_models),
        Step("broadcast bench", bench, {}, no_pair),
        Step("kit, ranks over NCCL", [*ranks, "--maxfail=3", "-vv", kept("nccl")], {}, no_pair, 330),
        Step("ranks on one GPU, step by step", [by_step, one], {}, no_gpu),
        Step("recorded logits, ranks on one GPU", [recorded, "replay", logits, one], {}, no_model),
        Step("kit, ranks on one GPU", [*shared, "-vv", kept("one_gpu")], {}, no_gpu, 500),
        Step("beside graph captures", [str(HERE / "captures.py")], {}, no_gpu),
        Step("faults that were mended", [str(HERE / "faults.py")], {}, no_torch, 90),
        Step("tests of the plugin", [*PYTEST, f"--rootdir={ROOT}", str(HERE.parent / "tests")]),
        Step("kit, CuPy tensors", [*COUNTED, *quick, kept("cupy")], {"HAL_CUDA_TENSORS": "cupy"}, cupy),
        Step("kit, torch tensors", [*COUNTED, *quick, kept("torch")], {"HAL_CUDA_TENSORS": "torch"}, no_torch),
        Step("kit, as a user runs it", typed, {"HAL_CUDA_TENSORS": "cupy"}, cupy, 560),
        Step("kit, Paddle tensors", [*COUNTED, *quick, kept("paddle")], {"HAL_CUDA_TENSORS": "paddle"}, no_paddle),
        Step("memcheck", [f"{check} memcheck --report-api-errors no --error-exitcode 1", exercise], {}, sanitizer),
        Step("racecheck", [f"{check} racecheck --error-exitcode 1", exercise], {}, sanitizer),
        Step("main job, cpu", ["-c", HAL, *job, "--device", "cpu"], {}, no_paddle),
        Step("main job, cuda", ["-c", HAL, *job, "--device", "cuda"], {}, no_paddle),
        Step("main job, cuda, mtp", ["-c", HAL, *job, "--device", "cuda", "--speculate", "mtp"], {}, no_paddle),
        Step("main job, two ranks", ["-c", HAL, *pair], {}, no_models),
        Step(
            "main job, two ranks, every rank samples",
            ["-c", HAL, *pair, "--sampling", "every-rank"],
            {},
            no_models,
        ),
        Step("main job, two ranks, mtp", ["-c", HAL, *pair, "--speculate", "mtp"], {}, no_models),
    ]


def write_entry_points(folder: Path) -> list[str]:
    """Write the metadata that hal looks up of our distributions that are not installed: their names."""
    written = []
    for project in (ROOT / "core", ROOT / "conformance", ROOT, ROOT / "plugins" / "cuda"):
        table = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        name, number = table["name"], table["version"]
        if installed(name) != "-":
            continue
        info = folder / f"{name.replace('-', '_')}-{number}.dist-info"
        info.mkdir()
        needs = "".join(f"Requires-Dist: {need}\n" for need in table.get("dependencies", []))
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n{needs}"
        (info / "METADATA").write_text(text, encoding="utf-8")
        groups = dict(table.get("entry-points", {}))
        lines = [
            f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in points.items())
            for group, points in groups.items()
        ]
        (info / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
        written.append(name)
    return written


@cache
def plugin() -> tuple[Path, str]:
    """Return the folder of the plugin that is proved, and its path: native, or fallback and how to build the other."""
    tree, installed_one = HERE.parent / "src", find_spec("hal_cuda")
    places = [tree]
    if installed_one is not None and installed_one.origin is not None:
        places.append(Path(installed_one.origin).parents[1])
    for place in places:
        if [*(place / "hal_cuda").glob("_native*.so")]:
            return place, "native"
    return tree, "fallback: python -m hal_cuda.building makes the native part"


def run(step: Step, metadata: Path) -> tuple[int, str]:
    """Return exit status and output of one step, errors last; after its limit 124, with the output so far."""
    command = [sys.executable, *step.arguments]
    if step.arguments[0].startswith("compute-sanitizer"):
        command = [*step.arguments[0].split(), sys.executable, *step.arguments[1:]]
    env = os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"} | step.environment
    sources = [ROOT / project / "src" for project in ("core", "conformance")] + [plugin()[0]]
    paths = [str(path) for path in (*sources, ROOT, metadata, HERE)]
    env["PYTHONPATH"] = os.pathsep.join([*paths, env.get("PYTHONPATH", "")])
    text: dict[str, Any] = {"mode": "w+", "encoding": "utf-8", "errors": "replace"}
    # Files, not pipes: a process that outlives the step could hold a pipe open and keep this script reading.
    with tempfile.TemporaryFile(**text) as log, tempfile.TemporaryFile(**text) as errors:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=errors, cwd=ROOT, start_new_session=True)
        try:
            status = process.wait(step.limit)
        except subprocess.TimeoutExpired:
            status = 124
        finally:
            with contextlib.suppress(ProcessLookupError):  # ranks that are stopped, or wait for their GPU
                os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        log.seek(0)
        errors.seek(0)
        return status, log.read() + (errors.read()[-5000:] if status else "")


def report(rows: list[dict[str, str]]) -> str:
    """Return the rows as a table."""
    return "\n".join(f"{r['step']:22s} {r['result']:9s} {r['seconds']:>7s} s  {r['detail']}" for r in rows)


def go(chosen: list[Step], metadata: Path, within: float) -> tuple[list[dict[str, str]], dict[str, str]]:
    """Run the steps within ``within`` seconds, printing each row at once; return rows, and outputs by name."""
    rows: list[dict[str, str]] = []
    outputs: dict[str, str] = {}
    end = time.monotonic() + within
    for planned in chosen:
        begin = time.monotonic()
        step = replace(planned, limit=min(planned.limit, int(end - begin)))
        if step.limit < LEAST and not step.missing:
            step = replace(step, missing=f"less than {LEAST} s left")
        result, detail = "not here", step.missing
        if not step.missing:
            print(f"--- {step.name}: at most {step.limit} s", flush=True)
            status, output = run(step, metadata)
            outputs[step.name] = output
            lines = [line for line in output.strip().splitlines() if line.strip()]
            result = "ok" if status == 0 else "TOO LONG" if status == 124 else "FAILED"
            detail = lines[-1][:160] if lines else ""
            if status or not step.name.startswith(("kit", "tests", "main", "memcheck", "racecheck")):
                print(output[-5000:], flush=True)
        seconds = f"{time.monotonic() - begin:.1f}"
        rows.append({"step": step.name, "result": result, "seconds": seconds, "detail": detail})
        print(report(rows[-1:]), flush=True)
    return rows + same_tokens(outputs), outputs


def same_tokens(outputs: Mapping[str, str]) -> list[dict[str, str]]:
    """Return a row for each main job whose tokens are compared with those of another one."""
    jobs = {name: tokens_of(output) for name, output in outputs.items() if name.startswith("main job, ")}
    first = jobs.pop("main job, cpu", None)
    if first is None:
        return []
    verdicts = {name: "ok" if first and tokens == first else "FAILED" for name, tokens in jobs.items()}
    return [{"step": f"tokens of {name[10:]}", "result": how, "seconds": "0.0", "detail": "those of cpu"}
            for name, how in verdicts.items()]  # fmt: skip


def tokens_of(output: str) -> list[tuple[str, list[int]]]:
    """Return requests and tokens that ``hal run --json`` printed."""
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return sorted((line["request_id"], line["token_ids"]) for line in lines)


def main() -> int:
    """Run every selected step, then print the table; return 1 if a step that could run failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("evidence", nargs="?", default="", help="write what was found to this JSON file")
    parser.add_argument("--only", action="append", default=[], help="the steps whose name contains this; repeatable")
    parser.add_argument("--within", type=float, default=3600.0, metavar="SECONDS", help="for all steps together")
    parser.add_argument("--list", action="store_true", help="say what would run, and why not the rest")
    chosen = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the running step, too
    words = chosen.only
    with tempfile.TemporaryDirectory() as made:
        metadata, out = Path(made) / "metadata", Path(made) / "out"
        metadata.mkdir()
        out.mkdir()
        wanted = [step for step in steps(out) if not words or any(word in step.name for word in words)]
        if chosen.list or not wanted:
            for step in wanted or steps(out):
                print(f"{step.name:22s} {step.missing or f'at most {step.limit} s'}")
            return int(not wanted)
        written = write_entry_points(metadata)
        place, path = plugin()
        print(f"the plugin in {place}, path: {path}", flush=True)
        print(f"entry points written for: {', '.join(written) or 'none, all are installed'}", flush=True)
        rows, outputs = go(wanted, metadata, chosen.within)
        found = {path.name: json.loads(path.read_text(encoding="utf-8")) for path in sorted(out.glob("*.json"))}
    names = ("paddlepaddle-gpu", "numpy", "torch", "cupy-cuda13x", "cuda-core", "cuda-bindings", "paddle-hal-core")
    evidence = {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "command": " ".join(["python", "plugins/cuda/proof/prove.py", *sys.argv[1:]]),
        "python": platform.python_version(),
        "gpus": gpus(),
        "path": path,
        "versions": {name: installed(name) for name in names},
        "rows": rows,
        "kit": {name: output.splitlines()[-60:] for name, output in outputs.items() if name.startswith("kit")},
        "ranks": outputs.get("ranks, step by step", "").splitlines(),
        "reports": [report for name, report in found.items() if name.endswith(".kit.json")],
        "measured": {name: what for name, what in found.items() if not name.endswith(".kit.json")},
    }
    if chosen.evidence:
        Path(chosen.evidence).write_text(json.dumps(evidence, indent=1) + "\n", encoding="utf-8")
    print("\n" + report(rows))
    return int(any(row["result"] in ("FAILED", "TOO LONG") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
