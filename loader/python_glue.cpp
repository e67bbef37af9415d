// Runs the embedded Python (qshard/_runtime/*.py) when the library is loaded into a Python process:
// by its library.py, after the dynamic loader is done, or before the first quantized tensor is
// there.
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/function.h>
#include <torch/library.h>

#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "dispatch/aten/registration.h"
#include "dispatch/tensor/python_part.h"
#include "dispatch/tensor/quantized_tensor_impl.h"
#include "kernels/tensors/kept_with_tensor.h"
#include "loader/after_loading.h"
#include "ops/linear/local_part.h"

extern "C" {
struct QshardMethod {  // PyMethodDef, of the stable ABI
  const char* name;
  PyObject* (*function)(PyObject* self, PyObject* argument);
  int flags;
  const char* doc;
};
QSHARD_WEAK PyObject* PyCFunction_NewEx(QshardMethod*, PyObject* self, PyObject* module);
QSHARD_WEAK size_t PyLong_AsSize_t(PyObject* number);
QSHARD_WEAK PyObject* PyObject_Type(PyObject* object);
QSHARD_WEAK PyObject* PyTuple_GetItem(PyObject* tuple, ssize_t index);
QSHARD_WEAK ssize_t PyTuple_Size(PyObject* tuple);
QSHARD_WEAK extern PyObject* PyExc_AttributeError;
QSHARD_WEAK void PyErr_SetObject(PyObject* type, PyObject* value);
QSHARD_WEAK int PyType_IsSubtype(PyObject* type, PyObject* of);
QSHARD_WEAK PyObject* PyType_GenericAlloc(PyObject* type, ssize_t items);
QSHARD_WEAK int PyObject_SetAttr(PyObject* object, PyObject* name, PyObject* value);
QSHARD_WEAK PyObject* PyObject_GetAttr(PyObject* object, PyObject* name);
QSHARD_WEAK PyObject* PyUnicode_InternFromString(const char* text);
QSHARD_WEAK PyObject* PyUnicode_FromString(const char* text);
QSHARD_WEAK const char* PyUnicode_AsUTF8AndSize(PyObject* text, ssize_t* size);
QSHARD_WEAK void* PyLong_AsVoidPtr(PyObject* number);
QSHARD_WEAK PyObject* PyBool_FromLong(long value);
QSHARD_WEAK PyObject* PyDict_New();
QSHARD_WEAK PyObject* PyDict_GetItemString(PyObject* dict, const char* key);
QSHARD_WEAK int PyDict_SetItemString(PyObject* dict, const char* key, PyObject* item);
QSHARD_WEAK PyObject* Py_CompileString(const char* source, const char* filename, int start);
QSHARD_WEAK PyObject* PyEval_EvalCode(PyObject* code, PyObject* globals, PyObject* locals);
QSHARD_WEAK PyObject* PyEval_GetBuiltins();
QSHARD_WEAK PyObject* PyObject_CallFunctionObjArgs(PyObject* callable, ...);
QSHARD_WEAK int PyObject_IsTrue(PyObject* object);
QSHARD_WEAK PyObject* PyObject_Repr(PyObject* object);
QSHARD_WEAK void PyErr_NormalizeException(PyObject**, PyObject**, PyObject**);
QSHARD_WEAK void PyErr_Print();
}

namespace qshard {

extern const char* const kLibrarySource;
extern const char* const kPatchTableSource;
extern const char* const kPatchesSource;
extern const char* const kClassesSource;
extern const char* const kPlacementSource;
extern const char* const kDebugSource;
extern const char* const kHooksSource;
extern const char* const kReplicasSource;
extern const char* const kUnpicklingSource;
extern const char* const kSerializationSource;
extern const char* const kCheckpointSource;
extern const char* const kFakesSource;

namespace {

constexpr int kFileInput = 257;     // Py_file_input
constexpr int kMethodOneArg = 0x8;  // METH_O

/// One reference; null after an error.
class Owned {
 public:
  explicit Owned(PyObject* object) : object_(object) {}
  ~Owned() {
    if (object_) Py_DecRef(object_);
  }
  Owned(const Owned&) = delete;
  PyObject* get() const { return object_; }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  PyObject* object_;
};

// ---------------------------------------------------- natives, for the modules in Python to call

/// Where a torch.Tensor, of no Python subclass but kinds of Parameter, has the address of its
/// TensorImpl, in words; 0: not known. That is torch's matter, so it is looked up: find_impl.
size_t g_place_of_impl = 0;

const c10::TensorImpl* impl_at(const PyObject* tensor, size_t place) {
  const void* address = nullptr;
  std::memcpy(&address, reinterpret_cast<const char*>(tensor) + place * sizeof(void*),
              sizeof(void*));
  return static_cast<const c10::TensorImpl*>(address);
}

/// Modes see the attributes that a user looks up, and not those that are looked up while this
/// lives.
class WithoutModes {
 public:
  WithoutModes() {
    if (!in_mode_) return;
    TLS::set_disabled_state(at::impl::TorchFunctionDisabledState::ALL_DISABLED);
  }
  ~WithoutModes() {
    if (in_mode_) TLS::set_disabled_state(before_);
  }
  WithoutModes(const WithoutModes&) = delete;

