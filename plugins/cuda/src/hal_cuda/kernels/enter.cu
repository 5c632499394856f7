// Requests that enter slots: their bytes lie in device memory already (hal_cuda.admissions); what the moment of insertion
// adds comes as one small entry each. Compiled by NVRTC after bytes.cuh.

// What insertion decides for one request, after the host table's row of the slot as it was before. `written`: elements of
// each row field that earlier requests left there. `source`: address of the request's bytes.
struct Entry { u64 written[5], unused[3], source, slot, start, length, blocks, blocks_at; };
// Where one row field of the state lies: bytes, and the reset value repeated to 8 bytes.
struct Row { u64 base, stride, cycle, size; };

struct Enter {
  u64 entries, blocks;        // addresses of the entries and of all block ids, one request's after the other
  u64 memory, spread;         // addresses of the state and of its spread table
  u64 dynamic[4];             // seq_lens_this_time, seq_lens_encoder, seq_lens_decoder, blocks_num: offset of each field
  u32 fields, rows_at;        // entries of the spread table; where the rows begin in a request's bytes
  Row rows[5];                // bad_words, stop_seqs_len, stop_seqs, block_tables, token_ids
};

const u32 HEAD = 32, PIECE = 16 << 10;  // bytes: lengths before the record; of one token row for one block of threads
const int BLOCKS = 3, TOKENS = 4;

__device__ u32 up16(u32 n) { return (n + 15) & ~15u; }

// Write bytes low .. high of a row whose first `have` bytes come from src; up to `written` the rest is reset.
__device__ void write_row(u8* dst, const u8* src, u32 have, u32 written, u64 cycle, u32 low, u32 high) {
  u32 copied = min(have, high), end = min(written, high), from = max(low, have);
  if (low < copied) copy_bytes(dst + low, src + low, copied - low, threadIdx.x, blockDim.x);
  if (from < end) fill_bytes(dst + from, cycle, end - from, threadIdx.x, blockDim.x);
}

// Blocks (request, 0) write a request's record and short rows, blocks (request, i) the i-th piece of its tokens.
extern "C" __global__ void hal_enter(__grid_constant__ const Enter p) {
  Entry e = ((const Entry*)p.entries)[blockIdx.x];
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
      write_row(memory + row.base + slot * row.stride, from, have, e.written[i] * size, row.cycle, 0, ~0u);
  }
  if (blockIdx.y) {
    Row row = p.rows[TOKENS];
    u32 size = row.size, low = (blockIdx.y - 1) * PIECE;
    write_row(memory + row.base + slot * row.stride, source + at, lengths[TOKENS] * size, e.written[TOKENS] * size,
              row.cycle, low, low + PIECE);
    return;
  }
  for (u32 i = threadIdx.x; i < p.fields; i += blockDim.x) {
    Spread f = ((const Spread*)p.spread)[i];
    copy_bytes(memory + f.base + slot * f.stride, source + HEAD + f.source, f.nbytes, 0, 1);
  }
  __syncthreads();  // the record has these fields too, as they were at admission
  int values[4] = {(int)e.length, (int)e.length, (int)e.start, (int)e.blocks};
  if (threadIdx.x < 4) ((int*)(memory + p.dynamic[threadIdx.x]))[slot] = values[threadIdx.x];
}
