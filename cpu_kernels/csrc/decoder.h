// A plain decoder in one call, from token ids to logits: the embedding, norms, projections, rotary embeddings,
// attention, gated MLPs and the output head.
#pragma once
#include <utility>

#include "attention.h"
#include "mlp.h"
#include "norm.h"
#include "rotary.h"

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
  const PackedWeight* embedding;  // (vocab, hidden_size), or null
  int64_t num_layers, num_ropes, hidden_size, heads;
  Activation activation;
  Norm final_norm;
  Linear head;  // its weight may be null
  float embedding_scale;
};

// Mirrors `_StepRows` in decoder.py.
struct StepRows {
  const int64_t* positions;    // (axes, position_stride), of which num_tokens are used
  const int64_t* token_ids;    // (num_tokens,), or null if `hidden` holds the embeddings
  const int64_t* logits_rows;  // (num_logits,): the tokens whose logits are wanted, ascending
  float* hidden;               // (num_tokens, hidden_size)
  float* logits;               // (num_logits, vocab), or null
  const int64_t* level_rows;   // (num_level_rows,): the tokens with deepstack embeddings
  const float* levels;         // (num_level_rows, level_stride): num_levels concatenated embeddings a row
  int64_t position_stride, num_logits;
  int64_t wants_all_hidden;  // 0: only the hidden states of logits_rows are wanted
  int64_t num_level_rows, level_stride, num_levels;
};

// A layer's buffers for the step's rows, of different widths.
struct LayerRows {
  float *normed, *queries, *keys, *values, *attended;
};

struct DecoderStep {
  const Decoder& decoder;
  const StepChunks& chunks;
  const StepRows& step;
  int threads;
  float* hidden = step.hidden;
  int64_t num_tokens = chunks.num_tokens;
  LayerRows rows = {};
  float* turns = nullptr;
  Upcoming upcoming = {};

  // Runs layers, final norm and head, on the token ids or on the embeddings in `hidden`.
  void run() {
    if (step.token_ids != nullptr) embed();
    // Rows must keep their places up to the last layer that adds deepstack embeddings.
    bool narrows = !step.wants_all_hidden && step.num_logits < num_tokens && step.num_levels < decoder.num_layers;
    for (int64_t i = 0; i < decoder.num_layers; i++) {
      const DecoderLayer& layer = decoder.layers[i];
      bool is_last = i + 1 == decoder.num_layers;
      make_rows(layer);
      AttentionArguments call = project(layer);
      write_to_cache(*layer.cache, chunks, call.keys, call.values);
      if (is_last && narrows && step.num_logits == 0) return;
      auto skips = [&](int64_t first, int64_t end) { return is_last && narrows && !wants_any(first, end); };
      attend(chunks, *layer.cache, call, skips, threads);
      if (is_last && narrows) keep_wanted_rows(layer);
      if (!is_last) expect(decoder.layers[i + 1]);
      add_product(input_of(num_tokens, rows.attended, layer.output.weight->num_k, {layer.output.weight}, threads),
                  layer.output, layer.attention_norm);
      mlp(layer);
      if (i < step.num_levels) add_level(i);
    }
    int64_t size = decoder.hidden_size;
    each_row(num_tokens, threads,
             [&](int64_t row) { decoder.final_norm.apply(hidden + row * size, size, hidden + row * size); });
    if (narrows) put_rows_back();
    if (step.logits != nullptr && step.num_logits > 0) logits();
  }

  void embed() {
    unpack_rows(*decoder.embedding, step.token_ids, num_tokens, decoder.embedding_scale, hidden, threads);
  }

  void logits() {
    static thread_local Scratch scratch;
    int64_t size = decoder.hidden_size;
    const PackedWeight& weight = *decoder.head.weight;
    float* rows = scratch.floats(step.num_logits * size);
    for (int64_t i = 0; i < step.num_logits; i++)
      std::copy_n(hidden + step.logits_rows[i] * size, size, rows + i * size);
    Input input = input_of(step.num_logits, rows, size, {&weight}, threads);
    Output output{step.logits, weight.rows_out, decoder.head.bias, Then::kStore};
    whole_product(weight, input, output, threads);
  }

