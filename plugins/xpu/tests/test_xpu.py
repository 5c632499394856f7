"""The xpu device under its declared substitutions, and on machines without an XPU. No test here ran on the chip."""

import json
import os
import subprocess
import sys
from contextlib import ExitStack

import numpy as np
import paddle
import pytest
from hal_conformance.harness.isolated import KitProcess
from hal_core import Request, SamplingParams, StateConfig, Task, TaskKind, admit
from hal_core.devices import probing
from hal_core.errors import CapabilityMissing, InvalidValue, Unavailable
from hal_xpu import XpuPlugin

import hal
from tests.commands import LIBRARIES

pytestmark = pytest.mark.long(35)
HANGS = 900
"""Seconds after which a run of the kit counts as hung, on a busy machine."""
SKIPPED_BY_NEED = {
    "async_h2d",
    "async_d2h",
    "can_hold_stream",
    "fused_scatter",
    "probe_counts",
    "four_ranks",
    "timed_events",
}
SKIPPED_BY_NEED |= {"pinned_host", "native_objects", "primitives"}
SKIPPED_BY_NEED |= {"probe_counts, or primitives of which no compound is the vendor's own"}
ROOM = "a device with 5 GiB to give"  # missing on the simulated device


def run(*arguments, **environment):
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setenv("HAL_XPU_PLACE", "cpu")


@pytest.fixture
def opened(on_cpu):
    with hal.open_device("xpu") as device:
        yield device


def pretend(monkeypatch, found):
    monkeypatch.delenv("HAL_XPU_PLACE", raising=False)
    monkeypatch.setattr("hal_paddle.plugin.installed_paddle", lambda: found)


# -- without the chip -----------------------------------------------------------------------------------------------


def test_listing_and_probing_import_neither_numpy_nor_paddle():
    code = "import sys, hal_xpu; print(hal_xpu.XpuPlugin.probe()); print({'numpy', 'paddle'} & set(sys.modules))"
    done = run("-c", code, HAL_XPU_PLACE="")
    assert done.stdout.splitlines()[-1] == "set()", done.stderr
    assert "available=False" in done.stdout


@pytest.mark.parametrize(
    ("installed", "reason"),
    [
        (None, "paddle is not installed"),
        (probing.Installed(None, "3.3.1"), "Paddle 3.3.1 is built for the CPU, not for XPU"),
        (probing.Installed(None, "3.1.0", frozenset({"cuda"})), "Paddle 3.1.0 is built for cuda, not for XPU"),
    ],
)
def test_without_an_xpu_build_it_says_why_in_a_line_and_what_to_install(monkeypatch, installed, reason):
    pretend(monkeypatch, installed)
    found = XpuPlugin.probe()
    assert (found.available, found.reason) == (False, reason)
    assert "paddlepaddle-xpu" in found.cure
    assert "\n" not in found.reason + found.cure
    with pytest.raises(Unavailable, match=reason):
        hal.open_device("xpu")


def test_an_xpu_build_is_taken_at_its_word_until_it_is_opened(monkeypatch):
    pretend(monkeypatch, probing.Installed(None, "3.3.1", frozenset({"xpu_xre"})))
    assert XpuPlugin.probe().available
    with pytest.raises(Unavailable, match="not compiled with XPU"):  # whatever its version file contains
        hal.open_device("xpu")


def test_an_unknown_substitute_is_named(monkeypatch):
    monkeypatch.setenv("HAL_XPU_PLACE", "gpu")
    with pytest.raises(Unavailable, match=r"HAL_XPU_PLACE=gpu is not a known substitute.*cpu or sim"):
        hal.open_device("xpu")


def test_the_version_file_of_paddle_is_read_without_importing_it():
    found = probing.installed_paddle()
    assert found is not None
    assert found.version == paddle.__version__
    assert found.build == "the CPU"


# -- honesty ----------------------------------------------------------------------------------------------------------


def test_the_substitution_is_shown_everywhere(opened, caplog):
    assert opened.name == "xpu (substituted: cpu):0"
    assert opened.capabilities.substituted == "cpu"
    assert "BKCL, which is not verified" in opened.capabilities.fallbacks["broadcast_tokens"]
    with pytest.raises(InvalidValue, match=r"^xpu \(substituted: cpu\):0: async_set_value: target"):
        opened.async_set_value(target=object(), value=1, stream=opened.default_stream)
    assert "substituted: cpu" in XpuPlugin.probe().reason


