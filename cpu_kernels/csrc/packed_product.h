// y = x w^T + bias with a weight in the product's reading order: one stream of memory.
//
// A panel holds kPanel columns of the output: for each k, their kPanel consecutive weights. Zeros pad the last panel.
// Each output is the sum over k in ascending order, for any number of rows. A row of y is thus bit-identical in any
// batch.
#pragma once
#include <algorithm>
#include <type_traits>

#include "activation.h"
#include "scratch.h"
#include "thread_pool.h"
#include "vector.h"

constexpr int kPanel = 2 * kLanes;

// Weights of four bytes (float32) and of two bytes (bfloat16: a float32 without its lower 16 bits). With bfloat16,
// column c of a panel's first half and of its second half share the four bytes at c.
struct Float32 {
  typedef float Number;
  static constexpr int kRowsAhead = 24;  // the prefetch distance, in rows of the panel
  static RAYLENS_INLINE void load_row(const Number* from, Vec& first, Vec& second) {
    first = load(from);
    second = load(from + kLanes);
  }
  static int place(int column) { return column; }
  static Number of(float weight) { return weight; }
};

struct Bfloat16 {
  typedef uint16_t Number;
  static constexpr int kRowsAhead = 32;
  static RAYLENS_INLINE void load_row(const Number* from, Vec& first, Vec& second) {
    UintVec both;
    std::memcpy(&both, from, sizeof both);
    first = (Vec)(both << 16);
    second = (Vec)(both & 0xffff0000u);
  }
  static int place(int column) { return column < kLanes ? 2 * column : 2 * (column - kLanes) + 1; }
  static Number of(float weight) {
    uint32_t bits;
    std::memcpy(&bits, &weight, sizeof bits);
    return static_cast<Number>(bits >> 16);
  }
};

// Calls action(std::integral_constant<int, count>) for a count in [1, kRows].
template <class Action, int R = kRows>
RAYLENS_INLINE void with_rows(int count, const Action& action) {
  if constexpr (R > 1) {
    if (count < R) return with_rows<Action, R - 1>(count, action);
  }
  action(std::integral_constant<int, R>());
}

// Later weights to prefetch: an address, and a step in bytes for each k.
struct Ahead {
  const char* next;
  ptrdiff_t step;
};

// sums[r] += x[r] . panel for R rows, where x[r * row_stride + k * k_stride] is element k of row r.
//
// For each k, this prefetches NEAR_LINES lines of the panel into the L1 cache, FAR_LINES lines at `far` into the L2
// cache, and with PIECE 1 a line of `piece`. A product of few rows is memory-bound, and of many rows compute-bound. In
// between, at 6 to 16 rows, it would alternate between both waits if the weights were not in the L2 cache already.
template <class Weights, int R, int NEAR_LINES, int FAR_LINES, int PIECE = 0>
RAYLENS_INLINE void accumulate(const typename Weights::Number* panel, const float* x, ptrdiff_t row_stride,
                               ptrdiff_t k_stride, int num_k, Ahead far, Vec (&sums)[R][2],
                               const char* piece = nullptr) {
  for (int k = 0; k < num_k; k++) {
    if constexpr (PIECE == 1) __builtin_prefetch(piece + 64 * k, 0, 2);
    const char* near = reinterpret_cast<const char*>(panel + Weights::kRowsAhead * kPanel);
    for (int line = 0; line < NEAR_LINES; line++) __builtin_prefetch(near + 64 * line);
    for (int line = 0; line < FAR_LINES; line++) __builtin_prefetch(far.next + 64 * line, 0, 2);
    far.next += far.step;
    Vec first, second;
    Weights::load_row(panel, first, second);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      Vec own = all(x[r * row_stride]);
      sums[r][0] += own * first;
      sums[r][1] += own * second;
    }
    panel += kPanel;
    x += k_stride;
  }
}

struct PackedWeight {
  const void* panels;
  int64_t rows_out, num_k;  // out_features, in_features
  int64_t is_bfloat16;
};

