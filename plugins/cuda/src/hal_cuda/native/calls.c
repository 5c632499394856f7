/* The driver's calls. Only a call that might wait for room in a launch queue releases the GIL. */
#include "native.h"
#include <sched.h>
#include <time.h>

#define FUNCTIONS 15 /* CALLS of native.py */
#define GRAPHS 16 /* most parts of one call */

/* Convert a call's arguments to whole numbers and handles. 0, or -1 with an exception. */
static int numbers(PyObject *const *args, Py_ssize_t count, unsigned long long *out, Py_ssize_t wanted, const char *call) {
  if (count != wanted) {
    PyErr_Format(PyExc_TypeError, "%s takes %zd whole numbers, not %zd", call, wanted, count);
    return -1;
  }
  for (Py_ssize_t i = 0; i < wanted; i++) {
    out[i] = PyLong_AsUnsignedLongLong(args[i]);
    if (out[i] == (unsigned long long)-1 && PyErr_Occurred()) return -1;
  }
  return 0;
}
#define NUMBERS(call, wanted)                                       \
  Driver *driver = (Driver *)self;                                  \
  unsigned long long a[wanted];                                     \
  if (numbers(args, count, a, wanted, call)) return NULL
#define HANDLE(number) ((Handle)(uintptr_t)(number))

static PyObject *run(PyObject *self, PyObject *const *args, Py_ssize_t count) {
  NUMBERS("run", 12);
  Work work = {.to = a[0], .from = a[1], .nbytes = (size_t)a[2], .up = HANDLE(a[3]), .arrival = HANDLE(a[4]),
               .stream = HANDLE(a[5]), .function = HANDLE(a[6]), .blocks = (unsigned)a[7], .rows = (unsigned)a[8],
               .threads = (unsigned)a[9], .params = (void **)(uintptr_t)a[10], .event = HANDLE(a[11])};
  if (refused(driver, work.stream) || perform(driver, &work)) return NULL;
  Py_RETURN_NONE;
}

static PyObject *put(PyObject *self, PyObject *const *args, Py_ssize_t count) {
  Py_buffer data;
  if (!count || PyObject_GetBuffer(args[0], &data, PyBUF_SIMPLE)) {
    if (!count) PyErr_SetString(PyExc_TypeError, "put takes bytes and 5 whole numbers");
    return NULL;
  }
  unsigned long long a[5] = {0}; /* span, room in it, to, stream, event */
  int bad = numbers(args + 1, count - 1, a, 5, "put");
  if (!bad && (unsigned long long)data.len > a[1]) bad = -1, PyErr_SetString(PyExc_ValueError, "the bytes do not fit");
  if (!bad && data.len > 1 << 18) { /* a copy long enough that other threads should run meanwhile */
    PyThreadState *saved = PyEval_SaveThread();
    memcpy((void *)(uintptr_t)a[0], data.buf, (size_t)data.len);
    PyEval_RestoreThread(saved);
  } else if (!bad) {
    memcpy((void *)(uintptr_t)a[0], data.buf, (size_t)data.len);
  }
  Work work = {.to = a[2], .from = a[0], .nbytes = (size_t)data.len, .up = HANDLE(a[3]), .stream = HANDLE(a[3]),
               .event = HANDLE(a[4])};
  PyBuffer_Release(&data);
  if (bad || perform((Driver *)self, &work)) return NULL;
  Py_RETURN_NONE;
}

static PyObject *write_out(PyObject *self, PyObject *const *args, Py_ssize_t count) {
  NUMBERS("write_out", 6);
  void *params[] = {&a[0], &a[1], &a[2]}; /* of hal_copy_out */
  Work work = {.stream = HANDLE(a[3]), .function = a[2] ? HANDLE(a[4]) : NULL, .rows = 1, .threads = THREADS,
               .blocks = (unsigned)((a[2] + WRITTEN - 1) / WRITTEN), .params = params, .event = HANDLE(a[5])};
  if (refused(driver, work.stream) || perform(driver, &work)) return NULL;
  Py_RETURN_NONE;
}

