// Helper threads for the parts of the caller's work.
//
// The caller takes parts, too, until none is left. A helper that the system does not schedule thus delays nothing: the
// caller waits only for parts that a helper has started.
#pragma once
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

class ThreadPool {
 public:
  // Runs part(i) for each i in [0, count), on the calling thread and up to `threads` - 1 others. A second caller at the
  // same time runs its parts alone.
  template <class Part>
  void run(int threads, int count, const Part& part) {
    std::unique_lock<std::mutex> only(caller_, std::try_to_lock);
    if (threads <= 1 || count <= 1 || !only.owns_lock() || !grow(threads - 1)) {
      for (int i = 0; i < count; i++) part(i);
      return;
    }
    part_ = [](const void* own, int i) { (*static_cast<const Part*>(own))(i); };
    own_ = &part;
    count_ = count;
    helpers_ = threads - 1;
    next_.store(0);
    state_.fetch_add(1);  // odd: open
    if (asleep_.load() > 0) {
      std::lock_guard<std::mutex> lock(sleep_);
      wake_.notify_all();
    }
    take_parts();
    state_.fetch_add(1);  // even: closed. A late helper either sees this, or `working_` counts it.
    while (working_.load() > 0) std::this_thread::yield();
  }

  // Runs action(part) for each part.
  template <class Part, class Action>
  void run(int threads, const std::vector<Part>& parts, const Action& action) {
    run(threads, static_cast<int>(parts.size()), [&](int i) { action(parts[i]); });
  }

 private:
  // The time that a helper polls for more work before it sleeps. Parts of a step are microseconds apart.
  static constexpr auto kPatience = std::chrono::microseconds(200);

  void take_parts() {
    for (int i; (i = next_.fetch_add(1)) < count_;) part_(own_, i);
  }

  bool grow(int wanted) {
    try {
      for (; size_ < wanted; size_++) std::thread(&ThreadPool::help, this, size_).detach();
    } catch (const std::system_error&) {
    }
    return size_ > 0;
  }

  void help(int index) {
    for (unsigned seen = 0;;) {
      seen = next_state(seen);
      working_.fetch_add(1);
      if (state_.load() == seen && index < helpers_) take_parts();
      working_.fetch_sub(1);
    }
  }

  // Waits for work opened after the state `seen`, and returns the new state.
  unsigned next_state(unsigned seen) {
    auto is_new = [&](unsigned state) { return state % 2 == 1 && state != seen; };
    auto until = std::chrono::steady_clock::now() + kPatience;
    do {
      for (int i = 0; i < 64; i++) {
        unsigned state = state_.load(std::memory_order_acquire);
        if (is_new(state)) return state;
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
      }
    } while (std::chrono::steady_clock::now() < until);
    unsigned state;
    std::unique_lock<std::mutex> lock(sleep_);
    asleep_.fetch_add(1);
    wake_.wait(lock, [&] { return is_new(state = state_.load()); });
    asleep_.fetch_sub(1);
    return state;
  }

  std::mutex caller_, sleep_;
  std::condition_variable wake_;
  std::atomic<unsigned> state_{0};
  std::atomic<int> next_{0}, working_{0}, asleep_{0};
  int size_ = 0, count_ = 0, helpers_ = 0;
  void (*part_)(const void*, int) = nullptr;
  const void* own_ = nullptr;
};

// Never destroyed, because its helpers run until the process ends.
inline ThreadPool& pool() {
  static ThreadPool* the = new ThreadPool;
  return *the;
}

// Runs action(row) for each row in [0, count). Few rows are not worth another thread.
template <class Action>
void each_row(int64_t count, int threads, const Action& action) {
  constexpr int64_t kAtOnce = 8;
  int64_t parts = (count + kAtOnce - 1) / kAtOnce;
  pool().run(parts > 4 ? threads : 1, static_cast<int>(parts), [&](int i) {
    for (int64_t row = i * kAtOnce; row < std::min(count, (i + 1) * kAtOnce); row++) action(row);
  });
}
