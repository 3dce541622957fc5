// Moves tokens of a whole pool in place, as one operation of XLA for the CPU: JAX's foreign function interface.

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "copy_rows.h"
#include "pool_arrays.h"

namespace {

namespace ffi = xla::ffi;
using vtoken::Invalid;

constexpr int64_t kShare = 1 << 18;  // bytes to move that another thread is worth

// Arrays are taken by whoever is free, the caller among them. The caller then waits only for arrays that other threads
// are at work on, never for a thread of the pool to come free: all of them may be waiting like it.
class Work {
 public:
  Work(std::vector<vtoken::Plane> planes, vtoken::Moves moves) : planes_(std::move(planes)), moves_(moves) {}

  void Run() {
    for (size_t i = next_++; i < planes_.size(); i = next_++) {
      vtoken::CopyRows(planes_[i], moves_);
      const std::lock_guard<std::mutex> lock(mutex_);
      if (++done_ == planes_.size()) all_done_.notify_all();
    }
  }

  void Wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    all_done_.wait(lock, [&] { return done_ == planes_.size(); });
  }

 private:
  const std::vector<vtoken::Plane> planes_;
  const vtoken::Moves moves_;
  std::atomic<size_t> next_{0};
  size_t done_ = 0;
  std::mutex mutex_;
  std::condition_variable all_done_;
};

// src, dst: int32[n]; count: int32[], how many of them are moves; then the arrays, each given and taken in place.
ffi::Error MoveRows(ffi::ThreadPool pool, ffi::Buffer<ffi::S32> src, ffi::Buffer<ffi::S32> dst,
                    ffi::Buffer<ffi::S32> count, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  const vtoken::Moves moves{src.typed_data(), dst.typed_data(), *count.typed_data()};
  if (moves.count < 0 || moves.count > static_cast<int64_t>(std::min(src.element_count(), dst.element_count()))) {
    return Invalid("count=" + std::to_string(moves.count) + " is no number of the slots that are given");
  }
  vtoken::Pool taken;
  ffi::Error refused = vtoken::TakePool(args, rets, &taken);
  if (refused.failure()) return refused;
  const int64_t outside = vtoken::FirstOutside(moves, taken.num_slots);
  if (outside >= 0) {
    return Invalid("move " + std::to_string(outside) + " from slot " + std::to_string(moves.src[outside]) + " to " +
                   std::to_string(moves.dst[outside]) + " leaves the " + std::to_string(taken.num_slots) + " slots");
  }
  const int64_t num_threads = std::min(moves.count * taken.token_bytes / kShare, pool.num_threads());
  const auto work = std::make_shared<Work>(std::move(taken.planes), moves);
  for (int64_t i = 1; i < num_threads; ++i) pool.Schedule([work] { work->Run(); });
  work->Run();
  work->Wait();
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(vtoken_move_rows, MoveRows,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .RemainingArgs()
                                  .RemainingRets());
