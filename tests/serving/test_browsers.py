"""Web pages: which Host, Origin and Content-Type a server takes."""

import asyncio
import json

import httpx
import pytest
from hal_engine.generation import AsyncEngine
from hal_engine.serving import Allowed, Server, Settings

from tests.commands import LIBRARIES

from .conftest import COMMAND

WARM = LIBRARIES
LOCAL = Allowed(hosts=())
JSON, FORM = "application/json", "application/x-www-form-urlencoded"


def ask(headers, allowed=LOCAL, method="POST", route="/tokenize", key=""):
    """Send a request to a server at localhost:8000; return the response."""

    async def answer():
        engine = AsyncEngine(device="cpu")  # not opened: no route here generates
        app = Server(engine, Settings(model="x", allowed=allowed, api_key=key)).app()
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost:8000") as client:
            body = json.dumps({"prompt": "def main("}) if method == "POST" else None
            return await client.request(method, route, headers=headers, content=body)

    return asyncio.run(answer())


@pytest.mark.parametrize(
    ("headers", "allowed", "code"),
    [
        ({}, LOCAL, None),
        ({"Content-Type": FORM}, LOCAL, None),  # curl -d
        ({"Host": "127.0.0.1:8000"}, LOCAL, None),
        ({"Host": "[::1]:8000"}, LOCAL, None),
        ({"Host": "LOCALHOST"}, LOCAL, None),
        ({"Host": "rebound.example"}, LOCAL, "host_not_allowed"),
        ({"Host": "localhost.rebound.example:8000"}, LOCAL, "host_not_allowed"),
        ({"Host": "localhost@rebound.example"}, LOCAL, "host_not_allowed"),
        ({"Host": "[::1"}, LOCAL, "host_not_allowed"),
        ({"Host": "gpu.example:8000"}, Allowed(hosts=("gpu.example",)), None),
        ({"Host": "rebound.example"}, Allowed(hosts=("*",)), None),
        ({"Host": "rebound.example"}, Allowed(hosts=None), None),
        ({"Origin": "http://localhost:8000", "Content-Type": JSON}, LOCAL, None),  # hal's own page
        ({"Origin": "http://localhost:8000", "Content-Type": "Application/JSON; charset=utf-8"}, LOCAL, None),
        ({"Origin": "http://localhost:8000", "Content-Type": "text/plain"}, LOCAL, "unsupported_media_type"),
        ({"Origin": "http://localhost:8000"}, LOCAL, "unsupported_media_type"),
        ({"Origin": "http://localhost:9000", "Content-Type": JSON}, LOCAL, "origin_not_allowed"),
        ({"Origin": "https://page.example", "Content-Type": JSON}, LOCAL, "origin_not_allowed"),
        ({"Origin": "https://page.example", "Content-Type": JSON}, Allowed(hosts=None), "origin_not_allowed"),
        ({"Origin": "null", "Content-Type": JSON}, LOCAL, "origin_not_allowed"),
        ({"Origin": "https://page.example", "Content-Type": JSON}, Allowed((), ("https://page.example",)), None),
        ({"Origin": "https://page.example", "Content-Type": FORM}, Allowed((), ("*",)), "unsupported_media_type"),
        ({"Origin": "https://other.example", "Content-Type": JSON}, Allowed((), ("*",)), None),
    ],
)
def test_a_page_is_taken_from_the_server_itself_and_from_those_that_are_named(headers, allowed, code):
    answer = ask(headers, allowed)
    if code is None:
        assert answer.status_code == 200, answer.text
    else:
        status = 415 if code == "unsupported_media_type" else 403
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


@pytest.mark.parametrize("route", ["/", "/health", "/metrics", "/v1/models", "/nothing"])
def test_every_route_asks_for_the_host(route):
    assert ask({"Host": "rebound.example"}, method="GET", route=route).status_code == 403


def test_a_named_page_may_read_answers_and_its_browser_may_ask_first():
    allowed, page = Allowed((), ("https://page.example",)), {"Origin": "https://page.example"}
    headers = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    first = ask(page | headers, allowed, method="OPTIONS", key="secret")
    assert first.status_code == 200
    assert first.headers["access-control-allow-origin"] == "https://page.example"
    assert first.headers["access-control-allow-headers"] == "authorization,content-type"
    answer = ask(page | {"Content-Type": JSON, "Authorization": "Bearer secret"}, allowed, key="secret")
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "https://page.example")
    refused = ask(page | {"Content-Type": JSON}, allowed, key="secret")
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, "https://page.example")
    assert ask({"Origin": "https://other.example"} | headers, allowed, method="OPTIONS").status_code == 403


@pytest.mark.parametrize(
    ("option", "value", "cure"),
    [
        ("--allowed-host", "http://gpu.example", "give a name without port, such as gpu.example"),
        ("--allowed-host", "gpu.example:80", "give a name without port, such as gpu.example"),
        ("--cors-origin", "page.example", "give a scheme and a host without a path, such as https://app.example"),
        (
            "--cors-origin",
            "https://page.example/",
            "give a scheme and a host without a path, such as https://app.example",
        ),
    ],
)
def test_a_name_that_no_request_has_is_refused(option, value, cure, warm):
    done = warm.run("serve", option, value, "--port", "0", code=COMMAND)
    assert (done.returncode, done.stderr) == (2, f"hal: error: {option}: {value!r} ({cure})\n")
