/* Whether a batch of requests that enter slots or stay may go into a state, and its booking in the host's table: the twins
   of hal_core.slots.checks.problems, which says why not, and hal_core.slots.host_table.HostSlotTable.commit. */
#include "native.h"

PyTypeObject *book_type;

/* The columns of a batch of more than new requests; 0 where they do not fit. */
static int open_more(Batch *batch) {
  const Py_buffer *more = &batch->held[6];
  const int32_t *columns = more->buf;
  int64_t drafts = 0;
  batch->kinds = NULL;
  batch->drafts_in_all = 0;
  if (!more->len) return 1;
  if (more->len % 4 || more->len < batch->n * 16 || (uintptr_t)more->buf % 4) return 0;
  batch->kinds = columns, batch->firsts = columns + batch->n, batch->tokens = columns + 2 * batch->n;
  batch->drafted = columns + 3 * batch->n, batch->drafts = columns + 4 * batch->n;
  for (Py_ssize_t i = 0; i < batch->n; i++) {
    if (batch->drafted[i] < 0 || batch->kinds[i] < PREFILL || batch->kinds[i] > HAND_OFF) return 0;
    drafts += batch->drafted[i];
  }
  batch->drafts_in_all = (Py_ssize_t)drafts;
  return more->len == (batch->n * 4 + drafts) * 4;
}

int batch_open(Batch *batch, PyObject *const *columns) {
  int held = 0;
  for (; held < COLUMNS; held++)
    if (PyObject_GetBuffer(columns[held], &batch->held[held], PyBUF_SIMPLE)) goto failed;
  Py_ssize_t n = batch->n = batch->held[1].len / 4;
  int fit = batch->held[0].len == n * REQUEST * 8 && batch->held[1].len == n * 4 && batch->held[5].len % 4 == 0;
  int64_t ids = 0;
  const int32_t **ints[] = {&batch->slots, &batch->starts, &batch->lengths, &batch->counts, &batch->blocks};
  for (int i = 1; i < 6; i++) {
    fit = fit && (i == 5 || batch->held[i].len == n * 4);
    fit = fit && (!batch->held[i].len || (uintptr_t)batch->held[i].buf % 4 == 0); /* an empty array's is anywhere */
    *ints[i - 1] = batch->held[i].buf;
  }
  for (Py_ssize_t i = 0; fit && i < n; i++) fit = batch->counts[i] >= 0 && (ids += batch->counts[i]) >= 0;
  batch->rows = batch->held[0].buf;
  batch->ids = (Py_ssize_t)ids;
  if (fit && batch->held[5].len == batch->ids * 4 && open_more(batch)) return 0;
  PyErr_SetString(PyExc_ValueError, "the columns of the batch do not fit each other");
failed:
  while (held--) PyBuffer_Release(&batch->held[held]);
  return -1;
}

void batch_close(Batch *batch) {
  for (int i = 0; i < COLUMNS; i++) PyBuffer_Release(&batch->held[i]);
}

/* Whether all admission ids differ: by their order where they rise, else by a table of hashes. -1: no memory. */
static int ids_differ(const Batch *batch) {
  Py_ssize_t at = 1;
  while (at < batch->n && row_of(batch, at - 1, ID) < row_of(batch, at, ID)) at++;
  if (at >= batch->n) return 1;
  size_t size = 16;
  while (size < (size_t)batch->n * 2) size *= 2;
  int64_t *known = PyMem_Calloc(size, sizeof *known);
  int differ = known ? 1 : -1;
  for (at = 0; differ == 1 && at < batch->n; at++) {
    int64_t id = row_of(batch, at, ID);
    size_t place = ((uint64_t)id * 0x9E3779B97F4A7C15u >> 32) & (size - 1);
    while (known[place] && known[place] != id) place = (place + 1) & (size - 1);
    differ = known[place] != id && id != 0;
    known[place] = id;
  }
  PyMem_Free(known);
  if (differ < 0) PyErr_NoMemory();
  return differ;
}

/* Whether one task fits: a slot that is free, or holds the request, and is not named twice; tokens, blocks and drafts
   within their bounds. */
