"""Clients as people use them, against a server: OpenAI's (sync and async), LangChain, LiteLLM and ``llm``.

    python tests/serving/clients.py              starts hal serve with a chat template, and runs what is installed
    python tests/serving/clients.py --url URL --model NAME [--only litellm]    against a server that runs

Prints a line for each client; the status is 1 if one fails or, with ``--all``, is not installed.
"""

import argparse
import asyncio
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

SECONDS = 120
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for one in messages %}{{ one.role }}: {{ one.content }}"
    "{% for call in one.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}{{ '\\n' }}{% endfor %}"
    "{% if loud %}LOUD {% endif %}{% if add_generation_prompt %}assistant:{% endif %}"
)
CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
HISTORY = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "2"},
    {"role": "user", "content": "x", "name": "me"},
]
ASKED = {"max_tokens": 6, "temperature": 0}
NOTHING = {"user": "me", "logit_bias": {}, "stop": None, "seed": None, "presence_penalty": 0, "n": 1}


def openai_sync(url, model):
    """Completions and chats, whole and streamed, with log-probabilities, stops and tool histories."""
    from openai import BadRequestError, OpenAI

    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=SECONDS) as client:
        assert client.models.retrieve(model).id == model == next(iter(client.models.list())).id
        text = client.completions.create(
            model=model, prompt="def main(", echo=False, best_of=1, suffix=None, logprobs=5, **ASKED, **NOTHING
        )
        assert text.choices[0].text
        assert [len(best) for best in text.choices[0].logprobs.top_logprobs] == [5] * len(
            text.choices[0].logprobs.tokens
        )
        nothing = {"response_format": {"type": "text"}, "store": False, "tools": [], "metadata": {"a": "b"}}
        extra = {"top_k": -1, "chat_template_kwargs": {"loud": True}, "stop_token_ids": [1]}
        given = {"model": model, "messages": HISTORY, "max_completion_tokens": 6, "temperature": 0} | NOTHING | nothing
        chat = client.chat.completions.create(**given, logprobs=True, top_logprobs=5, extra_body=extra)
        (choice,) = chat.choices
        spelled = b"".join(bytes(one.bytes or []) for one in choice.logprobs.content)
        assert spelled.decode().strip() == choice.message.content.strip()
        stream = client.chat.completions.create(
            **given, extra_body=extra, stream=True, stream_options={"include_usage": True}
        )
        events = list(stream)
        assert "".join(one.choices[0].delta.content or "" for one in events if one.choices) == choice.message.content
        assert events[-1].usage.completion_tokens == chat.usage.completion_tokens
        message = ""
        try:
            client.chat.completions.create(**given | {"tools": [{"type": "function", "function": {"name": "f"}}]})
        except BadRequestError as error:
            message = str(error)
        assert "docs/serving.md" in message


def openai_async(url, model):
    """The same client, asynchronous: several requests at once, one of them left early."""
    from openai import AsyncOpenAI

    async def all_of_them():
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=SECONDS) as client:

            async def chat():
                found = await client.chat.completions.create(model=model, messages=HISTORY, **ASKED)
                return found.choices[0].message.content

            async def left():
                async with await client.completions.create(
                    model=model, prompt="x = ", max_tokens=60, stream=True
                ) as stream:
                    await anext(aiter(stream))

            return await asyncio.gather(chat(), chat(), left())

    one, other, _ = asyncio.run(all_of_them())
    assert one == other


def langchain(url, model):
    """``langchain-openai``: chats with histories of tools, streams, batches, and completions."""
    from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
    from langchain_openai import ChatOpenAI, OpenAI

    own = {"base_url": f"{url}/v1", "api_key": "none", "max_retries": 0, "temperature": 0}
    history = [
        SystemMessage("Be brief."),
        HumanMessage([{"type": "text", "text": "one"}]),
        AIMessage("", tool_calls=[{"id": "call_1", "name": "add", "args": {"a": 1}}]),
        ToolMessage("2", tool_call_id="call_1"),
        HumanMessage("x", name="me"),
    ]
    chat = ChatOpenAI(model=model, max_tokens=6, stream_usage=True, **own)
    answer = chat.invoke(history)
    assert answer.content
    assert answer.usage_metadata["output_tokens"] <= 6
    assert "".join(part.content for part in chat.stream(history)) == answer.content
    assert [one.content for one in chat.batch([history, history])] == [answer.content] * 2
    assert asyncio.run(chat.ainvoke(history)).content == answer.content
    assert chat.bind(logprobs=True, top_logprobs=2).invoke(history).response_metadata["logprobs"]["content"]
    assert OpenAI(model=model, max_tokens=6, **own).invoke("def main(")


