// The MLP of a transformer's layer: two products with an activation in between, or three with a gate.
#pragma once
#include "packed_product.h"

// Mirrors `LinearStructure` in mlp.py.
struct Linear {
  const PackedWeight* weight;
  const float* bias;  // (rows_out,) or null
};

// Mirrors `_Mlp` in mlp.py. down(activation(first(x))), or with an `up` down(activation(first(x)) * up(x)).
struct Mlp {
  Linear first, up, down;  // the weight of `up` may be null
  Activation activation;
};

#if defined(__AMX_BF16__)
// Writes the panels [from, to) of the input of `down` as `tiles`, which `rows` describes. A gate's panel and the same
// one of `up` are computed together.
template <class Read, bool IS_GATED>
void inner_tiles(const Mlp& mlp, int64_t from, int64_t to, const Input& input, const RowTiles& rows, uint16_t* tiles) {
  constexpr int kTogether = IS_GATED ? 2 : 1;
  auto panel_at = [&](int64_t i) {
    return PanelOf{i % kTogether == 0 ? mlp.first.weight : mlp.up.weight, from + i / kTogether};
  };
  auto finish = [&](int64_t i, int64_t row, int64_t end, const float* sums, int64_t size) {
    PanelOf first = panel_at(i);
    Vec bias[2] = {}, up_bias[2] = {};
    first.load_bias(mlp.first.bias, bias);
    if (IS_GATED) panel_at(i + 1).load_bias(mlp.up.bias, up_bias);
    for (; row < end; row++, sums += kPanel) {
      Vec inner[2];
      for (int half = 0; half < 2; half++) {
        inner[half] = activate(mlp.activation, load(sums + half * kLanes) + bias[half]);
        if (IS_GATED) inner[half] *= load(sums + size + half * kLanes) + up_bias[half];
      }
      rows.put(row, first.index * kPanel, inner, tiles);
    }
  };
  TileProduct{input.tiles, input.tiled}.run<Read, kTogether>(kTogether * (to - from), panel_at, finish);
}
#endif

// Returns the input of `down` for `input`, the one of the other products. It is valid until the thread's next call.
inline Input inner_rows(const Mlp& mlp, const Input& input, int threads, Upcoming& upcoming) {
  static thread_local Scratch scratch;
  const PackedWeight &first = *mlp.first.weight, *up = mlp.up.weight, &down = *mlp.down.weight;
  int64_t num_rows = input.groups.num_rows, size = first.rows_out;
#if defined(__AMX_BF16__)
  if (reads_tiles(first) && reads_tiles(down) &&
      (up == nullptr || up->form == first.form && up->has_zeros == first.has_zeros && reads_tiles(*up))) {
    Input inner{{num_rows}};
    inner.tiles = {num_rows, size, down.row_parts};
    auto* room = reinterpret_cast<uint16_t*>(scratch.floats(inner.tiles.numbers() / 2));
    inner.tiled = room;
    with_reader(first, [&](auto* reader) {
      typedef std::remove_pointer_t<decltype(reader)> Read;
      if constexpr (Read::Stored::kIsInBfloat16)
        each_part(num_panels(size), threads, [&](int64_t from, int64_t to) {
          up != nullptr ? inner_tiles<Read, true>(mlp, from, to, input, inner.tiles, room)
                        : inner_tiles<Read, false>(mlp, from, to, input, inner.tiles, room);
        });
    });
    return inner;
  }
#endif
  float* inner = scratch.floats(num_rows * size);
  Output own{inner, size, mlp.first.bias, up != nullptr ? Then::kStore : Then::kActivate, mlp.activation};
  own.upcoming = upcoming.take(first, input.groups.count);
  Output gated{inner, size, mlp.up.bias, Then::kGate, mlp.activation};
  if (up != nullptr) gated.upcoming = upcoming.take(*up, input.groups.count);
  each_part(num_panels(size), threads, [&](int64_t from, int64_t to) {
    // One weight after the other, because each is one stream of memory.
    product_of_panels(first, from, to, input, own);
    if (up != nullptr) product_of_panels(*up, from, to, input, gated);
  });
  return input_of(num_rows, inner, size, {&down}, threads);
}

// x: (num_rows, in_features), y: (num_rows, out_features).
RAYLENS_EXPORT void raylens_mlp(const Mlp& mlp, int64_t num_rows, const float* x, float* y, int threads) {
  int64_t num_k = mlp.first.weight->num_k, out = mlp.down.weight->rows_out;
  for (int64_t row = 0; row < num_rows; row += kRowsAtOnce) {
    Upcoming nothing;
    Input input = input_of(std::min(kRowsAtOnce, num_rows - row), x + row * num_k, num_k,
                           {mlp.first.weight, mlp.up.weight}, threads);
    Input inner = inner_rows(mlp, input, threads, nothing);
    whole_product(*mlp.down.weight, inner, {y + row * out, out, mlp.down.bias, Then::kStore}, threads);
  }
}