static PyObject *copy_out(PyObject *self, PyObject *const *args, Py_ssize_t count) {
  Driver *driver = (Driver *)self;
  unsigned long long a[5]; /* to, after, stream, before, event */
  if (count != 6 || !PyTuple_Check(args[5]))
    return PyErr_Format(PyExc_TypeError, "copy_out takes 5 whole numbers and a tuple of addresses and lengths");
  if (numbers(args, 5, a, 5, "copy_out")) return NULL;
  Py_ssize_t parts = PyTuple_Size(args[5]) / 2;
  for (Py_ssize_t i = 0; i < 2 * parts; i++) { /* all of them before the first copy */
    unsigned long long number = PyLong_AsUnsignedLongLong(PyTuple_GetItem(args[5], i));
    if (number == (unsigned long long)-1 && PyErr_Occurred()) return NULL;
  }
  if (refused(driver, HANDLE(a[1])) || has_room(driver, HANDLE(a[2]), OWN)) return NULL;
  driver->working = PyThread_get_thread_ident();
  Turn turn;
  if (parts > APART) mark_now(driver, HANDLE(a[2]));
  Status status = driver->record(HANDLE(a[3]), HANDLE(a[1]));
  const char *call = "cuEventRecord";
  for (Py_ssize_t i = 0; !status && i <= parts; i++) { /* the copies, and the event behind the last one */
    Address from = i < parts ? PyLong_AsUnsignedLongLong(PyTuple_GetItem(args[5], 2 * i)) : 0;
    size_t nbytes = i < parts ? (size_t)PyLong_AsUnsignedLongLong(PyTuple_GetItem(args[5], 2 * i + 1)) : 0;
    if (nbytes && i && has_room(driver, HANDLE(a[2]), OWN)) return NULL; /* of many parts */
    turn_begin(driver, &turn, HANDLE(a[2]), nbytes > 0);
    if (i == 0) status = driver->wait(HANDLE(a[2]), HANDLE(a[3]), 0), call = "cuStreamWaitEvent";
    if (!status && nbytes)
      status = driver->download((void *)(uintptr_t)a[0], from, nbytes, HANDLE(a[2])), call = "cuMemcpyDtoHAsync";
    if (!status && i == parts) status = driver->record(HANDLE(a[4]), HANDLE(a[2])), call = "cuEventRecord";
    turn_end(&turn, driver, HANDLE(a[2]));
    a[0] += nbytes;
  }
  if (status) return failed(driver, status, call), NULL;
  Py_RETURN_NONE;
}

/* If the element consists of one repeated 32-bit word, set `word` and return 1; else return 0. */
static int word_of(const Py_buffer *element, uint32_t *word) {
  unsigned char bytes[8];
  if (element->len < 1 || element->len > 8 || 8 % element->len) return 0;
  for (int i = 0; i < 8; i++) bytes[i] = ((const unsigned char *)element->buf)[i % element->len];
  memcpy(word, bytes, 4);
  return !memcmp(bytes, bytes + 4, 4);
}

static PyObject *fill(PyObject *self, PyObject *const *args, Py_ssize_t count) {
  Driver *driver = (Driver *)self;
  Py_buffer element;
  unsigned long long a[4] = {0}; /* address, bytes, stream, event */
  uint32_t word = 0;
  Turn turn;
  if (!count || PyObject_GetBuffer(args[0], &element, PyBUF_SIMPLE)) {
    if (!count) PyErr_SetString(PyExc_TypeError, "fill takes an element and 4 whole numbers");
    return NULL;
  }
  int one = word_of(&element, &word);
  PyBuffer_Release(&element);
  if (numbers(args + 1, count - 1, a, 4, "fill")) return NULL;
  if (!one || (a[0] | a[1]) % 4) Py_RETURN_FALSE;
  Handle stream = HANDLE(a[2]);
  if (refused(driver, stream) || has_room(driver, stream, ROOM)) return NULL;
  driver->working = PyThread_get_thread_ident();
  turn_begin(driver, &turn, stream, 1);
  const char *call = "cuMemsetD32Async";
  Status status = driver->memset32(a[0], word, (size_t)(a[1] / 4), stream);
  if (!status) status = driver->record(HANDLE(a[3]), stream), call = "cuEventRecord";
  turn_end(&turn, driver, stream);
  if (status) return failed(driver, status, call), NULL;
  Py_RETURN_TRUE;
}

/* graph(stream, handles...): launch the caller's instantiated graphs in order. */
static PyObject *graphs(PyObject *self, PyObject *const *args, Py_ssize_t count) {
  Driver *driver = (Driver *)self;
  unsigned long long a[GRAPHS + 1];
  Turn turn;
  if (count < 1 || count > GRAPHS + 1)
    return PyErr_Format(PyExc_TypeError, "graphs takes a stream and at most %d graphs, not %zd numbers", GRAPHS, count);
  if (numbers(args, count, a, count, "graphs")) return NULL;
  Handle stream = HANDLE(a[0]);
  if (refused(driver, stream) || has_room(driver, stream, ROOM)) return NULL;
  driver->working = PyThread_get_thread_ident();
  turn_begin(driver, &turn, stream, (int)count - 1);
  Status status = 0;
  for (Py_ssize_t i = 1; !status && i < count; i++) status = driver->graph(HANDLE(a[i]), stream);
  turn_end(&turn, driver, stream);
  if (status) return failed(driver, status, "cuGraphLaunch"), NULL;
  Py_RETURN_NONE;
}

