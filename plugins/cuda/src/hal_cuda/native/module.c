/* hal_cuda._native: the layout for which it was built, and its two types. */
#include "native.h"

#ifndef HAL_SOURCES
#error "build it by plugins/cuda/native_build.py, which says of which sources it is"
#endif

static int setup(PyObject *module) {
  PyObject *host = PyType_FromSpec(&host_table_spec), *driver = PyType_FromSpec(&driver_spec);
  host_table_type = (PyTypeObject *)host; /* kept for the life of the process: calls compare with it */
  if (!host || !driver || PyModule_AddObjectRef(module, "HostTable", host) || PyModule_AddObjectRef(module, "Driver", driver))
    return -1;
  Py_DECREF(driver);
  return PyModule_AddStringConstant(module, "LAYOUT", LAYOUT) ||
                 PyModule_AddStringConstant(module, "SOURCES", HAL_SOURCES) || PyModule_AddIntConstant(module, "BOUND", BOUND)
             ? -1
             : 0;
}

static PyMethodDef methods[] = {
    {"gather_tasks", (PyCFunction)(void (*)(void))gather_tasks, METH_FASTCALL, "a batch of tasks, or None: see columns.c"},
    {"int32s", (PyCFunction)(void (*)(void))int32s, METH_FASTCALL, "an array's elements, or None: see columns.c"},
    {"ids", (PyCFunction)(void (*)(void))ids, METH_FASTCALL, "the token ids of a request, or None: see admitting.c"},
    {"usual_rows", (PyCFunction)(void (*)(void))usual_rows, METH_FASTCALL, "the rows of a usual step, or None: see output.c"},
    {"stage", (PyCFunction)(void (*)(void))stage, METH_FASTCALL, "a request's bytes into a chunk, see admitting.c"},
    {"gather_requests", (PyCFunction)(void (*)(void))gather_requests, METH_FASTCALL, "new requests, or None: see columns.c"},
    {"stage_all", (PyCFunction)(void (*)(void))stage_all, METH_FASTCALL, "several requests' bytes, see admitting_batch.c"},
    {NULL, NULL, 0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_native", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) {
  PyObject *module = PyModule_Create(&definition);
  if (module && setup(module)) {
    Py_DECREF(module);
    return NULL;
  }
  return module;
}
