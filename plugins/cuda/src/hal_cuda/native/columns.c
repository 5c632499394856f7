/* The two buffers of a batch, from the caller's tasks: the fast path of hal_core.slots.tasks.TaskBatch.of. Unusual sequences,
   numbers or arrays are left to it. */
#include "native.h"

static PyObject *item(PyObject *list, Py_ssize_t at) { /* borrowed */
  return PyList_CheckExact(list) ? PyList_GetItem(list, at) : PyTuple_GetItem(list, at);
}

static Py_ssize_t length(PyObject *list) {
  return PyList_CheckExact(list) ? PyList_Size(list) : PyTuple_CheckExact(list) ? PyTuple_Size(list) : -1;
}

/* int32 numbers; new ones are appended. */
typedef struct { int32_t *at; Py_ssize_t n, room; } Numbers;

static int room_for(Numbers *numbers, Py_ssize_t more) {
  if (numbers->n + more <= numbers->room) return 1;
  Py_ssize_t room = 2 * numbers->room + more + 64;
  int32_t *at = PyMem_Realloc(numbers->at, (size_t)room * 4);
  if (at) numbers->at = at, numbers->room = room;
  return at != NULL;
}

static int small(PyObject *number, int32_t *out) {
  int overflow = 0;
  long value = PyLong_AsLongAndOverflow(number, &overflow);
  *out = (int32_t)value;
  return !overflow && value >= INT32_MIN && value <= INT32_MAX;
}

static int put(Numbers *numbers, Py_ssize_t at, PyObject *given) { /* borrowed, or NULL */
  return given && PyLong_CheckExact(given) && small(given, numbers->at + at);
}

/* The first fields of NumPy's PyArrayObject_fields (numpy/ndarraytypes.h), the same in NumPy 1 and 2; the buffer protocol takes
   longer. native.py reads an array by them, and compares, before the native part is used. */
typedef struct { PyObject_HEAD char *data; int nd; Py_ssize_t *shape, *strides; PyObject *base, *dtype; } Array;

/* Append plain whole numbers, or an array of them (`array`, `dtype`: its type, and that of its elements); returns their
   number, -1 for anything else. */
static Py_ssize_t extend(Numbers *numbers, PyObject *given, PyObject *dtype, PyObject *array) {
  Py_ssize_t n = length(given);
  if (n < 0) {
    const Array *found = (const Array *)given;
    if ((PyObject *)Py_TYPE(given) != array || found->dtype != dtype || found->nd != 1) return -1;
    n = found->shape[0];
    if (n > 1 && found->strides[0] != 4) return -1;
    if (!room_for(numbers, n)) return -1;
    memcpy(numbers->at + numbers->n, found->data, (size_t)n * 4);
  } else if (room_for(numbers, n)) {
    for (Py_ssize_t at = 0; at < n; at++)
      if (!put(numbers, numbers->n + at, item(given, at))) return -1;
  } else {
    return -1;
  }
  if (n > 0) numbers->n += n;
  return n;
}

/* The buffers during filling: `numbers` begins with the columns, [COLUMNS, n]. */
typedef struct {
  Py_ssize_t n;
  Numbers numbers, drafts;
  PyObject *rows, *type, *row, *dtype, *array; /* type of a request, "packed", int32, type of an array */
} Made;

static int made_open(Made *made, Py_ssize_t n) {
  made->n = n;
  if (!room_for(&made->numbers, n * (COLUMNS + 64)) || !(made->rows = PyBytes_FromStringAndSize(NULL, n * REQUEST * 8))) return 0;
  made->numbers.n = n * COLUMNS;
  return 1;
}

static int32_t *column(Made *made, int which) { return made->numbers.at + which * made->n; }

