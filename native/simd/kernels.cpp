#include "simd/kernels.h"

namespace octavo {
namespace {

std::vector<const Kernels*>& registered() {
  static std::vector<const Kernels*> tables;
  return tables;
}

std::vector<const Kernels*> runnable() {  // best last
  std::vector<const Kernels*> tables = registered();
  tables.push_back(&scalar_kernels());
#if defined(__x86_64__)
  const CpuFeatures cpu = cpu_features();
  if (cpu.avx2) tables.push_back(&avx2_kernels());
  if (cpu.avx512_vnni) tables.push_back(&avx512_kernels());
  if (cpu.amx_int8) tables.push_back(&amx_kernels());
#endif
  return tables;
}

}  // namespace

void register_kernels(const Kernels* table) { registered().push_back(table); }

std::vector<std::string> kernel_names() {
  std::vector<std::string> names;
  for (const Kernels* table : runnable()) names.emplace_back(table->name);
  return names;
}

const Kernels* find_kernels(const std::string& name) {
  const std::vector<const Kernels*> tables = runnable();
  if (name == "auto") return tables.back();
  for (const Kernels* table : tables) {
    if (name == table->name) return table;
  }
  return nullptr;
}

}  // namespace octavo
