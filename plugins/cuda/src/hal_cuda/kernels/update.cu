// A step's own changes of the state: the same effect as hal_core.slots.update.update_inputs, one thread a slot.
typedef long long i64;
typedef int i32;
typedef unsigned char u8;

struct State {
  i64 *sampled_token_ids, *accept_tokens, *prompt_lens, *min_dec_len, *max_dec_len;  // in the order of STEP_FIELDS
  i32* eos_num;
  i64* eos_token_ids;
  i32 *stop_seqs_num, *stop_seqs_len;
  i64* stop_seqs;
  i32 *split_role, *accept_num;
  i64* step_idx;
  u8* stop_flags;
  i32 *stop_reason, *seq_lens_decoder, *seq_lens_encoder, *seq_lens_this_time;
  i64* next_tokens;
  i32* draft_num;
  i64* token_ids;
  i32 slots, max_tokens, max_accept, max_eos, stop_sequences, max_stop_length, speculative, unused;
};

enum { STOP = 1, LENGTH = 2, ERROR = 4 };
enum { PREFILL = 1 };  // the split role whose slots emit one token and stop

__device__ bool ends_with_stop(const State& s, i32 slot, i64 total, i64 generated) {
  const i64* tokens = s.token_ids + (i64)slot * s.max_tokens;
  for (i32 i = 0; i < s.stop_seqs_num[slot]; ++i) {
    i32 length = s.stop_seqs_len[(i64)slot * s.stop_sequences + i];
    if (length <= 0 || length > generated) continue;
    const i64* stop = s.stop_seqs + ((i64)slot * s.stop_sequences + i) * s.max_stop_length;
    bool equal = true;
    for (i32 k = 0; k < length && equal; ++k) equal = tokens[total - length + k] == stop[k];
    if (equal) return true;
  }
  return false;
}

extern "C" __global__ void hal_update_inputs(__grid_constant__ const State s) {
  i32 slot = blockIdx.x * blockDim.x + threadIdx.x;
  if (slot >= s.slots) return;
  bool runs = !s.stop_flags[slot] && s.seq_lens_this_time[slot] > 0;
  if (!runs) {
    s.accept_num[slot] = 0;
    return;
  }
  i32 encoder = s.seq_lens_encoder[slot];
  i64 known = s.prompt_lens[slot] + s.step_idx[slot];
  i32 prefilled = s.seq_lens_decoder[slot] + encoder;
  bool gives = encoder == 0 || prefilled >= known;
  if (encoder > 0) s.seq_lens_decoder[slot] = prefilled;
  s.seq_lens_encoder[slot] = 0;
  s.draft_num[slot] = 0;
  s.seq_lens_this_time[slot] = 0;
  if (!gives) {
    s.accept_num[slot] = 0;
    return;
  }
  i32 wanted = s.speculative ? s.accept_num[slot] : 1;
  if (wanted < 0 || wanted > s.max_accept) {  // unchanged, for save_output to report
    s.stop_flags[slot] = 1;
    s.stop_reason[slot] = ERROR;
    return;
  }
  bool hands_over = s.split_role[slot] == PREFILL;
  if (hands_over && wanted > 1) wanted = 1;
  i64* row = s.token_ids + (i64)slot * s.max_tokens;
  const i64* given = s.speculative ? s.accept_tokens + (i64)slot * s.max_accept : s.sampled_token_ids + slot;
  i32 count = 0, reason = 0;
  while (count < wanted && reason == 0) {
    i64 token = given[count++];
    i64 total = known + count, generated = s.step_idx[slot] + count;
    row[total - 1] = token;
    s.next_tokens[slot] = token;
    bool ends = false;
    for (i32 k = 0; k < s.eos_num[slot] && !ends; ++k) ends = s.eos_token_ids[(i64)slot * s.max_eos + k] == token;
    ends = ends || ends_with_stop(s, slot, total, generated);
    if (ends && generated >= s.min_dec_len[slot]) reason = STOP;
    else if (generated >= s.max_dec_len[slot] || total >= s.max_tokens) reason = LENGTH;
  }
  s.accept_num[slot] = count;
  s.step_idx[slot] += count;
  if (encoder == 0) s.seq_lens_decoder[slot] += count;
  if (reason) s.stop_reason[slot] = reason;
  if (reason || (hands_over && count)) {
    s.stop_flags[slot] = 1;
  } else {
    s.seq_lens_this_time[slot] = 1;
  }
}
