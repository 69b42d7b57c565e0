#include "formats/weight.h"

#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <limits>

namespace octavo {
namespace {

constexpr std::size_t kAlign = 64;
constexpr std::size_t kHuge = std::size_t{2} << 20;

struct Header {        // in the 64 bytes before the memory handed out
  std::size_t mapped;  // bytes of the mapping; 0: from the heap
};
static_assert(sizeof(Header) <= kAlign);

}  // namespace

AlignedBytes allocate_aligned(std::size_t bytes) {
  if (bytes > std::numeric_limits<std::size_t>::max() / 2) return nullptr;
  const std::size_t total = bytes + kAlign;
  void* base = nullptr;
  Header header{0};
  if (bytes >= kHuge) {
    base = mmap(nullptr, total, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) return nullptr;
#ifdef MADV_HUGEPAGE
    madvise(base, total, MADV_HUGEPAGE);
#endif
    header.mapped = total;
  } else {
    if (posix_memalign(&base, kAlign, total) != 0) return nullptr;
    std::memset(base, 0, total);
  }
  std::memcpy(base, &header, sizeof header);
  return AlignedBytes(static_cast<std::byte*>(base) + kAlign);
}

void AlignedFree::operator()(std::byte* p) const {
  std::byte* base = p - kAlign;
  Header header;
  std::memcpy(&header, base, sizeof header);
  if (header.mapped != 0) {
    munmap(base, header.mapped);
  } else {
    std::free(base);
  }
}

}  // namespace octavo
