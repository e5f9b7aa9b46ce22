// A plain decoder in one call, from token ids to logits: the embedding, norms, projections, rotary embeddings,
// attention, gated MLPs and the output head.
#pragma once
#include <cmath>
#include <utility>

#include "attention.h"
#include "mlp.h"

// Mirrors `_Norm` in decoder.py. weight: (dim,); null: no norm. RMS norm (Zhang and Sennrich, 2019).
struct Norm {
  const float* weight;
  float eps;

  explicit operator bool() const { return weight != nullptr; }

  // Writes the norm of `x`, (dim,), to `to`, or adds it there.
  template <bool ADDS = false>
  void apply(const float* x, int64_t dim, float* to) const {
    int64_t whole = dim / kLanes * kLanes;
    Vec sum{};
    for (int64_t i = 0; i < whole; i += kLanes) sum += load(x + i) * load(x + i);
    float squares = sum_of_lanes(sum);
    for (int64_t i = whole; i < dim; i++) squares += x[i] * x[i];
    float factor = 1.f / std::sqrt(squares / static_cast<float>(dim) + eps);
    for (int64_t i = 0; i < dim; i++) {
      float normed = weight[i] * (x[i] * factor);
      to[i] = ADDS ? to[i] + normed : normed;
    }
  }
};

// Mirrors `_Rope` in decoder.py: rotary embeddings (Su et al., 2021) that rotate the first half of a head's first `dim`
// numbers with the second half.
struct Rope {
  const float *cosines, *sines;  // (positions, dim)
  const int64_t* axes;           // (dim,): the axis of the positions that rotates a number
  int64_t dim, num_positions;

  // Writes a token's cosines and then sines, (2, dim). Its positions are positions[axis * stride].
  void look_up(const int64_t* positions, int64_t stride, float* to) const {
    for (int64_t d = 0; d < dim; d++) {
      int64_t at = positions[axes[d] * stride] * dim + d;
      to[d] = cosines[at];
      to[dim + d] = sines[at];
    }
  }

  // Rotates a head's numbers, in place, by the result of `look_up`.
  static void turn(const float* looked_up, int64_t dim, float* head) {
    const float *cosines = looked_up, *sines = looked_up + dim;
    int64_t half = dim / 2;
    for (int64_t d = 0; d < half; d++) {
      float a = head[d], b = head[d + half];
      head[d] = a * cosines[d] - b * sines[d];
      head[d + half] = b * cosines[d + half] + a * sines[d + half];
    }
  }
};

// Mirrors `_DecoderLayer` in decoder.py. The norms after attention and MLP and the norms of heads may be missing.
struct DecoderLayer {
  Norm input_norm, query_norm, key_norm, attention_norm, mlp_input_norm, mlp_norm;
  Linear query, key, value, output, gate, up, down;
  const LayerCache* cache;
  int64_t rope;  // its index in `Decoder::ropes`
  int64_t window;
  float scaling, softcap;
};

// Mirrors `_Decoder` in decoder.py.
struct Decoder {
  const DecoderLayer* layers;
  const Rope* ropes;
  int64_t num_layers, num_ropes, hidden_size, heads;
  Activation activation;
  Norm final_norm;
  const float* embedding;  // (vocab, hidden_size), or null
  float embedding_scale;
  Linear head;  // its weight may be null
};

// Mirrors `_StepRows` in decoder.py.
struct StepRows {
  const int64_t* positions;  // (axes, position_stride), of which num_tokens are used
  int64_t position_stride;
  const int64_t* token_ids;    // (num_tokens,), or null if `hidden` holds the embeddings
  const int64_t* logits_rows;  // (num_logits,): the tokens whose logits are wanted, ascending
  int64_t num_logits;
  int64_t wants_all_hidden;   // 0: only the hidden states of logits_rows are wanted
  float* hidden;              // (num_tokens, hidden_size)
  float* logits;              // (num_logits, vocab), or null
  const int64_t* level_rows;  // (num_level_rows,): the tokens with deepstack embeddings
  const float* levels;        // (num_level_rows, level_stride): num_levels concatenated embeddings a row
  int64_t num_level_rows, level_stride, num_levels;
};

// A layer's buffers for the step's rows, of different widths.
struct LayerRows {
  float *normed, *grouped, *queries, *keys, *values, *attended, *inner;
};

