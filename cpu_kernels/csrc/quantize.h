// Rounds weights to whole numbers with a scale for each group of a row.
#pragma once
#include <algorithm>

#include "thread_pool.h"
#include "vector.h"

// Mirrors `_Rounding` in quantize.py.
struct Rounding {
  const float* weight;  // (rows, num_k)
  int8_t* numbers;      // (rows, num_k)
  float* scales;        // (rows, groups)
  int64_t rows, num_k, group;
  float largest;        // number; the smallest is -largest - 1
  int64_t num_clipped;  // smaller scales to try
};

constexpr int64_t kLargestGroup = 256;

// A smaller scale rounds most numbers less, and clips a group's largest ones. Each step takes so much of it.
constexpr float kClippedStep = 0.05f;

// Rounds a group to the scale with the smallest sum of squared errors.
inline void round_group(const float* weight, int64_t count, const Rounding& rounding, int8_t* numbers, float* scale) {
  float padded[kLargestGroup + kLanes] = {};
  std::copy_n(weight, count, padded);
  Vec largest{};
  for (int64_t i = 0; i < count; i += kLanes) {
    Vec own = load(padded + i);
    largest = larger(largest, larger(own, -own));
  }
  float whole = std::max(largest_lane(largest), 1e-30f) / rounding.largest, smallest_error = 0;
  const Vec magic = all(12582912.f);  // 1.5 * 2^23: adding it rounds to the nearest whole number
  auto rounded = [&](Vec own, float inverse) {
    Vec number = (own * inverse + magic) - magic;
    return smaller(larger(number, all(-rounding.largest - 1)), all(rounding.largest));
  };
  for (int64_t step = 0; step <= rounding.num_clipped; step++) {
    float tried = whole * (1 - kClippedStep * static_cast<float>(step)), inverse = 1 / tried;
    Vec errors{};
    for (int64_t i = 0; i < count; i += kLanes) {
      Vec own = load(padded + i), error = own - rounded(own, inverse) * tried;
      errors += error * error;
    }
    float error = sum_of_lanes(errors);
    if (step == 0 || error < smallest_error) {
      smallest_error = error;
      *scale = tried;
    }
  }
  for (int64_t i = 0; i < count; i += kLanes) store(padded + i, rounded(load(padded + i), 1 / *scale));
  std::copy_n(padded, count, numbers);
}

RAYLENS_EXPORT void raylens_quantize(const Rounding& rounding, int threads) {
  int64_t groups = (rounding.num_k + rounding.group - 1) / rounding.group;
  pool().run(threads, static_cast<int>(rounding.rows), [&](int row) {
    for (int64_t group = 0; group < groups; group++) {
      int64_t start = row * rounding.num_k + group * rounding.group;
      int64_t count = std::min(rounding.group, rounding.num_k - group * rounding.group);
      round_group(rounding.weight + start, count, rounding, rounding.numbers + start,
                  rounding.scales + row * groups + group);
    }
  });
}
