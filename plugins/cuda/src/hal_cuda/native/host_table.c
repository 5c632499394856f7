/* Check whether a batch of requests that enter slots or keep them fits a state, and host it in the host's table. The twins of
   hal_core.slots.checks.problems, which gives the reason, and hal_core.slots.host_table.HostSlotTable.commit. */
#include "native.h"

PyTypeObject *host_table_type;

/* Whether kinds and counts fit the lengths of the buffers; finds block ids and drafts in them. */
static int parts_fit(Batch *batch, Py_ssize_t numbers) {
  int64_t ids = 0, drafts = 0;
  for (Py_ssize_t at = 0; at < batch->n; at++) {
    int32_t kind = batch->columns[KINDS][at], count = batch->columns[COUNTS][at], drafted = batch->columns[DRAFTED][at];
    if (kind < PREFILL || kind >= (int32_t)sizeof traits_of_kinds || count < 0 || drafted < 0) return 0;
    ids += count, drafts += drafted;
  }
  batch->ids = (Py_ssize_t)ids, batch->drafts_in_all = (Py_ssize_t)drafts;
  batch->blocks = batch->columns[0] + batch->n * COLUMNS, batch->drafts = batch->blocks + ids;
  return numbers == batch->n * COLUMNS + ids + drafts;
}

int batch_open(Batch *batch, PyObject *ints, PyObject *rows) {
  if (PyObject_GetBuffer(ints, &batch->held[0], PyBUF_SIMPLE)) return -1;
  if (PyObject_GetBuffer(rows, &batch->held[1], PyBUF_SIMPLE)) {
    PyBuffer_Release(&batch->held[0]);
    return -1;
  }
  Py_ssize_t n = batch->n = batch->held[1].len / (REQUEST * 8), nbytes = batch->held[0].len;
  const int32_t *numbers = batch->held[0].buf;
  for (int i = 0; i < COLUMNS; i++) batch->columns[i] = numbers + i * n;
  batch->rows = batch->held[1].buf;
  int whole = batch->held[1].len == n * REQUEST * 8 && nbytes % 4 == 0 && nbytes >= n * COLUMNS * 4;
  if (whole && (!nbytes || (uintptr_t)numbers % 4 == 0) && parts_fit(batch, nbytes / 4)) return 0;
  PyErr_SetString(PyExc_ValueError, "the columns of the batch do not fit each other");
  batch_close(batch);
  return -1;
}

void batch_close(Batch *batch) {
  for (int i = 0; i < 2; i++) PyBuffer_Release(&batch->held[i]);
}

/* Whether all admission ids differ: compared directly if they rise, else with a hash table. -1: no memory. */
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

/* Whether one task fits: its slot is free, or holds the request, and occurs once in the batch; tokens, blocks and drafts are
   within their bounds. */
static int task_fits(HostTable *host, const Batch *batch, Py_ssize_t at) {
  int traits = traits_of(batch, at), enters = traits & ENTERS, continues = traits & CONTINUES;
  const int32_t *const *columns = batch->columns;
  int64_t slot = columns[SLOTS][at], start = columns[STARTS][at], length = columns[LENGTHS][at];
  if (traits & LEAVES || row_of(batch, at, KEY) != host->key || slot < 0 || slot >= host->slots || host->seen[slot]) return 0;
  host->seen[slot] = 1;
  const int64_t *row = host->rows + slot * TABLE;
  int64_t end = start + length, total = row_of(batch, at, TOKENS), have = enters ? 0 : row[HELD];
  int64_t count = have + columns[COUNTS][at], room = count * host->block_size;
  if (row[SLOT_ADMISSION] != (enters ? 0 : row_of(batch, at, ID)) || total >= host->max_model_len || count > host->max_blocks ||
      columns[FIRSTS][at] != have || (!continues && columns[FIRST_TOKENS][at] != -1) ||
      columns[DRAFTED][at] > (continues ? host->max_drafts : 0))
    return 0;
  if (traits & FEEDS && !(start >= 0 && length >= 1 && end <= total && end <= room && (enters || start == row[PREFILLED])))
    return 0;
  return !continues || (start == total && columns[FIRST_TOKENS][at] >= 0 && total + 1 < host->max_model_len && total <= room &&
                        row_of(batch, at, LEFT) > 1);
}

