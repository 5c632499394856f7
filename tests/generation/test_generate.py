"""``hal.generate`` in this process, and ``hal.AsyncEngine`` with a separate process: the same text."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from hal_core import FinishReason, HalError, InvalidValue, SamplingParams, Unavailable
from hal_engine import options as options_module
from hal_engine.distributed.control_channel import ControlEnd
from hal_engine.distributed.control_messages import Abort
from hal_engine.generation import local
from hal_engine.options import EngineOptions
from hal_engine.stepping import Stepper

import hal

PROMPTS = ["def main(", "for i in range(", "class Stack:"]
GREEDY = {"max_tokens": 12, "temperature": 0.0}


@pytest.fixture(scope="module", autouse=True)
def _closed():
    yield
    local._close()


def test_a_text_gives_a_text_and_a_list_a_list():
    texts = hal.generate(PROMPTS, **GREEDY)
    assert isinstance(texts, list)
    assert [hal.generate(prompt, **GREEDY) for prompt in PROMPTS] == texts
    assert all(texts)


ALONE = """
import asyncio
import hal

print(hal.generate("def main(", max_tokens=4, temperature=0))
print(hal.generate("def main(", max_tokens=4, temperature=0, speculate="naive"))

async def main():
    async with hal.AsyncEngine(device="cpu") as engine:
        print("".join([part.text async for part in engine.generate("def main(", {"max_tokens": 4, "temperature": 0})]))