inline int64_t num_panels(int64_t columns) { return (columns + kPanel - 1) / kPanel; }

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

// Returns the number whose multiples the columns of a packed weight are padded to.
RAYLENS_EXPORT int64_t raylens_panel() { return kPanel; }

template <class Weights>
void pack(const float* weight, int64_t columns, int64_t num_k, void* panels) {
  for (int64_t panel = 0; panel < num_panels(columns); panel++)
    for (int c = 0; c < kPanel; c++) {
      int64_t column = panel * kPanel + c;
      auto* to = static_cast<typename Weights::Number*>(panels) + panel * num_k * kPanel + Weights::place(c);
      for (int64_t k = 0; k < num_k; k++)
        to[k * kPanel] = Weights::of(column < columns ? weight[column * num_k + k] : 0.f);
    }
}

// Packs `weight`, (columns, num_k), into panels.
RAYLENS_EXPORT void raylens_pack(const float* weight, int64_t columns, int64_t num_k, int64_t is_bfloat16,
                                 void* panels) {
  (is_bfloat16 ? pack<Bfloat16> : pack<Float32>)(weight, columns, num_k, panels);
}

// Rows of x in the product's reading order: groups of up to kRows rows, of about equal size; in a group, for each k,
// the rows' consecutive elements. (Rows at a distance of a power of two would compete for the same cache lines.)
struct RowGroups {
  int64_t num_rows, count = (num_rows + kRows - 1) / kRows;

  int64_t first(int64_t group) const { return num_rows * group / count; }
  int size(int64_t group) const { return static_cast<int>(first(group + 1) - first(group)); }

