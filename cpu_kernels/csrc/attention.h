// Attention of a step: generated tokens one by one, and the tokens of prompts by tiles of query rows. Also attention of
// pictures.
//
// The two have different orders of summation. Only a token's place in its sequence decides between them, not the number
// of tokens in the step. A token's result thus does not depend on the rest of the step.
#pragma once
#include "chunk_attention.h"
#include "decode_attention.h"
#include "rounded_attention.h"
#include "thread_pool.h"

// Returns the number of tiles that one thread takes at a time, of `tiles` that see the same keys and values.
inline int64_t tiles_at_once(const AttentionArguments& call, int64_t tiles, int threads) {
#if defined(__AMX_BF16__)
  if (call.row_parts == 1) return std::clamp<int64_t>(tiles / (4 * threads), 1, kTilesAtOnce);
#endif
  return 1;
}

// Attends with the tiles of the query rows [first_row, end_row), which tile_at(row) returns.
template <class TileAt>
void attend_tiles(int64_t first_row, int64_t end_row, const TileAt& tile_at, const AttentionArguments& call,
                  const SequenceRows& keys, int64_t key_dim, const SequenceRows& values, int64_t value_dim) {
#if defined(__AMX_BF16__)
  if (call.row_parts == 1) {
    QueryTile tiles[kTilesAtOnce];
    int64_t count = 0;
    for (int64_t row = first_row; row < end_row; row += kPanel) tiles[count++] = tile_at(row);
    return RoundedAttention(call, keys, key_dim, values, value_dim).run(tiles, count);
  }
#endif
  for (int64_t row = first_row; row < end_row; row += kPanel)
    attend_tile(tile_at(row), call, keys, key_dim, values, value_dim);
}

// Either tiles of the query rows [first_row, end_row), of the chunk's tokens from `token` on; `end` is then 0. Or the
// generated token `token`, which sees the positions up to `end`.
struct AttentionPart {
  int64_t chunk, token, kv_head, first_row, end_row, end;
};

// Attends with tiles of the query rows of one key head: rows of (tokens, group), over the chunk's prompt tokens.
inline void attend_chunk(const StepChunks& step, const LayerCache& cache, const AttentionArguments& call,
                         const AttentionPart& part) {
  int64_t before = step.ends[part.chunk] - step.lengths[part.chunk];
  auto sees = [&](int64_t index) {
    int64_t position = before + index;
    return std::pair(call.first_seen(position), position + 1);
  };
  int64_t length = step.num_of_prompt(part.chunk), group = call.heads / cache.kv_heads;
  auto tile_at = [&](int64_t row) {
    QueryTile tile = query_tile(part.token, length, part.kv_head, group, row, sees);
    if (const float* spans = step.spans_of(part.chunk))
      tile.add_spans(spans, step.ends[part.chunk], step.windows_cut_spans != 0);
    return tile;
  };
  const int32_t* blocks = step.blocks + step.first_blocks[part.chunk];
  auto rows = [&](const float* data, int64_t dim) {
    return SequenceRows{data + part.kv_head * cache.num_slots * padded(dim), padded(dim), blocks, cache.block_size};
  };
  attend_tiles(part.first_row, part.end_row, tile_at, call, rows(cache.keys, cache.key_dim), cache.key_dim,
               rows(cache.values, cache.value_dim), cache.value_dim);
}

// Attends with the step's tokens. `skips(first, end)` returns whether the outputs of the tokens [first, end), counted
// from the step's start, are not needed.
template <class Skips>
void attend(const StepChunks& step, const LayerCache& cache, const AttentionArguments& call, const Skips& skips,
            int threads) {
  static thread_local std::vector<AttentionPart> parts;
  parts.clear();
  int64_t group = call.heads / cache.kv_heads;
  for (int64_t chunk = 0, token = 0; chunk < step.num_chunks; token += step.lengths[chunk++]) {
    int64_t num_of_prompt = step.num_of_prompt(chunk), rows = num_of_prompt * group;
    int64_t rows_at_once = kPanel * tiles_at_once(call, rows / kPanel * cache.kv_heads, threads);
    // Tiles of one head are adjacent, so that its keys and values stay in a cache.
    for (int64_t head = 0; head < cache.kv_heads; head++)
      for (int64_t row = 0; row < rows; row += rows_at_once) {
        int64_t end_row = std::min(rows, row + rows_at_once), end = (end_row + group - 1) / group;
        if (!skips(token + row / group, token + end)) parts.push_back({chunk, token, head, row, end_row, 0});
      }
    for (int64_t i = num_of_prompt; i < step.lengths[chunk]; i++)
      for (int64_t head = 0; head < cache.kv_heads && !skips(token + i, token + i + 1); head++)
        parts.push_back({chunk, token + i, head, 0, 0, step.ends[chunk] - step.lengths[chunk] + i + 1});
  }
  pool().run(threads, parts, [&](const AttentionPart& part) {
    if (part.end > 0)
      attend_decode(step, cache, call, part.chunk, part.token, part.end, part.kv_head);
    else
      attend_chunk(step, cache, call, part);
  });
}

// Writes the step's keys and values into the cache, then attends with all its tokens.
RAYLENS_EXPORT void raylens_attend(const StepChunks& step, const LayerCache& cache, const AttentionArguments& call,
                                   int threads) {
  write_to_cache(cache, step, call.keys, call.values);
  attend(step, cache, call, [](int64_t, int64_t) { return false; }, threads);
}

// Mirrors `_Pictures` in attention.py. The pictures are concatenated; each patch sees all patches of its picture.
struct Pictures {
  const int32_t* starts;  // (count + 1,): the start of each picture's patches, and the end of the last one's
  int64_t count, kv_heads, key_dim, value_dim;
};

struct PicturePart {
  int64_t picture, kv_head, first_row, end_row;
};

RAYLENS_EXPORT void raylens_attend_pictures(const Pictures& pictures, const AttentionArguments& call, int threads) {
  static thread_local std::vector<PicturePart> parts;
  parts.clear();
  int64_t group = call.heads / pictures.kv_heads;
  int64_t at_once = kPanel * tiles_at_once(call, pictures.starts[pictures.count] * call.heads / kPanel, threads);
  for (int64_t picture = 0; picture < pictures.count; picture++)
    for (int64_t head = 0; head < pictures.kv_heads; head++) {
      int64_t rows = (pictures.starts[picture + 1] - pictures.starts[picture]) * group;
      for (int64_t row = 0; row < rows; row += at_once)
        parts.push_back({picture, head, row, std::min(rows, row + at_once)});
    }
  pool().run(threads, parts, [&](const PicturePart& part) {
    int64_t start = pictures.starts[part.picture], length = pictures.starts[part.picture + 1] - start;
    auto sees = [&](int64_t) { return std::pair<int64_t, int64_t>(0, length); };
    auto tile_at = [&](int64_t row) { return query_tile(start, length, part.kv_head, group, row, sees); };
    SequenceRows keys{call.keys.at(start, part.kv_head), call.keys.token_stride, nullptr, 0};
    SequenceRows values{call.values.at(start, part.kv_head), call.values.token_stride, nullptr, 0};
    attend_tiles(part.first_row, part.end_row, tile_at, call, keys, pictures.key_dim, values, pictures.value_dim);
  });
}
