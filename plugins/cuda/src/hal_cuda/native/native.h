/* The native part of the cuda device: the hooks' work on the host, in calls that keep the GIL.

   It uses Python's limited API and the C library only. Python finds the driver's functions at run time and passes them in
   (native.py), so building needs no CUDA toolkit. */
#ifndef HAL_NATIVE_H
#define HAL_NATIVE_H
#define Py_LIMITED_API 0x030b0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

/* Layouts of the core that this code reads. native.py makes the same text from the running core, and uses the native part only
   if both are equal: a part built for another core is never called. */
#define ROWS 5       /* row fields of a slot: ROW_FIELDS */
#define BLOCKS 3     /* block_tables; token_ids too */
#define TOKENS 4
#define PREFILLED 5  /* columns of the host table after the lengths */
#define SLOT_ADMISSION 6
#define HELD 7
#define TABLE 8      /* number of columns */
#define REQUEST 8    /* int64s of a request's packed row: REQUEST_ROW, */
#define ID 5         /* the admission id, */
#define KEY 6        /* the config key and */
#define LEFT 7       /* the tokens left to generate after the lengths */
#define PLACE 4      /* columns of the table of staged requests: id, address, chunk, waits */
#define CHUNK 5      /* int64s of a chunk's numbers: address on the host and on the device, nbytes, used, uploaded */
#define ENTRY 16     /* int64s of an entry of kernels/enter.cu */
#define ENTER 272    /* bytes of its parameters, which begin with the addresses of entries and block ids */
#define FEW 3072     /* bytes of entries and block ids that are part of the launch */
#define PIECE 16384  /* bytes of a token row that one block of threads writes */
#define THREADS 128
#define WRITTEN (THREADS * 16) /* bytes of a copy out by a kernel that one block of threads writes at once */
#define NAMES 10     /* attributes that a batch is read by: hal_core.slots.native_columns.TASK_NAMES */
#define FIELDS 6     /* and a request to admit: REQUEST_NAMES */
#define PREFILL 1    /* the kind of a new request's task, */
#define TRAITS 0, 3, 2, 0, 5, 8, 8 /* what tasks of each kind do, by the kind's number: TRAITS; its bits */
#define ENTERS 1
#define FEEDS 2
#define CONTINUES 4
#define LEAVES 8
#define STR(...) #__VA_ARGS__
#define TEXT(...) STR(__VA_ARGS__)
#define LAYOUT                                                                                                          \
  "rows " TEXT(ROWS) " " TEXT(BLOCKS) " " TEXT(TOKENS) " table " TEXT(PREFILLED) " " TEXT(SLOT_ADMISSION) " " TEXT(HELD) " "    \
  TEXT(TABLE) " request " TEXT(ID) " " TEXT(KEY) " " TEXT(LEFT) " " TEXT(REQUEST) " place " TEXT(PLACE) " chunk " TEXT(CHUNK)    \
  " entry " TEXT(ENTRY) " enter " TEXT(ENTER) " few " TEXT(FEW) " piece " TEXT(PIECE) " threads " TEXT(THREADS)                \
  " names " TEXT(NAMES) " " TEXT(FIELDS) " prefill " TEXT(PREFILL) " traits " TEXT(TRAITS)

/* -- the driver (calls.c) -- */
typedef int Status; /* a CUresult */
typedef uint64_t Address;
typedef void *Handle; /* a CUstream, CUevent or CUfunction */

#define CAPTURED_STREAM (-1) /* in place of a CUresult: `call` is the handle of a stream that is being captured */
#define QUEUES 256 /* streams that are counted separately */
#define NEAR 16   /* size of the table in which a stream's queue is looked up first */
#define MARKS 4   /* events in flight for each stream, */
#define APART 64  /* copies and launches apart */
#define BOUND 256 /* of ours in flight on a stream, until the GIL is released; CUDA's launch queues hold 1,021, */
#define ROOM 832  /* until the caller waits with a deadline: the rest is for other users of the stream; streams of */
#define OWN 1012  /* the device's own have no others */

typedef struct {
  Handle stream;
  uint64_t issued, marked, passed; /* work submitted, up to the last mark, up to the last passed mark */
  int first, count;
  struct { Handle event; uint64_t at; } marks[MARKS];
} Queue;