  // Returns whether the ropes' tables hold all positions.
  bool look_up_ropes() {
    static thread_local Scratch scratch;
    int64_t size = 0;
    for (int64_t i = 0; i < decoder.num_ropes; i++) size += 2 * decoder.ropes[i].dim;
    turns = scratch.floats(num_tokens * size);
    float* to = turns;
    for (int64_t i = 0; i < decoder.num_ropes; i++)
      for (int64_t row = 0; row < num_tokens; row++, to += 2 * decoder.ropes[i].dim)
        if (!decoder.ropes[i].look_up(step.positions + row, step.position_stride, to)) return false;
    return true;
  }

  void make_rows(const DecoderLayer& layer) {
    static thread_local Scratch scratch;
    auto width = [](const Linear& linear) { return padded(linear.weight->rows_out); };
    int64_t hidden = padded(decoder.hidden_size), queries = width(layer.query), keys = width(layer.key);
    int64_t values = width(layer.value), attended = padded(layer.output.weight->num_k);
    float* room = scratch.floats(num_tokens * (hidden + queries + keys + values + attended));
    auto take = [&](int64_t size) { return std::exchange(room, room + num_tokens * size); };
    rows = {take(hidden), take(queries), take(keys), take(values), take(attended)};
  }

  // Returns whether any of the rows [first, end) is wanted.
  bool wants_any(int64_t first, int64_t end) const {
    const int64_t* wanted = step.logits_rows;
    const int64_t* found = std::lower_bound(wanted, wanted + step.num_logits, first);
    return found != wanted + step.num_logits && *found < end;
  }

  // Drops all but the wanted rows, because no other row is needed after the last layer's attention.
  void keep_wanted_rows(const DecoderLayer& layer) {
    int64_t size = decoder.hidden_size, attended = layer.output.weight->num_k;
    num_tokens = step.num_logits;
    for (int64_t i = 0; i < num_tokens; i++) {  // rows only move forward, so none overwrites a later one
      std::copy_n(hidden + step.logits_rows[i] * size, size, hidden + i * size);
      std::copy_n(rows.attended + step.logits_rows[i] * attended, attended, rows.attended + i * attended);
    }
  }

  // Undoes `keep_wanted_rows` for the hidden states.
  void put_rows_back() {
    int64_t size = decoder.hidden_size;
    for (int64_t i = num_tokens; i-- > 0;) std::copy_n(hidden + i * size, size, hidden + step.logits_rows[i] * size);
  }

  // Computes queries, keys and values, ready for attention.
  AttentionArguments project(const DecoderLayer& layer) {
    const LayerCache& cache = *layer.cache;
    int64_t key_dim = cache.key_dim, heads = decoder.heads;
    Input input = normed(layer.input_norm, {layer.query.weight, layer.key.weight, layer.value.weight});
    products(input, {{layer.query, rows.queries}, {layer.key, rows.keys}, {layer.value, rows.values}});
    int64_t turned = decoder.ropes[layer.rope].dim;
    const float* own_turns = turns;  // of the layer's rope, for all tokens
    for (int64_t i = 0; i < layer.rope; i++) own_turns += num_tokens * 2 * decoder.ropes[i].dim;
    each_row(num_tokens, threads, [&](int64_t row) {
      auto finish = [&](const Norm& norm, float* head) {
        if (norm) norm.apply(head, key_dim, head);
        const float* turn = own_turns + row * 2 * turned;
        rotate(turn, turn + turned, turned, head);
      };
      for (int64_t i = 0; i < heads; i++) finish(layer.query_norm, rows.queries + (row * heads + i) * key_dim);
      for (int64_t i = 0; i < cache.kv_heads; i++)
        finish(layer.key_norm, rows.keys + (row * cache.kv_heads + i) * key_dim);
    });
    return {{rows.queries, heads * key_dim, key_dim},
            {rows.keys, cache.kv_heads * key_dim, key_dim},
            {rows.values, cache.kv_heads * cache.value_dim, cache.value_dim},
            rows.attended,
            heads,
            layer.window,
            row_parts(layer),
            layer.scaling,
            layer.softcap};
  }

  // Attention rounds as the products around it do.
  static int64_t row_parts(const DecoderLayer& layer) {
    int64_t parts = layer.output.weight->row_parts;
    for (const Linear* linear : {&layer.query, &layer.key, &layer.value})
      parts = std::max(parts, linear->weight->row_parts);
    return parts;
  }

