/* A stand-in for libcuda: device memory is host memory, and a kernel is executed by the call that finds it at the head of its
   stream. A stream can be held; work put on it then waits, in a queue that can be full. Calls that put work on a stream are
   noted by name. Beside a capture it is as strict as CUDA's. */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef uint64_t u64;
typedef uint32_t u32;
typedef uint8_t u8;
enum { OK = 0, INVALID = 1, NO_MEMORY = 2, NO_CONTEXT = 201, NOT_READY = 600, TOO_LONG = 702, UNSUPPORTED = 900, ISOLATION = 905, CAPTURED = 907 };
enum { COPY, SET, LAUNCH, RECORD, WAIT, CALL };
enum { PATIENCE = 20, NOTED = 1 << 14, PIECE = 16384 };

typedef struct { volatile int *passed; int captured; u32 flags; } Event; /* of its last record; each record has its own, never freed */
typedef struct { int passed; double at; } Mark;
typedef struct Op {
  struct Op *next;
  int kind;
  u8 *to;
  u8 *from;
  u64 nbytes;
  volatile int *passed;
  const char *kernel;
  u32 blocks, rows, threads;
  _Alignas(16) u64 params[512];
  int (*begins)(void *); /* of a CALL: whether it may be executed now, */
  void (*call)(void *);  /* and the function that executes it */
} Op;
typedef struct Stream { struct Stream *next; Op *first, *last; int queued, work, held, capturing; } Stream;

static _Thread_local int capture_mode;
static _Thread_local void *contexts[8]; /* of this thread: the current one is the last */
static _Thread_local int depth;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static Stream *streams, main_stream;
static char notes[NOTED][24], failing[32], relaxed[512];
static int still; /* no work can begin before a call adds some or lets a stream go */
static int noted, spoilt, idle, limit = 1 << 30, work_limit = 1 << 30;
static int capturing; /* 0, or a mode of cuStreamBeginCapture and 1 */
static pthread_t capturer;
static Op *graph, *graph_end; /* the captured work */
static long live, waiting, exchanges, nodes;

/* As found on an H100 (driver 580): events, streams, pinned memory and modules are made in the current context, and the
   default streams are those of the current context. Created streams have their own context. */
static void *current(void) { return depth ? contexts[depth - 1] : NULL; }
static int bare(void *stream) { return (uintptr_t)stream < 3 && !current(); }
int cuCtxGetCurrent(void **context) { return *context = current(), OK; }
int cuCtxSetCurrent(void *context) { return depth = 1, contexts[0] = context, OK; }
int cuCtxPushCurrent_v2(void *context) { return contexts[depth++] = context, OK; }
int cuCtxPopCurrent_v2(void **context) { return *context = current(), depth--, OK; }
int stand_in_current(void) { return !!current(); }

static void note(const char *name) {
  if (noted < NOTED) snprintf(notes[noted++], sizeof notes[0], "%.23s", name);
}
static int fails(const char *name) { return name[0] && !strcmp(failing, name); }
static Stream *stream_of(void *handle) {
  if (!streams) streams = &main_stream;
  return (uintptr_t)handle < 3 ? &main_stream : handle;
}

/* Whether a capture forbids this thread a call that may touch more than its stream, and is invalidated by it. */
static int forbidden(const char *call) {
  int own = capturing && capturing != 3 && pthread_equal(capturer, pthread_self()), others = capturing == 1;
  if ((own && capture_mode != 2) || (others && capture_mode == 0)) return spoilt = 1;
  if ((own || others) && !strstr(relaxed, call) && strlen(relaxed) + strlen(call) + 2 < sizeof relaxed)
    strcat(strcat(relaxed, call), " ");
  return 0;
}