static PyObject *record(PyObject *self, PyObject *const *args, Py_ssize_t count) {
  NUMBERS("record", 2); /* event, stream */
  Work work = {.stream = HANDLE(a[1]), .event = HANDLE(a[0])};
  if (perform(driver, &work)) return NULL;
  Py_RETURN_NONE;
}

static PyObject *wait_for(PyObject *self, PyObject *const *args, Py_ssize_t count) {
  NUMBERS("wait", 2); /* stream, event */
  Status status = driver->wait(HANDLE(a[0]), HANDLE(a[1]), 0);
  if (status) return failed(driver, status, "cuStreamWaitEvent"), NULL;
  Py_RETURN_NONE;
}

static PyObject *query(PyObject *self, PyObject *const *args, Py_ssize_t count) {
  NUMBERS("query", 1);
  Status status = ask(driver, HANDLE(a[0])); /* never waits */
  if (status && status != 600) return failed(driver, status, "cuEventQuery"), NULL; /* CUDA_ERROR_NOT_READY */
  return PyBool_FromLong(!status);
}

static int64_t microseconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (int64_t)now.tv_sec * 1000000 + now.tv_nsec / 1000;
}

static PyObject *passes(PyObject *self, PyObject *const *args, Py_ssize_t count) {
  NUMBERS("passes", 2); /* event, microseconds: queries first, as the driver's own wait does */
  PyThreadState *saved = PyEval_SaveThread();
  int64_t end = microseconds() + (int64_t)a[1];
  Status status;
  while ((status = ask(driver, HANDLE(a[0]))) == 600 && microseconds() < end) sched_yield();
  PyEval_RestoreThread(saved);
  if (status && status != 600) return failed(driver, status, "cuEventQuery"), NULL;
  return PyBool_FromLong(!status);
}

static PyObject *room(PyObject *self, PyObject *const *args, Py_ssize_t count) {
  NUMBERS("room", 1);
  if (has_room(driver, HANDLE(a[0]), ROOM)) return NULL;
  Py_RETURN_NONE;
}

static PyObject *capturing(PyObject *self, PyObject *const *args, Py_ssize_t count) {
  NUMBERS("capturing", 1);
  int state = 0;
  Status status = driver->capturing(HANDLE(a[0]), &state);
  if (status == 906) state = 1, status = 0; /* the default stream, while a stream that waits for it is captured */
  if (status) return failed(driver, status, "cuStreamIsCapturing"), NULL;
  return PyBool_FromLong(state);
}

static PyObject *tell_context(PyObject *self, PyObject *const *args, Py_ssize_t count) {
  NUMBERS("context", 1);
  driver->context = HANDLE(a[0]);
  Py_RETURN_NONE;
}

/* Make a call with the device's context current, from any thread; the thread's former context is restored. */
typedef PyObject *(*Call)(PyObject *, PyObject *const *, Py_ssize_t);
static PyObject *within(PyObject *self, PyObject *const *args, Py_ssize_t count, Call call) {
  Driver *driver = (Driver *)self;
  Handle before = NULL;
  if (!driver->context || (driver->current(&before) == 0 && before == driver->context)) return call(self, args, count);
  Status status = driver->push(driver->context);
  if (status) return failed(driver, status, "cuCtxPushCurrent"), NULL;
  PyObject *result = call(self, args, count);
  driver->pop(&before);
  return result;
}
#define WITHIN(call)                                                                              \
  static PyObject *call##_within(PyObject *self, PyObject *const *args, Py_ssize_t count) { \
    return within(self, args, count, call);                                                       \
  }

static PyObject *exchange(PyObject *self, PyObject *const *args, Py_ssize_t count) {
  NUMBERS("exchange", 1);
  int mode = (int)a[0];
  Status status = driver->exchange(&mode);
  if (status) return failed(driver, status, "cuThreadExchangeStreamCaptureMode"), NULL;
  return PyLong_FromLong(mode);
}

static PyObject *entered(PyObject *self, PyObject *const *args, Py_ssize_t count) {
  return enter((Driver *)self, args, count);
}

WITHIN(run)
WITHIN(put)
WITHIN(write_out)
WITHIN(copy_out)
WITHIN(fill)
WITHIN(graphs)
WITHIN(record)
WITHIN(wait_for)
WITHIN(capturing)
WITHIN(entered)
WITHIN(broadcast)

static PyObject *working(PyObject *self, PyObject *none) {
  (void)none;
  return PyLong_FromUnsignedLong(((Driver *)self)->working);
}

static PyObject *given_up(PyObject *self, PyObject *none) {
  (void)none;
  return PyLong_FromUnsignedLongLong(((Driver *)self)->given_up);
}