  // Lets later products prefetch the keys and values of the decoding sequences in `layer`. With at least as many
  // threads as groups of rows, the products alone keep the memory busy.
  void expect(const DecoderLayer& layer) {
    static thread_local std::vector<const char*> pieces;
    pieces.clear();
    upcoming = {};
    if (RowGroups{num_tokens}.count <= threads) return;
    const LayerCache& cache = *layer.cache;
    auto add = [&](const float* data, int64_t head, int64_t slot, int64_t dim) {
      auto* from = reinterpret_cast<const char*>(data + (head * cache.num_slots + slot) * padded(dim));
      int64_t size = cache.block_size * padded(dim) * static_cast<int64_t>(sizeof(float));
      for (int64_t done = 0; done < size; done += 64 * kPiece) pieces.push_back(from + done);
    };
    for (int64_t chunk = 0; chunk < chunks.num_chunks; chunk++) {
      if (chunks.ends[chunk] <= chunks.prompt_ends[chunk]) continue;
      const int32_t* blocks = chunks.blocks + chunks.first_blocks[chunk];
      int64_t end = chunks.ends[chunk], start = first_seen(end - 1, layer.window) / cache.block_size;
      for (int64_t head = 0; head < cache.kv_heads; head++)
        for (int64_t block = start; block * cache.block_size < end; block++) {
          add(cache.keys, head, blocks[block] * cache.block_size, cache.key_dim);
          add(cache.values, head, blocks[block] * cache.block_size, cache.value_dim);
        }
    }
    upcoming = {pieces.data(), static_cast<int64_t>(pieces.size())};
  }

  void mlp(const DecoderLayer& layer) {
    Input input = normed(layer.mlp_input_norm, {layer.gate.weight, layer.up.weight});
    Mlp own{layer.gate, layer.up, layer.down, decoder.activation};
    add_product(inner_rows(own, input, threads, upcoming), layer.down, layer.mlp_norm);
  }

  // Returns the normed hidden states for products with `weights`.
  Input normed(const Norm& norm, std::initializer_list<const PackedWeight*> weights) {
    int64_t size = decoder.hidden_size;
    each_row(num_tokens, threads,
             [&](int64_t row) { norm.apply(hidden + row * size, size, rows.normed + row * size); });
    return input_of(num_tokens, rows.normed, size, weights, threads);
  }

  struct Product {
    Linear linear;
    float* y;
  };

  // Computes several products with the same rows.
  template <size_t N>
  void products(const Input& input, const Product (&all)[N]) {
    int64_t ends[N], total = 0;
    Output outputs[N];
    for (size_t i = 0; i < N; i++) {
      const PackedWeight& weight = *all[i].linear.weight;
      ends[i] = total += num_panels(weight.rows_out);
      outputs[i] = {all[i].y, weight.rows_out, all[i].linear.bias, Then::kStore};
      outputs[i].upcoming = upcoming.take(weight, input.groups.count);
    }
    each_part(total, threads, [&](int64_t from, int64_t to) {
      for (size_t i = 0; i < N; i++) {
        int64_t start = i == 0 ? 0 : ends[i - 1], first = std::max(from, start), end = std::min(to, ends[i]);
        if (first < end) product_of_panels(*all[i].linear.weight, first - start, end - start, input, outputs[i]);
      }
    });
  }

  // hidden += linear(input), or hidden += norm(linear(input)) with a norm.
  void add_product(const Input& input, const Linear& linear, const Norm& norm) {
    int64_t size = decoder.hidden_size;
    Output output{norm ? rows.normed : hidden, size, linear.bias, norm ? Then::kStore : Then::kAdd};
    output.upcoming = upcoming.take(*linear.weight, input.groups.count);
    whole_product(*linear.weight, input, output, threads);
    if (norm)
      each_row(num_tokens, threads,
               [&](int64_t row) { norm.apply<true>(rows.normed + row * size, size, hidden + row * size); });
  }

  // Adds a level of the deepstack embeddings (Meng et al., 2024) to the hidden states of their tokens.
  void add_level(int64_t level) {
    int64_t size = decoder.hidden_size;
    for (int64_t i = 0; i < step.num_level_rows; i++) {
      const float* embedding = step.levels + i * step.level_stride + level * size;
      float* to = hidden + step.level_rows[i] * size;
      for (int64_t d = 0; d < size; d++) to[d] += embedding[d];
    }
  }
};

// Runs a decoder over the step's tokens. Returns 0, and does nothing, if a position is beyond a rope's table.
RAYLENS_EXPORT int64_t raylens_decode(const Decoder& decoder, const StepChunks& chunks, const StepRows& step,
                                      int threads) {
  DecoderStep run{decoder, chunks, step, threads};
  if (!run.look_up_ropes()) return 0;
  run.run();
  return 1;
}
