// Attention over concatenated pictures of any sizes: each patch sees all patches of its picture.
#pragma once
#include "chunk_attention.h"
#include "thread_pool.h"

// Mirrors `_Pictures` in attention.py.
struct Pictures {
  const int32_t* starts;  // (count + 1,): the start of each picture's patches, and the end of the last one's
  int64_t count, kv_heads, key_dim, value_dim;
};

struct PicturePart {
  int64_t picture, kv_head, first_row;
};

inline void attend_pictures(const Pictures& pictures, const AttentionArguments& call, int threads) {
  static thread_local std::vector<PicturePart> parts;
  parts.clear();
  int64_t group = call.heads / pictures.kv_heads;
  for (int64_t picture = 0; picture < pictures.count; picture++)
    for (int64_t head = 0; head < pictures.kv_heads; head++)
      for (int64_t row = 0; row < (pictures.starts[picture + 1] - pictures.starts[picture]) * group; row += kPanel)
        parts.push_back({picture, head, row});
  const PicturePart* all_parts = parts.data();  // `parts` is another vector on each thread
  pool().run(threads, static_cast<int>(parts.size()), [&](int i) {
    const PicturePart& part = all_parts[i];
    int64_t start = pictures.starts[part.picture], length = pictures.starts[part.picture + 1] - start;
    auto sees = [&](int64_t) { return std::pair<int64_t, int64_t>(0, length); };
    QueryTile tile = query_tile(start, length, part.kv_head, group, part.first_row, sees);
    SequenceRows keys{call.keys.at(start, part.kv_head), call.keys.token_stride, nullptr, 0};
    SequenceRows values{call.values.at(start, part.kv_head), call.values.token_stride, nullptr, 0};
    attend_tile(tile, call, keys, pictures.key_dim, values, pictures.value_dim);
  });
}