/* Whether no entering request is in a slot already. -1: an exception. */
static int none_lives(HostTable *host, const Batch *batch) {
  int free = 1;
  for (Py_ssize_t at = 0; free == 1 && at < batch->n && PyDict_Size(host->live); at++) {
    if (!(traits_of(batch, at) & ENTERS)) continue;
    PyObject *id = PyLong_FromLongLong(row_of(batch, at, ID));
    int lives = id ? PyDict_Contains(host->live, id) : -1;
    Py_XDECREF(id);
    free = lives < 0 ? -1 : !lives;
  }
  return free;
}

static PyObject *sound(PyObject *self, PyObject *const *args, Py_ssize_t count) {
  HostTable *host = (HostTable *)self;
  Batch batch;
  if (count != 2) return PyErr_Format(PyExc_TypeError, "sound takes a batch's ints and rows, not %zd arguments", count);
  if (batch_open(&batch, args[0], args[1])) return NULL;
  int fits = 1;
  Py_ssize_t looked = 0;
  while (fits && looked < batch.n) fits = task_fits(host, &batch, looked++);
  const int32_t *slots = batch.columns[SLOTS];
  for (Py_ssize_t at = 0; at < looked; at++)
    if (slots[at] >= 0 && slots[at] < host->slots) host->seen[slots[at]] = 0;
  int32_t signs = 0;
  for (Py_ssize_t at = 0; at < batch.ids; at++) signs |= batch.blocks[at];
  for (Py_ssize_t at = 0; at < batch.drafts_in_all; at++) signs |= batch.drafts[at];
  fits = fits && signs >= 0;
  if (fits) fits = ids_differ(&batch);
  if (fits == 1) fits = none_lives(host, &batch);
  batch_close(&batch);
  return fits < 0 ? NULL : PyBool_FromLong(fits);
}

/* Store the request and the admission id of one task in the host's table. */
static int hold(HostTable *host, int64_t slot, int64_t id, PyObject *request) {
  PyObject *key = PyLong_FromLongLong(id), *place = PyLong_FromLongLong(slot);
  int failed = !key || !place || PyDict_SetItem(host->live, key, place);
  Py_XDECREF(key);
  Py_XDECREF(place);
  if (failed) return -1;
  Py_INCREF(request);
  return PyList_SetItem(host->requests, (Py_ssize_t)slot, request); /* takes the reference, also on failure */
}

/* Whether the requests of a batch can be booked: 1; 0 if one leaves; -1 with an exception if they do not fit the table. */
static int can_book(const HostTable *host, const Batch *batch, PyObject *requests) {
  int leaves = 0, fits = PyTuple_Check(requests) && PyTuple_Size(requests) == batch->n;
  for (Py_ssize_t at = 0; fits && at < batch->n; at++) {
    fits = batch->columns[SLOTS][at] >= 0 && batch->columns[SLOTS][at] < host->slots;
    leaves |= traits_of(batch, at) & LEAVES;
  }
  if (!fits) PyErr_SetString(PyExc_ValueError, "the batch does not fit the table");
  return fits ? !leaves : -1;
}

