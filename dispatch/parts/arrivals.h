// Arrivals: what a buffer is receiving.
#pragma once

#include <functional>
#include <utility>
#include <vector>

namespace qshard {

class QuantizedBuffer;

/// Receives into a buffer whose end no call tells of.
class Arrivals {
 public:
  using Arrival = std::function<void(QuantizedBuffer&)>;

  /// `arrival` waits for what is received, and puts it into the buffer. It does not keep the buffer
  /// alive.
  void expect(Arrival arrival) { expected_.push_back(std::move(arrival)); }
  /// Waits for all of them: a flush, or a read, comes next.
  void settle(QuantizedBuffer& buffer) {
    if (expected_.empty()) return;
    for (const Arrival& arrive : std::exchange(expected_, {})) arrive(buffer);
  }

 private:
  std::vector<Arrival> expected_;
};

}  // namespace qshard
