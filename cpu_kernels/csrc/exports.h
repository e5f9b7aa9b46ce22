// The functions that Python calls. Each library has them under the same names, for one kind of processor.
#pragma once
#include "attention.h"
#include "decoder.h"
#include "packed_product.h"
#include "picture_attention.h"
#include "sampler.h"

#define RAYLENS_EXPORT extern "C" __attribute__((visibility("default")))

// Returns the number whose multiples the columns of a packed weight are padded to.
RAYLENS_EXPORT int64_t raylens_panel() { return kPanel; }

// Returns the number whose multiples the rows of the cache are padded to.
RAYLENS_EXPORT int64_t raylens_lanes() { return kLanes; }

RAYLENS_EXPORT void raylens_pack(const float* weight, int64_t columns, int64_t num_k, int64_t is_bfloat16,
                                 void* panels) {
  if (is_bfloat16)
    pack<Bfloat16>(weight, columns, num_k, static_cast<uint16_t*>(panels));
  else
    pack<Float32>(weight, columns, num_k, static_cast<float*>(panels));
}

RAYLENS_EXPORT void raylens_product(const PackedWeight* weight, int64_t num_rows, const float* x, const float* bias,
                                    float* y, float* room, int64_t threads) {
  product(*weight, num_rows, x, bias, y, room, static_cast<int>(threads));
}

// Returns the number of rows that a product takes at a time.
RAYLENS_EXPORT int64_t raylens_rows_at_once() { return kRowsAtOnce; }

RAYLENS_EXPORT void raylens_mlp(const Mlp* mlp, int64_t num_rows, const float* x, float* y, float* room,
                                int64_t threads) {
  run_mlp(*mlp, num_rows, x, y, room, static_cast<int>(threads));
}

// Writes the step's keys and values into the cache, then attends with all its tokens.
RAYLENS_EXPORT void raylens_attend(const StepChunks* step, const LayerCache* cache, const AttentionArguments* call,
                                   int64_t threads) {
  write_to_cache(*cache, *step, call->keys, call->values);
  auto skips_none = [](int64_t, int64_t) { return false; };
  attend(*step, *cache, *call, skips_none, static_cast<int>(threads));
}

// Attends with all patches of all pictures.
RAYLENS_EXPORT void raylens_attend_pictures(const Pictures* pictures, const AttentionArguments* call, int64_t threads) {
  attend_pictures(*pictures, *call, static_cast<int>(threads));
}

// Runs a decoder over the step's tokens. Returns 0, and does nothing, if a position is beyond a rope's table.
RAYLENS_EXPORT int64_t raylens_decode(const Decoder* decoder, const StepChunks* chunks, const StepRows* step,
                                      int64_t threads) {
  DecoderStep run(*decoder, *chunks, *step, static_cast<int>(threads));
  if (!run.has_positions()) return 0;
  run.run();
  return 1;
}

// Chooses a token for each row of logits, or -1 if the highest logit is not finite.
RAYLENS_EXPORT void raylens_choose(float* logits, int64_t vocab, int64_t num_rows, const RowSettings* const* rows,
                                   int64_t* token_ids, int64_t threads) {
  choose_all(logits, vocab, num_rows, rows, token_ids, static_cast<int>(threads));
}
