// Per-parameter work of each step. native.py documents the functions at the end of this file.

#include <ATen/DLConvertor.h>
#include <Python.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstdint>
#include <vector>

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

class Gil {
 public:
  Gil() : state_(PyGILState_Ensure()) {}
  ~Gil() { PyGILState_Release(state_); }

 private:
  PyGILState_STATE state_;
};

// Owns a Python object for the lifetime of an autograd node, which may end on any thread.
struct Held : torch::CustomClassHolder {
  explicit Held(PyObject* object) : object(object) { Py_INCREF(object); }
  ~Held() override {
    if (!Py_IsInitialized()) return;
    Gil gil;
    Py_DECREF(object);
  }
  PyObject* object;
};

struct Recorded {
  variable_list outputs, without_gradient;
  PyObject* backward;
};

// Rethrows the pending Python exception, which autograd passes on unchanged.
[[noreturn]] void fail() {
  python_error error;
  error.persist();
  throw error;
}

at::Tensor taken(PyObject* capsule) {
  if (capsule == Py_None) return {};
  void* managed = PyCapsule_GetPointer(capsule, "dltensor");
  if (managed == nullptr) fail();
  PyCapsule_SetName(capsule, "used_dltensor");
  return at::fromDLPack(static_cast<DLManagedTensor*>(managed));
}

struct Pass : torch::autograd::Function<Pass> {
  static variable_list forward(AutogradContext* context, at::TensorList,
                               const Recorded* recorded) {
    context->set_materialize_grads(false);
    context->mark_non_differentiable(recorded->without_gradient);
    context->saved_data["backward"] =
        c10::IValue::make_capsule(c10::make_intrusive<Held>(recorded->backward));
    return recorded->outputs;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    Gil gil;
    const auto held = context->saved_data["backward"].toCapsule();
    PyObject* given = PyTuple_New(static_cast<Py_ssize_t>(gradients.size()));
    for (size_t i = 0; i < gradients.size(); ++i) {
      PyTuple_SET_ITEM(given, static_cast<Py_ssize_t>(i), THPVariable_Wrap(gradients[i]));
    }
    PyObject* found =
        PyObject_CallFunctionObjArgs(static_cast<Held*>(held.get())->object, given, nullptr);
    Py_DECREF(given);
    if (found == nullptr) fail();
    variable_list results;
    results.reserve(static_cast<size_t>(PyList_GET_SIZE(found)) + 1);
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(found); ++i) {
      results.push_back(taken(PyList_GET_ITEM(found, i)));
    }
    Py_DECREF(found);
    results.emplace_back();  // no gradient for the argument that is not a tensor
    return results;
  }
};

variable_list unpacked(PyObject* tensors) {
  variable_list found;
  found.reserve(static_cast<size_t>(PyTuple_GET_SIZE(tensors)));
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tensors); ++i) {
    found.push_back(THPVariable_Unpack(PyTuple_GET_ITEM(tensors, i)));
  }
  return found;
}

PyObject* record(PyObject* inputs, PyObject* outputs, PyObject* without_gradient,
                 PyObject* backward) {
  HANDLE_TH_ERRORS
  const Recorded recorded{unpacked(outputs), unpacked(without_gradient), backward};
  const variable_list given = unpacked(inputs);
  const variable_list found = Pass::apply(at::TensorList(given), &recorded);
  PyObject* results = PyTuple_New(static_cast<Py_ssize_t>(found.size()));
  for (size_t i = 0; i < found.size(); ++i) {
    PyTuple_SET_ITEM(results, static_cast<Py_ssize_t>(i), THPVariable_Wrap(found[i]));
  }
  return results;
  END_HANDLE_TH_ERRORS
}

PyObject* layout(PyObject* tensors) {
  HANDLE_TH_ERRORS
  std::vector<int64_t> found;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tensors); ++i) {
    const at::Tensor& tensor = THPVariable_Unpack(PyTuple_GET_ITEM(tensors, i));
    found.push_back(reinterpret_cast<int64_t>(tensor.data_ptr()));
    found.push_back(static_cast<int64_t>(tensor.scalar_type()) * 4 + tensor.requires_grad());
    found.push_back(tensor.dim());
    found.insert(found.end(), tensor.sizes().begin(), tensor.sizes().end());
    found.insert(found.end(), tensor.strides().begin(), tensor.strides().end());
  }
  return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(found.data()),
                                   static_cast<Py_ssize_t>(found.size() * sizeof(int64_t)));
  END_HANDLE_TH_ERRORS
}

PyObject* edits(PyObject* tensors) {
  HANDLE_TH_ERRORS
  const Py_ssize_t number = PyTuple_GET_SIZE(tensors);
  std::vector<uint32_t> found(static_cast<size_t>(number));
  for (Py_ssize_t i = 0; i < number; ++i) {
    found[i] = THPVariable_Unpack(PyTuple_GET_ITEM(tensors, i))._version();
  }
  return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(found.data()),
                                   number * static_cast<Py_ssize_t>(sizeof(uint32_t)));
  END_HANDLE_TH_ERRORS
}

PyObject* versions(PyObject* dictionaries) {
#if PY_VERSION_HEX < 0x030C0000
  const Py_ssize_t number = PyTuple_GET_SIZE(dictionaries);
  std::vector<uint64_t> found(static_cast<size_t>(number));
  for (Py_ssize_t i = 0; i < number; ++i) {
    found[i] = reinterpret_cast<PyDictObject*>(PyTuple_GET_ITEM(dictionaries, i))->ma_version_tag;
  }
  return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(found.data()),
                                   number * static_cast<Py_ssize_t>(sizeof(uint64_t)));
#else
  Py_RETURN_NONE;
#endif
}

size_t record_address() { return reinterpret_cast<size_t>(&record); }
size_t layout_address() { return reinterpret_cast<size_t>(&layout); }
size_t edits_address() { return reinterpret_cast<size_t>(&edits); }
size_t versions_address() { return reinterpret_cast<size_t>(&versions); }

}  // namespace
