// Copies between host and devices, and what the host itself does with memory.
#pragma once
#include "journal.h"
#include "stream.h"

namespace halsim {

enum class Route : int { h2d = 0, d2h = 1, d2d = 2, p2p = 3 };

// The devices are those of the destination and the source; the host's side is ignored.
struct Copy {
  Route route;
  int dst_device, src_device;
  void* dst;
  const void* src;
  size_t bytes;
};

Status copy_async(const Copy& copy, Stream* stream);
Status copy_now(const Copy& copy);                     // by the host, in no stream's order
Status host_memset(int device, void* dst, int value, size_t bytes);
Status host_access(const void* address, size_t bytes, bool write);  // annotation: the host reads or writes these bytes
// A back door for tests: no order, no trace, no check.
Status peek(void* out, const void* address, size_t bytes);
Status poke(void* address, const void* data, size_t bytes);

}  // namespace halsim
