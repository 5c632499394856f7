// Put before every kernel file: number types, where a record's fields go, how bytes are copied and filled.
typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned char u8;

// One field of a packed record, hal_core.devices.SCATTER_MAP.
struct Spread { u64 base, stride; u32 source, nbytes; };

// Copy n bytes with the widest accesses that both addresses allow. All threads of a block call it.
__device__ void copy_bytes(u8* dst, const u8* src, u32 n, u32 thread, u32 threads) {
  u64 low = (u64)dst | (u64)src | n;
  if ((low & 15) == 0) {
    for (u32 i = thread; i < n / 16; i += threads) ((uint4*)dst)[i] = ((const uint4*)src)[i];
  } else if ((low & 7) == 0) {
    for (u32 i = thread; i < n / 8; i += threads) ((u64*)dst)[i] = ((const u64*)src)[i];
  } else if ((low & 3) == 0) {
    for (u32 i = thread; i < n / 4; i += threads) ((u32*)dst)[i] = ((const u32*)src)[i];
  } else {
    for (u32 i = thread; i < n; i += threads) dst[i] = src[i];
  }
}

// Fill n bytes with the cycle, whose first byte belongs to dst[0].
__device__ void fill_bytes(u8* dst, u64 cycle, u32 n, u32 thread, u32 threads) {
  u32 head = ((u64)dst & 7) == 0 ? n & ~7u : 0;
  for (u32 i = thread; i < head / 8; i += threads) ((u64*)dst)[i] = cycle;
  for (u32 i = head + thread; i < n; i += threads) dst[i] = (u8)(cycle >> ((i & 7) * 8));
}
