/* A collective whose caller waits at once, called in the interpreter's own way. By ctypes it takes three calls and a
   structure, which is longer than a small all-reduce. Nothing of it is built where Python's headers are not installed. */

#if __has_include(<Python.h>)

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "core.h"

#define PATIENCE_S 0.1 /* as in work.py: before a look whether somebody has pressed Ctrl-C */

enum { IN_GROUP, OF_KIND, OF_DTYPE, BY, ROOT, MARK, FROM, INTO, COUNT, TO_CALLER, ARGUMENTS };

/* A call that failed, or that a signal's exception has interrupted, is the caller's: in `left`, None if there was no
   memory for it, or another process made the group. Nothing here minds an exception that is set. */
static void leave_to_caller(PyObject *left, op *call) {
    PyObject *handle = call == NULL ? Py_NewRef(Py_None) : PyLong_FromVoidPtr(call);
    if (handle != NULL) PyList_Append(left, handle);
    Py_XDECREF(handle);
}

/* The memory that an address or an object with the buffer protocol names. The caller holds the object until the call
   has ended, so nothing is kept of it here. NULL with an exception where it is neither. */
static char *memory_of(PyObject *given) {
    if (PyLong_Check(given)) return PyLong_AsVoidPtr(given);
    Py_buffer view;
    if (PyObject_GetBuffer(given, &view, PyBUF_SIMPLE) != 0) return NULL;
    char *start = view.buf;
    PyBuffer_Release(&view);
    return start;
}

static PyObject *call_and_wait(PyObject *module, PyObject *const *given, Py_ssize_t n) {
    (void)module;
    if (n != ARGUMENTS) return PyErr_Format(PyExc_TypeError, "%d arguments, not %zd", ARGUMENTS, n);
    group *g = PyLong_AsVoidPtr(given[IN_GROUP]);
    signature what = {
        .kind = (uint32_t)PyLong_AsLong(given[OF_KIND]), .dtype = (uint32_t)PyLong_AsLong(given[OF_DTYPE]),
        .reduction = (uint32_t)PyLong_AsLong(given[BY]), .root = (int32_t)PyLong_AsLong(given[ROOT]),
        .bytes = PyLong_AsUnsignedLongLong(given[COUNT]), .mark = PyLong_AsUnsignedLongLong(given[MARK]),
    };
    char *send = memory_of(given[FROM]), *receive = memory_of(given[INTO]);
    if (PyErr_Occurred()) return NULL;

    op *call;
    int outcome = PENDING;
    Py_BEGIN_ALLOW_THREADS
    call = shoal_start(g, &what, send, receive, true);
    if (call != NULL) outcome = shoal_wait(call, PATIENCE_S, true);
    Py_END_ALLOW_THREADS
    /* Signals are looked for once in any case: their exception must not come between the end and what follows it. */
    while (call != NULL && PyErr_CheckSignals() == 0 && outcome == PENDING) {
        Py_BEGIN_ALLOW_THREADS
        outcome = shoal_wait(call, PATIENCE_S, true);
        Py_END_ALLOW_THREADS
    }
    if (outcome == DONE && !PyErr_Occurred()) shoal_drop(call);
    else leave_to_caller(given[TO_CALLER], call);
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

static PyMethodDef methods[] = {
    {"call", (PyCFunction)(void (*)(void))call_and_wait, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_core", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__core(void) { return PyModuleDef_Init(&definition); }

#endif
