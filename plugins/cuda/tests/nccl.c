/* A stand-in for libnccl, over the stand-in for libcuda (driver.c). Ranks are processes that share a file of memory. A
   broadcast waits on its stream until its source has joined it; work behind it waits too, until the communicator is aborted. */
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { RANKS = 8, SLOTS = 4, ROOM = 1 << 22, SUCCESS = 0, INTERNAL = 3, INVALID = 4, PROGRESS = 7 };
typedef struct { char name[128]; } Id;
typedef struct {
  volatile int joined, taken[SLOTS]; /* ranks that came; those that have read a slot */
  volatile long sent[SLOTS];         /* the broadcast in a slot */
  char data[SLOTS][ROOM];
} Shared;
typedef struct { Shared *shared; int ranks, rank; long number; volatile int aborted; } Comm;
typedef struct { Comm *comm; char *place; size_t nbytes; int root; long number; } Work;
typedef int (*Call)(void *stream, int (*ready)(void *), void (*carry_out)(void *), void *work);

static char calls[4096], last[128];
static volatile int error, hangs, failing;
static Call put;                /* stand_in_call of driver.c, */
static int (*forbidden)(const char *); /* and the calls that a capture forbids there */
static void note(const char *text) { if (strlen(calls) + strlen(text) + 2 < sizeof calls) strcat(strcat(calls, text), " "); }
static int fail(const char *why) { return snprintf(last, sizeof last, "%s", why), INTERNAL; }

int ncclGetVersion(int *version) { return *version = 22899, SUCCESS; }
const char *ncclGetErrorString(int status) { return status == INTERNAL ? "internal error" : status ? "an error" : "no error"; }
const char *ncclGetLastError(void *comm) { return (void)comm, last; }

int ncclGetUniqueId(Id *id) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  snprintf(id->name, sizeof id->name, "/hal-nccl-%d-%ld", getpid(), now.tv_nsec);
  int file = shm_open(id->name, O_CREAT | O_EXCL | O_RDWR, 0600);
  if (file < 0 || ftruncate(file, sizeof(Shared))) return fail("no shared memory");
  close(file);
  return note("id"), SUCCESS;
}

int ncclCommInitRankConfig(void **made, int ranks, Id id, int rank, const int *config) {
  int blocking = config[4]; /* behind the size, the magic and the version */
  int file = shm_open(id.name, O_RDWR, 0600);
  note(blocking ? "init" : "init without blocking");
  if (((const unsigned *)config)[2] != 0xcafebeef || ranks > RANKS || file < 0) return fail("what ranks were given is wrong");
  Comm *comm = calloc(1, sizeof *comm);
  comm->ranks = ranks, comm->rank = rank;
  comm->shared = mmap(NULL, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  __sync_fetch_and_add(&comm->shared->joined, 1);
  while (comm->shared->joined < ranks || hangs) usleep(1000);
  if (rank == 0) shm_unlink(id.name);
  return *made = comm, SUCCESS;
}

static int ready(void *given) {
  const Work *work = given;
  const Comm *comm = work->comm;
  if (comm->aborted) return 1;
  if (hangs) return 0;
  if (comm->rank != work->root) return comm->shared->sent[work->number % SLOTS] == work->number;
  return work->number <= SLOTS || comm->shared->taken[work->number % SLOTS] == comm->ranks - 1;
}
static void carry_out(void *given) {
  Work *work = given;
  Shared *shared = work->comm->shared;
  long slot = work->number % SLOTS;
  if (work->comm->aborted) {
  } else if (work->comm->rank == work->root) {
    memcpy(shared->data[slot], work->place, work->nbytes);
    shared->taken[slot] = 0;
    __sync_synchronize();
    shared->sent[slot] = work->number;
  } else {
    memcpy(work->place, shared->data[slot], work->nbytes);
    __sync_fetch_and_add(&shared->taken[slot], 1);
  }
  free(work);
}
int ncclBroadcast(const void *from, void *to, size_t nbytes, int type, int root, void *given, void *stream) {
  Comm *comm = given;
  if (!put || from != to || type != 1 || nbytes > ROOM || comm->aborted) return fail("what is sent is wrong");
  if (failing) return fail("told to fail");
  if (forbidden("cuEventQuery")) return fail("a look at an event beside a capture"); /* NCCL queries its own */
  Work *work = malloc(sizeof *work);
  *work = (Work){comm, to, nbytes, root, ++comm->number};
  note("broadcast");
  return put(stream, ready, carry_out, work) ? fail("the driver failed") : SUCCESS;
}
int ncclCommGetAsyncError(void *comm, int *status) { return (void)comm, *status = error, SUCCESS; }
int ncclCommAbort(void *comm) { return note("abort"), ((Comm *)comm)->aborted = 1, SUCCESS; }
int ncclCommDestroy(void *comm) { return note("destroy"), ((Comm *)comm)->aborted = 1, SUCCESS; }

/* -- for tests -------------------------------------------------------------------------------------------------------- */
void nccl_over(Call driver, int (*captures)(const char *)) { put = driver, forbidden = captures; }
const char *nccl_calls(void) { return calls; }
void nccl_error(int status) { error = status, snprintf(last, sizeof last, "the network"); } /* raised by NCCL's own threads */
void nccl_hang(int on) { hangs = on; }
void nccl_fail(int on) { failing = on; }
