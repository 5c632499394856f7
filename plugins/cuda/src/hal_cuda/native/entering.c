/* Staged requests into their slots: entries and block ids, one upload, one launch, one event. The twin of
   hal_cuda.entering.Entering, from the batch's columns to the event. */
#include "native.h"

#define FIXED 15 /* arguments before the columns */

typedef struct {
  PyObject *book;
  Py_buffer params, places, moves; /* ENTER bytes; the table of staged requests, [places, PLACE] int64; below */
  unsigned long long room, mirror, nbytes; /* where entries go on the host, where the kernel reads them, and how many fit */
  Work work;
} Call;

static int64_t *place_of(const Call *call, int64_t id) {
  uint64_t places = (uint64_t)call->places.len / (PLACE * 8);
  return (int64_t *)call->places.buf + ((uint64_t)id & (places - 1)) * PLACE;
}

/* Where the kernel reads a request. `moves`: of what was not uploaded, the device's bytes (first, end), and how far
   from them the pinned memory is: [moves, 3] uint64, most often none. */
static uint64_t moved(const Call *call, uint64_t source) {
  uint64_t move[3];
  for (Py_ssize_t at = 0; at < call->moves.len; at += sizeof move) {
    memcpy(move, (const char *)call->moves.buf + at, sizeof move);
    if (source >= move[0] && source < move[1]) return source + move[2];
  }
  return source;
}

/* Whether all requests are staged, and the batch fits the state and the room. */
static int staged(const Call *call, const Book *book, const Batch *batch) {
  if ((uint64_t)batch->n * ENTRY * 8 + (uint64_t)batch->ids * 4 > call->nbytes) return 0;
  for (Py_ssize_t at = 0; at < batch->n; at++) {
    int64_t slot = batch->slots[at], id = row_of(batch, at, ID);
    if (slot < 0 || slot >= book->slots || place_of(call, id)[0] != id) return 0;
  }
  return batch->n > 0;
}

/* Write entries and block ids; the longest token row, in elements, that is written or reset. */
static int64_t fill(const Call *call, const Book *book, const Batch *batch) {
  int64_t *entry = (int64_t *)(uintptr_t)call->room, longest = 0, blocks_at = 0;
  for (Py_ssize_t at = 0; at < batch->n; at++, entry += ENTRY) {
    int64_t slot = batch->slots[at], *written = book->rows + slot * TABLE, total = row_of(batch, at, TOKENS);
    int64_t *place = place_of(call, row_of(batch, at, ID));
    memcpy(entry, written, TABLE * 8);
    entry[TABLE] = (int64_t)moved(call, (uint64_t)place[1]);
    entry[TABLE + 1] = slot;
    entry[TABLE + 2] = batch->starts[at];
    entry[TABLE + 3] = batch->lengths[at];
    entry[TABLE + 4] = batch->counts[at];
    entry[TABLE + 5] = blocks_at;
    blocks_at += batch->counts[at];
    if (written[TOKENS] > longest) longest = written[TOKENS];
    if (total > longest) longest = total;
    place[3] = 0; /* it waits for its insertion no longer */
  }
  memcpy(entry, batch->blocks, (size_t)batch->ids * 4);
  return longest;
}

static void close_call(Call *call) {
  if (call->params.obj) PyBuffer_Release(&call->params);
  if (call->places.obj) PyBuffer_Release(&call->places);
  if (call->moves.obj) PyBuffer_Release(&call->moves);
}

/* 0, or -1 with an exception; close_call() follows in either case. */
static int open_call(Call *call, PyObject *const *args, Py_ssize_t count) {
  unsigned long long a[11];
  memset(call, 0, sizeof *call);
  if (count != FIXED || Py_TYPE(args[0]) != book_type) {
    PyErr_SetString(PyExc_TypeError, "enter takes a book, 3 buffers and 11 whole numbers before the columns");
    return -1;
  }
  for (int i = 0; i < 11; i++) {
    a[i] = PyLong_AsUnsignedLongLong(args[4 + i]);
    if (a[i] == (unsigned long long)-1 && PyErr_Occurred()) return -1;
  }
  call->book = args[0];
  call->room = a[0], call->mirror = a[1], call->nbytes = a[2];
  Work work = {.to = a[3], .from = a[4], .nbytes = (size_t)a[5], .up = (Handle)(uintptr_t)a[6],
               .arrival = (Handle)(uintptr_t)a[7], .stream = (Handle)(uintptr_t)a[8],
               .function = (Handle)(uintptr_t)a[9], .threads = THREADS, .event = (Handle)(uintptr_t)a[10]};
  call->work = work;
  if (PyObject_GetBuffer(args[1], &call->params, PyBUF_SIMPLE) || PyObject_GetBuffer(args[2], &call->places, PyBUF_CONTIG) ||
      PyObject_GetBuffer(args[3], &call->moves, PyBUF_SIMPLE))
    return -1;
  size_t places = (size_t)call->places.len / (PLACE * 8);
  if (call->params.len == ENTER && places && !(places & (places - 1)) && call->moves.len % 24 == 0 && call->room % 8 == 0)
    return 0;
  PyErr_SetString(PyExc_ValueError, "enter: parameters, places, moves or room of another size");
  return -1;
}

/* enter(book, params, places, moves, room, mirror, nbytes, to, from, bytes, up, arrival, stream, function, event,
         rows, slots, starts, lengths, counts, blocks): False, with nothing done, where a request is not staged. */
PyObject *enter(Driver *driver, PyObject *const *args, Py_ssize_t count) {
  Call call;
  Batch batch;
  PyObject *result = NULL;
  if (open_call(&call, args, count - COLUMNS) || batch_open(&batch, args + FIXED)) goto done;
  const Book *book = (const Book *)call.book;
  if (!staged(&call, book, &batch)) {
    result = PyBool_FromLong(0);
  } else {
    uint64_t params[(ENTER + 7) / 8], longest = (uint64_t)fill(&call, book, &batch);
    void *pointers[] = {params};
    memcpy(params, call.params.buf, ENTER);
    params[0] = call.mirror;
    params[1] = call.mirror + (uint64_t)batch.n * ENTRY * 8;
    call.work.blocks = (unsigned)batch.n;
    call.work.rows = (unsigned)(1 + (longest * 8 + PIECE - 1) / PIECE);
    call.work.params = pointers;
    if (!perform(driver, &call.work)) result = PyBool_FromLong(1);
  }
  batch_close(&batch);
done:
  close_call(&call);
  return result;
}