static int take_request(Made *made, Py_ssize_t at, PyObject *request) { /* borrowed, or NULL */
  PyObject *row = request && (PyObject *)Py_TYPE(request) == made->type ? PyObject_GetAttr(request, made->row) : NULL;
  int plain = row && PyBytes_CheckExact(row) && PyBytes_Size(row) >= REQUEST * 8;
  if (plain) memcpy(PyBytes_AsString(made->rows) + at * REQUEST * 8, PyBytes_AsString(row), REQUEST * 8);
  Py_XDECREF(row);
  return plain;
}

/* Begin to load each request and its blocks: 128 of them do not fit in the first cache, and the loop that copies them would wait
   for one after the other. */
static void ahead(PyObject *requests, PyObject *blocks, Py_ssize_t n, PyObject *array) {
  for (Py_ssize_t at = 0; at < n; at++) {
    const char *request = (const char *)item(requests, at), *given = (const char *)item(blocks, at);
    for (int i = 0; i < 2; i++) __builtin_prefetch(request + i * 64), __builtin_prefetch(given + i * 48);
  }
  for (Py_ssize_t at = 0; at < n; at++) {
    PyObject *given = item(blocks, at);
    if ((PyObject *)Py_TYPE(given) != array) return;
    __builtin_prefetch(((const Array *)given)->shape);
    for (int i = 0; i < 4; i++) __builtin_prefetch(((const Array *)given)->data + i * 64);
  }
}

static int take_ids(Made *made, Py_ssize_t at, PyObject *blocks) {
  Py_ssize_t ids = blocks ? extend(&made->numbers, blocks, made->dtype, made->array) : -1;
  column(made, COUNTS)[at] = (int32_t)ids;
  return ids >= 0 && made->numbers.n < INT32_MAX;
}

/* Return (ints, rows), and `more` if it is not NULL. Return None, without an exception, if something was not plain. Closes in
   both cases. */
static PyObject *made_close(Made *made, int plain, PyObject *more) {
  PyObject *result = NULL, *ints = NULL;
  Py_ssize_t n = made->numbers.n, drafts = made->drafts.n;
  if (plain && (ints = PyBytes_FromStringAndSize(NULL, (n + drafts) * 4))) {
    char *to = PyBytes_AsString(ints);
    memcpy(to, made->numbers.at, (size_t)n * 4);
    if (drafts) memcpy(to + n * 4, made->drafts.at, (size_t)drafts * 4);
    result = more ? PyTuple_Pack(3, ints, made->rows, more) : PyTuple_Pack(2, ints, made->rows);
  }
  PyMem_Free(made->numbers.at), PyMem_Free(made->drafts.at);
  Py_XDECREF(ints), Py_XDECREF(made->rows), Py_XDECREF(more);
  if (result) return result;
  PyErr_Clear(); /* the general code builds the batch again and raises the error */
  Py_RETURN_NONE;
}

/* int32s(array, dtype, type of an array): its elements as bytes; None if it is not plain. */
PyObject *int32s(PyObject *self, PyObject *const *args, Py_ssize_t count) {
  (void)self;
  if (count != 3) return PyErr_Format(PyExc_TypeError, "int32s takes 3 arguments, not %zd", count);
  Numbers numbers = {NULL, 0, 0};
  Py_ssize_t n = length(args[0]) < 0 ? extend(&numbers, args[0], args[1], args[2]) : -1;
  PyObject *result = n < 0 ? Py_NewRef(Py_None) : PyBytes_FromStringAndSize((char *)numbers.at, n * 4);
  PyMem_Free(numbers.at);
  return result;
}

/* The ids of one prompt as int32 bytes; NULL if it is not plain, or has an id below 0 or not below the limit. `types`: int32,
   int64, that of an array; `numbers`: room for a list's. */
