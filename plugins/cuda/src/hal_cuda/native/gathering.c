/* The columns of a batch, from the lists or the tasks that a caller gives: the quick roads of
   hal_core.slots.tasks.TaskBatch.prefill and .of. What is not plain (other sequences, numbers or arrays) is left to them. */
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

/* -- of tasks --------------------------------------------------------------------------------------------------------- */
enum { KIND, SLOT, START, LENGTH, FIRST, TOKEN, NUMBERS, ASKED = NUMBERS, GIVEN, DRAFTS, ROW, ROLE, GENERATED, PARAMS, MOST, DTYPE, NAMES };
typedef struct { int32_t *at; Py_ssize_t n, room; } Grown;
typedef struct {
  PyObject *const *names, *task, *request, *prefill, *dtype; /* types, SplitRole.PREFILL, int32 */
  Py_ssize_t n;
  int32_t *columns[NUMBERS], *counts, *drafted; /* [n] each */
  char *rows;
  Grown blocks, drafts;
} Tasks;

static int room_for(Grown *grown, Py_ssize_t more) {
  if (grown->n + more <= grown->room) return 1;
  Py_ssize_t room = 2 * grown->room + more + 64;
  int32_t *at = PyMem_Realloc(grown->at, (size_t)room * 4);
  if (at) grown->at = at, grown->room = room;
  return at != NULL;
}

static int small(PyObject *number, int32_t *out) {
  int overflow = 0;
  long value = PyLong_AsLongAndOverflow(number, &overflow);
  *out = (int32_t)value;
  return !overflow && value >= INT32_MIN && value <= INT32_MAX;
}

/* Plain whole numbers, or an array of them, behind those that are there; how many, -1 for anything else. */
static Py_ssize_t extend(Grown *grown, PyObject *given, const Tasks *tasks) {
  Py_ssize_t n = length(given);
  Py_buffer view;
  if (n < 0) {
    if (!view_of(given, tasks->dtype, tasks->names[DTYPE], &view)) return -1;
    n = view.len / 4;
    if (room_for(grown, n)) memcpy(grown->at + grown->n, view.buf, (size_t)n * 4);
    else n = -1;
    PyBuffer_Release(&view);
  } else if (room_for(grown, n)) {
    for (Py_ssize_t at = 0; at < n; at++) {
      PyObject *one = item(given, at);
      if (!one || !PyLong_CheckExact(one) || !small(one, grown->at + grown->n + at)) return -1;
    }
  } else {
    return -1;
  }
  grown->n += n;
  return n;
}

/* Whether no state can take a hand-off of the request: it prefills alone, or its first token is its last. */
static int hopeless(PyObject *request, const Tasks *tasks) {
  PyObject *role = PyObject_GetAttr(request, tasks->names[ROLE]), *params = PyObject_GetAttr(request, tasks->names[PARAMS]);
  PyObject *generated = PyObject_GetAttr(request, tasks->names[GENERATED]);
  PyObject *most = params ? PyObject_GetAttr(params, tasks->names[MOST]) : NULL;
  int32_t have = 0, bound = 0;
  int found = !role || !generated || !most || role == tasks->prefill || !small(generated, &have) || !small(most, &bound) ||
              (int64_t)have + 1 >= bound;
  Py_XDECREF(role), Py_XDECREF(params), Py_XDECREF(generated), Py_XDECREF(most);
  return found;
}

/* One task into the columns; 0 where something of it is not plain. */
static int take_task(Tasks *tasks, PyObject *task, Py_ssize_t at, PyObject *requests) {
  if (!task || (PyObject *)Py_TYPE(task) != tasks->task) return 0;
  for (int i = 0; i < NUMBERS; i++) {
    PyObject *number = PyObject_GetAttr(task, tasks->names[i]);
    int plain = number && (PyLong_CheckExact(number) || (i == KIND && PyLong_Check(number)));
    plain = plain && small(number, &tasks->columns[i][at]);
    Py_XDECREF(number);
    if (!plain) return 0;
  }
  int kind = tasks->columns[KIND][at];
  PyObject *request = PyObject_GetAttr(task, tasks->names[ASKED]);
  if (!request) return 0;
  PyTuple_SetItem(requests, at, request); /* takes the reference */
  if (kind < PREFILL || kind > HAND_OFF || (PyObject *)Py_TYPE(request) != tasks->request) return 0;
  if (kind == PREFILL && tasks->columns[TOKEN][at] != -1) return 0; /* columns of new requests alone have no place for it */
  PyObject *row = PyObject_GetAttr(request, tasks->names[ROW]);
  int plain = row && PyBytes_CheckExact(row) && PyBytes_Size(row) == REQUEST * 8;
  if (plain) memcpy(tasks->rows + at * REQUEST * 8, PyBytes_AsString(row), REQUEST * 8);
  Py_XDECREF(row);
  PyObject *blocks = PyObject_GetAttr(task, tasks->names[GIVEN]), *drafts = PyObject_GetAttr(task, tasks->names[DRAFTS]);
  Py_ssize_t ids = blocks ? extend(&tasks->blocks, blocks, tasks) : -1;
  Py_ssize_t drafted = drafts && length(drafts) >= 0 ? extend(&tasks->drafts, drafts, tasks) : -1;
  Py_XDECREF(blocks), Py_XDECREF(drafts);
  tasks->counts[at] = (int32_t)ids, tasks->drafted[at] = (int32_t)drafted;
  return plain && ids >= 0 && drafted >= 0 && !(kind == HAND_OFF && hopeless(request, tasks));
}

