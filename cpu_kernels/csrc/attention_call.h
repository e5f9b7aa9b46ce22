// The arguments of a layer's attention beside the step and the cache.
#pragma once
#include "paged_cache.h"

// Returns the first position in the window of `position`, which includes itself. `window` 0: all earlier positions.
inline int64_t first_seen(int64_t position, int64_t window) {
  return window == 0 ? 0 : std::max<int64_t>(0, position - window + 1);
}

// Mirrors `AttentionArguments` in attention.py.
struct AttentionArguments {
  Rows queries, keys, values;
  float* output;  // (num_tokens, heads, value_dim)
  int64_t heads;
  int64_t window;  // the size of the sliding window, the position itself included; 0: all earlier positions
  float scaling;
  float softcap;  // 0: none

  float* output_row(int64_t token, int64_t head, int64_t value_dim) const {
    return output + (token * heads + head) * value_dim;
  }
  int64_t first_seen(int64_t position) const { return ::first_seen(position, window); }
};