asyncio.run(main())
"""


def test_a_program_without_logging_sees_the_text_and_nothing_else():
    """Also no warning of Paddle's import, which has one on a machine without ccache, and no record of a device that is
    opened after it."""
    environment = os.environ | {"PYTHONPATH": str(Path(hal.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", ALONE], env=environment, capture_output=True, text=True, timeout=300)
    text = hal.generate("def main(", max_tokens=4, temperature=0)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{text}\n" * 3, "")


def test_a_stream_gives_the_same_text_in_parts():
    parts = list(hal.generate(PROMPTS[0], stream=True, **GREEDY))
    assert len(parts) > 1
    assert "".join(parts) == hal.generate(PROMPTS[0], **GREEDY)


def test_streams_may_be_read_in_turn_and_one_that_is_left_is_aborted():
    first = hal.generate(PROMPTS[0], stream=True, max_tokens=400, temperature=0.0)
    second = hal.generate(PROMPTS[1], stream=True, **GREEDY)
    begun, other = next(first), [next(second)]
    first.close()
    assert begun
    assert "".join(other + list(second)) == hal.generate(PROMPTS[1], **GREEDY)
    assert not local._here.engine.busy, "the request that was left runs on"


def test_a_stream_that_nobody_reads_is_aborted():
    hal.generate(PROMPTS[0], stream=True, max_tokens=400, temperature=0.0)
    hal.generate(PROMPTS[1], **GREEDY)
    assert not local._here.engine.busy


def test_of_a_list_that_is_interrupted_no_request_runs_on(monkeypatch):
    step = local._Local._step
    calls = iter(range(2))

    def interrupted(here):
        if next(calls, None) is None:
            monkeypatch.undo()
            raise KeyboardInterrupt
        step(here)

    monkeypatch.setattr(local._Local, "_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        hal.generate(PROMPTS * 4, max_tokens=400, temperature=0.0)
    hal.generate(PROMPTS[1], **GREEDY)
    assert not local._here.engine.busy


@pytest.mark.parametrize("method", ["order", "receive"])
def test_after_a_step_that_is_interrupted_the_model_is_opened_anew(monkeypatch, method):
    text, real = hal.generate(PROMPTS[0], **GREEDY), getattr(Stepper, method)

    def interrupted(stepper, *arguments):
        monkeypatch.undo()
        if method == "receive":
            real(stepper, *arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(Stepper, method, interrupted)
    with pytest.raises(KeyboardInterrupt):
        hal.generate(PROMPTS, **GREEDY)
    assert local._here is None
    assert hal.generate(PROMPTS[0], **GREEDY) == text


def test_an_answer_ends_with_the_first_stop_text():
    text = hal.generate(PROMPTS[0], **GREEDY)
    stop = text[3:6]
    assert hal.generate(PROMPTS[0], stop=stop, **GREEDY) == text[: text.index(stop) + len(stop)]


def test_without_a_seed_each_call_draws_anew_and_with_one_it_does_not():
    seeded = [hal.generate(PROMPTS, max_tokens=30, seed=7) for _ in range(2)]
    free = {tuple(hal.generate(PROMPTS, max_tokens=30)) for _ in range(4)}
    assert len(free) > 1
    assert seeded[0] == seeded[1]


def test_draws_are_those_of_hal_run_with_the_same_seed(command):
    given = [part for prompt in PROMPTS for part in ("--prompt", prompt)]
    own = ("--temperature", "0.7", "--top-p", "0.9")  # from the checkpoint's generation_config.json
    done = command("run", "--device", "cpu", *given, "--max-tokens", "20", *own, "--seed", "7", "--json")
    assert hal.generate(PROMPTS, max_tokens=20, seed=7) == [answer["text"] for answer in done.answers]


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"prompt": "x", "most_tokens": 3}, "most_tokens"),
        ({"prompt": "x", "temperature": -1.0}, "temperature"),
        ({"prompt": ["x"], "stream": True}, "give one text, or leave stream out"),
        ({"prompt": "x", "stop": ""}, "stop"),
        ({"prompt": ""}, "prompt: the prompt has no tokens"),
        ({"prompt": "x", "max_tokens": 9999}, "max_tokens: "),
        ({"prompt": "x", "speculate": "nope"}, "speculate: "),
        ({"prompt": "x", "model": "nowhere"}, "no directory 'nowhere'"),
        ({"prompt": "x", "maxtokens": 3}, "maxtokens: no such parameter (did you mean max_tokens?)"),
        ({"prompt": "x", "models": "y"}, "models: no such parameter (did you mean model?)"),
        ({"prompt": "x", "modle": "y"}, "modle: no such parameter (did you mean model?)"),
        ({"prompt": "x", "top_q": 1}, "top_q: no such parameter (known: model, device, "),
        ({"prompt": "x", "zzz": 1}, "zzz: no such parameter (known: model, device, "),
        ({"prompt": "x", "stop": 3}, "stop: 3 (give texts)"),
        ({"prompt": ["x", 3]}, "prompt: 3 is no text (give a text, or a list of texts)"),
    ],
)
def test_what_cannot_be_is_refused_by_its_name(given, names):
    with pytest.raises(InvalidValue) as error:
        hal.generate(**given)
    assert names in str(error.value)


async def text_of(engine, prompt, params=None, **more):
    parts = [part async for part in engine.generate(prompt, params or GREEDY, **more)]
    assert parts[-1].finish_reason in (FinishReason.LENGTH, FinishReason.STOP)
    return "".join(part.text for part in parts)


async def anything_of(answer):
    async for _ in answer:
        pass


async def tasks(aborted):
    found = {}
    async with hal.AsyncEngine(device="cpu", slots=2) as engine:
        found["device"] = engine.device
        found["texts"] = await asyncio.gather(*(text_of(engine, prompt) for prompt in PROMPTS))
        found["stopped"] = await text_of(engine, PROMPTS[0], stop=found["texts"][0][3:6])
        found["whole"] = await text_of(engine, PROMPTS[0], SamplingParams(**GREEDY))
        with pytest.raises(InvalidValue, match="the prompt has no tokens"):
            await text_of(engine, [])
        with pytest.raises(InvalidValue, match=r"prompt: 3 is no text \(give a text, or token ids\)"):
            await text_of(engine, 3)
        found["left"] = engine._unfinished
    return found | {"aborted": list(aborted)}


class Steps:
    """The steps of an engine process whose runner is ``held_steps:HeldRunner``: each waits for a permit."""

    def __init__(self, folder):
        self._launched = folder / "steps"
        os.mkfifo(folder / "permits")
        self._permits, self.given = os.open(folder / "permits", os.O_RDWR), 0

    async def until(self, *tasks):
        """Permit the step that waits, and the next, until the tasks are done."""
        while not all(task.done() for task in tasks):
            if self._launched.exists() and len(self._launched.read_text().splitlines()) > self.given:
                os.write(self._permits, b".")
                self.given += 1
            await asyncio.sleep(0)
        return await asyncio.gather(*tasks)

    def close(self):
        os.close(self._permits)


@pytest.fixture
def steps(tmp_path, monkeypatch):
    monkeypatch.setenv("HELD_STEPS", str(tmp_path))
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "serving")
    with contextlib.closing(Steps(tmp_path)) as steps:
        yield steps


async def full_and_killed(aborted, steps):
    """No request can end between two steps, so those that are to wait do."""
    long = 400
    async with hal.AsyncEngine(device="cpu", slots=2, max_waiting=3, runner="held_steps:HeldRunner") as engine:
        begun = [engine.generate([number + 1] * 3, {"max_tokens": long}) for number in range(2)]
        await steps.until(*(asyncio.ensure_future(anext(one)) for one in begun))
        left = asyncio.create_task(anything_of(begun[0]))
        rest = [asyncio.create_task(text_of(engine, [number + 1])) for number in range(3)]
        while engine._unfinished < 5:
            await asyncio.sleep(0)
        with pytest.raises(Unavailable, match="3 requests wait"):
            await text_of(engine, [4])
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left
        await steps.until(*rest)  # which need the slot
        assert steps.given < long, "the other long request may have ended"
        ends = list(aborted)
        os.kill(engine._link._process.pid, signal.SIGKILL)
        with pytest.raises(Unavailable, match="the engine process ended: signal SIGKILL"):
            await anything_of(begun[1])
        with pytest.raises(Unavailable, match="the engine process ended: signal SIGKILL"):
            await text_of(engine, [5])
        assert engine._unfinished == 0
    return ends


@pytest.fixture
def aborted(monkeypatch):
    """The requests that the process had to abort."""
    names, send = [], ControlEnd.send

    def noted(end, message, wait=0.0):
        names.extend([message.request] if isinstance(message, Abort) else [])
        return send(end, message, wait)

    monkeypatch.setattr(ControlEnd, "send", noted)
    return names


def test_an_engine_process_gives_the_same_text_to_many_tasks(aborted):
    found, texts = asyncio.run(tasks(aborted)), hal.generate(PROMPTS, **GREEDY)
    assert found["device"] == "cpu:0"
    assert found["texts"] == texts
    assert found["whole"] == texts[0]
    assert texts[0].startswith(found["stopped"])
    assert len(found["stopped"]) < len(texts[0])
    assert found["left"] == 0
    assert found["aborted"] == ["a4"], "the one that a stop text ended"


def test_a_full_queue_refuses_and_a_process_that_dies_ends_every_stream(aborted, steps):
    """A task that is cancelled aborts its request, whose slot the others get."""
    assert asyncio.run(full_and_killed(aborted, steps)) == ["a1"]


async def cancelled():
    """The link of an engine whose opening was cancelled before its process was up."""
    engine = hal.AsyncEngine(device="cpu")
    opening = asyncio.create_task(engine.__aenter__())
    await asyncio.sleep(0)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    return engine._link


def test_an_opening_that_is_cancelled_waits_for_no_process_that_is_not_up():
    """Without this, a server whose port is in use reported it only after ten seconds."""
    link = asyncio.run(cancelled())
    assert "the engine was closed" in str(link.up.exception()), "up was cancelled, and taken for an engine that is up"
    assert link._process.returncode in (-signal.SIGTERM, 128 + signal.SIGTERM), "it was asked to end, and did"


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def test_a_closed_engine_leaves_no_descriptor():
    asyncio.run(cancelled())
    before = descriptors()
    asyncio.run(cancelled()).close()
    assert descriptors() == before


def test_a_child_of_a_fork_opens_its_own_model():
    """Another thread of the parent held the lock, and a model was open."""
    there = local._Local.__new__(local._Local)
    with pytest.MonkeyPatch.context() as patch, local._lock:
        patch.setattr(local, "_here", there)
        if (child := os.fork()) == 0:
            free = []
            other = threading.Thread(target=lambda: free.append(local._lock.acquire(timeout=20)))
            other.start()
            other.join()
            os._exit(not (free == [True] and local._here is None))
        assert local._here is there
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_model_is_known_by_its_folder_and_not_by_how_it_was_named(tmp_path, monkeypatch):
    for name in "ab":
        (tmp_path / name / "checkpoint").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a")
    first = local._key("checkpoint", EngineOptions())
    assert first == local._key(tmp_path / "a" / "checkpoint", EngineOptions())
    monkeypatch.chdir(tmp_path / "b")
    assert local._key("checkpoint", EngineOptions()) != first
    assert local._key(None, EngineOptions()) != local._key("", EngineOptions())


async def closed():
    """An engine that is closed."""
    engine = hal.AsyncEngine(device="cpu")
    async with engine:
        pass
    return engine


def test_a_closed_engine_says_so_in_another_event_loop_too():
    engine = asyncio.run(closed())
    for _ in range(2):
        with pytest.raises(Unavailable, match="the engine was closed"):
            asyncio.run(asyncio.wait_for(text_of(engine, [5]), 60))


async def mistaken():
    """Return the argument that each error names, and the text of a request with NumPy's numbers after them."""
    wrong = [
        {"prompt": [5.0, 6]},
        {"prompt": [True, 5]},
        {"prompt": ["a"]},
        {"prompt": [[1, 2]]},
        {"prompt": [5], "params": "abc"},
        {"prompt": [5], "params": 5},
        {"prompt": [5], "priority": "first"},
        {"prompt": [5], "number": 1.5},
    ]
    got = []
    async with hal.AsyncEngine(device="cpu") as engine:
        for request in wrong:
            with pytest.raises(InvalidValue) as error:
                await text_of(engine, **request)
            got.append(error.value.argument)
        with pytest.raises(InvalidValue, match=r"the engine is open already \(make one for each async with\)"):
            await engine.__aenter__()
        ids, number = np.array(engine.plan.tokenizer.encode(PROMPTS[0])), np.int64(1)
        text = await text_of(engine, ids, GREEDY, number=number, priority=number)
    with pytest.raises(Unavailable, match=r"the engine was closed \(open another one\)"):
        await asyncio.wait_for(text_of(engine, [5]), 60)
    return got, text


