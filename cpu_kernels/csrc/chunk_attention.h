// Attention of a prompt's chunk: many queries, each of which sees the positions up to its own.
//
// A tile has kPanel query rows, one in each lane of two vectors. The scores of a position are then one row of kPanel
// numbers, and the softmax needs no sums over lanes. The positions come in tiles, too, with a running maximum and sum
// (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018). The tiles of positions begin at
// multiples of kPositions. So a query's result depends neither on how the prompt was cut into chunks nor on where its
// blocks lie.
#pragma once
#include "attention_call.h"
#include "packed_product.h"

constexpr int64_t kPositions = 128;

// The rows [start, start + count) of a sequence's keys or values: where they lie if they lie together, else a copy.
inline const float* cache_rows(const float* rows, int64_t dim, const int32_t* blocks, int64_t block_size, int64_t start,
                               int64_t count, std::vector<Run>& runs, float* copy) {
  find_runs(blocks, block_size, start, start + count, runs);
  if (runs.size() == 1) return rows + runs[0].slot * dim;
  float* to = copy;
  for (const Run& run : runs) to = std::copy_n(rows + run.slot * dim, run.length * dim, to);
  return copy;
}

// The query rows of a tile, as lanes. Lanes past the last row repeat it.
struct QueryTile {
  float first_seen[kPanel], end[kPanel];  // the positions that a lane sees; float32 counts exactly up to 2^24
  int64_t token[kPanel], head[kPanel];
  int64_t count;                    // rows
  int64_t start, stop;              // positions that any lane sees
  int64_t inner_start, inner_stop;  // positions that all lanes see
};

inline QueryTile query_tile(const StepChunks& step, const LayerCache& cache, const AttentionArguments& call,
                            int64_t chunk, int64_t first_token, int64_t kv_head, int64_t first_row) {
  QueryTile tile;
  int64_t group = call.heads / cache.kv_heads, rows = step.lengths[chunk] * group;
  tile.count = std::min<int64_t>(kPanel, rows - first_row);
  for (int lane = 0; lane < kPanel; lane++) {
    int64_t row = std::min(first_row + lane, rows - 1), index = row / group;
    int64_t position = step.ends[chunk] - step.lengths[chunk] + index;
    tile.token[lane] = first_token + index;
    tile.head[lane] = kv_head * group + row % group;
    tile.first_seen[lane] = static_cast<float>(call.first_seen(position));
    tile.end[lane] = static_cast<float>(position + 1);
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
      accumulate<Float32, R, 0, 0>(queries, keys + i * stride, stride, 1, static_cast<int>(dim), {}, sums);
      for (int r = 0; r < R; r++) {
        store(scores + (i + r) * kPanel, sums[r][0]);
        store(scores + (i + r) * kPanel + kLanes, sums[r][1]);
      }
    });
}

// A lane's running maximum and sum of weights, for one of a tile's two vectors.
struct Softmax {
  Vec largest = all(-1e30f), sum{};

  // Makes weights of the scores of `count` positions from `start` on, in place. Returns by what earlier sums are to be
  // multiplied. `is_edge`: some lanes do not see some of the positions.
  RAYLENS_INLINE Vec weigh(float* scores, int64_t count, float softcap, bool is_edge, float start, Vec first_seen,
                           Vec end) {
    if (softcap > 0)
      for (int64_t i = 0; i < count; i++)
        store(scores + i * kPanel, softcap * tanh(load(scores + i * kPanel) / softcap));
    if (is_edge)
      for (int64_t i = 0; i < count; i++) {
        Vec position = all(start + static_cast<float>(i));
        IntVec is_seen = (position >= first_seen) & (position < end);
        store(scores + i * kPanel, is_seen ? load(scores + i * kPanel) : all(-3e38f));
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
      accumulate<Float32, R, 0, 0>(weights, values + d, 1, stride, static_cast<int>(count), {}, sums);
      for (int r = 0; r < R; r++)
        for (int half = 0; half < 2; half++) store(output + (d + r) * kPanel + half * kLanes, sums[r][half]);
    });
}

// Attends with a tile of the query rows of one key head: rows [first_row, first_row + kPanel) of (tokens, group).
inline void attend_chunk(const StepChunks& step, const LayerCache& cache, const AttentionArguments& call, int64_t chunk,
                         int64_t first_token, int64_t kv_head, int64_t first_row) {
  static thread_local Scratch scratch;
  static thread_local std::vector<Run> runs;
  const QueryTile tile = query_tile(step, cache, call, chunk, first_token, kv_head, first_row);
  int64_t key_stride = padded(cache.key_dim), value_stride = padded(cache.value_dim);
  float* queries = scratch.floats(kPanel * (cache.key_dim + cache.value_dim + kPositions) +
                                  kPositions * (key_stride + value_stride));
  float *output = queries + kPanel * cache.key_dim, *scores = output + kPanel * cache.value_dim;
  float *key_copy = scores + kPanel * kPositions, *value_copy = key_copy + kPositions * key_stride;
  for (int lane = 0; lane < kPanel; lane++) {
    const float* query = call.queries.at(tile.token[lane], tile.head[lane]);
    for (int64_t d = 0; d < cache.key_dim; d++) queries[d * kPanel + lane] = query[d] * call.scaling;
  }
  std::fill_n(output, kPanel * cache.value_dim, 0.f);
  const float* keys = cache.keys + kv_head * cache.num_slots * key_stride;
  const float* values = cache.values + kv_head * cache.num_slots * value_stride;
  const int32_t* blocks = step.blocks + step.first_blocks[chunk];
  Softmax softmax[2];
  for (int64_t position = tile.start / kPositions * kPositions; position < tile.stop; position += kPositions) {
    int64_t count = std::min(kPositions, tile.stop - position);
    bool is_edge = position < tile.inner_start || position + count > tile.inner_stop;
    const float* own = cache_rows(keys, key_stride, blocks, cache.block_size, position, count, runs, key_copy);
    chunk_scores(queries, own, cache.key_dim, key_stride, count, scores);
    Vec factor[2];
    for (int half = 0; half < 2; half++)
      factor[half] =
          softmax[half].weigh(scores + half * kLanes, count, call.softcap, is_edge, static_cast<float>(position),
                              load(tile.first_seen + half * kLanes), load(tile.end + half * kLanes));
    own = cache_rows(values, value_stride, blocks, cache.block_size, position, count, runs, value_copy);
    add_values(scores, own, cache.value_dim, value_stride, count, factor, output);
  }
  float sums[kPanel];
  for (int half = 0; half < 2; half++) store(sums + half * kLanes, softmax[half].sum);
  for (int lane = 0; lane < tile.count; lane++) {
    float* to = call.output_row(tile.token[lane], tile.head[lane], cache.value_dim);
    for (int64_t d = 0; d < cache.value_dim; d++) to[d] = output[d * kPanel + lane] / sums[lane];
  }
}