  // Copies a group's rows of `x`, (num_rows, num_k), to its place in `all_groups`, which is of the same size.
  void copy(int64_t group, const float* x, int64_t num_k, float* all_groups) const {
    const float* from = x + first(group) * num_k;
    float* to = all_groups + first(group) * num_k;
    with_rows(size(group), [&](auto rows) {
      for (int64_t k = 0; k < num_k; k++)
        for (int r = 0; r < rows; r++) to[k * rows + r] = from[r * num_k + k];
    });
  }
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

// The number of k that a product of several groups takes at a time: this part of a panel stays in the cache for all
// groups.
constexpr int64_t kDepth = 2048;

// The prefetch distance into the L2 cache, for a product of one group.
constexpr int64_t kRowsFar = 128;

// Computes a panel's columns for all rows. `x` holds `groups`.
template <class Weights>
void product_of_panel(const PackedWeight& weight, int64_t panel, const RowGroups& groups, const float* x,
                      const Output& output) {
  static thread_local Scratch scratch;
  auto* weights = static_cast<const typename Weights::Number*>(weight.panels) + panel * weight.num_k * kPanel;
  int columns = static_cast<int>(std::min<int64_t>(kPanel, weight.rows_out - panel * kPanel));
  Vec bias[2] = {};
  if (output.bias != nullptr) load_columns(output.bias + panel * kPanel, columns, bias);
  int64_t depth = groups.count == 1 ? weight.num_k : kDepth;
  // The sums so far, if the product is computed in several parts.
  float* partial = depth < weight.num_k ? scratch.floats(groups.num_rows * kPanel) : nullptr;
  constexpr ptrdiff_t kRowBytes = kPanel * sizeof(typename Weights::Number);
  constexpr int kRowLines = (kRowBytes + 63) / 64;
  for (int64_t k = 0; k < weight.num_k; k += depth) {
    int num_k = static_cast<int>(std::min(depth, weight.num_k - k));
    bool is_last = k + num_k == weight.num_k;
    const auto* block = weights + k * kPanel;
    for (int64_t group = 0; group < groups.count; group++)
      with_rows(groups.size(group), [&](auto count) {
        constexpr int R = count;
        int64_t row = groups.first(group);
        const float* own = x + row * weight.num_k + k * R;
        Vec sums[R][2] = {};
        if (k > 0)
          for (int r = 0; r < R; r++) load_columns(partial + (row + r) * kPanel, kPanel, sums[r]);
        if (groups.count == 1) {
          constexpr int kFarLines = 4 * R >= 3 * kRows ? kRowLines : 0;
          Ahead far{reinterpret_cast<const char*>(block + kRowsFar * kPanel), kRowBytes};
          accumulate<Weights, R, kRowLines, kFarLines>(block, own, 1, R, num_k, far, sums);
        } else {  // each group prefetches a part of the next block
          const char* next = reinterpret_cast<const char*>(block + static_cast<int64_t>(num_k) * kPanel);
          Ahead far{next + num_k * kRowBytes * group / groups.count, kRowBytes / groups.count};
          for (int from = 0; from < num_k; from += kPiece, far.next += kPiece * far.step) {
            int some = std::min(kPiece, num_k - from);
            const char* piece = output.upcoming.piece(weight, panel * groups.count + group, k + from);
            if (piece != nullptr)
              accumulate<Weights, R, kRowLines, 1, 1>(block + from * kPanel, own + from * R, 1, R, some, far, sums,
                                                      piece);
            else
              accumulate<Weights, R, kRowLines, 1>(block + from * kPanel, own + from * R, 1, R, some, far, sums);
          }
        }
        for (int r = 0; r < R; r++)
          if (is_last) {
            for (int half = 0; half < 2; half++) sums[r][half] += bias[half];
            finish_columns(output, output.y + (row + r) * output.stride + panel * kPanel, columns, sums[r]);
          } else {
            store_columns(partial + (row + r) * kPanel, kPanel, sums[r]);
          }
      });
  }
}

inline void product_of_panel(const PackedWeight& weight, int64_t panel, const RowGroups& groups, const float* x,
                             const Output& output) {
  (weight.is_bfloat16 ? product_of_panel<Bfloat16> : product_of_panel<Float32>)(weight, panel, groups, x, output);
}

// Calls part(from, to) for parts of [0, panels).
template <class Part>
void each_part(int64_t panels, int threads, const Part& part) {
  int64_t parts = std::min<int64_t>(panels, 8 * threads);
  pool().run(threads, static_cast<int>(parts), [&](int i) { part(panels * i / parts, panels * (i + 1) / parts); });
}

// Computes all columns for all rows. `x` holds `groups`.
inline void product_of_groups(const PackedWeight& weight, const RowGroups& groups, const float* x, const Output& output,
                              int threads) {
  each_part(num_panels(weight.rows_out), threads, [&](int64_t from, int64_t to) {
    for (int64_t panel = from; panel < to; panel++) product_of_panel(weight, panel, groups, x, output);
  });
}

// Returns rows of x, (num_rows, num_k), in groups, copied to `room`; a single row is returned unchanged.
inline const float* in_groups(const RowGroups& groups, const float* x, int64_t num_k, float* room, int threads) {
  if (groups.num_rows <= 1) return x;
  auto copy = [&](int group) { groups.copy(group, x, num_k, room); };
  pool().run(groups.count > 4 ? threads : 1, static_cast<int>(groups.count), copy);
  return room;
}

// Products take so many rows at a time, so that their temporary memory is small and stays in a cache.
constexpr int64_t kRowsAtOnce = 256;
RAYLENS_EXPORT int64_t raylens_rows_at_once() { return kRowsAtOnce; }

// y = x w^T + bias. x: (num_rows, num_k), y: (num_rows, rows_out), bias: (rows_out,) or null. With more than one row,
// `room` has space for up to kRowsAtOnce rows of x.
RAYLENS_EXPORT void raylens_product(const PackedWeight& weight, int64_t num_rows, const float* x, const float* bias,
                                    float* y, float* room, int threads) {
  for (int64_t row = 0; row < num_rows; row += kRowsAtOnce) {
    RowGroups groups{std::min(kRowsAtOnce, num_rows - row)};
    const float* own = in_groups(groups, x + row * weight.num_k, weight.num_k, room, threads);
    product_of_groups(weight, groups, own, {y + row * weight.rows_out, weight.rows_out, bias, Then::kStore}, threads);
  }
}