def test_a_mistake_is_its_own_requests_and_a_closed_engine_says_so():
    got, text = asyncio.run(mistaken())
    assert got == ["prompt"] * 4 + ["params"] * 2 + ["priority", "number"]
    assert text == hal.generate(PROMPTS[0], **GREEDY)


async def opened(**options):
    async with hal.AsyncEngine(**options):
        raise AssertionError("it came up")


@pytest.mark.parametrize(
    ("options", "names"),
    [({"device": "nope"}, "no device 'nope'"), ({"device": "cpu", "runner": "nope"}, "nope")],
    ids=["device", "runner"],
)
def test_what_the_process_cannot_open_is_raised_where_it_was_requested(options, names):
    with pytest.raises(HalError, match=names):
        asyncio.run(opened(**options))


@pytest.mark.parametrize(
    "given", [{"tp": 0}, {"launcher": "slurm"}, {"split": (1, 1), "dp": 2}, {"split": (0, 1)}], ids=str
)
def test_ranks_that_cannot_be_are_refused_by_name(given):
    with pytest.raises(InvalidValue, match=next(iter(given))):
        hal.Ranks(**given)


def test_without_ray_its_launcher_is_refused_with_the_install_line(monkeypatch):
    monkeypatch.setattr(options_module, "find_spec", lambda name: None)
    with pytest.raises(
        Unavailable, match=r"launcher: the Python package 'ray' is not installed \(pip install .*\[ray\]"
    ):
        hal.AsyncEngine(device="cpu", executor=hal.Ranks(tp=2, launcher="ray"))


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"slots": 0}, "slots: 0 "),
        ({"slot": 3}, "slot: no such parameter (did you mean slots?)"),
        ({"max_tokens": 3}, "max_tokens: a parameter of a request (give it to generate(), in params)"),
        ({"zzz": 1}, "zzz: no such parameter (known: model, device, executor, "),
        ({"max_model_len": 1}, "max_model_len: 1 (give a whole number of at least 2)"),
        ({"executor": {"tp": 2}}, "executor: {'tp': 2} is no Ranks"),
        ({"chunk": 0}, "chunk: "),
        ({"step_tokens": 1, "slots": 2}, "step_tokens: "),
        ({"runner": "nope"}, "runner: "),
        ({"dtype": "int3"}, "dtype: "),
        ({"overlap": "maybe"}, "overlap: "),
        ({"speculate": "nope"}, "speculate: "),
        ({"speculate": "ngram", "drafts": 9}, "drafts: 9 "),
        ({"acceptance": "rejection"}, "acceptance: "),
        ({"speculate": "ngram", "runner": "torch"}, "speculate: "),
    ],
)
def test_options_that_cannot_be_are_refused_as_the_caller_wrote_them(given, names):
    with pytest.raises(HalError) as error:
        hal.AsyncEngine(device="cpu", **given)
    assert str(error.value).startswith(names)
    assert "--" not in str(error.value)


