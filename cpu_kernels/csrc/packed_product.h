// y = x w^T + bias with a packed weight.
//
// Each output is the sum over k in ascending order, for any number of rows. A row of y is thus bit-identical in any
// batch, and the same with a quantized weight as with its numbers in float32. (With AMX, tile_product.h says in which
// order it is.)
#pragma once
#include <algorithm>
#include <type_traits>

#include "product_output.h"
#include "tile_product.h"

// Calls action(std::integral_constant<int, count>) for a count in [1, kRows].
template <class Action, int R = kRows>
RAYLENS_INLINE void with_rows(int count, const Action& action) {
  if constexpr (R > 1) {
    if (count < R) return with_rows<Action, R - 1>(count, action);
  }
  action(std::integral_constant<int, R>());
}

// Later weights to prefetch: an address, and a step in bytes for each unit.
struct Ahead {
  const char* next;
  ptrdiff_t step;
};

// sums[r] += x[r] . panel for R rows, where x[r * row_stride + k * k_stride] is element k of row r, and `units` the
// panel's.
//
// For each unit, this prefetches with NEAR 1 a later unit into the L1 cache, FAR_LINES lines at `far` into the L2
// cache, and with PIECE 1 a line of `piece`. A product of few rows is memory-bound, and of many rows compute-bound. In
// between, at 6 to 16 rows, it would alternate between both waits if the weights were not in the L2 cache already.
template <int R, int NEAR, int FAR_LINES, int PIECE = 0, class Read>
RAYLENS_INLINE void accumulate(const Read& reader, const char* units, const float* x, ptrdiff_t row_stride,
                               ptrdiff_t k_stride, int num_k, Ahead far, Vec (&sums)[R][2],
                               const char* piece = nullptr) {
  for (int k = 0; k < num_k; k += Read::kUnit) {
    if constexpr (PIECE == 1) __builtin_prefetch(piece + 64 * k, 0, 2);
    const char* near = units + Read::Stored::kUnitsAhead * Read::kUnitBytes;
    for (int byte = 0; NEAR == 1 && byte < Read::kUnitBytes; byte += 64) __builtin_prefetch(near + byte);
    for (int line = 0; line < FAR_LINES; line++) __builtin_prefetch(far.next + 64 * line, 0, 2);
    far.next += far.step;
    Vec unit[Read::kUnit][2];
    reader.load(units, unit);
    units += Read::kUnitBytes;
    for (auto& row : unit) {
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        Vec own = all(x[r * row_stride]);
        sums[r][0] += own * row[0];
        sums[r][1] += own * row[1];
      }
      x += k_stride;
    }
  }
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

// The number of k that a product of several groups takes at a time: this part of a panel stays in the cache for all
// groups.
constexpr int64_t kDepth = 2048;

// The prefetch distance into the L2 cache, for a product of one group, in k.
constexpr int64_t kFar = 128;

// A panel's columns for all rows. `x` holds `groups`.
struct PanelProduct {
  const PackedWeight& weight;
  int64_t panel;
  const RowGroups& groups;
  const float* x;
  const Output& output;
  int columns = static_cast<int>(std::min<int64_t>(kPanel, weight.rows_out - panel * kPanel));

  template <class Read>
  void run() const {
    const char* units = weight.panels + panel * Read::panel_bytes(weight);
    groups.count == 1 ? run_once<Read>(units) : run_in_parts<Read>(units);
  }

  // For one row, computes the next panel, too. The sums of one panel wait for each other longer than conversions of few
  // bits take.
  template <class Read>
  void run_pair() const {
    const int64_t bytes = Read::panel_bytes(weight);
    Vec sums[1][2] = {}, next_sums[1][2] = {};
    auto add = [&](const Read& reader, const char* units, int64_t k, int num_k) {
      Read next(units + bytes);
      for (int done = 0; done < num_k; done += Read::kUnit, units += Read::kUnitBytes) {
        const char* ahead = units + Read::Stored::kUnitsAhead * Read::kUnitBytes;
        for (int byte = 0; byte < Read::kUnitBytes; byte += 64) {
          __builtin_prefetch(ahead + byte);
          __builtin_prefetch(ahead + bytes + byte);
        }
        Vec unit[Read::kUnit][2], next_unit[Read::kUnit][2];
        reader.load(units, unit);
        next.load(units + bytes, next_unit);
        for (int i = 0; i < Read::kUnit; i++) {
          Vec own = all(x[k + done + i]);
          for (int half = 0; half < 2; half++) {
            sums[0][half] += own * unit[i][half];
            next_sums[0][half] += own * next_unit[i][half];
          }
        }
      }
    };
    Read::each_part(weight, weight.panels + panel * bytes, 0, weight.num_k, add);
    finish<1>(0, sums);
    PanelProduct{weight, panel + 1, groups, x, output}.finish<1>(0, next_sums);
  }