typedef struct {
  PyObject_HEAD
  Status (*upload)(Address, const void *, size_t, Handle);
  Status (*download)(void *, Address, size_t, Handle);
  Status (*memset32)(Address, unsigned, size_t, Handle);
  Status (*launch)(Handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Handle, void **, void **);
  Status (*record)(Handle, Handle);
  Status (*query)(Handle);
  Status (*create)(Handle *, unsigned);
  Status (*destroy)(Handle);
  Status (*wait)(Handle, Handle, unsigned);
  Status (*capturing)(Handle, int *);
  Status (*exchange)(int *);
  Status (*current)(Handle *);
  Status (*push)(Handle);
  Status (*pop)(Handle *);
  Status (*graph)(Handle, Handle);
  Handle context; /* the device's; NULL until Python sets it */
  PyObject *fail; /* fail(status, call) raises */
  PyObject *full; /* full(stream, event) waits until a stream has room, or raises */
  unsigned long working;
  unsigned long long given_up; /* how often the GIL was released */
  int crowded;    /* more than half of the queues are busy */
  Queue *near[NEAR];
  Queue queues[QUEUES];
} Driver;

/* One upload, one wait for it, one launch, one event; each is omitted if its number is 0. */
typedef struct {
  Address to, from;
  size_t nbytes;
  Handle up, arrival, stream, function;
  unsigned blocks, rows, threads;
  void **params;
  Handle event;
} Work;

/* State around calls on a stream, which are counted (queue_depth.c). */
typedef struct {
  Queue *queue;
  PyThreadState *saved; /* set while the GIL is released */
  Handle mark;          /* an event to record behind the work, */
  int place;            /* which of the queue's marks */
} Turn;
int has_room(Driver *driver, Handle stream, uint64_t room); /* 0, or -1 with an exception */
void mark_now(Driver *driver, Handle stream);
void turn_begin(Driver *driver, Turn *turn, Handle stream, int work);
void turn_end(Turn *turn, Driver *driver, Handle stream);
Status ask(Driver *driver, Handle event);

int perform(Driver *driver, const Work *work); /* work.c: 0, or -1 with an exception */
int refused(Driver *driver, Handle stream);
int failed(Driver *driver, Status status, const char *call); /* raises; -1 */
PyObject *enter(Driver *driver, PyObject *const *args, Py_ssize_t count); /* insertion.c */
PyObject *broadcast(PyObject *self, PyObject *const *args, Py_ssize_t count); /* broadcasting.c */

/* -- a batch of tasks: the two buffers of hal_core.slots.tasks.TaskBatch (host_table.c) -- */
enum { KINDS, SLOTS, STARTS, LENGTHS, COUNTS, FIRSTS, FIRST_TOKENS, DRAFTED, COLUMNS }; /* its COLUMNS */
typedef struct {
  Py_ssize_t n;
  const char *rows;               /* [n, REQUEST] int64, perhaps not aligned */
  const int32_t *columns[COLUMNS];  /* [n] each */
  const int32_t *blocks, *drafts; /* all block ids, and all drafts, task by task */
  Py_ssize_t ids, drafts_in_all;
  Py_buffer held[2];
} Batch;

int batch_open(Batch *batch, PyObject *ints, PyObject *rows); /* 0, or -1 with an exception, and then no buffer is held */
void batch_close(Batch *batch);
static const uint8_t traits_of_kinds[] = {TRAITS};
static inline int traits_of(const Batch *batch, Py_ssize_t at) { return traits_of_kinds[batch->columns[KINDS][at]]; }
static inline int64_t row_of(const Batch *batch, Py_ssize_t at, int column) {
  int64_t value;
  memcpy(&value, batch->rows + (at * REQUEST + column) * 8, 8);
  return value;
}

typedef struct {
  PyObject_HEAD
  Py_buffer table; /* the host table: [slots, TABLE] int64 */
  int64_t *rows;
  PyObject *requests, *live;
  int64_t key, slots, max_model_len, max_blocks, block_size, max_drafts;
  uint8_t *seen; /* [slots] zeros between calls */
} HostTable;
PyObject *int32s(PyObject *self, PyObject *const *args, Py_ssize_t count); /* columns.c */
PyObject *ids(PyObject *self, PyObject *const *args, Py_ssize_t count); /* admitting.c */
PyObject *usual_rows(PyObject *self, PyObject *const *args, Py_ssize_t count); /* output.c */
PyObject *stage(PyObject *self, PyObject *const *args, Py_ssize_t count);
PyObject *gather_requests(PyObject *self, PyObject *const *args, Py_ssize_t count); /* columns.c */
int ids_narrow(int32_t *to, const int64_t *wide, Py_ssize_t n, int64_t limit); /* admitting_batch.c */
int ids_within(const int32_t *ids, Py_ssize_t n, int64_t limit);
PyObject *stage_all(PyObject *self, PyObject *const *args, Py_ssize_t count);
PyObject *gather_tasks(PyObject *self, PyObject *const *args, Py_ssize_t count);
extern PyTypeObject *host_table_type;
extern PyType_Spec host_table_spec, driver_spec;
#endif
