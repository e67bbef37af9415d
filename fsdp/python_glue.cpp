// Runs the embedded Python (fsdp/*.py) when the library is loaded into a Python process.
//
// Python's functions are weak symbols: a C++ program that loads the library has none of them and
// gets no hooks. They belong to CPython's stable ABI, so one build serves every Python version.
#include <ATen/core/dispatch/Dispatcher.h>

#include "dispatch/registration.h"

struct _object;

extern "C" {
using PyObject = _object;
#define QSHARD_WEAK __attribute__((weak))
QSHARD_WEAK int Py_IsInitialized();
QSHARD_WEAK int PyGILState_Ensure();
QSHARD_WEAK void PyGILState_Release(int);
QSHARD_WEAK PyObject* PyImport_AddModule(const char* name);
QSHARD_WEAK PyObject* PyModule_GetDict(PyObject* module);
QSHARD_WEAK PyObject* Py_CompileString(const char* source, const char* filename, int start);
QSHARD_WEAK PyObject* PyEval_EvalCode(PyObject* code, PyObject* globals, PyObject* locals);
QSHARD_WEAK PyObject* PyEval_GetBuiltins();
QSHARD_WEAK int PyDict_SetItemString(PyObject* dict, const char* key, PyObject* item);
QSHARD_WEAK void PyErr_Print();
QSHARD_WEAK void Py_DecRef(PyObject*);
}

namespace qshard {

extern const char* const kPlacementSource;
extern const char* const kDebugSource;
extern const char* const kHooksSource;
extern const char* const kReplicasSource;
extern const char* const kSerializationSource;
extern const char* const kCheckpointSource;
extern const char* const kFakesSource;

namespace {

constexpr int kFileInput = 257;  // Py_file_input

bool run_as_module(const char* name, const char* source) {
  PyObject* module = PyImport_AddModule(name);  // borrowed, like the dict
  PyObject* globals = module ? PyModule_GetDict(module) : nullptr;
  if (!globals) return false;
  PyDict_SetItemString(globals, "__builtins__", PyEval_GetBuiltins());
  PyObject* code = Py_CompileString(source, name, kFileInput);
  if (!code) return false;
  PyObject* result = PyEval_EvalCode(code, globals, globals);
  Py_DecRef(code);
  if (!result) return false;
  Py_DecRef(result);
  return true;
}

/// Linked last (CMakeLists.txt), so that the operators exist when the Python asks for them.
const bool kLoaded = [] {
  if (!Py_IsInitialized || !Py_IsInitialized() || !key_is_ours()) return false;
  TORCH_INTERNAL_ASSERT(c10::Dispatcher::singleton().findSchema({"qshard::_unpack", ""}));
  const int gil = PyGILState_Ensure();
  bool ok = true;
  for (const auto& [name, source] :
       {std::pair{"_qshard_placement", kPlacementSource}, std::pair{"_qshard_debug", kDebugSource},
        std::pair{"_qshard_hooks", kHooksSource}, std::pair{"_qshard_replicas", kReplicasSource},
        std::pair{"qshard.serialization", kSerializationSource},
        std::pair{"_qshard_checkpoint", kCheckpointSource},
        std::pair{"_qshard_fakes", kFakesSource}}) {
    ok = ok && run_as_module(name, source);
  }
  if (!ok) PyErr_Print();
  PyGILState_Release(gil);
  return ok;
}();

}  // namespace
}  // namespace qshard
