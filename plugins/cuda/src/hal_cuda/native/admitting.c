/* Admission: the token ids of a request, and its bytes into a chunk of pinned memory (hal_cuda.staged_requests). */
#include "native.h"

#define MOST INT64_C(0x7fffffff)

/* Return how many ids a list, a tuple, or a one-axis array of int32 or int64 has; -1 for any other object. The array's buffer
   is held then. */
static Py_ssize_t ids_open(PyObject *given, Py_buffer *view) {
  view->obj = NULL;
  if (PyList_CheckExact(given)) return PyList_Size(given);
  if (PyTuple_CheckExact(given)) return PyTuple_Size(given);
  if (PyObject_GetBuffer(given, view, PyBUF_FORMAT | PyBUF_ND)) return PyErr_Clear(), -1;
  const char *format = view->format ? view->format : "B";
  int whole = (format[0] == 'i' || format[0] == 'l' || format[0] == 'q') && !format[1];
  if (view->ndim == 1 && whole && (view->itemsize == 4 || view->itemsize == 8)) return view->shape[0];
  PyBuffer_Release(view);
  return -1;
}

/* Write the ids, and close. Return the bitwise or of all ids; a negative number if an element is no id. */
static int64_t ids_close(PyObject *given, Py_buffer *view, Py_ssize_t n, int64_t *out, int64_t *largest) {
  int64_t bits = 0, most = *largest;
  if (view->obj && view->itemsize == 4) {
    const int32_t *from = view->buf;
    for (Py_ssize_t i = 0; i < n; i++) out[i] = from[i], bits |= out[i], most = out[i] > most ? out[i] : most;
  } else if (view->obj) {
    const int64_t *from = view->buf;
    for (Py_ssize_t i = 0; i < n; i++) out[i] = from[i], bits |= out[i], most = out[i] > most ? out[i] : most;
  } else {
    int list = PyList_CheckExact(given), overflow = 0;
    for (Py_ssize_t i = 0; bits >= 0 && i < n; i++) {
      PyObject *one = list ? PyList_GetItem(given, i) : PyTuple_GetItem(given, i); /* NULL: the list has become shorter */
      if (!one) PyErr_Clear();
      out[i] = one && PyLong_CheckExact(one) ? PyLong_AsLongLongAndOverflow(one, &overflow) : -1;
      if (overflow) out[i] = -1;
      bits |= out[i], most = out[i] > most ? out[i] : most;
    }
  }
  if (view->obj) PyBuffer_Release(view);
  *largest = most;
  return bits;
}

/* ids(prompt, output): all ids as int64 bytes, the length of the prompt, and the largest id. None for an unsupported object or
   an element that is no id: the core then raises the error with its text. */
PyObject *ids(PyObject *self, PyObject *const *args, Py_ssize_t count) {
  Py_buffer views[2];
  (void)self;
  if (count != 2) return PyErr_Format(PyExc_TypeError, "ids takes a prompt and an output, not %zd arguments", count);
  Py_ssize_t prompt = ids_open(args[0], &views[0]);
  if (prompt < 0) Py_RETURN_NONE;
  Py_ssize_t output = ids_open(args[1], &views[1]);
  PyObject *made = output < 0 ? NULL : PyBytes_FromStringAndSize(NULL, (prompt + output) * 8);
  if (!made) {
    if (views[0].obj) PyBuffer_Release(&views[0]);
    if (output >= 0 && views[1].obj) PyBuffer_Release(&views[1]);
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_NONE;
  }
  int64_t *out = (int64_t *)(void *)PyBytes_AsString(made), largest = -1;
  int64_t bits = ids_close(args[0], &views[0], prompt, out, &largest);
  bits |= ids_close(args[1], &views[1], output, out + prompt, &largest);
  if (bits < 0 || largest > MOST) {
    Py_DECREF(made);
    Py_RETURN_NONE;
  }
  return Py_BuildValue("(NnL)", made, prompt, (long long)largest);
}

/* stage(chunk, record, rows): append a request's record and rows to the chunk, each aligned to 16 bytes (`chunk`: the address
   of its numbers). Return their offset, or -1, without effect, if they do not fit. */
PyObject *stage(PyObject *self, PyObject *const *args, Py_ssize_t count) {
  Py_buffer pieces[8];
  (void)self;
  Py_ssize_t rows = count == 3 && PyTuple_Check(args[2]) ? PyTuple_Size(args[2]) : 8, held = 0;
  if (rows > 7) return PyErr_Format(PyExc_TypeError, "stage takes a chunk, a record and a tuple of at most 7 rows");
  uint64_t *chunk = (uint64_t *)(uintptr_t)PyLong_AsUnsignedLongLong(args[0]), nbytes = 0; /* host, device, nbytes, used */
  if (PyErr_Occurred()) return NULL;
  for (; held <= rows; held++) {
    if (PyObject_GetBuffer(held ? PyTuple_GetItem(args[2], held - 1) : args[1], &pieces[held], PyBUF_SIMPLE)) break;
    nbytes += ((uint64_t)pieces[held].len + 15) & ~UINT64_C(15);
  }
  long long at = held > rows && chunk[3] + nbytes <= chunk[2] ? (long long)chunk[3] : -1;
  char *to = (char *)(uintptr_t)chunk[0] + at;
  for (Py_ssize_t i = 0; i < held; i++) {
    if (at >= 0) memcpy(to, pieces[i].buf, (size_t)pieces[i].len);
    to += (pieces[i].len + 15) & ~(Py_ssize_t)15;
    PyBuffer_Release(&pieces[i]);
  }
  if (PyErr_Occurred()) return NULL;
  if (at >= 0) chunk[3] += nbytes;
  return PyLong_FromLongLong(at);
}
