/* Insertion of staged requests into slots, with updates of requests that keep their slots: entries and block ids, one upload, one
   launch, one event. From the batch's two buffers to the event. */
#include "native.h"

#define FIXED 14 /* arguments before the batch */
enum { NOT_STAGED, ENTERED, UPLOADED, NO_ROOM, CAPTURED }; /* as in hal_cuda.insertion */

typedef struct { uint64_t address, mirror, nbytes, used, uploaded; } Chunk; /* numbers of a hal_cuda.staged_requests.Chunk */
typedef struct {
  PyObject *host;
  Py_buffer params, chunks, places; /* ENTER bytes; addresses of chunks, below; the table of staged requests, [places, PLACE] */
  unsigned long long room, mirror, nbytes; /* where entries go on the host, where the kernel reads them, how many fit */
  unsigned long long near; /* so few new bytes are read in place, from pinned memory: an upload would cost the host more */
  Chunk *chosen; /* the one to upload */
  Handle few; /* hal_enter_few, whose entries are part of the launch */
  Work work;
} Call;

static int64_t *place_of(const Call *call, int64_t id) {
  uint64_t places = (uint64_t)call->places.len / (PLACE * 8);
  return (int64_t *)call->places.buf + ((uint64_t)id & (places - 1)) * PLACE;
}

/* Number 0 is the chunk being filled, or NULL; all chunks follow. */
static Chunk *chunk_at(const Call *call, Py_ssize_t at) {
  return (Chunk *)(uintptr_t)((const uint64_t *)call->chunks.buf)[at];
}
static Py_ssize_t chunk_count(const Call *call) { return call->chunks.len / 8; }

/* The address from which the kernel reads a request: in pinned memory if its chunk has new bytes that this call does not upload. */
static uint64_t source_of(const Call *call, uint64_t source) {
  for (Py_ssize_t at = 1; at < chunk_count(call); at++) {
    const Chunk *one = chunk_at(call, at);
    if (one != call->chosen && source >= one->mirror + one->uploaded && source < one->mirror + one->used)
      return source + (one->address - one->mirror);
  }
  return source;
}

/* Whether all entering requests are staged, the slots exist, and no request leaves. */
static int staged(const Call *call, const HostTable *host, const Batch *batch) {
  for (Py_ssize_t at = 0; at < batch->n; at++) {
    int64_t slot = batch->columns[SLOTS][at], id = row_of(batch, at, ID);
    int traits = traits_of(batch, at);
    if (slot < 0 || slot >= host->slots || traits & LEAVES || (traits & ENTERS && place_of(call, id)[0] != id)) return 0;
  }
  return batch->n > 0;
}

static uint64_t new_of(const Chunk *chunk) { return chunk ? chunk->used - chunk->uploaded : 0; }

/* The chunk with the most bytes that are not uploaded; NULL if all are uploaded. */
static Chunk *dirtiest(const Call *call) {
  Chunk *most = NULL;
  for (Py_ssize_t at = 1; at < chunk_count(call); at++)
    if (new_of(chunk_at(call, at)) > new_of(most)) most = chunk_at(call, at);
  return most;
}

/* Reserve room for the entries, and choose the chunk to upload, if any; 0 if they do not fit. */
static int take_room(Call *call, uint64_t need) {
  Chunk *filling = chunk_at(call, 0);
  if (call->room) {
    if (need > call->nbytes) return 0;
    call->chosen = dirtiest(call);
  } else {
    if (!filling || filling->used + need > filling->nbytes) return 0;
    call->room = filling->address + filling->used, call->mirror = filling->mirror + filling->used;
    filling->used += (need + 15) & ~(uint64_t)15;
    call->chosen = filling;
  }
  if (call->chosen && new_of(call->chosen) <= call->near) {
    if (call->chosen == filling) call->mirror = call->room;
    call->chosen = NULL;
  }
  return 1;
}

/* Write entries, and each task's block ids and drafts. Returns the longest token row that is written or reset, in elements. */
static int64_t fill(const Call *call, const HostTable *host, const Batch *batch) {
  int64_t *entry = (int64_t *)(uintptr_t)call->room, longest = 0;
  int32_t *ids = (int32_t *)(uintptr_t)(call->room + (uint64_t)batch->n * ENTRY * 8), *end = ids;
  const int32_t *blocks = batch->blocks, *drafts = batch->drafts, *const *columns = batch->columns;
  for (Py_ssize_t at = 0; at < batch->n; at++, entry += ENTRY) {
    int traits = traits_of(batch, at);
    int32_t count = columns[COUNTS][at], drafted = columns[DRAFTED][at];
    int64_t slot = columns[SLOTS][at], *written = host->rows + slot * TABLE;
    memcpy(entry, written, TABLE * 8);
    entry[TABLE] = 0;
    entry[TABLE + 1] = slot;
    entry[TABLE + 2] = columns[STARTS][at];
    entry[TABLE + 3] = traits & FEEDS ? columns[LENGTHS][at] : 0;
    entry[TABLE + 4] = count;
    entry[TABLE + 5] = end - ids;
    entry[TABLE + 6] = columns[FIRST_TOKENS][at];
    entry[TABLE + 7] = drafted;
    memcpy(end, blocks, (size_t)count * 4);
    memcpy(end + count, drafts, (size_t)drafted * 4);
    blocks += count, drafts += drafted, end += count + drafted;
    if (!(traits & ENTERS)) continue;
    int64_t *place = place_of(call, row_of(batch, at, ID)), total = row_of(batch, at, TOKENS) + (columns[FIRST_TOKENS][at] >= 0);
    entry[TABLE] = (int64_t)source_of(call, (uint64_t)place[1]);
    for (int i = 0; i < ROWS; i++) entry[i] |= row_of(batch, at, i) << 32; /* Lengths of kernels/enter.cu */
    if (written[TOKENS] > longest) longest = written[TOKENS];
    if (total > longest) longest = total;
    place[3] = 0; /* no longer waiting for its insertion */
  }
  return longest;
}

