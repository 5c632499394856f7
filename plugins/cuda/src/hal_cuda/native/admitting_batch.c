/* Admission of several requests: checks of their ids, and their bytes into a chunk of pinned memory. */
#include "native.h"

#ifdef __GNUC__
#pragma GCC optimize("O3") /* vectors: 0.1 ns an id instead of 0.5 */
#endif

static const int element_bytes[BLOCKS] = {8, 4, 8};
enum { HOST, DEVICE, NBYTES, USED }; /* of a chunk's numbers */

static uint64_t up16(uint64_t n) { return (n + 15) & ~UINT64_C(15); }

/* Whether all ids are at least 0 and below the limit. A difference that is negative has the sign bit, as a negative id has; so
   the loops have no comparison, which compilers turn into vectors. */
int ids_within(const int32_t *ids, Py_ssize_t n, int64_t limit) {
  int32_t most = limit > INT32_MAX ? INT32_MAX : (int32_t)limit - 1, bits = 0;
  for (Py_ssize_t i = 0; i < n; i++) bits |= ids[i] | (int32_t)((uint32_t)most - (uint32_t)ids[i]);
  return bits >= 0;
}

/* The same of int64, which are written as int32. */
int ids_narrow(int32_t *to, const int64_t *wide, Py_ssize_t n, int64_t limit) {
  int64_t most = limit > INT32_MAX ? INT32_MAX : limit - 1, bits = 0;
  for (Py_ssize_t i = 0; i < n; i++) to[i] = (int32_t)wide[i], bits |= wide[i] | (int64_t)((uint64_t)most - (uint64_t)wide[i]);
  return bits >= 0;
}

/* What stage_all reads: of each request its packed bytes (REQUEST_ROW, then the record) and its ids; of the first ROWS - 2 row
   fields all requests' bytes, one after the other. */
struct given {
  const char *packed, *pieces[BLOCKS];
  PyObject *ids; /* a list of bytes, `width` bytes each id */
  uint64_t count, each, record; /* requests; bytes of each, and of its record */
  int64_t width;
};

/* Copy the row of a request, which is perhaps not aligned. */
static void read_row(const struct given *given, uint64_t at, int64_t *row) {
  memcpy(row, given->packed + at * given->each, REQUEST * 8);
}

/* Return the bytes that the requests take in a chunk; 0 if the buffers are not as long as the rows say. */
static uint64_t needed(const struct given *given, const Py_buffer *lists) {
  uint64_t all = given->count * up16(given->record), lengths[BLOCKS] = {0};
  for (uint64_t at = 0; at < given->count; at++) {
    int64_t row[REQUEST];
    read_row(given, at, row);
    PyObject *ids = PyList_GetItem(given->ids, (Py_ssize_t)at);
    for (int i = 0; i < BLOCKS; i++) {
      uint64_t nbytes = (uint64_t)row[i] * (uint64_t)element_bytes[i];
      all += up16(nbytes), lengths[i] += nbytes;
    }
    if (!PyBytes_CheckExact(ids) || row[TOKENS] <= 0 || PyBytes_Size(ids) != row[TOKENS] * given->width) return 0;
    all += up16((uint64_t)row[TOKENS] * 8);
  }
  for (int i = 0; i < BLOCKS; i++)
    if (lengths[i] != (uint64_t)lists[i].len) return 0;
  return all;
}

/* Append one request to `to`; return the bytes that it takes. */
static uint64_t append(struct given *given, uint64_t at, const int64_t *row, char *to) {
  uint64_t used = up16(given->record), length = (uint64_t)row[TOKENS];
  const char *ids = PyBytes_AsString(PyList_GetItem(given->ids, (Py_ssize_t)at));
  memcpy(to, given->packed + at * given->each + REQUEST * 8, given->record);
  for (int i = 0; i < BLOCKS; i++) {
    uint64_t nbytes = (uint64_t)row[i] * (uint64_t)element_bytes[i];
    memcpy(to + used, given->pieces[i], nbytes);
    given->pieces[i] += nbytes, used += up16(nbytes);
  }
  if (given->width == 4) {
    const int32_t *from = (const int32_t *)(const void *)ids;
    int64_t *out = (int64_t *)(void *)(to + used);
    for (uint64_t id = 0; id < length; id++) out[id] = from[id];
  } else {
    memcpy(to + used, ids, length * 8);
  }
  return used + up16(length * 8);
}

