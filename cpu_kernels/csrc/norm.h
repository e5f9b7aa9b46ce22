// RMS norm (Zhang and Sennrich, 2019).
#pragma once
#include <cmath>

#include "thread_pool.h"
#include "vector.h"

// Mirrors `NormStructure` in norm.py. weight: (dim,); null: no norm.
struct Norm {
  const float* weight;
  float eps;

  explicit operator bool() const { return weight != nullptr; }

  // Writes the norm of `x`, (dim,), to `to`, or adds it there.
  template <bool ADDS = false>
  void apply(const float* x, int64_t dim, float* to) const {
    int64_t whole = dim / kLanes * kLanes;
    Vec sum{};
    for (int64_t i = 0; i < whole; i += kLanes) sum += load(x + i) * load(x + i);
    float squares = sum_of_lanes(sum);
    for (int64_t i = whole; i < dim; i++) squares += x[i] * x[i];
    float factor = 1.f / std::sqrt(squares / static_cast<float>(dim) + eps);
    for (int64_t i = 0; i < dim; i++) {
      float normed = weight[i] * (x[i] * factor);
      to[i] = ADDS ? to[i] + normed : normed;
    }
  }
};

// Writes the norms of `x`, (num_rows, dim), to `to`.
RAYLENS_EXPORT void raylens_norm(const Norm& norm, const float* x, int64_t num_rows, int64_t dim, float* to,
                                 int threads) {
  each_row(num_rows, threads, [&](int64_t row) { norm.apply(x + row * dim, dim, to + row * dim); });
}
