"""``hal run --split --transfer``: refusals of a vendor's own KV transfer (``test_run`` uses one)."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
from hal_core import InvalidValue, PluginError
from hal_engine.handover import make_transfer

from hal.cli import main
from tests.commands import private_folders
from tests.split.carried import CARRIER
from tests.split.rows import Own

__all__ = ["private_folders"]

JOB = ("--device", "cpu", "--prompt", "def main(", "--temperature=0", "--max-tokens", "6", "--json")


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main(["run", *JOB, *arguments])
    out, err = capsys.readouterr()
    return ended.value.code, out, err


@pytest.mark.parametrize(
    ("arguments", "refusal"),
    [
        (
            ("--transfer", CARRIER),
            "--transfer: needs more than one rank (leave it out, or give --split",
        ),
        (
            ("--tp", "2", "--transfer", "a:b"),
            "--transfer: no request moves to another worker (leave it out, or give --sp",
        ),
        (("--split", "1,1", "--transfer", "nowhere"), "--transfer: 'nowhere' (give MODULE:NAME, as my_transfers"),
    ],
)
def test_a_transfer_that_cannot_be_is_refused_before_anything_starts(capsys, arguments, refusal):
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert refusal in err


@pytest.mark.conform
def test_one_that_the_ranks_cannot_make_ends_the_start_by_its_name(capsys, private_folders, monkeypatch):
    monkeypatch.setattr("hal_engine.distributed.starting.LocalLaunch", lambda size, **_: Own(size))
    status, out, err = run(capsys, "--split", "1,1", "--transfer", "tests.split.carried:Nobody")
    assert (status, out) == (2, "")
    assert "--transfer: tests.split.carried:Nobody: module 'tests.split.carried' has no attribute 'Nobody'" in err


def test_what_makes_no_transfer_is_named(monkeypatch):
    monkeypatch.setitem(
        sys.modules, "some_transfers", SimpleNamespace(none=lambda setup: 3, fails=lambda setup: 1 // 0)
    )
    with pytest.raises(
        PluginError, match="made int, which has no describe, reserve, send, seal, receive, cancel, close, s"
    ):
        make_transfer("some_transfers:none", None)
    with pytest.raises(PluginError, match="could not make a transfer: ZeroDivisionError"):
        make_transfer("some_transfers:fails", None)
    with pytest.raises(InvalidValue, match="give MODULE:NAME"):
        make_transfer("a.b", None)
