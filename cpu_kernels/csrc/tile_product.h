// y = x w^T + bias by the processor's matrix unit (AMX), for weights whose numbers bfloat16 holds.
//
// x is split into numbers of bfloat16: into three, whose sum is exact, or into fewer, of which the last is rounded. The
// unit multiplies tiles of up to 16 rows of x, 32 k each, with tiles of 16 columns of the weight, 32 k each, and adds
// the products in float32 (Intel, "Architecture Instruction Set Extensions Programming Reference", TDPBF16PS). Only k
// determines the order of the sums, so that a row of y is bit-identical in any batch, but for a quantized weight: more
// than kExactRows rows of x that are rounded to one number each are multiplied with the weight's numbers times their
// scales, rounded, too. To scale the sums of each group of 64 instead takes a third longer.
#pragma once
#include <array>
#include <initializer_list>

#include "matrix_unit.h"
#include "product_output.h"

#if defined(__AMX_BF16__)
// Rows of x as tiles: in groups of up to kTileRows rows, of about equal size. A group has a tile for each step of
// kTileK and each part of the split.
struct RowTiles {
  int64_t num_rows, num_k, parts;
  int64_t count = (num_rows + kTileRows - 1) / kTileRows, size = count > 0 ? (num_rows + count - 1) / count : 0;
  int64_t steps = (num_k + kTileK - 1) / kTileK;

  int64_t tile_numbers() const { return size * kTileK; }
  int64_t group_numbers() const { return steps * parts * tile_numbers(); }
  int64_t numbers() const { return count * group_numbers(); }
  int64_t first(int64_t group) const { return std::min(group * size, num_rows); }

  // Writes the tiles of a group of `x`, (num_rows, num_k). Rows that a last group lacks stay as they are.
  void write(int64_t group, const float* x, uint16_t* tiles) const {
    uint16_t* to = tiles + group * group_numbers();
    for (int64_t row = first(group); row < first(group + 1); row++, to += kTileK)
      for (int64_t k = 0; k < num_k; k += kLanes) {
        auto mask = static_cast<__mmask16>(num_k - k >= kLanes ? 0xffff : (1 << (num_k - k)) - 1);
        uint16_t* tile = to + k / kTileK * parts * tile_numbers() + k % kTileK;
        split((UintVec)_mm512_maskz_loadu_ps(mask, x + row * num_k + k), tile);
        if (k + kLanes >= num_k && k % kTileK == 0)
          for (int64_t part = 0; part < parts; part++) put(tile + part * tile_numbers() + kLanes, UintVec{});
      }
  }

  // Writes the numbers of a row from `k` on, a multiple of kTileK.
  RAYLENS_INLINE void put(int64_t row, int64_t k, const Vec (&numbers)[2], uint16_t* tiles) const {
    int64_t group = row / size;
    uint16_t* tile =
        tiles + group * group_numbers() + k / kTileK * parts * tile_numbers() + (row - group * size) * kTileK;
    for (int half = 0; half < 2; half++) split((UintVec)numbers[half], tile + half * kLanes);
  }

 private:
  static void put(uint16_t* to, UintVec bits) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16((__m512i)(bits >> 16)));
  }

  void split(UintVec bits, uint16_t* to) const {
    for (int64_t part = 0; part < parts; part++, to += tile_numbers()) {
      // The last part is rounded to the nearest number. Of three, it has no more bits than bfloat16 holds.
      UintVec upper = part + 1 < parts ? bits & 0xffff0000u : rounded(bits);
      put(to, upper);
      bits = (UintVec)((Vec)bits - (Vec)upper);
    }
  }
};

// Returns whether products with a weight read x as tiles.
inline bool reads_tiles(const PackedWeight& weight) {
  bool is_whole = weight.group == 0 || weight.group % kTileK == 0 || weight.group >= weight.num_k;
  return is_whole && with_reader(weight, [](auto* reader) {
           return std::remove_pointer_t<decltype(reader)>::Stored::kIsInBfloat16;
         });
}

// The numbers of a group of a quantized weight, without their scales. `load` returns those of a unit, and `write`
// writes them as tiles hold them: for each pair of k, kPanel columns of two numbers of bfloat16.
template <class Read>
struct TileNumbers {
  Vec zero[2];

