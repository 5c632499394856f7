"""Trains the shipped checkpoint's prediction layer for drafting: ``python -m training.prediction [--tokens N]``.

The decoder's weights stay, so its tokens do not change; only the last layer is trained. It learns the decoder's own
predictions (its distribution, and its best token), on the corpus and on text of the decoder's own. It also learns to
continue from its own output, as drafts beyond the first do (training for what happens at use: Zhang et al. 2024, HASS;
Li et al. 2025, EAGLE-3). The checkpoint is written in place, with a description in ``training.json``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from training.train import DEFAULT_OUTPUT, encode_texts, versions, windows

if TYPE_CHECKING:
    from paddle import Tensor

    from training.network import Network, Shape, Weights

ROWS, LENGTH = 8, 256
"""Of a step: half of the rows are the decoder's own text."""
DEPTHS, DEPTH_WEIGHT = 4, 0.8
"""Number of consecutive drafts that are learned, and the weight of each relative to the one before it."""
BEST_WEIGHT = 0.5
"""Weight of the decoder's best token relative to its whole distribution."""
PEAK_RATE, FLOOR_RATE, WARMUP_STEPS = 1e-3, 1e-5, 50
PROMPT = 64
"""Tokens of the corpus with which a text of the decoder's own begins."""


class Chain:
    """The attention of the layer's runs: run ``d`` sees the entries of known tokens up to ``d`` before its own, and
    behind them those of the runs before it, made of drafts, as it is when drafts are made."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._masks: dict[int, Tensor] = {}
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def attention(self, x: Tensor, qkv: Tensor) -> Tensor:
        """That of the next run."""
        import paddle
        import paddle.nn.functional as functional

        q, k, v = self._network.projected(x, qkv)
        self.keys.append(k)
        self.values.append(v)
        run, length = len(self.keys) - 1, k.shape[2]
        shape = [*k.shape[:2], -1, length, k.shape[3]]
        group = self._network.shape.heads // self._network.shape.kv_heads
        queries, one = q.reshape(shape), paddle.ones([k.shape[3], 1])

        def own(of: list[Tensor], at: int) -> Tensor:
            """A run's keys or values as the queries of this one see them; written out, as a broadcast costs more."""
            return paddle.concat([_shifted(of[at], run - at).unsqueeze(2)] * group, axis=2)

        scores = [paddle.matmul(q, self.keys[0], transpose_y=True) + self._mask(length, run)]
        for at in range(1, run + 1):
            scores.append(paddle.matmul(queries * own(self.keys, at), one).reshape([*q.shape[:3], 1]))
        weights = functional.softmax(paddle.concat(scores, axis=-1) if run else scores[0], axis=-1)
        attended = paddle.matmul(weights[..., :length], self.values[0]).reshape(shape)
        for at in range(1, run + 1):
            share = weights[..., length + at - 1].reshape([*shape[:2], group, length, 1])
            attended = attended + paddle.matmul(share, one, transpose_y=True) * own(self.values, at)
        return self._network.merged(attended.reshape(q.shape))

    def _mask(self, length: int, run: int) -> Tensor:
        import paddle

        if run not in self._masks:
            group = self._network.shape.heads // self._network.shape.kv_heads
            hidden = np.triu(np.full((length, length), -1e9, np.float32), 1 - run)
            self._masks[run] = paddle.to_tensor(np.tile(hidden, (group, 1)))
        return self._masks[run]

    def begin(self) -> None:
        """Another window."""
        self.keys.clear()
        self.values.clear()


def _shifted(x: Tensor, by: int, axis: int = 2) -> Tensor:
    """Shift each position's value by ``by`` positions; values that wrap around to the beginning are unused."""
    import paddle

    return paddle.roll(x, by, axis=axis) if by else x


