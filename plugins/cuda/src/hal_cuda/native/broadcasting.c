/* A broadcast of tokens over NCCL, whose function Python finds at run time (nccl.py). On the source the header is written first.
   After the collective the header is copied out beside the stream, which does not wait for that copy. */
#include "native.h"

typedef int (*Broadcast)(const void *, void *, size_t, int, int, void *, Handle); /* ncclBroadcast: a ncclResult_t */
#define UINT8 1   /* ncclUint8 */
#define RELAXED 2 /* CU_STREAM_CAPTURE_MODE_RELAXED */
#define MOST 1024 /* bytes of the kernel's data: SMALL_BYTES of structs.py */

typedef struct { uint64_t call, source, address, nbytes, header, header_bytes, kernel, params; } Fixed; /* collectives.py */
typedef struct { uint64_t to; uint32_t nbytes, unused; unsigned char data[MOST]; } Small;               /* kernels/writes.cu */

/* Header in the kernel's parameters, collective, event behind it. Returns a status of the driver or of NCCL. */
static Status send(Driver *driver, const Fixed *fixed, const Py_buffer *header, void *comm, Handle stream, Handle event,
                   const char **call, int *nccl) {
  Status status = 0;
  Turn turn;
  turn_begin(driver, &turn, stream, 4);
  if (header->len) {
    void **params = (void **)(uintptr_t)fixed->params;
    Small *small = params[0];
    small->to = fixed->header, small->nbytes = (uint32_t)header->len;
    memcpy(small->data, header->buf, (size_t)header->len);
    *call = "cuLaunchKernel";
    status = driver->launch((Handle)(uintptr_t)fixed->kernel, 1, 1, 1, THREADS, 1, 1, 0, stream, params, NULL);
  }
  if (!status) { /* NCCL queries its own events, which a capture in another thread forbids */
    int mode = RELAXED;
    Status exchanged = driver->exchange(&mode);
    void *place = (void *)(uintptr_t)fixed->address;
    *nccl = ((Broadcast)(uintptr_t)fixed->call)(place, place, (size_t)fixed->nbytes, UINT8, (int)fixed->source, comm, stream);
    if (!exchanged) driver->exchange(&mode);
    *call = "cuEventRecord";
    if (!*nccl) status = driver->record(event, stream);
  }
  turn_end(&turn, driver, stream);
  return status;
}

static Status copy_header(Driver *driver, const Fixed *fixed, Handle after, Handle copies, void *host, Handle event,
                          const char **call) {
  Turn turn;
  turn_begin(driver, &turn, copies, 1);
  *call = "cuStreamWaitEvent";
  Status status = driver->wait(copies, after, 0);
  if (!status) {
    *call = "cuMemcpyDtoHAsync";
    status = driver->download(host, fixed->header, (size_t)fixed->header_bytes, copies);
  }
  if (!status) status = driver->record(event, copies), *call = "cuEventRecord";
  turn_end(&turn, driver, copies);
  return status;
}

/* broadcast(fixed, header, communicator, stream, event, copies, host, copied): NCCL's status, 0 for success. */
PyObject *broadcast(PyObject *self, PyObject *const *args, Py_ssize_t count) {
  Driver *driver = (Driver *)self;
  Py_buffer given, header;
  Fixed fixed;
  unsigned long long a[6]; /* communicator, stream, event, copies, host, copied */
  const char *call = "";
  int nccl = 0;
  if (count != 8) return PyErr_Format(PyExc_TypeError, "broadcast takes 8 arguments, not %zd", count);
  for (int i = 0; i < 6; i++) {
    a[i] = PyLong_AsUnsignedLongLong(args[i + 2]);
    if (a[i] == (unsigned long long)-1 && PyErr_Occurred()) return NULL;
  }
  if (PyObject_GetBuffer(args[0], &given, PyBUF_SIMPLE)) return NULL;
  int fits = given.len == sizeof fixed;
  if (fits) memcpy(&fixed, given.buf, sizeof fixed);
  PyBuffer_Release(&given);
  if (!fits || !fixed.call) return PyErr_Format(PyExc_ValueError, "broadcast needs a collective");
  if (PyObject_GetBuffer(args[1], &header, PyBUF_SIMPLE)) return NULL;
  if ((uint64_t)header.len > fixed.header_bytes || header.len > MOST) {
    PyBuffer_Release(&header);
    return PyErr_Format(PyExc_ValueError, "the header does not fit");
  }
  driver->working = PyThread_get_thread_ident();
#define AT(i) ((Handle)(uintptr_t)a[i])
  if (has_room(driver, AT(1), ROOM) || has_room(driver, AT(3), OWN)) return PyBuffer_Release(&header), NULL;
  Status status = send(driver, &fixed, &header, AT(0), AT(1), AT(2), &call, &nccl);
  PyBuffer_Release(&header);
  if (!status && !nccl) status = copy_header(driver, &fixed, AT(2), AT(3), AT(4), AT(5), &call);
  if (status) return failed(driver, status, call), NULL;
  return PyLong_FromLong(nccl);
}
