"""Reference models of the proposers, and a step of requests whose tokens are known beforehand."""

import numpy as np
from hal_core import Request, SamplingParams, StateConfig, admit
from hal_core.slots.layout import lay_out
from hal_engine.proposers import Fed, Setup

SETUP = Setup(max_draft_tokens=5, num_slots=4, max_model_len=8192, vocab_size=2**31 - 1)
LAYOUT = lay_out(StateConfig(num_slots=1, max_model_len=8192, max_draft_tokens=5))


def ngram(tokens, drafts, most):
    """Return the tokens after the last place of the longest of the n-grams of 3, 2 and 1 at the end, and its n."""
    text = [*tokens, *drafts]
    for n in range(min(3, len(text)), 0, -1):
        for end in range(len(tokens) - 2, n - 2, -1):
            if text[end - n + 1 : end + 1] == text[-n:]:
                return copied(text, end, most), n
    return [], 0


def copied(text, end, most):
    """Return the tokens after a place of a text, which continues as it is copied."""
    out = list(text)
    for ahead in range(most):
        out.append(out[end + 1 + ahead])
    return out[len(text) :]


def own(tokens, drafts, most, *, depth, reach, least_share):
    """Return the majority's continuation of the longest matching end, latest first: drafts, match, score, places."""
    text = [*tokens, *drafts]
    for n in range(min(depth, len(text)), 0, -1):
        ends = [end for end in range(len(tokens) - 2, n - 2, -1) if text[end - n + 1 : end + 1] == text[-n:]]
        if ends:
            said = [copied(text, end, most) for end in ends]
            return (*vote(said, n, min(most, reach * n), least_share), len(ends))
    return [], 0, 0.0, 0


def shared(outputs, context, most, *, depth, reach, least_share):
    """Return the majority's continuation over outputs, the latest output first and in it the last place."""
    for n in range(min(depth, len(context)), 1, -1):
        said = [
            output[end + 1 : end + 1 + most]
            for output in reversed(outputs)
            for end in range(len(output) - 2, n - 2, -1)
            if output[end - n + 1 : end + 1] == context[-n:]
        ]
        if said:
            return (*vote(said, n, min(most, reach * n), least_share), len(said))
    return [], 0, 0.0, 0


def vote(said, matched, most, least_share):
    """Return the majority's tokens one by one, the share of each majority so far, and the sum of the shares."""
    drafts, share, score = [], 1.0, 0.0
    while len(drafts) < most:
        tokens = [one[len(drafts)] for one in said if len(one) > len(drafts)]
        if not tokens:
            break
        best = max(dict.fromkeys(tokens), key=tokens.count)
        share *= tokens.count(best) / len(said)
        if share < least_share:
            break
        said = [one for one in said if len(one) > len(drafts) and one[len(drafts)] == best]
        drafts.append(best)
        score += share
    return drafts, matched if drafts else 0, score


def request(prompt, output=(), name="r", max_tokens=4096):
    """A request, admitted."""
    return admit(Request(name, prompt, SamplingParams(max_tokens=max_tokens), output=output), LAYOUT)


def entered(proposer, slot, prompt, output=()):
    """Let a request enter."""
    admitted = request(prompt, output)
    proposer.enter(slot, admitted, admitted.tokens)


def fed(**accepted):
    """Return a step's output: ``fed(s0=[7, 8])`` for slot 0."""
    slots = [int(name[1:]) for name in accepted]
    return Fed(slots, [np.array(tokens, np.int64) for tokens in accepted.values()])


def decode(proposer, slot, text, known, *, room=5, steps=10**9):
    """Decode a known text from its ``known``-th token; return each step's input and output, with drafts verified as a
    worker does it.
    """
    fed_and_given = []
    while known < len(text) and len(fed_and_given) < steps:
        drafts = proposer.propose({slot: min(room, len(text) - known - 1)}).get(slot, [])
        right = next((i for i, token in enumerate(drafts) if token != text[known + i]), len(drafts))
        given = text[known : known + right + 1]
        fed_and_given.append((1 + len(drafts), len(given)))
        known += len(given)
        proposer.observe(fed(**{f"s{slot}": given}))
    return fed_and_given