def litellm(url, model):
    """LiteLLM under the provider ``openai``, and ``hosted_vllm``, whose own fields it sends."""
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it is fetched
    import litellm as client

    client.telemetry = False
    own = {"api_base": f"{url}/v1", "api_key": "none", "num_retries": 0, "timeout": SECONDS, **ASKED}
    texts = set()
    for provider in ("openai", "hosted_vllm"):
        given = {"model": f"{provider}/{model}", "messages": HISTORY, **own}
        texts.add(client.completion(**given).choices[0].message.content)
        parts = client.completion(**given, stream=True, stream_options={"include_usage": True})
        texts.add("".join(part.choices[0].delta.content or "" for part in parts if part.choices))
        texts.add(asyncio.run(client.acompletion(**given)).choices[0].message.content)
    assert len(texts) == 1, texts
    found = client.text_completion(model=f"text-completion-openai/{model}", prompt="def main(", **own)
    assert found.choices[0].text


def llm(url, model):
    """The command ``llm``, with a file of models: a prompt, a system prompt, and a chat that goes on."""
    with tempfile.TemporaryDirectory() as folder:
        lines = ["- model_id: here", f"  model_name: {model}", f"  api_base: {url}/v1"]
        text = ["- model_id: there", f"  model_name: {model}", f"  api_base: {url}/v1", "  completion: true"]
        Path(folder, "extra-openai-models.yaml").write_text("\n".join([*lines, *text, ""]))
        environment = os.environ | {"LLM_USER_PATH": folder, "OPENAI_API_KEY": "none"}

        def run(*arguments):
            command = [sys.executable, "-m", "llm", *arguments]
            done = subprocess.run(
                command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SECONDS
            )
            assert done.returncode == 0, done.stderr
            return done.stdout.strip()

        options = ("-m", "here", "-o", "max_tokens", "6", "-o", "temperature", "0")
        assert run(*options, "x", "--system", "Be brief.") == run(*options, "x", "--system", "Be brief.", "--no-stream")
        assert run(*options, "-c", "more")
        assert run("-m", "there", "def main(", "-o", "max_tokens", "6")


CLIENTS = {
    "openai": (openai_sync, "openai"),
    "openai, async": (openai_async, "openai"),
    "langchain": (langchain, "langchain_openai"),
    "litellm": (litellm, "litellm"),
    "llm": (llm, "llm"),
}
"""Each client's check, and the package that it needs."""


@contextmanager
def served(hal):
    """Start ``hal serve`` with a chat template; give its address and its model's name."""
    found = subprocess.run(
        [hal, "-c", "import hal_engine.model; print(hal_engine.model.DEFAULT_CHECKPOINT)"],
        capture_output=True,
        text=True,
        check=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "model")
        shutil.copytree(found.stdout.strip(), model)
        (model / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
        command = [
            hal,
            "-m",
            "hal",
            "serve",
            "--device",
            "cpu",
            "--port",
            "0",
            "--model",
            str(model),
            "--name",
            "org/small",
        ]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            url = next(found[0] for line in process.stderr if (found := re.search(r"http://\S+:\d+", line)))
            yield url, "org/small"
        finally:
            process.terminate()
            process.wait(SECONDS)


def main():
    import httpx

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url")
    parser.add_argument("--model", default="default")
    parser.add_argument("--only", choices=CLIENTS)
    parser.add_argument("--all", action="store_true", help="fail if a client is not installed")
    parser.add_argument("--python", default=sys.executable, help="the Python that has hal, if this one has not")
    given = parser.parse_args()
    chosen = [given.only] if given.only else [*CLIENTS]
    bad = 0
    where = contextmanager(lambda: iter([(given.url, given.model)])) if given.url else lambda: served(given.python)
    with where() as (url, model):
        transport = httpx.HTTPTransport(retries=20)
        with httpx.Client(transport=transport) as plain:
            while plain.get(f"{url}/health").status_code == 503:
                pass
        for name in chosen:
            check, package = CLIENTS[name]
            if importlib.util.find_spec(package) is None:
                print(f"{name}: not installed")
                bad += given.all
                continue
            try:
                check(url, model)
                print(f"{name}: passes")
            except Exception as error:  # noqa: BLE001 (of any of them)
                print(f"{name}: {type(error).__name__}: {error}")
                bad += 1
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
