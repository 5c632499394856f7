// Device memory that the host cannot touch, and pinned host memory.
#pragma once
#include <string>

#include "journal.h"

namespace halsim {

constexpr int kPinned = -1;
constexpr int kAnyDevice = -2;
constexpr unsigned char kFreshPoison = 0xCB, kFreedPoison = 0xDD, kPendingPoison = 0xA5;

// Mapped twice: `begin` is the device's address and PROT_NONE for the host, `alias` is where workers reach the bytes.
// Pinned memory is host memory, so there both are the same.
struct Block {
  uintptr_t begin = 0;
  size_t bytes = 0, mapped = 0;
  char* alias = nullptr;
  int device = kPinned;
  uint64_t born = 0;  // sequence number of its allocation: older operations cannot have meant it
  ~Block();
};
using BlockRef = std::shared_ptr<Block>;

Status allocate_device(int device, size_t bytes, void** out);
Status free_device(int device, void* address);
Status allocate_pinned(size_t bytes, void** out);
Status free_pinned(void* address);

BlockRef block_at(uintptr_t address);  // live block that holds this address, device or pinned
bool is_device_memory(const void* address);
bool is_pinned(const void* address, size_t bytes);
size_t memory_used(int device);

// A worker's way to memory while it runs an operation. Reports what is wrong and gives nullptr then.
struct Mapped {
  char* data = nullptr;
  BlockRef keep;  // a block freed meanwhile stays mapped until the operation is done with it
  explicit operator bool() const { return data != nullptr; }
};
Mapped map_device(const OperationRef& op, const char* role, uintptr_t address, size_t bytes, int device);
Mapped map_host(const OperationRef& op, const char* role, uintptr_t address, size_t bytes, bool was_pinned);
// Kernels read their parameters from either kind.
Mapped map_any(const OperationRef& op, const char* role, uintptr_t address, size_t bytes);

}  // namespace halsim
