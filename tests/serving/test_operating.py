"""`hal serve` for an operator: its log and names of requests, options by file and environment, a Unix socket, TLS, a
service manager, a proxy, and a restart that loses no request."""

import datetime
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from hal_core import InvalidValue, Unavailable
from hal_engine.cli.config_file import read_config
from hal_engine.cli.server_options import Server
from hal_engine.options import EngineOptions
from hal_engine.serving import check_path

from .conftest import COMMAND, HANGS

pytestmark = pytest.mark.long(25)
ROOT = Path(__file__).parents[2]
BODY = {"prompt": "def main(", "max_tokens": 6, "temperature": 0}


def tool(name):
    """The path of a program; the test is skipped by its name where it is not."""
    if (found := shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin")) is None:
        pytest.skip(f"{name} is not installed")
    return found


@contextmanager
def started(*options, out=subprocess.DEVNULL, **variables):
    """A server whose first lines are read by the test."""
    command = [sys.executable, "-c", COMMAND, "serve", *options]
    environment = os.environ | variables
    process = subprocess.Popen(command, stdout=out, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.communicate(timeout=HANGS)


@contextmanager
def notified(path):
    """The socket of a service manager."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(path))
        manager.settimeout(HANGS)
        yield lambda: manager.recv(4096).decode()


@pytest.fixture(scope="module")
def operated(tmp_path_factory):
    """A server as a unit starts it: a file, the environment and the command line, a Unix socket under a proxy's path, a
    notify socket, and a log. Stopped at the end, which it announces, with the status of SIGTERM."""
    folder = tmp_path_factory.mktemp("operated")
    path, log = folder / "hal.sock", folder / "log"
    (folder / "hal.toml").write_text(
        f'uds = "{path}"\nslots = 2\nroot-path = "/llm"\naccess-log = "text"\nname = "file"\ndevice = "cpu"\n'
    )
    variables = {
        "NOTIFY_SOCKET": str(folder / "notify"),
        "HAL_SERVE_ACCESS_LOG": "json",
        "HAL_SERVE_NAME": "environment",
        "HAL_SERVE_SLTOS": "3",
    }
    with notified(folder / "notify") as message, log.open("w") as out:
        command = ("--config", str(folder / "hal.toml"), "--name", "line")
        with started(*command, out=out, **variables) as process:
            assert process.stderr.readline() == "hal: HAL_SERVE_SLTOS is the variable of no option, and ignored\n"
            first = process.stderr.readline()
            assert first.startswith(f"hal: the model 'line' is on unix:{path} (at most "), first + process.stderr.read()
            assert process.stderr.readline() == f"hal: ready on unix:{path}, root path /llm\n"
            assert message() == f"READY=1\nSTATUS=ready on unix:{path}, root path /llm"
            yield path, log
            process.send_signal(signal.SIGTERM)
            assert message() == "STOPPING=1"
            assert process.wait(HANGS) == 128 + signal.SIGTERM


@pytest.fixture
def client(operated):
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(operated[0])), base_url="http://llm.example") as found:
        yield found


def logged(operated, name):
    """The line of a request."""
    lines = [json.loads(line) for line in operated[1].read_text().splitlines()]
    (line,) = [line for line in lines if line["id"] == name]
    return line


def ended(operated, client, name):
    """The same, once it is written: a later request's line comes after it."""
    client.get("/v1/models", headers={"X-Request-Id": f"after-{name}"})
    while f'"after-{name}"' not in operated[1].read_text():
        pass
    return logged(operated, name)


def test_command_line_environment_and_file_go_in_that_order(client):
    assert [one["id"] for one in client.get("/v1/models").json()["data"]] == ["line"]
    assert client.get("/live").json() == client.get("/ready").json() == {"status": "ok"}


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_one_line_with_its_tokens_and_times(operated, client, stream):
    name = f"mine-{stream}"
    answer = client.post("/v1/completions", json={**BODY, "stream": stream, "n": 2}, headers={"X-Request-Id": name})
    assert (answer.status_code, answer.headers["X-Request-Id"]) == (200, name)
    line = ended(operated, client, name)
    assert 0 < line.pop("first_ms") <= line.pop("ms")
    assert datetime.datetime.fromisoformat(line.pop("time")).tzinfo is datetime.UTC
    usage = {"prompt_tokens": line.pop("prompt_tokens"), "tokens": line.pop("tokens")}
    assert usage == {"prompt_tokens": usage["prompt_tokens"], "tokens": 12}
    route = {"method": "POST", "route": "/v1/completions", "status": 200}
    assert line == {"id": name, "client": None, "ended": "length", **route}


@pytest.mark.parametrize("given", ["x" * 129, "two words", "a\tb", 'a"b', ""])
def test_a_name_that_could_spoil_the_log_is_replaced(client, given):
    found = client.get("/v1/models", headers={"X-Request-Id": given}).headers.get_list("X-Request-Id")
    assert len(found) == 1
    assert re.fullmatch("[0-9a-f]{32}", found[0])


def test_refusals_are_logged_and_contented_probes_are_not(operated, client):
    refused = client.post("/v1/completions", json={"nope": 1}, headers={"X-Request-Id": "refused"})
    client.get("/nowhere/at%0Aall", headers={"X-Request-Id": "nowhere"})
    client.get("/ready", headers={"X-Request-Id": "probe"})
    assert refused.status_code == 400
    line = ended(operated, client, "refused")
    assert (line["status"], line["route"], "tokens" in line) == (400, "/v1/completions", False)
    assert (logged(operated, "nowhere")["route"], logged(operated, "nowhere")["status"]) == (None, 404)
    assert '"probe"' not in operated[1].read_text()


def test_promtool_takes_the_metrics_and_the_scrape_example(client):
    promtool = tool("promtool")
    metrics = client.get("/metrics").content
    done = subprocess.run([promtool, "check", "metrics"], input=metrics, capture_output=True, check=False)
    faults = [line for line in done.stdout.decode().splitlines() if "should not contain ':'" not in line]
    assert faults == [], "names with ':' are vLLM's"
    check = [promtool, "check", "config", "--syntax-only", str(ROOT / "deploy/prometheus.yml")]
    assert subprocess.run(check, capture_output=True, check=False).returncode == 0


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A certificate for localhost and its key; paths."""
    folder, key = tmp_path_factory.mktemp("tls"), ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    forms = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (folder / "cert.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    (folder / "key.pem").write_bytes(key.private_bytes(*forms))
    return folder / "cert.pem", folder / "key.pem"


@contextmanager
def proxied(folder, certificate, one, two):
    """The example's nginx in front of two Unix sockets; a client of it, once it listens."""
    nginx = tool("nginx")
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    text = (ROOT / "deploy/nginx.conf").read_text(encoding="utf-8")
    for old, new in {
        "unix:/run/hal/a.sock": f"unix:{one}",
        "unix:/run/hal/b.sock": f"unix:{two}",
        "listen 443 ssl": f"listen 127.0.0.1:{port} ssl",
        "/etc/nginx/llm.pem": str(certificate[0]),
        "/etc/nginx/llm.key": str(certificate[1]),
    }.items():
        assert old in text
        text = text.replace(old, new)
    folders = "".join(
        f"{name}_temp_path {folder}/{name};\n" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (folder / "nginx.conf").write_text(
        f"{'user root; ' * (os.geteuid() == 0)}daemon off; pid {folder}/pid; events {{}}\n"
        f"http {{ access_log off; {folders} {text} }}"
    )
    process = subprocess.Popen([nginx, "-p", str(folder), "-e", f"{folder}/error.log", "-c", "nginx.conf"])
    trust = ssl.create_default_context(cafile=str(certificate[0]))
    try:
        with httpx.Client(verify=trust, base_url=f"https://localhost:{port}/llm", timeout=HANGS) as outside:
            while True:
                try:
                    assert outside.get("/ready").json() == {"status": "ok"}
                    break
                except httpx.ConnectError:
                    assert process.poll() is None, (folder / "error.log").read_text()
            yield outside
    finally:
        process.terminate()
        process.wait(HANGS)


def test_nginx_serves_it_under_a_path_with_tls(operated, client, certificate, tmp_path):
    """The example's file, with this server, port and certificate."""
    with proxied(tmp_path, certificate, operated[0], tmp_path / "nobody.sock") as outside:
        for stream in (False, True):
            answers = [one.post("/v1/completions", json=BODY | {"stream": stream}) for one in (client, outside)]
            assert [answer.status_code for answer in answers] == [200, 200]
        assert answers[1].text.endswith("data: [DONE]\n\n")
        assert 'fetch("health")' in outside.get("/").text
        given = outside.get("/v1/models", headers={"X-Request-Id": "of-the-client"}).headers["X-Request-Id"]
        made = outside.get("/v1/models").headers["X-Request-Id"]
    assert given == "of-the-client"
    for name in (given, made):
        line = ended(operated, client, name)
        assert (line["route"], line["client"]) == ("/v1/models", "127.0.0.1")


def test_the_server_has_tls_of_its_own(certificate):
    files = ("--ssl-certfile", str(certificate[0]), "--ssl-keyfile", str(certificate[1]))
    with started("--port", "0", "--device", "cpu", *files) as process:
        line = process.stderr.readline()
        port = re.search(r"https://127\.0\.0\.1:(\d+) ", line)[1]
        assert process.stderr.readline() == f"hal: ready on https://127.0.0.1:{port}\n"
        trust = ssl.create_default_context(cafile=str(certificate[0]))
        with httpx.Client(verify=trust, base_url=f"https://localhost:{port}", timeout=HANGS) as client:
            answer = client.post("/v1/completions", json=BODY | {"stream": True})
        assert answer.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("prot = 1", "no option is called 'prot' (did you mean port?)"),
        ("port = 'x'", "port: expected `int`, got `str` (give such a value)"),
        ("slots = true", "slots: expected `int`, got `bool` (give such a value)"),
        ("port = ", "Invalid value (at end of document) (write NAME = VALUE, such as port = 8000)"),
        (None, "No such file or directory (name a readable file)"),
    ],
)
def test_a_file_that_cannot_be_is_named_with_its_line(tmp_path, text, says):
    path = tmp_path / "hal.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InvalidValue) as caught:
        read_config(str(path), (Server, EngineOptions))
    assert str(caught.value).startswith(f"--config: {path}: ")
    assert says in str(caught.value)


def test_the_files_names_are_those_of_the_options(tmp_path):
    (tmp_path / "hal.toml").write_text(
        'max-waiting = 3\ncors_origin = "*"\nrequire = ["a=b"]\ndrain = 1\nlenient = true'
    )
    found = read_config(str(tmp_path / "hal.toml"), (Server, EngineOptions))
    assert found == {"max_waiting": 3, "cors_origin": ["*"], "require": ["a=b"], "drain": 1.0, "lenient": True}
    assert {*read_config(str(ROOT / "deploy/hal.toml"), (Server, EngineOptions))} >= {"host", "access_log"}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--access-log", "xml"), "--access-log: 'xml' (give off, text, json)"),
        (("--root-path", "llm"), "--root-path: 'llm' (give a path that begins with / and does not end with it"),
        (("--uds", "x", "--port", "8000"), "--port: it contradicts --uds (leave it out)"),
        (("--uds", "x", "--host", "::1"), "--host: it contradicts --uds (leave it out)"),
        (("--ssl-keyfile", "k"), "--ssl-keyfile: it needs --ssl-certfile (give that too, or leave it out)"),
        (("--ssl-certfile", "nowhere"), "--ssl-certfile: nowhere: No such file or directory (give a certificate and"),
        (("--config", "nowhere"), "--config: nowhere: No such file or directory (name a readable file)"),
    ],
)
def test_what_cannot_be_is_one_line(command, options, says):
    done = command("serve", "--device", "cpu", *options)
    assert (done.status, len(done.err.splitlines())) == (2, 1), done.err
    assert says in done.err


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("PORT", "tcp://10.0.0.1:80", "'tcp://10.0.0.1:80' is no whole number"),
        ("PORT", "99999", "99999 (give a number from 0 to 65535)"),
        ("LENIENT", "maybe", "'maybe' is no boolean"),
        ("MODEL", "/nowhere", "no directory '/nowhere' (give the directory of a checkpoint)"),
    ],
)
def test_a_value_of_the_environment_is_refused_by_its_variable(command, monkeypatch, name, value, says):
    monkeypatch.setenv(f"HAL_SERVE_{name}", value)
    done = command("serve", "--device", "cpu")
    assert (done.status, done.err) == (2, f"hal: error: HAL_SERVE_{name}: {says}\n")


