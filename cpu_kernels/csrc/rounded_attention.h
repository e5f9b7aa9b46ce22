// Attention of many queries of one sequence by the matrix unit, with weights and values in bfloat16.
//
// Large scores would turn the rounding of queries and keys into large errors of the weights. Each of their numbers is
// thus the sum of two of bfloat16, of whose four products the scores have the largest three. The scores, the softmax
// and the sums are float32. Some tiles of queries share each block of keys and values. Positions that a query does not
// see add exact zeros, so that its result depends on its own tile only.
#pragma once
#include "chunk_attention.h"
#include "matrix_unit.h"

#if defined(__AMX_BF16__)
constexpr int64_t kTilesAtOnce = 16;

// Returns (even, odd) for each lane: two numbers of bfloat16.
RAYLENS_INLINE UintVec pairs_of(Vec even, Vec odd) {
  return rounded((UintVec)even) >> 16 | (rounded((UintVec)odd) & 0xffff0000u);
}

constexpr int kParts = 2;  // of a number of a query or key

// Loads up to kTileK consecutive numbers, and zeros for the rest. Returns their parts, times `factor`.
RAYLENS_INLINE void load_parts(const float* from, int64_t count, float factor, UintVec (&parts)[kParts]) {
  __m256i halves[kParts][2];
  for (int half = 0; half < 2; half++) {
    int64_t own = std::clamp<int64_t>(count - half * kLanes, 0, kLanes);
    Vec left = (Vec)_mm512_maskz_loadu_ps(static_cast<__mmask16>((1 << own) - 1), from + half * kLanes) * factor;
    for (auto& part : halves) {
      UintVec upper = rounded((UintVec)left) & 0xffff0000u;
      part[half] = _mm512_cvtepi32_epi16((__m512i)(upper >> 16));
      left -= (Vec)upper;
    }
  }
  for (int part = 0; part < kParts; part++)
    parts[part] = (UintVec)_mm512_inserti64x4(_mm512_castsi256_si512(halves[part][0]), halves[part][1], 1);
}

// Exchanges rows and columns.
RAYLENS_INLINE void transpose(UintVec (&rows)[kLanes]) {
  UintVec lane{};
  for (int i = 0; i < kLanes; i++) lane[i] = static_cast<uint32_t>(i);
#pragma GCC unroll 4
  for (int span = 1; span < kLanes; span *= 2) {
    // Of two vectors, the second's lanes have numbers from kLanes on.
    UintVec is_upper = (lane & static_cast<uint32_t>(span)) != 0u;
    UintVec first = is_upper ? lane + static_cast<uint32_t>(kLanes - span) : lane;
    UintVec second = is_upper ? lane + static_cast<uint32_t>(kLanes) : lane + static_cast<uint32_t>(span);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; i++) {
      if (i & span) continue;
      UintVec a = rows[i], b = rows[i + span];
      rows[i] = __builtin_shuffle(a, b, first);
      rows[i + span] = __builtin_shuffle(a, b, second);
    }
  }
}

// Tiles of queries of one key head, at most kTilesAtOnce.
class RoundedAttention {
 public:
  RoundedAttention(const AttentionArguments& call, const SequenceRows& keys, int64_t key_dim,
                   const SequenceRows& values, int64_t value_dim)
      : call_(call), keys_(keys), values_(values), key_dim_(key_dim), value_dim_(value_dim) {
    static thread_local Scratch scratch;
    int64_t copies = kPositions * (keys.stride + values.stride);
    float* room = scratch.floats(kTilesAtOnce * (query_floats() + output_floats()) + key_floats() + value_floats() +
                                 (kPositions + kPositions / 2 + 2 * kTileRows) * kPanel + copies);
    auto take = [&](int64_t size) { return std::exchange(room, room + size); };
    queries_ = take(kTilesAtOnce * query_floats());
    outputs_ = take(kTilesAtOnce * output_floats());
    rounded_keys_ = take(key_floats());
    rounded_values_ = take(value_floats());
    scores_ = take(kPositions * kPanel);
    weights_ = take(kPositions / 2 * kPanel);
    products_ = take(2 * kTileRows * kPanel);
    key_copy_ = take(kPositions * keys.stride);
    value_copy_ = room;
  }