  explicit TileNumbers(const float* header) {
    for (int half = 0; half < 2; half++)
      zero[half] = Read::kHeader > 1 ? ::load(header + kPanel + half * kLanes) : Vec{};
  }

  RAYLENS_INLINE void load(const char* unit, Vec (&to)[Read::kUnit][2]) const {
    Read::Stored::load(unit, to);
    for (int k = 0; Read::kHeader > 1 && k < Read::kUnit; k++)
      for (int half = 0; half < 2; half++) to[k][half] -= zero[half];
  }

  RAYLENS_INLINE void write(const char* unit, char* to) const {
    Vec numbers[Read::kUnit][2];
    load(unit, numbers);
    for (int k = 0; k < Read::kUnit; k += 2)
      for (int half = 0; half < 2; half++) {
        UintVec pair = (UintVec)numbers[k][half] >> 16 | ((UintVec)numbers[k + 1][half] & 0xffff0000u);
        std::memcpy(to + (k + half) * sizeof pair, &pair, sizeof pair);
      }
  }
};

// bfloat16 of the whole numbers from -16 to 15, or twice of those from -8 to 7.
struct SmallNumbers {
  alignas(64) uint16_t bits[32] = {};

  explicit constexpr SmallNumbers(bool once) {
    for (int i = 0; i < 32; i++) {
      int number = once ? i - 16 : i % 16 - 8, size = number < 0 ? -number : number, power = 0;
      while (size >> (power + 1) > 0) power++;
      int own = (number < 0) << 15 | (127 + power) << 7 | (size << (7 - power) & 0x7f);
      bits[i] = static_cast<uint16_t>(size == 0 ? 0 : own);
    }
  }
};

// Four bits are looked up in a table: with zeros of the numbers from -16 to 15, else twice of those from -8 to 7, so
// that the bit above does not count.
template <int HEADER>
struct TileNumbers<Reader<Int4, HEADER>> {
  static constexpr bool kHasZeros = HEADER > 1;
  __m512i table, offset[2];
  Vec whole, zero[2];

  explicit TileNumbers(const float* header) {
    static constexpr SmallNumbers kNumbers(kHasZeros);
    table = _mm512_load_si512(kNumbers.bits);
    for (int i = 0; i < kLanes; i++) whole[i] = i - Int4::kOffset;
    for (int half = 0; kHasZeros && half < 2; half++) {
      zero[half] = ::load(header + kPanel + half * kLanes);
      IntVec own = __builtin_convertvector((16.f - Int4::kOffset) - zero[half], IntVec);
      offset[half] = (__m512i)(own | own << 16);
    }
  }

  // The places of a unit, the highest without its sign.
  static RAYLENS_INLINE UintVec places_of(const char* unit) { return load_as<UintVec>(unit) ^ 0x80000000u; }

  RAYLENS_INLINE void load(const char* unit, Vec (&to)[Int4::kUnit][2]) const {
    UintVec places = places_of(unit);
    for (int k = 0; k < Int4::kUnit; k++)
      for (int half = 0; half < 2; half++) {
        auto own = (__m512i)(places >> 4 * Int4::place(k, half));
        to[k][half] = (Vec)_mm512_permutexvar_ps(own, (__m512)whole);
        if (kHasZeros) to[k][half] -= zero[half];
      }
  }

  RAYLENS_INLINE void write(const char* unit, char* to) const {
    auto places = (__m512i)places_of(unit);
    for (int pair = 0; pair < 2; pair++)
      for (int half = 0; half < 2; half++) {
        __m512i own = _mm512_srli_epi16(places, 8 * pair + 4 * half);
        if (kHasZeros) own = _mm512_add_epi16(_mm512_and_si512(own, _mm512_set1_epi16(15)), offset[half]);
        _mm512_storeu_si512(to + (2 * pair + half) * sizeof own, _mm512_permutexvar_epi16(own, table));
      }
  }
};

// Those times their scales, rounded to bfloat16.
template <class Read>
struct RoundedNumbers {
  TileNumbers<Read> numbers;
  Vec scale[2];

