// Requests that enter slots: their bytes lie in device memory already (hal_cuda.admissions); what the moment of insertion
// adds comes as one small entry each. Beside them come requests that stay in their slots and get a piece of their prompt or
// more blocks. Compiled by NVRTC after bytes.cuh; right with any number of threads a block.

// What insertion decides for one request, after the host table's row of the slot as it was before. `written`: elements of
// each row field that earlier requests left there; `held`: entries of the block table in use. `source`: address of the
// request's bytes, 0 for one that stays. `first`: the first token of a hand-off, else -1; its drafts come behind its blocks.
struct Entry {
  u64 written[5], unused[2], held, source, slot, start, length, blocks, blocks_at;
  long long first;
  u64 drafts;
};
// Where one row field of the state lies: bytes, and the reset value repeated to 8 bytes.
struct Row { u64 base, stride, cycle, size; };

struct Enter {
  u64 entries, blocks;        // addresses of the entries and of all block ids, one request's after the other
  u64 memory, spread;         // addresses of the state and of its scatter map
  u64 dynamic[4];             // seq_lens_this_time, seq_lens_encoder, seq_lens_decoder, blocks_num: offset of each field
  u64 handed[4];              // next_tokens, step_idx, draft_num, draft_tokens: the same
  u32 fields, rows_at;        // entries of the scatter map; where the rows begin in a request's bytes
  u64 drafts;                 // elements of a row of draft_tokens
  Row rows[5];                // bad_words, stop_seqs_len, stop_seqs, block_tables, token_ids
};

const u32 HEAD = 32, PIECE = 16 << 10;  // bytes: lengths before the record; of one token row for one block of threads
const int BLOCKS = 3, TOKENS = 4;

__device__ u32 up16(u32 n) { return (n + 15) & ~15u; }

// Write bytes low .. high of a row whose first `have` bytes come from src; from `keep` up to `written` the rest is reset.
__device__ void write_row(u8* dst, const u8* src, u32 have, u32 keep, u32 written, u64 cycle, u32 low, u32 high) {
  u32 copied = min(have, high), end = min(written, high), from = max(low, keep);
  if (low < copied) copy_bytes(dst + low, src + low, copied - low, threadIdx.x, blockDim.x);
  if (from < end) fill_bytes(dst + from, cycle, end - from, threadIdx.x, blockDim.x);
}

// A request that stays: more blocks behind those it has, and perhaps how much of its prompt comes next.
__device__ void stay(const Enter& p, const Entry& e) {
  u8* memory = (u8*)p.memory;
  Row row = p.rows[BLOCKS];
  u32 size = row.size;
  copy_bytes(memory + row.base + e.slot * row.stride + e.held * size, (const u8*)(p.blocks + e.blocks_at * size),
             e.blocks * size, threadIdx.x, blockDim.x);
  if (threadIdx.x) return;
  ((int*)(memory + p.dynamic[3]))[e.slot] = (int)(e.held + e.blocks);
  if (e.length) ((int*)(memory + p.dynamic[0]))[e.slot] = ((int*)(memory + p.dynamic[1]))[e.slot] = (int)e.length;
}

// A request that goes on after its first token, which another machine has sampled, with the drafts that came along.
__device__ void hand_over(const Enter& p, const Entry& e) {
  u8* memory = (u8*)p.memory;
  const int* drafts = (const int*)p.blocks + e.blocks_at + e.blocks;
  if (threadIdx.x == 0) {
    ((long long*)(memory + p.handed[0]))[e.slot] = e.first;
    ((long long*)(memory + p.handed[1]))[e.slot] += 1;
    ((int*)(memory + p.handed[2]))[e.slot] = (int)e.drafts;
  }
  for (u32 i = threadIdx.x; i < e.drafts; i += blockDim.x)
    ((long long*)(memory + p.handed[3]))[e.slot * p.drafts + i] = drafts[i];
}

// Blocks (request, 0) write a request's record and short rows, blocks (request, i) the i-th piece of its tokens.
extern "C" __global__ void hal_enter(__grid_constant__ const Enter p) {
  Entry e = ((const Entry*)p.entries)[blockIdx.x];
  if (!e.source) {
    if (blockIdx.y == 0) stay(p, e);
    return;
  }
  const u8* source = (const u8*)e.source;
  const int* lengths = (const int*)source;
  u8* memory = (u8*)p.memory;
  u64 slot = e.slot;
  u32 at = p.rows_at;
  for (int i = 0; i < TOKENS; ++i) {
    Row row = p.rows[i];
    u32 size = row.size, have = (i == BLOCKS ? (u32)e.blocks : lengths[i]) * size;
    const u8* from = i == BLOCKS ? (const u8*)(p.blocks + e.blocks_at * size) : source + at;
    if (i != BLOCKS) at += up16(have);
    if (blockIdx.y == 0)
      write_row(memory + row.base + slot * row.stride, from, have, have, e.written[i] * size, row.cycle, 0, ~0u);
  }
  bool handed = e.first >= 0;
  if (blockIdx.y) {
    Row row = p.rows[TOKENS];
    u32 size = row.size, low = (blockIdx.y - 1) * PIECE, have = lengths[TOKENS] * size;
    u8* dst = memory + row.base + slot * row.stride;
    write_row(dst, source + at, have, have + (handed ? size : 0), e.written[TOKENS] * size, row.cycle, low, low + PIECE);
    if (handed && threadIdx.x == 0 && low <= have && have < low + PIECE) *(long long*)(dst + have) = e.first;
    return;
  }
  for (u32 i = threadIdx.x; i < p.fields; i += blockDim.x) {
    Spread f = ((const Spread*)p.spread)[i];
    copy_bytes(memory + f.base + slot * f.stride, source + HEAD + f.source, f.nbytes, 0, 1);
  }
  __syncthreads();  // the record has these fields too, as they were at admission
  if (handed) hand_over(p, e);
  int fed = handed ? 1 + (int)e.drafts : (int)e.length, encoded = handed ? 0 : (int)e.length;
  int values[4] = {fed, encoded, (int)e.start, (int)e.blocks};
  for (u32 i = threadIdx.x; i < 4; i += blockDim.x) ((int*)(memory + p.dynamic[i]))[slot] = values[i];
}
