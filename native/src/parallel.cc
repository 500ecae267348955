#include "parallel.h"

#include "pause.h"

namespace jaxmha {
namespace {

constexpr int SPINS = 2000;  // about 20 us, less than a sleep costs

// `body` is only read while items are left: the caller, whose it is, waits for them.
void work(Progress& progress, long items, const std::function<void(long)>* body) {
  for (;;) {
    const long item = progress.next.fetch_add(1, std::memory_order_relaxed);
    if (item >= items) return;
    try {
      (*body)(item);
    } catch (const std::bad_alloc&) {
      progress.failed = true;
    }
    if (progress.done.fetch_add(1, std::memory_order_acq_rel) + 1 == items) {
      const std::lock_guard<std::mutex> lock(progress.mutex);
      progress.changed.notify_all();
    }
  }
}

}  // namespace

void parallel(Pool& pool, long items, const std::function<void(long)>& body) {
  const long helpers = std::min(pool.threads(), items) - 1;
  if (helpers <= 0) {
    for (long item = 0; item < items; item++) body(item);
    return;
  }
  const auto progress = std::make_shared<Progress>();
  const auto* own = &body;
  try {
    for (long i = 0; i < helpers; i++) pool.spawn([=] { work(*progress, items, own); });
  } catch (const std::bad_alloc&) {  // fewer help
  }
  work(*progress, items, own);
  const auto finished = [&] { return progress->done.load(std::memory_order_acquire) >= items; };
  for (int spin = 0; spin < SPINS && !finished(); spin++) pause();
  if (!finished()) {
    std::unique_lock<std::mutex> lock(progress->mutex);
    progress->changed.wait(lock, finished);
  }
  if (progress->failed) throw std::bad_alloc();
}

}  // namespace jaxmha
