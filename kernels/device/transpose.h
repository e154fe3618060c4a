// The interface of the GPU kernel that copies a tensor into another memory order.
#pragma once

#include <cstdint>

namespace jitact::loops {

// Element (n, r, c) of `to` is element (n, c, r) of `from`; both are contiguous.
struct Transposition {
  int64_t batch, rows, columns;
  int bytes;  // of an element: 2, 4 or 8
  const void* from;
  void* to;
};

#ifdef JITACT_CUDA
// Whether the kernel supports it: it reads and writes 16-bit elements in pairs.
bool takes_transposition(const Transposition& t);
// Queues it on `stream` of the current device; returns null or CUDA's message.
const char* transpose(const Transposition& t, void* stream);
#endif

}  // namespace jitact::loops