/* -- kernels: equivalents of hal_cuda/kernels, or those themselves ------------------------------------------------------------- */
typedef struct { u64 base, stride; u32 source, nbytes; } Spread;
typedef struct { u64 dst, source; u32 nbytes, pattern; } Write;
typedef struct { u64 memory, block, spread; u32 writes, records, fields, record_bytes, slots_at, records_at; u64 payload_at; } Plan;
typedef struct { u64 dst, cycle; u32 nbytes, n0, n1; int64_t step0, step1; } Fill;
typedef struct { u64 dst; u32 nbytes, unused; u8 data[1024]; } Small;
typedef struct { u64 dst, src; u32 element, unused, shape[4]; int64_t to[4], from[4]; u64 count; } Strided;
#define AT(address) ((u8 *)(uintptr_t)(address))

static void fill_bytes(u8 *to, u64 cycle, u64 nbytes) {
  for (u64 i = 0; i < nbytes; i++) to[i] = (u8)(cycle >> (i % 8 * 8));
}
static void spread(u64 memory, u64 table, u32 fields, u64 slot, const u8 *record) {
  for (u32 i = 0; i < fields; i++) {
    const Spread *f = (const Spread *)AT(table) + i;
    memcpy(AT(memory + f->base + slot * f->stride), record + f->source, f->nbytes);
  }
}
static void hal_write(const Plan *p) {
  for (u32 i = 0; i < p->writes; i++) {
    const Write *w = (const Write *)AT(p->block) + i;
    if (w->pattern) fill_bytes(AT(p->memory + w->dst), w->source, w->nbytes);
    else memcpy(AT(p->memory + w->dst), AT(p->block + p->payload_at + w->source), w->nbytes);
  }
  for (u32 i = 0; i < p->records; i++)
    spread(p->memory, p->spread, p->fields, ((u32 *)AT(p->block + p->slots_at))[i],
           AT(p->block + p->records_at + (u64)i * p->record_bytes));
}
static void hal_copy_strided(const Strided *c) { /* backwards: threads run in any order */
  for (u64 i = c->count; i--;) {
    u64 rest = i, to = c->dst, from = c->src;
    for (int axis = 3; axis >= 0; axis--) {
      u64 at = rest % c->shape[axis];
      rest /= c->shape[axis], to += at * c->to[axis], from += at * c->from[axis];
    }
    memcpy(AT(to), AT(from), c->element);
  }
}
void stand_in_update(const void *state, u32 slots); /* update.cpp: the product's own kernels */
void stand_in_enter(const void *enter, u32 blocks, u32 rows);
void stand_in_copy_out(const u64 *numbers, u32 blocks);
void stand_in_enter_few(const void *enter, u32 blocks, u32 rows);
u32 stand_in_enter_bytes(int few);
static void launch(const Op *op) {
  const void *p = op->params;
  const Fill *f = p;
  const Small *s = p;
  if (!strcmp(op->kernel, "hal_write")) hal_write(p);
  else if (!strcmp(op->kernel, "hal_enter")) stand_in_enter(p, op->blocks, op->rows);
  else if (!strcmp(op->kernel, "hal_enter_few")) stand_in_enter_few(p, op->blocks, op->rows);
  else if (!strcmp(op->kernel, "hal_copy_out")) stand_in_copy_out(op->params, op->blocks);
  else if (!strcmp(op->kernel, "hal_small")) memcpy(AT(s->dst), s->data, s->nbytes);
  else if (!strcmp(op->kernel, "hal_copy_strided")) hal_copy_strided(p);
  else if (!strcmp(op->kernel, "hal_update_inputs")) stand_in_update(p, op->blocks * op->threads);
  else if (!strcmp(op->kernel, "hal_fill"))
    for (u32 i = 0; i < f->n0 * f->n1; i++)
      fill_bytes(AT(f->dst + i / f->n1 * f->step0 + i % f->n1 * f->step1), f->cycle, f->nbytes);
}
static int params_of(Op *op, const char *kernel, void **params) {
  const struct { const char *name; size_t nbytes; } sizes[] = {
      {"hal_write", sizeof(Plan)}, {"hal_enter", stand_in_enter_bytes(0)}, {"hal_enter_few", stand_in_enter_bytes(1)},
      {"hal_small", sizeof(Small)},
      {"hal_copy_strided", sizeof(Strided)}, {"hal_hold", 8}, {"hal_update_inputs", 200}};
  if (!strcmp(kernel, "hal_copy_out")) {
    for (int i = 0; i < 3; i++) op->params[i] = *(u64 *)params[i];
    return OK;
  }
  if (!strcmp(kernel, "hal_fill")) {
    Fill f = {*(u64 *)params[0], *(u64 *)params[1], *(u32 *)params[2], *(u32 *)params[3], *(u32 *)params[4],
              *(int64_t *)params[5], *(int64_t *)params[6]};
    return memcpy(op->params, &f, sizeof f), OK;
  }
  for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
    if (!strcmp(kernel, sizes[i].name)) return memcpy(op->params, params[0], sizes[i].nbytes), OK;
  return INVALID;
}

