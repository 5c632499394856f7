"""``python -m hal_fastdeploy compare A B``, with writers of these tests in the place of FastDeploy's classes."""

import sys
from pathlib import Path

import numpy as np
import pytest
from hal_core.memory.writes import Writes
from hal_fastdeploy import insertion
from hal_fastdeploy.__main__ import main
from hal_fastdeploy.comparing import CASES, compare, tensor

import hal

from . import upstream as up


def rounded(values):
    return values.astype(np.float64).astype(np.int64) if values.max() < 2**62 else values


WRONG = {
    # story: tensor, call of Writes, what becomes of the rows (None: the call is left out)
    "drafts of the decode role are lost": ("draft_tokens", "ragged", None),
    "seeds are rounded": ("infer_seed", "rows", rounded),
    "a block table grows and never shrinks": ("block_tables", "fill", None),
    "a stopped slot stays stopped": ("stop_flags", "fill", None),
}


class Wrong(Writes):
    """Writes of which one call to one tensor goes wrong. Part of a tensor counts as the tensor."""

    def __init__(self, view, call, change):
        super().__init__()
        true = getattr(super(), call)

        def wrong(target, *given, **more):
            if target.memory is not view.memory:
                return true(target, *given, **more)
            return change and true(target, given[0], change(np.array(given[1])).astype(target.dtype.storage))

        setattr(self, call, wrong)


@pytest.fixture(scope="module")
def device():
    with hal.open_device("cpu") as opened:
        yield opened


def reference(write):
    """A runner class over the reference writer."""
    return type("Reference", (), {"insert_tasks_v1": lambda self, requests, n: write(self, requests, n)})


def product(device, monkeypatch, story=""):
    """A runner class over the product's insertion, wrong in one thing if named."""

    def insert_tasks_v1(self, requests, num_running):
        inserting = insertion.Insertion(device, self, print)
        with monkeypatch.context() as patch:
            if story:
                name, call, change = WRONG[story]
                if name in inserting.target.found:
                    view = inserting.target.found[name].view
                    patch.setattr(insertion, "Writes", lambda: Wrong(view, call, change))
            inserting(requests, num_running).wait()

    return type("Product", (), {"insert_tasks_v1": insert_tasks_v1})


def test_the_product_and_the_reference_do_not_differ(device, monkeypatch):
    assert compare(product(device, monkeypatch), reference(up.insert), draws=10, make=np.copy) == []


@pytest.mark.parametrize(
    ("story", "cases"),
    [
        ("drafts of the decode role are lost", {"PREFILL of the decode role with drafts"}),
        ("seeds are rounded", {case for case in CASES if "PREFILL" in case}),
        ("a block table grows and never shrinks", {*CASES}),
        ("a stopped slot stays stopped", {case for case in CASES if "PREFILL" in case}),
    ],
)
def test_a_wrong_writer_differs_in_its_tensor_and_kinds(device, monkeypatch, story, cases):
    found = compare(product(device, monkeypatch), product(device, monkeypatch, story), draws=25, make=np.copy)
    assert {one.name for one in found} == {WRONG[story][0]}
    assert {one.case for one in found} == cases


def test_paddles_tensors_are_compared(device, monkeypatch):
    pytest.importorskip("paddle")
    story = "drafts of the decode role are lost"
    found = compare(product(device, monkeypatch), product(device, monkeypatch, story), draws=3, make=tensor)
    assert [(one.case, one.name, one.count) for one in found] == [
        ("PREFILL of the decode role with drafts", "draft_tokens", 3)
    ]


def test_the_insertion_uses_no_stand_in():
    """The tests' reference is built on the stand-ins; the product would otherwise be compared with itself."""
    source = Path(insertion.__file__).parent
    using = {file.name for file in source.rglob("*.py") if "standins" in file.read_text(encoding="utf-8")}
    assert using == {"comparing.py"}


def test_the_two_kinds_of_runners_differ_as_the_page_says():
    found = {(one.case, one.name) for one in compare(reference(up.insert), reference(up.insert_xpu), make=np.copy)}
    assert {("ABORT", "prompt_logprobs_reqs"), ("PREFILL", "first_token_ids"), ("PREFILL", "token_ids_all")} <= found
    assert ("PREFILL", "temperature") not in found
    assert ("DECODE", "block_tables") not in found


class Right:
    def insert_tasks_v1(self, requests, num_running):
        up.insert(self, requests, num_running)


class FailsAtDecode(Right):
    def insert_tasks_v1(self, requests, num_running):
        if requests[0].task_type.value == up.DECODE:
            raise KeyError("block_tables")
        super().insert_tasks_v1(requests, num_running)


def test_the_command_prints_what_differs_by_kind(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "their_runners", sys.modules[__name__])
    paths = ["their_runners:Right", "their_runners:FailsAtDecode"]
    assert main(["compare", *paths, "--draws", "3"], make=np.copy) == 1
    printed = capsys.readouterr().out.splitlines()
    assert {line.partition(":")[0] for line in printed} == {"DECODE"}
    assert "DECODE: the call differs in 3 of 3, first returns and raises KeyError: 'block_tables'" in printed
    assert main(["compare", paths[0], paths[0], "--draws", "2"], make=np.copy) == 0
    assert capsys.readouterr().out.startswith("no difference in 2 requests of each kind: PREFILL, ")
    assert main(["compare", "fastdeploy.worker.gpu_model_runner", paths[0]]) == 2
    assert main(["compare", "no_such_module:Runner", paths[0]]) == 2
    assert "No module named 'no_such_module' (name MODULE:CLASS" in capsys.readouterr().err
