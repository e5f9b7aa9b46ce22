// Attention of single tokens, each at the end of its sequence: two passes over the cache, scores and then values.
#pragma once
#include <type_traits>

#include "paged_cache.h"
#include "scratch.h"

// Returns the products of a query, (dim,), with kLanes keys. Keys past `count` repeat the last one.
//
// `dim` is VECTORS vectors; VECTORS 0: any number. The order of summation does not depend on a key's place.
template <int VECTORS>
RAYLENS_INLINE Vec key_products(const float* query, const float* keys, int64_t dim, int count) {
  if constexpr (VECTORS > 0) dim = VECTORS * kLanes;
  Vec products[kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; i++) {
    const float* key = keys + std::min(i, count - 1) * dim;
    products[i] = load(query) * load(key);
#pragma GCC unroll 16
    for (int64_t d = kLanes; d < dim; d += kLanes) products[i] += load(query + d) * load(key + d);
  }
  return sums_of_lanes(products);
}

constexpr int64_t kTilesAhead = 2;

// Writes the scores of `group` query heads over the runs' keys: scores[g * stride + i] for the i-th position.
template <int VECTORS>
void decode_scores(const float* queries, int64_t group, int64_t dim, const float* keys, const std::vector<Run>& runs,
                   float* scores, int64_t stride) {
  for (const Run& run : runs) {
    const float* own = keys + run.slot * dim;
    int64_t done = 0;
    for (; done + kLanes <= run.length; done += kLanes) {
      // Without this, no load of the next tile would be under way while one tile is summed up.
      for (int64_t line = 0; line < kLanes * dim; line += 16)
        __builtin_prefetch(own + (done + kTilesAhead * kLanes) * dim + line);
      for (int64_t g = 0; g < group; g++)
        store(scores + g * stride + done, key_products<VECTORS>(queries + g * dim, own + done * dim, dim, kLanes));
    }
    int rest = static_cast<int>(run.length - done);
    for (int64_t g = 0; rest > 0 && g < group; g++)  // the scores past the rest are overwritten
      store(scores + g * stride + done, key_products<VECTORS>(queries + g * dim, own + done * dim, dim, rest));
    scores += run.length;
  }
}

// Turns `count` scores into unnormalised weights, in place, and returns their sum. The scores have room for one more
// vector.
inline float softmax_weights(float* scores, int64_t count, float softcap) {
  if (softcap > 0)
    for (int64_t i = 0; i < count; i += kLanes) store(scores + i, softcap * tanh(load(scores + i) / softcap));
  std::fill(scores + count, scores + count + kLanes, -3e38f);
  Vec largest = load(scores);
  for (int64_t i = kLanes; i < count; i += kLanes) largest = larger(largest, load(scores + i));
  Vec top = all(largest_lane(largest)), sum{};
  for (int64_t i = 0; i < count; i += kLanes) {
    Vec weights = exp(load(scores + i) - top);
    store(scores + i, weights);
    if (i + kLanes > count) {
      std::fill(scores + count, scores + i + kLanes, 0.f);
      weights = load(scores + i);
    }
    sum += weights;
  }
  return sum_of_lanes(sum);
}

// Writes T vectors of the weighted sum of the runs' values, for G query heads.
template <int G, int T>
RAYLENS_INLINE void weigh_values(const float* weights, int64_t stride, const float* values, int64_t dim,
                                 const std::vector<Run>& runs, float* output) {
  Vec sums[G][T] = {};
  for (const Run& run : runs) {
    const float* row = values + run.slot * dim;
    for (int64_t i = 0; i < run.length; i++, row += dim)
      for (int g = 0; g < G; g++) {
        Vec weight = all(weights[g * stride + i]);
#pragma GCC unroll 8
        for (int t = 0; t < T; t++) sums[g][t] += weight * load(row + t * kLanes);
      }
    weights += run.length;
  }
  for (int g = 0; g < G; g++)
    for (int t = 0; t < T; t++) store(output + g * dim + t * kLanes, sums[g][t]);
}

template <int G>
void weigh_all_values(const float* weights, int64_t stride, const float* values, int64_t dim,
                      const std::vector<Run>& runs, float* output) {
  int64_t d = 0;
  auto weigh_tiles = [&](auto vectors) {
    constexpr int T = vectors;
    for (; d + T * kLanes <= dim; d += T * kLanes)
      weigh_values<G, T>(weights, stride, values + d, dim, runs, output + d);
  };
  weigh_tiles(std::integral_constant<int, kRows >= 8 ? 8 : 4>());
  weigh_tiles(std::integral_constant<int, 4>());
  weigh_tiles(std::integral_constant<int, 1>());
}

// Attends with all query heads of one key head for the token `token`, which sees its sequence's positions up to `end`.
inline void attend_decode(const StepChunks& step, const LayerCache& cache, const AttentionArguments& call,
                          int64_t chunk, int64_t token, int64_t end, int64_t kv_head) {
  static thread_local Scratch scratch;
  static thread_local std::vector<Run> runs;
  int64_t start = call.first_seen(end - 1), count = end - start;
  find_runs(step.blocks + step.first_blocks[chunk], cache.block_size, start, end, runs);
  int64_t group = call.heads / cache.kv_heads, key_dim = padded(cache.key_dim), value_dim = padded(cache.value_dim);
  int64_t stride = padded(count) + kLanes;
  float* queries = scratch.floats(group * (key_dim + value_dim + stride));
  float *sums = queries + group * key_dim, *scores = sums + group * value_dim;
  for (int64_t g = 0; g < group; g++) {
    const float* query = call.queries.at(token, kv_head * group + g);
    for (int64_t d = 0; d < key_dim; d++) queries[g * key_dim + d] = d < cache.key_dim ? query[d] * call.scaling : 0.f;
  }
  const float* keys = cache.keys + kv_head * cache.num_slots * key_dim;
  const float* values = cache.values + kv_head * cache.num_slots * value_dim;
  auto score = key_dim == 4 * kLanes ? decode_scores<4> : key_dim == 8 * kLanes ? decode_scores<8> : decode_scores<0>;
  score(queries, group, key_dim, keys, runs, scores, stride);
  for (int64_t g = 0; g < group; g += 2) {
    int64_t heads = std::min<int64_t>(2, group - g);
    float totals[2];
    for (int64_t h = 0; h < heads; h++) totals[h] = softmax_weights(scores + (g + h) * stride, count, call.softcap);
    auto weigh = heads == 2 ? weigh_all_values<2> : weigh_all_values<1>;
    weigh(scores + g * stride, stride, values, value_dim, runs, sums);
    for (int64_t h = 0; h < heads; h++) {
      float* to = call.output_row(token, kv_head * group + g + h, cache.value_dim);
      for (int64_t d = 0; d < cache.value_dim; d++) to[d] = sums[h * value_dim + d] / totals[h];
    }
  }
}
