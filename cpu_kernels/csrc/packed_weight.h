// A weight in the product's reading order: one stream of memory.
//
// A panel holds its units by ascending k. In a quantized weight, `group` k at a time have a scale for each column, and
// optionally a zero: weight = (number - zero) * scale. A group's scales and zeros lie before its units. Zeros pad the
// last panel.
#pragma once
#include <algorithm>
#include <type_traits>

#include "scratch.h"
#include "thread_pool.h"
#include "weight_forms.h"

// Mirrors `_PackedWeight` in packed_weight.py. `group`: 0 in a weight that is not quantized; else a multiple of 4, as
// is `num_k`. `num_k` is also a multiple of a form's kUnit.
struct PackedWeight {
  const char* panels;
  int64_t rows_out, num_k;  // out_features, in_features
  Form form;
  int64_t group, has_zeros;
  int64_t row_parts;  // the numbers of bfloat16 that may stand for a number of x: 1 to 3, of which 3 are exact
};

inline int64_t num_panels(int64_t columns) { return (columns + kPanel - 1) / kPanel; }

struct NoScales {};

// The scales and zeros of a group of whole numbers or bytes.
template <class Stored, bool HAS_ZEROS>
struct Scales {
  Vec scale[1][2], zero[1][2];

  RAYLENS_INLINE void set(int half, Vec own_scale, Vec own_zero) {
    scale[0][half] = own_scale;
    zero[0][half] = own_zero;
  }

  RAYLENS_INLINE Vec apply(Vec number, int, int half) const {
    return (HAS_ZEROS ? number - zero[0][half] : number) * scale[0][half];
  }
};

// Those of Int4, for each of its places.
template <bool HAS_ZEROS>
struct Scales<Int4, HAS_ZEROS> {
#if defined(__FMA__)
  static constexpr bool kFused = !HAS_ZEROS;  // an offset times the scale is exact, and so is the fused operation
#else
  static constexpr bool kFused = false;
#endif
  Vec scale[Int4::kUnit][2], zero[Int4::kUnit][2];

  RAYLENS_INLINE void set(int half, Vec own_scale, Vec own_zero) {
    for (int k = 0; k < Int4::kUnit; k++) {
      int place = Int4::place(k, half);
      float power = static_cast<float>(1 << 4 * place), offset = place == Int4::kHighest ? 0 : Int4::kOffset;
      scale[k][half] = own_scale * (1 / power);
      zero[k][half] = kFused ? own_scale * -offset : (own_zero + offset) * power;
    }
  }

  RAYLENS_INLINE Vec apply(Vec number, int k, int half) const {
    if (kFused) return number * scale[k][half] + zero[k][half];
    return (number - zero[k][half]) * scale[k][half];
  }
};

// Reads the numbers of a form. HEADER: the vectors of kPanel numbers before each group: none, scales, or scales and
// zeros.
template <class Own, int HEADER>
struct Reader {
  typedef Own Stored;
  static constexpr int kHeader = HEADER, kHeaderBytes = 4 * HEADER * kPanel;
  static constexpr int kUnit = Stored::kUnit, kUnitBytes = Stored::kUnitBytes;

  // `units`: the first of a group.
  explicit RAYLENS_INLINE Reader(const void* units = nullptr) {
    auto* header = static_cast<const float*>(units) - HEADER * kPanel;
    if constexpr (HEADER > 0)
      for (int half = 0; half < 2; half++)
        scales_.set(half, ::load(header + half * kLanes), HEADER > 1 ? ::load(header + kPanel + half * kLanes) : Vec{});
  }

  RAYLENS_INLINE void load(const char* from, Vec (&to)[kUnit][2]) const {
    Stored::load(from, to);
    if constexpr (HEADER > 0)
      for (int k = 0; k < kUnit; k++)
        for (int half = 0; half < 2; half++) to[k][half] = scales_.apply(to[k][half], k, half);
  }

  // The place of the unit that starts with `k`, in bytes from the panel's start.
  static RAYLENS_INLINE int64_t place(const PackedWeight& weight, int64_t k) {
    int64_t headers = HEADER > 0 ? k / weight.group + 1 : 0;
    return headers * kHeaderBytes + k / kUnit * kUnitBytes;
  }

  static int64_t panel_bytes(const PackedWeight& weight) {
    int64_t groups = HEADER > 0 ? (weight.num_k + weight.group - 1) / weight.group : 0;
    return groups * kHeaderBytes + weight.num_k / kUnit * kUnitBytes;
  }

  // Calls action(reader, units, from, count) for the parts [from, from + count) of [k, end) that share a reader.
  template <class Action>
  static RAYLENS_INLINE void each_part(const PackedWeight& weight, const char* panel, int64_t k, int64_t end,
                                       const Action& action) {
    int64_t size = HEADER > 0 ? weight.group : end - k, inside = HEADER > 0 ? k % size : 0;
    const char* group = panel + place(weight, k - inside);
    for (int64_t count; k < end; k += count, inside = 0) {
      count = std::min(size - inside, end - k);
      action(Reader(group), group + inside / kUnit * kUnitBytes, k, static_cast<int>(count));
      group += size / kUnit * kUnitBytes + kHeaderBytes;
    }
  }

 private:
  std::conditional_t<HEADER == 0, NoScales, Scales<Stored, (HEADER > 1)>> scales_;
};

typedef Reader<Float32, 0> Floats;

