// The processor's matrix unit (AMX): registers of 16 rows of 64 bytes, "tiles".
#pragma once
#include "vector.h"

#if defined(__AMX_BF16__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

constexpr int64_t kTileRows = 16, kTileK = 32;
constexpr int64_t kSumBytes = 8 * kLanes;  // of a row of sums, of two registers

// Returns x rounded to bfloat16: the upper half of each lane counts.
RAYLENS_INLINE UintVec rounded(UintVec x) { return x + (0x7fff + (x >> 16 & 1)); }

// Completes all stores to memory. GCC does not know that _tile_loadd and _tile_loadconfig read it.
RAYLENS_INLINE void complete_stores(const void* read) { asm volatile("" : : "r"(read) : "memory"); }

// Sets the thread's tile registers: 0 to 3 hold sums, 4 and 5 rows of x, 6 and 7 the weight.
class TileRegisters {
 public:
  explicit TileRegisters(int64_t rows) {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } settings;
    for (int tile = 0; tile < 8; tile++) {
      settings.row_bytes[tile] = 64;
      settings.rows[tile] = static_cast<uint8_t>(tile < 6 ? rows : kTileRows);
    }
    complete_stores(&settings);
    _tile_loadconfig(&settings);
  }
  TileRegisters(const TileRegisters&) = delete;
  ~TileRegisters() { _tile_release(); }
};

// Memory that is needed next: each step of a product prefetches some lines into the L2 cache.
struct NextLines {
  const char* place = nullptr;
  int64_t lines = 0;
};

// The registers 0 to 3: the sums of one or two groups of rows and 2 * kLanes columns, as (rows, 2 * kLanes) in memory,
// with the second group behind the first one.
template <int GROUPS>
RAYLENS_INLINE void clear_sums() {
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (GROUPS > 1) {
    _tile_zero(2);
    _tile_zero(3);
  }
}

template <int GROUPS>
RAYLENS_INLINE void load_sums(const float* from, int64_t rows) {
  complete_stores(from);
  _tile_loadd(0, from, kSumBytes);
  _tile_loadd(1, from + kLanes, kSumBytes);
  if constexpr (GROUPS > 1) {
    from += rows * 2 * kLanes;
    _tile_loadd(2, from, kSumBytes);
    _tile_loadd(3, from + kLanes, kSumBytes);
  }
}

template <int GROUPS>
RAYLENS_INLINE void store_sums(float* to, int64_t rows) {
  _tile_stored(0, to, kSumBytes);
  _tile_stored(1, to + kLanes, kSumBytes);
  if constexpr (GROUPS > 1) {
    to += rows * 2 * kLanes;
    _tile_stored(2, to, kSumBytes);
    _tile_stored(3, to + kLanes, kSumBytes);
  }
}

// Adds the products of `steps` steps of kTileK to the sums. `first` and `second`: the groups' tiles, `tile_numbers`
// each, PARTS for a step. `columns`: for a step kTileK / 2 rows of 2 * kLanes pairs of numbers.
template <int PARTS, int GROUPS>
RAYLENS_INLINE void multiply_tiles(const uint16_t* first, const uint16_t* second, int64_t tile_numbers,
                                   const char* columns, int steps, NextLines& next) {
  complete_stores(columns);
  for (int step = 0; step < steps; step++, columns += kTileK / 2 * kSumBytes) {
    for (int64_t line = 0; line < next.lines; line++, next.place += 64) __builtin_prefetch(next.place, 0, 2);
    _tile_loadd(6, columns, kSumBytes);
    _tile_loadd(7, columns + kSumBytes / 2, kSumBytes);
    for (int part = 0; part < PARTS; part++, first += tile_numbers, second += tile_numbers) {
      _tile_loadd(4, first, 2 * kTileK);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      if constexpr (GROUPS > 1) {
        _tile_loadd(5, second, 2 * kTileK);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
  }
}

// Asks the system for the matrix unit. Returns whether this process may use it.
RAYLENS_EXPORT int64_t raylens_is_usable() {
  constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}
#else
RAYLENS_EXPORT int64_t raylens_is_usable() { return 1; }
#endif
