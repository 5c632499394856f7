"""The sysv sink and FastDeploy's own way of reading: key, limits, order, no loss on the way in, no stale messages."""

import logging
import os
import shutil
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest
from hal_core.devices.cpu import CpuPlugin
from hal_core.errors import CapabilityMissing, HalError, InvalidValue, SinkClosed, SinkFull, Unavailable, Undelivered
from hal_core.runtime.bound import bind
from hal_core.slots.admission import Request, admit
from hal_core.slots.fields import StateConfig
from hal_core.slots.step import Step
from hal_core.slots.tasks import Task, TaskKind
from hal_engine.transport import open_sink
from hal_fastdeploy.sysv.queue import SYSCTL, derive_key

from . import sysv_place as shared

sysv_ipc = pytest.importorskip("sysv_ipc")
legacy, Output, place = shared.legacy, shared.Output, shared.place
receive, until, undelivered = shared.receive, shared.until, shared.undelivered


@pytest.mark.parametrize("reader_first", [True, False])
def test_g19_every_message_comes_once_in_order_though_the_queue_is_tiny(place, reader_first):
    reader = place.reader() if reader_first else None
    sink = place.sink()
    outputs = [Output(step) for step in range(60)]  # the queue holds seven
    for output in outputs:
        sink.put(output)
    while not sink.counters()["full_waits"]:  # without a reader so far, so it fills
        threading.Event().wait(0.001)
    reader = reader or place.reader()
    found = receive(reader, 60)
    assert [legacy.parse_plain(data)["tokens"] for data in found] == [[step, step] for step in range(60)]
    assert undelivered(sink, 5) == []
    assert all(output.settled == [None] for output in outputs)
    assert sink.counters()["frames"] == 60


def test_g19_each_message_is_either_read_or_named_as_undelivered(place):
    sink, reader = place.sink(capacity=100), place.reader()
    for step in range(30):
        sink.put(Output(step))
    read = {legacy.parse_plain(data)["tokens"][0] for data in receive(reader, 5)}
    lost = {position for _, position, _ in undelivered(sink, 0.1)}
    left = receive(reader, 1, 0.1)
    assert left == []
    assert read | lost == set(range(30))
    assert not read & lost


def test_g23_a_full_queue_is_an_error_and_the_record_is_kept(place):
    sink, reader = place.sink(capacity=2, deadline=0.1), place.reader()
    kept = 0
    full = None
    while full is None and kept < 50:
        kept += 1
        try:
            sink.put(Output(kept - 1))
        except SinkFull as error:
            full = error
    assert "kept all the same" in str(full)
    found = receive(reader, kept)
    assert [legacy.parse_plain(data)["tokens"][0] for data in found] == list(range(kept))
    assert undelivered(sink, 5) == []


def test_g21_a_record_that_does_not_fit_is_reported_and_the_next_one_comes(place):
    sink, reader = place.sink(), place.reader()
    bad, good = Output(1, token=1 << 40), Output(2)
    sink.put(bad)
    sink.put(good)
    assert legacy.parse_plain(receive(reader, 1)[0])["tokens"] == [2, 2]
    assert isinstance(bad.settled[0], Undelivered)
    assert bad.settled[0].records == (("r0", 1, 1), ("r1", 1, 1))
    assert undelivered(sink, 5) == []


def test_g22_nothing_of_an_earlier_step_is_in_a_message(place):
    sink, reader = place.sink(layout="speculative"), place.reader("speculate_get_output")
    sink.put(Output(1 << 30, slots=range(200)))
    sink.put(Output(5, slots=(3,)))
    data = receive(reader, 2)[1]
    assert legacy.parse_speculative(data) == {"stop": 1, "counts": [0, 0, 0, 1], "tokens": [[], [], [], [5]]}
    assert set(np.frombuffer(data, np.int32).tolist()) == {0, 1, 4, 5}


def test_keys_are_those_of_the_readers(tmp_path):
    for number in (1, 8_000, 8_256, (1 << 20) - 1):
        assert derive_key(str(tmp_path), number) == legacy.custom_ftok(tmp_path, number)
    assert derive_key(str(tmp_path), 8_000) != derive_key(str(tmp_path), 8_256)
    found = os.stat(tmp_path)
    former = (found.st_dev & 0xFF) << 24 | (found.st_ino & 0xFF) << 16 | 7
    assert derive_key(str(tmp_path), 7, "16") & 0xFFFFFFFF == former
    assert derive_key(str(tmp_path), 7, "ftok") == sysv_ipc.ftok(str(tmp_path), 7, silence_warning=True)
    with pytest.raises(InvalidValue, match="no key from"):  # they would continue with the key -1
        derive_key(str(tmp_path / "missing"), 1)


