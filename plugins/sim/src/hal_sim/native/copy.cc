#include "copy.h"

#include <cstring>

#include "memory.h"
#include "options.h"

namespace halsim {

namespace {

uintptr_t number(const void* p) { return reinterpret_cast<uintptr_t>(p); }

Kind kind_of(Route route, bool async) {
  const Kind first = async ? Kind::async_h2d : Kind::copy_h2d;
  return static_cast<Kind>(static_cast<uint32_t>(first) + static_cast<uint32_t>(route));
}

void move_bytes(const OperationRef& op, const Copy& c, const void* src, bool src_pinned, bool dst_pinned) {
  const bool from_device = c.route != Route::h2d, to_device = c.route != Route::d2h;
  Mapped in = from_device ? map_device(op, "source", number(src), c.bytes, c.src_device)
                          : map_host(op, "source", number(src), c.bytes, src_pinned);
  Mapped out = to_device ? map_device(op, "target", number(c.dst), c.bytes, c.dst_device)
                         : map_host(op, "target", number(c.dst), c.bytes, dst_pinned);
  if (in && out) std::memmove(out.data, in.data, c.bytes);
}

}  // namespace

Status copy_async(const Copy& c, Stream* stream) {
  Status status = check_stream(stream);
  if (status != Status::ok) return status;
  const bool to_host = c.route == Route::d2h, from_host = c.route == Route::h2d;
  const bool src_pinned = from_host && is_pinned(c.src, c.bytes), dst_pinned = to_host && is_pinned(c.dst, c.bytes);
  const Range out{number(c.dst), c.bytes, true}, in{number(c.src), c.bytes, false};
  const Kind kind = kind_of(c.route, true);
  if (from_host && !src_pinned && options.staged > 0 && !is_device_memory(c.src)) {
    // What a driver does with pageable memory: the bytes are taken at the call.
    host_access(c.src, c.bytes, false);
    auto snapshot = std::make_shared<std::string>(static_cast<const char*>(c.src), c.bytes);
    return submit(stream, kind, out.begin, in.begin, c.bytes, {out}, [c, snapshot](const OperationRef& op) {
      move_bytes(op, c, snapshot->data(), false, false);
    });
  }
  if (to_host && options.poison && !is_device_memory(c.dst) && pending_on(out.begin, out.bytes).empty()) {
    // Whoever reads the target too early must see it. Work that is pending on it may still need the old bytes.
    std::memset(c.dst, kPendingPoison, c.bytes);
  }
  status = submit(stream, kind, out.begin, in.begin, c.bytes, {in, out},
                  [c, src_pinned, dst_pinned](const OperationRef& op) { move_bytes(op, c, c.src, src_pinned, dst_pinned); });
  if (status == Status::ok && to_host && !dst_pinned && options.staged > 1) status = wait_stream(stream, -1);
  return status;
}

Status copy_now(const Copy& c) {
  if (options.sync_drains) {
    Status status = wait_device(c.route == Route::d2h ? c.src_device : c.dst_device, -1);
    if (status != Status::ok) return status;
  }
  const int device = c.route == Route::d2h ? c.src_device : c.dst_device;
  auto op = new_operation(kind_of(c.route, false), device, -1, number(c.dst), number(c.src), c.bytes);
  order_on_host(*op);
  note_access(op, number(c.src), c.bytes, false);
  note_access(op, number(c.dst), c.bytes, true);
  has_run(*op);
  const bool dst_pinned = c.route == Route::d2h && is_pinned(c.dst, c.bytes);
  const bool src_pinned = c.route == Route::h2d && is_pinned(c.src, c.bytes);
  move_bytes(op, c, c.src, src_pinned, dst_pinned);
  return take_device_error(device);  // its own, or an unreported one of earlier work
}

Status host_memset(int device, void* dst, int value, size_t bytes) {
  auto op = new_operation(Kind::host_memset, device, -1, number(dst), 0, bytes);
  order_on_host(*op);
  note_access(op, number(dst), bytes, true);
  has_run(*op);
  if (Mapped out = map_device(op, "target", number(dst), bytes, device)) std::memset(out.data, value, bytes);
  return take_device_error(device);
}

Status host_access(const void* address, size_t bytes, bool write) {
  if (!options.check) return Status::ok;
  auto op = new_operation(write ? Kind::host_write : Kind::host_read, -1, -1, write ? number(address) : 0,
                          write ? 0 : number(address), bytes);
  order_on_host(*op);
  note_access(op, number(address), bytes, write);
  has_run(*op);
  return Status::ok;
}

static Mapped back_door(const void* address, size_t bytes) {
  BlockRef block = block_at(number(address));
  if (!block || number(address) + bytes > block->begin + block->bytes) return {};
  return {block->alias + (number(address) - block->begin), block};
}

Status peek(void* out, const void* address, size_t bytes) {
  Mapped in = back_door(address, bytes);
  if (!in) return fail(Status::invalid, "%p with %zu bytes is not inside one live block", address, bytes);
  std::memcpy(out, in.data, bytes);
  return Status::ok;
}

Status poke(void* address, const void* data, size_t bytes) {
  Mapped out = back_door(address, bytes);
  if (!out) return fail(Status::invalid, "%p with %zu bytes is not inside one live block", address, bytes);
  std::memcpy(out.data, data, bytes);
  return Status::ok;
}

}  // namespace halsim