static int task_fits(Book *book, const Batch *batch, Py_ssize_t at) {
  int64_t slot = batch->slots[at], start = batch->starts[at], length = batch->lengths[at], count = batch->counts[at];
  if (row_of(batch, at, KEY) != book->key || slot < 0 || slot >= book->slots || book->seen[slot]) return 0;
  book->seen[slot] = 1;
  int kind = kind_of(batch, at);
  const int64_t *row = book->rows + slot * TABLE;
  int64_t end = start + length, total = row_of(batch, at, TOKENS), have = stays(kind) ? row[HELD] : 0;
  if (row[SLOT_ADMISSION] != (stays(kind) ? row_of(batch, at, ID) : 0) || total >= book->max_model_len ||
      have + count > book->max_blocks)
    return 0;
  if (batch->kinds && (batch->firsts[at] != have || batch->drafted[at] > (kind == HAND_OFF ? book->max_drafts : 0))) return 0;
  if (kind == GROW) return 1;
  if (kind == HAND_OFF)
    return start == total && batch->tokens[at] >= 0 && total + 1 < book->max_model_len && total <= count * book->block_size;
  return start >= 0 && length >= 1 && end <= total && end <= (have + count) * book->block_size &&
         (kind == PREFILL || start == row[PREFILLED]);
}

/* Whether none of the requests that enter is in a slot already. -1: an exception. */
static int none_lives(Book *book, const Batch *batch) {
  int free = 1;
  for (Py_ssize_t at = 0; free == 1 && at < batch->n && PyDict_Size(book->live); at++) {
    if (stays(kind_of(batch, at))) continue;
    PyObject *id = PyLong_FromLongLong(row_of(batch, at, ID));
    int lives = id ? PyDict_Contains(book->live, id) : -1;
    Py_XDECREF(id);
    free = lives < 0 ? -1 : !lives;
  }
  return free;
}

static PyObject *sound(PyObject *self, PyObject *const *args, Py_ssize_t count) {
  Book *book = (Book *)self;
  Batch batch;
  if (count != COLUMNS) return PyErr_Format(PyExc_TypeError, "sound takes %d columns, not %zd", COLUMNS, count);
  if (batch_open(&batch, args)) return NULL;
  int fits = 1;
  Py_ssize_t looked = 0;
  while (fits && looked < batch.n) fits = task_fits(book, &batch, looked++);
  for (Py_ssize_t at = 0; at < looked; at++)
    if (batch.slots[at] >= 0 && batch.slots[at] < book->slots) book->seen[batch.slots[at]] = 0;
  int32_t signs = 0;
  for (Py_ssize_t at = 0; at < batch.ids; at++) signs |= batch.blocks[at];
  for (Py_ssize_t at = 0; at < batch.drafts_in_all; at++) signs |= batch.drafts[at];
  fits = fits && signs >= 0;
  if (fits) fits = ids_differ(&batch);
  if (fits == 1) fits = none_lives(book, &batch);
  batch_close(&batch);
  return fits < 0 ? NULL : PyBool_FromLong(fits);
}

/* Put request and admission id of one task where the host looks for them. */
static int hold(Book *book, int64_t slot, int64_t id, PyObject *request) {
  PyObject *key = PyLong_FromLongLong(id), *place = PyLong_FromLongLong(slot);
  int failed = !key || !place || PyDict_SetItem(book->live, key, place);
  Py_XDECREF(key);
  Py_XDECREF(place);
  if (failed) return -1;
  Py_INCREF(request);
  return PyList_SetItem(book->requests, (Py_ssize_t)slot, request); /* takes the reference, also where it fails */
}

