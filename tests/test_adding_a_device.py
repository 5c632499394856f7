"""The walk-through of docs/adding-a-device.md: its example packages, installed into a fresh environment."""

import json
import math
import os
import re
import subprocess
import sys
import sysconfig
import venv
from contextlib import ExitStack
from pathlib import Path

import pytest
from hal_conformance.harness.isolated import KitProcess
from hal_core import StateConfig
from hal_core.devices import STEP_FIELDS

import hal

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
DOCUMENT = ROOT / "docs" / "adding-a-device.md"


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """A fresh environment that sees the installed packages, with the examples installed by pip. Offline."""
    folder = tmp_path_factory.mktemp("fresh")
    venv.create(folder, with_pip=False)
    found = folder / "bin" / "python"
    (libraries,) = folder.glob("lib/python*/site-packages")
    here = sysconfig.get_path("purelib")
    (libraries / "here.pth").write_text(f"import site; site.addsitedir({here!r})\n")
    install = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check", "-q"]
    packages = [str(folder / name) for name in ("npu", "arena", "queue")]
    for package in packages:  # copied, so that the repository gets no build files
        subprocess.run(["cp", "-r", str(EXAMPLES / Path(package).name), package], check=True)
    done = run(found, "-m", "pip", "install", *install, *packages)
    assert done.returncode == 0, done.stderr
    return found


def clean(**environment):
    ours = ("PYTHONPATH", "HAL_DEVICE", "HAL_PLUGINS")
    return {key: value for key, value in os.environ.items() if key not in ours} | environment


def run(python, *arguments):
    return subprocess.run(
        [str(python), *arguments],
        env=clean(),
        cwd=Path(python).parent,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


def test_all_are_found_by_their_entry_points(python):
    code = "from hal.cli import main; main()"
    done = run(python, "-c", code, "devices", "--json")
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row for row in json.loads(done.stdout)["devices"]}
    for name in ("arena", "queue"):
        assert rows[name]["distribution"] == f"hal-example-{name}"
        assert rows[name]["status"] == "available"
    assert rows["npu"]["distribution"] == "hal-example-npu"
    assert rows["npu"]["status"] == "unavailable"
    assert "no npu" in rows["npu"]["reason"]
    assert rows["npu"]["priority"] < 0


@pytest.fixture(scope="module")
def kits(python):
    """The kit on all of them, in that environment, started at once."""
    # g27 reads the sources of the core: once, for cpu, is enough
    quick = ("--hal-profile=quick", "--hal-examples=1", "--hal-hang=60", "-k", "not g27")
    with ExitStack() as stack:
        yield {
            device: stack.enter_context(KitProcess(device, *quick, environment=clean(**options), python=str(python)))
            for device, options in (
                ("arena", {}),
                ("queue", {}),
                ("npu", {"HAL_NPU_PLACE": "sim", "HALSIM_MODE": "2"}),
            )
        }


@pytest.mark.conform
@pytest.mark.parametrize(
    ("device", "shown"), [("arena", "arena:0"), ("queue", "queue:0"), ("npu", "npu (substituted: sim):0")]
)
def test_all_pass_the_conformance_kit(kits, device, shown):
    if device == "npu":
        from hal_sim.build import NoCompiler, paddle_device

        try:
            paddle_device()
        except NoCompiler as error:
            pytest.skip(str(error))
    found = kits[device].report(900)
    assert found["header"]["origin"] == f"hal-example-{device} 1.0.0"
    assert found["header"]["device"] == shown


@pytest.mark.conform
def test_nothing_is_skipped_on_the_asynchronous_one_but_ranks(kits):
    found = kits["queue"].report()
    missing = {need for entry in found["guarantees"] for need in re.findall(r"needs ([\w ]+)", entry["note"])}
    only_others = {"not async_h2d", "not can_hold_stream"}  # of G7: tests for synchronous devices, or without a latch
    of_a_driver = {"pinned_host", "native_objects", "timed_events"}  # the example has the host's memory and clock
    assert missing == {"several_ranks", "several_memories"} | only_others | of_a_driver
    outcomes = {test["outcome"] for entry in found["guarantees"] for test in entry["tests"]}
    assert outcomes == {"passed", "skipped"}, "no failure is expected"


def lines(folder):
    return sum(
        1
        for path in (EXAMPLES / folder).rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.strip()
    )


def test_they_are_as_small_as_the_document_says():
    assert lines("npu") + len((EXAMPLES / "npu" / "pyproject.toml").read_text().splitlines()) <= 40
    assert lines("arena") + len((EXAMPLES / "arena" / "pyproject.toml").read_text().splitlines()) <= 100
    assert lines("queue") + len((EXAMPLES / "queue" / "pyproject.toml").read_text().splitlines()) <= 200


@pytest.mark.parametrize("path", ["npu/hal_example_npu/__init__.py", "npu/pyproject.toml"])
def test_the_document_shows_the_example_as_it_is(path):
    text = (EXAMPLES / path).read_text(encoding="utf-8").strip()
    assert text in DOCUMENT.read_text(encoding="utf-8")


def test_the_document_shows_the_primitives_of_the_asynchronous_example():
    text = (EXAMPLES / "queue/hal_example_queue/device.py").read_text(encoding="utf-8")
    begin, end = text.index("class QueuePrimitives"), text.index("class QueueDevice")
    assert text[begin:end].strip() in DOCUMENT.read_text(encoding="utf-8")


@pytest.mark.parametrize("drafts", [0, 3])
def test_the_document_gives_type_and_width_of_each_field_of_a_step(drafts):
    sizes = {"max_eos": 5, "max_stop_sequences": 6, "max_stop_length": 7, "max_draft_tokens": drafts}
    row = re.compile(r"^\| ((?:`\w+`(?:, )?)+) \| (int32|int64|bool) \| `?([^`:,|]+)", re.MULTILINE)
    with hal.open_device("cpu") as device:
        state = device.state(StateConfig(num_slots=4, max_model_len=40, **sizes))
        documented = {
            name: (dtype, math.prod(getattr(state.sizes, part, 1) for part in width.strip().split(" * ")))
            for names, dtype, width in row.findall(DOCUMENT.read_text(encoding="utf-8"))
            for name in re.findall(r"\w+", names)
        }
        views = {name: state.view(name) for name in STEP_FIELDS}
        assert documented == {name: (view.dtype.name, view.shape[1]) for name, view in views.items()}


def test_the_support_page_is_what_the_reports_say():
    done = run(Path(sys.executable), str(ROOT / "tools" / "support_table.py"), "--check")
    assert done.returncode == 0, done.stderr
    kept = json.loads((ROOT / "docs" / "support.json").read_text(encoding="utf-8"))
    for device, row in kept.items():
        assert bool(row["capabilities"]["substituted"]) == ("substituted" in device) == ("no chip" in row["on"])