 private:
  // For one group of rows.
  template <class Read>
  void run_once(const char* units) const {
    with_rows(groups.size(0), [&](auto count) {
      constexpr int R = count;
      constexpr int kFarLines = 4 * R >= 3 * kRows ? (Read::kUnitBytes + 63) / 64 : 0;
      Vec sums[R][2] = {};
      auto add = [&](const Read& reader, const char* from, int64_t k, int num_k) {
        Ahead far{from + kFar / Read::kUnit * Read::kUnitBytes, Read::kUnitBytes};
        accumulate<R, 1, kFarLines>(reader, from, x + k * R, 1, R, num_k, far, sums);
      };
      Read::each_part(weight, units, 0, weight.num_k, add);
      finish<R>(0, sums);
    });
  }

  // For several groups of rows. All groups use a part of the panel, then the next one.
  template <class Read>
  void run_in_parts(const char* units) const {
    static thread_local Scratch scratch, unpacked;
    // The sums so far, if the product is computed in several parts.
    float* partial = kDepth < weight.num_k ? scratch.floats(groups.num_rows * kPanel) : nullptr;
    for (int64_t k = 0; k < weight.num_k; k += kDepth) {
      int64_t end = std::min(k + kDepth, weight.num_k);
      // Of the next part.
      Ahead ahead{units + Read::place(weight, end), (end - k) / Read::kUnit * Read::kUnitBytes};
      if constexpr (Read::kHeader > 0) {
        float* part = unpacked.floats(kDepth * kPanel);
        unpack<Read>(weight, units, k, end, part);
        run_part<Floats>(part, k, end, ahead, partial);
      } else {
        run_part<Read>(units + Read::place(weight, k), k, end, ahead, partial);
      }
    }
  }

  // Adds [k, end) of the panel, whose units are at `part`. Each group prefetches a piece of `ahead`: an
  // address and a size in bytes.
  template <class Read>
  void run_part(const void* part, int64_t k, int64_t end, Ahead ahead, float* partial) const {
    int num_k = static_cast<int>(end - k);
    for (int64_t group = 0; group < groups.count; group++)
      with_rows(groups.size(group), [&](auto count) {
        constexpr int R = count;
        int64_t row = groups.first(group);
        const float* own = x + row * weight.num_k + k * R;
        Vec sums[R][2] = {};
        if (k > 0)
          for (int r = 0; r < R; r++) load_columns(partial + (row + r) * kPanel, kPanel, sums[r]);
        Ahead far{ahead.next + ahead.step * group / groups.count, ahead.step / num_k / groups.count};
        for (int from = 0; from < num_k; from += kPiece, far.next += kPiece * far.step) {
          int some = std::min(kPiece, num_k - from);
          const char* from_units = static_cast<const char*>(part) + from / Read::kUnit * Read::kUnitBytes;
          const char* piece = output.upcoming.piece(weight, panel * groups.count + group, k + from);
          if (piece != nullptr)
            accumulate<R, 1, 1, 1>(Read(), from_units, own + from * R, 1, R, some, far, sums, piece);
          else
            accumulate<R, 1, 1>(Read(), from_units, own + from * R, 1, R, some, far, sums);
        }
        if (end == weight.num_k)
          finish<R>(row, sums);
        else
          for (int r = 0; r < R; r++) store_columns(partial + (row + r) * kPanel, kPanel, sums[r]);
      });
  }

  // Adds the bias to the products of R rows and stores them.
  template <int R>
  RAYLENS_INLINE void finish(int64_t row, Vec (&sums)[R][2]) const {
    Vec bias[2] = {};
    if (output.bias != nullptr) load_columns(output.bias + panel * kPanel, columns, bias);
    for (int r = 0; r < R; r++) {
      for (int half = 0; half < 2; half++) sums[r][half] += bias[half];
      finish_columns(output, output.y + (row + r) * output.stride + panel * kPanel, columns, sums[r]);
    }
  }
};