def test_a_substituted_device_is_never_selected_by_itself(on_cpu):
    with hal.open_device() as device:
        assert not device.name.startswith("xpu")


@pytest.mark.parametrize("hook", ["async_set_value", "insert_tasks", "save_output", "broadcast_tokens"])
def test_asking_for_asynchrony_is_refused_with_the_reason(on_cpu, hook):
    reason = rf"^xpu \(substituted: cpu\): {hook}: .* is required to be asynchronous, but: "
    with pytest.raises(CapabilityMissing, match=reason):
        hal.open_device("xpu", require={hook: "async"})


def test_one_record_is_logged_for_each_opened_device(on_cpu, caplog):
    with hal.open_device("xpu"), hal.open_device("xpu"):
        pass
    messages = [record.getMessage() for record in caplog.records if "asynchronous upload" in record.getMessage()]
    assert len(messages) == 2


# -- cost -------------------------------------------------------------------------------------------------------------


def insertion(device, state, count):
    params = SamplingParams(
        temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, seed=7, repetition_penalty=1.1, frequency_penalty=0.2,
        presence_penalty=0.3, min_tokens=1, max_tokens=9, stop_sequences=((1, 2), (3,)), bad_words=(4, 5),
        eos_token_ids=(6,), logprobs=1,
    )  # fmt: skip
    requests = [admit(Request(f"r{count}-{i}", [5, 6, 7], params), state.layout) for i in range(count)]
    tasks = [
        Task(TaskKind.PREFILL, i, request, num_scheduled_tokens=3, blocks=[9]) for i, request in enumerate(requests)
    ]
    before = device.counters()
    ticket = device.insert_tasks(state=state, tasks=tasks, stream=device.default_stream)
    cost = device.counters() - before
    state.release(range(count))
    return ticket, cost


def test_an_insertion_of_128_has_one_upload_and_the_scatters_of_one(opened):
    state = opened.state(StateConfig(num_slots=128, max_model_len=32))
    insertion(opened, state, 128)
    costs = [insertion(opened, state, count) for count in (1, 128)]
    for ticket, cost in costs:
        assert (ticket.mode, ticket.done()) == ("sync", True)
        assert (cost.uploads, cost.launches, cost.submissions, cost.fallbacks) == (1, 2, 3, 1)
    assert costs[0][1] == costs[1][1]


def test_each_call_that_falls_back_is_counted(opened):
    state = opened.state(StateConfig(num_slots=2, max_model_len=8))
    before = opened.counters().fallbacks
    for value in (0.5, 0.25):
        opened.async_set_value(target=state.view("temperature"), value=value, stream=opened.default_stream)
    assert opened.counters().fallbacks - before == 2


@pytest.mark.parametrize(("name", "scatters"), [("temperature", 1), ("seed", 1), ("token_ids", 1), ("stop_flags", 1)])
def test_a_strided_target_is_one_upload_and_one_scatter(opened, name, scatters):
    state = opened.state(StateConfig(num_slots=8, max_model_len=8))
    before = opened.counters()
    opened.async_set_value(target=state.view(name)[::3], value=1, stream=opened.default_stream)
    cost = opened.counters() - before
    assert (cost.uploads, cost.launches) == (1, scatters)


def test_a_contiguous_target_takes_the_upload_itself(opened):
    state = opened.state(StateConfig(num_slots=8, max_model_len=8))
    before = opened.counters()
    opened.async_set_value(target=state.view("token_ids"), value=np.arange(64), stream=opened.default_stream)
    cost = opened.counters() - before
    assert (cost.uploads, cost.launches) == (1, 0)


# -- bad input --------------------------------------------------------------------------------------------------------


def test_an_index_that_is_not_there_is_refused(on_cpu):
    with pytest.raises(
        InvalidValue, match=r"no device xpu \(substituted: cpu\):3: there is only xpu \(substituted: cpu\):0"
    ):
        hal.open_device("xpu:3")


def test_a_refused_target_leaves_everything_as_it_was(opened):
    array = np.zeros(4, np.int64)
    with pytest.raises(InvalidValue, match="must be a Paddle tensor on"):
        opened.async_set_value(target=array, value=1, stream=opened.default_stream)
    assert not array.any()


# -- the kit and the main job, in separate processes -------------------------------------------------------------------


def needs_sim(place):
    if place == "sim":
        from hal_sim.build import NoCompiler, compiler

        try:
            compiler()
        except NoCompiler as error:
            pytest.skip(str(error))


