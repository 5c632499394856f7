"""`hal serve` under its clients: the official one of OpenAI, and plain HTTP."""

import asyncio
import json
import os
import re
import signal
import threading
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from hal_engine.serving.metrics import Metrics
from openai import APIStatusError, AsyncOpenAI, BadRequestError, NotFoundError, OpenAI

import hal
from tests.commands import LIBRARIES

from .conftest import COMMAND, HANGS, begin, serving

pytestmark = pytest.mark.long(25)
WARM = LIBRARIES
PROMPTS = ["def main(", "import os\n", "class Tree:\n    def __init__(self", "for number in range(", "x = "]
ROOT = Path(__file__).parents[2]
NOT_OFFERED = "(leave it out, or start with --lenient; docs/serving.md says what offers it)"


@pytest.fixture(scope="module")
def client(server):
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=HANGS) as found:
        yield found


@pytest.fixture(scope="module")
def expected():
    """The library's text, which is that of `hal run`."""
    found = {}

    def text(prompt, **params):
        key = prompt, *sorted(params.items())
        if key not in found:
            found[key] = hal.generate(prompt, device="cpu", **params)
        return found[key]

    return text


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9, "seed": 7}])
def test_answers_are_those_of_the_library_at_once_and_streamed(client, expected, params):
    for prompt in PROMPTS[:3]:
        text = expected(prompt, max_tokens=12, **params)
        answer = client.completions.create(model="default", prompt=prompt, max_tokens=12, **params)
        assert answer.choices[0].text == text
        assert answer.usage.completion_tokens == 12
        stream = client.completions.create(
            model="default", prompt=prompt, max_tokens=12, stream=True, stream_options={"include_usage": True}, **params
        )
        events = list(stream)
        assert "".join(event.choices[0].text for event in events if event.choices) == text
        assert [event.choices[0].finish_reason for event in events if event.choices][-1] == "length"
        assert events[-1].usage.completion_tokens == 12
        options = {"include_usage": True, "continuous_usage_stats": True}
        counted = client.completions.create(
            model="default", prompt=prompt, max_tokens=12, stream=True, stream_options=options, **params
        )
        counts = [event.usage.completion_tokens for event in counted]
        assert counts == sorted(counts)
        assert counts[-2:] == [12, 12]


def test_many_clients_at_once_get_their_own_answers(server, expected):
    async def ask(client, prompt):
        answer = await client.completions.create(model="default", prompt=prompt, max_tokens=8, temperature=0)
        return answer.choices[0].text

    async def all_of_them():
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=HANGS) as client:
            return await asyncio.gather(*(ask(client, prompt) for prompt in PROMPTS * 4))

    assert asyncio.run(all_of_them()) == [expected(prompt, max_tokens=8, temperature=0.0) for prompt in PROMPTS] * 4


def test_several_prompts_and_choices_are_numbered(client, expected):
    found = client.completions.create(
        model="default", prompt=PROMPTS[:2], n=2, max_tokens=6, temperature=0.9, seed=3, logprobs=2
    )
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    assert found.choices[0].text == expected(PROMPTS[0], max_tokens=6, temperature=0.9, seed=3)
    assert found.choices[0].text != found.choices[1].text
    probabilities = found.choices[0].logprobs
    assert "".join(probabilities.tokens) == found.choices[0].text
    assert [len(best) for best in probabilities.top_logprobs] == [2] * 6
    assert all(value <= 0 for value in probabilities.token_logprobs)


def test_the_chunks_of_a_stream_have_the_log_probabilities_of_answers_at_once(client):
    body = {"model": "default", "prompt": PROMPTS[:2], "n": 2, "max_tokens": 6, "temperature": 0.9, "seed": 3}
    found = {}
    for event in client.completions.create(stream=True, logprobs=2, **body):
        (choice,) = event.choices
        given = found.setdefault(choice.index, {})
        for name, values in choice.logprobs.model_dump().items():
            given[name] = given.get(name, []) + values
    answer = client.completions.create(logprobs=2, **body)
    for choice in answer.choices:
        assert choice.logprobs.text_offset[0] == 0 < choice.logprobs.text_offset[-1]
        for name in ("tokens", "text_offset"):
            assert found[choice.index][name] == getattr(choice.logprobs, name)