static void close_call(Call *call) {
  if (call->params.obj) PyBuffer_Release(&call->params);
  if (call->chunks.obj) PyBuffer_Release(&call->chunks);
  if (call->places.obj) PyBuffer_Release(&call->places);
}

/* 0, or -1 with an exception; close_call() follows in either case. */
static int open_call(Call *call, PyObject *const *args, Py_ssize_t count) {
  unsigned long long a[10]; /* near, up, arrival, function, few, room, mirror, nbytes, stream, event */
  memset(call, 0, sizeof *call);
  if (count != FIXED || Py_TYPE(args[0]) != host_table_type) {
    PyErr_SetString(PyExc_TypeError, "enter takes a host, 3 buffers and 10 whole numbers before the batch");
    return -1;
  }
  for (int i = 0; i < 10; i++) {
    a[i] = PyLong_AsUnsignedLongLong(args[4 + i]);
    if (a[i] == (unsigned long long)-1 && PyErr_Occurred()) return -1;
  }
  Work work = {.up = (Handle)(uintptr_t)a[1], .arrival = (Handle)(uintptr_t)a[2], .function = (Handle)(uintptr_t)a[3],
               .stream = (Handle)(uintptr_t)a[8], .event = (Handle)(uintptr_t)a[9], .threads = THREADS};
  call->host = args[0], call->work = work;
  call->near = a[0], call->few = (Handle)(uintptr_t)a[4], call->room = a[5], call->mirror = a[6], call->nbytes = a[7];
  if (PyObject_GetBuffer(args[1], &call->params, PyBUF_SIMPLE) || PyObject_GetBuffer(args[2], &call->chunks, PyBUF_SIMPLE) ||
      PyObject_GetBuffer(args[3], &call->places, PyBUF_CONTIG))
    return -1;
  size_t places = (size_t)call->places.len / (PLACE * 8);
  if (call->params.len == ENTER && places && !(places & (places - 1)) && call->chunks.len >= 8 && call->chunks.len % 8 == 0 &&
      call->room % 8 == 0)
    return 0;
  PyErr_SetString(PyExc_ValueError, "enter: parameters, places, chunks or room of another size");
  return -1;
}

/* Insert a batch whose requests are staged: the result of enter(), or -1 with an exception. */
static int go(Driver *driver, Call *call, const HostTable *host, const Batch *batch) {
  int state = 0;
  if (driver->capturing(call->work.stream, &state) || state) return CAPTURED; /* the next caller gets the error */
  uint64_t params[(ENTER + FEW) / 8], longest, need = (uint64_t)batch->n * ENTRY * 8;
  need += (uint64_t)(batch->ids + batch->drafts_in_all) * 4;
  if (call->few && need <= FEW && new_of(dirtiest(call)) <= call->near) { /* beside an upload the entries are part of that */
    call->room = (uintptr_t)(params + ENTER / 8);
    call->work.function = call->few;
  } else if (!take_room(call, need)) {
    return NO_ROOM;
  }
  longest = (uint64_t)fill(call, host, batch);
  void *pointers[] = {params};
  Chunk *chosen = call->chosen;
  memcpy(params, call->params.buf, ENTER);
  params[0] = call->mirror;
  params[1] = call->mirror + (uint64_t)batch->n * ENTRY * 8;
  call->work.blocks = (unsigned)batch->n;
  call->work.rows = longest ? (unsigned)(3 + (longest * 8 + PIECE - 1) / PIECE) : 1;
  call->work.params = pointers;
  if (chosen) { /* otherwise the stream waits for the last upload only */
    call->work.to = chosen->mirror + chosen->uploaded, call->work.from = chosen->address + chosen->uploaded;
    call->work.nbytes = (size_t)(chosen->used - chosen->uploaded);
  }
  if (perform(driver, &call->work)) return -1;
  if (chosen) chosen->uploaded = chosen->used;
  return chosen ? UPLOADED : ENTERED;
}

/* enter(host, params, chunks, places, near, up, arrival, function, few, room, mirror, nbytes, stream, event,
         ints, rows): one of the names above. If room is 0, the entries follow the requests of the chunk being filled. */
PyObject *enter(Driver *driver, PyObject *const *args, Py_ssize_t count) {
  Call call;
  Batch batch;
  PyObject *result = NULL;
  if (open_call(&call, args, count - 2) || batch_open(&batch, args[FIXED], args[FIXED + 1])) goto done;
  const HostTable *host = (const HostTable *)call.host;
  int how = staged(&call, host, &batch) ? go(driver, &call, host, &batch) : NOT_STAGED;
  if (how >= 0) result = PyLong_FromLong(how);
  batch_close(&batch);
done:
  close_call(&call);
  return result;
}