static PyObject *commit(PyObject *self, PyObject *const *args, Py_ssize_t count) {
  Book *book = (Book *)self;
  Batch batch;
  if (count != COLUMNS + 1) return PyErr_Format(PyExc_TypeError, "commit takes %d arguments, not %zd", COLUMNS + 1, count);
  PyObject *requests = args[COLUMNS];
  if (batch_open(&batch, args)) return NULL;
  int failed = !PyTuple_Check(requests) || PyTuple_Size(requests) != batch.n;
  for (Py_ssize_t at = 0; !failed && at < batch.n; at++) failed = batch.slots[at] < 0 || batch.slots[at] >= book->slots;
  if (failed) PyErr_SetString(PyExc_ValueError, "the batch does not fit the table");
  for (Py_ssize_t at = 0; !failed && at < batch.n; at++) {
    int64_t slot = batch.slots[at], *row = book->rows + slot * TABLE;
    int kind = kind_of(&batch, at);
    if (stays(kind)) {
      row[HELD] += batch.counts[at];
      if (row[BLOCKS] < row[HELD]) row[BLOCKS] = row[HELD];
      if (kind == CHUNK_OF) row[PREFILLED] += batch.lengths[at];
      continue;
    }
    for (int i = 0; i < ROWS; i++) row[i] = row_of(&batch, at, i);
    row[BLOCKS] = row[HELD] = batch.counts[at];
    row[PREFILLED] = kind == HAND_OFF ? row[TOKENS]++ : (int64_t)batch.starts[at] + batch.lengths[at];
    row[SLOT_ADMISSION] = row_of(&batch, at, ID);
    failed = hold(book, slot, row[SLOT_ADMISSION], PyTuple_GetItem(requests, at));
  }
  batch_close(&batch);
  if (failed) return NULL;
  Py_RETURN_NONE;
}

static PyObject *book_new(PyTypeObject *type, PyObject *args, PyObject *named) {
  PyObject *table, *requests, *live;
  long long numbers[6]; /* config key, slots, max_model_len, max_blocks, block_size, max_draft_tokens */
  (void)named;
  if (!PyArg_ParseTuple(args, "OO!O!LLLLLL", &table, &PyList_Type, &requests, &PyDict_Type, &live, numbers, numbers + 1,
                        numbers + 2, numbers + 3, numbers + 4, numbers + 5))
    return NULL;
  allocfunc make = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
  Book *book = (Book *)make(type, 0);
  if (!book) return NULL;
  book->key = numbers[0], book->slots = numbers[1], book->max_model_len = numbers[2];
  book->max_blocks = numbers[3], book->block_size = numbers[4], book->max_drafts = numbers[5];
  if (PyObject_GetBuffer(table, &book->table, PyBUF_CONTIG)) goto failed;
  book->rows = book->table.buf;
  if (numbers[1] < 1 || numbers[1] > INT32_MAX || book->table.len != numbers[1] * TABLE * 8 ||
      PyList_Size(requests) != numbers[1]) {
    PyErr_SetString(PyExc_ValueError, "the table does not fit so many slots");
    goto failed;
  }
  if (!(book->seen = PyMem_Calloc((size_t)numbers[1], 1))) {
    PyErr_NoMemory();
    goto failed;
  }
  Py_INCREF(book->requests = requests);
  Py_INCREF(book->live = live);
  return (PyObject *)book;
failed:
  Py_DECREF(book);
  return NULL;
}

static void book_dealloc(PyObject *self) {
  Book *book = (Book *)self;
  PyTypeObject *type = Py_TYPE(self);
  if (book->table.obj) PyBuffer_Release(&book->table);
  Py_XDECREF(book->requests);
  Py_XDECREF(book->live);
  PyMem_Free(book->seen);
  freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
  release(self);
  Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"sound", (PyCFunction)(void (*)(void))sound, METH_FASTCALL,
     "sound(rows, slots, starts, lengths, counts, blocks, more): True when the batch can surely go in."},
    {"commit", (PyCFunction)(void (*)(void))commit, METH_FASTCALL,
     "commit(rows, slots, starts, lengths, counts, blocks, more, requests): take over what an insertion has put into slots."},
    {NULL, NULL, 0, NULL}};
static PyType_Slot slots[] = {{Py_tp_new, book_new}, {Py_tp_dealloc, book_dealloc}, {Py_tp_methods, methods}, {0, NULL}};
PyType_Spec book_spec = {"hal_cuda._native.Book", sizeof(Book), 0, Py_TPFLAGS_DEFAULT, slots};