class DecoderStep {
 public:
  DecoderStep(const Decoder& decoder, const StepChunks& chunks, const StepRows& step, int threads)
      : decoder_(decoder),
        chunks_(chunks),
        step_(step),
        hidden_(step.hidden),
        threads_(threads),
        num_tokens_(chunks.num_tokens),
        groups_(chunks.num_tokens) {}

  // Returns whether the ropes' tables hold all positions.
  bool has_positions() const {
    for (int64_t i = 0; i < decoder_.num_ropes; i++) {
      const Rope& rope = decoder_.ropes[i];
      int64_t axes = *std::max_element(rope.axes, rope.axes + rope.dim) + 1;
      for (int64_t axis = 0; axis < axes; axis++)
        for (int64_t row = 0; row < num_tokens_; row++)
          if (step_.positions[axis * step_.position_stride + row] >= rope.num_positions) return false;
    }
    return true;
  }

  // Runs layers, final norm and head, on the token ids or on the embeddings in `hidden`.
  void run() {
    if (step_.token_ids != nullptr) embed();
    look_up_ropes();
    // Rows must keep their places up to the last layer that adds deepstack embeddings.
    bool narrows = !step_.wants_all_hidden && step_.num_logits < num_tokens_ && step_.num_levels < decoder_.num_layers;
    for (int64_t i = 0; i < decoder_.num_layers; i++) {
      const DecoderLayer& layer = decoder_.layers[i];
      bool is_last = i + 1 == decoder_.num_layers;
      make_rows(layer);
      AttentionArguments call = project(layer);
      write_to_cache(*layer.cache, chunks_, call.keys, call.values);
      if (is_last && narrows && step_.num_logits == 0) return;
      auto skips = [&](int64_t first, int64_t end) { return is_last && narrows && !wants_any(first, end); };
      attend(chunks_, *layer.cache, call, skips, threads_);
      if (is_last && narrows) keep_wanted_rows(layer);
      if (!is_last) expect(decoder_.layers[i + 1]);
      add_product(rows_.attended, layer.output, layer.attention_norm);
      mlp(layer);
      if (i < step_.num_levels) add_level(i);
    }
    int64_t size = decoder_.hidden_size;
    each_row([&](int64_t row) { decoder_.final_norm.apply(hidden_ + row * size, size, hidden_ + row * size); });
    if (narrows) put_rows_back();
    if (step_.logits != nullptr && step_.num_logits > 0) logits();
  }

 private:
  void embed() {
    int64_t size = decoder_.hidden_size;
    each_row([&](int64_t row) {
      const float* embedding = decoder_.embedding + step_.token_ids[row] * size;
      for (int64_t d = 0; d < size; d++) hidden_[row * size + d] = embedding[d] * decoder_.embedding_scale;
    });
  }

  void logits() {
    static thread_local Scratch scratch;
    int64_t size = decoder_.hidden_size;
    const PackedWeight& weight = *decoder_.head.weight;
    RowGroups groups(step_.num_logits);
    float* rows = scratch.floats(2 * step_.num_logits * size);
    for (int64_t i = 0; i < step_.num_logits; i++)
      std::copy_n(hidden_ + step_.logits_rows[i] * size, size, rows + i * size);
    const float* x = in_groups(groups, rows, size, rows + step_.num_logits * size, threads_);
    Output output{step_.logits, weight.rows_out, decoder_.head.bias, Then::kStore};
    product_of_groups(weight, groups, x, output, threads_);
  }

  void look_up_ropes() {
    static thread_local Scratch scratch;
    int64_t size = 0;
    for (int64_t i = 0; i < decoder_.num_ropes; i++) size += 2 * decoder_.ropes[i].dim;
    turns_ = scratch.floats(num_tokens_ * size);
    float* to = turns_;
    for (int64_t i = 0; i < decoder_.num_ropes; i++)
      for (int64_t row = 0; row < num_tokens_; row++, to += 2 * decoder_.ropes[i].dim)
        decoder_.ropes[i].look_up(step_.positions + row, step_.position_stride, to);
  }

  // Returns the rope's cosines and sines of the step's first token. The other tokens' follow.
  const float* turns_of(int64_t rope) const {
    const float* found = turns_;
    for (int64_t i = 0; i < rope; i++) found += num_tokens_ * 2 * decoder_.ropes[i].dim;
    return found;
  }