static PyObject *bytes_of(const void *from, Py_ssize_t nbytes) { return PyBytes_FromStringAndSize(from, nbytes); }

/* hal_core.slots.staying.more_of, of these columns. */
static PyObject *more_of(const Tasks *tasks) {
  Py_ssize_t n = tasks->n, all_new = !tasks->drafts.n;
  for (Py_ssize_t at = 0; at < n; at++) all_new = all_new && tasks->columns[KIND][at] == PREFILL && !tasks->columns[FIRST][at];
  PyObject *made = bytes_of(NULL, all_new ? 0 : (4 * n + tasks->drafts.n) * 4);
  if (!made || all_new) return made;
  int32_t *to = (int32_t *)(void *)PyBytes_AsString(made);
  const int32_t *columns[] = {tasks->columns[KIND], tasks->columns[FIRST], tasks->columns[TOKEN], tasks->drafted};
  for (int i = 0; i < 4; i++, to += n) memcpy(to, columns[i], (size_t)n * 4);
  if (tasks->drafts.n) memcpy(to, tasks->drafts.at, (size_t)tasks->drafts.n * 4);
  return made;
}

/* gather_tasks(tasks, task type, request type, SplitRole.PREFILL, names, dtype): (columns as of gather, requests), or None.
   `names` are those of the enumeration above. */
PyObject *gather_tasks(PyObject *self, PyObject *const *args, Py_ssize_t count) {
  PyObject *names[NAMES], *result = NULL;
  (void)self;
  if (count != 6 || !PyTuple_Check(args[4]) || PyTuple_Size(args[4]) != NAMES)
    return PyErr_Format(PyExc_TypeError, "gather_tasks takes 6 arguments, the fifth a tuple of %d names", (int)NAMES);
  for (int i = 0; i < NAMES; i++) names[i] = PyTuple_GetItem(args[4], i);
  Py_ssize_t n = length(args[0]), width = n * 4;
  if (n < 1 || n > 1 << 20) Py_RETURN_NONE;
  Tasks tasks = {.names = names, .task = args[1], .request = args[2], .prefill = args[3], .dtype = args[5], .n = n};
  int32_t *numbers = PyMem_Malloc((size_t)(n * (NUMBERS + 2)) * 4);
  PyObject *requests = PyTuple_New(n), *rows = bytes_of(NULL, n * REQUEST * 8);
  int plain = numbers && requests && rows;
  if (plain) {
    for (int i = 0; i < NUMBERS; i++) tasks.columns[i] = numbers + i * n;
    tasks.counts = numbers + NUMBERS * n, tasks.drafted = tasks.counts + n, tasks.rows = PyBytes_AsString(rows);
  }
  for (Py_ssize_t at = 0; plain && at < n; at++) plain = take_task(&tasks, item(args[0], at), at, requests);
  if (plain)
    result = Py_BuildValue("((ONNNNNN)O)", rows, bytes_of(tasks.columns[SLOT], width), bytes_of(tasks.columns[START], width),
                           bytes_of(tasks.columns[LENGTH], width), bytes_of(tasks.counts, width),
                           bytes_of(tasks.blocks.at, tasks.blocks.n * 4), more_of(&tasks), requests);
  PyMem_Free(numbers), PyMem_Free(tasks.blocks.at), PyMem_Free(tasks.drafts.at);
  Py_XDECREF(requests), Py_XDECREF(rows);
  if (result) return result;
  PyErr_Clear(); /* whoever builds the batch the long way says what is wrong */
  Py_RETURN_NONE;
}
