// Insertion of requests whose bytes are already in device memory (hal_cuda.staged_requests), or in pinned memory of the host. The
// values known only at insertion are passed as one small entry each. The same launch serves requests that keep their slots and
// get a piece of their prompt or more blocks. Compiled by NVRTC after bytes.cuh; correct with any number of threads a block.
// Host memory is slow to read: a block reads it twice, for its entry and for everything else.

// Lengths of a row field: elements written by earlier requests, and those of the request itself; 0 for the block table.
struct Lengths { u32 written, have; };
// Values of one request known only at insertion, after the host table's former row of the slot. `held`: entries of the block
// table in use. `source`: address of the request's bytes, 0 for a request that keeps its slot. `first`: the first token of a
// hand-off, else -1; its drafts follow its blocks.
struct Entry {
  Lengths rows[5];
  u64 unused[2], held, source, slot, start, length, blocks, blocks_at;
  long long first;
  u64 drafts;
};
// The location of one row field in the state, in bytes, and the reset value repeated to 8 bytes.
struct Row { u64 base, stride, cycle, size; };

struct Enter {
  u64 entries, blocks;        // addresses of the entries and of all block ids, one request's after the other
  u64 memory, spread;         // addresses of the state and of its scatter map
  u64 dynamic[4];             // seq_lens_this_time, seq_lens_encoder, seq_lens_decoder, blocks_num: offset of each field
  u64 handed[4];              // next_tokens, step_idx, draft_num, draft_tokens: the same
  u32 fields, rows_at;        // entries of the scatter map; where the rows begin in a request's bytes
  u32 drafts, step_at;        // elements of a row of draft_tokens; where step_idx is in a record
  Row rows[5];                // bad_words, stop_seqs_len, stop_seqs, block_tables, token_ids
};

// The same, followed by the entries and block ids of a few requests: parameters of the launch need no read of host memory.
const u32 FEW = 3 << 10;
struct EnterFew { Enter enter; alignas(16) u8 given[FEW]; };

const u32 PIECE = 16 << 10;  // bytes of one token row for one block of threads
const int BLOCKS = 3, TOKENS = 4;

__device__ u32 up16(u32 n) { return (n + 15) & ~15u; }

// The row of a slot. Rows are copied and reset by words; their elements consist of whole words.
__device__ u8* row_of(const Enter& p, const Entry& e, int row) {
  return (u8*)p.memory + p.rows[row].base + e.slot * p.rows[row].stride;
}

// Reset bytes from .. end of a row; they are whole elements.
__device__ void reset_row(u8* row, u32 from, u32 end, u64 cycle) {
#pragma unroll 1
  for (u32 at = from / 4 + threadIdx.x; at < end / 4; at += blockDim.x) ((u32*)row)[at] = (u32)(cycle >> (at & 1) * 32);
}

// The offset of the tokens in a request's bytes, which have no block table.
__device__ u32 tokens_at(const Enter& p, const Entry& e) {
  u32 at = p.rows_at;
#pragma unroll
  for (int i = 0; i < BLOCKS; ++i) at += up16(e.rows[i].have * (u32)p.rows[i].size);
  return at;
}

// Write the block table of an entering request. For a request in a slot: append its new blocks, and perhaps set the length of
// the next piece of its prompt. `ids`: of all requests.
__device__ void write_blocks(const Enter& p, const Entry& e, const u8* ids) {
  u32 size = p.rows[BLOCKS].size, have = (u32)e.blocks * size;
  u8 *dst = row_of(p, e, BLOCKS), *memory = (u8*)p.memory;
  u8* behind = e.source ? dst : dst + e.held * size;
  copy_words<4, u32>(behind, ids + e.blocks_at * size, have / 4, threadIdx.x, blockDim.x);
  if (e.source) {
    reset_row(dst, have, e.rows[BLOCKS].written * size, p.rows[BLOCKS].cycle);
  } else if (threadIdx.x == 0) {
    ((int*)(memory + p.dynamic[3]))[e.slot] = (int)(e.held + e.blocks);
    if (e.length) ((int*)(memory + p.dynamic[0]))[e.slot] = ((int*)(memory + p.dynamic[1]))[e.slot] = (int)e.length;
  }
}

// Write a field of n bytes, at any offset in the record, by one thread, in aligned words of the state. Long fields are read by
// the words around them, eight at once.
template <typename Word>
__device__ void write_words(u8* dst, const u8* src, u32 n) {
#pragma unroll 1
  for (u32 at = 0; at < n; at += sizeof(Word)) {
    Word word = 0;
    for (u32 i = 0; i < sizeof(Word); ++i) word |= (Word)src[at + i] << (8 * i);
    *(Word*)(dst + at) = word;
  }
}
__device__ void write_field(u8* dst, const u8* src, u32 n) {
  u64 low = (u64)dst | n;
  if ((low & 3) != 0) return write_words<u8>(dst, src, n);
  if ((low & 7) != 0) return write_words<u32>(dst, src, n);
  const u64* around = (const u64*)((u64)src & ~7ull);
  u32 skip = (u64)src & 7;
#pragma unroll 1
  for (u32 first = 0; first < n; first += 64, around += 8) {
    u64 taken[9];
#pragma unroll
    for (u32 k = 0; k < 9; ++k) taken[k] = first + 8 * k < n + skip ? around[k] : 0;
#pragma unroll
    for (u32 k = 0; k < 8; ++k)
      if (first + 8 * k < n)
        *(u64*)(dst + first + 8 * k) = skip ? taken[k] >> 8 * skip | taken[k + 1] << (64 - 8 * skip) : taken[k];
  }
}

