// Tokens of the gated delta rule, for each head of each row (https://arxiv.org/abs/2412.06464):
//
//   S <- decay S;  S <- S + k (beta (v - S^T k))^T;  output = S^T q
#pragma once
#include <algorithm>

#include "thread_pool.h"
#include "vector.h"

// Mirrors `_DeltaRows` in delta_rule.py.
struct DeltaRows {
  int64_t num_rows, num_heads, key_dim, value_dim;  // value_dim is a multiple of kLanes
  float* states;                                    // (num_slots, num_heads, key_dim, value_dim)
  const float *queries, *keys;                      // (num_rows, num_heads, key_dim)
  const float* values;                              // (num_rows, num_heads, value_dim)
  const float *decays, *betas;                      // (num_rows, num_heads)
  float* outputs;                                   // (num_rows, num_heads, value_dim)
  const int64_t *sources, *targets;                 // (num_rows,): the slots that a row reads and writes
};

// Computes the columns [column, column + kLanes * kWide) of one head of a row: so many sums stay in registers.
template <int kWide>
RAYLENS_INLINE void delta_columns(const DeltaRows& step, int64_t row, int64_t head, int64_t column) {
  int64_t height = step.key_dim, width = step.value_dim, place = row * step.num_heads + head;
  const float *q = step.queries + place * height, *k = step.keys + place * height;
  const float* before = step.states + (step.sources[row] * step.num_heads + head) * height * width + column;
  float* after = step.states + (step.targets[row] * step.num_heads + head) * height * width + column;
  float decay = step.decays[place], beta = step.betas[place];
  Vec seen[kWide] = {}, delta[kWide], output[kWide] = {};
  for (int64_t at = 0; at < height; at++)
    for (int i = 0; i < kWide; i++) seen[i] += load(before + at * width + i * kLanes) * k[at];
  for (int i = 0; i < kWide; i++)
    delta[i] = (load(step.values + place * width + column + i * kLanes) - seen[i] * decay) * beta;
  for (int64_t at = 0; at < height; at++)
    for (int i = 0; i < kWide; i++) {
      Vec next = load(before + at * width + i * kLanes) * decay + delta[i] * k[at];
      store(after + at * width + i * kLanes, next);
      output[i] += next * q[at];
    }
  for (int i = 0; i < kWide; i++) store(step.outputs + place * width + column + i * kLanes, output[i]);
}

// A row may continue from an earlier one, so each head takes the rows in order.
RAYLENS_EXPORT void raylens_delta_rows(const DeltaRows& step, int threads) {
  constexpr int kWide = 4;
  pool().run(threads, static_cast<int>(step.num_heads), [&](int head) {
    for (int64_t row = 0; row < step.num_rows; row++) {
      int64_t column = 0;
      for (; column + kWide * kLanes <= step.value_dim; column += kWide * kLanes)
        delta_columns<kWide>(step, row, head, column);
      for (; column < step.value_dim; column += kLanes) delta_columns<1>(step, row, head, column);
    }
  });
}
