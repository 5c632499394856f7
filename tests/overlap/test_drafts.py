"""``hal run --drafts K`` beside ``--runner``: the device drafts and verifies while the host is a step ahead."""

from __future__ import annotations

import re
from typing import ClassVar

import pytest
from hal_core import Request, SamplingParams
from hal_core.slots.admission import draw_seed
from hal_engine.model import DEFAULT_CHECKPOINT
from hal_engine.model.config import read_config
from hal_engine.model.tokenizer import Tokenizer
from hal_sim.mixing import MixRunner, mixed

from . import schedules
from .drawn import VOCAB, Arrival, Schedule
from .schedules import Player, Watched, sizes_of

pytestmark = pytest.mark.usefixtures("simulator", "private_folders")
MIX = ("--device", "sim", "--runner", "hal_sim.mixing:MixRunner")
PROMPTS = ("def main(", "x = ", "class Reader:")
TOKENS = 14


@pytest.fixture
def run(command):
    """Run the command here; return the exit status, the JSON objects, and stderr."""

    def call(*arguments, prompts=PROMPTS):
        given = [part for prompt in prompts for part in ("--prompt", prompt)]
        done = command("run", "--json", "-v", *given, *arguments)
        return done.status, done.answers, done.err

    return call


@pytest.mark.parametrize(
    ("drafts", "overlap"), [(0, "auto"), *((drafts, overlap) for drafts in (0, 1, 5) for overlap in ("on", "off"))]
)
def test_tokens_are_those_foretold_and_what_became_of_drafts_is_shown(run, drafts, overlap):
    options = ("--temperature=0", "--max-tokens", TOKENS, "--slots", 2, "--chunk", 4, "--seed", 5, "--blocks", 4)
    code, objects, err = run(*MIX, *options, "--overlap", overlap, *(("--drafts", drafts) if drafts else ()))
    assert code == 0, err
    assert "overlap" not in err
    assert "runner hal_sim.mixing:MixRunner" in err
    config = read_config(DEFAULT_CHECKPOINT)
    tokenizer = Tokenizer.load(DEFAULT_CHECKPOINT, config)
    for prompt, found in zip(PROMPTS, objects, strict=True):
        tokens = mixed(draw_seed(5, found["request_id"]), tokenizer.encode(prompt), TOKENS, config.vocab_size)
        assert found["token_ids"] == tokens[: len(found["token_ids"])]
        assert found["finish_reason"] == "length" or found["token_ids"][-1] in config.eos_token_ids
        assert found.get("speculation", {}).keys() == ({"proposer", "accepted", "tokens_a_step"} if drafts else set())
        assert not drafts or found["speculation"]["proposer"] == MIX[-1]
    if not drafts:
        return
    counts = re.search(r"(\d+) of (\d+) drafts accepted, (\d+\.\d+) tokens a step \(hal_sim\.mixing:MixRunner\)", err)
    assert counts is not None, err
    assert sum(found["speculation"]["accepted"] for found in objects) == int(counts[1]) < int(counts[2])
    assert float(counts[3]) > 1


SILENT = """
class Silent:
    needs_host, vocab_size, supports = "", 512, ()
    def __init__(self, setup): ...
    def check(self, request): ...
    def launch(self, state, step, stream): ...
    def propose(self, state, step, stream): ...
"""
CURE = "name a proposer with --speculate, or a --runner that drafts on the device"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ("--runner", "silent:Silent"),
            "--drafts: runner silent:Silent makes no drafts .leave it out, or give a",
        ),
        ((), f"--drafts: the Paddle model runs, as no installed runner is for device cpu, and nothing drafts.*{CURE}"),
        (("--runner", "paddle"), f"--drafts: the Paddle model runs, and nothing drafts for it .{CURE}"),
        (("--tp", "2"), "--drafts: the Paddle model runs, as there are several ranks, for which a runner is named"),
    ],
)
def test_a_runner_that_cannot_draft_is_refused_by_name(run, tmp_path, monkeypatch, arguments, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "silent.py").write_text(SILENT)
    code, objects, err = run("--device", "cpu", "--drafts", 3, *arguments, prompts=PROMPTS[:1])
    assert (code, objects, len(err.splitlines())) == (2, [], 1)
    assert re.search(says, err)


@pytest.mark.parametrize("count", [0, 6])
def test_a_count_of_drafts_has_bounds_with_a_runner_too(run, count):
    code, _, err = run(*MIX, "--drafts", count, prompts=PROMPTS[:1])
    assert code == 2
    assert f"--drafts: {count} (give a whole number from 1 to 5)" in err


def played(*, overlap, latch=False, requests=3):
    """Run some requests with drafts, all at once; return their ends and the counts of drafts. ``latch``: the stream is
    held while the first two steps are launched.
    """
    player = Player(Schedule(sizes_of(slots=2, drafts=3), 12, 8, [], [], None), "worker", overlap=overlap)
    player.open()
    device, engine, stepper = player.device.device, player.engine, player.stepper
    for number in range(requests):
        engine.submit(Request(f"r{number}", [number + 1] * 3, SamplingParams(max_tokens=12, seed=number)))
    ended = []
    if latch:
        with device.hold_stream(player.device.default_stream):
            engine.step()
            engine.workers[0].give()
            assert stepper.steps == 2
            ready = [launched.ticket.ready() for launched in stepper.in_flight]
            assert ready == [False, False], "a step has run on a stream that is held"
    while engine.busy:
        ended += engine.step()
    acceptance = stepper.acceptance
    player.close()
    return {one.request_id: list(one.token_ids) for one in ended}, acceptance