def test_a_value_of_the_file_is_refused_by_its_key(command, tmp_path):
    (tmp_path / "hal.toml").write_text("max_waiting = -1\nport = 0")
    done = command("serve", "--device", "cpu", "--config", str(tmp_path / "hal.toml"))
    where = f"--config: {tmp_path}/hal.toml: max-waiting"
    assert (done.status, done.err) == (2, f"hal: error: {where}: -1 (give a number of at least 0)\n")


@pytest.mark.conform
def test_an_error_of_the_engine_process_names_the_variable():
    with started("--port", "0", HAL_SERVE_DEVICE="nowhere") as process:
        assert " on http://" in process.stderr.readline()
        assert process.stderr.readline().startswith("hal: error: HAL_SERVE_DEVICE: no device 'nowhere'; installed: ")
        assert process.wait(HANGS) == 2


def test_a_socket_that_cannot_be_made_is_named():
    with started("--device", "cpu", "--uds", "/nowhere/x") as process:
        line = process.stderr.readline()
        assert process.wait(HANGS) == 2
    assert line.startswith("hal: error: --uds: /nowhere/x: No such file or directory (name a socket in a folder")


@pytest.mark.parametrize("name", ["hal.service", "hal@a.service"])
def test_systemd_takes_the_unit(tmp_path, name):
    """With a program that is here; as one of two, with the line for that."""
    text = (ROOT / "deploy/hal.service").read_text(encoding="utf-8")
    assert "SuccessExitStatus=143" in text
    unit = tmp_path / name
    (line,) = re.findall("with the line (Environment=.*?),", text)
    lines = f"[Service]\n{line}\n" if "@" in name else "[Service]\n"
    unit.write_text(text.replace("/opt/hal/bin/hal", "/bin/true").replace("[Service]\n", lines))
    done = subprocess.run([tool("systemd-analyze"), "verify", str(unit)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_hadolint_takes_the_dockerfile():
    done = subprocess.run([tool("hadolint"), str(ROOT / "deploy/Dockerfile")], capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (0, b"")


@contextmanager
def beside(path):
    """A server at a socket, of which its proxy takes off the path; ready."""
    options = ("--device", "cpu", "--slots", "4", "--uds", str(path), "--root-path", "/llm")
    with started(*options, "--allowed-host", "localhost") as process:
        first = process.stderr.readline()
        assert process.stderr.readline() == f"hal: ready on unix:{path}, root path /llm\n", first
        yield process


@pytest.mark.conform
def test_a_restart_behind_nginx_loses_no_request(certificate, tmp_path):
    """Clients send all the time, half of them read streams; each of two servers is ended by SIGTERM and started again,
    the second one as soon as the first one is ready."""
    one, two, stop = tmp_path / "a.sock", tmp_path / "b.sock", threading.Event()

    def work(outside, stream, found):
        while not stop.is_set():
            answer = outside.post("/v1/completions", json=BODY | {"stream": stream})
            text = answer.text
            if answer.status_code == 200 and stream:
                events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
                text = "".join(event["choices"][0]["text"] for event in events) + text[-8:]
            elif answer.status_code == 200:
                text = answer.json()["choices"][0]["text"] + "[DONE]\n\n"
            found.append((answer.status_code, text))

    with ExitStack() as stack:
        running = {path: stack.enter_context(beside(path)) for path in (one, two)}
        outside = stack.enter_context(proxied(tmp_path, certificate, one, two))
        answers = [[] for _ in range(4)]
        pool = stack.enter_context(ThreadPoolExecutor(4))
        stack.callback(stop.set)
        workers = [pool.submit(work, outside, number % 2 == 1, found) for number, found in enumerate(answers)]
        for path in (one, two):
            running[path].send_signal(signal.SIGTERM)
            assert running[path].wait(HANGS) == 128 + signal.SIGTERM
            stack.enter_context(beside(path))
        ends = [len(found) + 4 for found in answers]
        while any(len(found) < end for found, end in zip(answers, ends, strict=True)):
            assert not any(worker.done() for worker in workers)
        stop.set()
        for worker in workers:
            worker.result(HANGS)
    assert {answer for found in answers for answer in found} == {answers[0][0]}
    assert answers[0][0][0] == 200


def test_a_path_where_a_server_listens_is_not_taken_from_it(tmp_path):
    path = tmp_path / "h.sock"
    check_path(str(path))
    with closing(socket.socket(socket.AF_UNIX)) as server:
        server.bind(str(path))
        server.listen()
        with pytest.raises(Unavailable, match=r"h\.sock: a server listens there"):
            check_path(str(path))
    check_path(str(path))  # of a server that has ended
    path.unlink()
    path.touch()
    with pytest.raises(Unavailable, match=r"h\.sock is there, and is no socket"):
        check_path(str(path))


def test_a_server_takes_its_socket_away(tmp_path):
    path = tmp_path / "h.sock"
    with started("--device", "cpu", "--uds", str(path)) as process:
        assert " on unix:" in process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        process.wait(HANGS)
    assert not path.exists()