def drafting_losses(network: Network, weights: Weights, window: Tensor, chain: Chain) -> list[tuple[Tensor, Tensor]]:
    """Return, for each run of the layer, the mean cross-entropy (nats) with the decoder's distribution, and the share
    of tokens that both rank first; ``window`` int64 ``[rows, length + 1]``."""
    import paddle
    import paddle.nn.functional as functional

    length = window.shape[1] - 1
    with paddle.no_grad():
        embedded = functional.embedding(window, weights["embed"])
        known = network.hidden(weights, embedded)
        target = functional.softmax(paddle.matmul(known[:, 1:], weights["embed"], transpose_y=True), axis=-1)
        best = target.argmax(axis=-1)
        target = (target + functional.one_hot(best, target.shape[-1]) * BEST_WEIGHT) / (1 + BEST_WEIGHT)
    chain.begin()
    given, losses = known[:, :length], []
    for run in range(DEPTHS):
        given = network.predicted(weights, given, embedded[:, 1:], chain.attention)
        logits = paddle.matmul(given[:, run:], weights["embed"], transpose_y=True)
        loss = functional.cross_entropy(logits, target[:, run:], soft_label=True)
        with paddle.no_grad():
            same = (logits.argmax(axis=-1) == best[:, run:]).astype("float32").mean()
        losses.append((loss, same))
        given = _shifted(given, 1, axis=1)
    return losses


def flat_vector(shape: Shape, tensors: dict[str, np.ndarray]) -> np.ndarray:
    """A checkpoint's tensors as the network's vector: what :func:`training.checkpoint.named_tensors` undoes."""
    last = f"model.layers.{shape.layers}"
    joined = {"embed": tensors["model.embed_tokens.weight"], "norm": tensors["model.norm.weight"]}
    for layer in range(shape.layers + 1):
        prefix = f"model.layers.{layer}"
        attention = [tensors[f"{prefix}.self_attn.{name}_proj.weight"] for name in "qkv"]
        gate_up = [tensors[f"{prefix}.mlp.{name}_proj.weight"] for name in ("gate", "up")]
        joined |= {
            f"{layer}.norm1": tensors[f"{prefix}.input_layernorm.weight"],
            f"{layer}.norm2": tensors[f"{prefix}.post_attention_layernorm.weight"],
            f"{layer}.qkv": np.concatenate(attention).T,
            f"{layer}.o": tensors[f"{prefix}.self_attn.o_proj.weight"].T,
            f"{layer}.gate_up": np.concatenate(gate_up).T,
            f"{layer}.down": tensors[f"{prefix}.mlp.down_proj.weight"].T,
        }
    joined |= {f"{shape.layers}.{name}": tensors[f"{last}.{name}.weight"] for name in ("enorm", "hnorm")}
    joined[f"{shape.layers}.eh_proj"] = tensors[f"{last}.eh_proj.weight"].T
    joined[f"{shape.layers}.head_norm"] = tensors[f"{last}.shared_head.norm.weight"]
    return np.concatenate([joined[name].reshape(-1) for name in shape.weights()]).astype(np.float32)


