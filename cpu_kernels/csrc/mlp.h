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

// Writes the input of `down`, (num_rows, inner size).
inline void inner_rows(const Mlp& mlp, const Input& input, float* inner, int threads, Upcoming& upcoming) {
  int64_t size = mlp.first.weight->rows_out;
  bool is_gated = mlp.up.weight != nullptr;
  Output first{inner, size, mlp.first.bias, is_gated ? Then::kStore : Then::kActivate, mlp.activation};
  first.upcoming = upcoming.take(*mlp.first.weight, input.groups.count);
  Output up{inner, size, mlp.up.bias, Then::kGate, mlp.activation};
  if (is_gated) up.upcoming = upcoming.take(*mlp.up.weight, input.groups.count);
  each_part(num_panels(size), threads, [&](int64_t from, int64_t to) {
    // One weight after the other, because each is one stream of memory.
    product_of_panels(*mlp.first.weight, from, to, input, first);
    if (is_gated) product_of_panels(*mlp.up.weight, from, to, input, up);
  });
}

// x: (num_rows, in_features), y: (num_rows, out_features). `inner` has space for kRowsAtOnce rows of the inner size.
RAYLENS_EXPORT void raylens_mlp(const Mlp& mlp, int64_t num_rows, const float* x, float* y, float* inner, int threads) {
  int64_t num_k = mlp.first.weight->num_k, size = mlp.first.weight->rows_out, out = mlp.down.weight->rows_out;
  for (int64_t row = 0; row < num_rows; row += kRowsAtOnce) {
    int64_t count = std::min(kRowsAtOnce, num_rows - row);
    Upcoming nothing;
    inner_rows(mlp, input_of(count, x + row * num_k, num_k, {mlp.first.weight, mlp.up.weight}, threads), inner, threads,
               nothing);
    Input input = input_of(count, inner, size, {mlp.down.weight}, threads);
    whole_product(*mlp.down.weight, input, {y + row * out, out, mlp.down.bias, Then::kStore}, threads);
  }
}
