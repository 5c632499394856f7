"""``hal run``: its options, and the order in which they are checked; nothing runs before all of them are sound."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from hal_core import PluginError, SamplingParams

from hal.model import DEFAULT_CHECKPOINT

from . import failures
from .console import say
from .mkl import kernels_note
from .run_options import (
    MODEL_PLACE,
    Options,
    RankOptions,
    read_prompts,
    requirements,
    runner_of,
    sampling_params,
    split_of,
)

_defaults = SamplingParams()


def command(
    prompt: Annotated[list[str] | None, typer.Option(help="A text to continue; may be given several times.")] = None,
    prompts: Annotated[Path | None, typer.Option(metavar="FILE", help="A file with one prompt a line.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate for each prompt.")] = 64,
    device: Annotated[str | None, typer.Option(help="The device of the slot state (hal devices).")] = None,
    require: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="Refuse a device without it, as async_set_value=async, or substituted= for no stand-in; may be given "
            "several times.",
        ),
    ] = None,
    model: Annotated[Path, typer.Option(metavar="DIR", help="A checkpoint directory.")] = DEFAULT_CHECKPOINT,
    model_place: Annotated[str, typer.Option(help="The Paddle place that the model runs on.")] = MODEL_PLACE,
    temperature: Annotated[float, typer.Option(help="0: always the best token.")] = _defaults.temperature,
    top_k: Annotated[int, typer.Option(help="Draw from the K best tokens; 0: from all.")] = _defaults.top_k,
    top_p: Annotated[float, typer.Option(help="Draw from the best tokens that make up P.")] = _defaults.top_p,
    min_p: Annotated[
        float, typer.Option(help="Of these, draw from those at least P times as likely as the best.")
    ] = _defaults.min_p,
    seed: Annotated[int, typer.Option(help="Draws depend on it, the prompt's number and the position.")] = 0,
    repetition_penalty: Annotated[
        float, typer.Option(help="Above 1: less of what was said, prompt included.")
    ] = _defaults.repetition_penalty,
    frequency_penalty: Annotated[
        float, typer.Option(help="Above 0: less of what was generated, for each time.")
    ] = _defaults.frequency_penalty,
    presence_penalty: Annotated[
        float, typer.Option(help="Above 0: less of what was generated at all.")
    ] = _defaults.presence_penalty,
    min_tokens: Annotated[int, typer.Option(help="No end before so many tokens.")] = _defaults.min_tokens,
    stop: Annotated[
        list[str] | None, typer.Option(help="End where the answer contains this text; may be given several times.")
    ] = None,
    logprobs: Annotated[
        int | None, typer.Option(metavar="K", help="With --json: log-probabilities, and those of the K best tokens.")
    ] = None,
    slots: Annotated[int, typer.Option(help="Most prompts that run at once; the others wait.")] = 8,
    blocks: Annotated[
        int | None, typer.Option(help="KV blocks of 16 tokens; as many as may be needed if not given.")
    ] = None,
    chunk: Annotated[
        int, typer.Option(help="Most prompt tokens that a step feeds: longer prompts go in pieces.")
    ] = 256,
    step_tokens: Annotated[
        int | None,
        typer.Option(help="Most tokens that a step feeds, next tokens and drafts included; as many as come."),
    ] = None,
    speculate: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="What drafts tokens, several of which a step verifies: naive, ngram, suffix, mtp, hybrid, an "
            "installed proposer, or two or more as first+second. It changes no token.",
        ),
    ] = "none",
    drafts: Annotated[
        int | None,
        typer.Option(
            metavar="K",
            help="Most drafts that a step verifies of a prompt, 1 to 5: with --speculate (4 unless told), or of a "
            "--runner that drafts on the device.",
        ),
    ] = None,
    acceptance: Annotated[
        str,
        typer.Option(
            help="How drafts are accepted: exact, which changes no token, or rejection, which keeps the distribution "
            "of sampled tokens alone."
        ),
    ] = "exact",
    tp: Annotated[int, typer.Option(help="Split the model over so many ranks (tensor parallelism).")] = 1,
    dp: Annotated[int, typer.Option(help="Serve with so many groups of ranks, each with slots and blocks.")] = 1,
    split: Annotated[
        str | None,
        typer.Option(metavar="P,D", help="Let P workers prefill prompts and D others decode, of --tp ranks each."),
    ] = None,
    transfer: Annotated[
        str | None,
        typer.Option(metavar="MODULE:NAME", help="With --split: what moves keys and values in place of hal's own."),
    ] = None,
    sampling: Annotated[
        str,
        typer.Option(help="Who samples: the first rank of each group, or every-rank."),
    ] = "first",
    dp_sync: Annotated[
        bool, typer.Option("--dp-sync", help="All groups take each step together, as expert parallelism needs it.")
    ] = False,
    share_devices: Annotated[
        bool, typer.Option("--share-devices", help="Let ranks of a host open one device together, if it has too few.")
    ] = False,
    launcher: Annotated[
        str, typer.Option(help="What starts the ranks: paddle, on this host, or ray, on the nodes of a Ray cluster.")
    ] = "paddle",
    ray_address: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="With --launcher ray: the cluster; RAY_ADDRESS, or one of its own here."),
    ] = None,
    ray_placement: Annotated[
        str,
        typer.Option(
            help="With --launcher ray, for the ranks of each tensor-parallel group: strict-pack (one node), pack, "
            "spread or strict-spread (a node each)."
        ),
    ] = "strict-pack",
    restart: Annotated[int, typer.Option(help="Start lost ranks anew up to so many times, and go on.")] = 0,
    sink: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Send the records there as well: ipc:// or tcp:// for hal tail or an engine, sysv:// for FastDeploy's "
            "readers. With --dp or --split each worker that sends has a sysv queue of its own, ids counting up.",
        ),
    ] = None,
    key: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="With --sink over tcp: the key that hal tail has made."),
    ] = None,
    runner: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="What runs the steps: auto (the installed runner of the device where it can run, else paddle), paddle "
            "(the Paddle model), an installed one, as torch, or yours, MODULE:NAME, as my_runners:MyRunner.",
        ),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="What a runner computes in: auto (the checkpoint's own type) or float32.")
    ] = "auto",
    overlap: Annotated[
        str,
        typer.Option(
            help="Prepare the next step while the device runs one: auto (where it can be), on (or an error), off."
        ),
    ] = "auto",
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose",
            "-v",
            help="Tell what is chosen for this machine, and show the traceback of a plugin's own code that failed.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a prompt, in their order.")] = False,
) -> None:
    """Generate text with a model: the embedded default, or a Llama-, Mistral-, Qwen2- or Qwen3-style checkpoint."""
    failures.verbose = verbose
    if verbose and (note := kernels_note(os.environ)):
        say(f"hal: {note}")
    params = sampling_params(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        repetition_penalty=repetition_penalty,
        frequency_penalty=frequency_penalty,
        presence_penalty=presence_penalty,
        min_tokens=min_tokens,
        max_tokens=max_tokens,
        logprobs=logprobs,
    )
    texts = read_prompts(prompt or [], prompts)
    wanted = requirements(require or [])
    ranks = RankOptions(
        tp,
        dp,
        sampling,
        dp_sync=dp_sync,
        restart=restart,
        share_devices=share_devices,
        split=split_of(split),
        transfer=transfer,
        launcher=launcher,
        ray_address=ray_address,
        ray_placement=ray_placement,
    )
    options = Options(
        device,
        wanted,
        model,
        model_place,
        slots,
        blocks,
        chunk,
        stop or [],
        speculate,
        drafts,
        as_json,
        sink,
        ranks,
        acceptance,
        runner_of(runner or []),
        overlap,
        step_tokens,
        dtype,
        key,
    )
    from .run_session import generate

    try:
        code = generate(texts, params, options)
    except SystemExit as end:  # hal raises none here, and its status may be 0
        what = f"a runner or plugin called sys.exit({'' if end.code is None else repr(end.code)}) during the run"
        raise PluginError(what, cure="have it raise an error instead; -v shows where") from end
    raise typer.Exit(code)