  explicit RoundedNumbers(const float* header) : numbers(header), scale{::load(header), ::load(header + kLanes)} {}

  RAYLENS_INLINE void write(const char* unit, char* to) const {
    static constexpr std::array<uint16_t, 2 * kLanes> kPairs = [] {
      std::array<uint16_t, 2 * kLanes> places{};
      for (int i = 0; i < 2 * kLanes; i++) places[i] = static_cast<uint16_t>(i / 2 + i % 2 * kLanes);
      return places;
    }();
    Vec own[Read::kUnit][2];
    numbers.load(unit, own);
    for (int k = 0; k < Read::kUnit; k += 2)
      for (int half = 0; half < 2; half++) {
        Vec even = own[k][half] * scale[half], odd = own[k + 1][half] * scale[half];
        auto both = (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
        both = _mm512_permutexvar_epi16(_mm512_loadu_si512(kPairs.data()), both);
        _mm512_storeu_si512(to + (k + half) * sizeof both, both);
      }
  }
};

// A panel of a weight.
struct PanelOf {
  const PackedWeight* weight;
  int64_t index;

  int columns() const { return static_cast<int>(std::min<int64_t>(kPanel, weight->rows_out - index * kPanel)); }

  RAYLENS_INLINE void load_bias(const float* bias, Vec (&to)[2]) const {
    if (bias != nullptr) load_columns(bias + index * kPanel, columns(), to);
  }
};

// Products of all rows with panels of weights in one form.
struct TileProduct {
  const RowTiles& rows;
  const uint16_t* x;

  // Computes the panels panel_at(i) for i in [0, count), `TOGETHER` at a time. Calls finish(i, from, to, sums, size)
  // for the rows [from, to) of the panels from i on, with sums of (TOGETHER, size).
  template <class Read, int TOGETHER, class PanelAt, class Finish>
  void run(int64_t count, const PanelAt& panel_at, const Finish& finish) const {
    switch (rows.parts) {
      case 1:
        return run_blocks<Read, TOGETHER, 1>(count, panel_at, finish);
      case 2:
        return run_blocks<Read, TOGETHER, 2>(count, panel_at, finish);
      default:
        return run_blocks<Read, TOGETHER, 3>(count, panel_at, finish);
    }
  }

 private:
  static constexpr int64_t kPairBytes = 4 * kPanel;  // of the numbers of two k
  static constexpr int64_t kStepBytes = kTileK / 2 * kPairBytes;
  // The prefetch distances in a quantized weight, into the L1 and the L2 cache, in bytes.
  static constexpr int64_t kNear = 1024, kFar = 8192;
  static constexpr int64_t kExactRows = 64;
  // The L2 cache holds the tiles of some groups for kChunk, and the L1 cache the weights for kDepth.
  static constexpr int64_t kTilesBytes = 1200 * 1024, kChunk = 1536, kDepth = 256, kQuantizedDepth = 512;

  template <class Read, int TOGETHER, int PARTS, class PanelAt, class Finish>
  void run_blocks(int64_t count, const PanelAt& panel_at, const Finish& finish) const {
    if (Read::kHeader > 0 && rows.num_rows == 1) return run_row<Read, TOGETHER, PARTS>(count, panel_at, finish);
    TileRegisters registers(rows.size);
    static thread_local Scratch scratch;
    int64_t group_bytes = 2 * PARTS * rows.tile_numbers() * std::min(rows.steps, kChunk / kTileK);
    int64_t most = std::max<int64_t>(4, kTilesBytes / group_bytes), blocks = (rows.count + most - 1) / most;
    int64_t at_once = (rows.count + 2 * blocks - 1) / (2 * blocks) * 2;
    for (int64_t first = 0; first < rows.count; first += at_once) {
      int64_t end = std::min(first + at_once, rows.count), size = (end - first) * rows.size * kPanel;
      int64_t kept = rows.num_k > kChunk ? count : TOGETHER;  // panels
      float* sums = scratch.floats(kept * size);
      for (int64_t k = 0, next = 0; k < rows.num_k; k = next)
        for (int64_t i = 0; i < count; i++) {
          PanelOf panel = panel_at(i), later = panel_at(std::min(i + 1, count - 1));
          float* own = sums + i % kept * size;
          next = run_chunk<Read, PARTS>(panel, later, k, first, end, own);
          if (next == rows.num_k && i % TOGETHER == TOGETHER - 1)
            finish(i + 1 - TOGETHER, rows.first(first), rows.first(end), own - (TOGETHER - 1) * size, size);
        }
    }
  }

