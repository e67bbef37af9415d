#include "dispatch/collectives/received_work.h"

#include <utility>

namespace qshard {

ReceivedWork::ReceivedWork(Ptr work, std::function<void()> arrived,
                           std::function<void(const Ptr&)> by_future)
    : Work(-1, work->retrieveOpType()),
      work_(std::move(work)),
      arrived_(std::move(arrived)),
      by_future_(std::move(by_future)) {}

c10::intrusive_ptr<c10::ivalue::Future> ReceivedWork::getFuture() {
  auto future = work_->getFuture();
  std::function<void(const Ptr&)> by_future;
  {
    const std::lock_guard lock(arrived_mutex_);
    by_future.swap(by_future_);
  }
  if (by_future) by_future(work_);
  return future;
}

bool ReceivedWork::wait(std::chrono::milliseconds timeout) {
  const bool is_done = work_->wait(timeout);
  if (is_done) arrive();
  return is_done;
}

bool ReceivedWork::isCompleted() {
  const bool is_done = work_->isCompleted();
  if (is_done && !work_->exception()) arrive();
  return is_done;
}

void ReceivedWork::synchronize() {
  work_->synchronize();
  arrive();
}

void ReceivedWork::blockCurrentStream() {
  work_->blockCurrentStream();
  arrive();
}

void ReceivedWork::arrive() {
  std::function<void()> arrived;
  {
    const std::lock_guard lock(arrived_mutex_);
    arrived.swap(arrived_);
  }
  if (arrived) arrived();
}

}  // namespace qshard
