"""Fields of config.json without effect at their present value: accepted and reported, or else refused by name."""

from dataclasses import replace

import pytest
from hal_core.errors import InvalidValue
from hal_engine.model.config import parse_config

OLD_DUMP = {
    # transformers' PretrainedConfig.to_dict of 4.x, as old files have it, with the values that a Llama has
    "return_dict": True,
    "output_hidden_states": False,
    "output_attentions": False,
    "torchscript": False,
    "use_bfloat16": False,
    "tf_legacy_loss": False,
    "pruned_heads": {},
    "chunk_size_feed_forward": 0,
    "is_encoder_decoder": False,
    "is_decoder": False,
    "cross_attention_hidden_size": None,
    "add_cross_attention": False,
    "tie_encoder_decoder": False,
    "max_length": 20,
    "min_length": 0,
    "do_sample": False,
    "early_stopping": False,
    "num_beams": 1,
    "num_beam_groups": 1,
    "diversity_penalty": 0.0,
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 1.0,
    "typical_p": 1.0,
    "repetition_penalty": 1.0,
    "length_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "bad_words_ids": None,
    "num_return_sequences": 1,
    "output_scores": False,
    "return_dict_in_generate": False,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "remove_invalid_values": False,
    "exponential_decay_length_penalty": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "finetuning_task": None,
    "id2label": {"0": "LABEL_0"},
    "label2id": {"LABEL_0": 0},
    "num_labels": 2,
    "tokenizer_class": None,
    "prefix": None,
    "pad_token_id": None,
    "sep_token_id": None,
    "decoder_start_token_id": None,
    "task_specific_params": None,
    "problem_type": None,
    "gradient_checkpointing": False,
    "xla_device": None,
    "_commit_hash": "abc",
    "_name_or_path": "x",
}


def test_an_old_dump_of_all_defaults_loads_and_is_told_in_one_line(checkpoints):
    config = parse_config(checkpoints.llama | OLD_DUMP)
    assert replace(config, notes=()) == parse_config(checkpoints.llama)
    (note,) = config.notes
    assert "\n" not in note
    assert all(name in note for name in ("_commit_hash", "output_scores", "repetition_penalty", "torchscript"))


@pytest.mark.parametrize(
    "idle",
    [
        {"is_llama_config": True, "rope_interleaved": False},
        {"unsloth_fixed": True, "unsloth_version": "2024.9"},
        {"use_sdpa": False},
        {"_commit_hash": None, "output_scores": True, "num_labels": 7},
        {"hidden_act": "swish"},
        {"rope_scaling": {"type": "linear", "factor": 1.0}},
        {"rope_scaling": {"rope_type": "linear", "type": "linear", "factor": 1}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 1.0, "beta_fast": 32.0}},
        {"rope_scaling": {"type": "dynamic", "factor": 4.0}},
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 1.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
        {"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 1.0}},
        {"sliding_window": 64},
        {"sliding_window": 64, "use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]},
        {"temperature": 0.6, "top_p": 0.9, "top_k": 20},  # tokens are drawn if the request wants it
        {"num_beams": 1, "length_penalty": 2.0, "stop_strings": []},
        {"logit_scale": 1.0, "use_qk_norm": False},
    ],
)
def test_what_changes_nothing_loads_and_gives_the_same_model(checkpoints, idle):
    config = parse_config(checkpoints.llama | idle)
    assert replace(config, notes=()) == parse_config(checkpoints.llama)
    told = "".join(config.notes)
    for name, value in idle.items():
        quiet = value is None or name in ("use_sliding_window", "layer_types")
        assert quiet or name in told or value == {"rope_type": "default", "partial_rotary_factor": 1.0}


def test_fields_that_every_file_has_are_not_told(checkpoints):
    assert parse_config(checkpoints.llama | {"use_cache": True, "initializer_range": 0.02}).notes == ()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("repetition_penalty", 1.2),
        ("do_sample", True),
        ("num_beams", 4),
        ("num_return_sequences", 2),
        ("no_repeat_ngram_size", 3),
        ("min_length", 10),
        ("suppress_tokens", [5]),
        ("bad_words_ids", [[5]]),
        ("forced_eos_token_id", 2),
        ("exponential_decay_length_penalty", [1, 1.1]),
        ("pruned_heads", {"0": [1]}),
        ("prefix", "Say: "),
        ("rope_interleaved", True),
        ("use_qk_norm", True),
        ("logits_scaling", 8.0),
        ("rope_scaling", {"type": "linear", "factor": 2.0}),
        ("rope_scaling", {"type": "linear", "factor": "1"}),
        ("rope_scaling", {"type": "yarn", "factor": 1.0, "attention_factor": 1.2}),
        ("rope_scaling", {"type": "yarn", "factor": 1.0, "original_max_position_embeddings": 16}),
        ("rope_scaling", {"type": "default", "factor": 2.0}),
        ("rope_scaling", {"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 16}),
        ("rope_scaling", {"rope_type": "linear", "type": "yarn", "factor": 1.0}),
        ("rope_scaling", {"rope_type": "default", "partial_rotary_factor": 0.5}),
        ("sliding_window", 63),
        ("layer_types", ["sliding_attention", "full_attention"]),
    ],
)
def test_the_same_fields_with_a_value_that_changes_the_result_are_refused(checkpoints, field, value):
    with pytest.raises(InvalidValue, match=field) as caught:
        parse_config(checkpoints.llama | OLD_DUMP | {field: value})
    assert caught.value.cure
