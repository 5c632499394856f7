"""Workers that were started by themselves, and the engine that hires them: who fits, who does not, and who is told."""

import contextlib
import socket
import threading

import pytest
import zmq
from hal_core import HalError, InvalidValue, Unavailable

from hal.cli import main
from hal.cli.run_options import Options, RankOptions, workers_of
from hal.cli.run_workers import hire
from hal.distributed import hiring
from hal.distributed.hired import HiredWorker, Post
from hal.distributed.hiring import RemoteWorker, job_keys
from hal.distributed.rank import versions
from hal.model import DEFAULT_CHECKPOINT
from hal.transport.curve import CurveKeys
from hal.transport.urls import private_ipc_url, release_folder
from tests.model.conftest import LLAMA, parse_config, tensors, write

LOCAL = "tcp://127.0.0.1:*"
PATIENCE = 60.0
needs_curve = pytest.mark.skipif(not zmq.has("curve"), reason="this ZeroMQ was built without CURVE")


class Employed:
    """A worker in a thread, which starts no ranks unless it is told to; ``ended`` is its status, or its error."""

    def __init__(self, role, url, key=None, *, tp=1, model=DEFAULT_CHECKPOINT, found=None, timeout=PATIENCE):
        keys = job_keys(url, key, make=True)
        self._worker = HiredWorker(Post(role, tp, url, model, key), keys, versions() if found is None else found)
        self.url, self.ended = self._worker.url, None
        self.thread = threading.Thread(target=self._serve, args=(timeout,), daemon=True)
        self.thread.start()

    def _serve(self, timeout):
        with self._worker:
            try:
                self.ended = self._worker.serve(timeout)
            except HalError as error:
                self.ended = error

    def wait(self):
        self.thread.join(PATIENCE)
        return self.ended

    @property
    def how(self):
        return self._worker.how


def options(*urls, key=None, tp=1, model=DEFAULT_CHECKPOINT):
    ranks = RankOptions(tp=tp, workers=tuple(urls), key=key)
    return Options("cpu", {}, model, "cpu", 8, None, 256, [], "none", None, False, ranks=ranks)


@pytest.fixture
def ipc():
    urls = [private_ipc_url() for _ in range(3)]
    yield urls
    for url in urls:
        release_folder(url)


def test_workers_are_hired_by_role_in_any_order_and_dismissed(ipc):
    roles = ("decode", "prefill", "prefill")
    workers = [Employed(role, url) for role, url in zip(roles, ipc, strict=True)]
    with hire(options(*ipc), PATIENCE) as hired:
        assert [met.role for _, met in hired.workers] == ["prefill", "prefill", "decode"]
        assert hired.options.ranks.split == (2, 1)
        assert hired.keys is None
    assert [worker.wait() for worker in workers] == [0, 0, 0]


@needs_curve
def test_over_tcp_all_have_one_key_which_a_worker_makes(tmp_path):
    key = tmp_path / "key"
    workers = [Employed(role, LOCAL, key) for role in ("prefill", "decode")]
    with hire(options(*(one.url for one in workers), key=key), PATIENCE) as hired:
        assert [met.host for _, met in hired.workers] == ["127.0.0.1"] * 2
        assert [one.own_address() for one, _ in hired.workers] == ["127.0.0.1"] * 2
        assert hired.keys.peers == (hired.keys.public,)
    assert [worker.wait() for worker in workers] == [0, 0]


def other_checkpoint(tmp_path):
    return write(tmp_path / "other", LLAMA, tensors(parse_config(LLAMA)))


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("role", "none of the workers is a decode worker"),
        ("tp", "--tp of the worker at .*: 2, here 1"),
        ("checkpoint", "checkpoint of the worker at .*, here "),
        ("versions", "the engine has paddle-hal .*, the worker paddle-hal-core 0.9.*"),
    ],
)
def test_what_does_not_fit_is_refused_by_name_on_both_sides(what, told, ipc, tmp_path):
    wrong = {
        "role": {},
        "tp": {"tp": 2},
        "checkpoint": {"model": other_checkpoint(tmp_path)},
        "versions": {"found": {"paddle-hal-core": "0.9"}},
    }[what]
    workers = [Employed("prefill", ipc[0]), Employed("prefill" if what == "role" else "decode", ipc[1], **wrong)]
    with pytest.raises(InvalidValue, match=told) as refused:
        hire(options(*ipc[:2]), PATIENCE)
    assert "(" in str(refused.value), "an error has a cure"
    first, second = (worker.wait() for worker in workers)
    assert isinstance(first, InvalidValue)
    assert isinstance(second, InvalidValue)
    for ended in (first, second):
        assert str(ended).startswith("the engine refuses: ")