  // Some consecutive k of a panel that share their scales, or null.
  struct Depth {
    int64_t k, count;
    const char* units;
    const float* header;
    int steps = static_cast<int>((count + kTileK - 1) / kTileK);
  };

  // Returns those from `k` on.
  template <class Read>
  Depth depth_at(const PanelOf& panel, int64_t k) const {
    const PackedWeight& weight = *panel.weight;
    const char* own = weight.panels + panel.index * Read::panel_bytes(weight);
    const char* units = own + Read::place(weight, k);
    int64_t left = weight.num_k - k;
    if (Read::kHeader == 0) return {k, left < kTileK ? left : std::min(left / kTileK * kTileK, kDepth), units, nullptr};
    int64_t inside = k % weight.group;
    auto* header = reinterpret_cast<const float*>(own + Read::place(weight, k - inside) - Read::kHeaderBytes);
    return {k, std::min({kQuantizedDepth, weight.group - inside, left}), units, header};
  }

  // Returns the k from `k` on with their numbers as tiles hold them: in place, or in `room`.
  template <class Read, int PARTS>
  Depth numbers_at(const PanelOf& panel, int64_t k, char* room) const {
    if (Read::kHeader > 0 && PARTS == 1 && rows.num_rows > kExactRows) return rounded_at<Read>(panel, k, room);
    Depth depth = depth_at<Read>(panel, k);
    if (Read::kHeader == 0 && depth.count % kTileK == 0) return depth;
    expand<Read, false>(depth.units, TileNumbers<Read>(depth.header), depth.count, room);
    depth.units = room;
    return depth;
  }

  // Does the same for a quantized weight whose numbers are multiplied with their scales.
  template <class Read>
  Depth rounded_at(const PanelOf& panel, int64_t k, char* room) const {
    Depth whole{k, std::min(kDepth, rows.num_k - k), room, nullptr};
    for (int64_t done = 0; done < whole.count;) {
      Depth own = depth_at<Read>(panel, k + done);
      int64_t count = std::min(own.count, whole.count - done);
      expand<Read, false>(own.units, RoundedNumbers<Read>(own.header), count, room + done / 2 * kPairBytes);
      done += count;
    }
    return whole;
  }

  // Adds about kChunk of a panel, from `k` on, to the sums of the groups [first, last). Returns the end.
  template <class Read, int PARTS>
  int64_t run_chunk(const PanelOf& panel, const PanelOf& later, int64_t k, int64_t first, int64_t last,
                    float* sums) const {
    static thread_local Scratch expanded;
    char* room = reinterpret_cast<char*>(expanded.floats(kQuantizedDepth * kPanel / 2));
    if (Read::kHeader > 0 && rows.count == 1) return add_step_by_step<Read, PARTS>(panel, room, sums);
    const char* next_panel = depth_at<Read>(later, k).units;
    constexpr int64_t kLines = kTileK / Read::kUnit * Read::kUnitBytes / 64;
    int64_t end = std::min(k + kChunk, rows.num_k), pairs = (last - first + 1) / 2;
    while (k < end) {
      Depth depth = numbers_at<Read, PARTS>(panel, k, room);
      const uint16_t* tiles = x + k / kTileK * PARTS * rows.tile_numbers();
      k += depth.count;
      NextLines next{k < end ? depth_at<Read>(panel, k).units : next_panel, (kLines + pairs - 1) / pairs};
      for (int64_t group = first; group < last; group += 2) {
        const uint16_t* from = tiles + group * rows.group_numbers();
        float* to = sums + (group - first) * rows.size * kPanel;
        group + 1 < last ? add<PARTS, 2>(from, depth, next, to) : add<PARTS, 1>(from, depth, next, to);
      }
    }
    return k;
  }