  void make_rows(const DecoderLayer& layer) {
    static thread_local Scratch scratch;
    auto width = [](const Linear& linear) { return padded(linear.weight->rows_out); };
    int64_t hidden = padded(decoder_.hidden_size), queries = width(layer.query), keys = width(layer.key);
    int64_t values = width(layer.value), attended = padded(layer.output.weight->num_k), inner = width(layer.gate);
    int64_t widest = std::max({hidden, attended, inner});
    float* room = scratch.floats(num_tokens_ * (hidden + widest + queries + keys + values + attended + inner));
    auto take = [&](int64_t size) { return std::exchange(room, room + num_tokens_ * size); };
    rows_.normed = take(hidden);
    rows_.grouped = take(widest);
    rows_.queries = take(queries);
    rows_.keys = take(keys);
    rows_.values = take(values);
    rows_.attended = take(attended);
    rows_.inner = take(inner);
  }

  // Returns whether any of the rows [first, end) is wanted.
  bool wants_any(int64_t first, int64_t end) const {
    const int64_t* wanted = step_.logits_rows;
    const int64_t* found = std::lower_bound(wanted, wanted + step_.num_logits, first);
    return found != wanted + step_.num_logits && *found < end;
  }

  // Drops all but the wanted rows, because no other row is needed after the last layer's attention.
  void keep_wanted_rows(const DecoderLayer& layer) {
    int64_t size = decoder_.hidden_size, attended = layer.output.weight->num_k;
    num_tokens_ = step_.num_logits;
    groups_ = RowGroups(num_tokens_);
    for (int64_t i = 0; i < num_tokens_; i++) {  // rows only move forward, so none overwrites a later one
      std::copy_n(hidden_ + step_.logits_rows[i] * size, size, hidden_ + i * size);
      std::copy_n(rows_.attended + step_.logits_rows[i] * attended, attended, rows_.attended + i * attended);
    }
  }

  // Undoes `keep_wanted_rows` for the hidden states.
  void put_rows_back() {
    int64_t size = decoder_.hidden_size;
    for (int64_t i = num_tokens_; i-- > 0;)
      std::copy_n(hidden_ + i * size, size, hidden_ + step_.logits_rows[i] * size);
  }

  // Computes queries, keys and values, ready for attention.
  AttentionArguments project(const DecoderLayer& layer) {
    const LayerCache& cache = *layer.cache;
    int64_t key_dim = cache.key_dim, heads = decoder_.heads;
    const float* x = normed_groups(layer.input_norm);
    products(x, {{layer.query, rows_.queries}, {layer.key, rows_.keys}, {layer.value, rows_.values}});
    int64_t turned = decoder_.ropes[layer.rope].dim;
    const float* turns = turns_of(layer.rope);
    each_row([&](int64_t row) {
      auto finish = [&](const Norm& norm, float* head) {
        if (norm) norm.apply(head, key_dim, head);
        Rope::turn(turns + row * 2 * turned, turned, head);
      };
      for (int64_t i = 0; i < heads; i++) finish(layer.query_norm, rows_.queries + (row * heads + i) * key_dim);
      for (int64_t i = 0; i < cache.kv_heads; i++)
        finish(layer.key_norm, rows_.keys + (row * cache.kv_heads + i) * key_dim);
    });
    return {{rows_.queries, heads * key_dim, key_dim},
            {rows_.keys, cache.kv_heads * key_dim, key_dim},
            {rows_.values, cache.kv_heads * cache.value_dim, cache.value_dim},
            rows_.attended,
            heads,
            layer.window,
            layer.scaling,
            layer.softcap};
  }

  // Lets later products prefetch the keys and values of the decoding sequences in `layer`. With at least as many
  // threads as groups of rows, the products alone keep the memory busy.
  void expect(const DecoderLayer& layer) {
    static thread_local std::vector<const char*> pieces;
    pieces.clear();
    upcoming_ = {};
    if (groups_.count() <= threads_) return;
    const LayerCache& cache = *layer.cache;
    auto add = [&](const float* data, int64_t head, int64_t slot, int64_t dim) {
      auto* from = reinterpret_cast<const char*>(data + (head * cache.num_slots + slot) * padded(dim));
      int64_t size = cache.block_size * padded(dim) * static_cast<int64_t>(sizeof(float));
      for (int64_t done = 0; done < size; done += 64 * kPiece) pieces.push_back(from + done);
    };
    for (int64_t chunk = 0; chunk < chunks_.num_chunks; chunk++) {
      if (chunks_.ends[chunk] <= chunks_.prompt_ends[chunk]) continue;
      const int32_t* blocks = chunks_.blocks + chunks_.first_blocks[chunk];
      int64_t end = chunks_.ends[chunk], start = first_seen(end - 1, layer.window) / cache.block_size;
      for (int64_t head = 0; head < cache.kv_heads; head++)
        for (int64_t block = start; block * cache.block_size < end; block++) {
          add(cache.keys, head, blocks[block] * cache.block_size, cache.key_dim);
          add(cache.values, head, blocks[block] * cache.block_size, cache.value_dim);
        }
    }
    upcoming_ = {pieces.data(), static_cast<int64_t>(pieces.size())};
  }

