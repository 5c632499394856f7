// Put before every kernel file: number types, where a record's fields go, how bytes are copied and filled.
typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned char u8;

// One field of a packed record, hal_core.devices.SCATTER_MAP.
struct Spread { u64 base, stride; u32 source, nbytes; };

// Copy words, each thread so many at once: loads that are under way together cost one way to memory, which is a long one
// where that is the host's, and stores between them would make it one way after the other.
template <int AT_ONCE, typename Word>
__device__ void copy_words(u8* dst, const u8* src, u32 count, u32 thread, u32 threads) {
#pragma unroll 1
  for (u32 first = thread; first < count; first += AT_ONCE * threads) {
    Word taken[AT_ONCE];
#pragma unroll
    for (u32 k = 0; k < AT_ONCE; ++k)
      if (first + k * threads < count) taken[k] = ((const Word*)src)[first + k * threads];
#pragma unroll
    for (u32 k = 0; k < AT_ONCE; ++k)
      if (first + k * threads < count) ((Word*)dst)[first + k * threads] = taken[k];
  }
}

// Copy n bytes with the widest accesses that both addresses allow. All threads of a block call it.
template <int AT_ONCE = 8>
__device__ void copy_bytes(u8* dst, const u8* src, u32 n, u32 thread, u32 threads) {
  u64 low = (u64)dst | (u64)src | n;
  if ((low & 15) == 0) copy_words<AT_ONCE, uint4>(dst, src, n / 16, thread, threads);
  else if ((low & 7) == 0) copy_words<AT_ONCE, u64>(dst, src, n / 8, thread, threads);
  else if ((low & 3) == 0) copy_words<AT_ONCE, u32>(dst, src, n / 4, thread, threads);
  else copy_words<AT_ONCE, u8>(dst, src, n, thread, threads);
}

// Fill n bytes with the cycle, whose first byte belongs to dst[0].
__device__ void fill_bytes(u8* dst, u64 cycle, u32 n, u32 thread, u32 threads) {
  u32 head = ((u64)dst & 7) == 0 ? n & ~7u : 0;
  for (u32 i = thread; i < head / 8; i += threads) ((u64*)dst)[i] = cycle;
  for (u32 i = head + thread; i < n; i += threads) dst[i] = (u8)(cycle >> ((i & 7) * 8));
}