 private:
  using TLS = at::impl::PythonTorchFunctionTLS;
  const bool in_mode_ = at::impl::torch_function_mode_enabled();
  const at::impl::TorchFunctionDisabledState before_ = TLS::get_disabled_state();
};

/// Null after an error.
const c10::TensorImpl* impl_by_attribute(PyObject* tensor) {
  static PyObject* const name = PyUnicode_InternFromString("_cdata");
  const WithoutModes without_modes;
  const Owned address(PyObject_GetAttr(tensor, name));
  return address ? static_cast<const c10::TensorImpl*>(PyLong_AsVoidPtr(address.get())) : nullptr;
}

/// Whether this tensor has our key; -1 after an error. FSDP2 makes us ask several times per
/// parameter and gather: torch._C._dispatch_keys takes 25 times as long, the attribute 10 times.
int has_key_of(PyObject* tensor) {
  const c10::TensorImpl* impl =
      g_place_of_impl != 0 ? impl_at(tensor, g_place_of_impl) : impl_by_attribute(tensor);
  return impl == nullptr ? -1 : impl->key_set().has(kKey) ? 1 : 0;
}

/// `tensors`: a tuple of different ones. Sets g_place_of_impl to the word that is the address in
/// each of them, if there is exactly one such word.
PyObject* find_impl(PyObject* /*self*/, PyObject* tensors) {
  const Owned type(PyObject_Type(PyTuple_GetItem(tensors, 0)));
  const Owned size(
      PyObject_GetAttr(type.get(), Owned(PyUnicode_FromString("__basicsize__")).get()));
  const size_t words = size ? PyLong_AsSize_t(size.get()) / sizeof(void*) : 0;
  std::vector<size_t> places;
  for (size_t place = 1; place < words; ++place) {
    bool is_there = PyTuple_Size(tensors) > 1;
    for (ssize_t i = 0; i < PyTuple_Size(tensors); ++i) {
      PyObject* tensor = PyTuple_GetItem(tensors, i);
      const c10::TensorImpl* impl = impl_by_attribute(tensor);
      if (impl == nullptr) return nullptr;
      is_there = is_there && impl_at(tensor, place) == impl;
    }
    if (is_there) places.push_back(place);
  }
  g_place_of_impl = places.size() == 1 ? places[0] : 0;
  return PyBool_FromLong(g_place_of_impl != 0);
}

PyObject* has_key(PyObject* /*self*/, PyObject* tensor) {
  const int has = has_key_of(tensor);
  return has < 0 ? nullptr : PyBool_FromLong(has);
}

/// `hook` is (class, name, torch.Tensor, Parameter): an instance whose attribute `shard` is the
/// tensor, if that is quantized and a torch.Tensor itself or any kind of Parameter, else an
/// AttributeError of that name.
PyObject* get_hook(PyObject* hook, PyObject* tensor) {
  const Owned type(PyObject_Type(tensor));
  const bool has_tensor_type = type.get() == PyTuple_GetItem(hook, 2) ||
                               PyType_IsSubtype(type.get(), PyTuple_GetItem(hook, 3)) != 0;
  const int has = has_tensor_type ? has_key_of(tensor) : 0;
  if (has == 0) PyErr_SetObject(PyExc_AttributeError, PyTuple_GetItem(hook, 1));
  if (has <= 0) return nullptr;
  static PyObject* const attribute = PyUnicode_InternFromString("shard");
  PyObject* bound = PyType_GenericAlloc(PyTuple_GetItem(hook, 0), 0);
  if (bound == nullptr || PyObject_SetAttr(bound, attribute, tensor) == 0) return bound;
  Py_DecRef(bound);
  return nullptr;
}

PyObject* hook_getter(PyObject* /*self*/, PyObject* hook) {
  static QshardMethod method = {"get_hook", &get_hook, kMethodOneArg, nullptr};
  return PyCFunction_NewEx(&method, hook, nullptr);
}

/// A reference that a tensor has. Tensors die in any thread, and after Python has ended.
struct KeptObject final : c10::intrusive_ptr_target {
  explicit KeptObject(PyObject* kept) : object(kept) { Py_IncRef(object); }
  ~KeptObject() override {
    if (!has_python()) return;
    const PythonGuard python;
    Py_DecRef(object);
  }
  PyObject* const object;
};

/// `arguments` is (tensor, object): the object lives as long as the tensor, or until another is
/// kept with it. False where none can be kept.
PyObject* keep_with(PyObject* /*self*/, PyObject* arguments) {
  const auto* impl = impl_by_attribute(PyTuple_GetItem(arguments, 0));
  if (impl == nullptr) return nullptr;
  return PyBool_FromLong(
      qshard::keep_with(const_cast<c10::TensorImpl&>(*impl), Kept::kPythonObject,
                        c10::make_intrusive<KeptObject>(PyTuple_GetItem(arguments, 1))));
}

/// The object that is kept with a tensor, or None.
PyObject* kept_with(PyObject* /*self*/, PyObject* tensor) {
  const auto* impl = impl_by_attribute(tensor);
  if (impl == nullptr) return nullptr;
  const KeptThing kept = qshard::kept_with(*impl, Kept::kPythonObject);
  PyObject* object = kept ? static_cast<const KeptObject&>(*kept).object : &_Py_NoneStruct;
  Py_IncRef(object);
  return object;
}

/// Prints Python's error, and what it was in one line.
std::string report_error();

at::Tensor tensor_of(const c10::TensorImpl& impl) {
  auto* shared = const_cast<c10::TensorImpl*>(&impl);
  return at::Tensor(
      c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim_copy(shared));
}

/// Asks a Python function, which returns None or a tuple of two tensors.
struct PythonLocalPart final : LocalPart {
  explicit PythonLocalPart(PyObject* asked) : function(c10::make_intrusive<KeptObject>(asked)) {}

