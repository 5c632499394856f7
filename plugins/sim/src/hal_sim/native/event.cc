#include <set>

#include "options.h"
#include "stream.h"

namespace halsim {

static auto& lock = *new std::mutex;
static auto& events = *new std::set<Event*>;

Status create_event(Event** out) {
  *out = new Event;
  count(Kind::event_create);
  std::lock_guard<std::mutex> guard(lock);
  events.insert(*out);
  return Status::ok;
}

Status check_event(const Event* event) {
  std::lock_guard<std::mutex> guard(lock);
  if (events.count(const_cast<Event*>(event))) return Status::ok;
  return fail(Status::invalid, "%p is no event, or a destroyed one", static_cast<const void*>(event));
}

Status destroy_event(Event* event) {
  {
    std::lock_guard<std::mutex> guard(lock);
    if (!events.erase(event)) {
      return fail(Status::invalid, "%p is no event, or a destroyed one", static_cast<void*>(event));
    }
  }
  count(Kind::event_destroy);
  delete event;
  return Status::ok;
}

Status record_event(Event* e, Stream* s) {
  Status status = check_event(e);
  if (status == Status::ok) status = check_stream(s);
  if (status != Status::ok) return status;
  auto op = new_operation(Kind::event_record, s->device, s->id, reinterpret_cast<uint64_t>(e), 0, 0);
  std::lock_guard<std::mutex> guard(s->mutex);
  order_on_stream(*op, s->line);
  std::lock_guard<std::mutex> event_guard(e->mutex);
  e->stream = s;
  e->upto = s->submitted;
  e->clock = op->after;
  e->polls = 0;
  if (e->timed) {
    e->passed_at = std::make_shared<std::atomic<int64_t>>(s->done >= e->upto ? device_time() : 0);
    if (s->done < e->upto) s->stamps.push_back({e->upto, e->passed_at});
  }
  has_run(*op);
  return Status::ok;
}

Status time_event(Event* e) {
  Status status = check_event(e);
  if (status == Status::ok) e->timed = true;
  return status;
}

static int64_t passed_at(Event* e) {
  std::lock_guard<std::mutex> guard(e->mutex);
  return e->passed_at ? e->passed_at->load() : 0;
}

Status event_seconds(Event* earlier, Event* e, double* out) {
  Status status = check_event(earlier);
  if (status == Status::ok) status = check_event(e);
  if (status != Status::ok) return status;
  const int64_t from = passed_at(earlier), to = passed_at(e);
  if (!from || !to) return fail(Status::invalid, "%s", "an event without timing, or one that has not passed");
  *out = static_cast<double>(to - from) * 1e-9;
  return Status::ok;
}

namespace {
struct Recorded {
  Stream* stream;
  uint64_t upto;
  Clock clock;
};
// A copy, so that the event's lock is never held while a stream's is asked for (recording asks the other way round).
Recorded recorded(Event* e) {
  std::lock_guard<std::mutex> guard(e->mutex);
  return {e->stream, e->upto, e->clock};
}
}  // namespace

Status query_event(Event* e, bool* done) {
  Status status = check_event(e);
  if (status != Status::ok) return status;
  count(Kind::event_query);
  const Recorded at = recorded(e);
  *done = true;
  if (!at.stream) return Status::ok;
  {
    std::lock_guard<std::mutex> guard(at.stream->mutex);
    *done = at.stream->done >= at.upto;
    if (!*done && options.mode == kLazy && ++e->polls >= options.polls) {  // a polling loop must end some day
      if (at.upto > at.stream->demand) at.stream->demand = at.upto;
      at.stream->changed.notify_all();
    }
  }
  if (*done) join_host(at.clock);
  return Status::ok;
}

Status wait_event(Event* e, long timeout_ms) {
  Status status = check_event(e);
  if (status != Status::ok) return status;
  const Recorded at = recorded(e);
  const int device = at.stream ? at.stream->device : -1, id = at.stream ? at.stream->id : -1;
  new_operation(Kind::wait_event, device, id, reinterpret_cast<uint64_t>(e), 0, 0);
  if (!at.stream) return Status::ok;
  status = wait_reached(at.stream, at.upto, timeout_ms);
  if (status != Status::ok) return status;
  join_host(at.clock);
  return take_device_error(device);
}

Status stream_wait_event(Stream* s, Event* e) {
  Status status = check_event(e);
  if (status == Status::ok) status = check_stream(s);
  if (status != Status::ok) return status;
  const Recorded at = recorded(e);
  std::unique_lock<std::mutex> guard(s->mutex);
  auto op = new_operation(Kind::stream_wait, s->device, s->id, reinterpret_cast<uint64_t>(e), 0, 0);
  join_line(s->line, at.clock);
  if (at.stream && at.stream != s) return submit_wait_locked(s, guard, op, at.stream, at.upto);
  order_on_stream(*op, s->line);
  has_run(*op);
  return Status::ok;
}

}  // namespace halsim
