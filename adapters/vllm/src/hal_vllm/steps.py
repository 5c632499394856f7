"""One step of a drawn sequence: every kernel that hal has, on both sides, by vLLM's own host functions."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from types import SimpleNamespace

import torch

from .kernels import GPU
from .sides import LETTERS, ULP, VOCABULARY, Slots, Tensors


class Step:
    """``rows``: the batch's slots; ``live``: what is known of their requests; ``both``: does a thing on both sides."""

    def __init__(
        self,
        draw: random.Random,
        sizes: Mapping[str, int],
        rows: list[int],
        live: Sequence[Mapping[str, int]],
        both: Callable[..., Tensors],
    ) -> None:
        self.draw, self.sizes, self.rows, self.both = draw, sizes, rows, both
        queries, drafts = zip(*[self._counts(one) for one in live], strict=True)
        self.n, self.total = len(rows), sum(queries)
        most = sizes["rows"]
        starts = torch.zeros(most + 1, dtype=torch.int32)
        starts[1 : self.n + 1] = torch.tensor(queries).cumsum(0)
        starts[self.n + 1 :] = self.total
        cuts = torch.zeros(self.n + 1, dtype=torch.int32)
        cuts[1:] = (torch.tensor(drafts) + 1).cumsum(0)
        self.logits_count = int(cuts[-1])
        self.noise = torch.Generator().manual_seed(self.draw.randrange(2**31))
        self.host = {"rows": torch.tensor(self.rows), "starts": starts, "cuts": cuts}
        self.held: dict[int, dict[str, torch.Tensor]] = {}

    def _counts(self, live: Mapping[str, int]) -> tuple[int, int]:
        """Return how many tokens a request has in this step, and how many of them are drafts."""
        left = live["length"] - live["done"]
        room = self.sizes["tokens"] // self.sizes["rows"] - 1
        if left > 1 or live["done"] < live["prefill"]:
            tokens = self.draw.randint(1, max(1, min(left, 20, room)))
            unproposed = self.draw.randint(0, min(self.sizes["drafts"], tokens - 1))  # as after a remote prefill
            return tokens, unproposed if self.draw.random() < 0.3 else 0
        drafts = self.draw.randint(0, min(self.sizes["drafts"], 8, max(room - 1, 0)))
        return 1 + drafts, drafts

    def on(self, side: Slots) -> SimpleNamespace:
        """Return the step's tensors on a side's device, made once."""
        held = self.held.setdefault(id(side), {})
        for name, tensor in self.host.items():
            if name not in held:
                held[name] = tensor.clone().to(side.device)
        return SimpleNamespace(**held)

    def new(self, **tensors: torch.Tensor) -> None:
        """Add tensors to the step, the same on both sides."""
        self.host |= tensors

    def run(self) -> None:
        """Call the kernels in the runner's order."""
        self._inputs()
        self._tables()
        self._logits()
        self._verified()
        self._updated()
        self._ngram()

    def _inputs(self) -> None:
        inputs, tokens, rows = import_module(f"{GPU}.input_batch"), self.sizes["tokens"], self.sizes["rows"]
        self.new(
            ids=torch.full((tokens,), 5, dtype=torch.int32),
            pos=torch.full((tokens,), 5, dtype=torch.int64),
            lens=torch.full((rows,), 5, dtype=torch.int32),
        )

        def prefill(side: Slots) -> Tensors:
            t, s = self.on(side), side.requests
            state = (s.all_token_ids.gpu, s.prefill_len.gpu, s.num_computed_tokens.gpu)
            inputs.prepare_prefill_inputs(t.ids, s.next_prefill_tokens, t.rows, t.starts, *state)
            return {"ids": t.ids, "next": s.next_prefill_tokens}

        def positions(side: Slots) -> Tensors:
            t = self.on(side)
            inputs.prepare_pos_seq_lens(t.rows, t.starts, side.requests.num_computed_tokens.gpu, t.pos, t.lens)
            return {"pos": t.pos, "lens": t.lens}

        def combined(side: Slots) -> Tensors:
            t, s = self.on(side), side.requests
            state = (s.last_sampled_tokens, t.starts, t.lens, s.prefill_len.gpu, s.draft_tokens, t.cuts)
            at = inputs.combine_sampled_and_draft_tokens(t.ids, t.rows, *state, self.logits_count, 1)
            return {"ids": t.ids, "at": at}

        def expanded(side: Slots) -> Tensors:
            t = self.on(side)
            at, local = inputs.expand_idx_mapping(t.rows, self.logits_count, t.cuts, self.sizes["drafts"] + 1)
            return {"expanded": at, "local": local}

        both = self.both
        both("_prepare_prefill_inputs_kernel", prefill)
        both("_prepare_pos_seq_lens_kernel", positions)
        self.new(at=both("_combine_sampled_and_draft_tokens_kernel", combined)["at"])
        self.new(**both("_expand_idx_mapping_kernel", expanded))

    def _tables(self) -> None:
        padded = min(self.sizes["rows"], self.n + 1)

        def gathered(side: Slots) -> Tensors:
            tables = side.tables.gather_block_tables(self.on(side).rows, padded)
            return {f"table {number}": table.clone() for number, table in enumerate(tables)}

        def mapped(side: Slots) -> Tensors:
            t = self.on(side)
            side.tables.compute_slot_mappings(t.rows, t.starts[: self.n + 1], t.pos, self.total)
            return {"slots": side.tables.slot_mappings.clone()}

        self.both("_gather_block_tables_kernel", gathered)
        self.both("_compute_slot_mappings_kernel", mapped)

    def _logits(self) -> None:
        """Each kernel of sampling, on the logits that the one before it left."""
        context = import_module(f"{GPU}.sample.logits_processor.interface").LogitsContext
        scores = import_module(f"{GPU}.sample.logprob")
        logits = torch.randn((self.logits_count, VOCABULARY), generator=self.noise) * 3
        logits[:, :LETTERS] += 5
        self.new(logits=logits)
        names = ("_penalties_kernel", "_bias_kernel", "_bad_words_kernel")
        for name, number in zip(names, (0, 1, 2), strict=True):

            def processed(side: Slots, number: int = number) -> Tensors:
                t = self.on(side)
                given = context(
                    expanded_idx_mapping=t.expanded,
                    idx_mapping=t.rows,
                    idx_mapping_np=self.host["rows"].numpy(),
                    expanded_local_pos=t.local,
                    input_ids=t.ids[t.at],
                    pos=t.pos[t.at],
                    seq_lens_upper_bound_np=self.host["lens"].numpy(),
                )
                return {"logits": side.processors[number].apply(t.logits, given)}

            self.both(name, processed)

        def scored(side: Slots) -> Tensors:
            t = self.on(side)
            chosen = t.expanded * 7 % VOCABULARY
            found = scores.compute_topk_scores(t.logits, 4, chosen, None, side.wanted, t.expanded, 3)
            return {"ids": found.logprob_token_ids, "ranks": found.selected_token_ranks}

        def logprobs(side: Slots) -> Tensors:
            t = self.on(side)
            return {"logprobs": scores.compute_token_logprobs(t.logits, t.expanded[:, None] % VOCABULARY)}

        def followed(side: Slots) -> Tensors:
            t, s = self.on(side), side.requests
            state = (t.starts, t.rows, s.num_computed_tokens.gpu, s.all_token_ids.gpu)
            prompts = import_module(f"{GPU}.sample.prompt_logprob")
            return {"follows": prompts.get_prompt_logprobs_token_ids(self.total, *state)}

        words = -(-VOCABULARY // 32)
        bits = torch.randint(-(2**31), 2**31 - 1, (self.n, words), generator=self.noise, dtype=torch.int64)
        self.new(bits=bits.to(torch.int32), masks=torch.arange(self.n) * (self.sizes["drafts"] + 1))

        def allowed(side: Slots) -> Tensors:
            t, left = self.on(side), self.on(side).logits.clone()
            grammars = import_module(f"{GPU}.structured_outputs")
            given = (t.masks, t.cuts, t.bits, t.bits.stride(0), VOCABULARY, self.sizes["drafts"] + 1)
            grammars._apply_grammar_bitmask_kernel[(self.n, 1)](left, left.stride(0), *given, BLOCK_SIZE=256)
            return {"allowed": left}

        self.both("_prompt_logprobs_token_ids_kernel", followed)
        self.both("_apply_grammar_bitmask_kernel", allowed)
        self.both("_fill_logprob_token_ids_kernel, _ranks_kernel", scored)
        self.both("_topk_log_softmax_kernel", logprobs, ulp=ULP["logprobs"])

        def scaled(side: Slots, apply: str) -> Tensors:
            t = self.on(side)
            getattr(side.sampling, apply)(t.logits, t.expanded, self.host["rows"].numpy())
            return {"logits": t.logits}

        self.both("_temperature_kernel", lambda side: scaled(side, "apply_temperature"))
        self.both("_min_p_kernel", lambda side: scaled(side, "apply_min_p"))

    def _verified(self) -> None:
        gumbel = import_module(f"{GPU}.sample.gumbel")
        rejection = import_module(f"{GPU}.spec_decode.rejection_sampler")

        def gathered(side: Slots) -> Tensors:
            t = self.on(side)
            state = (t.expanded, t.local, side.requests.prefill_len.gpu)
            drafts, pos = rejection.gather_draft_sampled(t.ids, t.pos, t.at, *state)
            return {"drafted": drafts, "drafted_pos": pos}

        self.new(**self.both("_gather_draft_sampled_kernel", gathered))
        for row in range(1, self.logits_count):  # let some drafts be right, and some places of none tempt
            if self.draw.random() < 0.5:
                for logits in (self.host["logits"], *[held["logits"] for held in self.held.values()]):
                    logits[row - 1, max(0, int(self.host["drafted"][row]))] = 19.0
        fp64 = self.draw.random() < 0.3

        def sampled(side: Slots) -> Tensors:
            t, state = self.on(side), (side.sampling.temperature.gpu, side.sampling.seeds.gpu)
            given = (t.logits, t.expanded, *state, t.drafted_pos, False, False)
            return {"tokens": gumbel.gumbel_sample(*given, use_fp64=fp64)}

        self.both("_gumbel_sample_kernel", sampled)

        def noise(side: Slots) -> Tensors:
            """The noise itself: that of zeros, the greatest in each 16 tokens of four rows."""
            t, rows, blocks = self.on(side), min(4, self.logits_count), -(-VOCABULARY // 16)
            best = torch.zeros((rows, blocks), dtype=torch.float64 if fp64 else torch.float32, device=side.device)
            where, zeros = torch.zeros_like(best, dtype=torch.int64), torch.zeros_like(t.logits[:rows])
            to, cache = (where, blocks, best, blocks), (None, 0, 0, None, None, 0)
            of = (zeros, zeros.stride(0), t.expanded[:rows], side.sampling.seeds.gpu, t.drafted_pos[:rows])
            options = {"IS_DRAFTING": fp64, "APPLY_TEMPERATURE": True, "USE_FP64": fp64, "PER_TOKEN_COL": False}
            launch = gumbel._gumbel_sample_kernel[(rows, blocks)]
            launch(*to, *cache, *of, side.sampling.temperature.gpu, VOCABULARY, BLOCK_SIZE=16, **options)
            return {"noise": best}

        self.both("noise of _gumbel_sample_kernel", noise, ulp=ULP["noise"])

        def verified(side: Slots) -> Tensors:
            t, state = self.on(side), (side.sampling.temperature.gpu, side.sampling.seeds.gpu)
            steps = max(self.sizes["drafts"], 1)
            places = (t.drafted_pos, t.rows, t.expanded, t.local)
            tokens, counts = rejection.rejection_sample(t.logits, None, t.drafted, t.cuts, *places, *state, steps)
            kept = torch.arange(steps + 1, device=tokens.device) < counts[:, None]
            return {"drawn": torch.where(kept, tokens, 0), "drawn_counts": counts}

        self.new(**self.both("rejection_sample", verified))

        def flattened(side: Slots) -> Tensors:
            t, flat = self.on(side), self.on(side).drafted.new_zeros(self.logits_count)
            grid = (self.n,)
            rejection._flatten_sampled_kernel[grid](flat, t.drawn, t.drawn.stride(0), t.drawn_counts, t.cuts)
            return {"flat": flat}

        self.both("_flatten_sampled_kernel", flattened)

    def _updated(self) -> None:
        inputs = import_module(f"{GPU}.input_batch")
        left = self.host["rows"].clone()
        if self.draw.random() < 0.3:
            left[self.draw.randrange(self.n)] = -1
        self.new(left=left)

        def counted(side: Slots) -> Tensors:
            t = self.on(side)
            given = (t.drawn_counts.clone(), t.lens, t.cuts, t.rows, side.requests.prefill_len.gpu)
            counts, refused = inputs.get_num_sampled_and_rejected(*given)
            return {"counts": counts, "refused": refused}

        self.new(**self.both("_get_num_sampled_and_rejected_kernel", counted))

        def updated(side: Slots) -> Tensors:
            t, s, bins = self.on(side), side.requests, side.processors[0].output_bin_counts
            state = (s.num_computed_tokens.gpu, s.last_sampled_tokens, bins, t.drawn, t.counts, t.refused, t.starts)
            inputs.post_update(t.left, *state, s.all_token_ids.gpu, s.total_len.gpu)
            return {"bins": bins, "total": s.total_len.gpu, "computed": s.num_computed_tokens.gpu}

        self.both("_post_update_kernel", updated)

        def computed(side: Slots) -> Tensors:
            t, copied = self.on(side), side.requests.num_computed_tokens.gpu.clone()
            inputs.post_update_num_computed_tokens(t.rows, copied, t.starts)
            return {"computed": copied}

        self.both("_post_update_num_computed_tokens_kernel", computed)

    def _ngram(self) -> None:
        speculator = import_module(f"{GPU}.spec_decode.ngram.speculator").NgramGPUSpeculator
        least, most = self.draw.choice([(1, 3), (2, 4), (1, 1)])
        steps, length = max(self.sizes["drafts"], 1), self.sizes["length"]

        def proposed(side: Slots) -> Tensors:
            t, one = self.on(side), object.__new__(speculator)
            one.req_states, one.min_n, one.max_n, one.num_speculative_steps = side.requests, least, most, steps
            one.max_model_len, one.block_l = length, 64
            one.n_blocks = -(-length // 64)
            one.scratch = torch.zeros((self.sizes["rows"], one.n_blocks), dtype=torch.int64, device=side.device)
            one.drafts = torch.zeros((self.sizes["rows"], steps), dtype=torch.int64, device=side.device)
            batch = SimpleNamespace(num_reqs=self.n, idx_mapping=t.rows)
            last = side.requests.last_sampled_tokens
            drafts = one.propose(batch, None, None, None, None, t.counts, t.refused, last, None, None, None)
            if self.sizes["drafts"]:
                side.requests.draft_tokens[t.rows] = drafts
            return {"scratch": one.scratch, "drafts": drafts}

        self.both("_ngram_scan_kernel, _ngram_finalize_kernel", proposed)