def test_environment_variables_rule_as_they_do_for_the_readers(place, monkeypatch):
    monkeypatch.setenv("INFERENCE_MSG_QUEUE_ID", str(place.number))
    monkeypatch.setenv("INFERENCE_MSG_ID", "9")
    place.sinks.append(open_sink(f"sysv://{place.folder}?layout=plain"))
    place.sinks[0].put(Output(4))
    assert legacy.parse_plain(receive(place.reader(), 1)[0])["stop"] == 9
    with pytest.raises(InvalidValue, match="let them agree"):
        open_sink(f"sysv://{place.folder}?layout=plain&id={place.number + 1}")


@pytest.mark.parametrize("number", ["0", "2", "-3", "x", "2147483648"])
def test_message_ids_that_readers_refuse_or_that_have_no_sign_are_refused(place, monkeypatch, number):
    monkeypatch.setenv("INFERENCE_MSG_ID", number)
    with pytest.raises(InvalidValue, match="INFERENCE_MSG_ID"):
        place.sink()


@pytest.mark.parametrize(("options", "mode"), [({}, 0o600), ({"mode": "660"}, 0o660)])
def test_a_queue_is_private_unless_asked_otherwise(place, options, mode):
    place.sink(**options)
    assert int(str(place.mode()), 8) == mode


def test_a_queue_that_is_open_to_all_already_is_used_and_reported(place, caplog):
    place.reader()
    with caplog.at_level(logging.WARNING, "hal"):
        place.sink()
    assert "has mode 666, wider than the 600 asked for" in caplog.text
    assert "cannot detect a loss" in caplog.text


@pytest.mark.parametrize("layout", ["topk", "speculative-topk"])
def test_limits_below_one_message_are_an_error_with_both_cures(place, layout):
    if int(Path("/proc/sys/kernel/msgmax").read_text()) >= 530_448:
        pytest.skip("this machine's limits are raised")
    with pytest.raises(Unavailable, match="none would ever be sent") as caught:
        place.sink(layout=layout)
    assert " && ".join(SYSCTL) in str(caught.value)


def test_a_queue_of_another_layout_on_the_same_key_is_refused(place):
    reader = place.reader()
    reader.send(bytes(100))
    with pytest.raises(InvalidValue, match="100 bytes in all, not of 2056 each: another layout"):
        place.sink()


