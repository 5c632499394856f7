/* When the GIL is released.

   A call on a stream whose launch queue is full waits until the device has executed something, for an unlimited time. So
   the work in flight on each stream is counted (copies and launches; events and waits take no room in a queue). At intervals
   an event is recorded: once it has passed, so has the work before it. Beyond BOUND, far below a queue's capacity, the GIL is
   released around a call. Beyond ROOM Python waits for that event first, up to its deadline (G3), and then submits the work. */
#include "native.h"

/* Query an event. A capture in another thread forbids that and is invalidated by it, unless this thread's mode is relaxed. */
Status ask(Driver *driver, Handle event) {
  int mode = 2; /* CU_STREAM_CAPTURE_MODE_RELAXED */
  Status exchanged = driver->exchange(&mode), status = driver->query(event);
  if (!exchanged) driver->exchange(&mode);
  return status;
}

static void look(Driver *driver, Lane *lane) {
  while (lane->count && ask(driver, lane->marks[lane->first].event) == 0) {
    lane->passed = lane->marks[lane->first].at;
    lane->first = (lane->first + 1) % MARKS;
    lane->count--;
  }
}

static int is_busy(const Lane *lane) { return lane->issued != lane->passed; }

static void count_busy(Driver *driver) {
  int busy = 0;
  for (int i = 0; i < LANES; i++) busy += is_busy(&driver->lanes[i]);
  driver->crowded = busy > LANES / 2;
}

/* The lane of a stream; NULL if so many streams are busy that this one is not counted. Most calls find it in `near`, at the
   first try: all lanes together exceed a processor's first-level cache. */
static Lane *lane_of(Driver *driver, Handle stream) {
  Lane **near = &driver->near[((uintptr_t)stream >> 4 ^ (uintptr_t)stream >> 12 ^ (uintptr_t)stream) % NEAR];
  if (*near && (*near)->issued && (*near)->stream == stream) return *near;
  Lane *unused = NULL, *found = NULL;
  for (int i = 0; i < LANES && !found; i++) {
    Lane *lane = &driver->lanes[i];
    if (lane->issued && lane->stream == stream) found = lane;
    else if (!unused && !is_busy(lane)) unused = lane;
  }
  for (int i = 0; !found && !unused && i < LANES; i++) {
    look(driver, &driver->lanes[i]);
    if (!is_busy(&driver->lanes[i])) unused = &driver->lanes[i];
  }
  if (!found && unused) unused->stream = stream, unused->issued = unused->marked = unused->passed = 0;
  return *near = found ? found : unused;
}

/* 0 if the stream has room for a call's work, else -1 with an exception. Python may run meanwhile, and change lanes. */
int has_room(Driver *driver, Handle stream, uint64_t room) {
  for (;;) {
    Lane *lane = lane_of(driver, stream);
    if (!lane || lane->issued - lane->passed < room) return 0;
    look(driver, lane);
    if (lane->issued - lane->passed < room || !lane->count) return 0;
    PyObject *waited = PyObject_CallFunction(driver->full, "KK", (unsigned long long)(uintptr_t)stream,
                                             (unsigned long long)(uintptr_t)lane->marks[lane->first].event);
    if (!waited) return -1;
    Py_DECREF(waited);
  }
}

/* Return the place of a lane's next mark. If all marks are in flight, the last one is recorded again. */
static int place_of(const Lane *lane) { return (lane->first + (lane->count < MARKS ? lane->count : MARKS - 1)) % MARKS; }

static void marked(Lane *lane, int place) {
  lane->marks[place].at = lane->marked = lane->issued;
  if (lane->count < MARKS) lane->count++;
}

/* Record a mark behind the work already on a stream, so that the count of a call with many parts excludes finished work. */
void mark_now(Driver *driver, Handle stream) {
  Lane *lane = lane_of(driver, stream);
  if (!lane || lane->issued == lane->marked) return;
  int place = place_of(lane);
  Handle *event = &lane->marks[place].event;
  if ((*event || driver->create(event, 2) == 0) && driver->record(*event, stream) == 0) marked(lane, place);
}

/* If few lanes are left, each call's work gets its own mark, so that idle lanes are recognized. */
void turn_begin(Driver *driver, Turn *turn, Handle stream, int work) {
  turn->lane = NULL;
  turn->saved = NULL;
  turn->mark = NULL;
  if (!work) return;
  Lane *lane = turn->lane = lane_of(driver, stream);
  if (lane) {
    if (lane->issued - lane->passed >= APART) look(driver, lane);
    int idle = !is_busy(lane);
    lane->issued += work;
    if (idle) count_busy(driver);
    if (lane->issued - lane->marked >= (driver->crowded ? 1 : APART)) {
      turn->place = place_of(lane);
      Handle *event = &lane->marks[turn->place].event;
      if (*event || driver->create(event, 2) == 0) turn->mark = *event; /* CU_EVENT_DISABLE_TIMING */
    }
  }
  if (!lane || lane->issued - lane->passed > BOUND) {
    driver->given_up++;
    turn->saved = PyEval_SaveThread();
  }
}

void turn_end(Turn *turn, Driver *driver, Handle stream) {
  int recorded = turn->mark && driver->record(turn->mark, stream) == 0;
  if (turn->saved) PyEval_RestoreThread(turn->saved);
  if (recorded) marked(turn->lane, turn->place);
}
