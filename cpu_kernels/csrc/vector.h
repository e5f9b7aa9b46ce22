// Vectors of the processor's width, by the compiler's vector extensions.
//
// An operator on a `Vec` works on each of its lanes. The compiler contracts a product and a sum into a fused
// multiply-add if the processor has it (-ffp-contract=fast).
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#define RAYLENS_LANES 16
#define RAYLENS_EVEN 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define RAYLENS_ODD 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31
#elif defined(__AVX__)
#define RAYLENS_LANES 8
#define RAYLENS_EVEN 0, 2, 4, 6, 8, 10, 12, 14
#define RAYLENS_ODD 1, 3, 5, 7, 9, 11, 13, 15
#else
#define RAYLENS_LANES 4
#define RAYLENS_EVEN 0, 2, 4, 6
#define RAYLENS_ODD 1, 3, 5, 7
#endif
#if defined(__clang__)
#define RAYLENS_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define RAYLENS_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (IntVec){__VA_ARGS__})
#endif
#define RAYLENS_INLINE inline __attribute__((always_inline))
// Marks a function that Python calls. A reference is passed as an address.
#define RAYLENS_EXPORT extern "C" __attribute__((visibility("default")))

constexpr int kLanes = RAYLENS_LANES;
// The number of rows whose sums the inner loop of a product holds, with registers left for the weights.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kRows = 8;
#elif defined(__AVX__)
constexpr int kRows = 6;
#else
constexpr int kRows = 4;
#endif

typedef float Vec __attribute__((vector_size(4 * kLanes)));
typedef int32_t IntVec __attribute__((vector_size(4 * kLanes)));
typedef uint32_t UintVec __attribute__((vector_size(4 * kLanes)));

RAYLENS_INLINE Vec load(const float* from) {
  Vec v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

RAYLENS_INLINE void store(float* to, Vec v) { std::memcpy(to, &v, sizeof v); }

RAYLENS_INLINE Vec all(float x) { return x - Vec{}; }

RAYLENS_INLINE Vec larger(Vec a, Vec b) { return a > b ? a : b; }

RAYLENS_INLINE Vec smaller(Vec a, Vec b) { return a < b ? a : b; }

// Returns the sum of the lanes of each of kLanes vectors, one sum a lane. It adds neighbours first, then neighbouring
// pairs, and so on, in the same order for every vector.
RAYLENS_INLINE Vec sums_of_lanes(Vec (&v)[kLanes]) {
  for (int count = kLanes; count > 1; count /= 2)
    for (int i = 0; i < count / 2; i++)
      v[i] =
          RAYLENS_SHUFFLE(v[2 * i], v[2 * i + 1], RAYLENS_EVEN) + RAYLENS_SHUFFLE(v[2 * i], v[2 * i + 1], RAYLENS_ODD);
  return v[0];
}

RAYLENS_INLINE float sum_of_lanes(Vec v) {
  float sum = 0;
  for (int i = 0; i < kLanes; i++) sum += v[i];
  return sum;
}

RAYLENS_INLINE float largest_lane(Vec v) {
  float largest = v[0];
  for (int i = 1; i < kLanes; i++) largest = v[i] > largest ? v[i] : largest;
  return largest;
}

// Returns the polynomial of x with these coefficients, the highest power first, by Horner's rule.
template <class... Coefficients>
RAYLENS_INLINE Vec polynomial(Vec x, float first, Coefficients... others) {
  Vec sum = all(first);
  ((sum = sum * x + others), ...);
  return sum;
}

// Returns e^x within 2 ulp, for x clamped to [-87.3, 88.3], by the polynomial of Cephes' expf.
RAYLENS_INLINE Vec exp(Vec x) {
  x = smaller(larger(x, all(-87.33f)), all(88.37f));
  const Vec magic = all(12582912.f);  // 1.5 * 2^23: adding it puts the rounded number into the lowest bits
  Vec shifted = x * 1.44269504088896341f + magic;
  Vec n = shifted - magic;
  Vec r = x - n * 0.693359375f;  // ln 2 in two parts, the first of them exact
  r = r + n * 2.12194440e-4f;
  Vec p = polynomial(r, 1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f,
                     5.0000001201e-1f);
  p = p * (r * r) + (r + 1.f);
  UintVec power = (((UintVec)shifted - (UintVec)magic) + 127u) << 23;  // 2^n
  return p * (Vec)power;
}

// Returns tanh x within 4 ulp, for small x by the polynomial of Cephes' tanhf.
RAYLENS_INLINE Vec tanh(Vec x) {
  Vec magnitude = x < 0.f ? -x : x;
  Vec square = x * x;
  Vec p = polynomial(square, -5.70498872745e-3f, 2.06390887954e-2f, -5.37397155531e-2f, 1.33314422036e-1f,
                     -3.33332819422e-1f);
  Vec small = p * square * x + x;
  Vec large = 1.f - 2.f / (exp(magnitude + magnitude) + 1.f);
  large = x < 0.f ? -large : large;
  return magnitude < 0.625f ? small : large;
}