/* -- streams ---------------------------------------------------------------------------------------------------------- */
static int ready(const Stream *stream, const Op *op) {
  if (stream->held) return 0;
  if (op->kind == WAIT) return *op->passed;
  if (op->kind == CALL) return op->begins(op->to);
  return !(op->kind == LAUNCH && !strcmp(op->kernel, "hal_hold") && !*(volatile u32 *)AT(op->params[0]));
}
static int works(const Op *op) { return op->kind != RECORD && op->kind != WAIT; } /* calls that take room in CUDA's queues */
static void execute(Op *op) {
  if (idle && op->kind != RECORD) return;
  if (op->kind == COPY) memcpy(op->to, op->from, op->nbytes);
  if (op->kind == SET) for (u64 i = 0; i < op->nbytes; i++) ((u32 *)op->to)[i] = op->blocks;
  if (op->kind == LAUNCH) launch(op);
  if (op->kind == CALL) op->call(op->to);
  if (op->kind == RECORD) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    ((Mark *)op->passed)->at = (double)now.tv_sec * 1e3 + (double)now.tv_nsec * 1e-6;
    *op->passed = 1;
  }
}
static void pump(void) {
  stream_of(NULL);
  for (int moved = 1; moved;) {
    moved = 0, still = 1;
    for (Stream *s = streams; s; s = s->next) {
      while (s->first && ready(s, s->first)) {
        Op *op = s->first;
        s->first = op->next;
        s->queued--, s->work -= works(op), moved = 1;
        execute(op);
        free(op);
      }
      if (s->first && !s->held && s->first->kind != WAIT) still = 0; /* a held kernel's flag changes without a call */
    }
  }
  pthread_cond_broadcast(&changed);
}
static void look(void) { /* of many held streams, none need be walked for each query */
  if (!still) pump();
}
static int pause_until(const struct timespec *end) { return pthread_cond_timedwait(&changed, &lock, end); }
static struct timespec later(long ns) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  now.tv_sec += ns / 1000000000, now.tv_nsec += ns % 1000000000;
  if (now.tv_nsec >= 1000000000) now.tv_sec++, now.tv_nsec -= 1000000000;
  return now;
}
static int enqueue(void *handle, Op op) {
  Stream *s = stream_of(handle);
  struct timespec end = later(PATIENCE * 1000000000l);
  pump();
#define FULL (s->queued >= limit || (works(&op) && s->work >= work_limit))
  waiting += FULL;
  while (FULL)
    if (pause_until(&end)) return TOO_LONG;
  Op *kept = malloc(sizeof *kept);
  *kept = op;
  kept->next = NULL;
  if (s->first) s->last->next = kept;
  else s->first = kept;
  s->last = kept;
  s->queued++, s->work += works(&op);
  pump();
  return OK;
}
#define LOCKED(work) do { pthread_mutex_lock(&lock); int status = (work); pthread_mutex_unlock(&lock); return status; } while (0)