def own_text(directory: Path, ids: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """int64 ``[count, LENGTH + 1]``: text of the decoder's own behind beginnings from ``ids``, drawn at temperatures
    from 0 to 1."""
    from hal_core import MemorySink, Request, SamplingParams, StateConfig

    import hal
    from hal.engine import Engine
    from hal.model.llama import LlamaModel
    from hal.worker import Worker

    starts = rng.integers(0, len(ids) - PROMPT, count)
    prompts = ids[starts[:, None] + np.arange(PROMPT)]
    sizes = StateConfig(num_slots=64, max_model_len=LENGTH + 1)
    rows = np.empty((count, LENGTH + 1), np.int64)
    with hal.open_device("cpu") as device:
        model = LlamaModel.load(directory)
        engine = Engine(Worker(device, model, sizes, sizes.num_slots * sizes.max_blocks, MemorySink()))
        new = LENGTH + 1 - PROMPT
        for row, prompt in enumerate(prompts):
            heat = (0.0, 0.7, 1.0)[row % 3]
            params = SamplingParams(temperature=heat, seed=row, max_tokens=new, min_tokens=new)
            engine.submit(Request(str(row), prompt.tolist(), params))
        for done in engine.run():
            row = int(done.request_id)
            rows[row] = [*prompts[row].tolist(), *done.token_ids]
    return rows


def mixed(corpus: Iterator[np.ndarray], own: np.ndarray, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Endless batches int64 ``[ROWS, LENGTH + 1]``, half of them the decoder's own text."""
    for batch in corpus:
        chosen = own[rng.integers(0, len(own), ROWS - len(batch))]
        yield np.concatenate([batch[:, : LENGTH + 1], chosen])


def train(directory: Path, tokens: int, own_rows: int, seed: int) -> None:
    """Train the prediction layer of the checkpoint in ``directory`` for ``tokens`` tokens, and write it there."""
    import paddle
    from tokenizers import Tokenizer

    from hal.model.config import read_config
    from hal.model.loading import read_tensors
    from training.adam import Adam, cosine_rate
    from training.bpe import END_OF_TEXT_ID
    from training.checkpoint import write_checkpoint
    from training.corpus import read_corpus
    from training.network import Network, Shape, decay_mask

    record = json.loads((directory / "training.json").read_text())
    shape = Shape(**record["shape"])
    network, rng = Network(shape), np.random.default_rng(seed)
    vector = flat_vector(shape, read_tensors(directory, read_config(directory)))
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    ids = encode_texts(tokenizer, [text for _, text in read_corpus().training], END_OF_TEXT_ID)
    began, busy = time.monotonic(), time.process_time()
    own = own_text(directory, ids, own_rows, rng)
    print(f"{own_rows} texts of its own in {time.monotonic() - began:.0f} s", flush=True)

    # The layer's weights are the vector's end.
    trained = sum(math.prod(size) for name, size in shape.weights().items() if name.startswith(f"{shape.layers}."))
    fixed = network.split(paddle.to_tensor(vector))
    tail = paddle.to_tensor(vector[-trained:])
    tail.stop_gradient = False
    adam, chain = Adam(decay_mask(shape)[-trained:], weight_decay=0.01), Chain(network)
    batches = mixed(windows(ids, LENGTH, ROWS // 2, rng), own, rng)
    steps = tokens // (ROWS * LENGTH)
    same = np.zeros(DEPTHS)
    for step in range(steps):
        losses = drafting_losses(network, _with(network, fixed, tail), paddle.to_tensor(next(batches)), chain)
        total = sum(loss * DEPTH_WEIGHT**run for run, (loss, _) in enumerate(losses))
        (gradient,) = paddle.grad(total, [tail])
        tail = adam.step(
            tail, gradient, cosine_rate(step, steps, peak=PEAK_RATE, warmup=WARMUP_STEPS, floor=FLOOR_RATE)
        )
        same += [share.item() for _, share in losses]
        if (step + 1) % 25 == 0 or step + 1 == steps:
            rate = (step + 1) * ROWS * LENGTH / (time.monotonic() - began)
            shares = " ".join(f"{share:.3f}" for share in same / 25)
            print(f"step {step + 1}/{steps} best token the same, by run: {shares}; {rate:.0f} tok/s", flush=True)
            same[:] = 0
    vector[-trained:] = tail.numpy()
    record["prediction"] = {
        "command": f"python -m training.prediction --tokens {tokens} --own-rows {own_rows} --seed {seed}",
        "versions": versions(),
        "seconds": round(time.monotonic() - began),
        "cpu_seconds": round(time.process_time() - busy),
        "tokens": {"seen": steps * ROWS * LENGTH, "own": int(own.size)},
    }
    write_checkpoint(directory, shape, vector, tokenizer, END_OF_TEXT_ID, record)


def _with(network: Network, fixed: Weights, tail: Tensor) -> Weights:
    """The weights, those of the prediction layer from ``tail``."""
    import paddle

    prefix = f"{network.shape.layers}."
    sizes = {name: size for name, size in network.shape.weights().items() if name.startswith(prefix)}
    pieces = paddle.split(tail, [math.prod(size) for size in sizes.values()])
    own: dict[str, Any] = {
        name: piece.reshape(list(size)) for (name, size), piece in zip(sizes.items(), pieces, strict=True)
    }
    return {**fixed, **own}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=2_000_000, help="stop after so many")
    parser.add_argument("--own-rows", type=int, default=768, help="texts of the decoder's own")
    parser.add_argument("--directory", type=Path, default=DEFAULT_OUTPUT, help="the checkpoint's directory")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    os.environ["FLAGS_use_stride_kernel"] = "0"  # noqa: SIM112 - Paddle's spelling; see training.train
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(options.threads)
    train(options.directory, options.tokens, options.own_rows, options.seed)


if __name__ == "__main__":
    main()
