// The parts of octavo._native; each file binds one room.
#pragma once
#include <nanobind/nanobind.h>

void bind_weights(nanobind::module_& m);
void bind_sample(nanobind::module_& m);
void bind_executor(nanobind::module_& m);
void bind_bench(nanobind::module_& m);
