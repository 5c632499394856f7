// C_DeviceInterface over the simulator. Needs Paddle's device_ext.h; links no Paddle library.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "copy.h"
#include "memory.h"
#include "options.h"
#include "paddle_device.h"
#include "stream.h"

namespace halsim {

C_Status to_paddle(Status status) {
  if (status == Status::ok) return C_SUCCESS;
  std::fprintf(stderr, "[hal_sim] %s\n", last_error());
  return status == Status::no_memory ? C_FAILED : C_ERROR;
}

namespace {

thread_local int current_device = 0;

Stream* stream_of(C_Stream s) { return reinterpret_cast<Stream*>(s); }
Event* event_of(C_Event e) { return reinterpret_cast<Event*>(e); }

C_Status nothing() { return C_SUCCESS; }
C_Status nothing_on(const C_Device) { return C_SUCCESS; }
C_Status set_device(const C_Device d) {
  current_device = d->id;
  return C_SUCCESS;
}
C_Status get_device(const C_Device d) {
  d->id = current_device;
  return C_SUCCESS;
}

C_Status stream_create(const C_Device d, C_Stream* out) {
  Stream* s = nullptr;
  const Status status = create_stream(d->id, &s);
  *out = reinterpret_cast<C_Stream>(s);
  return to_paddle(status);
}
C_Status stream_destroy(const C_Device, C_Stream s) { return to_paddle(destroy_stream(stream_of(s))); }
C_Status stream_query(const C_Device, C_Stream s) {
  bool done = false;
  const Status status = query_stream(stream_of(s), &done);
  return status != Status::ok ? to_paddle(status) : done ? C_SUCCESS : C_WARNING;
}
C_Status stream_synchronize(const C_Device, C_Stream s) { return to_paddle(wait_stream(stream_of(s), -1)); }
C_Status stream_wait(const C_Device, C_Stream s, C_Event e) {
  return to_paddle(stream_wait_event(stream_of(s), event_of(e)));
}
C_Status stream_callback(const C_Device d, C_Stream s, C_Callback function, void* data) {
  const C_Device_st device = *d;
  return to_paddle(submit(stream_of(s), Kind::callback, 0, 0, 0, {}, [=](const OperationRef&) {
    C_Device_st own = device;
    C_Status status = C_SUCCESS;
    function(&own, s, data, &status);
  }));
}
C_Status device_synchronize(const C_Device d) { return to_paddle(wait_device(d->id, -1)); }

C_Status event_create(const C_Device, C_Event* out) {
  return to_paddle(create_event(reinterpret_cast<Event**>(out)));
}
C_Status event_destroy(const C_Device, C_Event e) { return to_paddle(destroy_event(event_of(e))); }
C_Status event_record(const C_Device, C_Stream s, C_Event e) {
  return to_paddle(record_event(event_of(e), stream_of(s)));
}
C_Status event_query(const C_Device, C_Event e) {
  bool done = false;
  const Status status = query_event(event_of(e), &done);
  return status != Status::ok ? to_paddle(status) : done ? C_SUCCESS : C_WARNING;
}
C_Status event_synchronize(const C_Device d, C_Event e) {
  const Status status = wait_event(event_of(e), -1);
  if (status != Status::fault && status != Status::lost) return to_paddle(status);
  // Paddle synchronises events from destructors, where an error ends the process: keep it for the next real wait.
  set_device_error(d->id, status, last_error());
  return C_SUCCESS;
}

C_Status memory_allocate(const C_Device d, void** out, size_t bytes) {
  const Status status = allocate_device(d->id, bytes, out);
  if (status == Status::no_memory && options.oom_null) return C_SUCCESS;  // Paddle frees its cache and tries again
  return to_paddle(status);
}
C_Status memory_free(const C_Device d, void* address, size_t) { return to_paddle(free_device(d->id, address)); }
C_Status memory_set(const C_Device d, void* address, unsigned char value, size_t bytes) {
  return to_paddle(host_memset(d->id, address, value, bytes));
}
C_Status host_allocate(const C_Device, void** out, size_t bytes) { return to_paddle(allocate_pinned(bytes, out)); }
C_Status host_free(const C_Device, void* address, size_t) { return to_paddle(free_pinned(address)); }

template <Route route>
C_Status copy(const C_Device d, void* dst, const void* src, size_t bytes) {
  if (route == Route::h2d) count_if_fallback();
  return to_paddle(copy_now({route, d->id, d->id, dst, src, bytes}));
}
template <Route route>
C_Status copy_on(const C_Device d, C_Stream s, void* dst, const void* src, size_t bytes) {
  return to_paddle(copy_async({route, d->id, d->id, dst, src, bytes}, stream_of(s)));
}
C_Status copy_peer(const C_Device to, const C_Device from, void* dst, const void* src, size_t bytes) {
  return to_paddle(copy_now({Route::p2p, to->id, from->id, dst, src, bytes}));
}
C_Status copy_peer_on(const C_Device to, const C_Device from, C_Stream s, void* dst, const void* src, size_t bytes) {
  return to_paddle(copy_async({Route::p2p, to->id, from->id, dst, src, bytes}, stream_of(s)));
}

C_Status device_count(size_t* out) {
  *out = static_cast<size_t>(options.devices);
  return C_SUCCESS;
}
C_Status device_list(size_t* out) {
  for (long i = 0; i < options.devices; ++i) out[i] = static_cast<size_t>(i);
  return C_SUCCESS;
}
C_Status memory_stats(const C_Device d, size_t* total, size_t* free_bytes) {
  *total = static_cast<size_t>(options.memory_mb) << 20;
  *free_bytes = *total - memory_used(d->id);
  return C_SUCCESS;
}
C_Status min_chunk(const C_Device, size_t* out) {
  *out = 512;
  return C_SUCCESS;
}
C_Status max_chunk(const C_Device, size_t* out) {
  *out = static_cast<size_t>(options.max_chunk);
  return C_SUCCESS;
}
C_Status one(const C_Device, size_t* out) {
  *out = 1;
  return C_SUCCESS;
}
C_Status yes(const C_Device, bool* out) {
  *out = true;
  return C_SUCCESS;
}
C_Status no(const C_Device, bool* out) {
  *out = false;
  return C_SUCCESS;
}
C_Status profiler_start(C_Profiler, void**) { return C_SUCCESS; }
C_Status profiler_step(C_Profiler, void*) { return C_SUCCESS; }
C_Status profiler_collect(C_Profiler, uint64_t, void*) { return C_SUCCESS; }

// Slots that some Paddle versions lack, or declare with another signature, are set where they fit.
template <typename Set>
auto set_if_it_fits(C_DeviceInterface* d, Set set, int) -> decltype(set(d)) {
  set(d);
}
template <typename Set>
void set_if_it_fits(C_DeviceInterface*, Set, long) {}
#define HALSIM_OPTIONAL(slot, function) \
  set_if_it_fits(d, [](auto* i) -> decltype((void)(i->slot = function)) { i->slot = function; }, 0);

void fill_runtime(C_DeviceInterface* d) {
  d->initialize = d->finalize = nothing;
  d->init_device = d->deinit_device = nothing_on;
  d->set_device = set_device;
  d->get_device = get_device;
  d->create_stream = stream_create;
  d->destroy_stream = stream_destroy;
  d->query_stream = stream_query;
  d->stream_add_callback = stream_callback;
  d->create_event = event_create;
  d->destroy_event = event_destroy;
  d->record_event = event_record;
  d->query_event = event_query;
  d->synchronize_device = device_synchronize;
  d->synchronize_stream = stream_synchronize;
  d->synchronize_event = event_synchronize;
  d->stream_wait_event = stream_wait;
  d->device_memory_allocate = memory_allocate;
  d->device_memory_deallocate = memory_free;
  d->device_memory_set = memory_set;
  d->host_memory_allocate = host_allocate;
  d->host_memory_deallocate = host_free;
  d->memory_copy_h2d = copy<Route::h2d>;
  d->memory_copy_d2h = copy<Route::d2h>;
  d->memory_copy_d2d = copy<Route::d2d>;
  d->memory_copy_p2p = copy_peer;
  d->async_memory_copy_h2d = copy_on<Route::h2d>;
  d->async_memory_copy_d2h = copy_on<Route::d2h>;
  d->async_memory_copy_d2d = copy_on<Route::d2d>;
  d->async_memory_copy_p2p = copy_peer_on;
  d->get_device_count = device_count;
  d->get_device_list = device_list;
  d->device_memory_stats = memory_stats;
  d->device_min_chunk_size = min_chunk;
  d->device_max_chunk_size = max_chunk;
  HALSIM_OPTIONAL(get_compute_capability, one)
  HALSIM_OPTIONAL(get_runtime_version, one)
  HALSIM_OPTIONAL(get_driver_version, one)
  HALSIM_OPTIONAL(is_float16_supported, yes)
  HALSIM_OPTIONAL(is_bfloat16_supported, yes)
  HALSIM_OPTIONAL(is_dnn_supported, no)
  d->profiler_initialize = profiler_start;
  d->profiler_finalize = d->profiler_prepare_tracing = profiler_step;
  d->profiler_start_tracing = d->profiler_stop_tracing = profiler_step;
  d->profiler_collect_trace_data = profiler_collect;
}

}  // namespace
}  // namespace halsim