  void mlp(const DecoderLayer& layer) {
    const float* x = normed_groups(layer.mlp_input_norm);
    inner_rows({layer.gate, layer.up, layer.down, decoder_.activation}, groups_, x, rows_.inner, threads_, upcoming_);
    add_product(rows_.inner, layer.down, layer.mlp_norm);
  }

  // Returns the normed hidden states in groups of rows.
  const float* normed_groups(const Norm& norm) {
    int64_t size = decoder_.hidden_size;
    each_row([&](int64_t row) { norm.apply(hidden_ + row * size, size, rows_.normed + row * size); });
    return in_groups(groups_, rows_.normed, size, rows_.grouped, threads_);
  }

  struct Product {
    Linear linear;
    float* y;
  };

  // Computes several products with the same rows.
  template <size_t N>
  void products(const float* x, const Product (&all)[N]) {
    int64_t ends[N], total = 0;
    Upcoming upcoming[N];
    for (size_t i = 0; i < N; i++) {
      ends[i] = total += num_panels(all[i].linear.weight->rows_out);
      upcoming[i] = upcoming_.take(*all[i].linear.weight, groups_.count());
    }
    each_part(total, threads_, [&](int64_t from, int64_t to) {
      for (int64_t panel = from; panel < to; panel++) {
        size_t i = 0;
        while (panel >= ends[i]) i++;
        const Linear& linear = all[i].linear;
        int64_t own = panel - (i == 0 ? 0 : ends[i - 1]);
        Output output{all[i].y, linear.weight->rows_out, linear.bias, Then::kStore};
        output.upcoming = upcoming[i];
        product_of_panel(*linear.weight, own, groups_, x, output);
      }
    });
  }

  // hidden += linear(x), or hidden += norm(linear(x)) with a norm.
  void add_product(const float* x, const Linear& linear, const Norm& norm) {
    x = in_groups(groups_, x, linear.weight->num_k, rows_.grouped, threads_);
    int64_t size = decoder_.hidden_size;
    Output output{norm ? rows_.normed : hidden_, size, linear.bias, norm ? Then::kStore : Then::kAdd};
    output.upcoming = upcoming_.take(*linear.weight, groups_.count());
    product_of_groups(*linear.weight, groups_, x, output, threads_);
    if (norm) each_row([&](int64_t row) { norm.apply<true>(rows_.normed + row * size, size, hidden_ + row * size); });
  }

  // Adds a level of the deepstack embeddings (Meng et al., 2024) to the hidden states of their tokens.
  void add_level(int64_t level) {
    int64_t size = decoder_.hidden_size;
    for (int64_t i = 0; i < step_.num_level_rows; i++) {
      const float* embedding = step_.levels + i * step_.level_stride + level * size;
      float* to = hidden_ + step_.level_rows[i] * size;
      for (int64_t d = 0; d < size; d++) to[d] += embedding[d];
    }
  }

  // Few rows are not worth another thread.
  template <class Part>
  void each_row(const Part& part) {
    int64_t parts = (num_tokens_ + kRows - 1) / kRows;
    pool().run(parts > 4 ? threads_ : 1, static_cast<int>(parts), [&](int i) {
      for (int64_t row = i * kRows; row < std::min<int64_t>(num_tokens_, (i + 1) * kRows); row++) part(row);
    });
  }

  const Decoder& decoder_;
  const StepChunks& chunks_;
  const StepRows& step_;
  float* hidden_;
  int threads_;
  int64_t num_tokens_;
  RowGroups groups_;
  LayerRows rows_{};
  float* turns_ = nullptr;
  Upcoming upcoming_;
};
