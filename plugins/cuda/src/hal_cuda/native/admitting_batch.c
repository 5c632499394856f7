/* Admission of several requests: a check of their ids, and their bytes into a chunk of pinned memory. */
#include "native.h"

#ifdef __GNUC__
#pragma GCC optimize("O3") /* vectors: 0.1 ns an id instead of 0.5 */
#endif

static const int element_bytes[ROWS] = {8, 4, 8, 4, 8};
enum { HOST, DEVICE, NBYTES, USED }; /* of a chunk's numbers */

static uint64_t up16(uint64_t n) { return (n + 15) & ~UINT64_C(15); }

/* within(array, limit): whether all ids of a buffer of int32 or int64 are at least 0 and below the limit. A difference that is
   negative has the sign bit, as a negative id has; so the loops have no comparison, which compilers turn into vectors. */
PyObject *ids_within(PyObject *self, PyObject *const *args, Py_ssize_t count) {
  Py_buffer view;
  int64_t most = count == 2 ? PyLong_AsLongLong(args[1]) - 1 : 0, bits = 0;
  (void)self;
  if (count != 2) return PyErr_Format(PyExc_TypeError, "within takes ids and a limit, not %zd arguments", count);
  if (PyErr_Occurred() || PyObject_GetBuffer(args[0], &view, PyBUF_FORMAT | PyBUF_ND)) return NULL;
  if (view.itemsize == 4) {
    const int32_t *from = view.buf;
    int32_t highest = most > INT32_MAX ? INT32_MAX : (int32_t)most, found = 0;
    for (Py_ssize_t i = 0; i < view.len / 4; i++) found |= from[i] | (int32_t)((uint32_t)highest - (uint32_t)from[i]);
    bits = found;
  } else if (view.itemsize == 8) {
    const int64_t *from = view.buf;
    for (Py_ssize_t i = 0; i < view.len / 8; i++) bits |= from[i] | (int64_t)((uint64_t)most - (uint64_t)from[i]);
  } else {
    PyErr_Format(PyExc_TypeError, "within takes int32 or int64, not elements of %zd bytes", view.itemsize);
  }
  PyBuffer_Release(&view);
  return PyErr_Occurred() ? NULL : PyBool_FromLong(bits >= 0);
}

/* What stage_all reads: requests' rows (REQUEST_ROW), records and the bytes of their rows, in the order of ROW_FIELDS. */
struct given {
  const int64_t *rows;
  const char *record, *pieces[ROWS];
  uint64_t count, record_bytes, width; /* width: bytes of an id */
};

/* Return the bytes that the requests take in a chunk; 0 if the buffers are not as long as the rows say. */
static uint64_t needed(const struct given *given, const Py_buffer *held) {
  uint64_t all = given->count * up16(given->record_bytes), lengths[ROWS] = {0};
  for (uint64_t at = 0; at < given->count; at++)
    for (int i = 0; i < ROWS; i++) {
      uint64_t length = (uint64_t)given->rows[at * REQUEST + (uint64_t)i];
      if (i == BLOCKS) continue;
      all += up16(length * (uint64_t)element_bytes[i]);
      lengths[i] += length * (i == TOKENS ? given->width : (uint64_t)element_bytes[i]);
    }
  for (int i = 0; i < ROWS; i++)
    if (lengths[i] != (uint64_t)held[i].len) return 0;
  return all;
}

/* Append one request to `to`; return the bytes that it takes. */
static uint64_t append(struct given *given, const int64_t *row, char *to) {
  uint64_t used = up16(given->record_bytes);
  memcpy(to, given->record, given->record_bytes);
  given->record += given->record_bytes;
  for (int i = 0; i < ROWS; i++) {
    if (i == BLOCKS) continue;
    uint64_t length = (uint64_t)row[i], nbytes = length * (uint64_t)element_bytes[i];
    if (i == TOKENS && given->width == 4) {
      const int32_t *from = (const int32_t *)(const void *)given->pieces[i];
      int64_t *out = (int64_t *)(void *)(to + used);
      for (uint64_t id = 0; id < length; id++) out[id] = from[id];
      given->pieces[i] += 4 * length;
    } else {
      memcpy(to + used, given->pieces[i], nbytes);
      given->pieces[i] += nbytes;
    }
    used += up16(nbytes);
  }
  return used;
}

/* stage_all(chunk, number, table, rows, records, pieces, width): append requests to a chunk as `stage` does, and enter them in
   the table of staged requests (int64 [places, PLACE], a power of two). `chunk`: the address of its numbers, or 0; `pieces`: of
   each row field all requests' bytes, one after the other. Return 0; the bytes that are needed if they do not fit; -1 if a
   place of the table is taken. Without effect unless 0. */
PyObject *stage_all(PyObject *self, PyObject *const *args, Py_ssize_t count) {
  Py_buffer held[ROWS + 3];
  PyObject *result = NULL;
  int open = 0;
  (void)self;
  if (count != 7 || !PyTuple_Check(args[5]) || PyTuple_Size(args[5]) != ROWS)
    return PyErr_Format(PyExc_TypeError, "stage_all takes 7 arguments, the sixth a tuple of %d rows", ROWS);
  uint64_t *chunk = (uint64_t *)(uintptr_t)PyLong_AsUnsignedLongLong(args[0]);
  int64_t number = PyLong_AsLongLong(args[1]);
  struct given given = {.width = PyLong_AsUnsignedLongLong(args[6])};
  if (PyErr_Occurred()) return NULL;
  for (; open < ROWS + 3; open++) {
    PyObject *one = open < ROWS ? PyTuple_GetItem(args[5], open) : args[2 + open - ROWS];
    if (PyObject_GetBuffer(one, &held[open], open == ROWS ? PyBUF_WRITABLE : PyBUF_SIMPLE)) goto done;
  }
  int64_t *table = held[ROWS].buf, mask = held[ROWS].len / (PLACE * 8) - 1;
  given.rows = held[ROWS + 1].buf, given.count = (uint64_t)held[ROWS + 1].len / (REQUEST * 8);
  given.record = held[ROWS + 2].buf;
  given.record_bytes = given.count ? (uint64_t)held[ROWS + 2].len / given.count : 0;
  for (int i = 0; i < ROWS; i++) given.pieces[i] = held[i].buf;
  uint64_t nbytes = needed(&given, held);
  if (!nbytes || (given.width != 4 && given.width != 8)) {
    PyErr_SetString(PyExc_ValueError, "stage_all: the bytes are not as long as their requests' rows say");
    goto done;
  }
  for (uint64_t at = 0; at < given.count; at++)
    if (table[(given.rows[at * REQUEST + ID] & mask) * PLACE + 3]) {
      result = PyLong_FromLong(-1);
      goto done;
    }
  if (!chunk || chunk[USED] + nbytes > chunk[NBYTES]) {
    result = PyLong_FromUnsignedLongLong(nbytes);
    goto done;
  }
  for (uint64_t at = 0; at < given.count; at++) {
    const int64_t *row = given.rows + at * REQUEST;
    int64_t *place = table + (row[ID] & mask) * PLACE;
    place[0] = row[ID], place[1] = (int64_t)(chunk[DEVICE] + chunk[USED]), place[2] = number, place[3] = 1;
    chunk[USED] += append(&given, row, (char *)(uintptr_t)chunk[HOST] + chunk[USED]);
  }
  result = PyLong_FromLong(0);
done:
  while (open-- > 0) PyBuffer_Release(&held[open]);
  return result;
}
