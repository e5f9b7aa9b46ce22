// Chooses the next token of each row of logits, by the row's own settings.
//
// A row is cut at a weight, never at a rank. Tokens of equal weights are thus kept or cut together, and the vocabulary
// is never sorted.
#pragma once
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "thread_pool.h"
#include "vector.h"

// Mirrors `_Tokens` in sampler.py.
struct Tokens {
  const int64_t* ids;  // null: the row has no such setting
  int64_t count;
};

// Mirrors `RowSettings` in sampler.py, which documents each setting.
struct RowSettings {
  Tokens allowed, bad, early, biased, seen;
  const uint32_t* mask;        // (ceil(vocab / 32),) bits, or null
  const float* biases;         // (biased.count,)
  const float* output_counts;  // (seen.count,)
  float repetition_penalty, frequency_penalty, presence_penalty, temperature, min_p;
  int64_t top_k, edits, draws;
  double top_p, uniform;
};

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Returns the first token of the highest logit, or -1 if a logit is NaN or the highest one is not finite.
inline int64_t likeliest(const float* logits, int64_t vocab) {
  int64_t whole = vocab / kLanes * kLanes;
  Vec top = all(-kInfinity);
  IntVec where{}, is_nan{};
  for (int64_t i = 0; i < whole; i += kLanes) {
    Vec logit = load(logits + i);
    IntVec is_higher = logit > top;
    top = is_higher ? logit : top;
    where = is_higher ? IntVec{} + static_cast<int32_t>(i) : where;
    is_nan |= logit != logit;
  }
  float highest = -kInfinity;
  int64_t found = -1;
  for (int lane = 0; lane < kLanes && whole > 0; lane++) {
    if (is_nan[lane]) return -1;
    int64_t token = where[lane] + lane;
    if (top[lane] > highest || (top[lane] == highest && token < found)) highest = top[lane], found = token;
  }
  for (int64_t i = whole; i < vocab; i++) {
    if (std::isnan(logits[i])) return -1;
    if (logits[i] > highest) highest = logits[i], found = i;
  }
  return std::isfinite(highest) ? found : -1;
}

// Sets the logits of `tokens` to -inf, unless no other token would be left.
inline void ban(const Tokens& tokens, float* logits, int64_t vocab) {
  static thread_local std::vector<float> before;
  before.clear();
  for (int64_t i = 0; i < tokens.count; i++) before.push_back(std::exchange(logits[tokens.ids[i]], -kInfinity));
  if (std::any_of(logits, logits + vocab, [](float logit) { return logit != -kInfinity; })) return;
  for (int64_t i = 0; i < tokens.count; i++) logits[tokens.ids[i]] = before[i];
}

// Edits a row's logits before a token is chosen, in the order of `plan_edits` in logits_processors.py.
inline void edit(const RowSettings& row, float* logits, int64_t vocab) {
  if (row.mask != nullptr)
    for (int64_t i = 0; i < vocab; i++)
      if (!(row.mask[i / 32] >> (i % 32) & 1)) logits[i] = -kInfinity;
  if (row.allowed.ids != nullptr) {
    static thread_local std::vector<float> kept;
    kept.clear();
    for (int64_t i = 0; i < row.allowed.count; i++) kept.push_back(logits[row.allowed.ids[i]]);
    std::fill_n(logits, vocab, -kInfinity);
    for (int64_t i = 0; i < row.allowed.count; i++) logits[row.allowed.ids[i]] = kept[i];
  }
  if (row.bad.count > 0) ban(row.bad, logits, vocab);
  if (row.early.count > 0) ban(row.early, logits, vocab);
  for (int64_t i = 0; i < row.biased.count; i++) logits[row.biased.ids[i]] += row.biases[i];
  for (int64_t i = 0; i < row.seen.count; i++) {
    float& logit = logits[row.seen.ids[i]];
    logit = logit < 0 ? logit * row.repetition_penalty : logit / row.repetition_penalty;
    logit -= row.frequency_penalty * row.output_counts[i];
    if (row.output_counts[i] > 0) logit -= row.presence_penalty;
  }
}

