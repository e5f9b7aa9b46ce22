// Attention of a step: generated tokens one by one, and the tokens of prompts by tiles of query rows.
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
  const AttentionPart* all_parts = parts.data();  // `parts` is another vector on each thread
  pool().run(threads, static_cast<int>(parts.size()), [&](int i) {
    const AttentionPart& part = all_parts[i];
    if (part.end > 0)
      attend_decode(step, cache, call, part.chunk, part.token, part.end, part.kv_head);
    else
      attend_chunk(step, cache, call, part.chunk, part.token, part.kv_head, part.first_row);
  });
}
