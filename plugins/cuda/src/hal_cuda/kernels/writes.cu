// Kernels for hal's write plans. Compiled by NVRTC, after bytes.cuh, for the present GPU.
// One descriptor of hal_core.memory.plan.WRITE: pattern 0 copies from the payload, otherwise source is an 8-byte cycle.
struct Write { u64 dst, source; u32 nbytes, pattern; };

// The staging block: descriptors, slots, records, payload, at the offsets given.
struct Plan {
  u64 memory;        // address of the memory the plan writes
  u64 block;         // address of the staging block (device memory, or pinned host memory read in place)
  u64 spread;        // address of the scatter map
  u32 writes, records, fields, record_bytes;
  u32 slots_at, records_at;
  u64 payload_at;
};

// Blocks 0 .. writes-1 process one descriptor each, the blocks after them one record each.
extern "C" __global__ void hal_write(Plan plan) {
  const u8* block = (const u8*)plan.block;
  if (blockIdx.x < plan.writes) {
    Write w = ((const Write*)block)[blockIdx.x];
    u8* dst = (u8*)plan.memory + w.dst;
    if (w.pattern) fill_bytes(dst, w.source, w.nbytes, threadIdx.x, blockDim.x);
    else copy_bytes(dst, block + plan.payload_at + w.source, w.nbytes, threadIdx.x, blockDim.x);
    return;
  }
  u32 at = blockIdx.x - plan.writes;
  u64 slot = ((const u32*)(block + plan.slots_at))[at];
  const u8* record = block + plan.records_at + (u64)at * plan.record_bytes;
  for (u32 i = threadIdx.x; i < plan.fields; i += blockDim.x) {
    Spread f = ((const Spread*)plan.spread)[i];
    u8* dst = (u8*)plan.memory + f.base + slot * f.stride;
    copy_bytes(dst, record + f.source, f.nbytes, 0, 1);
  }
}

// Fill a strided view: run (i, j) of nbytes begins at dst + i * step0 + j * step1.
extern "C" __global__ void hal_fill(u64 dst, u64 cycle, u32 nbytes, u32 n0, u32 n1, long long step0, long long step1) {
  u32 runs = n0 * n1;
  if (nbytes <= 16) {  // short runs: a thread each
    for (u32 r = blockIdx.x * blockDim.x + threadIdx.x; r < runs; r += gridDim.x * blockDim.x)
      fill_bytes((u8*)(dst + (r / n1) * step0 + (r % n1) * step1), cycle, nbytes, 0, 1);
    return;
  }
  for (u32 r = blockIdx.x; r < runs; r += gridDim.x)
    fill_bytes((u8*)(dst + (r / n1) * step0 + (r % n1) * step1), cycle, nbytes, threadIdx.x, blockDim.x);
}

// A small value passed in the launch's own parameters.
struct Small { u64 dst; u32 nbytes, unused; u64 data[128]; };
extern "C" __global__ void hal_small(__grid_constant__ const Small value) {
  copy_bytes((u8*)value.dst, (const u8*)value.data, value.nbytes, threadIdx.x, blockDim.x);
}

// Element by element between two strided views of up to four axes, row-major.
struct Strided { u64 dst, src; u32 element, unused; u32 shape[4]; long long to[4], from[4]; u64 count; };
extern "C" __global__ void hal_copy_strided(__grid_constant__ const Strided c) {
  for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < c.count; i += (u64)gridDim.x * blockDim.x) {
    u64 rest = i, dst = c.dst, src = c.src;
    for (int axis = 3; axis >= 0; --axis) {
      u64 at = rest % c.shape[axis];
      rest /= c.shape[axis];
      dst += at * c.to[axis];
      src += at * c.from[axis];
    }
    copy_bytes<1>((u8*)dst, (const u8*)src, c.element, 0, 1);
  }
}

// Write n bytes of device memory into pinned host memory, in order with the work before and after it on its stream.
extern "C" __global__ void hal_copy_out(u64 to, u64 from, u64 nbytes) {
  u32 thread = blockIdx.x * blockDim.x + threadIdx.x, threads = gridDim.x * blockDim.x, wide = (u32)nbytes & ~15u;
  copy_bytes((u8*)to, (const u8*)from, wide, thread, threads);
  copy_bytes((u8*)to + wide, (const u8*)from + wide, (u32)nbytes - wide, thread, threads);
}

// Hold a stream until the host raises the flag (a test's latch). The flag is pinned host memory.
extern "C" __global__ void hal_hold(volatile u32* flag) {
  while (*flag == 0) __nanosleep(1000);
}
