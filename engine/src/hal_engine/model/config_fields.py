"""Fields of ``config.json`` outside the model, sorted by the values that can change inference.

Three groups: fields whose values never matter, fields with one neutral value, and the familiar fields of every
checkpoint, which need no note. A field in none of them is refused (``hal_engine.model.config``).

Old dumps contain everything in transformers' ``PretrainedConfig``: its bookkeeping, task heads, and the defaults of
``generate``. Here a request's parameters determine sampling, so of those defaults only the ones matter that would
change a greedy answer, or would have it drawn.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FAMILIAR = frozenset(
    [
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_name_or_path",
        "attention_dropout",
        "embd_pdrop",
        "finetuning_task",
        "id2label",
        "initializer_range",
        "is_decoder",
        "label2id",
        "max_length",
        "name_or_path",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "pretraining_tp",
        "resid_pdrop",
        "return_dict",
        "task_specific_params",
        "tokenizer_class",
        "transformers_version",
        "unk_token_id",
        "use_cache",
        "use_return_dict",
    ]
)
"""Bookkeeping and training settings in most files; ignored silently."""

_BOOKKEEPING = (
    "_attn_implementation_internal",
    "_commit_hash",
    "_flash_attn_2_enabled",
    "_from_model_config",
    "attn_implementation",
    "chunk_size_feed_forward",
    "cls_token_id",
    "cross_attention_hidden_size",
    "decoder_start_token_id",
    "is_llama_config",
    "keys_to_ignore_at_inference",
    "mask_token_id",
    "max_sequence_length",
    "model_max_length",
    "num_labels",
    "problem_type",
    "sep_token_id",
    "tf_legacy_loss",
    "tie_encoder_decoder",
    "tokenizer_model_max_length",
    "torchscript",
    "transformers.js_config",
    "unsloth_fixed",
    "unsloth_version",
    "use_bfloat16",
    "xla_device",
)
_KERNELS = ("flash_attention", "use_flash_attention", "use_flash_attention_2", "use_flash_attn", "use_sdpa")
_TRAINING = (
    "attention_probs_dropout_prob",
    "attn_dropout",
    "attn_pdrop",
    "classifier_dropout",
    "dropout",
    "gradient_checkpointing",
    "hidden_dropout",
    "hidden_dropout_prob",
    "initializer_factor",
)
# Outputs of generate() besides tokens, its search with several beams, drafts or caches, and its way to draw: none of it
# changes a greedy answer of one beam.
_GENERATION = (
    "assistant_confidence_threshold",
    "assistant_lookbehind",
    "cache_config",
    "cache_implementation",
    "diversity_penalty",
    "early_stopping",
    "epsilon_cutoff",
    "eta_cutoff",
    "length_penalty",
    "low_memory",
    "max_cache_len",
    "max_new_tokens",
    "min_p",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "num_beam_groups",
    "output_logits",
    "output_scores",
    "remove_invalid_values",
    "renormalize_logits",
    "return_dict_in_generate",
    "target_lookbehind",
    "temperature",
    "top_h",
    "top_k",
    "top_p",
    "typical_p",
)
PASSED_OVER = frozenset([*_BOOKKEEPING, *_KERNELS, *_TRAINING, *_GENERATION])
"""Fields without effect on inference for any value; reported."""

GENERATION_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "bad_words_ids": ([],),
    "begin_suppress_tokens": ([],),
    "constraints": ([],),
    "do_sample": (False,),
    "dola_layers": (),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "exponential_decay_length_penalty": (),
    "force_words_ids": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "guidance_scale": (1,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "penalty_alpha": (0,),
    "repetition_penalty": (1,),
    "sequence_bias": ([], {}),
    "stop_strings": ([], ""),
    "suppress_tokens": ([],),
    "token_healing": (False,),
    "watermarking_config": ({},),
}
"""Generation defaults with their neutral values (an absent one is always neutral)."""

MODEL_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "attn_logit_softcapping": (),
    "clip_qkv": (),
    "embedding_multiplier": (1,),
    "final_logit_softcapping": (),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "prefix": ("",),
    "pruned_heads": ({}, []),
    "qk_layernorm": (False,),
    "residual_multiplier": (1,),
    "rope_interleaved": (False,),
    "use_qk_norm": (False,),
}
"""Switches and factors of other decoders, with the values that do not affect this one."""

REQUIRED: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),  # two names of one function
    "mlp_bias": (False,),
    "partial_rotary_factor": (1,),
    "use_mrope": (False,),
    "add_cross_attention": (False,),
    "is_encoder_decoder": (False,),
    "attention_multiplier": (1,),
    "quantization_config": (),
    "auto_map": (),
}
"""Fields of the model that this decoder implements for these values only."""
