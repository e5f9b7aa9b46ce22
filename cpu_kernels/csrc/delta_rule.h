// One token of the gated delta rule, for each head of each sequence (https://arxiv.org/abs/2412.06464):
//
//   S <- decay S;  S <- S + k (beta (v - S^T k))^T;  output = S^T q
#pragma once
#include <algorithm>

#include "thread_pool.h"
#include "vector.h"

// Mirrors `_DeltaStep` in delta_rule.py. All heads of all sequences lie one behind another.
struct DeltaStep {
  int64_t num_heads, key_dim, value_dim;  // value_dim is a multiple of kLanes
  float* states;                          // (num_heads, key_dim, value_dim), changed in place
  const float *queries, *keys;            // (num_heads, key_dim)
  const float* values;                    // (num_heads, value_dim)
  const float *decays, *betas;            // (num_heads,)
  float* outputs;                         // (num_heads, value_dim)
};

// Computes the columns [column, column + kLanes * kWide) of one head: so many sums stay in registers.
template <int kWide>
RAYLENS_INLINE void delta_columns(const DeltaStep& step, int64_t head, int64_t column) {
  int64_t rows = step.key_dim, width = step.value_dim;
  const float *q = step.queries + head * rows, *k = step.keys + head * rows;
  float* state = step.states + head * rows * width + column;
  float decay = step.decays[head], beta = step.betas[head];
  Vec seen[kWide] = {}, delta[kWide], output[kWide] = {};
  for (int64_t row = 0; row < rows; row++)
    for (int i = 0; i < kWide; i++) seen[i] += load(state + row * width + i * kLanes) * k[row];
  for (int i = 0; i < kWide; i++)
    delta[i] = (load(step.values + head * width + column + i * kLanes) - seen[i] * decay) * beta;
  for (int64_t row = 0; row < rows; row++)
    for (int i = 0; i < kWide; i++) {
      float* own = state + row * width + i * kLanes;
      Vec next = load(own) * decay + delta[i] * k[row];
      store(own, next);
      output[i] += next * q[row];
    }
  for (int i = 0; i < kWide; i++) store(step.outputs + head * width + column + i * kLanes, output[i]);
}

RAYLENS_EXPORT void raylens_delta_step(const DeltaStep& step, int threads) {
  constexpr int kWide = 4;
  pool().run(threads, static_cast<int>(step.num_heads), [&](int head) {
    int64_t column = 0;
    for (; column + kWide * kLanes <= step.value_dim; column += kWide * kLanes)
      delta_columns<kWide>(step, head, column);
    for (; column < step.value_dim; column += kLanes) delta_columns<1>(step, head, column);
  });
}