// Calls action(reader) with a null pointer of the weight's type of reader.
template <class Action>
inline auto with_reader(const PackedWeight& weight, const Action& action) {
  switch (weight.form) {
    case Form::kBfloat16:
      return action(static_cast<Reader<Bfloat16, 0>*>(nullptr));
    case Form::kFloat16:
      return action(static_cast<Reader<Float16, 0>*>(nullptr));
    case Form::kFloat8:
      return action(static_cast<Reader<Float8, 1>*>(nullptr));
    case Form::kInt8:
      if (weight.has_zeros) return action(static_cast<Reader<Int8, 2>*>(nullptr));
      return action(static_cast<Reader<Int8, 1>*>(nullptr));
    case Form::kInt4:
      if (weight.has_zeros) return action(static_cast<Reader<Int4, 2>*>(nullptr));
      return action(static_cast<Reader<Int4, 1>*>(nullptr));
    default:
      return action(static_cast<Floats*>(nullptr));
  }
}

// Writes the weights of a panel for [k, end), (end - k, kPanel), to `to`.
template <class Read>
void unpack(const PackedWeight& weight, const char* panel, int64_t k, int64_t end, float* to) {
  Read::each_part(weight, panel, k, end, [&](const Read& reader, const char* units, int64_t, int count) {
    for (int done = 0; done < count; done += Read::kUnit, units += Read::kUnitBytes) {
      Vec own[Read::kUnit][2];
      reader.load(units, own);
      for (auto& row : own)
        for (Vec half : row) {
          store(to, half);
          to += kLanes;
        }
    }
  });
}

// Returns the number whose multiples the columns of a packed weight are padded to.
RAYLENS_EXPORT int64_t raylens_panel() { return kPanel; }

// Returns the bytes of the panels.
RAYLENS_EXPORT int64_t raylens_packed_bytes(const PackedWeight& weight) {
  return with_reader(weight, [&](auto* reader) {
    return num_panels(weight.rows_out) * std::remove_pointer_t<decltype(reader)>::panel_bytes(weight);
  });
}

// Numbers as they come from a file, row by row. Mirrors `_Numbers` in packed_weight.py.
struct Numbers {
  const void* numbers;          // (rows, num_k), in the form's `Number`
  const float *scales, *zeros;  // (rows, groups) each, or null
  int64_t first_row, rows;      // the rows of the weight that these are; `first_row` is a multiple of kPanel
};

template <class Read>
void pack_panel(const PackedWeight& weight, int64_t panel, const Numbers& from, char* to) {
  typedef typename Read::Stored Stored;
  constexpr int64_t kBlock = 512;  // each row's numbers of a block are consecutive, and the units stay in the L1 cache
  int64_t columns = std::min<int64_t>(kPanel, from.first_row + from.rows - panel * kPanel), num_k = weight.num_k;
  int64_t first = panel * kPanel - from.first_row,
          groups = weight.group ? (num_k + weight.group - 1) / weight.group : 0;
  auto* numbers = static_cast<const typename Stored::Number*>(from.numbers);
  for (int64_t group = 0; group < groups; group++) {
    auto* header = reinterpret_cast<float*>(to + Read::place(weight, group * weight.group) - Read::kHeaderBytes);
    for (int64_t c = 0; c < columns; c++) {
      header[c] = from.scales[(first + c) * groups + group];
      if (Read::kHeader > 1) header[kPanel + c] = from.zeros[(first + c) * groups + group];
    }
  }
  for (int64_t block = 0, count; block < num_k; block += count) {
    count = std::min({kBlock, num_k - block, groups > 0 ? weight.group - block % weight.group : num_k});
    char* units = to + Read::place(weight, block);
    for (int64_t c = 0; c < columns; c++) {
      auto* own = numbers + (first + c) * num_k + block;
      for (int64_t k = 0; k < count; k++)
        Stored::put(own[k], k % Read::kUnit, static_cast<int>(c), units + k / Read::kUnit * Read::kUnitBytes);
    }
  }
}

// Packs rows of a weight, whose numbers its form can hold.
RAYLENS_EXPORT void raylens_pack(const PackedWeight& weight, const Numbers& from, int threads) {
  int64_t start = from.first_row / kPanel, count = num_panels(from.rows);
  with_reader(weight, [&](auto* reader) {
    typedef std::remove_pointer_t<decltype(reader)> Read;
    pool().run(threads, static_cast<int>(count), [&](int i) {
      char* to = const_cast<char*>(weight.panels) + (start + i) * Read::panel_bytes(weight);
      pack_panel<Read>(weight, start + i, from, to);
    });
  });
}

// Writes scale * row `ids[i]` of the weight to row i of `to`, (count, num_k).
inline void unpack_rows(const PackedWeight& weight, const int64_t* ids, int64_t count, float scale, float* to,
                        int threads) {
  with_reader(weight, [&](auto* reader) {
    typedef std::remove_pointer_t<decltype(reader)> Read;
    pool().run(count > 4 ? threads : 1, static_cast<int>(count), [&](int i) {
      const char* panel = weight.panels + ids[i] / kPanel * Read::panel_bytes(weight);
      int64_t column = ids[i] % kPanel;
      float* row = to + i * weight.num_k;
      Read::each_part(weight, panel, 0, weight.num_k, [&](const Read& own, const char* units, int64_t, int num_k) {
        for (int done = 0; done < num_k; done += Read::kUnit, units += Read::kUnitBytes) {
          Vec unit[Read::kUnit][2];
          own.load(units, unit);
          for (auto& both : unit) *row++ = both[column / kLanes][column % kLanes] * scale;
        }
      });
    });
  });
}

RAYLENS_EXPORT void raylens_rows(const PackedWeight& weight, const int64_t* ids, int64_t count, float scale, float* to,
                                 int threads) {
  unpack_rows(weight, ids, count, scale, to, threads);
}