  std::vector<at::Tensor> local_tensors() const override {
    const PythonGuard python;
    const WithoutModes without_modes;
    const Owned pair(PyObject_CallFunctionObjArgs(function->object, nullptr));
    if (pair.get() == &_Py_NoneStruct) return {};
    std::vector<at::Tensor> tensors;
    for (ssize_t i = 0; pair && i < 2; ++i) {
      PyObject* tensor = PyTuple_GetItem(pair.get(), i);
      const c10::TensorImpl* impl = tensor != nullptr ? impl_by_attribute(tensor) : nullptr;
      if (impl == nullptr) break;
      tensors.push_back(tensor_of(*impl));
    }
    TORCH_CHECK(tensors.size() == 2, "qshard: a DTensor has no local gradient: ", report_error());
    return tensors;
  }

  const c10::intrusive_ptr<KeptObject> function;
};

/// `arguments` is (tensor, function): a LocalPart on the node that made the tensor, if any did.
PyObject* mark_local_part(PyObject* /*self*/, PyObject* arguments) {
  const auto* impl = impl_by_attribute(PyTuple_GetItem(arguments, 0));
  if (impl == nullptr) return nullptr;
  const auto node = tensor_of(*impl).grad_fn();
  if (node) node->add_pre_hook(std::make_unique<PythonLocalPart>(PyTuple_GetItem(arguments, 1)));
  return PyBool_FromLong(node != nullptr);
}

QshardMethod g_natives[] = {{"find_impl", &find_impl, kMethodOneArg, nullptr},
                            {"has_key", &has_key, kMethodOneArg, nullptr},
                            {"hook_getter", &hook_getter, kMethodOneArg, nullptr},
                            {"keep_with", &keep_with, kMethodOneArg, nullptr},
                            {"kept_with", &kept_with, kMethodOneArg, nullptr},
                            {"mark_local_part", &mark_local_part, kMethodOneArg, nullptr}};

// ----------------------------------------------------------------------------- the Python part

constexpr const char* kLibraryModule = "qshard._runtime.library";

/// In the order in which they are imported.
constexpr std::pair<const char*, const char* const*> kModules[] = {
    {kLibraryModule, &kLibrarySource},
    {"qshard._runtime.patch_table", &kPatchTableSource},
    {"qshard._runtime.patches", &kPatchesSource},
    {"qshard._runtime.classes", &kClassesSource},
    {"qshard._runtime.placement", &kPlacementSource},
    {"qshard._runtime.debug", &kDebugSource},
    {"qshard._runtime.hooks", &kHooksSource},
    {"qshard._runtime.replicas", &kReplicasSource},
    {"qshard._runtime.unpickling", &kUnpicklingSource},
    {"qshard.serialization", &kSerializationSource},
    {"qshard._runtime.checkpoint", &kCheckpointSource},
    {"qshard._runtime.fakes", &kFakesSource}};

bool set_item(PyObject* dict, const char* key, PyObject* item) {
  return item != nullptr && PyDict_SetItemString(dict, key, item) == 0;
}

/// What `finish` of qshard/_runtime/library.py returned; null with Python's error set.
PyObject* call_finish() {
  const Owned globals(PyDict_New()), sources(PyDict_New()), natives(PyDict_New());
  if (!globals || !sources || !natives) return nullptr;
  for (const auto& [name, source] : kModules) {
    const Owned text(PyUnicode_FromString(*source));
    if (!set_item(sources.get(), name, text.get())) return nullptr;
  }
  for (QshardMethod& method : g_natives) {
    const Owned native(PyCFunction_NewEx(&method, nullptr, nullptr));
    if (!set_item(natives.get(), method.name, native.get())) return nullptr;
  }
  const Owned name(PyUnicode_FromString(kLibraryModule));
  if (!set_item(globals.get(), "__name__", name.get()) ||
      !set_item(globals.get(), "__builtins__", PyEval_GetBuiltins())) {
    return nullptr;
  }
  const Owned code(Py_CompileString(kLibrarySource, kLibraryModule, kFileInput));
  if (!code) return nullptr;
  const Owned result(PyEval_EvalCode(code.get(), globals.get(), globals.get()));
  if (!result) return nullptr;
  return PyObject_CallFunctionObjArgs(PyDict_GetItemString(globals.get(), "finish"), sources.get(),
                                      natives.get(), nullptr);
}

std::string report_error() {
  PyObject *type = nullptr, *value = nullptr, *traceback = nullptr;
  PyErr_Fetch(&type, &value, &traceback);
  PyErr_NormalizeException(&type, &value, &traceback);
  std::string line = "an error";
  {
    const Owned text(value ? PyObject_Repr(value) : nullptr);
    const char* utf8 = text ? PyUnicode_AsUTF8AndSize(text.get(), nullptr) : nullptr;
    if (utf8) line = utf8;
    PyErr_Clear();
  }
  PyErr_Restore(type, value, traceback);
  PyErr_Print();
  return line;
}

/// The modes, dispatch keys and so on of a thread that has set none: modules that are imported in
/// the middle of an operator make tensors, too.
at::ThreadLocalState state_of_a_new_thread() {
  at::ThreadLocalState state;
  std::thread([&state] { state = at::ThreadLocalState(); }).join();
  return state;
}

const std::string* g_failure = nullptr;  // with the GIL

/// finish_python_part.
void finish() {
  static thread_local bool t_is_running = false;
  // Python code that is a part of it may come here; a process that exits needs no hooks.
  if (t_is_running || !has_python()) return;
  const at::ThreadLocalStateGuard thread_state(state_of_a_new_thread());
  const PythonGuard python;
  if (g_failure == nullptr) {
    t_is_running = true;
    const Owned is_done(call_finish());
    t_is_running = false;
    if (is_done) {
      if (PyObject_IsTrue(is_done.get()) == 1) finish_python_part = nullptr;
      return;
    }
    const std::string line = report_error();
    if (g_failure == nullptr) g_failure = new std::string(line);
  }
  TORCH_CHECK(false,
              fmt::format("qshard: the library's Python part failed to load ({}), so there are no "
                          "quantized tensors in this process; its traceback was printed",
                          *g_failure));
}

void finish_after_loading() {
  try {
    need_python_part();
  } catch (const c10::Error&) {  // what needs it says so again
  }
}

/// Linked last (CMakeLists.txt), so that the operators are there when Python asks for them.
const bool kLoaded = [] {
  if (!has_python() || !key_is_ours()) return false;
  TORCH_INTERNAL_ASSERT(c10::Dispatcher::singleton().findSchema({"qshard::quantize", ""}));
  finish_python_part = &finish;
  call_after_loading<&finish_after_loading>();
  return true;
}();

}  // namespace

TORCH_LIBRARY_FRAGMENT(qshard, m) {
  m.def("_finish_loading() -> ()");
  m.impl("_finish_loading", c10::DispatchKey::CompositeExplicitAutograd, &need_python_part);
}

}  // namespace qshard
