"""The file with the key for records over tcp, and the addresses that need one."""

import threading

import pytest
from hal_core import InvalidValue
from hal_engine.transport.curve import CurveKeys
from hal_engine.transport.key_file import record_keys

from hal.cli import main

LOCAL = "tcp://127.0.0.1:*"


def test_processes_that_make_the_key_at_once_have_one(tmp_path):
    key, gate = tmp_path / "key", threading.Barrier(8)
    found = []

    def make():
        gate.wait()
        found.append(record_keys(LOCAL, key, make=True).secret)

    makers = [threading.Thread(target=make) for _ in range(8)]
    for one in makers:
        one.start()
    for one in makers:
        one.join()
    assert set(found) == {key.read_text().strip()}
    assert len(found) == 8
    assert list(tmp_path.iterdir()) == [key]


def test_only_another_host_needs_a_key():
    assert record_keys(LOCAL, None) is None
    assert record_keys("ipc:///tmp/x", None) is None
    with pytest.raises(InvalidValue, match="goes over the network, and there is no key"):
        record_keys("tcp://10.0.0.1:1", None)


def test_keys_are_a_file_that_nobody_else_may_read(tmp_path):
    key = tmp_path / "key"
    with pytest.raises(InvalidValue, match="is private by its folder"):
        record_keys("ipc:///tmp/x", key)
    with pytest.raises(InvalidValue, match="is no key: No such file or directory"):
        record_keys(LOCAL, key)
    with pytest.raises(InvalidValue, match=r"there is no folder .*none \(make it, or name another file"):
        record_keys(LOCAL, tmp_path / "none" / "key", make=True)
    key.write_text(CurveKeys.new().secret)
    key.chmod(0o644)
    with pytest.raises(InvalidValue, match="others may read"):
        record_keys(LOCAL, key)
    with pytest.raises(InvalidValue, match=r"is a folder \(name a file in it"):
        record_keys(LOCAL, tmp_path)
    key.chmod(0o600)
    assert record_keys(LOCAL, key).public == record_keys(LOCAL, key, make=True).public
    key.write_text("no key at all")
    with pytest.raises(InvalidValue, match="is no key"):
        record_keys(LOCAL, key)


@pytest.mark.parametrize(
    ("arguments", "refusal"),
    [
        (("run", "--key", "k"), "--key: nothing goes over the network (leave it out, or give --sink tcp://"),
        (("run", "--key", "k", "--split", "1,1"), "--key: nothing goes over the network"),
        (("run", "--key", "k", "--sink", "ipc:///a/b"), "--key: nothing goes over the network"),
        (("run", "--sink", "tcp://10.0.0.1:1"), "--key: 'tcp://10.0.0.1:1' goes over the network, and there is no key"),
        (("run", "--sink", "tcp://h:1", "--tp", "2"), "--key: 'tcp://h:1' goes over the network, and there is no key"),
        (("run", "--sink", "tcp://127.0.0.1:1", "--key", "none"), "--key: none is no key"),
        (("tail", "tcp://0.0.0.0:*"), "--key: 'tcp://0.0.0.0:*' goes over the network, and there is no key"),
        (("tail", "ipc:///a/b", "--key", "k"), "--key: 'ipc:///a/b' is private by its folder"),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, tuple) else "",
)
def test_keys_that_do_not_fit_are_refused_before_the_start(arguments, refusal, capsys):
    more = ["--prompt", "a", "--device", "cpu"] if arguments[0] == "run" else []
    with pytest.raises(SystemExit) as ended:
        main([*arguments, *more])
    assert ended.value.code == 2
    assert refusal in capsys.readouterr().err