/* Whether a place of the table waits already. */
static int taken(const struct given *given, const int64_t *table, int64_t mask) {
  for (uint64_t at = 0; at < given->count; at++) {
    int64_t row[REQUEST];
    read_row(given, at, row);
    if (table[(row[ID] & mask) * PLACE + 3]) return 1;
  }
  return 0;
}

/* stage_all(chunk, number, table, packed, lists, ids, width): append requests to a chunk as `stage` does, and enter them in the
   table of staged requests (int64 [places, PLACE], a power of two). `chunk`: the address of its numbers, or 0; the rest as in
   hal_core.slots.batch_admission.AdmittedColumns. Return 0; the bytes that are needed if they do not fit; -1 if a place of the
   table is taken. Without effect unless 0. */
PyObject *stage_all(PyObject *self, PyObject *const *args, Py_ssize_t count) {
  Py_buffer held[BLOCKS + 2];
  PyObject *result = NULL;
  int open = 0;
  (void)self;
  if (count != 7 || !PyTuple_Check(args[4]) || PyTuple_Size(args[4]) != BLOCKS || !PyList_Check(args[5]))
    return PyErr_Format(PyExc_TypeError, "stage_all takes 7 arguments, the fifth a tuple of %d rows, the sixth a list", BLOCKS);
  uint64_t *chunk = (uint64_t *)(uintptr_t)PyLong_AsUnsignedLongLong(args[0]);
  int64_t number = PyLong_AsLongLong(args[1]);
  struct given given = {.ids = args[5], .count = (uint64_t)PyList_Size(args[5]), .width = PyLong_AsLongLong(args[6])};
  if (PyErr_Occurred()) return NULL;
  for (; open < BLOCKS + 2; open++) {
    PyObject *one = open < BLOCKS ? PyTuple_GetItem(args[4], open) : args[2 + open - BLOCKS];
    if (PyObject_GetBuffer(one, &held[open], open == BLOCKS ? PyBUF_WRITABLE : PyBUF_SIMPLE)) goto done;
  }
  int64_t *table = held[BLOCKS].buf, mask = held[BLOCKS].len / (PLACE * 8) - 1;
  given.packed = held[BLOCKS + 1].buf;
  given.each = given.count ? (uint64_t)held[BLOCKS + 1].len / given.count : 0;
  given.record = given.each - REQUEST * 8;
  for (int i = 0; i < BLOCKS; i++) given.pieces[i] = held[i].buf;
  uint64_t nbytes = given.each < REQUEST * 8 || (given.width != 4 && given.width != 8) ? 0 : needed(&given, held);
  if (!nbytes) {
    PyErr_SetString(PyExc_ValueError, "stage_all: the bytes are not as long as their requests' rows say");
  } else if (taken(&given, table, mask)) {
    result = PyLong_FromLong(-1);
  } else if (!chunk || chunk[USED] + nbytes > chunk[NBYTES]) {
    result = PyLong_FromUnsignedLongLong(nbytes);
  } else {
    for (uint64_t at = 0; at < given.count; at++) {
      int64_t row[REQUEST];
      read_row(&given, at, row);
      int64_t *place = table + (row[ID] & mask) * PLACE;
      place[0] = row[ID], place[1] = (int64_t)(chunk[DEVICE] + chunk[USED]), place[2] = number, place[3] = 1;
      chunk[USED] += append(&given, at, row, (char *)(uintptr_t)chunk[HOST] + chunk[USED]);
    }
    result = PyLong_FromLong(0);
  }
done:
  while (open-- > 0) PyBuffer_Release(&held[open]);
  return result;
}
