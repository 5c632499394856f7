/* Work on streams: an upload, a launch and an event, counted and checked. */
#include "native.h"

int failed(Driver *driver, Status status, const char *call) {
  PyObject *raised = PyObject_CallFunction(driver->fail, "is", status, call);
  Py_XDECREF(raised);
  if (!PyErr_Occurred()) PyErr_Format(PyExc_SystemError, "%s: CUresult %d, and nothing was raised", call, status);
  return -1;
}

/* Refuse a captured stream before the call would invalidate the capture: 0, or -1 with an exception. */
int refused(Driver *driver, Handle stream) {
  int state = 0;
  char handle[24];
  if (driver->capturing(stream, &state) == 0 && !state) return 0; /* an error: the default stream, in another's capture */
  snprintf(handle, sizeof handle, "%llu", (unsigned long long)(uintptr_t)stream);
  return failed(driver, CAPTURED_STREAM, handle);
}

int perform(Driver *driver, const Work *work) {
  Turn up, turn;
  Status status = 0;
  const char *call = "";
  int apart = work->nbytes && work->up != work->stream, launched = (work->nbytes && !apart) + !!work->function;
  if ((apart && has_room(driver, work->up, OWN)) || (launched && has_room(driver, work->stream, ROOM))) return -1;
  driver->working = PyThread_get_thread_ident();
  if (apart) {
    turn_begin(driver, &up, work->up, 1);
    status = driver->upload(work->to, (const void *)(uintptr_t)work->from, work->nbytes, work->up);
    call = "cuMemcpyHtoDAsync";
    if (!status && work->arrival) status = driver->record(work->arrival, work->up), call = "cuEventRecord";
    turn_end(&up, driver, work->up);
    if (status) return failed(driver, status, call);
  }
  turn_begin(driver, &turn, work->stream, launched);
  if (work->nbytes && !apart) {
    status = driver->upload(work->to, (const void *)(uintptr_t)work->from, work->nbytes, work->stream);
    call = "cuMemcpyHtoDAsync";
  } else if (work->arrival) {
    status = driver->wait(work->stream, work->arrival, 0), call = "cuStreamWaitEvent";
  }
  if (!status && work->function) {
    status = driver->launch(work->function, work->blocks, work->rows, 1, work->threads, 1, 1, 0, work->stream,
                            work->params, NULL);
    call = "cuLaunchKernel";
  }
  if (!status && work->event) status = driver->record(work->event, work->stream), call = "cuEventRecord";
  turn_end(&turn, driver, work->stream);
  return status ? failed(driver, status, call) : 0;
}
