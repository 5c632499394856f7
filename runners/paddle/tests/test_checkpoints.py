"""Checkpoints of current families, in their file formats: they load, and the worker gives the tokens of the published
definitions, whether a prompt is fed whole or in pieces.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
from hal_core.devices.cpu import CpuPlugin
from hal_core.errors import InvalidValue
from hal_core.output.sinks import MemorySink
from hal_core.runtime.bound import bind
from hal_core.slots.admission import Request, SamplingParams
from hal_core.slots.fields import StateConfig
from hal_engine.engine import Engine, Limits
from hal_engine.model.config import parse_config
from hal_paddle_runner.loading import load_model
from hal_paddle_runner.model import Model
from hal_paddle_runner.worker import Worker

from tests import share
from tests.model.reference import Reference

TOLERANCE = 1e-4
LEAD = 2 * TOLERANCE  # of the reference's best token over its second: with less, rounding could choose another one
NEW_TOKENS = 12
SIZES = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_act": "silu", "max_position_embeddings": 96}
SIZES |= {"rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": None, "use_cache": True}
# Of head_dim 8 and theta 100 the wavelengths are 6.3, 19.9, 62.8 and 199: kept, two between, and slowed by the factor.
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}
FAMILIES = {
    "llama 3.1": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "head_dim": 8,
        "rope_theta": 100.0,
        "rope_scaling": LLAMA3,
        "attention_bias": False,
        "mlp_bias": False,
        "pretraining_tp": 1,
    },
    "llama 3.2, as newer files say it": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "head_dim": 8,
        "rope_parameters": LLAMA3 | {"factor": 32.0, "rope_theta": 100.0},
    },
    "qwen 2.5": {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "rope_theta": 1000000.0,
        "max_window_layers": 2,
        "sliding_window": 64,
        "use_sliding_window": False,
    },
    "qwen 3": {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "head_dim": 12,
        "rope_theta": 1000000.0,
        "rope_scaling": None,
        "attention_bias": False,
        "max_window_layers": 2,
        "sliding_window": None,
        "use_sliding_window": False,
    },
    "qwen 3, with bias and its own head width": {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
        "layer_types": ["full_attention", "full_attention"],
    },
    "mistral": {
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
        "head_dim": 6,
        "rope_theta": 1000000.0,
        "sliding_window": None,
    },
}
PROMPTS = [np.random.default_rng(number).integers(3, 61, size).tolist() for number, size in enumerate((29, 5, 14))]


class Recorded:
    """A model whose steps are recorded: the position of each requested row of logits, and the row."""

    def __init__(self, model: Model) -> None:
        self.config, self.allocate_cache, self._model = model.config, model.allocate_cache, model
        self.rows: list[tuple[int, np.ndarray]] = []

    def forward(self, batch):
        logits = self._model.forward(batch)
        lasts = (
            (batch.context_lengths + batch.row_lengths - 1) if batch.outputs is None else batch.positions[batch.outputs]
        )
        self.rows += zip(lasts.tolist(), logits, strict=True)
        return logits


def serve(model, prompts, chunk):
    """The greedy tokens of each prompt, all served at once."""
    sizes = StateConfig(num_slots=len(prompts), max_model_len=64, block_size=4)
    with bind(CpuPlugin.open(0, {})) as device:
        engine = Engine(Worker(device, model, sizes, 16 * len(prompts), MemorySink()), Limits(chunk=chunk))
        for number, prompt in enumerate(prompts):
            engine.submit(Request(str(number), prompt, SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)))
        tokens = {done.request_id: done.token_ids for done in engine.run()}
    return [tokens[str(number)] for number in range(len(prompts))]


@pytest.fixture(scope="module")
def saved(tmp_path_factory, checkpoints):
    """Write a small random checkpoint: ``saved(family, **changes)``."""

    def make(family, *, shards=1, **changes):
        fields = SIZES | FAMILIES[family] | changes
        return checkpoints.write(
            tmp_path_factory.mktemp("checkpoint"), fields, checkpoints.tensors(parse_config(fields)), shards=shards
        )

    return make


KINDS = [(family, tied, shards) for family in FAMILIES for tied in (False, True) for shards in (1, 3)]
"""One checkpoint of each family runs in ``make test``; together they meet every pair of the remaining values."""


@pytest.mark.parametrize(
    ("family", "tied", "shards"),
    share.cases(KINDS, lambda kind: KINDS.index(kind) % 4 == [*FAMILIES].index(kind[0]) % 4),
)
def test_the_worker_gives_the_references_tokens_and_logits(saved, family, tied, shards):
    directory = saved(family, shards=shards, tie_word_embeddings=tied)
    reference, model = Reference(directory), load_model(directory)
    expected, leads = zip(*(reference.generate(prompt, NEW_TOKENS) for prompt in PROMPTS), strict=True)
    assert min(leads) > LEAD, "the random checkpoint leaves a choice to rounding; take another seed"
    for chunk in (256, 4):
        assert tuple(serve(model, PROMPTS, chunk)) == expected
        recorded = Recorded(model)
        assert serve(recorded, PROMPTS[:1], chunk) == [expected[0]]
        logits = reference.logits([*PROMPTS[0], *expected[0]])
        assert len(recorded.rows) == NEW_TOKENS
        for position, row in recorded.rows:
            np.testing.assert_allclose(row, logits[position], atol=TOLERANCE)


@pytest.mark.parametrize(
    ("family", "fields", "without"),
    [
        ("llama 3.1", {"rope_scaling": None}, ()),
        ("llama 3.1", {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 32}}, ()),
        ("qwen 2.5", {}, ("q_proj.bias", "k_proj.bias", "v_proj.bias")),
        ("qwen 3, with bias and its own head width", {}, ("o_proj.bias",)),
        ("qwen 3", {}, ("q_norm.weight",)),
        ("qwen 3", {}, ("k_norm.weight",)),
    ],
)
def test_what_a_family_has_of_its_own_shows_in_the_logits(saved, family, fields, without):
    """Else a decoder that leaves it out would pass too."""
    directory = saved(family)
    full, less = Reference(directory), Reference(directory)
    less.fields |= fields
    for name in [name for name in less.tensors if name.endswith(without)] if without else ():
        less.tensors[name] = np.ones_like(less.tensors[name]) if "norm" in name else 0 * less.tensors[name]
    assert np.abs(full.logits(PROMPTS[0]) - less.logits(PROMPTS[0])).max() > 100 * TOLERANCE


def test_qwen3_has_heads_of_128_where_the_file_does_not_say(saved):
    assert parse_config(SIZES | FAMILIES["qwen 3"] | {"head_dim": None}).head_dim == 128
    directory = saved("qwen 3, with bias and its own head width")
    assert load_model(directory).config.head_dim == 128


@pytest.mark.parametrize(
    ("family", "tensor", "message"),
    [("qwen 3", "q_norm", "k_norm.weight' is missing"), ("mistral", "q_norm", "does not belong")],
)
def test_norms_of_queries_and_keys_are_tensors_of_qwen3_alone(tmp_path, checkpoints, family, tensor, message):
    fields = SIZES | FAMILIES[family]
    values = checkpoints.tensors(parse_config(fields))
    values.pop("model.layers.1.self_attn.k_norm.weight", None)
    values[f"model.layers.1.self_attn.{tensor}.weight"] = np.ones(fields["head_dim"], np.float32)
    with pytest.raises(InvalidValue, match=message):
        load_model(checkpoints.write(tmp_path, fields, values))


@pytest.mark.parametrize(
    ("family", "fields", "named"),
    [
        ("mistral", {"sliding_window": 95}, "sliding_window"),
        ("mistral", {"sliding_window": 95, "use_sliding_window": False}, "sliding_window"),
        ("mistral", {"attention_bias": True}, "attention_bias"),
        ("mistral", {"model_type": "qwen2"}, "model_type"),
        ("mistral", {"architectures": ["Ministral3ForCausalLM"]}, "architectures"),
        ("qwen 3", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, "sliding_window"),
        ("qwen 3", {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}, "architectures"),
        ("qwen 3", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ("qwen 3", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling"),
        ("qwen 2.5", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling"),
        ("llama 3.1", {"rope_scaling": LLAMA3 | {"low_freq_factor": None}}, "rope_scaling: low_freq_factor"),
        ("llama 3.1", {"rope_scaling": LLAMA3 | {"high_freq_factor": 1}}, "rope_scaling: high_freq_factor"),
        ("llama 3.1", {"rope_scaling": LLAMA3 | {"factor": "8"}}, "rope_scaling: factor"),
        (
            "llama 3.1",
            {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 8.5}},
            "original_max_position_embeddings",
        ),
        ("llama 3.1", {"rope_scaling": LLAMA3 | {"attention_factor": 1.2}}, "rope_scaling"),
        ("llama 3.1", {"rope_parameters": LLAMA3 | {"factor": 4.0}}, "rope_scaling"),
        ("llama 3.1", {"original_max_position_embeddings": 32}, "original_max_position_embeddings"),
    ],
)
def test_what_a_family_does_not_have_here_is_refused_by_name(family, fields, named):
    with pytest.raises(InvalidValue, match=f"config.json: {named}|config.json: rope_scaling: {named}") as caught:
        parse_config(SIZES | FAMILIES[family] | fields)
    assert caught.value.cure


def test_a_mistral_file_without_the_field_has_a_window_of_4096():
    fields = SIZES | FAMILIES["mistral"]
    assert "sliding_window" not in json.dumps(parse_config(fields | {"max_position_embeddings": 8192}).notes)
    del fields["sliding_window"]
    parse_config(fields | {"max_position_embeddings": 4096})
    with pytest.raises(InvalidValue, match=r"sliding_window.*absent: which stands for 4096"):
        parse_config(fields | {"max_position_embeddings": 4097})
