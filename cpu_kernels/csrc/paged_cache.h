// A layer's keys and values, in blocks, the chunks of sequences that a step computes, and the arguments of attention.
#pragma once
#include <algorithm>
#include <vector>

#include "vector.h"

// Zeros pad the rows of the cache to whole vectors.
inline int64_t padded(int64_t dim) { return (dim + kLanes - 1) / kLanes * kLanes; }
RAYLENS_EXPORT int64_t raylens_lanes() { return kLanes; }

// Mirrors `LayerCache` in attention.py. keys: (kv_heads, num_slots, padded(key_dim)); values likewise.
struct LayerCache {
  float *keys, *values;
  int64_t kv_heads, num_slots, block_size, key_dim, value_dim;
};

// Mirrors `StepChunks` in attention.py. The chunks are concatenated on one axis of tokens.
//
// The positions of a bidirectional span see each other, in both directions. `spans` has the number of each position's
// span, or kNoSpan, up to the chunk's end.
struct StepChunks {
  const int64_t* slots;         // (num_tokens,): the cache slot of each token
  const int32_t* blocks;        // the chunks' concatenated block tables
  const int32_t* first_blocks;  // (num_chunks,): the start of a chunk's block table in `blocks`
  const int32_t* lengths;       // (num_chunks,): the tokens of a chunk
  const int32_t* ends;          // (num_chunks,): the positions of the sequence up to the chunk's end
  const int32_t* prompt_ends;   // (num_chunks,): the positions of the sequence's prompt
  const float* spans;           // the chunks' concatenated spans
  const int32_t* first_spans;   // (num_chunks,): the start of a chunk's spans in `spans`, or -1 for a chunk without
  int64_t num_chunks, num_tokens;
  int64_t windows_cut_spans;  // whether the sliding window also applies within spans

  // Returns the number of prompt tokens in a chunk. They come first; the others are generated.
  int64_t num_of_prompt(int64_t chunk) const {
    int64_t start = ends[chunk] - lengths[chunk];
    return std::clamp<int64_t>(prompt_ends[chunk] - start, 0, lengths[chunk]);
  }

  const float* spans_of(int64_t chunk) const { return first_spans[chunk] < 0 ? nullptr : spans + first_spans[chunk]; }
};

constexpr float kNoSpan = -1;

// Mirrors `RowsStructure` in structures.py: (num_tokens, heads, dim), with contiguous numbers of a head.
struct Rows {
  const float* data;
  int64_t token_stride, head_stride;
  const float* at(int64_t token, int64_t head) const { return data + token * token_stride + head * head_stride; }
};

// Returns the first position in the window of `position`, which includes itself. `window` 0: all earlier positions.
inline int64_t first_seen(int64_t position, int64_t window) {
  return window == 0 ? 0 : std::max<int64_t>(0, position - window + 1);
}

// Mirrors `AttentionArguments` in attention.py.
struct AttentionArguments {
  Rows queries, keys, values;
  float* output;  // (num_tokens, heads, value_dim)
  int64_t heads;
  int64_t window;     // the size of the sliding window, the position itself included; 0: all earlier positions
  int64_t row_parts;  // as a PackedWeight's: 1 lets the matrix unit round values and their weights
  float scaling;
  float softcap;  // 0: none

  float* output_row(int64_t token, int64_t head, int64_t value_dim) const {
    return output + (token * heads + head) * value_dim;
  }
  int64_t first_seen(int64_t position) const { return ::first_seen(position, window); }
};

// Consecutive slots that hold consecutive positions.
struct Run {
  int64_t slot, length;
};

// Fills `runs` with the slots of the positions [start, end) of a sequence, in order.
inline void find_runs(const int32_t* blocks, int64_t block_size, int64_t start, int64_t end, std::vector<Run>& runs) {
  runs.clear();
  for (int64_t position = start; position < end;) {
    int64_t block = position / block_size, offset = position % block_size;
    int64_t length = std::min(block_size - offset, end - position), slot = blocks[block] * block_size + offset;
    if (!runs.empty() && runs.back().slot + runs.back().length == slot)
      runs.back().length += length;
    else
      runs.push_back({slot, length});
    position += length;
  }
}

inline void write_to_cache(const LayerCache& cache, const StepChunks& step, const Rows& keys, const Rows& values) {
  int64_t key_row = padded(cache.key_dim), value_row = padded(cache.value_dim);
  for (int64_t head = 0; head < cache.kv_heads; head++)
    for (int64_t token = 0; token < step.num_tokens; token++) {
      int64_t row = head * cache.num_slots + step.slots[token];
      std::copy_n(keys.at(token, head), cache.key_dim, cache.keys + row * key_row);
      std::copy_n(values.at(token, head), cache.value_dim, cache.values + row * value_row);
    }
}
