// Moves tokens in all planes of a cache in host memory; ctypes calls it.

#include <cstdint>

#include "copy_rows.h"

// planes: [num_planes, num_slots, row_bytes], contiguous; src, dst: [count], disjoint.
// Returns which move leaves the slots, with nothing moved, or -1.
extern "C" int64_t vtoken_move_planes(char* planes, int64_t num_planes, int64_t num_slots, int64_t row_bytes,
                                      const int32_t* src, const int32_t* dst, int64_t count) {
  const vtoken::Moves moves{src, dst, count};
  const int64_t outside = vtoken::FirstOutside(moves, num_slots);
  for (int64_t i = 0; outside < 0 && i < num_planes; ++i) {
    vtoken::CopyRows({planes + i * num_slots * row_bytes, row_bytes}, moves);
  }
  return outside;
}
