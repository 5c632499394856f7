// What the Python layer calls by ctypes (hal_sim/_native.py names the same functions). Every function that can fail
// returns a Status; halsim_last_error() has the text, for the thread that called.
#include <cstring>

#include "collectives.h"
#include "copy.h"
#include "functions.h"
#include "kernels.h"
#include "memory.h"
#include "options.h"
#include "order.h"
#include "stream.h"

using namespace halsim;

static int code(Status status) { return static_cast<int>(status); }

#define HALSIM_API extern "C" __attribute__((visibility("default")))

// ---- process-wide ----------------------------------------------------------------------------------------------------
HALSIM_API int halsim_abi() { return 1; }
HALSIM_API const char* halsim_last_error() { return last_error(); }

HALSIM_API int halsim_set_option(const char* name, long value, long* former) {
  auto* option = find_option(name);
  if (!option) return code(fail(Status::invalid, "there is no option '%s'", name));
  const long before = option->exchange(value);
  if (former) *former = before;
  return 0;
}

HALSIM_API int halsim_get_option(const char* name, long* value) {
  auto* option = find_option(name);
  if (!option) return code(fail(Status::invalid, "there is no option '%s'", name));
  *value = *option;
  return 0;
}

HALSIM_API const char* halsim_option_name(int index) {
  static const char* const names[] = {
#define HALSIM_NAME(name, value) #name,
      HALSIM_OPTIONS(HALSIM_NAME)
#undef HALSIM_NAME
  };
  return index >= 0 && index < static_cast<int>(sizeof names / sizeof *names) ? names[index] : nullptr;
}

HALSIM_API const char* halsim_kind_name(int kind) {
  return kind >= 0 && kind < static_cast<int>(kKinds) ? kind_name(static_cast<Kind>(kind)) : nullptr;
}
HALSIM_API const char* halsim_kind_flags(int kind) {
  return kind >= 0 && kind < static_cast<int>(kKinds) ? kind_flags(static_cast<Kind>(kind)) : nullptr;
}
HALSIM_API void halsim_counters(long* out) {
  for (size_t k = 0; k < kKinds; ++k) out[k] = counter(static_cast<Kind>(k));
}
HALSIM_API const char* halsim_set_label(const char* label) { return set_label(label); }
HALSIM_API size_t halsim_trace(TraceRecord* out, size_t capacity, uint64_t after) { return read_trace(out, capacity, after); }
HALSIM_API size_t halsim_reports(ReportRecord* out, size_t capacity) { return read_reports(out, capacity); }
HALSIM_API size_t halsim_dropped_records() { return dropped_records(); }
HALSIM_API size_t halsim_dropped_reports() { return dropped_reports(); }
HALSIM_API size_t halsim_noted_segments() { return noted_segments(); }
HALSIM_API long halsim_pending_tasks() { return pending_tasks(); }

HALSIM_API int halsim_reset() {
  if (pending_tasks() > 0) return code(fail(Status::invalid, "%ld operations are pending", pending_tasks()));
  clear_order();
  clear_journal();
  return 0;
}

// ---- memory ----------------------------------------------------------------------------------------------------------
HALSIM_API int halsim_allocate(int device, size_t bytes, void** out) { return code(allocate_device(device, bytes, out)); }
HALSIM_API int halsim_free(int device, void* address) { return code(free_device(device, address)); }
HALSIM_API int halsim_pin(size_t bytes, void** out) { return code(allocate_pinned(bytes, out)); }
HALSIM_API int halsim_unpin(void* address) { return code(free_pinned(address)); }
HALSIM_API size_t halsim_memory_used(int device) { return memory_used(device); }
HALSIM_API int halsim_is_device_memory(const void* address) { return is_device_memory(address); }
HALSIM_API int halsim_is_pinned(const void* address, size_t bytes) { return is_pinned(address, bytes); }
HALSIM_API int halsim_peek(void* out, const void* address, size_t bytes) { return code(peek(out, address, bytes)); }
HALSIM_API int halsim_poke(void* address, const void* data, size_t bytes) { return code(poke(address, data, bytes)); }
HALSIM_API int halsim_host_access(const void* address, size_t bytes, int write) {
  return code(host_access(address, bytes, write));
}
HALSIM_API void halsim_host_publish(uint64_t token) { host_publish(token); }
HALSIM_API void halsim_host_acquire(uint64_t token) { host_acquire(token); }

