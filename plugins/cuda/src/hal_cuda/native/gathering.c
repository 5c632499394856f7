/* The columns of a batch of new requests, from the lists that a caller gives: the quick road of
   hal_core.slots.tasks.TaskBatch.prefill. What is not plain (other sequences, numbers or arrays) is left to it. */
#include "native.h"

static PyObject *item(PyObject *list, Py_ssize_t at) { /* borrowed */
  return PyList_CheckExact(list) ? PyList_GetItem(list, at) : PyTuple_GetItem(list, at);
}

static Py_ssize_t length(PyObject *list) {
  return PyList_CheckExact(list) ? PyList_Size(list) : PyTuple_CheckExact(list) ? PyTuple_Size(list) : -1;
}

/* A list of n plain whole numbers as int32; NULL, perhaps without an exception, where they are no such. */
static PyObject *ints(PyObject *list, Py_ssize_t n) {
  PyObject *made = PyBytes_FromStringAndSize(NULL, n * 4);
  int32_t *out = made ? (int32_t *)(void *)PyBytes_AsString(made) : NULL;
  int plain = made != NULL;
  for (Py_ssize_t at = 0; plain && at < n; at++) {
    PyObject *one = item(list, at);
    int overflow = 0;
    long value = one && PyLong_CheckExact(one) ? PyLong_AsLongAndOverflow(one, &overflow) : (plain = 0);
    plain = plain && !overflow && value >= INT32_MIN && value <= INT32_MAX;
    if (plain) out[at] = (int32_t)value;
  }
  if (plain) return made;
  Py_XDECREF(made);
  return NULL;
}

static PyObject *zeros(Py_ssize_t n) {
  PyObject *made = PyBytes_FromStringAndSize(NULL, n * 4);
  if (made) memset(PyBytes_AsString(made), 0, (size_t)n * 4);
  return made;
}

/* The packed rows of n requests of the type given, one after the other. */
static PyObject *rows(PyObject *requests, Py_ssize_t n, PyObject *type, PyObject *name) {
  PyObject *made = PyBytes_FromStringAndSize(NULL, n * REQUEST * 8);
  char *out = made ? PyBytes_AsString(made) : NULL;
  int plain = made != NULL;
  for (Py_ssize_t at = 0; plain && at < n; at++) {
    PyObject *request = item(requests, at);
    PyObject *row = request && (PyObject *)Py_TYPE(request) == type ? PyObject_GetAttr(request, name) : NULL;
    plain = row && PyBytes_CheckExact(row) && PyBytes_Size(row) == REQUEST * 8;
    if (plain) memcpy(out + at * REQUEST * 8, PyBytes_AsString(row), REQUEST * 8);
    Py_XDECREF(row);
  }
  if (plain) return made;
  Py_XDECREF(made);
  return NULL;
}

/* A buffer of one axis over a contiguous array whose dtype is the one given; 0 where it is no such. */
static int view_of(PyObject *array, PyObject *dtype, PyObject *name, Py_buffer *view) {
  PyObject *has = PyObject_GetAttr(array, name);
  Py_XDECREF(has);
  if (has != dtype || PyObject_GetBuffer(array, view, PyBUF_ND)) return 0;
  if (view->ndim == 1 && view->itemsize == 4) return 1;
  PyBuffer_Release(view);
  return 0;
}

/* (counts, all block ids one after the other), or NULL, perhaps without an exception. */
static PyObject *block_ids(PyObject *blocks, Py_ssize_t n, PyObject *dtype, PyObject *name) {
  Py_buffer *views = PyMem_Malloc((size_t)(n + 1) * sizeof *views);
  PyObject *counts = PyBytes_FromStringAndSize(NULL, n * 4), *all = NULL;
  Py_ssize_t held = 0, nbytes = 0;
  if (views && counts) {
    int32_t *out = (int32_t *)(void *)PyBytes_AsString(counts);
    while (held < n && view_of(item(blocks, held), dtype, name, &views[held])) {
      out[held] = (int32_t)(views[held].len / 4);
      nbytes += views[held++].len;
    }
    if (held == n && nbytes < INT32_MAX && (all = PyBytes_FromStringAndSize(NULL, nbytes))) {
      char *to = PyBytes_AsString(all);
      for (Py_ssize_t at = 0; at < n; to += views[at++].len) memcpy(to, views[at].buf, (size_t)views[at].len);
    }
  }
  while (held--) PyBuffer_Release(&views[held]);
  PyMem_Free(views);
  if (all) return Py_BuildValue("(NN)", counts, all);
  Py_XDECREF(counts);
  return NULL;
}

/* gather(slots, starts, lengths, requests, blocks, type, row, dtype, name): (rows, slots, starts, lengths, counts,
   blocks, more) as bytes; None where something is not plain. Starts of None are all 0. `row` and `name` are the words "request_row" and "dtype". */
PyObject *gather(PyObject *self, PyObject *const *args, Py_ssize_t count) {
  PyObject *made[4] = {NULL}, *ids = NULL, *result = NULL;
  (void)self;
  if (count != 9) return PyErr_Format(PyExc_TypeError, "gather takes 9 arguments, not %zd", count);
  Py_ssize_t n = length(args[0]);
  int plain = n > 0 && n < 1 << 20, no_starts = args[1] == Py_None;
  for (int i = 1; i < 5; i++) plain = plain && (length(args[i]) == n || (i == 1 && no_starts));
  for (int i = 0; plain && i < 3; i++) plain = (made[i] = i == 1 && no_starts ? zeros(n) : ints(args[i], n)) != NULL;
  if (plain) plain = (made[3] = rows(args[3], n, args[5], args[6])) != NULL;
  if (plain && (ids = block_ids(args[4], n, args[7], args[8])))
    result = Py_BuildValue("(OOOOOOy)", made[3], made[0], made[1], made[2], PyTuple_GetItem(ids, 0), PyTuple_GetItem(ids, 1), "");
  for (int i = 0; i < 4; i++) Py_XDECREF(made[i]);
  Py_XDECREF(ids);
  if (result) return result;
  PyErr_Clear(); /* whoever builds the batch the long way says what is wrong */
  Py_RETURN_NONE;
}