static int put(const char *name, void *stream, Op op) {
  if (fails(name)) return INVALID;
  if (bare(stream)) return NO_CONTEXT;
  if (stream_of(stream)->capturing) {
    Op *kept = malloc(sizeof *kept);
    *kept = op;
    kept->next = NULL;
    graph_end = *(graph ? &graph_end->next : &graph) = kept;
    return nodes++, OK;
  }
  if (name[0]) note(name);
  return enqueue(stream, op);
}
int cuMemcpyHtoDAsync_v2(u64 to, const void *from, size_t n, void *s) {
  LOCKED(put("copy", s, (Op){.kind = COPY, .to = AT(to), .from = (u8 *)from, .nbytes = n}));
}
int cuMemcpyDtoHAsync_v2(void *to, u64 from, size_t n, void *s) {
  LOCKED(put("", s, (Op){.kind = COPY, .to = to, .from = AT(from), .nbytes = n}));
}
int cuMemsetD32Async(u64 to, u32 word, size_t n, void *s) {
  LOCKED(put("memset", s, (Op){.kind = SET, .to = AT(to), .blocks = word, .nbytes = n}));
}
int cuLaunchKernel(void *f, u32 x, u32 y, u32 z, u32 tx, u32 ty, u32 tz, u32 shared, void *s, void **params, void **extra) {
  Op op = {.kind = LAUNCH, .kernel = f, .blocks = x, .rows = y, .threads = tx};
  (void)z, (void)ty, (void)tz, (void)shared, (void)extra;
  int status = params_of(&op, f, params);
  if (status) return status;
  LOCKED(put(f, s, op));
}
int cuEventCreate(void **event, u32 flags) {
  return !current() ? NO_CONTEXT : (((Event *)(*event = calloc(1, sizeof(Event))))->flags = flags, live++, OK);
}
int cuEventDestroy_v2(void *event) { return free(event), live--, OK; }
static int record(Event *e, void *s) {
  if (bare(s)) return NO_CONTEXT;
  e->captured = stream_of(s)->capturing;
  if (e->captured) return nodes++, OK;
  e->passed = calloc(1, sizeof(Mark));
  return enqueue(s, (Op){.kind = RECORD, .passed = e->passed});
}
int cuEventRecord(void *e, void *s) { LOCKED(record(e, s)); }
int cuEventQuery(void *event) {
  Event *e = event;
  if (forbidden("cuEventQuery")) return UNSUPPORTED;
  if (e->captured) return CAPTURED;
  LOCKED((look(), !e->passed || *e->passed ? OK : NOT_READY));
}
static int elapsed(float *milliseconds, Event *from, Event *to) {
  if ((from->flags | to->flags) & 2 || !from->passed || !to->passed) return INVALID; /* CU_EVENT_DISABLE_TIMING */
  if (!*from->passed || !*to->passed) return NOT_READY;
  return *milliseconds = (float)(((Mark *)to->passed)->at - ((Mark *)from->passed)->at), OK;
}
int cuEventElapsedTime(float *milliseconds, void *from, void *to) { LOCKED(elapsed(milliseconds, from, to)); }
static int synchronize(Event *e) {
  while (pump(), e->passed && !*e->passed) {
    struct timespec soon = later(1000000); /* a held kernel's flag changes without a call */
    pause_until(&soon);
  }
  return OK;
}
int cuEventSynchronize(void *e) { if (forbidden("cuEventSynchronize")) return UNSUPPORTED; LOCKED(synchronize(e)); }
static int wait_for(void *s, Event *e) {
  char name[24];
  snprintf(name, sizeof name, "waits %lx", (unsigned long)(uintptr_t)s);
  if (bare(s)) return NO_CONTEXT;
  if (stream_of(s)->capturing) return e->captured ? OK : (spoilt = 1, ISOLATION);
  return e->passed ? put(name, s, (Op){.kind = WAIT, .passed = e->passed}) : OK;
}
int cuStreamWaitEvent(void *s, void *e, u32 flags) { (void)flags; LOCKED(wait_for(s, e)); }
static int make(void **stream) {
  Stream *s = calloc(1, sizeof *s);
  stream_of(NULL);
  s->next = streams, streams = s, *stream = s;
  return OK;
}
int cuStreamCreate(void **stream, u32 flags) { (void)flags; LOCKED(current() ? make(stream) : NO_CONTEXT); }
int cuStreamQuery(void *s) { if (forbidden("cuStreamQuery")) return UNSUPPORTED; LOCKED((look(), stream_of(s)->queued ? NOT_READY : OK)); }
int cuStreamIsCapturing(void *s, int *state) { LOCKED(bare(s) ? NO_CONTEXT : (*state = stream_of(s)->capturing, OK)); }
int cuThreadExchangeStreamCaptureMode(int *mode) {
  int before = capture_mode;
  return capture_mode = *mode, *mode = before, exchanges++, OK;
}
int cuMemAlloc_v2(u64 *address, size_t n, int pinned) { /* and the other allocations, of whatever kind */
  if (pinned && !current()) return NO_CONTEXT;
  if (forbidden("cuMemAlloc")) return UNSUPPORTED;
  if (fails("alloc")) return NO_MEMORY;
  void *made = aligned_alloc(256, (n + 255) / 256 * 256);
  *address = (u64)(uintptr_t)memset(made, 0xA5, (n + 255) / 256 * 256);
  return live++, OK;
}
int cuMemFree_v2(u64 address) { return forbidden("cuMemFree") ? UNSUPPORTED : (free(AT(address)), live--, OK); }

