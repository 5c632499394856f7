"""The device that each rank of a host opens, from the launchers' variables: one each, or a refusal."""

import pytest
from hal_core import InvalidValue, Plugin

from hal.local_rank import AMONG, LocalRank, moved

TWO_HOSTS = "10.0.0.1:70,10.0.0.1:71,10.0.0.2:70,10.0.0.2:71"
RANK_1 = {"PADDLE_TRAINER_ENDPOINTS": TWO_HOSTS, "PADDLE_TRAINER_ID": "1"}


class Four(Plugin):
    """A device of which a host has four."""

    name, kind = "four", "quad"
    probe = open = None

    @classmethod
    def count(cls):
        return 4


class Host(Four):
    """One that all processes open together."""

    name = "host"

    @classmethod
    def count(cls):
        return 0


@pytest.mark.parametrize(("rank", "number"), [(0, 0), (1, 1), (2, 0), (3, 1)])
def test_a_rank_is_counted_on_its_own_host(rank, number):
    found = LocalRank.of({"PADDLE_TRAINER_ENDPOINTS": TWO_HOSTS, "PADDLE_TRAINER_ID": str(rank)})
    assert found == LocalRank(number, 2)


def test_a_process_of_no_job_is_alone():
    assert LocalRank.of({}) == LocalRank(0, 1)


@pytest.mark.parametrize(("text", "found"), [("4/6", (5, 6)), ("own", (0, 1))])
def test_several_launchers_of_a_host_count_its_ranks_together(text, found):
    assert LocalRank.of(RANK_1 | {AMONG: text}) == LocalRank(*found)


@pytest.mark.parametrize("text", ["two", "", "1", "/", "-1/2", "1/2/3", "1/two"])
def test_another_text_of_the_launcher_is_named_with_its_variable(text):
    with pytest.raises(InvalidValue, match=f"^{AMONG}: {text!r} .*two numbers as 0/2 .* own") as raised:
        LocalRank.of(RANK_1 | {AMONG: text})
    assert raised.value.argument == AMONG


@pytest.mark.parametrize("first", [0, 1, 2])
def test_each_rank_opens_its_own_device_from_the_requested_index_on(first):
    assert [LocalRank(number, 2).index(Four, first) for number in (0, 1)] == [first, first + 1]


def test_more_ranks_than_devices_are_refused_unless_they_may_share():
    with pytest.raises(InvalidValue, match=r"2 rank\(s\) .* counted from four:3, and there are 4 .*--share-devices"):
        LocalRank(0, 2).index(Four, 3)
    assert [LocalRank(number, 2, share=True).index(Four, 3) for number in (0, 1)] == [3, 0]


def test_a_device_that_every_process_may_open_is_not_shared_out():
    assert [LocalRank(number, 8).index(Host, 0) for number in (0, 7)] == [0, 0]


@pytest.mark.parametrize(
    ("place", "by", "found"), [("cpu", 1, "cpu"), ("gpu:1", 2, "gpu:3"), ("gpu", 1, "gpu:1"), ("gpu", 0, "gpu")]
)
def test_the_model_moves_along(place, by, found):
    assert moved(place, by) == found