def test_no_requirement_may_be_given_as_none():
    hal.AsyncEngine(device="cpu", require=None)


def descendants(process):
    """The processes that a process has started, and their children."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    found = [process]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]


@pytest.mark.conform
def test_a_rank_that_is_lost_is_started_again_under_its_streams():
    params = {"max_tokens": 200, "temperature": 0.0}

    async def texts():
        async with hal.AsyncEngine(device="cpu", executor=hal.Ranks(tp=2, restart=1)) as engine:
            answers = [engine.generate(prompt, params) for prompt in PROMPTS]
            begun = [(await anext(answer)).text for answer in answers]
            os.kill(descendants(engine._link._process.pid)[-1], signal.SIGKILL)
            return [
                first + "".join([part.text async for part in one]) for first, one in zip(begun, answers, strict=True)
            ]

    assert asyncio.run(texts()) == hal.generate(PROMPTS, **params)


@pytest.mark.conform
@pytest.mark.parametrize("executor", [{"tp": 2}, {"dp": 2}, {"split": (1, 1)}], ids=lambda given: next(iter(given)))
def test_ranks_give_the_same_text(executor):
    async def texts():
        async with hal.AsyncEngine(device="cpu", executor=hal.Ranks(**executor)) as engine:
            return await asyncio.gather(*(text_of(engine, prompt) for prompt in PROMPTS))

    assert asyncio.run(texts()) == hal.generate(PROMPTS, **GREEDY)
