// NumPy arrays at the border: typed, contiguous, read-only in, owned out.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <memory>

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
