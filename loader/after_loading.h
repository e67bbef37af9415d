// Python's C functions, and calls that wait until the dynamic loader has done its work.
//
// The dynamic loader runs a library's initialisers under its lock. Python code that ran there would
// hand the GIL to other threads from time to time, and one that imports an extension module then
// waits for that lock with the GIL in its hands: both threads would wait forever. So an initialiser
// takes no GIL and runs no Python, it only asks for a call.
//
// Python's functions are weak symbols: a C++ program has none of them. Nearly all belong to
// CPython's stable ABI, and the others have not changed since 3.9, so one build serves every
// version.
#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include <cstddef>

struct _object;
struct _frame;

extern "C" {
using PyObject = _object;
#define QSHARD_WEAK __attribute__((weak))
QSHARD_WEAK int Py_IsInitialized();
QSHARD_WEAK int PyGILState_Ensure();
QSHARD_WEAK void PyGILState_Release(int);
QSHARD_WEAK int PyGILState_Check();
QSHARD_WEAK int Py_AddPendingCall(int (*function)(void*), void* argument);
QSHARD_WEAK void PyEval_SetProfile(int (*function)(PyObject*, _frame*, int, PyObject*), PyObject*);
QSHARD_WEAK PyObject* PySys_GetObject(const char* name);
QSHARD_WEAK PyObject* PyObject_CallObject(PyObject* callable, PyObject* arguments);
QSHARD_WEAK void PyErr_Fetch(PyObject** type, PyObject** value, PyObject** traceback);
QSHARD_WEAK void PyErr_Restore(PyObject* type, PyObject* value, PyObject* traceback);
QSHARD_WEAK void PyErr_Clear();
QSHARD_WEAK extern PyObject _Py_NoneStruct;
QSHARD_WEAK void Py_IncRef(PyObject*);
QSHARD_WEAK void Py_DecRef(PyObject*);
}

namespace qshard {

inline bool has_python() { return Py_IsInitialized != nullptr && Py_IsInitialized() != 0; }

/// The GIL, in whatever thread, and the error that the interrupted code is about to raise.
class PythonGuard {
 public:
  PythonGuard() : gil_(PyGILState_Ensure()) { PyErr_Fetch(&type_, &value_, &traceback_); }
  ~PythonGuard() {
    PyErr_Restore(type_, value_, traceback_);
    PyGILState_Release(gil_);
  }
  PythonGuard(const PythonGuard&) = delete;

 private:
  int gil_;
  PyObject *type_ = nullptr, *value_ = nullptr, *traceback_ = nullptr;
};

/// Whether nothing profiles this thread. A C function of Python's: it runs no Python code.
inline bool is_profiler_free() {
  PyObject* get = PySys_GetObject("getprofile");  // borrowed
  PyObject* profiler = get ? PyObject_CallObject(get, nullptr) : nullptr;
  if (profiler == nullptr) {
    PyErr_Clear();
    return false;
  }
  Py_DecRef(profiler);
  return profiler == &_Py_NoneStruct;
}

/// An initialiser calls this to have Python call `function` once this thread is out of the dynamic
/// loader, with the GIL, before the Python code that loaded the library goes on. Python may call it
/// twice, and in another thread; if neither way below works it does not call it at all.
template <void (*function)()>
void call_after_loading() {
  struct Call {
    static int as_pending(void* /*argument*/) {
      function();
      return 0;
    }
    static int as_profiler(PyObject* /*self*/, _frame* /*frame*/, int /*event*/,
                           PyObject* /*arg*/) {
      PyEval_SetProfile(nullptr, nullptr);
      function();
      return 0;
    }
  };
  // Python's main thread makes pending calls before its next bytecode. To ask for one takes no GIL.
  const bool is_asked = Py_AddPendingCall(&Call::as_pending, nullptr) == 0;
  const bool is_main = syscall(SYS_gettid) == getpid();
  if (is_asked && is_main) return;
  // Other threads make none, and the main one may be asleep. What every thread that holds the GIL
  // can ask for is a profiler, which Python calls when the function that loaded the library
  // returns.
  if (PyGILState_Check() == 1 && is_profiler_free()) {
    PyEval_SetProfile(&Call::as_profiler, nullptr);
  }
}

}  // namespace qshard
