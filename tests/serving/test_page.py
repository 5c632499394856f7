"""The page at `/`, as a browser that reaches it through a proxy under a path of the proxy's own."""

import re
from urllib.parse import urljoin

import httpx

BEHIND = "https://example.org/team/llm/"


def test_every_address_of_the_page_is_below_its_own(server):
    page = httpx.get(f"{server.url}/").text
    named = set(re.findall(r"""(?:fetch\(|href=|src=)["'`]([^"'`]*)""", page))
    absolute = {urljoin(BEHIND, one) for one in named}
    assert all(one.startswith(BEHIND) for one in absolute), absolute
    there = {one.removeprefix(BEHIND) for one in absolute}
    assert there == {"health", "metrics", "v1/models", "v1/completions"}
    for one in there - {"v1/completions"}:
        assert httpx.get(f"{server.url}/{one}").status_code == 200
    body = {"prompt": "def main(", "max_tokens": 1}
    assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 200