// ---- streams and events ----------------------------------------------------------------------------------------------
HALSIM_API int halsim_stream_create(int device, Stream** out) { return code(create_stream(device, out)); }
HALSIM_API int halsim_stream_destroy(Stream* stream) { return code(destroy_stream(stream)); }
HALSIM_API int halsim_stream_hold(Stream* stream, int hold) { return code(hold_stream(stream, hold)); }
HALSIM_API int halsim_stream_query(Stream* stream, int* done) {
  bool answer = false;
  const Status status = query_stream(stream, &answer);
  *done = answer;
  return code(status);
}
HALSIM_API int halsim_stream_wait(Stream* stream, long timeout_ms) { return code(wait_stream(stream, timeout_ms)); }
HALSIM_API int halsim_device_wait(int device, long timeout_ms) { return code(wait_device(device, timeout_ms)); }
HALSIM_API int halsim_stream_pending(Stream* stream, long* out) {
  const Status status = check_stream(stream);
  if (status == Status::ok) *out = pending_of(stream);
  return code(status);
}
HALSIM_API int halsim_stream_info(Stream* stream, int* device, int* id) {
  const Status status = check_stream(stream);
  if (status == Status::ok) *device = stream->device, *id = stream->id;
  return code(status);
}
HALSIM_API int halsim_event_create(Event** out) { return code(create_event(out)); }
HALSIM_API int halsim_event_destroy(Event* event) { return code(destroy_event(event)); }
HALSIM_API int halsim_event_record(Event* event, Stream* stream) { return code(record_event(event, stream)); }
HALSIM_API int halsim_event_timed(Event* event) { return code(time_event(event)); }
HALSIM_API int halsim_event_seconds(Event* earlier, Event* event, double* out) {
  return code(event_seconds(earlier, event, out));
}
HALSIM_API int halsim_event_query(Event* event, int* done) {
  bool answer = false;
  const Status status = query_event(event, &answer);
  *done = answer;
  return code(status);
}
HALSIM_API int halsim_event_wait(Event* event, long timeout_ms) { return code(wait_event(event, timeout_ms)); }
HALSIM_API int halsim_stream_wait_event(Stream* stream, Event* event) { return code(stream_wait_event(stream, event)); }

// ---- copies and kernels ----------------------------------------------------------------------------------------------
HALSIM_API int halsim_copy_async(int route, Stream* stream, int dst_device, int src_device, void* dst, const void* src,
                                 size_t bytes) {
  return code(copy_async({static_cast<Route>(route), dst_device, src_device, dst, src, bytes}, stream));
}
HALSIM_API int halsim_copy_now(int route, int dst_device, int src_device, void* dst, const void* src, size_t bytes) {
  return code(copy_now({static_cast<Route>(route), dst_device, src_device, dst, src, bytes}));
}
HALSIM_API int halsim_launch_scatter(Stream* stream, uint64_t block, uint64_t block_bytes, uint64_t table, uint64_t count,
                                     uint64_t base, uint64_t payload) {
  return code(launch_scatter(stream, {block, block_bytes, table, count, base, payload}));
}
HALSIM_API int halsim_launch_spread(Stream* stream, const Spread* spread) { return code(launch_spread(stream, *spread)); }
HALSIM_API int halsim_launch_plan(Stream* stream, const Spread* spread, const Scatter* scatter) {
  return code(launch_plan(stream, *spread, *scatter));
}
HALSIM_API int halsim_launch_strided(Stream* stream, const Strided* strided) {
  return code(launch_strided(stream, *strided));
}
HALSIM_API int halsim_launch_fill(Stream* stream, uint64_t dst, uint64_t bytes, uint64_t pattern, uint32_t width) {
  return code(launch_fill(stream, dst, bytes, pattern, width));
}
HALSIM_API int halsim_launch_function(Stream* stream, const char* name, const void* arguments, size_t bytes) {
  halsim_function function = find_function(name);
  if (!function) return code(fail(Status::invalid, "no kernel function is named '%s'", name));
  return code(launch_function(stream, function, arguments, bytes));
}
HALSIM_API int halsim_launch_pointer(Stream* stream, halsim_function function, const void* arguments, size_t bytes) {
  return code(launch_function(stream, function, arguments, bytes));
}

// ---- groups ----------------------------------------------------------------------------------------------------------
HALSIM_API void halsim_group_name(char* out, size_t bytes) {
  std::strncpy(out, new_group_name().c_str(), bytes - 1);
  out[bytes - 1] = 0;
}
HALSIM_API int halsim_group_join(const char* name, uint32_t ranks, uint32_t rank, Group** out) {
  return code(join_group(name, ranks, rank, out));
}
HALSIM_API int halsim_group_leave(Group* group) { return code(leave_group(group)); }
HALSIM_API int halsim_group_check(Group* group) { return code(check_group(group)); }
HALSIM_API int halsim_collective(Group* group, Stream* stream, const char* name, const void* send, void* receive,
                                 size_t count, uint32_t type, uint32_t how, uint32_t root) {
  for (auto kind : {Kind::all_reduce, Kind::broadcast, Kind::reduce, Kind::all_gather, Kind::reduce_scatter, Kind::barrier}) {
    if (std::strcmp(name, kind_name(kind)) != 0) continue;
    return code(submit_collective(group, stream, {kind, send, receive, count, static_cast<Type>(type),
                                                  static_cast<Reduce>(how), root}));
  }
  return code(fail(Status::invalid, "no collective is named '%s'", name));
}
HALSIM_API int halsim_transfer(Group* group, Stream* stream, void* buffer, size_t bytes, uint32_t peer, int sending) {
  return code(submit_transfers(stream, {{group, buffer, bytes, peer, sending != 0}}));
}