int stand_in_call(void *s, int (*begins)(void *), void (*call)(void *), void *with) { /* another library's work */
  LOCKED(put("call", s, (Op){.kind = CALL, .to = with, .begins = begins, .call = call}));
}

/* -- for tests -------------------------------------------------------------------------------------------------------- */
void *stand_in_function(const char *name) { return strcpy(malloc(strlen(name) + 1), name); }
void stand_in_fail(const char *name) { snprintf(failing, sizeof failing, "%s", name); }
const char *stand_in_note(int at) { return at < noted ? notes[at] : ""; }
int stand_in_noted(void) { return noted; }
void stand_in_forget(void) { noted = 0; }
void stand_in_idle(int on) { idle = on; } /* for measurements: no copies, no kernels */
void stand_in_limit(int calls) { limit = calls; } /* capacity of a stream's queue */
void stand_in_work_limit(int work) { work_limit = work; }
int stand_in_hold(void *s, int held) { LOCKED((stream_of(s)->held = held, pump(), OK)); }
int stand_in_forbidden(const char *call) { return forbidden(call); } /* for calls that the bindings answer themselves */
const char *stand_in_relaxed(void) { return relaxed; }
static int capture(Stream *s, int mode) {
  for (Op *op; mode && (op = graph); free(op)) graph = op->next;
  if (mode) spoilt = nodes = relaxed[0] = 0, capturer = pthread_self();
  return capturing = s->capturing = mode, OK;
}
int stand_in_capture(void *s, int mode) { LOCKED(capture(stream_of(s), mode)); } /* 0 ends it; else CUDA's mode and 1 */
static int replay(void *s) {
  for (const Op *op = graph; op; op = op->next) enqueue(s, *op);
  return OK;
}
int stand_in_replay(void *s) { LOCKED(replay(s)); }
int cuGraphLaunch(void *exec, void *s) { /* for any handle, the graph captured last */
  char name[24];
  snprintf(name, sizeof name, "graph %lx", (unsigned long)(uintptr_t)exec);
  if (fails("graph")) return INVALID;
  if (bare(s)) return NO_CONTEXT;
  note(name);
  LOCKED(replay(s));
}
long stand_in_count(int which) {
  return which == 0 ? live : which == 1 ? waiting : which == 2 ? exchanges : which == 3 ? capture_mode : which == 4 ? spoilt : nodes;
}
