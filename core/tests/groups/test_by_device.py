"""Groups made by a device's own library: only the members make the group."""

import importlib.util
import sys
from pathlib import Path

import pytest
from hal_core.devices import HOST, open_groups
from hal_core.errors import InvalidValue

PAIRS = [(0, 1), (2, 3)]
TIMEOUT = 2.0


@pytest.fixture(scope="module")
def work():
    spec = importlib.util.spec_from_file_location("hal_groups_by_device", Path(__file__).with_name("by_device.py"))
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_all_members_get_what_their_first_rank_shares_and_keep_their_group(pool, work):
    answers = pool.run(work.open_by_device, PAIRS, TIMEOUT)
    for rank, (ranks, shared, kept) in answers.items():
        mine = PAIRS[rank // 2]
        assert (ranks, shared) == (mine, bytes([mine[0]]) * 5)
        assert kept


def test_g16_a_group_that_is_given_up_is_aborted_once_closed_and_made_anew(pool, work):
    pool.run(work.open_by_device, PAIRS, TIMEOUT)
    for first, second, same in pool.run(work.give_up, PAIRS).values():
        assert first == ["abort", "close"]
        assert second == ["close"]
        assert not same


def test_g16_if_the_first_rank_cannot_make_a_group_all_fail_at_once(pool, work):
    """Fails at once, before the sixty seconds that a library may take to connect its ranks."""
    assert pool.run(work.refuse, PAIRS, 0, timeout=20.0) == {0: "LookupError", 1: "GroupLost", 2: "", 3: ""}


def test_a_job_is_opened_by_the_device_itself_and_over_hals_own(pool, work):
    for libraries in pool.run(work.job, PAIRS).values():
        assert f"{work.LIBRARY}, of a job" in libraries
        assert HOST in libraries
        assert "nccl" not in libraries, "Paddle's own, which a model alone needs"


def test_a_library_that_nobody_offers_is_refused_before_anything_is_made():
    with pytest.raises(InvalidValue, match=r"no installed distribution offers groups over 'smoke'") as raised:
        open_groups([(0, 1)], backend="smoke")
    assert "pip install ./plugins/paddle" in raised.value.cure