def test_drafts_run_behind_a_latch_while_the_host_continues():
    ended, acceptance = played(overlap=True, latch=True)
    for number in range(3):
        seed = draw_seed(number, f"r{number}")
        assert ended[f"r{number}"] == mixed(seed, [number + 1] * 3, 12, VOCAB)
    assert 0 < acceptance.accepted < acceptance.drafted


def test_what_became_of_drafts_is_counted_alike_with_and_without_overlap():
    (_, ahead), (_, waiting) = played(overlap=True), played(overlap=False)
    counts = [(one.drafted, one.accepted, one.turns) for one in (ahead, waiting)]
    assert counts[0] == counts[1]
    assert waiting.turns + waiting.accepted == 3 * (12 - 1), "each decoding turn gives one token and those accepted"


class Fed(MixRunner):
    """Counts what its kernel feeds: the drafts of slots that run, looked up before each step."""

    fed = 0

    def __init__(self, setup):
        super().__init__(setup)
        self.device = setup.device

    def launch(self, state, step, stream):
        stream.synchronize(10)
        inputs, outputs = (state.layout.groups[name] for name in ("step_input", "output"))
        copied = self.device.copy_out(memory=state.memory, parts=[inputs, outputs], stream=stream)
        copied.wait()
        read, written = (
            state.copied_fields(data, part) for data, part in zip(copied.data, (inputs, outputs), strict=True)
        )
        runs = (read["seq_lens_this_time"] > 1) & (read["seq_lens_encoder"] == 0) & ~written["stop_flags"]
        self.fed += int(read["seq_lens_this_time"][runs].sum() - runs.sum())
        return super().launch(state, step, stream)


def test_the_count_of_drafts_is_what_was_fed(monkeypatch):
    monkeypatch.setattr(schedules, "MixRunner", Fed)
    arrivals = [Arrival(n, Request(f"n{n % 3}", [n] * 5, SamplingParams(max_tokens=9, seed=n))) for n in range(7)]
    schedule = Schedule(sizes_of(slots=3, drafts=3), 9, 4, arrivals, [(6, "n1")], None)
    player = Player(schedule, "lazy", overlap=False)
    schedules.check(schedule, player.play())
    assert player.outcome.preemptions, "blocks are to be scarce"
    assert player.stepper.acceptance.drafted == player.stepper.runner.fed > 0


class Noting(Watched):
    """Records each step's drafts as its output has them, on each rank."""

    noted: ClassVar[dict[int, list[object]]] = {}

    def take(self, launched):
        record, mirror = super().take(launched), self.state.mirror
        fields = [mirror[name].copy() for name in ("draft_num", "draft_tokens", "accept_num", "accept_tokens")]
        self.noted.setdefault(self.group.rank, []).append(fields)
        return record


class Apart(MixRunner):
    """Drafts differently on the second rank, as a drafter does whose input differs between ranks."""

    def __init__(self, setup):
        super().__init__(setup)
        self.rank, self.device = setup.group.rank, setup.device

    def propose(self, state, step, stream):
        super().propose(state, step, stream)
        if self.rank:
            self.device.async_set_value(target=state.view("draft_tokens")[0], value=7, stream=stream)


def drafts_of_two_ranks(monkeypatch, overlap):
    """The drafts and accepted tokens of each step, by rank."""
    monkeypatch.setattr(Noting, "noted", {})
    monkeypatch.setattr(schedules, "Watched", Noting)
    arrivals = [Arrival(n, Request(f"n{n}", [n] * 4, SamplingParams(max_tokens=9, seed=n))) for n in range(4)]
    schedule = Schedule(sizes_of(slots=2, drafts=3), 12, 4, arrivals, [], loss=10_000)
    with schedules.same_names():
        outcome = Player(schedule, "lazy", overlap=overlap, stepper=Noting).play()
    schedules.check(schedule, outcome)
    assert Noting.noted.keys() == {0, 1}
    return [Noting.noted[rank] for rank in (0, 1)]


def alike(one, other):
    """Compare steps that both have taken: the last one may be in flight on one of them at the end."""
    assert abs(len(one) - len(other)) <= 1
    pairs = [pair for left, right in zip(one, other, strict=False) for pair in zip(left, right, strict=True)]
    return all(mine.tobytes() == its.tobytes() for mine, its in pairs)


@pytest.mark.parametrize("overlap", [True, False])
def test_drafts_are_equal_on_all_ranks_of_a_group(monkeypatch, overlap):
    first, second = drafts_of_two_ranks(monkeypatch, overlap)
    assert alike(first, second)
    assert any(step[0].any() for step in first), "nothing was drafted"


def test_drafts_that_differ_by_rank_would_be_seen(monkeypatch):
    monkeypatch.setattr(schedules, "MixRunner", Apart)
    first, second = drafts_of_two_ranks(monkeypatch, overlap=False)
    assert not alike(first, second)
