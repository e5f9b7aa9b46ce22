// Attention of many queries of one sequence: causal for a prompt's chunk, full for a picture.
//
// A tile has kPanel query rows, one in each lane of two vectors. The scores of a position are then one row of kPanel
// numbers, and the softmax needs no sums over lanes. The positions are tiled, too, with a running maximum and sum
// (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018). The tiles of positions start at
// multiples of kPositions. A query's result thus depends neither on the division of the prompt into chunks nor on the
// places of its blocks.
#pragma once
#include <utility>

#include "packed_product.h"
#include "paged_cache.h"

constexpr int64_t kPositions = 128;

// A head's keys or values of a sequence: in the blocks of a cache, or contiguous if `blocks` is null.
struct SequenceRows {
  const float* data;
  int64_t stride;
  const int32_t* blocks;
  int64_t block_size;

  // Returns the rows [start, start + count): in place if they are contiguous, else copied.
  const float* at(int64_t start, int64_t count, std::vector<Run>& runs, float* copy) const {
    if (blocks == nullptr) return data + start * stride;
    find_runs(blocks, block_size, start, start + count, runs);
    if (runs.size() == 1) return data + runs[0].slot * stride;
    float* to = copy;
    for (const Run& run : runs) to = std::copy_n(data + run.slot * stride, run.length * stride, to);
    return copy;
  }
};

// The query rows of a tile, as lanes. Lanes past the last row repeat it.
//
// A lane sees the positions [first_seen, end) and its bidirectional span.
struct QueryTile {
  float first_seen[kPanel], end[kPanel];  // float32 counts exactly up to 2^24
  int64_t token[kPanel], head[kPanel];
  int64_t count;                    // rows
  int64_t start, stop;              // positions that any lane sees
  int64_t inner_start, inner_stop;  // positions that all lanes see
  const float* spans = nullptr;     // the number of each position's span, or null if no lane has a span
  float span[kPanel];               // each lane's span, or an unused number
  bool windows_cut_spans;

  // Adds the lanes' spans. `own`: the spans of the sequence's positions up to `num_positions`.
  void add_spans(const float* own, int64_t num_positions, bool windows_cut) {
    windows_cut_spans = windows_cut;
    for (int lane = 0; lane < kPanel; lane++) {
      span[lane] = own[static_cast<int64_t>(end[lane]) - 1];  // a lane's own position is the last that it sees
      if (span[lane] == kNoSpan) {
        span[lane] = kNoSpan - 1;
        continue;
      }
      spans = own;
      auto is_own = [&](int64_t position) { return own[position] == span[lane]; };
      for (int64_t last = num_positions; last > stop; last--)
        if (is_own(last - 1)) stop = last;
      for (int64_t first = 0; !windows_cut && first < start; first++)
        if (is_own(first)) start = first;
    }
  }
};

// Returns a tile of the queries of one key head: `length` tokens of the step from `first_token` on, `group` heads each.
// `sees(index)` returns the positions [first, end) that a token sees.
template <class Sees>
QueryTile query_tile(int64_t first_token, int64_t length, int64_t kv_head, int64_t group, int64_t first_row,
                     const Sees& sees) {
  QueryTile tile;
  int64_t rows = length * group;
  tile.count = std::min<int64_t>(kPanel, rows - first_row);
  for (int lane = 0; lane < kPanel; lane++) {
    int64_t row = std::min(first_row + lane, rows - 1), index = row / group;
    tile.token[lane] = first_token + index;
    tile.head[lane] = kv_head * group + row % group;
    auto [first, end] = sees(index);
    tile.first_seen[lane] = static_cast<float>(first);
    tile.end[lane] = static_cast<float>(end);
  }
  tile.start = static_cast<int64_t>(tile.first_seen[0]);
  tile.stop = static_cast<int64_t>(tile.end[kPanel - 1]);
  tile.inner_start = static_cast<int64_t>(tile.first_seen[kPanel - 1]);
  tile.inner_stop = static_cast<int64_t>(tile.end[0]);
  return tile;
}

// scores[i * kPanel + lane] = keys[i] . queries[lane]
inline void chunk_scores(const float* queries, const float* keys, int64_t dim, int64_t stride, int64_t count,
                         float* scores) {
  for (int64_t i = 0; i < count; i += kRows)
    with_rows(static_cast<int>(std::min<int64_t>(kRows, count - i)), [&](auto rows) {
      constexpr int R = rows;
      Vec sums[R][2] = {};
      accumulate<R, 0, 0>(Floats(), reinterpret_cast<const char*>(queries), keys + i * stride, stride, 1,
                          static_cast<int>(dim), {}, sums);
      for (int r = 0; r < R; r++) store_columns(scores + (i + r) * kPanel, kPanel, sums[r]);
    });
}

// A lane's running maximum and sum of weights, for one of a tile's two vectors.
struct Softmax {
  Vec largest = all(-1e30f), sum{};

