#include "memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <vector>

#include "options.h"
#include "order.h"
#include "stream.h"

namespace halsim {

namespace {

// A freed block's addresses stay reserved for a while, so that a late access meets a hole instead of a new block.
struct Tombstone {
  uintptr_t begin;
  size_t mapped, bytes;
  uint64_t freed;
};

auto& lock = *new std::mutex;
auto& blocks = *new std::map<uintptr_t, BlockRef>;
auto& graves = *new std::map<uintptr_t, Tombstone>;
auto& grave_order = *new std::deque<uintptr_t>;
size_t used[kMaxDevices];
size_t graves_bytes = 0;
constexpr size_t kMaxGraves = 512;
constexpr size_t kMaxGravesBytes = size_t{4} << 30;  // addresses only, no memory behind them

size_t whole_pages(size_t bytes) {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  size_t mapped = (bytes + page - 1) / page * page;
  return mapped ? mapped : page;
}

BlockRef find_locked(uintptr_t address) {
  auto it = blocks.upper_bound(address);
  if (it == blocks.begin()) return nullptr;
  --it;
  return address < it->second->begin + it->second->mapped ? it->second : nullptr;
}

const Tombstone* grave_locked(uintptr_t address) {
  auto it = graves.upper_bound(address);
  if (it == graves.begin()) return nullptr;
  --it;
  return address < it->second.begin + it->second.mapped ? &it->second : nullptr;
}

// Lays freed poison over pages that stay readable, without memory behind them: all share one file's pages.
void poison_pages(char* address, size_t mapped) {
  constexpr size_t kChunk = size_t{1} << 20;
  static const int file = [] {
    const int fd = memfd_create("halsim-freed", MFD_CLOEXEC);
    const std::vector<char> poison(kChunk, static_cast<char>(kFreedPoison));
    return fd >= 0 && write(fd, poison.data(), kChunk) == static_cast<ssize_t>(kChunk) ? fd : -1;
  }();
  for (size_t at = 0; at < mapped; at += kChunk) {
    const size_t bytes = std::min(kChunk, mapped - at);
    if (file < 0 ||
        mmap(address + at, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED, file, 0) == MAP_FAILED) {
      std::memset(address + at, kFreedPoison, bytes);
    }
  }
}

void bury_locked(const Block& block, uint64_t sequence) {
  graves[block.begin] = {block.begin, block.mapped, block.bytes, sequence};
  grave_order.push_back(block.begin);
  graves_bytes += block.mapped;
  while (grave_order.size() > kMaxGraves || graves_bytes > kMaxGravesBytes) {
    auto it = graves.find(grave_order.front());
    grave_order.pop_front();
    graves_bytes -= it->second.mapped;
    munmap(reinterpret_cast<void*>(it->second.begin), it->second.mapped);
    graves.erase(it);
  }
}

Status take_block(int device, void* address, Kind kind, BlockRef* out, OperationRef* op) {
  {
    std::lock_guard<std::mutex> guard(lock);
    auto it = blocks.find(reinterpret_cast<uintptr_t>(address));
    if (it == blocks.end() || it->second->device != device) {
      const bool again = grave_locked(reinterpret_cast<uintptr_t>(address)) != nullptr;
      return fail(Status::invalid, "%p is %s", address,
                  again               ? "freed already"
                  : device == kPinned ? "no pinned block"
                                      : "no block of this device");
    }
    *out = it->second;
  }
  const Block& block = **out;
  *op = new_operation(kind, device, -1, block.begin, 0, block.bytes);
  order_on_host(**op);
  for (const auto& pending : pending_on(block.begin, block.bytes)) {
    report(ReportKind::lifetime, pending, *op, block.begin, block.bytes, "released while an operation on it is pending");
  }
  note_release(*op, block.begin, block.bytes);
  return Status::ok;
}

Status check_size(size_t bytes) {
  return bytes > (size_t{1} << 46) ? fail(Status::no_memory, "%zu bytes are more than any device has", bytes)
                                   : Status::ok;
}

}  // namespace

Block::~Block() {
  if (device != kPinned && alias) munmap(alias, mapped);
}

Status allocate_device(int device, size_t bytes, void** out) {
  *out = nullptr;
  if (device < 0 || device >= options.devices || device >= kMaxDevices) {
    return fail(Status::invalid, "device %d does not exist, there are %ld", device, options.devices.load());
  }
  if (check_size(bytes) != Status::ok) return Status::no_memory;
  const size_t mapped = whole_pages(bytes), limit = static_cast<size_t>(options.memory_mb) << 20;
  if (countdown(options.fail_allocation)) return fail(Status::no_memory, "allocation failed on purpose");
  auto block = std::make_shared<Block>();
  {
    std::lock_guard<std::mutex> guard(lock);
    if (used[device] + mapped > limit) {
      return fail(Status::no_memory, "device %d has %zu of %zu bytes free, %zu were asked for", device,
                  limit - std::min(limit, used[device]), limit, bytes);
    }
    used[device] += mapped;
  }
  const int fd = memfd_create("halsim", MFD_CLOEXEC);
  void* alias = MAP_FAILED;
  void* address = MAP_FAILED;
  if (fd >= 0 && ftruncate(fd, static_cast<off_t>(mapped)) == 0) {
    alias = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    address = mmap(nullptr, mapped, options.protect ? PROT_NONE : PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  }
  if (fd >= 0) close(fd);
  if (alias == MAP_FAILED || address == MAP_FAILED) {
    if (alias != MAP_FAILED) munmap(alias, mapped);
    if (address != MAP_FAILED) munmap(address, mapped);
    std::lock_guard<std::mutex> guard(lock);
    used[device] -= mapped;
    return fail(Status::no_memory, "the host has no memory for %zu more bytes of device %d", bytes, device);
  }
  if (options.poison) std::memset(alias, kFreshPoison, mapped);
  block->begin = reinterpret_cast<uintptr_t>(address);
  block->bytes = bytes;
  block->mapped = mapped;
  block->alias = static_cast<char*>(alias);
  block->device = device;
  block->born = new_operation(Kind::allocate, device, -1, block->begin, 0, bytes)->sequence;
  std::lock_guard<std::mutex> guard(lock);
  blocks[block->begin] = block;
  *out = address;
  return Status::ok;
}

Status free_device(int device, void* address) {
  BlockRef block;
  OperationRef op;
  Status status = take_block(device, address, Kind::free, &block, &op);
  if (status != Status::ok) return status;
  std::lock_guard<std::mutex> guard(lock);
  if (!blocks.erase(block->begin)) return fail(Status::invalid, "%p is freed already", address);
  used[device] -= block->mapped;
  // A worker that is in the middle of an operation on it reads or spoils poison, never another block.
  if (options.poison) std::memset(block->alias, kFreedPoison, block->mapped);
  mmap(address, block->mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
  bury_locked(*block, op->sequence);
  return Status::ok;
}

Status allocate_pinned(size_t bytes, void** out) {
  *out = nullptr;
  if (check_size(bytes) != Status::ok) return Status::no_memory;
  if (countdown(options.fail_allocation)) return fail(Status::no_memory, "allocation failed on purpose");
  const size_t mapped = whole_pages(bytes);
  void* address = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (address == MAP_FAILED) return fail(Status::no_memory, "the host has no %zu bytes of memory to pin", bytes);
  if (options.poison) std::memset(address, kFreshPoison, mapped);
  auto block = std::make_shared<Block>();
  block->begin = reinterpret_cast<uintptr_t>(address);
  block->bytes = bytes;
  block->mapped = mapped;
  block->alias = static_cast<char*>(address);
  block->born = new_operation(Kind::pin, -1, -1, block->begin, 0, bytes)->sequence;
  std::lock_guard<std::mutex> guard(lock);
  blocks[block->begin] = block;
  *out = address;
  return Status::ok;
}

Status free_pinned(void* address) {
  BlockRef block;
  OperationRef op;
  Status status = take_block(kPinned, address, Kind::unpin, &block, &op);
  if (status != Status::ok) return status;
  std::lock_guard<std::mutex> guard(lock);
  if (!blocks.erase(block->begin)) return fail(Status::invalid, "%p is freed already", address);
  // It stays readable in its grave: a stale array must show poison, not end the process.
  poison_pages(static_cast<char*>(address), block->mapped);
  bury_locked(*block, op->sequence);
  return Status::ok;
}

BlockRef block_at(uintptr_t address) {
  std::lock_guard<std::mutex> guard(lock);
  return find_locked(address);
}

bool is_device_memory(const void* address) {
  auto block = block_at(reinterpret_cast<uintptr_t>(address));
  return block && block->device != kPinned;
}

bool is_pinned(const void* address, size_t bytes) {
  auto begin = reinterpret_cast<uintptr_t>(address);
  auto block = block_at(begin);
  return block && block->device == kPinned && begin + bytes <= block->begin + block->bytes;
}

size_t memory_used(int device) {
  std::lock_guard<std::mutex> guard(lock);
  return device >= 0 && device < kMaxDevices ? used[device] : 0;
}

static Mapped refuse(const OperationRef& op, ReportKind kind, const char* role, uintptr_t address, size_t bytes,
                     const char* why) {
  fault(op, kind, address, bytes, std::string(role) + " " + why);
  return {};
}

static Mapped map_block(const OperationRef& op, const char* role, uintptr_t address, size_t bytes, int device) {
  BlockRef block;
  bool freed = false;
  {
    std::lock_guard<std::mutex> guard(lock);
    block = find_locked(address);
    if (!block) freed = grave_locked(address) != nullptr;
  }
  if (freed) return refuse(op, ReportKind::lifetime, role, address, bytes, "was freed before the operation ran");
  if (!block || (device >= 0 && block->device == kPinned)) {
    return refuse(op, ReportKind::address, role, address, bytes, "is not in a live device block");
  }
  if (address + bytes > block->begin + block->bytes) {
    return refuse(op, ReportKind::address, role, address, bytes, "reaches beyond the end of its block");
  }
  if (block->born > op->sequence) {
    return refuse(op, ReportKind::lifetime, role, address, bytes, "was freed, and its address given to a new block");
  }
  if (device >= 0 && block->device != device) {
    return refuse(op, ReportKind::address, role, address, bytes, "belongs to another device");
  }
  return {block->alias + (address - block->begin), block};
}

Mapped map_device(const OperationRef& op, const char* role, uintptr_t address, size_t bytes, int device) {
  return map_block(op, role, address, bytes, device);
}

Mapped map_any(const OperationRef& op, const char* role, uintptr_t address, size_t bytes) {
  return map_block(op, role, address, bytes, kAnyDevice);
}

Mapped map_host(const OperationRef& op, const char* role, uintptr_t address, size_t bytes, bool was_pinned) {
  if (was_pinned) return map_block(op, role, address, bytes, kAnyDevice);
  if (is_device_memory(reinterpret_cast<void*>(address))) {
    return refuse(op, ReportKind::address, role, address, bytes, "is a device address where a host one belongs");
  }
  return {reinterpret_cast<char*>(address), nullptr};
}

}  // namespace halsim
