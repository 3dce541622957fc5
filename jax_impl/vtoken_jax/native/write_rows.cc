// Writes tokens from the host's memory into a whole pool in place, as one operation of XLA for the CPU: JAX's foreign
// function interface. Bytes are read once and written once, past the cache; an argument of JAX would be copied first.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>

#include "copy_rows.h"
#include "pool_arrays.h"

namespace {

namespace ffi = xla::ffi;
using vtoken::Invalid;

// Told by the caller, which keeps the memory until the call is done.
struct Tokens {
  int64_t count;
  const int32_t* slots;
  const int32_t* positions;
  const char* kv;  // [count, token_bytes], at any address
};

// Token by token, so that the source is one long run.
void WriteTokens(const vtoken::Pool& pool, int32_t* positions, const Tokens& tokens) {
  const bool streams = std::all_of(pool.planes.begin(), pool.planes.end(), vtoken::Streams);
  const char* row = tokens.kv;
  for (int64_t i = 0; i < tokens.count; ++i) {
    const int64_t slot = tokens.slots[i];
    for (const vtoken::Plane& plane : pool.planes) {
      vtoken::CopyRow(plane.data + slot * plane.row_bytes, row, plane.row_bytes, streams);
      row += plane.row_bytes;
    }
    positions[slot] = tokens.positions[i];
  }
  if (streams) vtoken::Fence();
}

// told: uint32[8], the four words of Tokens; then the pool's arrays, planes in canonical order, positions last.
ffi::Error WriteRows(ffi::Buffer<ffi::U32> told, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  uint64_t words[4];
  if (told.size_bytes() != sizeof(words)) return Invalid("told has " + std::to_string(told.size_bytes()) + " bytes");
  std::memcpy(words, told.untyped_data(), sizeof(words));
  const Tokens tokens{static_cast<int64_t>(words[0]), reinterpret_cast<const int32_t*>(words[1]),
                      reinterpret_cast<const int32_t*>(words[2]), reinterpret_cast<const char*>(words[3])};
  vtoken::Pool pool;
  ffi::Error refused = vtoken::TakePool(args, rets, &pool);
  if (refused.failure()) return refused;
  for (int64_t i = 0; i < tokens.count; ++i) {
    if (tokens.slots[i] < 0 || tokens.slots[i] >= pool.num_slots) {
      return Invalid("token " + std::to_string(i) + " in slot " + std::to_string(tokens.slots[i]) + " leaves the " +
                     std::to_string(pool.num_slots) + " slots");
    }
  }
  auto* positions = reinterpret_cast<int32_t*>(pool.planes.back().data);
  pool.planes.pop_back();
  WriteTokens(pool, positions, tokens);
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(vtoken_write_rows, WriteRows,
                              ffi::Ffi::Bind().Arg<ffi::Buffer<ffi::U32>>().RemainingArgs().RemainingRets());
