"""Declared fields among ranks: broadcast ones are agreed on (G13), different tables are refused (G14)."""

import importlib.util
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def work():
    spec = importlib.util.spec_from_file_location("hal_groups_declared", Path(__file__).with_name("declared.py"))
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("drafts", [0, 2])
def test_g13_a_declared_field_of_broadcast_is_the_first_ranks(pool, work, drafts):
    answers = pool.run(work.agree, drafts)
    assert answers[0] == [[1], [1.0]]
    assert answers[1] == [[1], [2.0]], "a field of no broadcast group stays each rank's own"


@pytest.mark.parametrize("change", [{"reset": 5}, {"kept": True}, {}])
def test_g14_ranks_that_declare_other_fields_refuse_each_other(pool, work, change):
    answers = pool.run(work.differ, change)
    assert [answers[rank] for rank in (0, 1)] == ["StateUnusable" if change else ""] * 2
