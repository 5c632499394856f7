"""Wrong variants of what reading, mounting, saving and following do: the tests of each kill it.

Host data has its liars in ``test_host_liars.py``, tensors in ``test_wrong_writers.py``.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hal_core import HalError
from hal_fastdeploy import batches, host, insertion, mounting, reading, requests, saving

import hal


def module(name):
    """A module of this folder."""
    spec = importlib.util.spec_from_file_location(f"{name}_of_liars", Path(__file__).with_name(f"{name}.py"))
    found = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


inserting, reads, saves = module("test_insertion"), module("test_reading"), module("test_saving")
mounts = module("test_mounting")
fastdeploy, saved = mounts.fastdeploy, saves.saving  # fixtures
KILLED = (AssertionError, HalError, ValueError, AttributeError, pytest.fail.Exception)
REFUSED = reads.test_a_function_with_one_more_name_is_refused_by_that_name


def nothing(*given):
    return iter(())


READING = {
    "calls are not read": ("_called", nothing, "self.sampler.apply(1)"),
    "stores are not read": ("_stored", nothing, "self.flag = True"),
    "what is passed to a call is not read": ("_used", nothing, 'fill(out=self.share_inputs["a"])'),
    "an alias is not followed": ("_bind", lambda *given, **more: None, 'inputs = self.share_inputs; inputs["a"] = 1'),
    "an entry that is kept is a read": ("_is_read", lambda *given, **more: True, "tell(self)"),
}


@pytest.mark.parametrize("story", READING)
def test_a_wrong_reader_is_found(story, monkeypatch):
    method, wrong, line = READING[story]
    monkeypatch.setattr(reading._Reader, method, wrong)
    with pytest.raises(KILLED):
        REFUSED("gpu", line)


def column_0_as_it_was_drawn(patch):
    right = saving._logprobs

    def wrong(counts, tokens, starts, ids, scores, ranks):
        found = right(counts, tokens, starts, ids, scores, ranks)
        table = saving._table(ids)
        return found | {"logprob_token_ids": table[: len(tokens)]}

    patch.setattr(saving, "_logprobs", wrong)


def rows_of_any_width(patch):
    patch.setattr(saving, "_table", lambda values, dtype=np.int64: np.asarray(values, dtype).reshape(len(values), -1))


def lengths_of_all_slots(patch):
    patch.setattr(saving, "_in_prefill", lambda decoder, prompts, n: saving._ints(decoder) < saving._ints(prompts))


SAVING = {
    column_0_as_it_was_drawn: saves.test_a_token_that_upstream_replaced_is_passed_on_with_the_score_that_was_drawn,
    rows_of_any_width: saves.test_a_batch_without_a_token_has_no_rows_of_log_probabilities,
    lengths_of_all_slots: saves.test_arguments_with_a_row_for_every_slot_are_cut_to_the_batch,
}


@pytest.mark.parametrize("lie", SAVING, ids=lambda lie: lie.__name__)
def test_a_wrong_saver_is_found(lie, monkeypatch, saved):
    lie(monkeypatch)
    with pytest.raises(KILLED):
        SAVING[lie](saved)


def test_a_chip_by_its_number_on_the_host_is_found(fastdeploy, monkeypatch, tmp_path, caplog):
    right, wrong = mounting.selection.requested, SimpleNamespace(index=3)
    told = lambda name, index=None: wrong if name == "gpu:1" else right(name, index)  # noqa: E731
    monkeypatch.setattr(mounting.selection, "requested", told)
    with pytest.raises(AssertionError):
        mounts.test_its_runner_inserts_through_hal(fastdeploy, monkeypatch, tmp_path, "gpu", False, caplog)


def test_a_driver_that_is_not_asked_for_is_found(fastdeploy, monkeypatch, caplog):
    fixed = type("Asked", (), {"select": staticmethod(lambda name: None)})
    monkeypatch.setattr(mounting, "selection", fixed)
    with pytest.raises(KILLED):
        mounts.test_without_a_driver_fastdeploy_keeps_its_runner(fastdeploy, monkeypatch, "gpu", caplog)


def test_a_check_that_the_user_can_switch_off_is_found(fastdeploy, monkeypatch, caplog):
    known = type("Off", (), {"check": staticmethod(lambda function: frozenset())})
    monkeypatch.setattr(mounting, "KNOWN", {mounting.GpuRunner: known})
    name = "fastdeploy.worker.gpu_model_runner"
    with pytest.raises(KILLED):
        mounts.test_a_function_that_does_more_is_refused_by_name(fastdeploy, monkeypatch, name, "1", caplog)


def stay(patch):
    patch.setattr(batches.Places, "follow", lambda self, batch: [])


def stay_by_name(patch):
    patch.setattr(batches.Place, "holds", lambda self, found: True)


def keep_what_was_known(patch):
    right = insertion.Insertion._follow

    def follow(self):
        words = self._words
        right(self)
        self._words = words

    patch.setattr(insertion.Insertion, "_follow", follow)


@pytest.mark.parametrize("lie", [stay, stay_by_name, keep_what_was_known])
def test_an_insertion_that_does_not_follow_is_found(lie, monkeypatch, caplog):
    lie(monkeypatch)
    with hal.open_device("cpu") as device, pytest.raises(KILLED):
        inserting.test_tensors_that_waking_up_replaced_are_resolved_again(device, "gpu", caplog)


def chats_to_upstream(patch):
    patch.setattr(requests, "OTHERS", (*requests.OTHERS, "enable_thinking"))
    patch.setattr(inserting.up.Request, "enable_thinking", True, raising=False)


def any_proposer(patch):
    patch.setattr(insertion.Insertion, "_proposer_agrees", lambda self, tasks: True)


def test_a_proposer_with_other_slots_is_found(monkeypatch):
    any_proposer(monkeypatch)
    with hal.open_device("cpu") as device, pytest.raises(KILLED):
        inserting.test_a_batch_id_that_loses_its_slot_within_a_call(device, "mtp")


def no_method_of_2_6(patch):
    def method(runner):
        return str(runner.spec_method or "")

    for one in (host, insertion):
        patch.setattr(one, "method_of", method)


@pytest.mark.parametrize(("lie", "kind", "method"), [(chats_to_upstream, "gpu", ""), (no_method_of_2_6, "xpu", "mtp")])
def test_a_drop_in_that_does_not_serve_is_found(lie, kind, method, monkeypatch):
    lie(monkeypatch)
    monkeypatch.setattr(inserting.share, "of", lambda count: 30)
    with hal.open_device("cpu") as device, pytest.raises(KILLED):
        inserting.test_drawn_sequences_leave_what_the_reference_leaves(device, kind, method, "mixed")
