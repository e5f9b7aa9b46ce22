// Attention of a step: its decode chunks by one token each, its other chunks by tiles of query rows.
#pragma once
#include "chunk_attention.h"
#include "decode_attention.h"
#include "thread_pool.h"

struct AttentionPart {
  int64_t chunk, first_token, kv_head, first_row;
};

// Attends with the step's tokens. `skips(chunk, first, end)` tells whether nothing needs the output of the chunk's
// tokens [first, end), counted from the step's start.
template <class Skips>
void attend(const StepChunks& step, const LayerCache& cache, const AttentionArguments& call, const Skips& skips,
            int threads) {
  static thread_local std::vector<AttentionPart> parts;
  parts.clear();
  int64_t group = call.heads / cache.kv_heads;
  for (int64_t chunk = 0, token = 0; chunk < step.num_chunks; token += step.lengths[chunk++]) {
    int64_t rows = chunk < step.num_decodes ? 1 : step.lengths[chunk] * group;
    // Tiles of one head follow each other, so that its keys and values stay in a cache.
    for (int64_t head = 0; head < cache.kv_heads; head++)
      for (int64_t row = 0; row < rows; row += kPanel) {
        int64_t end = std::min<int64_t>(step.lengths[chunk], (row + kPanel + group - 1) / group);
        if (!skips(chunk, token + row / group, token + end)) parts.push_back({chunk, token, head, row});
      }
  }
  const AttentionPart* all_parts = parts.data();  // `parts` is another vector on each thread
  pool().run(threads, static_cast<int>(parts.size()), [&](int i) {
    const AttentionPart& part = all_parts[i];
    if (part.chunk < step.num_decodes)
      attend_decode(step, cache, call, part.chunk, part.kv_head);
    else
      attend_chunk(step, cache, call, part.chunk, part.first_token, part.kv_head, part.first_row);
  });
}
