"""Trains the embedded default checkpoint: ``python -m training.train [--tokens N] [--output DIR] [--threads N]``.

Reads the running interpreter's standard library (``training.corpus``), trains a tokenizer and then the network, and
stops at a fixed number of tokens. A usable checkpoint is written at every tenth of the way. Everything is seeded.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from paddle import Tensor
    from tokenizers import Tokenizer

    from training.network import Network

DEFAULT_OUTPUT = Path(__file__).parent.parent / "hal" / "model" / "default"
TOKENS_A_STEP = 2048
SHORT, LONG = 256, 512  # window lengths; most steps use the short one, whose attention costs half
LONG_SHARE = 0.2  # of the steps, at the end
PEAK_RATE, FLOOR_RATE, WARMUP_STEPS = 3e-3, 3e-5, 100
MTP_WEIGHT = 0.2  # DeepSeek-V3 used 0.3 and later 0.1
MTP_SHARE = 2  # the MTP loss is taken over one row in so many: it costs a layer and a head


def windows(ids: np.ndarray, length: int, rows: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Yield endless batches int64 ``[rows, length + 2]``: each epoch cuts the text at a new random phase and
    shuffles."""
    while True:
        starts = np.arange(rng.integers(length), len(ids) - length - 2, length)
        rng.shuffle(starts)
        for index in range(0, len(starts) - rows + 1, rows):
            yield ids[starts[index : index + rows, None] + np.arange(length + 2)]


def encode_texts(tokenizer: Tokenizer, texts: list[str], end_of_text: int) -> np.ndarray:
    """int64: all texts' tokens, each text ended by ``end_of_text``."""
    encoded = tokenizer.encode_batch(texts)
    return np.concatenate([np.array([*entry.ids, end_of_text], np.int64) for entry in encoded])


def held_out_loss(network: Network, vector: Tensor, ids: np.ndarray) -> tuple[float, float]:
    """Next-token and MTP loss (nats a token) over a fixed sample of held-out windows: for the log only."""
    import paddle

    batches = windows(ids, SHORT, TOKENS_A_STEP // SHORT, np.random.default_rng(0))
    with paddle.no_grad():
        losses = [network.losses(vector, paddle.to_tensor(next(batches))) for _ in range(8)]
    return tuple(float(np.mean([pair[which].item() for pair in losses])) for which in (0, 1))  # type: ignore[return-value]


def versions() -> dict[str, str]:
    """Versions that the result depends on."""
    from importlib.metadata import version

    packages = ("paddlepaddle", "numpy", "tokenizers", "safetensors")
    return {"python": platform.python_version(), **{name: version(name) for name in packages}}


def train(output: Path, tokens: int, seed: int) -> None:
    """Train for ``tokens`` tokens and leave the checkpoint in ``output``."""
    import paddle

    from training.adam import Adam, cosine_rate
    from training.bpe import END_OF_TEXT_ID, train_tokenizer
    from training.checkpoint import write_checkpoint
    from training.corpus import Corpus, read_corpus
    from training.network import Network, Shape, decay_mask, initial_vector

    started = time.monotonic()
    shape, corpus = Shape(context=LONG), read_corpus()
    tokenizer = train_tokenizer((text for _, text in corpus.training), shape.vocab)
    end_of_text = END_OF_TEXT_ID
    ids = encode_texts(tokenizer, [text for _, text in corpus.training], end_of_text)
    held_out = encode_texts(tokenizer, [text for _, text in corpus.held_out], end_of_text)
    steps = tokens // TOKENS_A_STEP
    record: dict[str, Any] = {
        "command": f"python -m training.train --tokens {tokens} --seed {seed}",
        "versions": versions(),
        "shape": asdict(shape),
        "parameters": shape.count(),
        "files": {"training": len(corpus.training), "held_out": len(corpus.held_out)},
        "bytes": {"training": Corpus.size(corpus.training), "held_out": Corpus.size(corpus.held_out)},
        "tokens": {"training": len(ids), "held_out": len(held_out), "seen": 0},
    }
    print({key: record[key] for key in ("parameters", "files", "bytes", "tokens")}, flush=True)

    paddle.seed(seed)
    network, adam = Network(shape), Adam(decay_mask(shape))
    vector = paddle.to_tensor(initial_vector(shape, seed))
    vector.stop_gradient = False
    rng = np.random.default_rng(seed)
    sources = {length: windows(ids, length, TOKENS_A_STEP // length, rng) for length in (SHORT, LONG)}
    for step in range(steps):
        length = LONG if step >= steps * (1 - LONG_SHARE) else SHORT
        window = paddle.to_tensor(next(sources[length]))
        main, extra = network.losses(vector, window, TOKENS_A_STEP // length // MTP_SHARE)
        (gradient,) = paddle.grad(main + extra * MTP_WEIGHT, [vector])
        rate = cosine_rate(step, steps, peak=PEAK_RATE, warmup=WARMUP_STEPS, floor=FLOOR_RATE)
        vector = adam.step(vector, gradient, rate)
        done = step + 1
        if done % 50 == 0:
            speed = done * TOKENS_A_STEP / (time.monotonic() - started)
            print(f"step {done}/{steps} loss {main.item():.3f} mtp {extra.item():.3f} {speed:.0f} tok/s", flush=True)
        if done % max(1, steps // 10) == 0 or done == steps:
            main_loss, mtp_loss = held_out_loss(network, vector, held_out)
            print(f"step {done}: held-out sample {main_loss:.4f}, mtp {mtp_loss:.4f} nats a token", flush=True)
            record["tokens"]["seen"] = done * TOKENS_A_STEP
            record["seconds"] = round(time.monotonic() - started)
            record["cpu_seconds"] = round(time.process_time())  # the clock also counts other processes
            write_checkpoint(output, shape, vector.numpy(), tokenizer, end_of_text, record)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=9_000_000, help="stop after so many")
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT, help="the checkpoint's directory")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    # Read when Paddle is first imported. Its strided kernels make a transposition cost 30 times as much on the CPU.
    os.environ["FLAGS_use_stride_kernel"] = "0"  # noqa: SIM112 - Paddle's spelling
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(options.threads)
    train(options.output, options.tokens, options.seed)


if __name__ == "__main__":
    main()