// Rows of x in the reading orders of a product's weights.
struct Input {
  RowGroups groups;
  const float* x = nullptr;  // holds `groups`
#if defined(__AMX_BF16__)
  RowTiles tiles = {};
  const uint16_t* tiled = nullptr;  // holds `tiles`
#endif
};

// Returns rows of x, (num_rows, num_k), for products with `weights`, of which some may be null. The result is valid
// until the thread's next call.
inline Input input_of(int64_t num_rows, const float* x, int64_t num_k,
                      std::initializer_list<const PackedWeight*> weights, int threads) {
  static thread_local Scratch groups_scratch;
  Input input{{num_rows}, x};
  auto any = [&](bool tiled) {
    return std::any_of(weights.begin(), weights.end(), [&](auto* one) { return one && reads_tiles(*one) == tiled; });
  };
  auto each_group = [&](int64_t count, const auto& copy) {
    pool().run(count > 4 ? threads : 1, static_cast<int>(count), copy);
  };
  if (num_rows > 1 && any(false)) {
    float* room = groups_scratch.floats(num_rows * num_k);
    each_group(input.groups.count, [&](int group) { input.groups.copy(group, x, num_k, room); });
    input.x = room;
  }
#if defined(__AMX_BF16__)
  if (num_rows > 0 && any(true)) {
    static thread_local Scratch tiles_scratch;
    int64_t parts = 1;
    for (auto* one : weights)
      if (one != nullptr) parts = std::max(parts, one->row_parts);
    const RowTiles& tiles = input.tiles = {num_rows, num_k, parts};
    auto* room = reinterpret_cast<uint16_t*>(tiles_scratch.floats(tiles.numbers() / 2));
    each_group(tiles.count, [&](int group) { tiles.write(group, x, room); });
    input.tiled = room;
  }
#endif
  return input;
}

// Computes the panels [from, to) for all rows.
inline void product_of_panels(const PackedWeight& weight, int64_t from, int64_t to, const Input& input,
                              const Output& output) {
  const RowGroups& groups = input.groups;
  with_reader(weight, [&](auto* reader) {
    typedef std::remove_pointer_t<decltype(reader)> Read;
#if defined(__AMX_BF16__)
    if constexpr (Read::Stored::kIsInBfloat16)
      if (reads_tiles(weight)) return tile_product<Read>(weight, from, to, input.tiles, input.tiled, output);
#endif
    int64_t panel = from;
    if constexpr (Read::kHeader > 0)
      for (; groups.num_rows == 1 && panel + 1 < to; panel += 2)
        PanelProduct{weight, panel, groups, input.x, output}.template run_pair<Read>();
    for (; panel < to; panel++) PanelProduct{weight, panel, groups, input.x, output}.template run<Read>();
  });
}

// Calls part(from, to) for parts of [0, panels). A part has an even number of panels, except the last one, and at least
// about 12 if there are enough for all threads: it reads all rows once for each chunk of k.
template <class Part>
void each_part(int64_t panels, int threads, const Part& part) {
  int64_t pairs = (panels + 1) / 2, most = std::clamp<int64_t>(pairs / 6, threads, 8 * threads);
  int64_t parts = std::min(pairs, most);
  auto start = [&](int i) { return std::min(pairs * i / parts * 2, panels); };
  pool().run(threads, static_cast<int>(parts), [&](int i) { part(start(i), start(i + 1)); });
}

// Computes all columns for all rows.
inline void whole_product(const PackedWeight& weight, const Input& input, const Output& output, int threads) {
  each_part(num_panels(weight.rows_out), threads,
            [&](int64_t from, int64_t to) { product_of_panels(weight, from, to, input, output); });
}

// Products take so many rows at a time, so that their temporary memory is small and stays in a cache.
constexpr int64_t kRowsAtOnce = 256;

// y = x w^T + bias. x: (num_rows, num_k), y: (num_rows, rows_out), bias: (rows_out,) or null.
RAYLENS_EXPORT void raylens_product(const PackedWeight& weight, int64_t num_rows, const float* x, const float* bias,
                                    float* y, int threads) {
  for (int64_t row = 0; row < num_rows; row += kRowsAtOnce) {
    Input input =
        input_of(std::min(kRowsAtOnce, num_rows - row), x + row * weight.num_k, weight.num_k, {&weight}, threads);
    whole_product(weight, input, {y + row * weight.rows_out, weight.rows_out, bias, Then::kStore}, threads);
  }
}