  // For a single group of rows and a quantized weight: adds a whole panel and returns its end. The numbers of a step
  // are written kAhead steps before they are read, which otherwise would have to wait for them.
  template <class Read, int PARTS>
  int64_t add_step_by_step(const PanelOf& panel, char* room, float* sums) const {
    constexpr int64_t kAhead = 2;
    auto place = [&](int64_t k) { return room + k / kTileK % (kAhead + 1) * kStepBytes; };
    Depth source = depth_at<Read>(panel, 0);
    TileNumbers<Read> numbers(source.header);
    int64_t written = 0;
    auto write_step = [&] {
      if (written == source.k + source.count) {
        if (written == rows.num_k) return;
        source = depth_at<Read>(panel, written);
        numbers = TileNumbers<Read>(source.header);
      }
      int64_t inside = written - source.k, count = std::min(kTileK, source.count - inside);
      expand<Read, true>(source.units + inside / Read::kUnit * Read::kUnitBytes, numbers, count, place(written));
      written += count;
    };
    NextLines nothing;
    for (int64_t i = 0; i < kAhead; i++) write_step();
    const uint16_t* from = x;
    for (int64_t k = 0; k < rows.num_k;) {
      Depth depth = depth_at<Read>(panel, k);
      clear_sums<1>();
      for (int64_t end = depth.k + depth.count; k < end; k += kTileK, from += PARTS * rows.tile_numbers()) {
        write_step();
        multiply_tiles<PARTS, 1>(from, nullptr, rows.tile_numbers(), place(k), 1, nothing);
      }
      add_scaled<1>(depth, sums);
    }
    return rows.num_k;
  }

  // For a single row and a quantized weight, by the vector unit: its numbers would go to the matrix unit by the L1
  // cache.
  template <class Read, int TOGETHER, int PARTS, class PanelAt, class Finish>
  void run_row(int64_t count, const PanelAt& panel_at, const Finish& finish) const {
    static thread_local Scratch scratch;
    float* row = scratch.floats(rows.numbers());
    for (int64_t i = 0; i < rows.numbers(); i += kLanes)
      store(row + i,
            (Vec)(__builtin_convertvector(load_as<HalfVec>(reinterpret_cast<const char*>(x + i)), UintVec) << 16));
    alignas(64) float sums[TOGETHER * kPanel];
    for (int64_t i = 0; i < count; i++) {
      add_row<Read, PARTS>(panel_at(i), row, sums + i % TOGETHER * kPanel);
      if (i % TOGETHER == TOGETHER - 1) finish(i + 1 - TOGETHER, 0, 1, sums, kPanel);
    }
  }

  // Computes the sums of a panel in the matrix unit's order: of a step, the products of the even k, those of the odd
  // ones, then both are added. (The unit takes numbers below 2^-126 as zeros.)
  template <class Read, int PARTS>
  void add_row(const PanelOf& panel, const float* row, float* sums) const {
    for (int64_t k = 0, end = 0; k < rows.num_k; k = end) {
      Depth depth = depth_at<Read>(panel, k);
      TileNumbers<Read> numbers(depth.header);
      alignas(64) float products[kPanel];
      Vec product[2] = {};
      end = k + depth.count;
      for (const char* units = depth.units; k < end; k += kTileK, row += PARTS * kTileK) {
        Vec step[PARTS][2][2] = {};
        for (int64_t i = 0; i < std::min(kTileK, end - k); i += Read::kUnit, units += Read::kUnitBytes) {
          prefetch<Read, true>(units);
          Vec unit[Read::kUnit][2];
          numbers.load(units, unit);
          for (int j = 0; j < Read::kUnit; j++)
            for (int part = 0; part < PARTS; part++) {
              Vec own = all(row[part * kTileK + i + j]);
              for (int half = 0; half < 2; half++) step[part][j % 2][half] += own * unit[j][half];
            }
        }
        for (auto& part : step)
          for (int half = 0; half < 2; half++) product[half] += part[0][half] + part[1][half];
      }
      for (int half = 0; half < 2; half++) store(products + half * kLanes, product[half]);
      add_products(depth, products, 1, sums);
    }
  }

