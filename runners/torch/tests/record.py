"""Records the tokens that the cpu device gives, which the runner must give too: tokens.json. It needs Paddle.

python runners/torch/tests/record.py
"""

from __future__ import annotations

import json
from pathlib import Path

from hal_core import MemorySink, Request, SamplingParams, SlotStatus, StateConfig
from hal_engine.engine import Engine
from hal_engine.model import DEFAULT_CHECKPOINT
from hal_engine.model.config import read_config
from hal_engine.model.tokenizer import Tokenizer
from hal_paddle_runner.loading import load_model
from hal_paddle_runner.model import Model
from hal_paddle_runner.runner import ModelRunner
from hal_paddle_runner.worker import Worker

from hal import open_device

WHERE = Path(__file__).parent / "tokens.json"
MARGIN, TOKENS, WANTED = 1e-3, 24, 3
TEXTS = (
    *(
        "def main(",
        "for i in range(",
        "if __name__ ==",
        "from collections import",
        "with open(",
        "class Stack:\n    def",
    ),
    *("import os\nimport sys\n\n\ndef read(path):\n    with open(path) as file:\n        return", "try:\n    value ="),
)
WAYS = (
    {},
    {"temperature": 0.8},
    {"temperature": 0.7, "top_p": 0.8},
    {"temperature": 1.0, "top_p": 0.5},
)
SIZES = StateConfig(4, 128, 16, max_logprobs=0, max_eos=1, max_stop_sequences=1, max_stop_length=1, max_bad_words=1)


class Watched(ModelRunner):
    """Records how far each choice was from a different one."""

    def _write(self, tokens) -> None:
        self.least = min([getattr(self, "least", 1.0), *tokens.margins.tolist()])
        super()._write(tokens)


class WatchedWorker(Worker):
    runner_type = Watched


def run(model: Model, requests: list[Request]) -> tuple[dict[str, list[int]], float]:
    """The tokens of each request, one rank, and the least margin of all."""
    sink = MemorySink()
    with open_device("cpu") as device:
        worker = WatchedWorker(device, model, SIZES, 32, sink)
        engine = Engine(worker)
        for request in requests:
            engine.submit(request)
        for _ in engine.run():
            pass
    tokens_by_request: dict[str, list[int]] = {}
    for record in sink.records:
        for row in record.rows():
            if row.status is SlotStatus.TOKEN:
                tokens_by_request.setdefault(row.request_id, []).extend(row.tokens.tolist())
    return tokens_by_request, worker.runner.least


def main() -> None:
    """Seeds are tried until each way to sample has prompts with wide margins."""
    config = read_config(DEFAULT_CHECKPOINT)
    tokenizer, model = Tokenizer.load(DEFAULT_CHECKPOINT, config), load_model(DEFAULT_CHECKPOINT)
    found = []
    for number, way in enumerate(WAYS):
        count = 0
        for seed in range(40 if way else 1):
            for at, text in enumerate(TEXTS):
                if count >= (WANTED if way else 4) or (way and at % len(WAYS) != (seed + number) % len(WAYS)):
                    continue
                name = f"w{number}s{seed}p{at}"
                params = {"max_tokens": TOKENS, "eos_token_ids": list(config.eos_token_ids), "seed": seed, **way}
                request = Request(name, tokenizer.encode(text), SamplingParams(**params))
                tokens, least = run(model, [request])
                if least >= MARGIN:
                    count += 1
                    row = {"request_id": name, "prompt": request.prompt, "params": params, "tokens": tokens[name]}
                    found.append({**row, "margin": least})
        print(way, count)
    lines = ",\n".join("  " + json.dumps({**row, "prompt": [int(t) for t in row["prompt"]]}) for row in found)
    WHERE.write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
