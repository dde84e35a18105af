// Runner that ONNX Runtime calls for a torch.autograd.Function in a graph; it calls Python.
//
// ORT needs two C++ functions, one for the forward pass and one for the backward pass. A single
// function serves as both: it calls the Python object that was registered for the node with
// (requires_grad, training, arguments), and returns the objects of the resulting tuple. Tensors are
// DLPack capsules in both directions. The signature is CustomFunctionRunnerType of ONNX Runtime
// 1.19.2,
// orttraining/orttraining/core/framework/torch/refcount_tracker.h and torch_proxy.h.

#include <Python.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

using Objects = std::vector<PyObject*>;
using Numbers = std::vector<int64_t>;

class Gil {
 public:
  Gil() : state_(PyGILState_Ensure()) {}
  ~Gil() { PyGILState_Release(state_); }

 private:
  PyGILState_STATE state_;
};

// Clears the pending Python exception and returns it as "ValueError: message".
std::string taken_error() {
  PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
  PyErr_Fetch(&type, &value, &trace);
  PyErr_NormalizeException(&type, &value, &trace);
  std::string text = type ? reinterpret_cast<PyTypeObject*>(type)->tp_name : "no exception";
  if (PyObject* said = value ? PyObject_Str(value) : nullptr) {
    if (const char* utf8 = PyUnicode_AsUTF8(said)) text += std::string(": ") + utf8;
    Py_DECREF(said);
  }
  PyErr_Clear();
  Py_XDECREF(type);
  Py_XDECREF(value);
  Py_XDECREF(trace);
  return text;
}

// The caller keeps its references to the arguments and receives new references to the results.
Objects run(const char* name, void* callback, const Numbers& requires_grad, const Numbers&,
            bool training, const Numbers&, const char*, bool, const Objects& arguments) {
  Gil gil;
  PyObject* flags = PyTuple_New(static_cast<Py_ssize_t>(requires_grad.size()));
  for (size_t i = 0; i < requires_grad.size(); ++i)
    PyTuple_SET_ITEM(flags, static_cast<Py_ssize_t>(i), PyBool_FromLong(requires_grad[i]));
  PyObject* given = PyTuple_New(static_cast<Py_ssize_t>(arguments.size()));
  for (size_t i = 0; i < arguments.size(); ++i) {
    Py_INCREF(arguments[i]);
    PyTuple_SET_ITEM(given, static_cast<Py_ssize_t>(i), arguments[i]);
  }
  PyObject* result = PyObject_CallFunctionObjArgs(static_cast<PyObject*>(callback), flags,
                                                  training ? Py_True : Py_False, given, nullptr);
  Py_DECREF(flags);
  Py_DECREF(given);
  if (!result) throw std::runtime_error(std::string(name) + ": " + taken_error());
  Objects found;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(result); ++i) {
    found.push_back(PyTuple_GET_ITEM(result, i));
    Py_INCREF(found.back());
  }
  Py_DECREF(result);
  return found;
}

size_t runner() { return reinterpret_cast<size_t>(&run); }

}  // namespace
