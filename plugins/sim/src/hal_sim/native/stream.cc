#include "stream.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <set>
#include <thread>

#include "options.h"

namespace halsim {

namespace {

auto& lock = *new std::mutex;
auto& live = *new std::set<Stream*>;
auto& all = *new std::set<Stream*>;                      // destroyed ones stay until their work is done
auto& departed = *new std::vector<Clock>(kMaxDevices);  // what the streams that are gone did last, by device
int next_id = 0;
std::atomic<long> pending{0};
std::atomic<bool> forked{false};

using Time = std::chrono::steady_clock::time_point;
Time deadline_after(long timeout_ms) {
  return std::chrono::steady_clock::now() +
         std::chrono::milliseconds(timeout_ms < 0 ? options.wait_limit_ms.load() : timeout_ms);
}

// In the child of a fork no mutex may be locked: a worker may have held it, and is in the parent. So each call that comes to a
// stream asks for this first; the child has one thread.
Status after_fork(const Stream* s, uint64_t upto) {
  if (s->done >= upto) return Status::ok;
  return fail(Status::forked, "this process was forked: the workers of its streams are in the parent");
}

bool may_run(const Stream& s) {
  if (s.queue.empty() || s.held) return false;
  return s.closing || s.demand > s.done || options.mode != kLazy;
}

void run_tasks(Stream* s) {
  std::unique_lock<std::mutex> guard(s->mutex);
  for (;;) {
    s->changed.wait(guard, [&] { return may_run(*s) || (s->closing && s->queue.empty()); });
    if (s->queue.empty()) return;  // closing
    Task task = std::move(s->queue.front());
    s->queue.pop_front();
    s->running = task.op;
    guard.unlock();
    if (long us = options.delay_us) std::this_thread::sleep_for(std::chrono::microseconds(us));
    has_run(*task.op);
    for (const auto& r : task.op->ranges) note_access(task.op, r.begin, r.bytes, r.write);
    task.run(task.op);
    task.run = nullptr;
    Clock().swap(task.op->after);  // one number for each stream so far; later operations compare its tick only
    guard.lock();
    // Only now: a stream whose last operation still runs is not done, although nothing is queued on it.
    s->running = nullptr;
    ++s->done;
    while (!s->stamps.empty() && s->stamps.front().upto <= s->done) {
      *s->stamps.front().at = device_time();
      s->stamps.pop_front();
    }
    --pending;
    s->changed.notify_all();
  }
}

void work(Stream* s) {
  run_tasks(s);
  std::lock_guard<std::mutex> guard(lock);
  all.erase(s);
  Clock& clock = departed[s->device];
  const Clock last = clock_of(s->line);
  if (clock.size() < last.size()) clock.resize(last.size(), 0);
  for (size_t i = 0; i < last.size(); ++i) clock[i] = std::max(clock[i], last[i]);
  retire_line(s->line);
}

Status wait_until_reached(Stream* s, uint64_t upto, Time deadline) {
  if (forked) return after_fork(s, upto);
  std::unique_lock<std::mutex> guard(s->mutex);
  if (s->done >= upto) return Status::ok;
  count(Kind::blocked_wait);
  if (upto > s->demand) s->demand = upto;
  s->changed.notify_all();
  if (s->changed.wait_until(guard, deadline, [&] { return s->done >= upto; })) return Status::ok;
  return fail(Status::timeout, "stream %d has %llu of %llu operations done when the time is over%s", s->id,
              static_cast<unsigned long long>(s->done), static_cast<unsigned long long>(upto),
              s->held ? "; it is held" : "");
}

// A worker waits for another stream. If that one is held, this one is blocked, and eager callers must not wait.
void await_other(Stream* s, Stream* other, uint64_t upto) {
  std::unique_lock<std::mutex> guard(other->mutex);
  if (upto > other->demand) other->demand = upto;
  other->changed.notify_all();
  while (other->done < upto) {
    const bool stuck = other->held || other->blocked;
    if (stuck != s->blocked) {
      s->blocked = stuck;
      s->changed.notify_all();
    }
    other->changed.wait_for(guard, std::chrono::milliseconds(20));
  }
  s->blocked = false;
}

Status enqueue_locked(Stream* s, std::unique_lock<std::mutex>& guard, Task task) {
  ++pending;  // first: a host access that does not know of this work yet must be kept for it
  order_on_stream(*task.op, s->line);
  s->queue.push_back(std::move(task));
  const uint64_t upto = ++s->submitted;
  if (options.mode != kEager) {
    if (may_run(*s)) s->changed.notify_all();
    return Status::ok;
  }
  s->changed.notify_all();
  while (s->done < upto && !s->held && !s->blocked) s->changed.wait_for(guard, std::chrono::milliseconds(5));
  return Status::ok;
}

void install_fork_handler() {
  static const bool once = [] {
    pthread_atfork(nullptr, nullptr, [] { forked = true; });
    return true;
  }();
  static_cast<void>(once);
}

}  // namespace

Status wait_reached(Stream* s, uint64_t upto, long timeout_ms) {
  return wait_until_reached(s, upto, deadline_after(timeout_ms));
}

Status submit_wait_locked(Stream* s, std::unique_lock<std::mutex>& guard, OperationRef op, Stream* other,
                          uint64_t upto) {
  return enqueue_locked(s, guard,
                        {std::move(op), [s, other, upto](const OperationRef&) { await_other(s, other, upto); }});
}

int64_t device_time() {
  return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

long pending_tasks() { return pending; }
bool in_forked_child() { return forked; }

// Whether a stream of the device is held.
static bool any_held(int device) {
  std::lock_guard<std::mutex> guard(lock);
  for (Stream* s : live) {
    std::lock_guard<std::mutex> own(s->mutex);
    if (s->device == device && s->held) return true;
  }
  return false;
}

// Option creation_waits: real drivers make every few dozenth stream wait for work under way.
static Status await_none_held(int device) {
  auto deadline = deadline_after(options.wait_limit_ms);
  while (any_held(device)) {
    if (std::chrono::steady_clock::now() >= deadline) {
      return fail(Status::timeout, "no stream is made while another one is held (option creation_waits)");
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return Status::ok;
}

Status create_stream(int device, Stream** out) {
  if (device < 0 || device >= options.devices) {
    return fail(Status::invalid, "device %d does not exist, there are %ld", device, options.devices.load());
  }
  if (forked) return fail(Status::forked, "this process was forked: open the device in the child's own process");
  install_fork_handler();
  if (options.creation_waits) {
    Status status = await_none_held(device);
    if (status != Status::ok) return status;
  }
  auto* s = new Stream;
  s->device = device;
  s->line = new_line();
  {
    std::lock_guard<std::mutex> guard(lock);
    s->id = next_id++;
    all.insert(s);
    live.insert(s);
  }
  std::thread(work, s).detach();
  new_operation(Kind::stream_create, device, s->id, reinterpret_cast<uint64_t>(s), 0, 0);
  *out = s;
  return Status::ok;
}

Status check_stream(const Stream* stream) {
  std::lock_guard<std::mutex> guard(lock);
  if (live.count(const_cast<Stream*>(stream))) return Status::ok;
  return fail(Status::invalid, "%p is no stream, or a destroyed one", static_cast<const void*>(stream));
}

long stream_id(const Stream* stream) { return check_stream(stream) == Status::ok ? stream->id : -1; }

Status destroy_stream(Stream* s) {
  if (forked) return Status::ok;
  {
    std::lock_guard<std::mutex> guard(lock);
    if (!live.erase(s)) return fail(Status::invalid, "%p is no stream, or a destroyed one", static_cast<void*>(s));
  }
  new_operation(Kind::stream_destroy, s->device, s->id, reinterpret_cast<uint64_t>(s), 0, 0);
  std::lock_guard<std::mutex> guard(s->mutex);
  s->closing = true;
  s->held = false;
  s->changed.notify_all();
  return Status::ok;
}

Status hold_stream(Stream* s, bool hold) {
  if (forked) return after_fork(s, s->submitted);
  Status status = check_stream(s);
  if (status != Status::ok) return status;
  std::lock_guard<std::mutex> guard(s->mutex);
  s->held = hold;
  s->changed.notify_all();
  return Status::ok;
}

long pending_of(Stream* s) {
  std::lock_guard<std::mutex> guard(s->mutex);
  return static_cast<long>(s->submitted - s->done);
}

Status query_stream(Stream* s, bool* done) {
  if (forked) {
    *done = s->done >= s->submitted;
    return Status::ok;
  }
  Status status = check_stream(s);
  if (status != Status::ok) return status;
  count(Kind::stream_query);
  Clock clock;
  {
    std::lock_guard<std::mutex> guard(s->mutex);
    *done = s->done == s->submitted;
    if (*done) clock = clock_of(s->line);
  }
  if (*done) join_host(clock);
  return Status::ok;
}

Status wait_stream(Stream* s, long timeout_ms) {
  if (forked) return after_fork(s, s->submitted);
  Status status = check_stream(s);
  if (status != Status::ok) return status;
  new_operation(Kind::wait_stream, s->device, s->id, 0, 0, 0);
  uint64_t upto;
  Clock clock;
  {
    std::lock_guard<std::mutex> guard(s->mutex);
    upto = s->submitted;
    clock = clock_of(s->line);
  }
  status = wait_reached(s, upto, timeout_ms);
  if (status != Status::ok) return status;
  join_host(clock);
  return take_device_error(s->device);
}

Status wait_device(int device, long timeout_ms) {
  new_operation(Kind::wait_device, device, -1, 0, 0, 0);
  std::vector<Stream*> streams;
  Clock gone;
  {
    std::lock_guard<std::mutex> guard(lock);
    for (auto* s : all) {
      if (s->device == device) streams.push_back(s);
    }
    if (device >= 0 && device < kMaxDevices) gone = departed[device];
  }
  join_host(gone);
  const Time deadline = deadline_after(timeout_ms);
  for (auto* s : streams) {
    uint64_t upto;
    Clock clock;
    {
      std::lock_guard<std::mutex> guard(s->mutex);
      upto = s->submitted;
      clock = clock_of(s->line);
    }
    Status status = wait_until_reached(s, upto, deadline);
    if (status != Status::ok) return status;
    join_host(clock);
  }
  return take_device_error(device);
}

Status submit(Stream* s, Kind kind, uint64_t dst, uint64_t src, uint64_t bytes, std::vector<Range> ranges,
              std::function<void(const OperationRef&)> run) {
  if (forked) return fail(Status::forked, "this process was forked: the workers of its streams are in the parent");
  Status status = check_stream(s);
  if (status != Status::ok) return status;
  if (countdown(options.fail_submission)) return fail(Status::refused, "%s refused on purpose", kind_name(kind));
  std::unique_lock<std::mutex> guard(s->mutex);
  auto op = new_operation(kind, s->device, s->id, dst, src, bytes);
  op->ranges = std::move(ranges);
  return enqueue_locked(s, guard, {std::move(op), std::move(run)});
}

std::vector<OperationRef> pending_on(uintptr_t begin, size_t bytes) {
  std::vector<OperationRef> found;
  if (!pending) return found;
  auto look = [&](const OperationRef& op) {
    for (const auto& r : op->ranges) {
      if (r.begin < begin + bytes && begin < r.begin + r.bytes) {
        found.push_back(op);
        return;
      }
    }
  };
  std::vector<Stream*> streams;
  {
    std::lock_guard<std::mutex> guard(lock);
    streams.assign(all.begin(), all.end());
  }
  for (auto* s : streams) {
    std::lock_guard<std::mutex> guard(s->mutex);
    if (s->running) look(s->running);
    for (const auto& task : s->queue) look(task.op);
  }
  return found;
}

}  // namespace halsim