  // IS_IN_MEMORY: nothing brings the units into the L2 cache before.
  template <class Read, bool IS_IN_MEMORY>
  static RAYLENS_INLINE void prefetch(const char* units) {
    for (int byte = 0; byte < Read::kUnitBytes; byte += 64) {
      __builtin_prefetch(units + kNear + byte);
      if (IS_IN_MEMORY) __builtin_prefetch(units + kFar + byte, 0, 2);
    }
  }

  // Writes the numbers of `count` k as tiles hold them, followed by zeros for the rest of a step.
  template <class Read, bool IS_IN_MEMORY, class Numbers>
  static RAYLENS_INLINE void expand(const char* units, const Numbers& numbers, int64_t count, char* to) {
    int64_t bytes = count / 2 * kPairBytes;
    if constexpr (Read::kHeader == 0) {
      std::memcpy(to, units, bytes);
    } else {
      for (int64_t done = 0; done < count; done += Read::kUnit, units += Read::kUnitBytes) {
        prefetch<Read, IS_IN_MEMORY>(units);
        numbers.write(units, to + done / 2 * kPairBytes);
      }
    }
    std::memset(to + bytes, 0, (kTileK - 1 - (count - 1) % kTileK) / 2 * kPairBytes);
  }

  // Adds some k, as `numbers_at` returns them, of one or two groups to `sums`, in memory.
  template <int PARTS, int GROUPS>
  RAYLENS_INLINE void add(const uint16_t* from, const Depth& depth, NextLines& next, float* sums) const {
    bool is_scaled = depth.header != nullptr;
    is_scaled || depth.k == 0 ? clear_sums<GROUPS>() : load_sums<GROUPS>(sums, rows.size);
    multiply_tiles<PARTS, GROUPS>(from, from + rows.group_numbers(), rows.tile_numbers(), depth.units, depth.steps,
                                  next);
    is_scaled ? add_scaled<GROUPS>(depth, sums) : store_sums<GROUPS>(sums, rows.size);
  }

  // Adds the sums in the registers, times the scales, to `sums`.
  template <int GROUPS>
  RAYLENS_INLINE void add_scaled(const Depth& depth, float* sums) const {
    alignas(64) float products[2 * kTileRows * kPanel];
    store_sums<GROUPS>(products, rows.size);
    add_products(depth, products, GROUPS * rows.size, sums);
  }

  // Adds products, (count, kPanel), times the scales to `sums`.
  static RAYLENS_INLINE void add_products(const Depth& depth, const float* products, int64_t count, float* sums) {
    Vec scale[2] = {load(depth.header), load(depth.header + kLanes)};
    for (int64_t i = 0; i < count * kPanel; i += kPanel)
      for (int half = 0; half < 2; half++) {
        float* to = sums + i + half * kLanes;
        Vec before = depth.k == 0 ? Vec{} : load(to), product = load(products + i + half * kLanes);
        store(to, (Vec)_mm512_fmadd_ps((__m512)product, (__m512)scale[half], (__m512)before));
      }
  }
};

// Computes the panels [from, to) of a weight for all rows.
template <class Read>
void tile_product(const PackedWeight& weight, int64_t from, int64_t to, const RowTiles& rows, const uint16_t* x,
                  const Output& output) {
  auto panel_at = [&](int64_t i) { return PanelOf{&weight, from + i}; };
  auto finish = [&](int64_t i, int64_t row, int64_t end, const float* sums, int64_t) {
    PanelOf panel = panel_at(i);
    int columns = panel.columns();
    Vec bias[2] = {};
    panel.load_bias(output.bias, bias);
    for (; row < end; row++, sums += kPanel) {
      Vec own[2];
      for (int half = 0; half < 2; half++) own[half] = load(sums + half * kLanes) + bias[half];
      finish_columns(output, output.y + row * output.stride + panel.index * kPanel, columns, own);
    }
  };
  TileProduct{rows, x}.run<Read, 1>(to - from, panel_at, finish);
}

#else
inline bool reads_tiles(const PackedWeight&) { return false; }
#endif