def test_end_tokens_may_be_ignored_and_load_tools_are_served(client):
    found = client.completions.create(
        model="default", prompt="x = 1\n", max_tokens=60, temperature=1.5, seed=5, extra_body={"ignore_eos": True}
    )
    assert (found.usage.completion_tokens, found.choices[0].finish_reason) == (60, "length")


def test_models_and_tokens(server, client):
    assert [model.id for model in client.models.list()] == ["default"]
    found = httpx.post(f"{server.url}/tokenize", json={"prompt": "def main("}).json()
    assert found["count"] == len(found["tokens"]) == 4
    assert httpx.get(f"{server.url}/").headers["content-type"].startswith("text/html")


REFUSED = [
    ({"prompt": "x", "max_token": 3}, "max_token", "max_token is not offered (did you mean max_tokens?)"),
    ({"prompt": "x", "echo": True}, "echo", "echo"),
    ({"prompt": "x", "tools": [{}]}, "tools", f"tools is not offered {NOT_OFFERED}"),
    ({"prompt": "x", "top_a": 0.5}, "top_a", f"top_a is not offered {NOT_OFFERED}"),
    ({"prompt": "x", "x" * 100: 0.5}, "x" * 64 + "…", f"{'x' * 64}… is not offered {NOT_OFFERED}"),
    ({"prompt": "x", **dict.fromkeys(map(str, range(299)))}, None, "301 fields in an object (send at most 256)"),
    ({"prompt": "x", "stop_token_ids": [1] * 17}, "stop_token_ids", "stop_token_ids"),
    (
        {"prompt": "x", "stop_token_ids": [5000]},
        "stop_token_ids",
        "stop_token_ids: token 5000 is outside the vocabulary (give ids from 0 to 2047)",
    ),
    ({"prompt": "x", "top_k": -2}, "top_k", "top_k"),
    ({"prompt": "x", "top_p": -1}, "top_p", "top_p: -1.0 (give a number from 0.0 to 1.0)"),
    ({"prompt": "x", "seed": -2}, "seed", "seed"),
    ({"prompt": "x", "temperature": -1}, "temperature", "temperature"),
    ({"prompt": "x", "max_tokens": 0}, "max_tokens", "max_tokens: expected `int` >= 1"),
    ({"prompt": "x", "max_tokens": 1000}, "max_tokens", ""),
    ({"prompt": "x", "n": 1000}, "n", ""),
    ({"prompt": "x", "stop": [""]}, "stop", "stop"),
    ({"prompt": "x", "priority": 2**31}, "priority", "priority"),
    ({"prompt": "x " * 300}, "prompt", ""),
    ({"prompt": ""}, "prompt", ""),
    ({"prompt": [99999]}, "prompt", ""),
    ({"prompt": ["x", 1]}, "prompt", ""),
    ({"prompt": ["x"] * 200}, "prompt", ""),
    ({"prompt": []}, "prompt", "0 answers, of 0 prompts and n = 1 (ask for 1 to 128)"),
    ({"prompt": ["x"] * 65, "n": 2}, "n", "130 answers, of 65 prompts and n = 2 (ask for 1 to 128)"),
    ({}, None, ""),
    ([], None, "the body: expected `object`, got `array` (send a JSON object)"),
    (b"null", None, ""),
    (b"", None, "the body is not JSON: Input data was truncated (send a JSON object)"),
    (b"{", None, "the body is not JSON"),
    (b'{"prompt":"\xff"}', None, ""),
    (b'{"prompt":' + b"[" * 5000, None, ""),
]


@pytest.mark.parametrize(("body", "param", "message"), REFUSED)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_served_is_refused_by_field(server, body, param, message, stream):
    if isinstance(body, dict):
        body = {**body, "stream": stream}
    before = server.metric("prompt_tokens_total")
    sent = {"content": body} if isinstance(body, bytes) else {"json": body}
    answer = httpx.post(f"{server.url}/v1/completions", **sent)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param), error
    assert error["message"].startswith(message)
    assert error["message"]
    if isinstance(body, bytes):
        assert server.metric("prompt_tokens_total") == before, "it has reached the engine"


def test_too_large_a_body_is_refused_while_it_comes(server):
    answer = httpx.post(f"{server.url}/v1/completions", content=b" " * (4 << 20) + b"{}")
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (413, "request_too_large")
    assert error["message"] == "the body has more than 4194304 bytes (send the prompts in several requests)"


