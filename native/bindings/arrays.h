// Arrays at the border: typed, contiguous, read-only in, owned out.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <type_traits>

namespace octavo::python {

template <class T>
using Array1 = nanobind::ndarray<const T, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;
template <class T>
using Array2 = nanobind::ndarray<const T, nanobind::ndim<2>, nanobind::c_contig, nanobind::device::cpu>;

// False for a view at an odd address, which C++ may not read.
template <class Array>
bool aligned(const Array& array) {
  using T = typename Array::Scalar;
  return array.size() == 0 || reinterpret_cast<std::uintptr_t>(array.data()) % alignof(T) == 0;
}

// What Python lends through its buffer protocol: an array.array, bytes or a NumPy array. For the arrays of each step:
// it costs a fraction of an ndarray argument. Made and destroyed with the GIL held; in between the data stays where it
// is.
template <class T>
class Buffer {
 public:
  // ValueError, naming the array, unless it is contiguous, of this type and dimensions, and at an aligned address.
  Buffer(nanobind::handle array, const char* name, int dimensions = 1) {
    if (PyObject_GetBuffer(array.ptr(), &lent_, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS) != 0) {
      PyErr_Clear();
      throw nanobind::value_error((std::string(name) + ": not a contiguous array").c_str());
    }
    const char* problem = nullptr;
    if (!holds_type() || lent_.ndim != dimensions) problem = ": an array of the wrong type or size";
    if (lent_.len > 0 && reinterpret_cast<std::uintptr_t>(lent_.buf) % alignof(T) != 0)
      problem = ": an array at an odd address";
    if (problem == nullptr) return;
    PyBuffer_Release(&lent_);
    throw nanobind::value_error((std::string(name) + problem).c_str());
  }
  ~Buffer() { PyBuffer_Release(&lent_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  const T* data() const { return static_cast<const T*>(lent_.buf); }
  std::int64_t size(int dimension = 0) const { return lent_.shape[dimension]; }

 private:
  bool holds_type() const {
    const char* format = lent_.format != nullptr ? lent_.format : "B";
    if (*format == '@' || *format == '=') ++format;
    const char* kinds = std::is_floating_point_v<T> ? "fd" : std::is_signed_v<T> ? "bhilq" : "BHILQ";
    return lent_.itemsize == sizeof(T) && std::strlen(format) == 1 && std::strchr(kinds, *format) != nullptr;
  }

  Py_buffer lent_;
};

// A new list of make(0) .. make(size - 1), each a new reference.
template <class Make>
nanobind::object list_of(std::int64_t size, Make make) {
  nanobind::object list = nanobind::steal(PyList_New(static_cast<Py_ssize_t>(size)));
  if (!list.is_valid()) throw nanobind::python_error();
  for (std::int64_t i = 0; i < size; ++i) {
    PyObject* item = make(i);
    if (item == nullptr) throw nanobind::python_error();
    PyList_SET_ITEM(list.ptr(), static_cast<Py_ssize_t>(i), item);
  }
  return list;
}

// A new array that owns its zeroed data; `data` points at it.
template <class T>
nanobind::object owned_array(std::initializer_list<std::size_t> shape, T*& data) {
  std::size_t size = 1;
  for (std::size_t n : shape) size *= n;
  data = new T[size > 0 ? size : 1]();
  nanobind::capsule owner(data, [](void* p) noexcept { delete[] static_cast<T*>(p); });
  return nanobind::cast(nanobind::ndarray<nanobind::numpy, T>(data, shape, owner));
}

}  // namespace octavo::python
