"""docs/output.md: its transport is installed and used unchanged."""

import json
import re
import tomllib
from pathlib import Path

import hal_core as core
import pytest
from hal_engine.transport import open_sink

import hal

from ..fixtures_plugins.builder import Site

PAGE = (Path(__file__).parents[2] / "docs" / "output.md").read_text(encoding="utf-8")
OWN = PAGE.partition("## A transport of your own")[2].partition("\n## ")[0]


def block(language):
    (found,) = re.findall(rf"^```{language}\n(.*?)^```", OWN, re.S | re.M)
    return found


@pytest.fixture
def lines(tmp_path, monkeypatch):
    """The page's transport, installed by the page's project file."""
    project = tomllib.loads(block("toml"))["project"]
    site = Site(tmp_path / "site")
    monkeypatch.syspath_prepend(str(site.folder))
    (site.folder / "acme_lines.py").write_text(block("python"))
    given = {"version": project["version"], "requires": project["dependencies"]}
    site.distribution(project["name"], points=project["entry-points"], **given)


def saved(url, steps=3):
    """Save so many steps of one request into the sink of a url; return what its tickets and its close raised."""
    errors = []
    with hal.open_device("cpu") as device:
        state, stream = device.state(core.StateConfig(num_slots=1, max_model_len=16)), device.default_stream
        sink = open_sink(url, capacity=2)
        task = core.Task(
            core.TaskKind.PREFILL, 0, state.admit(core.Request("r", [5])), blocks=[0], num_scheduled_tokens=1
        )
        for number in range(steps):
            device.insert_tasks(state=state, tasks=[] if number else [task], stream=stream)
            device.async_set_value(target=state.view("sampled_token_ids"), value=7 + number, stream=stream)
            step = core.Step(number, {state.name: [0]})
            device.update_inputs(state=state, step=step, stream=stream)
            try:
                device.save_output(state=state, step=step, sink=sink, stream=stream).wait()
            except core.HalError as error:
                errors.append(error)
        try:
            sink.close(10)
        except core.Undelivered as error:
            errors.append(error)
    return errors


def test_every_record_is_a_line(lines, tmp_path):
    assert saved(f"lines://{tmp_path}/records.jsonl") == []
    written = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    assert written == [{"request": "r", "at": at, "tokens": [7 + at]} for at in range(3)]


def test_a_full_disk_is_named_with_all_that_is_lost(lines):
    first, second, last = saved("lines:///dev/full", steps=2)
    assert isinstance(first, core.SinkClosed)
    assert "No space left" in f"{first}"
    assert isinstance(second, core.SinkClosed)
    assert isinstance(last, core.Undelivered)
    assert last.records == (("r", 0, 1),)


def test_a_missing_folder_and_options_that_it_lacks_are_refused(lines, tmp_path):
    with pytest.raises(core.InvalidValue, match="No such file"):
        open_sink(f"lines://{tmp_path}/missing/records.jsonl")
    with pytest.raises(core.CapabilityMissing, match="detects no loss"):
        open_sink(f"lines://{tmp_path}/records.jsonl", require_loss_detection=True)
