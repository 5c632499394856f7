#include "journal.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <deque>
#include <mutex>
#include <set>
#include <tuple>

#include "options.h"

namespace halsim {

// Leaked on purpose, like every global with a destructor here: Paddle frees memory and destroys streams from its
// own static destructors, after ours would have run.
static auto& lock = *new std::mutex;
// The newest operations as records. The ring is allocated whole: what a process keeps does not grow with what it runs, and
// an operation with its clock and ranges goes when the last stream and the checker are through with it.
static auto& ring = *new std::vector<TraceRecord>;
static uint64_t recorded = 0, in_ring = 0;  // records ever made, and how many of the last of them the ring has
static auto& reports = *new std::deque<ReportRecord>;
static auto& reported = *new std::set<std::tuple<uint32_t, uint64_t, uint64_t>>;
static auto& labels = *new std::set<std::string>;
struct DeviceError {
  Status status = Status::ok;
  std::string text;
};
static auto& device_errors = *new std::vector<DeviceError>(kMaxDevices);
static std::atomic<uint64_t> sequences{0}, runs{0}, trace_lost{0}, reports_lost{0};
static std::atomic<long> counters[kKinds];
static thread_local const char* current_label = "";
static thread_local char message[512] = "";
constexpr size_t kMaxReports = 1000;

const char* kind_name(Kind kind) {
  static const char* const names[] = {
#define HALSIM_NAME(name, flags) #name,
      HALSIM_KINDS(HALSIM_NAME)
#undef HALSIM_NAME
  };
  return names[static_cast<size_t>(kind)];
}

const char* kind_flags(Kind kind) {
  static const char* const flags_of[] = {
#define HALSIM_FLAGS(name, flags) flags,
      HALSIM_KINDS(HALSIM_FLAGS)
#undef HALSIM_FLAGS
  };
  return flags_of[static_cast<size_t>(kind)];
}

Status fail(Status status, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(message, sizeof message, format, arguments);
  va_end(arguments);
  return status;
}

const char* last_error() { return message; }

static TraceRecord record_of(const Operation& op) {
  TraceRecord r{};
  r.sequence = op.sequence;
  r.dst = op.dst;
  r.src = op.src;
  r.bytes = op.bytes;
  r.ran = op.ran;
  r.kind = static_cast<uint32_t>(op.kind);
  r.device = op.device;
  r.stream = op.stream;
  std::snprintf(r.label, sizeof r.label, "%s", op.label);
  return r;
}

static void resize_ring(size_t capacity) {
  std::vector<TraceRecord> other(capacity);
  const uint64_t keep = std::min<uint64_t>(in_ring, capacity);
  for (uint64_t number = recorded - keep + 1; number <= recorded; ++number)
    other[number % capacity] = ring[number % ring.size()];
  trace_lost += in_ring - keep;
  in_ring = keep;
  ring.swap(other);
}

static void add_record(Operation& op) {
  std::lock_guard<std::mutex> guard(lock);
  const size_t capacity = static_cast<size_t>(std::max(0L, options.trace_capacity.load()));
  if (ring.size() != capacity) resize_ring(capacity);
  op.traced = ++recorded;
  if (in_ring < capacity) {
    ++in_ring;
  } else {
    ++trace_lost;
  }
  if (capacity) ring[op.traced % capacity] = record_of(op);
}

void has_run(Operation& op) {
  op.ran = ++runs;
  std::lock_guard<std::mutex> guard(lock);
  if (op.traced && op.traced <= recorded && recorded - op.traced < in_ring) ring[op.traced % ring.size()].ran = op.ran;
}

void count(Kind kind) { ++counters[static_cast<size_t>(kind)]; }
long counter(Kind kind) { return counters[static_cast<size_t>(kind)]; }

OperationRef new_operation(Kind kind, int device, int stream, uint64_t dst, uint64_t src, uint64_t bytes, bool traced) {
  auto op = std::make_shared<Operation>();
  op->sequence = ++sequences;
  op->kind = kind;
  op->device = device;
  op->stream = stream;
  op->dst = dst;
  op->src = src;
  op->bytes = bytes;
  op->label = current_label;
  if (!traced) return op;
  count(kind);
  add_record(*op);
  return op;
}

const char* set_label(const char* label) {
  const char* former = current_label;
  std::lock_guard<std::mutex> guard(lock);
  current_label = labels.insert(label).first->c_str();  // labels are few and live for ever
  return former;
}

void report(ReportKind kind, const OperationRef& first, const OperationRef& second, uintptr_t begin, size_t bytes,
            const std::string& text) {
  ReportRecord r{};
  r.kind = static_cast<uint32_t>(kind);
  r.begin = begin;
  r.bytes = bytes;
  if (first) r.first = record_of(*first);
  if (second) {
    r.second = record_of(*second);
    r.has_second = 1;
  }
  std::snprintf(r.text, sizeof r.text, "%s", text.c_str());
  std::lock_guard<std::mutex> guard(lock);
  // One report for a pair of operations, however many ranges they share.
  if (!reported.emplace(r.kind, r.first.sequence, r.second.sequence).second) return;
  if (reports.size() < kMaxReports) {
    reports.push_back(r);
  } else {
    ++reports_lost;
  }
}

void fault(const OperationRef& op, ReportKind kind, uintptr_t begin, size_t bytes, const std::string& text) {
  count(Kind::fault);
  report(kind, op, nullptr, begin, bytes, text);
  char said[400];
  std::snprintf(said, sizeof said, "%s #%llu on stream %d%s%s: %s", kind_name(op->kind),
                static_cast<unsigned long long>(op->sequence), op->stream, *op->label ? " in " : "", op->label,
                text.c_str());
  set_device_error(op->device, kind == ReportKind::collective ? Status::lost : Status::fault, said);
}

void set_device_error(int device, Status status, const std::string& text) {
  if (device < 0 || device >= kMaxDevices) return;
  std::lock_guard<std::mutex> guard(lock);
  if (device_errors[device].status == Status::ok) device_errors[device] = {status, text};  // the first is the cause
}

Status take_device_error(int device) {
  if (device < 0 || device >= kMaxDevices) return Status::ok;
  DeviceError error;
  {
    std::lock_guard<std::mutex> guard(lock);
    std::swap(error, device_errors[device]);
  }
  return error.status == Status::ok ? Status::ok : fail(error.status, "%s", error.text.c_str());
}

size_t read_trace(TraceRecord* out, size_t capacity, uint64_t after_sequence) {
  std::lock_guard<std::mutex> guard(lock);
  size_t n = 0;
  for (uint64_t number = recorded - in_ring + 1; number <= recorded; ++number) {
    const TraceRecord& r = ring[number % ring.size()];
    if (r.sequence <= after_sequence) continue;
    if (n < capacity) out[n] = r;
    ++n;
  }
  return n;
}

size_t read_reports(ReportRecord* out, size_t capacity) {
  std::lock_guard<std::mutex> guard(lock);
  for (size_t i = 0; i < reports.size() && i < capacity; ++i) out[i] = reports[i];
  return reports.size();
}

size_t dropped_records() { return trace_lost; }
size_t dropped_reports() { return reports_lost; }

void clear_journal() {
  std::lock_guard<std::mutex> guard(lock);
  in_ring = 0;
  reports.clear();
  reported.clear();
  for (auto& error : device_errors) error = {};
  for (auto& c : counters) c = 0;
  trace_lost = reports_lost = 0;
}

}  // namespace halsim