SOME = pytest.param("cpu", ("--hal-only=G3,G7,G9,G23",), id="cpu-some")
ALL = [pytest.param(place, (), id=f"{place}-all", marks=pytest.mark.conform) for place in ("cpu", "sim")]


@pytest.mark.whole_kit
@pytest.mark.parametrize(("place", "some"), [SOME, *ALL])
def test_the_conformance_kit(place, some):
    needs_sim(place)
    # g27 reads the sources of the core: once, for cpu, is enough
    quick = ("--hal-profile=quick", "--hal-examples=1", "--hal-hang=60", "-k", "not g27", *some)
    with KitProcess("xpu", *quick, environment={**os.environ, "HAL_XPU_PLACE": place}) as run:
        found = run.report(HANGS)
    assert found["header"]["device"] == f"xpu (substituted: {place}):0"
    tests = {test["test"]: test for entry in found["guarantees"] for test in entry["tests"]}
    assert tests["test_g03_the_call_returns_while_the_stream_is_held"]["reason"] == "needs async_h2d"
    assert tests["test_g23_the_call_returns_while_the_stream_is_held"]["reason"] == "needs async_d2h"
    assert tests["test_g07_a_synchronous_write_is_there_on_return_and_says_so"]["outcome"] == "passed"
    reasons = {test["reason"].removeprefix("needs ") for test in tests.values() if test["outcome"] == "skipped"}
    by_need = {one for one in reasons if not one.startswith(("several", ROOM)) and "past 2 GiB in the" not in one}
    assert by_need <= SKIPPED_BY_NEED


WARM = LIBRARIES
RUN = "from hal.cli import main; main()"
PLACES = ["cpu", pytest.param("sim", marks=pytest.mark.conform)]


def start(warm, place, *arguments):
    """A run on xpu in a place, or on cpu (""). Paddle takes the simulated place at its import, so that is a process."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    options["env"] = {**os.environ, "HAL_XPU_PLACE": place}
    arguments = ("run", "--device", "xpu" if place else "cpu", *arguments)
    if place == "sim":
        return subprocess.Popen([sys.executable, "-c", RUN, *arguments], **options)
    return warm.start(*arguments, code=RUN, **options)


@pytest.fixture(scope="module")
def jobs(warm):
    """``jobs(place)``: the main job there, or on cpu (""). Those on cpu are forked at once."""
    prompts = ["--prompt", "def main(", "--prompt", "for i in range(", "--prompt", "with open("]
    options = [*prompts, "--temperature=0", "--max-tokens", "12", "--slots", "2", "--json", "-v"]
    with ExitStack() as stack:
        begun = {place: stack.enter_context(start(warm, place, *options)) for place in ("", "cpu")}
        yield lambda place: begun[place] if place in begun else stack.enter_context(start(warm, place, *options))


def generated(job):
    out, err = job.communicate(timeout=120)
    assert job.returncode == 0, err[-2000:]
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")], err


@pytest.fixture(scope="module")
def reference(jobs):
    tokens = [answer["token_ids"] for answer in generated(jobs(""))[0]]
    assert [len(row) for row in tokens] == [12, 12, 12]
    return tokens


@pytest.mark.parametrize("place", PLACES)
def test_the_main_job_gives_the_tokens_of_the_cpu(place, jobs, reference):
    needs_sim(place)
    answers, err = generated(jobs(place))
    assert [answer["token_ids"] for answer in answers] == reference
    lines = [line for line in err.splitlines() if " back: " in line]
    assert any("async_set_value and insert_tasks fall back: " in line for line in lines)
    assert f" tokens/s), device xpu (substituted: {place}):0, model on cpu\n" in err
    for answer in answers:
        device = answer["device"]
        assert (device["name"], device["substituted"]) == (f"xpu (substituted: {place}):0", place)
        assert "async_set_value" in device["fallbacks"]
        assert all(any(" ".join(reason.split()) in line for line in lines) for reason in device["fallbacks"].values())


@pytest.mark.parametrize("place", PLACES)
def test_a_run_that_requires_asynchrony_is_refused(place, warm):
    needs_sim(place)
    process = start(warm, place, "--prompt", "x", "--require", "async_set_value=async")
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (2, "")
    reason = f"xpu (substituted: {place}): async_set_value: --require: async_set_value is required to be asynchronous"
    assert f"hal: error: {reason}" in err
    assert "drop the requirement or choose another device" in err
