// The numbers of a weight in memory.
//
// A panel holds kPanel columns of the output. A form stores the panel's numbers for kUnit consecutive k in a unit, and
// loads a unit as two vectors for each k: the panel's first and second half. kIsInBfloat16: bfloat16 holds each number.
#pragma once
#include "vector.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

constexpr int kPanel = 2 * kLanes;

// Mirrors `FORMS` in packed_weight.py.
enum class Form : int64_t { kFloat32, kBfloat16, kFloat16, kFloat8, kInt8, kInt4 };

typedef int8_t ByteVec __attribute__((vector_size(kLanes)));
typedef uint8_t UnsignedByteVec __attribute__((vector_size(kLanes)));
typedef uint16_t HalfVec __attribute__((vector_size(2 * kLanes)));

template <class Loaded>
RAYLENS_INLINE Loaded load_as(const char* from) {
  Loaded v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

// Conversions by instructions that GCC does not find itself: it would convert byte by byte.

// Returns kLanes signed bytes as whole numbers of 32 bits.
RAYLENS_INLINE IntVec from_bytes(const char* from) {
#if defined(__AVX512F__)
  return (IntVec)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#elif defined(__AVX2__)
  return (IntVec)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
#else
  return __builtin_convertvector(load_as<ByteVec>(from), IntVec);
#endif
}

// Returns kLanes unsigned bytes as whole numbers of 16 bits.
RAYLENS_INLINE HalfVec from_unsigned_bytes(const char* from) {
#if defined(__AVX512F__)
  return (HalfVec)_mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#elif defined(__AVX2__)
  return (HalfVec)_mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
#else
  return __builtin_convertvector(load_as<UnsignedByteVec>(from), HalfVec);
#endif
}

// Returns IEEE half precision as float32, exactly.
RAYLENS_INLINE Vec from_half(HalfVec halves) {
#if defined(__AVX512F__)
  return (Vec)_mm512_cvtph_ps((__m256i)halves);
#elif defined(__AVX2__)
  return (Vec)_mm256_cvtph_ps((__m128i)halves);
#else
  // The exponent moves to its place in float32, where its bias is larger by 112. Subnormals come out right, too.
  UintVec wide = __builtin_convertvector(halves, UintVec);
  UintVec magnitude = (wide & 0x7fffu) << 13, sign = (wide & 0x8000u) << 16;
  Vec value = (Vec)magnitude * 5.192296858534828e33f;  // 2^112
  return (Vec)((UintVec)value | sign);
#endif
}

struct Float32 {
  typedef float Number;  // as it comes from a file
  static constexpr bool kIsInBfloat16 = false;
  static constexpr int kUnit = 1, kUnitBytes = 4 * kPanel;
  static constexpr int kUnitsAhead = 24;  // the prefetch distance
  static RAYLENS_INLINE void load(const char* from, Vec (&to)[kUnit][2]) {
    to[0][0] = load_as<Vec>(from);
    to[0][1] = load_as<Vec>(from + kUnitBytes / 2);
  }
  static void put(Number number, int, int column, char* unit) { std::memcpy(unit + 4 * column, &number, 4); }
};

// A float32 without its lower 16 bits. The four bytes at a column hold its numbers for two k.
struct Bfloat16 {
  typedef uint16_t Number;
  static constexpr bool kIsInBfloat16 = true;
  static constexpr int kUnit = 2, kUnitBytes = 4 * kPanel;
  static constexpr int kUnitsAhead = 16;
  static RAYLENS_INLINE void load(const char* from, Vec (&to)[kUnit][2]) {
    for (int half = 0; half < 2; half++) {
      UintVec both = load_as<UintVec>(from + half * kUnitBytes / 2);
      to[0][half] = (Vec)(both << 16);
      to[1][half] = (Vec)(both & 0xffff0000u);
    }
  }
  static void put(Number number, int k, int column, char* unit) { std::memcpy(unit + 4 * column + 2 * k, &number, 2); }
};

struct Float16 {
  typedef uint16_t Number;
  static constexpr bool kIsInBfloat16 = false;
  static constexpr int kUnit = 1, kUnitBytes = 2 * kPanel;
  static constexpr int kUnitsAhead = 32;
  static RAYLENS_INLINE void load(const char* from, Vec (&to)[kUnit][2]) {
    for (int half = 0; half < 2; half++) to[0][half] = from_half(load_as<HalfVec>(from + half * kUnitBytes / 2));
  }
  static void put(Number number, int, int column, char* unit) { std::memcpy(unit + 2 * column, &number, 2); }
};

// One byte: E4M3 (Micikevicius et al., 2022), without a NaN, in 2^-8 of its value.
struct Float8 {
  typedef int8_t Number;
  static constexpr bool kIsInBfloat16 = true;
  static constexpr int kUnit = 4, kUnitBytes = 4 * kPanel;
  static constexpr int kUnitsAhead = 24;
  static RAYLENS_INLINE void load(const char* from, Vec (&to)[kUnit][2]) {
    for (int k = 0; k < kUnit; k++)
      for (int half = 0; half < 2; half++, from += kLanes) {
        HalfVec bytes = from_unsigned_bytes(from);
        to[k][half] = from_half(((bytes & 0x80) << 8) | ((bytes & 0x7f) << 7));
      }
  }
  static void put(Number byte, int k, int column, char* unit) { unit[k * kPanel + column] = static_cast<char>(byte); }
};

struct Int8 {
  typedef int8_t Number;
  static constexpr bool kIsInBfloat16 = true;
  static constexpr int kUnit = 4, kUnitBytes = 4 * kPanel;
  static constexpr int kUnitsAhead = 24;
  static RAYLENS_INLINE void load(const char* from, Vec (&to)[kUnit][2]) {
    for (int k = 0; k < kUnit; k++)
      for (int half = 0; half < 2; half++, from += kLanes) to[k][half] = __builtin_convertvector(from_bytes(from), Vec);
  }
  static void put(Number number, int k, int column, char* unit) {
    unit[k * kPanel + column] = static_cast<char>(number);
  }
};

// Four bits. The four bytes at c hold column c of both halves for four k.
//
// `load` leaves the bits in their places: the number times 2^(4 * place), of which the scale takes the power again. All
// places but the highest, which is signed, hold the number plus kOffset.
struct Int4 {
  typedef int8_t Number;
  static constexpr bool kIsInBfloat16 = true;
  static constexpr int kUnit = 4, kUnitBytes = 2 * kPanel;
  static constexpr int kUnitsAhead = 80;
  static constexpr int kOffset = 8, kHighest = 7;
  static constexpr int place(int k, int half) { return 4 * (k % 2) + 2 * (k / 2) + half; }
  static RAYLENS_INLINE void load(const char* from, Vec (&to)[kUnit][2]) {
    UintVec all = load_as<UintVec>(from);
    for (int k = 0; k < kUnit; k++)
      for (int half = 0; half < 2; half++)
        to[k][half] = __builtin_convertvector((IntVec)(all & (15u << 4 * place(k, half))), Vec);
  }
  // `unit` is zero at first.
  static void put(Number number, int k, int column, char* unit) {
    int own = place(k, column / kLanes);
    uint32_t all;
    std::memcpy(&all, unit + 4 * (column % kLanes), 4);
    all |= static_cast<uint32_t>((number + (own == kHighest ? 0 : kOffset)) & 15) << 4 * own;
    std::memcpy(unit + 4 * (column % kLanes), &all, 4);
  }
};
