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

// Writes the input of `down`, (num_rows, inner size). `x` holds `groups`.
inline void inner_rows(const Mlp& mlp, const RowGroups& groups, const float* x, float* inner, int threads,
                       Upcoming& upcoming) {
  int64_t size = mlp.first.weight->rows_out;
  bool is_gated = mlp.up.weight != nullptr;
  Output first{inner, size, mlp.first.bias, is_gated ? Then::kStore : Then::kActivate, mlp.activation};
  first.upcoming = upcoming.take(*mlp.first.weight, groups.count);
  Output up{inner, size, mlp.up.bias, Then::kGate, mlp.activation};
  if (is_gated) up.upcoming = upcoming.take(*mlp.up.weight, groups.count);
  each_part(num_panels(size), threads, [&](int64_t from, int64_t to) {
    // One weight after the other, because each is one stream of memory.
    product_of_panels(*mlp.first.weight, from, to, groups, x, first);
    if (is_gated) product_of_panels(*mlp.up.weight, from, to, groups, x, up);
  });
}

// x: (num_rows, in_features), y: (num_rows, out_features). `room` has space for kRowsAtOnce rows of the inner size, and
// as many of the larger of the inner size and in_features.
RAYLENS_EXPORT void raylens_mlp(const Mlp& mlp, int64_t num_rows, const float* x, float* y, float* room, int threads) {
  int64_t num_k = mlp.first.weight->num_k, size = mlp.first.weight->rows_out, out = mlp.down.weight->rows_out;
  float *grouped = room, *inner = room + std::min(num_rows, kRowsAtOnce) * std::max(num_k, size);
  for (int64_t row = 0; row < num_rows; row += kRowsAtOnce) {
    RowGroups groups{std::min(kRowsAtOnce, num_rows - row)};
    Upcoming nothing;
    const float* own = in_groups(groups, x + row * num_k, num_k, grouped, threads);
    inner_rows(mlp, groups, own, inner, threads, nothing);
    const float* grouped_inner = in_groups(groups, inner, size, grouped, threads);
    Output output{y + row * out, out, mlp.down.bias, Then::kStore};
    product_of_groups(*mlp.down.weight, groups, grouped_inner, output, threads);
  }
}
