// Attention of a step: generated tokens one by one, and the tokens of prompts by tiles of query rows. Also attention of
// pictures.
//
// The two have different orders of summation. Only a token's place in its sequence decides between them, not the number
// of tokens in the step. A token's result thus does not depend on the rest of the step.
#pragma once
#include "chunk_attention.h"
#include "decode_attention.h"
#include "thread_pool.h"

// Either a tile of query rows from `first_row` on, of the chunk's tokens from `token` on; `end` is then 0. Or the
// generated token `token`, which sees the positions up to `end`.
struct AttentionPart {
  int64_t chunk, token, kv_head, first_row, end;
};

// Attends with the step's tokens. `skips(first, end)` returns whether the outputs of the tokens [first, end), counted
// from the step's start, are not needed.
template <class Skips>
void attend(const StepChunks& step, const LayerCache& cache, const AttentionArguments& call, const Skips& skips,
            int threads) {
  static thread_local std::vector<AttentionPart> parts;
  parts.clear();
  int64_t group = call.heads / cache.kv_heads;
  for (int64_t chunk = 0, token = 0; chunk < step.num_chunks; token += step.lengths[chunk++]) {
    int64_t num_of_prompt = step.num_of_prompt(chunk);
    // Tiles of one head are adjacent, so that its keys and values stay in a cache.
    for (int64_t head = 0; head < cache.kv_heads; head++)
      for (int64_t row = 0; row < num_of_prompt * group; row += kPanel) {
        int64_t end = std::min<int64_t>(num_of_prompt, (row + kPanel + group - 1) / group);
        if (!skips(token + row / group, token + end)) parts.push_back({chunk, token, head, row, 0});
      }
    for (int64_t i = num_of_prompt; i < step.lengths[chunk]; i++)
      for (int64_t head = 0; head < cache.kv_heads && !skips(token + i, token + i + 1); head++)
        parts.push_back({chunk, token + i, head, 0, step.ends[chunk] - step.lengths[chunk] + i + 1});
  }
  pool().run(threads, parts, [&](const AttentionPart& part) {
    if (part.end > 0)
      attend_decode(step, cache, call, part.chunk, part.token, part.end, part.kv_head);
    else
      attend_chunk(step, cache, call, part.chunk, part.token, part.kv_head, part.first_row);
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
  int64_t picture, kv_head, first_row;
};

RAYLENS_EXPORT void raylens_attend_pictures(const Pictures& pictures, const AttentionArguments& call, int threads) {
  static thread_local std::vector<PicturePart> parts;
  parts.clear();
  int64_t group = call.heads / pictures.kv_heads;
  for (int64_t picture = 0; picture < pictures.count; picture++)
    for (int64_t head = 0; head < pictures.kv_heads; head++)
      for (int64_t row = 0; row < (pictures.starts[picture + 1] - pictures.starts[picture]) * group; row += kPanel)
        parts.push_back({picture, head, row});
  pool().run(threads, parts, [&](const PicturePart& part) {
    int64_t start = pictures.starts[part.picture], length = pictures.starts[part.picture + 1] - start;
    auto sees = [&](int64_t) { return std::pair<int64_t, int64_t>(0, length); };
    QueryTile tile = query_tile(start, length, part.kv_head, group, part.first_row, sees);
    SequenceRows keys{call.keys.at(start, part.kv_head), call.keys.token_stride, nullptr, 0};
    SequenceRows values{call.values.at(start, part.kv_head), call.values.token_stride, nullptr, 0};
    attend_tile(tile, call, keys, pictures.key_dim, values, pictures.value_dim);
  });
}