static PyObject *prompt_ids(PyObject *given, PyObject *const *types, int64_t limit, Numbers *numbers) {
  const Array *found = (const Array *)given;
  if (!given || (PyObject *)Py_TYPE(given) != types[2]) {
    numbers->n = 0;
    Py_ssize_t n = given ? extend(numbers, given, types[0], NULL) : -1;
    return n >= 0 && ids_within(numbers->at, n, limit) ? PyBytes_FromStringAndSize((char *)numbers->at, n * 4) : NULL;
  }
  Py_ssize_t n = found->nd == 1 ? found->shape[0] : 0, wide = found->dtype == types[1], size = wide ? 8 : 4;
  if (!n || (!wide && found->dtype != types[0]) || found->strides[0] != size || (uintptr_t)found->data % (size_t)size) return NULL;
  if (!wide && !ids_within((const int32_t *)(const void *)found->data, n, limit)) return NULL;
  PyObject *own = PyBytes_FromStringAndSize(wide ? NULL : found->data, n * 4);
  if (!wide || !own) return own;
  if (ids_narrow((int32_t *)(void *)PyBytes_AsString(own), (const int64_t *)(const void *)found->data, n, limit)) return own;
  Py_DECREF(own);
  return NULL;
}

/* Whether a request is new, of the usual role and without extra fields; takes its name, its parameters and its prompt's ids. */
enum { NAME, PARAMS, PROMPT, OUTPUT, EXTRA, ROLE };
static int take_new(PyObject *request, PyObject *const *args, PyObject **made, Py_ssize_t at, int64_t most, Numbers *numbers) {
  PyObject *found[FIELDS] = {NULL}, *own = NULL; /* args: names, role, int32, int64, an array's type */
  int plain = 1;
  for (int i = 0; plain && i < FIELDS; i++) plain = (found[i] = PyObject_GetAttr(request, PyTuple_GetItem(args[0], i))) != NULL;
  plain = plain && length(found[OUTPUT]) == 0 && PyDict_CheckExact(found[EXTRA]) && !PyDict_Size(found[EXTRA]);
  if (plain && found[ROLE] == args[1]) own = prompt_ids(found[PROMPT], args + 2, most, numbers);
  for (int i = 0; i < FIELDS; i++)
    if (i <= PARAMS && own) PyList_SetItem(made[i], at, found[i]); /* takes the reference */
    else Py_XDECREF(found[i]);
  return own && !PyList_SetItem(made[2], at, own);
}

/* gather_requests(names, role, int32, int64, type of an array, requests, their type, limit of ids, of lengths, most): a list of
   names, one of parameters, and one of each prompt's ids as int32 bytes; None if a request is not plain. It ends with the
   request that makes `most` ids. */
PyObject *gather_requests(PyObject *self, PyObject *const *args, Py_ssize_t count) {
  (void)self;
  if (count != 10 || !PyTuple_Check(args[0]) || PyTuple_Size(args[0]) != FIELDS)
    return PyErr_Format(PyExc_TypeError, "gather_requests takes 10 arguments, the first a tuple of %d names", FIELDS);
  int64_t limit = PyLong_AsLongLong(args[7]), longest = PyLong_AsLongLong(args[8]), most = PyLong_AsLongLong(args[9]);
  Py_ssize_t n = PyErr_Occurred() ? -1 : length(args[5]);
  if (PyErr_Occurred()) return NULL;
  PyObject *made[3] = {NULL}, *result = NULL;
  Numbers numbers = {NULL, 0, 0};
  int plain = n >= 0;
  for (int i = 0; plain && i < 3; i++) plain = (made[i] = PyList_New(n)) != NULL;
  for (Py_ssize_t at = 0; plain && at < n; at++) {
    if (most <= 0) {
      for (int i = 0; i < 3; i++) PyList_SetSlice(made[i], at, n, NULL);
      break;
    }
    PyObject *request = item(args[5], at);
    plain = request && (PyObject *)Py_TYPE(request) == args[6] && take_new(request, args, made, at, limit, &numbers);
    Py_ssize_t nbytes = plain ? PyBytes_Size(PyList_GetItem(made[2], at)) : 0;
    plain = nbytes > 0 && nbytes / 4 < longest, most -= nbytes / 4;
  }
  PyMem_Free(numbers.at);
  if (plain) result = PyTuple_Pack(3, made[0], made[1], made[2]);
  for (int i = 0; i < 3; i++) Py_XDECREF(made[i]);
  if (result) return result;
  PyErr_Clear(); /* the general code raises the error */
  Py_RETURN_NONE;
}