static PyObject *forget(PyObject *self, PyObject *none) {
  Driver *driver = (Driver *)self;
  (void)none;
  for (int i = 0; i < QUEUES; i++)
    for (int j = 0; j < MARKS; j++)
      if (driver->queues[i].marks[j].event) driver->destroy(driver->queues[i].marks[j].event);
  memset(driver->queues, 0, sizeof driver->queues);
  memset(driver->near, 0, sizeof driver->near);
  driver->crowded = 0;
  Py_RETURN_NONE;
}

static PyObject *driver_new(PyTypeObject *type, PyObject *args, PyObject *named) {
  unsigned long long f[FUNCTIONS];
  PyObject *fail, *full, *given;
  (void)named;
  if (!PyArg_ParseTuple(args, "OOO!", &fail, &full, &PyTuple_Type, &given)) return NULL;
  if (PyTuple_Size(given) != FUNCTIONS) return PyErr_Format(PyExc_ValueError, "Driver takes %d functions", FUNCTIONS);
  for (int i = 0; i < FUNCTIONS; i++) {
    f[i] = PyLong_AsUnsignedLongLong(PyTuple_GetItem(given, i));
    if (f[i] == (unsigned long long)-1 && PyErr_Occurred()) return NULL;
  }
  for (int i = 0; i < FUNCTIONS; i++)
    if (!f[i]) return PyErr_Format(PyExc_ValueError, "function %d of the driver is missing", i);
  allocfunc make = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
  Driver *driver = (Driver *)make(type, 0);
  if (!driver) return NULL;
  void *places[] = {&driver->upload, &driver->download, &driver->memset32, &driver->launch, &driver->record, &driver->query,
                    &driver->create, &driver->destroy, &driver->wait, &driver->capturing, &driver->exchange,
                    &driver->current, &driver->push, &driver->pop, &driver->graph};
  for (int i = 0; i < FUNCTIONS; i++) {
    uintptr_t address = (uintptr_t)f[i];
    memcpy(places[i], &address, sizeof address);
  }
  Py_INCREF(fail), Py_INCREF(full);
  driver->fail = fail, driver->full = full;
  driver->working = PyThread_get_thread_ident();
  return (PyObject *)driver;
}

static void driver_dealloc(PyObject *self) { /* the queues' events went with forget(), or with the context */
  PyTypeObject *type = Py_TYPE(self);
  Py_XDECREF(((Driver *)self)->fail);
  Py_XDECREF(((Driver *)self)->full);
  freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
  release(self);
  Py_DECREF(type);
}

#define METHOD(name, function, text) {name, (PyCFunction)(void (*)(void))function, METH_FASTCALL, text}
static PyMethodDef methods[] = {
    METHOD("run", run_within, "run(to, from, nbytes, up, arrival, stream, function, blocks, rows, threads, params, event)"),
    METHOD("put", put_within, "put(data, span, room, to, stream, event)"),
    METHOD("write_out", write_out_within, "write_out(to, from, nbytes, stream, function, event): by a kernel, in order on the stream"),
    METHOD("copy_out", copy_out_within, "copy_out(to, after, stream, before, event, (address, nbytes, ...))"),
    METHOD("fill", fill_within, "fill(element, address, nbytes, stream, event): False, with nothing done, unless it is one word"),
    METHOD("graphs", graphs_within, "graphs(stream, graph, ...): launches them, one after the other"),
    METHOD("record", record_within, "record(event, stream)"),
    METHOD("wait", wait_for_within, "wait(stream, event)"),
    METHOD("query", query, "query(event): True once it has passed"),
    METHOD("passes", passes, "passes(event, microseconds): True once it has passed, False after that time"),
    METHOD("room", room, "room(stream): waits, as full() does, while its queue may be full"),
    METHOD("capturing", capturing_within, "capturing(stream): True while a graph is captured on it"),
    METHOD("context", tell_context, "context(handle): the one that calls are made in"),
    METHOD("exchange", exchange, "exchange(mode): this thread's capture mode, for another; the one before"),
    METHOD("enter", entered_within, "see insertion.c"),
    METHOD("broadcast", broadcast_within, "see broadcasting.c"),
    {"working", working, METH_NOARGS, "the thread that put work on a stream last"},
    {"given_up", given_up, METH_NOARGS, "how often the interpreter's lock was given up"},
    {"forget", forget, METH_NOARGS, "destroy the events that count calls; nothing is in flight"},
    {NULL, NULL, 0, NULL}};
static PyType_Slot slots[] = {{Py_tp_new, driver_new}, {Py_tp_dealloc, driver_dealloc}, {Py_tp_methods, methods}, {0, NULL}};
PyType_Spec driver_spec = {"hal_cuda._native.Driver", sizeof(Driver), 0, Py_TPFLAGS_DEFAULT, slots};
