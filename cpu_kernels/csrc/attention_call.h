// What the attention of a layer is told beside the step and the cache.
#pragma once
#include "paged_cache.h"

// Returns the first position that `position` sees, of `window` positions up to itself; 0 stands for all.
inline int64_t first_seen(int64_t position, int64_t window) {
  return window == 0 ? 0 : std::max<int64_t>(0, position - window + 1);
}

// Mirrors `AttentionArguments` in attention.py.
struct AttentionArguments {
  Rows queries, keys, values;
  float* output;  // (num_tokens, heads, value_dim)
  int64_t heads;
  int64_t window;  // how many positions a position sees, itself included; 0: all up to itself
  float scaling;
  float softcap;  // 0: none

  float* output_row(int64_t token, int64_t head, int64_t value_dim) const {
    return output + (token * heads + head) * value_dim;
  }
  int64_t first_seen(int64_t position) const { return ::first_seen(position, window); }
};