  void run(const QueryTile* tiles, int64_t count) {
    TileRegisters registers(kTileRows);
    std::fill_n(outputs_, count * output_floats(), 0.f);
    int64_t first = tiles[0].start, stop = tiles[0].stop;
    for (int64_t i = 0; i < count; i++) {
      write_queries(tiles[i], queries_ + i * query_floats());
      softmaxes_[i][0] = softmaxes_[i][1] = Softmax();
      first = std::min(first, tiles[i].start);
      stop = std::max(stop, tiles[i].stop);
    }
    for (int64_t position = first / kPositions * kPositions; position < stop; position += kPositions) {
      int64_t own = std::min(kPositions, stop - position);
      write_keys(keys_.at(position, own, runs_, key_copy_), own);
      write_values(values_.at(position, own, runs_, value_copy_), own);
      for (int64_t i = 0; i < count; i++)
        if (tiles[i].start / kPositions * kPositions <= position && position < tiles[i].stop)
          attend(tiles[i], i, position, std::min(kPositions, tiles[i].stop - position));
    }
    for (int64_t i = 0; i < count; i++) write_output(tiles[i], i);
  }

 private:
  int64_t key_steps() const { return (key_dim_ + kTileK - 1) / kTileK; }
  int64_t value_groups() const { return (value_dim_ + kTileRows - 1) / kTileRows; }
  int64_t query_floats() const { return kParts * key_steps() * kTileRows * kPanel; }
  int64_t output_floats() const { return (value_groups() + 1) * kTileRows * kPanel; }
  int64_t key_floats() const { return kParts * kPositions * key_steps() * kTileK / 2; }
  int64_t value_floats() const { return (value_groups() + 1) * kTileRows * kPositions / 2; }

  static void put(float* to, UintVec numbers) { store(to, (Vec)numbers); }

  // Writes a tile's scaled queries as columns: for each part, kPanel pairs for each two numbers of a head.
  void write_queries(const QueryTile& tile, float* to) const {
    for (int half = 0; half < 2; half++)
      for (int64_t step = 0; step < key_steps(); step++) {
        UintVec rows[kParts][kLanes];
        for (int lane = 0; lane < kLanes; lane++) {
          int64_t row = half * kLanes + lane, d = step * kTileK;
          const float* query = call_.queries.at(tile.token[row], tile.head[row]) + d;
          UintVec parts[kParts];
          load_parts(query, key_dim_ - d, call_.scaling, parts);
          for (int part = 0; part < kParts; part++) rows[part][lane] = parts[part];
        }
        for (int part = 0; part < kParts; part++) {
          transpose(rows[part]);
          float* own = to + (part * key_steps() + step) * kTileRows * kPanel + half * kLanes;
          for (int pair = 0; pair < kLanes; pair++) put(own + pair * kPanel, rows[part][pair]);
        }
      }
  }

  // Writes the keys of a block of positions as tiles: for each kTileRows of them, the parts of each step.
  void write_keys(const float* from, int64_t count) {
    for (int64_t i = 0; i < (count + kTileK - 1) / kTileK * kTileK; i++)
      for (int64_t step = 0; step < key_steps(); step++) {
        int64_t numbers = i < count ? key_dim_ - step * kTileK : 0;
        UintVec parts[kParts];
        load_parts(from + i * keys_.stride + step * kTileK, numbers, 1, parts);
        for (int part = 0; part < kParts; part++) {
          int64_t tile = (i / kTileRows * key_steps() + step) * kParts + part;
          put(rounded_keys_ + (tile * kTileRows + i % kTileRows) * kTileK / 2, parts[part]);
        }
      }
  }

  // Writes the values of a block of positions as tiles, with positions as columns: for each kTileRows numbers of a
  // head, one for each kTileK positions.
  void write_values(const float* from, int64_t count) {
    for (int64_t group = 0; group < value_groups(); group++) {
      int64_t d = group * kTileRows, numbers = std::min(kTileRows, value_dim_ - d);
      auto mask = static_cast<__mmask16>((1 << numbers) - 1);
      auto at = [&](int64_t i) {
        return i < count ? (Vec)_mm512_maskz_loadu_ps(mask, from + i * values_.stride + d) : Vec{};
      };
      for (int64_t i = 0; i < count; i += kTileK) {
        UintVec rows[kLanes];
        for (int pair = 0; pair < kLanes; pair++) rows[pair] = pairs_of(at(i + 2 * pair), at(i + 2 * pair + 1));
        transpose(rows);
        float* to = rounded_values_ + (group * kPositions + i) * kTileRows / 2;
        for (int row = 0; row < kLanes; row++) put(to + row * kTileK / 2, rows[row]);
      }
    }
  }

