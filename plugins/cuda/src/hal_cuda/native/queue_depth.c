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

static void look(Driver *driver, Queue *queue) {
  while (queue->count && ask(driver, queue->marks[queue->first].event) == 0) {
    queue->passed = queue->marks[queue->first].at;
    queue->first = (queue->first + 1) % MARKS;
    queue->count--;
  }
}

static int is_busy(const Queue *queue) { return queue->issued != queue->passed; }

static void count_busy(Driver *driver) {
  int busy = 0;
  for (int i = 0; i < QUEUES; i++) busy += is_busy(&driver->queues[i]);
  driver->crowded = busy > QUEUES / 2;
}

/* The queue of a stream; NULL if so many streams are busy that this one is not counted. Most calls find it in `near`, at the
   first try: all queues together exceed a processor's first-level cache. */
static Queue *queue_of(Driver *driver, Handle stream) {
  Queue **near = &driver->near[((uintptr_t)stream >> 4 ^ (uintptr_t)stream >> 12 ^ (uintptr_t)stream) % NEAR];
  if (*near && (*near)->issued && (*near)->stream == stream) return *near;
  Queue *unused = NULL, *found = NULL;
  for (int i = 0; i < QUEUES && !found; i++) {
    Queue *queue = &driver->queues[i];
    if (queue->issued && queue->stream == stream) found = queue;
    else if (!unused && !is_busy(queue)) unused = queue;
  }
  for (int i = 0; !found && !unused && i < QUEUES; i++) {
    look(driver, &driver->queues[i]);
    if (!is_busy(&driver->queues[i])) unused = &driver->queues[i];
  }
  if (!found && unused) unused->stream = stream, unused->issued = unused->marked = unused->passed = 0;
  return *near = found ? found : unused;
}

/* 0 if the stream has room for a call's work, else -1 with an exception. Python may run meanwhile, and change queues. */
int has_room(Driver *driver, Handle stream, uint64_t room) {
  for (;;) {
    Queue *queue = queue_of(driver, stream);
    if (!queue || queue->issued - queue->passed < room) return 0;
    look(driver, queue);
    if (queue->issued - queue->passed < room || !queue->count) return 0;
    PyObject *waited = PyObject_CallFunction(driver->full, "KK", (unsigned long long)(uintptr_t)stream,
                                             (unsigned long long)(uintptr_t)queue->marks[queue->first].event);
    if (!waited) return -1;
    Py_DECREF(waited);
  }
}

/* Return the place of a queue's next mark. If all marks are in flight, the last one is recorded again. */
static int place_of(const Queue *queue) { return (queue->first + (queue->count < MARKS ? queue->count : MARKS - 1)) % MARKS; }

static void marked(Queue *queue, int place) {
  queue->marks[place].at = queue->marked = queue->issued;
  if (queue->count < MARKS) queue->count++;
}

/* Record a mark behind the work already on a stream, so that the count of a call with many parts excludes finished work. */
void mark_now(Driver *driver, Handle stream) {
  Queue *queue = queue_of(driver, stream);
  if (!queue || queue->issued == queue->marked) return;
  int place = place_of(queue);
  Handle *event = &queue->marks[place].event;
  if ((*event || driver->create(event, 2) == 0) && driver->record(*event, stream) == 0) marked(queue, place);
}

/* If few queues are left, each call's work gets its own mark, so that idle queues are recognized. */
void turn_begin(Driver *driver, Turn *turn, Handle stream, int work) {
  turn->queue = NULL;
  turn->saved = NULL;
  turn->mark = NULL;
  if (!work) return;
  Queue *queue = turn->queue = queue_of(driver, stream);
  if (queue) {
    if (queue->issued - queue->passed >= APART) look(driver, queue);
    int idle = !is_busy(queue);
    queue->issued += work;
    if (idle) count_busy(driver);
    if (queue->issued - queue->marked >= (driver->crowded ? 1 : APART)) {
      turn->place = place_of(queue);
      Handle *event = &queue->marks[turn->place].event;
      if (*event || driver->create(event, 2) == 0) turn->mark = *event; /* CU_EVENT_DISABLE_TIMING */
    }
  }
  if (!queue || queue->issued - queue->passed > BOUND) {
    driver->given_up++;
    turn->saved = PyEval_SaveThread();
  }
}

void turn_end(Turn *turn, Driver *driver, Handle stream) {
  int recorded = turn->mark && driver->record(turn->mark, stream) == 0;
  if (turn->saved) PyEval_RestoreThread(turn->saved);
  if (recorded) marked(turn->queue, turn->place);
}
