// y = x w^T + bias with a weight that lies as the product reads it: one stream of memory.
//
// A panel holds kPanel columns of the output: for each k, their kPanel weights one behind the other. The last panel is
// filled up with zeros. Each output is the sum over k in ascending order, whatever the number of rows. So a row of y is
// the same to the last bit, alone or among others.
#pragma once
#include <algorithm>
#include <type_traits>

#include "scratch.h"
#include "thread_pool.h"
#include "vector.h"

constexpr int kPanel = 2 * kLanes;

// Weights of four bytes, and weights of two that stand for the float32 with 16 zero bits behind them (bfloat16). Of the
// latter, column c of a panel's first half and of its second half share the four bytes at c.
struct Float32 {
  typedef float Number;
  static constexpr int kAhead = 24;  // rows of a panel to prefetch: memory answers some 500 cycles later
  static RAYLENS_INLINE void load_row(const Number* from, Vec& first, Vec& second) {
    first = load(from);
    second = load(from + kLanes);
  }
  static int place(int column) { return column; }
  static Number of(float weight) { return weight; }
};

struct Bfloat16 {
  typedef uint16_t Number;
  static constexpr int kAhead = 32;
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

// sums[r] += x[r] . panel for R rows, where x[r * row_stride + k * k_stride] is element k of row r.
template <class Weights, int R>
RAYLENS_INLINE void accumulate(const typename Weights::Number* panel, const float* x, ptrdiff_t row_stride,
                               ptrdiff_t k_stride, int num_k, Vec (&sums)[R][2]) {
  for (int k = 0; k < num_k; k++) {
    const char* ahead = reinterpret_cast<const char*>(panel + Weights::kAhead * kPanel);
    for (size_t line = 0; line < kPanel * sizeof(*panel); line += 64) __builtin_prefetch(ahead + line);
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

// Lays `weight`, (columns, num_k), out as panels.
template <class Weights>
void pack(const float* weight, int64_t columns, int64_t num_k, typename Weights::Number* panels) {
  for (int64_t panel = 0; panel < num_panels(columns); panel++)
    for (int c = 0; c < kPanel; c++) {
      int64_t column = panel * kPanel + c;
      auto* to = panels + panel * num_k * kPanel + Weights::place(c);
      for (int64_t k = 0; k < num_k; k++)
        to[k * kPanel] = Weights::of(column < columns ? weight[column * num_k + k] : 0.f);
    }
}

// Rows of x as the product reads them: groups of up to kRows rows of about equal size, and in a group, for each k, the
// rows' elements one behind the other. (Rows that lie a power of two apart would fight for the same lines of a cache.)
class RowGroups {
 public:
  explicit RowGroups(int64_t num_rows) : num_rows_(num_rows), count_((num_rows + kRows - 1) / kRows) {}
  int64_t count() const { return count_; }
  int64_t first(int64_t group) const { return num_rows_ * group / count_; }
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

 private:
  int64_t num_rows_, count_;
};

// Two vectors of a row of y, of which `columns` numbers exist.
RAYLENS_INLINE void load_columns(const float* from, int columns, Vec& first, Vec& second) {
  float room[kPanel] = {};
  if (columns < kPanel) from = std::copy(from, from + columns, room) - columns;
  first = load(from);
  second = load(from + kLanes);
}

RAYLENS_INLINE void store_columns(float* to, int columns, Vec first, Vec second) {
  float room[kPanel];
  float* whole = columns < kPanel ? room : to;
  store(whole, first);
  store(whole + kLanes, second);
  if (columns < kPanel) std::copy(room, room + columns, to);
}

// How many k a product of several groups takes at a time: this much of a panel stays in the cache for all of them.
constexpr int64_t kDepth = 1024;

// Computes a panel's columns of y, (num_rows, weight.rows_out), for all rows. `x` holds `groups`.
template <class Weights>
void product_of_panel(const PackedWeight& weight, int64_t panel, const RowGroups& groups, const float* x,
                      const float* bias, float* y) {
  auto* weights = static_cast<const typename Weights::Number*>(weight.panels) + panel * weight.num_k * kPanel;
  int columns = static_cast<int>(std::min<int64_t>(kPanel, weight.rows_out - panel * kPanel));
  Vec bias_first{}, bias_second{};
  if (bias != nullptr) load_columns(bias + panel * kPanel, columns, bias_first, bias_second);
  int64_t depth = groups.count() == 1 ? weight.num_k : kDepth;
  for (int64_t k = 0; k < weight.num_k; k += depth) {
    int num_k = static_cast<int>(std::min(depth, weight.num_k - k));
    bool is_last = k + num_k == weight.num_k;
    for (int64_t group = 0; group < groups.count(); group++)
      with_rows(groups.size(group), [&](auto count) {
        constexpr int R = count;
        const float* rows = x + groups.first(group) * weight.num_k + k * R;
        float* to = y + groups.first(group) * weight.rows_out + panel * kPanel;
        Vec sums[R][2] = {};
        if (k > 0)
          for (int r = 0; r < R; r++) load_columns(to + r * weight.rows_out, columns, sums[r][0], sums[r][1]);
        accumulate<Weights, R>(weights + k * kPanel, rows, 1, R, num_k, sums);
        for (int r = 0; r < R; r++) {
          if (is_last && bias != nullptr) {
            sums[r][0] += bias_first;
            sums[r][1] += bias_second;
          }
          store_columns(to + r * weight.rows_out, columns, sums[r][0], sums[r][1]);
        }
      });
  }
}

// y = x w^T + bias. x: (num_rows, num_k), y: (num_rows, rows_out), bias: (rows_out,) or null.
inline void product(const PackedWeight& weight, int64_t num_rows, const float* x, const float* bias, float* y,
                    int threads) {
  RowGroups groups(num_rows);
  if (num_rows > 1) {
    static thread_local Scratch scratch;
    float* grouped = scratch.floats(num_rows * weight.num_k);
    auto copy = [&](int group) { groups.copy(group, x, weight.num_k, grouped); };
    pool().run(num_rows > 4 * kRows ? threads : 1, static_cast<int>(groups.count()), copy);
    x = grouped;
  }
  int64_t panels = num_panels(weight.rows_out);
  int64_t parts = std::min<int64_t>(panels, 8 * threads);
  pool().run(threads, static_cast<int>(parts), [&](int part) {
    for (int64_t panel = panels * part / parts; panel < panels * (part + 1) / parts; panel++)
      if (weight.is_bfloat16)
        product_of_panel<Bfloat16>(weight, panel, groups, x, bias, y);
      else
        product_of_panel<Float32>(weight, panel, groups, x, bias, y);
  });
}
