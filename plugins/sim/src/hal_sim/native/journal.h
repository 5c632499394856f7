// What happened: operations, their trace, counters, reports and the error state of each device.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace halsim {

// D: put on a device stream (a submission); C: a copy; L: a kernel launch; W: the host may wait in it.
#define HALSIM_KINDS(X)                                                                                              \
  X(allocate, "") X(free, "") X(pin, "") X(unpin, "") X(stream_create, "") X(stream_destroy, "")                     \
  X(event_create, "") X(event_destroy, "") X(event_record, "") X(event_query, "") X(stream_query, "")                \
  X(stream_wait, "") X(wait_event, "W") X(wait_stream, "W") X(wait_device, "W")                                      \
  X(copy_h2d, "CW") X(copy_d2h, "CW") X(copy_d2d, "CW") X(copy_p2p, "CW") X(host_memset, "")                         \
  X(async_h2d, "DC") X(async_d2h, "DC") X(async_d2d, "DC") X(async_p2p, "DC")                                        \
  X(host_read, "") X(host_write, "") X(kernel_scatter, "DL") X(kernel_spread, "DL") X(kernel_plan, "DL") X(kernel_strided, "DL")          \
  X(kernel_fill, "DL") X(kernel_index, "DL") X(kernel_function, "DL") X(callback, "")                                \
  X(all_reduce, "D") X(broadcast, "D") X(reduce, "D") X(all_gather, "D") X(reduce_scatter, "D") X(barrier, "D")      \
  X(send_recv, "D") X(blocked_wait, "") X(fault, "") X(fallback, "")

enum class Kind : uint32_t {
#define HALSIM_ENUM(name, flags) name,
  HALSIM_KINDS(HALSIM_ENUM)
#undef HALSIM_ENUM
  count_
};
constexpr size_t kKinds = static_cast<size_t>(Kind::count_);
const char* kind_name(Kind kind);
const char* kind_flags(Kind kind);

enum class Status : int {
  ok = 0,
  invalid = 1,   // wrong argument or handle: nothing was done
  no_memory = 2,
  timeout = 3,   // the wait ended first; the work continues
  forked = 4,    // the worker threads stayed in the parent
  fault = 5,     // earlier asynchronous work failed
  refused = 6,   // fault injection
  lost = 7,      // a peer of the group is lost
};
Status fail(Status status, const char* format, ...) __attribute__((format(printf, 2, 3)));
const char* last_error();  // of this thread

using Clock = std::vector<uint64_t>;
struct Range {
  uintptr_t begin;
  size_t bytes;
  bool write;
};

struct Operation {
  uint64_t sequence = 0;
  Kind kind = Kind::count_;
  int device = -1;
  int stream = -1;  // -1: the host did it itself
  uint64_t dst = 0, src = 0, bytes = 0;
  const char* label = "";
  std::atomic<uint64_t> ran{0};  // place in the order of execution, 0 until it ran
  uint64_t traced = 0;           // number of its record, 0: it has none
  // For the happens-before checker: the operation's own tick, and what it comes after.
  int line = -1;
  uint64_t tick = 0;
  Clock after;
  std::vector<Range> ranges;  // what is known when it is put on the stream; kernels may touch more
};
using OperationRef = std::shared_ptr<Operation>;

OperationRef new_operation(Kind kind, int device, int stream, uint64_t dst, uint64_t src, uint64_t bytes,
                           bool traced = true);
void has_run(Operation& op);  // now: its place in the order of execution
void count(Kind kind);
long counter(Kind kind);
const char* set_label(const char* label);  // of this thread; returns the former one

enum class ReportKind : uint32_t { race = 0, lifetime = 1, address = 2, collective = 3 };

// The shape ctypes reads; Python knows the same layout (_native.py).
struct TraceRecord {
  uint64_t sequence, dst, src, bytes, ran;
  uint32_t kind;
  int32_t device, stream;
  char label[36];
};
struct ReportRecord {
  uint32_t kind, has_second;
  uint64_t begin, bytes;
  TraceRecord first, second;
  char text[256];
};

void report(ReportKind kind, const OperationRef& first, const OperationRef& second, uintptr_t begin, size_t bytes,
            const std::string& text);
// Work that has already been accepted failed: reported, and the device's next wait returns the error.
void fault(const OperationRef& op, ReportKind kind, uintptr_t begin, size_t bytes, const std::string& text);
void set_device_error(int device, Status status, const std::string& text);
Status take_device_error(int device);  // ok, or once what failed

size_t read_trace(TraceRecord* out, size_t capacity, uint64_t after_sequence);
size_t read_reports(ReportRecord* out, size_t capacity);
size_t dropped_records();
size_t dropped_reports();
void clear_journal();

}  // namespace halsim
