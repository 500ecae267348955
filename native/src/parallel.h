// Parallel loops on the thread pool of XLA.
//
// The caller works too, and waits only for items that another thread has started, so that a handler
// that runs on the pool itself cannot deadlock.
#pragma once
#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <new>

namespace jaxmha {

// The threads, as kernels see them.
struct Pool {
  virtual long threads() = 0;
  virtual void spawn(std::function<void()> task) = 0;
  virtual ~Pool() = default;
};

struct Progress {
  std::atomic<long> next{0}, done{0};
  std::atomic<bool> failed{false};
  std::mutex mutex;
  std::condition_variable changed;
};

// Calls body(item) for every item, in any order.
//
// Throws std::bad_alloc where an item did.
void parallel(Pool& pool, long items, const std::function<void(long)>& body);

}  // namespace jaxmha