// A request that continues after its first token, which another machine has sampled, with its drafts.
__device__ void hand_over(const Enter& p, const Entry& e, const u8* ids) {
  u8* memory = (u8*)p.memory;
  const int* drafts = (const int*)ids + e.blocks_at + e.blocks;
  if (threadIdx.x == 0) {
    ((long long*)(memory + p.handed[0]))[e.slot] = e.first;
    ((long long*)(memory + p.handed[1]))[e.slot] += 1;
    ((int*)(memory + p.handed[2]))[e.slot] = (int)e.drafts;
  }
#pragma unroll 1
  for (u32 i = threadIdx.x; i < e.drafts; i += blockDim.x)
    ((long long*)(memory + p.handed[3]))[e.slot * p.drafts + i] = drafts[i];
}

// Write a request's record, and the values known only now. `field`: the thread's first of the scatter map, loaded in advance.
__device__ void write_record(const Enter& p, const Entry& e, const u8* ids, Spread field) {
  u8* memory = (u8*)p.memory;
#pragma unroll 1
  for (u32 i = threadIdx.x; i < p.fields; i += blockDim.x) {
    Spread f = i == threadIdx.x ? field : ((const Spread*)p.spread)[i];
    write_field(memory + f.base + e.slot * f.stride, (const u8*)e.source + f.source, f.nbytes);
  }
  __syncthreads();  // the record has these fields too, with their values at admission
  bool handed = e.first >= 0;
  if (handed) hand_over(p, e, ids);
  if (threadIdx.x) return;
  ((int*)(memory + p.dynamic[0]))[e.slot] = handed ? 1 + (int)e.drafts : (int)e.length;
  ((int*)(memory + p.dynamic[1]))[e.slot] = handed ? 0 : (int)e.length;
  ((int*)(memory + p.dynamic[2]))[e.slot] = (int)e.start;
  ((int*)(memory + p.dynamic[3]))[e.slot] = (int)e.blocks;
}

// Write a request's short rows, which are adjacent: loads of words of all rows are in flight together.
__device__ void write_rows(const Enter& p, const Entry& e) {
  const u32 AT_ONCE = 4;
  u32 begin = p.rows_at, second = begin + up16(e.rows[0].have * (u32)p.rows[0].size);
  u32 third = second + up16(e.rows[1].have * (u32)p.rows[1].size), end = tokens_at(p, e), step = blockDim.x * 4;
#pragma unroll 1
  for (u32 first = begin + threadIdx.x * 4; first < end; first += AT_ONCE * step) {
    u32 taken[AT_ONCE];
#pragma unroll
    for (u32 k = 0; k < AT_ONCE; ++k)
      if (first + k * step < end) taken[k] = *(const u32*)(e.source + first + k * step);
#pragma unroll
    for (u32 k = 0; k < AT_ONCE; ++k) {
      u32 at = first + k * step;
      int row = at < second ? 0 : at < third ? 1 : 2;
      u32 in_row = at - (row == 0 ? begin : row == 1 ? second : third);
      u32 have = (row == 0 ? e.rows[0].have : row == 1 ? e.rows[1].have : e.rows[2].have) * (u32)p.rows[row].size;
      if (at < end && in_row < have) *(u32*)(row_of(p, e, row) + in_row) = taken[k];
    }
  }
#pragma unroll
  for (int i = 0; i < BLOCKS; ++i) {
    u32 size = p.rows[i].size;
    reset_row(row_of(p, e, i), e.rows[i].have * size, e.rows[i].written * size, p.rows[i].cycle);
  }
}

// Bytes low .. low + PIECE of a request's token row.
__device__ void write_tokens(const Enter& p, const Entry& e, u32 low) {
  u32 size = p.rows[TOKENS].size, have = e.rows[TOKENS].have * size, high = low + PIECE;
  u8* dst = row_of(p, e, TOKENS);
  const u8* tokens = (const u8*)e.source + tokens_at(p, e);
  bool handed = e.first >= 0;
  if (low < have) {
    u32 n = min(have, high) - low, thread = threadIdx.x, threads = blockDim.x;
    if (((u64)dst & 15) == 0 && n % 16 == 0) copy_words<8, uint4>(dst + low, tokens + low, n / 16, thread, threads);
    else copy_words<8, u64>(dst + low, tokens + low, n / 8, thread, threads);
  }
  reset_row(dst, max(low, have + (handed ? size : 0)), min(e.rows[TOKENS].written * size, high), p.rows[TOKENS].cycle);
  if (handed && threadIdx.x == 0 && low <= have && have < high) *(long long*)(dst + have) = e.first;
}

// Blocks (request, 0) write a request's blocks, (request, 1) its record, (request, 2) its short rows, the rest a piece of its
// tokens each. The record is not put into shared memory: with it a launch takes 0.7 us longer on an H200.
__device__ void enter(const Enter& p, const u8* entries, const u8* ids) {
  Spread field = {0, 0, 0, 0};
  if (blockIdx.y == 1 && threadIdx.x < p.fields) field = ((const Spread*)p.spread)[threadIdx.x];
  const Entry e = ((const Entry*)entries)[blockIdx.x];
  __syncthreads();  // the entry is read completely before anything else
  if (blockIdx.y == 0) write_blocks(p, e, ids);
  else if (e.source && blockIdx.y == 1) write_record(p, e, ids, field);
  else if (e.source && blockIdx.y == 2) write_rows(p, e);
  else if (e.source) write_tokens(p, e, (blockIdx.y - 3) * PIECE);
}

extern "C" __global__ void hal_enter(__grid_constant__ const Enter p) { enter(p, (const u8*)p.entries, (const u8*)p.blocks); }
extern "C" __global__ void hal_enter_few(__grid_constant__ const EnterFew p) {
  enter(p.enter, p.given, p.given + gridDim.x * sizeof(Entry));
}
