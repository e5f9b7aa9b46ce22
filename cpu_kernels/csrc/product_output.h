// Where the columns of a product go, and what happens to them on the way.
#pragma once
#include <algorithm>

#include "activation.h"
#include "packed_weight.h"

// The number of k for one piece of upcoming memory, with a line prefetched for each.
constexpr int kPiece = 64;

// Memory that is needed after a product, in pieces of kPiece lines. A product of several groups is compute-bound, so it
// prefetches the pieces meanwhile: `per_group` of them in each group of a panel.
struct Upcoming {
  const char* const* pieces = nullptr;
  int64_t count = 0;

  // Returns the piece for the part of a product that starts at `k`, or null.
  const char* piece(const PackedWeight& weight, int64_t panel_group, int64_t k) const {
    int64_t index = panel_group * per_group(weight) + k / kPiece;
    return index < count && k / kPiece < per_group(weight) ? pieces[index] : nullptr;
  }

  // Removes and returns the pieces that a product with `weight` prefetches.
  Upcoming take(const PackedWeight& weight, int64_t num_groups) {
    int64_t taken = num_groups > 1 ? std::min(count, num_panels(weight.rows_out) * num_groups * per_group(weight)) : 0;
    Upcoming own{pieces, taken};
    pieces += taken;
    count -= taken;
    return own;
  }

 private:
  static int64_t per_group(const PackedWeight& weight) { return weight.num_k / kPiece; }
};

// Two vectors of a row of y, of which `columns` numbers exist.
RAYLENS_INLINE void load_columns(const float* from, int columns, Vec (&to)[2]) {
  float room[kPanel] = {};
  if (columns < kPanel) from = std::copy(from, from + columns, room) - columns;
  for (int half = 0; half < 2; half++) to[half] = load(from + half * kLanes);
}

RAYLENS_INLINE void store_columns(float* to, int columns, const Vec (&from)[2]) {
  float room[kPanel];
  float* whole = columns < kPanel ? room : to;
  for (int half = 0; half < 2; half++) store(whole + half * kLanes, from[half]);
  if (columns < kPanel) std::copy(room, room + columns, to);
}

// The use of a product's columns.
enum class Then {
  kStore,     // y = product
  kAdd,       // y += product
  kActivate,  // y = activation(product)
  kGate,      // y = activation(y) * product, where y holds the product with the gate's weight
};

struct Output {
  float* y;           // (num_rows, stride)
  int64_t stride;     // numbers between two rows
  const float* bias;  // (rows_out,) or null
  Then then;
  Activation activation = Activation::kSilu;
  Upcoming upcoming = {};
};

// Finishes a row's columns of a product and stores them.
RAYLENS_INLINE void finish_columns(const Output& output, float* to, int columns, Vec (&product)[2]) {
  Vec old[2];
  if (output.then == Then::kAdd || output.then == Then::kGate) load_columns(to, columns, old);
  for (int half = 0; half < 2; half++) {
    if (output.then == Then::kAdd) product[half] += old[half];
    if (output.then == Then::kActivate) product[half] = activate(output.activation, product[half]);
    if (output.then == Then::kGate) product[half] *= activate(output.activation, old[half]);
  }
  store_columns(to, columns, product);
}