def test_only_a_dead_workers_messages_are_removed(place):
    code = """
        import sys, time
        sys.path.insert(0, sys.argv[1])
        import legacy_reader
        queue = legacy_reader.LegacyQueue(int(sys.argv[2]), "get_output")
        queue.send(bytes(2056))
        print("sent", flush=True)
        time.sleep(60)
    """
    arguments = [sys.executable, "-c", textwrap.dedent(code), str(Path(__file__).parent), str(place.key)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as former:
        assert former.stdout.readline() == "sent\n"
        with pytest.raises(InvalidValue, match=f"process {former.pid} sends"):
            place.sink()
        former.kill()
    sink = place.sink()
    assert sink.counters()["stale_removed"] == 1
    sink.put(Output(8))
    assert legacy.parse_plain(receive(place.reader(), 1)[0])["tokens"] == [8, 8]


def test_a_queue_removed_under_the_sink_is_an_error_with_the_unread(place):
    sink, reader = place.sink(), place.reader()
    reader.remove()
    sink.put(Output(0))
    sink._thread.join(20)  # the sender's thread ends with the queue
    with pytest.raises(SinkClosed, match="takes nothing"):
        sink.put(Output(9))
    assert ("r0", 0, 1) in undelivered(sink)


def test_g26_bad_urls_name_the_cure(place):
    for url, message in [
        ("sysv://", "names no layout"),
        (f"sysv://{place.folder}?layout=odd", "no layout 'odd'"),
        (f"sysv://{place.folder}?layout=plain&slots=256", "has 512 slots"),
        (f"sysv://{place.folder}?layout=plain&slots=512", "gives slots, and layout plain has no such option"),
        (f"sysv://{place.folder}?layout=topk&slots=512", "gives slots, and layout topk has no such option"),
        (f"sysv://{place.folder}?layout=plain&meta=packed", "gives meta, and layout plain has no such option"),
        (f"sysv://{place.folder}?layout=speculative&meta=flag", "gives meta, and layout speculative has no such"),
        (f"sysv://{place.folder}?layout=topk&meta=x", "for meta"),
        (f"sysv://{place.folder}?layout=plain&layout=topk", "gives an option twice"),
        (f"sysv://{place.folder}?layout=plain&size=1", "unknown options"),
        (f"sysv://{place.folder}?layout=plain&id=x", "for id"),
        (f"sysv://{place.folder}?layout=plain&meta=x", "for meta"),
        (f"sysv://{place.folder}?layout=speculative-topk&meta=x", "for meta"),
        (f"sysv://{place.folder}?layout=plain&id=", "for id"),
        (f"sysv://{place.folder}?layout=plain&id=2147483648", "for id"),
        (f"sysv://{place.folder}?layout=plain&mode=8", "for mode"),
        (f"sysv://{place.folder}?layout=plain&mode=0", "for mode"),
        (f"sysv://{place.folder}?layout=plain&mode=400", "for mode"),
        (f"sysv://{place.folder}?layout=plain&mode=1600", "for mode"),
        (f"sysv://{place.folder}/missing?layout=plain", "no key"),
    ]:
        with pytest.raises(InvalidValue, match=message) as caught:
            open_sink(url)
        assert caught.value.cure
    place.sink()
    with pytest.raises(InvalidValue, match="is open in this process already"):
        place.sink()


def test_what_the_transport_cannot_do_it_says(place):
    with pytest.raises(CapabilityMissing, match="no reader can notice a loss"):
        open_sink(place.url(), require_loss_detection=True)
    assert place.sink().detects_loss is False


def test_a_closed_sink_and_its_copy_after_a_fork_take_nothing(place):
    sink = place.sink()
    child = os.fork()
    if child == 0:
        try:
            sink.put(Output(0))
        except HalError:
            sink.close(1)
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    sink.close(1)
    sink.close(1)
    with pytest.raises(SinkClosed):
        sink.put(Output(0))


def test_g23_an_uncopied_output_is_named_when_the_sink_closes(place):
    latch, sink = threading.Event(), place.sink()
    outputs = [Output(1, latch=latch), Output(2)]
    for output in outputs:
        sink.put(output)
    until(lambda: sink._in_hand is outputs[0])

    def open_when_given_up():
        until(lambda: sink._stop)
        latch.set()

    threading.Thread(target=open_when_given_up).start()
    assert undelivered(sink, 0.1) == [("r0", 1, 1), ("r1", 1, 1), ("r0", 2, 1), ("r1", 2, 1)]
    assert isinstance(outputs[1].settled[0], SinkClosed)


def test_g20_a_step_of_a_real_state_is_found_by_its_batch_ids(place):
    """Slots 1 and 3 hold requests, 2 was preempted, 0 is free; the step names them in an order of its own."""
    bound = bind(CpuPlugin.open(0, {}))
    state, stream = bound.state(StateConfig(num_slots=4, max_model_len=8)), bound.default_stream
    held = [admit(Request(f"r{slot}", [1]), state.layout) for slot in range(4)]
    tasks = [Task(TaskKind.PREFILL, slot, held[slot], 0, 1, [slot]) for slot in (1, 2, 3)]
    bound.insert_tasks(state=state, tasks=tasks, stream=stream).wait()
    tokens = np.array([[50], [51], [52], [53]])
    bound.async_set_value(target=state.view("sampled_token_ids"), value=tokens, stream=stream).wait()
    bound.insert_tasks(state=state, tasks=[Task(TaskKind.PREEMPTED, 2, held[2])], stream=stream).wait()
    step = Step(0, {"target": np.array([3, 2, 0, 1])})
    bound.update_inputs(state=state, step=step, stream=stream).wait()
    sink, reader = place.sink(), place.reader()
    bound.save_output(state=state, step=step, sink=sink, stream=stream).wait(10)
    assert legacy.parse_plain(receive(reader, 1)[0]) == {"stop": 1, "tokens": [53, -9, -1, 51]}


LARGE = """
    import os, sys
    for name, value in (("msgmax", "1048576"), ("msgmnb", "16777216")):
        open(f"/proc/sys/kernel/{name}", "w").write(value)
    sys.path.insert(0, sys.argv[1])
    import legacy_reader as legacy
    from sysv_place import Output, receive, undelivered
    from hal_engine.transport import open_sink
    cases = [("topk", "get_output_topk", legacy.parse_topk, "&meta=flag"),
             ("topk", "get_output_topk", legacy.parse_topk_today, ""),
             ("speculative-topk", "speculate_get_output_topk", legacy.parse_speculative_topk, "&meta=flag"),
             ("speculative-topk", "speculate_get_output_topk", legacy.parse_speculative_topk_today, "&meta=packed"),
             ("speculative-topk", "speculate_get_output_topk_256",
              lambda d: legacy.parse_speculative_topk_today(d, 256), "&slots=256")]
    for number, (layout, operation, parse, more) in enumerate(cases, 1):
        sink = open_sink(f"sysv://{sys.argv[1]}?layout={layout}&id={number}{more}")
        queue = legacy.LegacyQueue(legacy.custom_ftok(sys.argv[1], number), operation)
        for step in range(40):
            sink.put(Output(step))
        found = [parse(data) for data in receive(queue, 40)]
        first = [row["tokens"][1][0] if layout == "topk" else row["tokens"][1][0][0] for row in found]
        assert first == list(range(40)), first
        assert undelivered(sink, 5) == []
        if "flag" in found[0]:
            assert found[0]["flag"] == 3
            assert found[0].get("columns") == (None if more == "&meta=flag" else 1)
    print("fine")
"""


def test_g19_the_large_messages_go_through_a_kernel_with_raised_limits():
    """In an IPC namespace of its own, so that the machine's limits stay as they are."""
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-i", "true"], check=False).returncode:
        pytest.skip("no IPC namespace may be made here")
    arguments = ["unshare", "-i", sys.executable, "-c", textwrap.dedent(LARGE), str(Path(__file__).parent)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "fine\n", done.stderr