// Turns a row's logits into weights, in place: e^((logit - highest) / temperature).
inline void weigh(float* logits, int64_t vocab, float highest, float temperature) {
  Vec top = all(highest / temperature);
  auto weight = [&](Vec logit) {
    Vec x = logit / temperature - top;
    return x > -87.f ? exp(x) : Vec{};  // `exp` never gives 0
  };
  int64_t i = 0;
  for (; i + kLanes <= vocab; i += kLanes) store(logits + i, weight(load(logits + i)));
  for (; i < vocab; i++) logits[i] = weight(all(logits[i]))[0];
}

constexpr int64_t kGroup = 128;

// Leaves in `kept` the `count` largest of the weights, in any order.
inline void keep_largest(const float* weights, int64_t vocab, int64_t count, std::vector<float>& kept) {
  float lowest = 0;
  auto cut = [&] {
    std::nth_element(kept.begin(), kept.begin() + (count - 1), kept.end(), std::greater<float>());
    kept.resize(count);
    lowest = kept.back();
  };
  kept.clear();
  for (int64_t start = 0; start < vocab; start += kGroup) {
    int64_t end = std::min(vocab, start + kGroup);
    if (end - start == kGroup) {  // most groups have only lower weights
      Vec top = load(weights + start);
      for (int64_t at = start + kLanes; at < end; at += kLanes) top = larger(top, load(weights + at));
      if (largest_lane(top) < lowest) continue;
    }
    for (int64_t i = start; i < end; i++) {
      if (weights[i] < lowest) continue;
      kept.push_back(weights[i]);
      if (static_cast<int64_t>(kept.size()) >= 2 * count + kGroup) cut();
    }
  }
  if (static_cast<int64_t>(kept.size()) > count) cut();
}

// Returns the lowest of the fewest largest weights with a sum of at least `mass`, or the lowest of all. Reorders
// `weights`.
inline float nucleus(std::vector<float>& weights, double mass) {
  size_t low = 0, high = weights.size();
  for (double before = 0; high - low > 1;) {
    size_t middle = (low + high) / 2;
    auto first = weights.begin();
    std::nth_element(first + low, first + middle, first + high, std::greater<float>());
    double upper = std::accumulate(first + low, first + middle, 0.0);
    if (before + upper >= mass) {
      high = middle;
    } else {
      before += upper;
      low = middle;
    }
  }
  return weights[low];
}

// Returns the bucket, of kBuckets, of a weight of at most 1. Larger weights are in later buckets, because positive
// floats have the same order as their bits.
constexpr int64_t kBuckets = (0x3f800000 >> 18) + 1;
RAYLENS_INLINE int64_t bucket_of(float weight) {
  uint32_t bits;
  std::memcpy(&bits, &weight, sizeof bits);
  return bits >> 18;
}

// Returns the lowest of the fewest largest weights with at least `top_p` of the sum of all weights from `lowest` on.
inline float nucleus_of_row(const float* weights, int64_t vocab, float lowest, double top_p) {
  static thread_local std::vector<double> masses;
  static thread_local std::vector<float> kept;
  masses.assign(kBuckets, 0);
  for (int64_t i = 0; i < vocab; i++) masses[bucket_of(weights[i])] += weights[i] >= lowest ? weights[i] : 0.f;
  double total = 0, before = 0;
  for (int64_t i = kBuckets; i-- > 0;) total += masses[i];
  int64_t bucket = kBuckets - 1;
  while (before + masses[bucket] < top_p * total) before += masses[bucket--];  // ends at the latest at the total
  kept.clear();
  for (int64_t i = 0; i < vocab; i++)
    if (bucket_of(weights[i]) == bucket && weights[i] >= lowest) kept.push_back(weights[i]);
  return nucleus(kept, top_p * total - before);
}

