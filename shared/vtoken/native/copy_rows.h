// Copies rows of arrays in place. Both executors' host moves are made of it; C++17, no library beyond its own.
//
// Compilers' loops and a memcpy of each row take two to four times as long as one long copy of as many bytes. Two
// things make rows as fast: a destination is written past the cache, so that its lines are not read first, and a source
// is asked for before its turn, since each row lies elsewhere.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace vtoken {

constexpr int64_t kLine = 64;          // bytes of a cache line
constexpr int64_t kAhead = 2;          // rows between a row's request and its turn
constexpr int64_t kPrefetched = 4096;  // bytes of a row that are asked for; longer runs the hardware sees by itself

// Sources and destinations are disjoint (INV-5), so that any order will do.
struct Moves {
  const int32_t* src;
  const int32_t* dst;
  int64_t count;
};

// One array [num_slots, row_bytes].
struct Plane {
  char* data;
  int64_t row_bytes;
};

// Which move names a slot that is none of num_slots; -1 if none does.
inline int64_t FirstOutside(const Moves& moves, int64_t num_slots) {
  for (int64_t i = 0; i < moves.count; ++i) {
    if (std::min(moves.src[i], moves.dst[i]) < 0 || std::max(moves.src[i], moves.dst[i]) >= num_slots) return i;
  }
  return -1;
}

inline void Prefetch(const char* row, int64_t row_bytes) {
  for (int64_t at = 0; at < std::min(row_bytes, kPrefetched); at += kLine) __builtin_prefetch(row + at);
}

#if defined(__SSE2__)
// Whole lines alone are written past the cache.
inline bool Streams(const Plane& plane) {
  return plane.row_bytes % kLine == 0 && reinterpret_cast<uintptr_t>(plane.data) % kLine == 0;
}

inline void Stream(char* dst, const char* src, int64_t row_bytes) {
  for (int64_t at = 0; at < row_bytes; at += kLine) {
    const auto* from = reinterpret_cast<const __m128i*>(src + at);
    auto* to = reinterpret_cast<__m128i*>(dst + at);
    const __m128i line[] = {_mm_loadu_si128(from), _mm_loadu_si128(from + 1), _mm_loadu_si128(from + 2),
                            _mm_loadu_si128(from + 3)};
    for (int i = 0; i < 4; ++i) _mm_stream_si128(to + i, line[i]);
  }
}

inline void Fence() { _mm_sfence(); }  // another thread sees such stores only after it
#else
inline bool Streams(const Plane&) { return false; }
inline void Stream(char*, const char*, int64_t) {}
inline void Fence() {}
#endif

// The source may lie anywhere; after streamed rows comes a fence.
inline void CopyRow(char* dst, const char* src, int64_t row_bytes, bool streams) {
  if (streams) {
    Stream(dst, src, row_bytes);
  } else {
    std::memcpy(dst, src, static_cast<size_t>(row_bytes));
  }
}

inline void CopyRows(const Plane& plane, const Moves& moves) {
  const int64_t row_bytes = plane.row_bytes;
  const auto row = [&](int32_t slot) { return plane.data + slot * row_bytes; };
  const bool streams = Streams(plane);
  for (int64_t i = 0; i < moves.count; ++i) {
    if (i + kAhead < moves.count) Prefetch(row(moves.src[i + kAhead]), row_bytes);
    CopyRow(row(moves.dst[i]), row(moves.src[i]), row_bytes, streams);
  }
  if (streams) Fence();
}

}  // namespace vtoken
