// Memory that a thread reuses in each call.
#pragma once
#include <cstddef>
#include <cstdlib>
#include <new>

class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  ~Scratch() { std::free(data_); }

  // Returns room for `size` floats, aligned to a cache line. Previous content is lost.
  float* floats(size_t size) {
    if (size > size_) {
      size_ = (size + size / 4 + 15) / 16 * 16;
      std::free(data_);
      data_ = static_cast<float*>(std::aligned_alloc(64, size_ * sizeof(float)));
      if (data_ == nullptr) throw std::bad_alloc();  // not caught: the process ends
    }
    return data_;
  }

 private:
  float* data_ = nullptr;
  size_t size_ = 0;
};
