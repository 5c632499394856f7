"""Ranks that differ are refused at the start, with the same message on every rank."""

import contextlib

import pytest
from hal_core import InvalidValue
from hal_engine.distributed.errors import RankLost

from hal.cli import main

from .rows import PATIENCE, Delivered, Pooled, Row, engine_of

DIFFERENT = {
    "checkpoint": "differ in their checkpoint: rank 0 has .*, rank 1 another one",
    "slot table": "differ in their slot table: rank 0 has .*, rank 1 00",
    "groups": r"differ in their groups: rank 0 has .*, rank 1 \(1, 0\)",
    "version": "differ in their paddle-hal-core: rank 0 has .*, rank 1 0.0",
    "protocol": "rank 1 is one of 2 and has protocol version 0",
    "size": "rank 1 is one of 3",
    "broken checkpoint": "rank 1: --model: no directory",
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_a_rank_that_differs_is_refused_on_every_rank_with_the_same_words(worlds, what):
    pooled = Pooled(worlds.of(2), ("different", what))
    with pytest.raises(InvalidValue, match=DIFFERENT[what]) as caught:
        engine_of(Row(tp=2), lambda: pooled, Delivered())
    assert {answer[:2] for answer in pooled.answers.values()} == {("InvalidValue", str(caught.value))}


def test_an_unavailable_device_is_refused_by_its_option(worlds):
    pooled = Pooled(worlds.of(2))
    with pytest.raises(InvalidValue, match=r"^rank \d: --device: no device 'nosuch'; installed: "):
        engine_of(Row(tp=2, device="nosuch"), lambda: pooled, Delivered())


def test_steps_that_cannot_overlap_are_refused_where_they_are_to(worlds):
    pooled = Pooled(worlds.of(2))
    with pytest.raises(InvalidValue, match=r"^rank \d: --overlap: the Paddle model needs the host between two steps"):
        engine_of(Row(tp=2, overlap="on"), lambda: pooled, Delivered())


def test_a_step_out_of_its_turn_is_refused_by_name(worlds):
    """After a lost or repeated message no rank runs another step than the rest."""
    pooled = Pooled(worlds.of(2))
    engine = engine_of(Row(tp=2, timeout=2.0), lambda: pooled, Delivered())
    expected = r"step 3 of group 0 came to rank \d, which is in group 0 and due for step 2"
    with contextlib.closing(engine.workers[0].rank_executor) as rank_executor:  # also where a liar lets this fail
        rank_executor.order(0, ())
        rank_executor._numbers[0] += 1
        rank_executor.order(0, ())
        with pytest.raises(RankLost, match=expected):
            _ = [rank_executor.receive(PATIENCE) for _ in range(2)]  # with the first step's record, or behind it
        rank_executor.rest()


@pytest.mark.parametrize(
    ("options", "limit", "expected"),
    [
        (
            ("--tp", "2"),
            71,
            "--tp: each of 2 ranks takes up to 72 file descriptors, and the limit is 71 (raise the limit",
        ),
        (
            ("--dp", "4"),
            80,
            "--dp: each of 4 ranks takes up to 88 file descriptors, and the limit is 80 (raise the limit",
        ),
        (("--split", "1,1"), 60, "--split: each of 1 ranks takes up to 64 file descriptors, and the limit is 60"),
        (("--tp", "9" * 20), 1024, "--tp: each of 99999999999999999999 ranks takes up to"),
    ],
    ids=["tp", "dp", "split", "beyond all limits"],
)
def test_few_descriptors_are_told_before_a_rank_is_started(monkeypatch, capsys, options, limit, expected):
    monkeypatch.setattr("hal_engine.transport.descriptors.resource.getrlimit", lambda kind: (limit, limit))
    monkeypatch.setattr("hal_engine.distributed.starting.LocalLaunch", None)
    with pytest.raises(SystemExit) as ended:
        main(["run", "--prompt", "a", "--device", "cpu", *options])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(f"hal: error: {expected}")


def test_a_command_that_a_launcher_started_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", "2")
    with pytest.raises(SystemExit) as ended:
        main(["run", "--prompt", "x", "--tp", "2"])
    assert ended.value.code == 2
    assert "PADDLE_TRAINERS_NUM: a launcher started this command once for each rank" in capsys.readouterr().err
