// Streams (one worker thread each) and events.
#pragma once
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>

#include "journal.h"
#include "order.h"

namespace halsim {

struct Task {
  OperationRef op;
  std::function<void(const OperationRef&)> run;
};

// The time at which a stream has done so many operations, for a timed event.
struct Stamp {
  uint64_t upto;
  std::shared_ptr<std::atomic<int64_t>> at;
};

// Never deleted, since events may still name it; its thread ends when it is destroyed and its work is done.
struct Stream {
  int device = 0, id = 0;
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Task> queue;
  std::deque<Stamp> stamps;
  OperationRef running;
  uint64_t submitted = 0, done = 0;
  uint64_t demand = 0;  // lazy: somebody waits for the work up to here
  bool held = false, closing = false;
  std::atomic<bool> blocked{false};  // its worker waits for a stream that is held
  Line line;                         // guarded by `mutex`, its clock by the checker
};

struct Event {
  std::mutex mutex;
  bool timed = false;
  std::shared_ptr<std::atomic<int64_t>> passed_at;  // of a timed event: nanoseconds, 0 until it passes
  Stream* stream = nullptr;  // nullptr: never recorded, which counts as done
  uint64_t upto = 0;
  Clock clock;
  std::atomic<long> polls{0};
};

Status create_stream(int device, Stream** out);
Status destroy_stream(Stream* stream);  // what was put on it still runs
Status check_stream(const Stream* stream);
Status hold_stream(Stream* stream, bool hold);
Status query_stream(Stream* stream, bool* done);
Status wait_stream(Stream* stream, long timeout_ms);  // below 0: the option wait_limit_ms
Status wait_device(int device, long timeout_ms);
long pending_of(Stream* stream);
long stream_id(const Stream* stream);  // -1 for a stream that is no more

Status create_event(Event** out);
Status destroy_event(Event* event);
Status check_event(const Event* event);
Status record_event(Event* event, Stream* stream);
Status time_event(Event* event);  // it notes the time at which it passes, from its next record on
Status event_seconds(Event* earlier, Event* event, double* out);
Status query_event(Event* event, bool* done);
Status wait_event(Event* event, long timeout_ms);
Status stream_wait_event(Stream* stream, Event* event);

// Puts an operation on a stream. `ranges` is what it is known to touch; they are noted just before it runs.
Status submit(Stream* stream, Kind kind, uint64_t dst, uint64_t src, uint64_t bytes, std::vector<Range> ranges,
              std::function<void(const OperationRef&)> run);

// For events: wait until a stream is that far; put a wait for another stream on a stream whose lock is held.
Status wait_reached(Stream* stream, uint64_t upto, long timeout_ms);
Status submit_wait_locked(Stream* stream, std::unique_lock<std::mutex>& guard, OperationRef op, Stream* other,
                          uint64_t upto);

int64_t device_time();  // nanoseconds of a clock that never goes back

long pending_tasks();  // on all streams
std::vector<OperationRef> pending_on(uintptr_t begin, size_t bytes);
bool in_forked_child();

}  // namespace halsim
