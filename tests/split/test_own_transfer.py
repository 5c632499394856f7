"""``hal run --split --transfer``: refusals of a vendor's own KV transfer (``test_run`` uses one)."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
from hal_conformance.fixtures.host_cache import HostCache
from hal_core import Group, InvalidValue, PluginError, StateConfig, lay_out
from hal_engine.distributed.kv_handover import _blocks_of
from hal_engine.handover import make_transfer
from hal_engine.model import DEFAULT_CHECKPOINT
from hal_engine.model.digest import checkpoint_digest

from hal.cli import main
from hal.contract import contract_version
from tests.split.carried import CARRIER
from tests.split.rows import Own

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


def test_the_blocks_of_a_runner_have_the_facts_of_its_job():
    cache = HostCache(np.zeros((4, 8), np.uint8), {"layout": "rows"})
    setup = SimpleNamespace(model=str(DEFAULT_CHECKPOINT), sizes=StateConfig(2, 64), named_runner="a:b")
    stepper = SimpleNamespace(runner=SimpleNamespace(cache=cache), group=Group((2, 3), 3))
    facts = _blocks_of(setup, stepper).facts()
    assert facts["layout"] == "rows"
    assert facts["checkpoint"] == checkpoint_digest(DEFAULT_CHECKPOINT)
    assert facts["slot table"] == lay_out(setup.sizes).digest.hex()
    assert (facts["tp shard"], facts["contract"]) == ("1/2", contract_version())
    stepper.runner = SimpleNamespace()
    with pytest.raises(InvalidValue, match="a:b does not describe its keys and values"):
        _blocks_of(setup, stepper)
