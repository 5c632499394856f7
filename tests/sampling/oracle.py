"""The sampler's rules again, for one row, in plain Python lists and floats; it shares no code with
``hal_engine.sampling``."""

import math
import struct
from collections import Counter


def single(value):
    """Rounded to float32."""
    return struct.unpack("f", struct.pack("f", value))[0]


def final_logits(logits, row):
    values = list(logits)
    output = Counter(row["output"] or [])
    seen = set(row["prompt"] or []) | set(output)
    repetition, frequency, presence = (
        single(row[f"{name}_penalty"]) for name in ("repetition", "frequency", "presence")
    )
    for token in range(len(values)):
        value = values[token]
        if value == -math.inf or token not in seen:
            continue
        value = value / repetition if value > 0 else value * repetition
        if token in output:
            value = value - output[token] * frequency - presence
        values[token] = single(value)
    masked = set(row["bad_words"])
    if row["position"] < row["min_tokens"]:
        masked |= set(row["eos_token_ids"])
        masked |= {sequence[0] for sequence in row["stop_sequences"] if len(sequence) == 1}
    return [-math.inf if token in masked else value for token, value in enumerate(values)]


def best_first(values):
    return sorted(range(len(values)), key=lambda token: (-values[token], token))


def greedy(values):
    """Token and margin."""
    first, *others = best_first(values)
    return first, values[first] - (values[others[0]] if others else -math.inf)


def distribution(values, row):
    """Probabilities after truncation, by token id, and how near any decision was to going the other way."""
    top, temperature = max(values), single(row["temperature"])
    sizes = [math.exp((value - top) / temperature) if value > -math.inf else 0.0 for value in values]
    kept = best_first(values)
    if row["top_k"] > 0:
        kept = kept[: row["top_k"]]
    slack = math.inf
    if row["top_p"] < 1.0:
        total, nucleus = math.fsum(sizes[token] for token in kept), []
        for token in kept:
            nucleus.append(token)
            share = math.fsum(sizes[t] for t in nucleus) / total - single(row["top_p"])
            slack = min(slack, abs(share))
            if share >= 0:
                break
        kept = nucleus
    least = single(row["min_p"])
    if least > 0:
        slack = min([slack, *(abs(sizes[token] - least) for token in kept if sizes[token] < 1.0)])
    kept = [token for token in kept if sizes[token] >= least and sizes[token] > 0.0]
    total = math.fsum(sizes[token] for token in kept)
    return [sizes[token] / total if token in kept else 0.0 for token in range(len(values))], slack


def drawn(probabilities, u):
    """Token and margin."""
    before = 0.0
    for token, probability in enumerate(probabilities):
        if u < before + probability:
            return token, min(u - before, before + probability - u)
        before += probability
    raise AssertionError("u is past the end")


def log_softmax(logits):
    top = max(logits)
    normalizer = top + math.log(math.fsum(math.exp(value - top) for value in logits))
    return [value - normalizer for value in logits]
