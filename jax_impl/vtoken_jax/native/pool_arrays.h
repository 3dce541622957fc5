// What both operations on a pool begin with: its arrays as XLA hands them over, each given and taken in place.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "copy_rows.h"
#include "xla/ffi/api/ffi.h"

namespace vtoken {

namespace ffi = xla::ffi;

struct Pool {
  std::vector<Plane> planes;
  int64_t num_slots = 0;
  int64_t token_bytes = 0;  // of a row in all planes together
};

inline ffi::Error Invalid(const std::string& message) {
  return ffi::Error(ffi::ErrorCode::kInvalidArgument, message);
}

// Fills pool, or says which array is none of one pool's.
inline ffi::Error TakePool(const ffi::RemainingArgs& args, const ffi::RemainingRets& rets, Pool* pool) {
  for (size_t i = 0; i < rets.size(); ++i) {
    const std::string name = "array " + std::to_string(i);
    const auto given = args.get<ffi::AnyBuffer>(i);
    auto taken = rets.get<ffi::AnyBuffer>(i);
    if (given.has_error()) return given.error();
    if (taken.has_error()) return taken.error();
    auto* data = static_cast<char*>((*taken)->untyped_data());
    if (given->untyped_data() != data) return Invalid(name + " is not taken in place");
    if (given->dimensions().size() == 0) return Invalid(name + " has no slots");
    const int64_t num_slots = given->dimensions()[0];
    if (i && num_slots != pool->num_slots) return Invalid(name + " has another number of slots");
    pool->num_slots = num_slots;
    pool->planes.push_back({data, num_slots ? static_cast<int64_t>(given->size_bytes()) / num_slots : 0});
    pool->token_bytes += pool->planes.back().row_bytes;
  }
  return ffi::Error::Success();
}

}  // namespace vtoken