  // Attends with a tile over `count` positions of the block that starts at `position`.
  void attend(const QueryTile& tile, int64_t index, int64_t position, int64_t count) {
    NextLines nothing;
    auto* keys = reinterpret_cast<const uint16_t*>(rounded_keys_);
    auto* queries = reinterpret_cast<const char*>(queries_ + index * query_floats());
    auto* lower_queries = queries + 2 * query_floats();
    constexpr int64_t kTile = kTileRows * kTileK;
    int64_t steps = (count + kTileK - 1) / kTileK, group = key_steps() * kParts * kTile;
    int own_steps = static_cast<int>(key_steps());
    for (int64_t i = 0; i < steps; i++, keys += 2 * group) {
      clear_sums<2>();
      multiply_tiles<kParts, 2>(keys, keys + group, kTile, queries, own_steps, nothing);
      multiply_tiles<1, 2>(keys, keys + group, kParts * kTile, lower_queries, own_steps, nothing);
      store_sums<2>(scores_ + i * kTileK * kPanel, kTileRows);
    }
    bool is_edge = position < tile.inner_start || position + count > tile.inner_stop;
    std::fill(scores_ + count * kPanel, scores_ + steps * kTileK * kPanel, 0.f);
    Vec factor[2];
    for (int half = 0; half < 2; half++) {
      float* own = scores_ + half * kLanes;
      factor[half] = softmaxes_[index][half].weigh(own, count, call_.softcap, is_edge, position, tile, half * kLanes);
      for (int64_t pair = 0; pair < steps * kTileK / 2; pair++, own += 2 * kPanel)
        put(weights_ + pair * kPanel + half * kLanes, pairs_of(load(own), load(own + kPanel)));
    }
    add_values(static_cast<int>(steps), factor, outputs_ + index * output_floats());
  }

  // output = output * factor + values * weights, (value_dim, kPanel).
  void add_values(int steps, const Vec (&factor)[2], float* output) {
    NextLines nothing;
    auto* values = reinterpret_cast<const uint16_t*>(rounded_values_);
    constexpr int64_t kGroupNumbers = kTileRows * kPositions;
    for (int64_t group = 0; group < value_groups(); group += 2, values += 2 * kGroupNumbers) {
      clear_sums<2>();
      multiply_tiles<1, 2>(values, values + kGroupNumbers, kTileRows * kTileK, reinterpret_cast<const char*>(weights_),
                           steps, nothing);
      store_sums<2>(products_, kTileRows);
      for (int64_t i = 0; i < 2 * kTileRows * kPanel; i += kPanel, output += kPanel)
        for (int half = 0; half < 2; half++) {
          float* to = output + half * kLanes;
          store(to, load(to) * factor[half] + load(products_ + i + half * kLanes));
        }
    }
  }

  void write_output(const QueryTile& tile, int64_t index) const {
    const float* output = outputs_ + index * output_floats();
    for (int half = 0; half < 2; half++)
      for (int64_t d = 0; d < value_dim_; d += kTileRows) {
        UintVec rows[kLanes];
        for (int i = 0; i < kLanes; i++)
          rows[i] = (UintVec)(load(output + (d + i) * kPanel + half * kLanes) / softmaxes_[index][half].sum);
        transpose(rows);
        for (int64_t lane = half * kLanes; lane < std::min<int64_t>(tile.count, (half + 1) * kLanes); lane++) {
          float* to = call_.output_row(tile.token[lane], tile.head[lane], value_dim_) + d;
          std::memcpy(to, &rows[lane % kLanes], 4 * std::min(kTileRows, value_dim_ - d));
        }
      }
  }

  const AttentionArguments& call_;
  const SequenceRows &keys_, &values_;
  int64_t key_dim_, value_dim_;
  std::vector<Run> runs_;
  Softmax softmaxes_[kTilesAtOnce][2];
  // By tile: queries and output. Of a block of positions: keys, values, scores, and weights as pairs of positions.
  float *queries_, *outputs_, *rounded_keys_, *rounded_values_, *scores_, *weights_, *products_, *key_copy_,
      *value_copy_;
};
#endif