def test_the_official_client_raises_its_own_errors(client):
    with pytest.raises(BadRequestError, match="chat template"):
        client.chat.completions.create(model="default", messages=[{"role": "user", "content": "x"}])
    with pytest.raises(NotFoundError, match="other"):
        client.completions.create(model="other", prompt="x")


def test_a_client_that_leaves_has_its_request_aborted(server):
    before = server.metric("request_success_total{[^}]*abort[^}]*}")
    streams = [begin(server.url, tokens=250) for _ in range(3)]
    for one in streams[:2]:
        one.close()
    server.wait_until(
        lambda: server.metric("request_success_total") >= before + 2 and server.metric("num_requests_running") <= 1,
        "requests of clients that had left were not aborted",
    )
    text = b""
    while b"[DONE]" not in text:
        text += streams[2].recv(65536)
    streams[2].close()


def test_the_first_line_shows_the_limits_and_a_key_is_needed(server, monkeypatch):
    """White space at the ends of a key is no part of it."""
    monkeypatch.setenv("HAL_API_KEY", " abc\n")
    with serving(until_loaded=False, before="ulimit -n 200") as served:
        shown = (
            r"hal: the model 'default' is on http://127\.0\.0\.1:\d+ \(at most 150 connections, \d+ MiB of requests\); "
        )
        assert re.match(shown, served.line), served.line
        for key, status in (("", 401), ("Bearer ab", 401), ("Bearer abc", 200)):
            assert httpx.get(f"{served.url}/v1/models", headers={"Authorization": key}).status_code == status
        assert httpx.get(f"{served.url}/v1/models").status_code == 401
        assert httpx.get(f"{served.url}/health").status_code in (200, 503)
    assert int(re.search(r", (\d+) MiB", server.line)[1]) >= 16


@pytest.fixture(scope="module")
def small():
    """A server with room for four answers; the last test that uses it kills its engine."""
    with serving("--slots", "1", "--max-waiting", "3") as served:
        yield served


def test_more_answers_than_ever_have_room_reach_no_engine(small):
    before = small.metric("prompt_tokens_total")
    for body, answers in (({"prompt": "x", "n": 5}, 5), ({"prompt": ["x", "y", "z"], "n": 2}, 6)):
        answer = httpx.post(f"{small.url}/v1/completions", json=body, timeout=HANGS)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "n"), answer.text
        assert error["message"].startswith(f"{answers} answers, ")
        assert error["message"].endswith(" (ask for 1 to 4)")
    assert small.metric("prompt_tokens_total") == before
    answer = httpx.post(f"{small.url}/v1/completions", json={"prompt": "x", "n": 4}, timeout=HANGS)
    assert (answer.status_code, len(answer.json()["choices"])) == (200, 4)


def test_a_full_queue_is_refused_and_those_that_wait_go_by_priority(small):
    ended = []

    def ask(priority):
        body = {"prompt": [5], "max_tokens": 100, "ignore_eos": True, "priority": priority}  # ends lie apart
        assert httpx.post(f"{small.url}/v1/completions", json=body, timeout=HANGS).status_code == 200
        ended.append(priority)

    with begin(small.url, tokens=400):
        os.kill(small.engine(), signal.SIGSTOP)
        before = small.metric("prompt_tokens_total")
        threads = [threading.Thread(target=ask, args=(priority,)) for priority in (5, 0, -1)]
        for waiting, thread in enumerate(threads, 1):
            thread.start()
            small.wait_until(lambda: small.metric("prompt_tokens_total") == before + waiting, "not taken")  # noqa: B023
        answer = httpx.post(f"{small.url}/v1/completions", json={"prompt": "x"}, timeout=HANGS)
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
        assert answer.headers["retry-after"] == "1"
        os.kill(small.engine(), signal.SIGCONT)
        for thread in threads:
            thread.join(HANGS)
    assert ended == [-1, 0, 5]


