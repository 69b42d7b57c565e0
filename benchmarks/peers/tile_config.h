// Included before every C++ file of llama.cpp (-include): GCC before 12.4 and 13.3 tells itself that ldtilecfg reads 8
// bytes of the 64 that it does (bug 114098), drops the stores to the others, and llama.cpp's AMX code dies of SIGILL.
#pragma once
#if defined(__AMX_TILE__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>
static inline void peers_tile_loadconfig(const void* config) {
  struct Config {
    char bytes[64];
  };
  __asm__ volatile("ldtilecfg\t%0" ::"m"(*static_cast<const Config*>(config)));
}
#define _tile_loadconfig(config) peers_tile_loadconfig(config)
#endif