@needs_curve
@pytest.mark.parametrize("what", ["key", "nobody", "stranger"])
def test_who_does_not_answer_is_told_with_what_was_found_there(what, tmp_path):
    key, other = tmp_path / "key", tmp_path / "other"
    worker = Employed("prefill", LOCAL, key, timeout=2.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        urls = [worker.url]
        if what == "key":
            job_keys(LOCAL, other, make=True)
            told = "something listens there, but understands nothing under this key"
        elif what == "stranger":
            urls, told = [f"tcp://127.0.0.1:{server.getsockname()[1]}"], "something listens there"
        else:
            urls, told = ["tcp://127.0.0.1:9"], "it cannot be reached: Connection refused"
        with pytest.raises(Unavailable, match=told) as refused:
            hire(options(*urls, key=other if what == "key" else key), 1.0)
    assert urls[0] in str(refused.value)
    assert "no engine with this key came" in str(worker.wait())


def test_a_worker_has_one_engine(ipc):
    worker = Employed("prefill", ipc[0])
    first, second = (RemoteWorker(ipc[0], None) for _ in range(2))
    first.meet(versions(), PATIENCE)
    with pytest.raises(InvalidValue, match="it works for another engine"):
        second.meet(versions(), PATIENCE)
    second.dismiss()
    first.dismiss()
    assert worker.wait() == 0


def test_an_engine_that_vanishes_ends_its_worker(ipc, monkeypatch):
    monkeypatch.setattr("hal.distributed.hired.SILENCE", 0.3)
    worker, engine = Employed("prefill", ipc[0]), RemoteWorker(ipc[0], None)
    engine.meet(versions(), PATIENCE)
    assert "nothing was heard of the engine" in str(worker.wait())
    engine.dismiss()


def test_a_worker_that_vanishes_is_told_by_its_silence(ipc, monkeypatch):
    monkeypatch.setattr(hiring, "SILENCE", 0.3)
    monkeypatch.setattr("hal.distributed.hired.SILENCE", 0.1)
    worker, engine = Employed("prefill", ipc[0]), RemoteWorker(ipc[0], None)
    engine.meet(versions(), PATIENCE)
    worker.wait()
    while not (how := engine.ended()):
        pass
    assert how == f"nothing was heard of the worker at {ipc[0]} for 0.3 s"
    engine.dismiss()


def test_who_was_met_hears_of_the_engine_while_it_waits_for_the_others(ipc, monkeypatch):
    heard, obey = threading.Event(), HiredWorker._obey

    def noted(worker, said):
        if isinstance(said, hiring.Beat):
            heard.set()
        obey(worker, said)

    monkeypatch.setattr(HiredWorker, "_obey", noted)
    workers = [Employed("prefill", ipc[0])]
    late = threading.Thread(target=lambda: heard.wait(PATIENCE) and workers.append(Employed("decode", ipc[1])))
    late.start()
    with hire(options(*ipc[:2]), PATIENCE / 2) as hired:
        assert len(hired.workers) == 2
    late.join()
    assert [worker.wait() for worker in workers] == [0, 0]


def test_who_ends_while_others_are_waited_for_is_told_at_once(ipc, monkeypatch):
    monkeypatch.setattr(RemoteWorker, "ended", lambda one: f"the worker at {one.url}: its host is lost")
    worker = Employed("prefill", ipc[0])
    with pytest.raises(InvalidValue, match=f"--workers: the worker at {ipc[0]}: its host is lost"):
        hire(options(*ipc[:2]), PATIENCE)
    assert isinstance(worker.wait(), InvalidValue)


def test_what_the_engine_cannot_do_is_told_to_those_it_has_hired(ipc):
    workers = [Employed(role, url) for role, url in zip(("prefill", "decode"), ipc[:2], strict=True)]
    with pytest.raises(Unavailable), hire(options(*ipc[:2]), PATIENCE):
        raise Unavailable("no room", cure="make some")
    for worker in workers:
        assert "the engine refuses: no room" in str(worker.wait())


def test_workers_that_make_the_key_at_once_have_one(tmp_path):
    key, gate = tmp_path / "key", threading.Barrier(8)
    found = []

    def make():
        gate.wait()
        found.append(job_keys(LOCAL, key, make=True).secret)

    makers = [threading.Thread(target=make) for _ in range(8)]
    for one in makers:
        one.start()
    for one in makers:
        one.join()
    assert set(found) == {key.read_text().strip()}
    assert len(found) == 8
    assert list(tmp_path.iterdir()) == [key]


def test_keys_are_a_file_that_nobody_else_may_read(tmp_path):
    key = tmp_path / "key"
    with pytest.raises(InvalidValue, match="goes over the network, and there is no key"):
        job_keys(LOCAL, None)
    with pytest.raises(InvalidValue, match="is private by its folder"):
        job_keys("ipc:///tmp/x", key)
    with pytest.raises(InvalidValue, match="is no key: No such file or directory"):
        job_keys(LOCAL, key)
    with pytest.raises(InvalidValue, match=r"there is no folder .*none \(make it, or name another file"):
        job_keys(LOCAL, tmp_path / "none" / "key", make=True)
    key.write_text(CurveKeys.new().secret)
    key.chmod(0o644)
    with pytest.raises(InvalidValue, match="others may read"):
        job_keys(LOCAL, key)
    with pytest.raises(InvalidValue, match=r"is a folder \(name a file in it"):
        job_keys(LOCAL, tmp_path)
    key.chmod(0o600)
    assert job_keys(LOCAL, key).public == job_keys(LOCAL, key, make=True).public
    key.write_text("no key at all")
    with pytest.raises(InvalidValue, match="is no key"):
        job_keys(LOCAL, key)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("run", "--workers", "ipc:///a,"), "--workers: 'ipc:///a,'"),
        (("run", "--workers", "ipc:///a,ipc:///a"), "--workers: ipc:///a, ipc:///a (give each worker's url once"),
        (("run", "--workers", "ipc:///a,tcp://b:1"), "--workers: ipc:///a, tcp://b:1 (give each worker's url once"),
        (("run", "--workers", "http://a"), "--workers: 'http://a' has no scheme"),
        (("run", "--workers", "ipc:///a", "--split", "1,1"), "--split: the workers were started by themselves"),
        (("run", "--workers", "ipc:///a", "--dp", "2"), "--dp: the workers were started by themselves"),
        (("run", "--workers", "ipc:///a", "--key", "k"), "--key: 'ipc:///a' is private by its folder"),
        (("run", "--workers", "tcp://h:1"), "--key: 'tcp://h:1' goes over the network, and there is no key"),
        (("run", "--key", "k"), "--key: nothing goes over the network (leave it out, or give --workers"),
        (("run", "--key", "k", "--split", "1,1"), "--key: nothing goes over the network"),
        (("run", "--key", "k", "--sink", "ipc:///a/b"), "--key: nothing goes over the network"),
        (("run", "--sink", "tcp://10.0.0.1:1"), "--key: 'tcp://10.0.0.1:1' goes over the network, and there is no key"),
        (("run", "--sink", "tcp://h:1", "--tp", "2"), "--key: 'tcp://h:1' goes over the network, and there is no key"),
        (("run", "--sink", "tcp://127.0.0.1:1", "--key", "none"), "--key: none is no key"),
        (("tail", "tcp://0.0.0.0:*"), "--key: 'tcp://0.0.0.0:*' goes over the network, and there is no key"),
        (("tail", "ipc:///a/b", "--key", "k"), "--key: 'ipc:///a/b' is private by its folder"),
        (("run", "--dp-sync", "--split", "1,1"), "or give --dp without --split and --workers"),
        (("worker", "--role", "both", "--listen", "ipc:///a"), "invalid choice: 'both'"),
        (("worker", "--role", "decode", "--listen", "ipc:///a", "--tp", "0"), "--tp: 0"),
        (("worker", "--role", "decode", "--listen", "ipc:///a", "--tp", "3"), "--tp: 3 ranks cannot share out"),
        (("worker", "--role", "decode", "--listen", "nowhere"), "has no scheme"),
        (("worker", "--role", "decode", "--listen", "ipc:///no/such/folder"), "cannot bind"),
        (("worker", "--role", "decode", "--listen", LOCAL), "there is no key"),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, tuple) else "",
)
def test_what_cannot_be_is_refused_before_anything_starts(arguments, told, capsys):
    more = ["--prompt", "a", "--device", "cpu"] if arguments[0] == "run" else []
    with pytest.raises(SystemExit) as ended:
        main([*arguments, *more])
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


def test_an_address_in_use_or_every_address_of_a_host_is_refused(tmp_path, capsys):
    key = str(tmp_path / "key")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for host, told in (
            ("127.0.0.1", "another program listens there (choose a free port)"),
            ("host.invalid", "that is no address of this host (name one that it has"),
            ("192.0.2.1", "that is no address of this host (name one that it has"),
            ("0.0.0.0", "is every address of this host"),
        ):
            url = f"tcp://{host}:{taken.getsockname()[1]}"
            with pytest.raises(SystemExit) as ended:
                main(["worker", "--role", "prefill", "--listen", url, "--key", key])
            assert ended.value.code == 2
            err = capsys.readouterr().err
            assert "--listen" in err
            assert told in err


def test_urls_are_taken_apart():
    assert workers_of(None) == ()
    assert workers_of("ipc:///a, tcp://b:1") == ("ipc:///a", "tcp://b:1")
    with contextlib.suppress(InvalidValue):
        workers_of("")
        raise AssertionError("no url at all")