def test_a_killed_engine_ends_streams_with_an_error_and_health_says_so(small):
    text = b""
    with begin(small.url, tokens=400) as stream:
        small.wait_until(lambda: small.metric("num_requests_running") == 1, "the request does not run")
        os.kill(small.engine(), signal.SIGKILL)
        while b'"error"' not in text and (data := stream.recv(65536)):
            text += data
    assert b"SIGKILL" in text
    assert b"[DONE]" not in text
    small.wait_until(lambda: httpx.get(f"{small.url}/health").status_code == 503, "health says nothing")
    one = OpenAI(base_url=f"{small.url}/v1", api_key="none", max_retries=0)
    with one as client, pytest.raises(APIStatusError) as caught:
        client.completions.create(model="default", prompt="x")
    assert caught.value.status_code == 503
    load = [small.metric(name) for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")]
    assert load == [0, 0, 0], "an engine that has ended runs nothing"


def test_a_wrong_route_is_refused_with_those_that_there_are(server):
    answer = httpx.post(f"{server.url}/v1/completion", json={})
    assert answer.status_code == 404
    assert "no route /v1/completion (there are /v1/completions, /v1/chat/completions, " in answer.text
    answer = httpx.get(f"{server.url}/v1/completions")
    assert (answer.status_code, answer.json()["error"]["message"]) == (405, "/v1/completions takes no GET (send POST)")


def test_a_port_in_use_is_one_line(server, warm):
    port = urlsplit(server.url).port
    done = warm.run("serve", "--port", str(port), code=COMMAND)
    (line,) = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (2, "")
    assert line.startswith(f"hal: error: --port: 127.0.0.1:{port}: ")
    assert line.endswith("in use (choose another port)")


@pytest.mark.parametrize(
    ("host", "what"), [("192.0.2.1", "is no address of this host"), ("no.such.host.invalid", "unknown: ")]
)
def test_a_host_that_is_not_here_is_named(host, what, warm):
    done = warm.run("serve", "--port", "0", "--api-key", "x", "--host", host, code=COMMAND)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2
    assert line.startswith(f"hal: error: --host: {host}: {what}")
    assert line.endswith(" (give an address of this host, or 0.0.0.0)")


@pytest.mark.parametrize("module", ["uvicorn", "starlette", "httptools", "prometheus_client"])
def test_without_the_extra_its_install_line_is_shown(module, warm):
    code = f"import sys; sys.modules['{module}'] = None; {COMMAND}"
    done = warm.run("serve", code=code)
    line = f"hal: error: hal serve: {module} is missing (pip install 'paddle-hal[serve]>=1.1,<2')\n"
    assert (done.returncode, done.stderr) == (2, line)


def test_the_dashboard_shows_metrics_that_there_are():
    names = {metric.name for metric in Metrics("x").registry.collect()}
    text = (ROOT / "docs/grafana.json").read_text(encoding="utf-8")
    panels = json.loads(text)["panels"]
    used = {
        word.split("{")[0].split("[")[0]
        for panel in panels
        for target in panel["targets"]
        for word in target["expr"].replace("(", " ").split()
        if word.startswith("hal:")
    }
    plain = {
        name.removesuffix("_total").removesuffix("_bucket").removesuffix("_sum").removesuffix("_count") for name in used
    }
    assert plain
    assert plain <= names
    (step,) = [panel for panel in panels if panel["title"] == "Time of a step"]
    shown = [target["legendFormat"] for target in step["targets"]]
    assert shown == ["elapsed", "host", "waiting for the device or ranks", "device", "host of first ranks"]


def test_a_steps_time_is_the_hosts_and_what_it_waits():
    metrics = Metrics("x")
    stats = dict.fromkeys(("running", "waiting", "cache", "preemptions", "drafted", "accepted"), 0)
    stats["rank_seconds"] = None
    for steps, host, elapsed in ((2, 0.5, 2.0), (5, 0.75, 4.0)):
        metrics.take(stats | {"steps": steps, "host_seconds": host, "step_seconds": elapsed, "device_seconds": None})
    wanted = {"steps": 5, "host_seconds": 0.75, "step_seconds": 4.0, "wait_seconds": 3.25}
    assert engine_counters(metrics) == wanted, "what is not measured is absent, not 0"
    for device in (1.5, 2.25):
        metrics.take(stats | {"steps": 5, "host_seconds": 0.75, "step_seconds": 4.0, "device_seconds": device})
    assert engine_counters(metrics) == wanted | {"device_seconds": 2.25}


def engine_counters(metrics):
    found = re.findall(r"^hal:engine_(\w+)_total{.*} (.*)$", metrics.text().decode(), re.MULTILINE)
    return {name: float(value) for name, value in found}