static PyObject *commit(PyObject *self, PyObject *const *args, Py_ssize_t count) {
  HostTable *host = (HostTable *)self;
  Batch batch;
  if (count != 3) return PyErr_Format(PyExc_TypeError, "commit takes 3 arguments, not %zd", count);
  PyObject *requests = args[2];
  if (batch_open(&batch, args[0], args[1])) return NULL;
  int booked = can_book(host, &batch, requests);
  const int32_t *const *columns = batch.columns;
  for (Py_ssize_t at = 0; booked > 0 && at < batch.n; at++) {
    int traits = traits_of(&batch, at);
    int64_t slot = columns[SLOTS][at], *row = host->rows + slot * TABLE;
    if (!(traits & ENTERS)) {
      row[HELD] += columns[COUNTS][at];
      if (row[BLOCKS] < row[HELD]) row[BLOCKS] = row[HELD];
      if (traits & FEEDS) row[PREFILLED] += columns[LENGTHS][at];
      continue;
    }
    for (int i = 0; i < ROWS; i++) row[i] = row_of(&batch, at, i);
    row[BLOCKS] = row[HELD] = columns[COUNTS][at];
    row[PREFILLED] = columns[FIRST_TOKENS][at] >= 0 ? row[TOKENS]++ : (int64_t)columns[STARTS][at] + columns[LENGTHS][at];
    row[SLOT_ADMISSION] = row_of(&batch, at, ID);
    if (hold(host, slot, row[SLOT_ADMISSION], PyTuple_GetItem(requests, at))) booked = -1;
  }
  batch_close(&batch);
  return booked < 0 ? NULL : PyBool_FromLong(booked);
}

static PyObject *book_new(PyTypeObject *type, PyObject *args, PyObject *named) {
  PyObject *table, *requests, *live;
  long long numbers[6]; /* config key, slots, max_model_len, max_blocks, block_size, max_draft_tokens */
  (void)named;
  if (!PyArg_ParseTuple(args, "OO!O!LLLLLL", &table, &PyList_Type, &requests, &PyDict_Type, &live, numbers, numbers + 1,
                        numbers + 2, numbers + 3, numbers + 4, numbers + 5))
    return NULL;
  allocfunc make = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
  HostTable *host = (HostTable *)make(type, 0);
  if (!host) return NULL;
  host->key = numbers[0], host->slots = numbers[1], host->max_model_len = numbers[2];
  host->max_blocks = numbers[3], host->block_size = numbers[4], host->max_drafts = numbers[5];
  if (PyObject_GetBuffer(table, &host->table, PyBUF_CONTIG)) goto failed;
  host->rows = host->table.buf;
  if (numbers[1] < 1 || numbers[1] > INT32_MAX || host->table.len != numbers[1] * TABLE * 8 ||
      PyList_Size(requests) != numbers[1]) {
    PyErr_SetString(PyExc_ValueError, "the table does not fit so many slots");
    goto failed;
  }
  if (!(host->seen = PyMem_Calloc((size_t)numbers[1], 1))) {
    PyErr_NoMemory();
    goto failed;
  }
  Py_INCREF(host->requests = requests);
  Py_INCREF(host->live = live);
  return (PyObject *)host;
failed:
  Py_DECREF(host);
  return NULL;
}

static void book_dealloc(PyObject *self) {
  HostTable *host = (HostTable *)self;
  PyTypeObject *type = Py_TYPE(self);
  if (host->table.obj) PyBuffer_Release(&host->table);
  Py_XDECREF(host->requests);
  Py_XDECREF(host->live);
  PyMem_Free(host->seen);
  freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
  release(self);
  Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"sound", (PyCFunction)(void (*)(void))sound, METH_FASTCALL,
     "sound(ints, rows): True when the batch can surely go in."},
    {"commit", (PyCFunction)(void (*)(void))commit, METH_FASTCALL,
     "commit(ints, rows, requests): host what an insertion has put into slots; False, with nothing done, where one leaves."},
    {NULL, NULL, 0, NULL}};
static PyType_Slot slots[] = {{Py_tp_new, book_new}, {Py_tp_dealloc, book_dealloc}, {Py_tp_methods, methods}, {0, NULL}};
PyType_Spec host_table_spec = {"hal_cuda._native.HostTable", sizeof(HostTable), 0, Py_TPFLAGS_DEFAULT, slots};