extern "C" __attribute__((visibility("default"))) void InitPlugin(CustomRuntimeParams* params) {
  using namespace halsim;
  // Paddle's own version macro joins the two tests with "and" and its version number never changes; built for another
  // minor version, the memset below would run past the end of the core's struct. Returning makes Paddle skip us.
  if (params->size != sizeof(CustomRuntimeParams) || params->interface->size != sizeof(C_DeviceInterface)) {
    std::fprintf(stderr,
                 "[hal_sim] built for another Paddle: its device interface has %zu bytes, this build's has %zu. "
                 "Remove the cache folder or unset CUSTOM_DEVICE_ROOT; `python -m hal_sim` builds one for this version.\n",
                 params->interface->size, sizeof(C_DeviceInterface));
    return;
  }
  params->version = {PADDLE_CUSTOM_RUNTIME_MAJOR_VERSION, PADDLE_CUSTOM_RUNTIME_MINOR_VERSION,
                     PADDLE_CUSTOM_RUNTIME_PATCH_VERSION};
  const char* name = std::getenv("HALSIM_NAME");
  static char device_type[64], sub_type[] = "simulated";
  std::snprintf(device_type, sizeof device_type, "%s", name && *name ? name : "hal_sim");
  params->device_type = device_type;
  params->sub_device_type = sub_type;
  const size_t size = params->interface->size;
  std::memset(static_cast<void*>(params->interface), 0, sizeof(C_DeviceInterface));
  params->interface->size = size;
  fill_runtime(params->interface);
  fill_collectives(params->interface);
  register_paddle_kernels(device_type);
}