/* -- of tasks --------------------------------------------------------------------------------------------------------- */
enum { NUMBERS = 6, ASKED = NUMBERS, GIVEN, DRAFTS, ROW }; /* hal_core.slots.native_columns.TASK_NAMES */
static const int places[NUMBERS] = {KINDS, SLOTS, STARTS, LENGTHS, FIRSTS, FIRST_TOKENS};

/* Put the request and the blocks of each task into tuples; 0 if one is no task. */
static int take_parts(PyObject *tasks, PyObject *type, PyObject *const *names, PyObject *requests, PyObject *blocks) {
  for (Py_ssize_t at = 0; at < PyTuple_Size(requests); at++) { /* a collection in PyTuple_New may change the list */
    PyObject *task = item(tasks, at), *request, *given;
    if (!task || (PyObject *)Py_TYPE(task) != type || !(request = PyObject_GetAttr(task, names[ASKED]))) return 0;
    PyTuple_SetItem(requests, at, request); /* takes the reference */
    if (!(given = PyObject_GetAttr(task, names[GIVEN]))) return 0;
    PyTuple_SetItem(blocks, at, given);
  }
  return 1;
}

/* Write one task into the columns; 0 if something of it is not plain. */
static int take_task(Made *made, PyObject *const *names, PyObject *task, Py_ssize_t at, PyObject *request, PyObject *blocks) {
  for (int i = 0; i < NUMBERS; i++) {
    PyObject *number = PyObject_GetAttr(task, names[i]);
    int plain = number && (PyLong_CheckExact(number) || (places[i] == KINDS && PyLong_Check(number)));
    plain = plain && small(number, column(made, places[i]) + at);
    Py_XDECREF(number);
    if (!plain) return 0;
  }
  PyObject *drafts = PyObject_GetAttr(task, names[DRAFTS]);
  Py_ssize_t drafted = drafts && length(drafts) >= 0 ? extend(&made->drafts, drafts, made->dtype, made->array) : -1;
  column(made, DRAFTED)[at] = (int32_t)drafted;
  Py_XDECREF(drafts);
  return drafted >= 0 && take_request(made, at, request) && take_ids(made, at, blocks);
}

/* gather_tasks(tasks, task type, request type, names, dtype, type of an array): (ints, rows, requests), or None. */
PyObject *gather_tasks(PyObject *self, PyObject *const *args, Py_ssize_t count) {
  PyObject *names[NAMES];
  (void)self;
  if (count != 6 || !PyTuple_Check(args[3]) || PyTuple_Size(args[3]) != NAMES)
    return PyErr_Format(PyExc_TypeError, "gather_tasks takes 6 arguments, the fourth a tuple of %d names", (int)NAMES);
  for (int i = 0; i < NAMES; i++) names[i] = PyTuple_GetItem(args[3], i);
  Py_ssize_t n = length(args[0]);
  if (n < 1 || n > 1 << 20) Py_RETURN_NONE;
  Made made = {.type = args[2], .row = names[ROW], .dtype = args[4], .array = args[5]};
  PyObject *requests = PyTuple_New(n), *blocks = PyTuple_New(n);
  int plain = requests && blocks && made_open(&made, n) && take_parts(args[0], args[1], names, requests, blocks);
  if (plain) ahead(requests, blocks, n, made.array);
  for (Py_ssize_t at = 0; plain && at < n; at++)
    plain = take_task(&made, names, item(args[0], at), at, PyTuple_GetItem(requests, at), PyTuple_GetItem(blocks, at));
  Py_XDECREF(blocks);
  return made_close(&made, plain, requests);
}