  // Turns the scores of `count` positions from `start` on into weights, in place, for the tile's lanes from `lane` on.
  // Returns the factor for earlier sums. `is_edge`: some lanes do not see some of the positions.
  RAYLENS_INLINE Vec weigh(float* scores, int64_t count, float softcap, bool is_edge, int64_t start,
                           const QueryTile& tile, int lane) {
    if (softcap > 0)
      for (int64_t i = 0; i < count; i++)
        store(scores + i * kPanel, softcap * tanh(load(scores + i * kPanel) / softcap));
    if (is_edge) {
      Vec first_seen = load(tile.first_seen + lane), end = load(tile.end + lane);
      for (int64_t i = 0; i < count; i++) {
        Vec position = all(static_cast<float>(start + i));
        IntVec is_seen = (position >= first_seen) & (position < end);
        if (tile.spans != nullptr) {
          IntVec is_of_span = all(tile.spans[start + i]) == load(tile.span + lane);
          is_seen |= tile.windows_cut_spans ? is_of_span & (position >= first_seen) : is_of_span;
        }
        store(scores + i * kPanel, is_seen ? load(scores + i * kPanel) : all(-3e38f));
      }
    }
    Vec top = largest;
    for (int64_t i = 0; i < count; i++) top = larger(top, load(scores + i * kPanel));
    Vec factor = exp(largest - top), added{};
    for (int64_t i = 0; i < count; i++) {
      Vec score = load(scores + i * kPanel);
      Vec weight = exp(score - top);
      if (is_edge) weight = score > -2e38f ? weight : Vec{};
      store(scores + i * kPanel, weight);
      added += weight;
    }
    largest = top;
    sum = sum * factor + added;
    return factor;
  }
};

// output[d * kPanel + lane] = output[...] * factor + sum over i of values[i][d] * weights[i][lane]
inline void add_values(const float* weights, const float* values, int64_t dim, int64_t stride, int64_t count,
                       const Vec (&factor)[2], float* output) {
  for (int64_t d = 0; d < dim; d += kRows)
    with_rows(static_cast<int>(std::min<int64_t>(kRows, dim - d)), [&](auto rows) {
      constexpr int R = rows;
      Vec sums[R][2];
      for (int r = 0; r < R; r++)
        for (int half = 0; half < 2; half++)
          sums[r][half] = load(output + (d + r) * kPanel + half * kLanes) * factor[half];
      accumulate<R, 0, 0>(Floats(), reinterpret_cast<const char*>(weights), values + d, 1, stride,
                          static_cast<int>(count), {}, sums);
      for (int r = 0; r < R; r++) store_columns(output + (d + r) * kPanel, kPanel, sums[r]);
    });
}

// Attends with a tile of queries over the keys and values of their sequence.
inline void attend_tile(const QueryTile& tile, const AttentionArguments& call, const SequenceRows& keys,
                        int64_t key_dim, const SequenceRows& values, int64_t value_dim) {
  static thread_local Scratch scratch;
  static thread_local std::vector<Run> runs;
  float* queries =
      scratch.floats(kPanel * (key_dim + value_dim + kPositions) + kPositions * (keys.stride + values.stride));
  float *output = queries + kPanel * key_dim, *scores = output + kPanel * value_dim;
  float *key_copy = scores + kPanel * kPositions, *value_copy = key_copy + kPositions * keys.stride;
  for (int lane = 0; lane < kPanel; lane++) {
    const float* query = call.queries.at(tile.token[lane], tile.head[lane]);
    for (int64_t d = 0; d < key_dim; d++) queries[d * kPanel + lane] = query[d] * call.scaling;
  }
  std::fill_n(output, kPanel * value_dim, 0.f);
  Softmax softmax[2];
  for (int64_t position = tile.start / kPositions * kPositions; position < tile.stop; position += kPositions) {
    int64_t count = std::min(kPositions, tile.stop - position);
    bool is_edge = position < tile.inner_start || position + count > tile.inner_stop;
    chunk_scores(queries, keys.at(position, count, runs, key_copy), key_dim, keys.stride, count, scores);
    Vec factor[2];
    for (int half = 0; half < 2; half++)
      factor[half] =
          softmax[half].weigh(scores + half * kLanes, count, call.softcap, is_edge, position, tile, half * kLanes);
    add_values(scores, values.at(position, count, runs, value_copy), value_dim, values.stride, count, factor, output);
  }
  float sums[kPanel];
  for (int half = 0; half < 2; half++) store(sums + half * kLanes, softmax[half].sum);
  for (int lane = 0; lane < tile.count; lane++) {
    float* to = call.output_row(tile.token[lane], tile.head[lane], value_dim);
    for (int64_t d = 0; d < value_dim; d++) to[d] = output[d * kPanel + lane] / sums[lane];
  }
}