// Writes the cumulative sums over groups of kGroup weights, without weights below `lowest`. Returns the total.
inline double cumulate(const float* weights, int64_t vocab, float lowest, std::vector<double>& cumulative) {
  typedef double DoubleVec __attribute__((vector_size(8 * kLanes)));
  cumulative.clear();
  double total = 0;
  for (int64_t start = 0; start < vocab; start += kGroup) {
    int64_t end = std::min(vocab, start + kGroup), i = start;
    DoubleVec sums{};
    for (; i + kLanes <= end; i += kLanes) {
      Vec weight = load(weights + i);
      sums += __builtin_convertvector(weight >= lowest ? weight : Vec{}, DoubleVec);
    }
    for (int lane = 0; lane < kLanes; lane++) total += sums[lane];
    for (; i < end; i++) total += weights[i] >= lowest ? weights[i] : 0.f;
    cumulative.push_back(total);
  }
  return total;
}

// Returns the lowest weight that min_p, top_k and top_p keep, applied in this order to the remaining weights.
inline float lowest_kept(const RowSettings& row, const float* weights, int64_t vocab) {
  static thread_local std::vector<float> kept;
  if (row.top_k <= 0 || row.top_k >= vocab)
    return row.top_p < 1 ? nucleus_of_row(weights, vocab, row.min_p, row.top_p) : row.min_p;
  keep_largest(weights, vocab, row.top_k, kept);
  kept.erase(std::remove_if(kept.begin(), kept.end(), [&](float weight) { return weight < row.min_p; }), kept.end());
  return nucleus(kept, row.top_p < 1 ? row.top_p * std::accumulate(kept.begin(), kept.end(), 0.0) : HUGE_VAL);
}

// Returns the token at which the cumulative sum of the weights exceeds the row's share of their sum.
inline int64_t draw(const RowSettings& row, const float* weights, int64_t vocab) {
  static thread_local std::vector<double> cumulative;
  float lowest = lowest_kept(row, weights, vocab);
  double target = row.uniform * cumulate(weights, vocab, lowest, cumulative);
  int64_t group = std::upper_bound(cumulative.begin(), cumulative.end() - 1, target) - cumulative.begin();
  double passed = group == 0 ? 0 : cumulative[group - 1];
  int64_t found = -1;
  for (int64_t i = group * kGroup; i < std::min(vocab, (group + 1) * kGroup); i++) {
    if (weights[i] == 0 || weights[i] < lowest) continue;
    found = i;  // the last token, if rounding keeps the sum below the target
    if ((passed += weights[i]) > target) break;
  }
  return found;
}

// Returns a row's next token, or -1 if the highest logit is not finite, before or after the edits.
inline int64_t choose(const RowSettings& row, float* logits, int64_t vocab) {
  int64_t token = likeliest(logits, vocab);
  if (token >= 0 && row.edits) {
    edit(row, logits, vocab);
    token = likeliest(logits, vocab);
  }
  if (token < 0 || !row.draws) return token;
  weigh(logits, vocab, logits[token], row.temperature);
  return draw(row, logits, vocab);
}

// logits: (num_rows, vocab). rows[i] may be null: the likeliest token. Writes token_ids, (num_rows,).
RAYLENS_EXPORT void raylens_choose(float* logits, int64_t vocab, int64_t num_rows, const RowSettings* const* rows,
                                   int64_t* token_ids, int threads) {
  static const RowSettings kGreedy{};
  bool is_greedy = std::all_of(rows, rows + num_rows, [](const RowSettings* row) { return row == nullptr; });
  pool().run(is_greedy ? 1 : threads, static_cast<int>(num_rows),
             [&](int i) { token_ids[i] = choose(rows[i] == nullptr ? kGreedy : *rows[i], logits + i * vocab, vocab); });
}
