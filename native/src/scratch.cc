#include "scratch.h"

#include <cstdlib>
#include <iterator>
#include <map>
#include <mutex>
#include <new>

namespace jaxmha {
namespace {

struct Shelf {
  std::mutex mutex;
  std::multimap<size_t, float*> buffers;  // by size in floats
  size_t bytes = 0;
};

// Never destroyed: threads of the pool may outlive static objects.
Shelf& shelf() {
  static Shelf* const found = new Shelf;
  return *found;
}

// A kept buffer that is large enough, and not so large that a small call would keep much busy.
float* kept(size_t& floats) {
  Shelf& from = shelf();
  const std::lock_guard<std::mutex> lock(from.mutex);
  const auto found = from.buffers.lower_bound(floats);
  if (found == from.buffers.end() || found->first > 4 * floats) return nullptr;
  float* const data = found->second;
  floats = found->first;
  from.bytes -= floats * sizeof(float);
  from.buffers.erase(found);
  return data;
}

}  // namespace

Scratch::Scratch(size_t floats) : data_(nullptr), floats_(rounded(floats)) {
  if (floats_ == 0) return;
  data_ = kept(floats_);
  if (data_ == nullptr)
    data_ = static_cast<float*>(std::aligned_alloc(64, floats_ * sizeof(float)));
  if (data_ == nullptr) throw std::bad_alloc();
}

Scratch::~Scratch() {
  if (data_ == nullptr) return;
  Shelf& to = shelf();
  const size_t bytes = floats_ * sizeof(float);
  std::unique_lock<std::mutex> lock(to.mutex);
  while (!to.buffers.empty() && bytes <= KEPT && to.bytes + bytes > KEPT) {
    const auto least = to.buffers.begin();  // sizes of earlier programs
    to.bytes -= least->first * sizeof(float);
    std::free(least->second);
    to.buffers.erase(least);
  }
  if (bytes <= KEPT) try {
      to.buffers.emplace(floats_, data_);
      to.bytes += bytes;
      return;
    } catch (const std::bad_alloc&) {  // there is no memory to note it with
    }
  lock.unlock();
  std::free(data_);
}

}  // namespace jaxmha
