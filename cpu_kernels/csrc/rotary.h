// Rotary embeddings (Su et al., 2021) that rotate the first half of a head's first `dim` numbers with the second half.
#pragma once
#include <algorithm>

#include "paged_cache.h"
#include "thread_pool.h"

// Mirrors `RopeStructure` in rotary.py.
struct Rope {
  const float *cosines, *sines;  // (positions, dim)
  const int64_t* axes;           // (dim,): the axis of the positions that rotates a number
  int64_t dim, num_positions;

  // Writes a token's cosines and then sines, (2, dim). Its positions are positions[axis * stride]. Returns whether the
  // tables hold them.
  bool look_up(const int64_t* positions, int64_t stride, float* to) const {
    for (int64_t d = 0; d < dim; d++) {
      int64_t position = positions[axes[d] * stride];
      if (position >= num_positions) return false;
      to[d] = cosines[position * dim + d];
      to[dim + d] = sines[position * dim + d];
    }
    return true;
  }
};

// Rotates a head's numbers, in place. cosines and sines: (dim,).
inline void rotate(const float* cosines, const float* sines, int64_t dim, float* head) {
  int64_t half = dim / 2;
  for (int64_t d = 0; d < half; d++) {
    float a = head[d], b = head[d + half];
    head[d] = a * cosines[d] - b * sines[d];
    head[d + half] = b * cosines[d + half] + a * sines[d + half];
  }
}

// Mirrors `_Heads` in rotary.py: (num_tokens, heads, dim), and the rotation of each token.
struct Heads {
  Rows from;
  float* to;                     // contiguous
  const float *cosines, *sines;  // (num_tokens, dim)
  int64_t num_tokens, heads, dim;
};

RAYLENS_EXPORT void raylens_rotate(const Heads& given, int threads) {
  int64_t dim = given.dim;
  each_row(given.num_tokens, threads, [&](int64_t token) {
    for (int64_t head = 0; head < given.heads; head++) {
      float* to = given.to + (token * given.heads + head) * dim;
      std::copy_n(given.from.at(token, head), dim, to);
      rotate(given.cosines + token * dim, given.sines + token * dim, dim, to);
    }
  });
}
