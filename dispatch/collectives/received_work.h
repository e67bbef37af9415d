// ReceivedWork: an asynchronous receive into quantized tensors.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <functional>
#include <mutex>

namespace qshard {

/// A collective's work that calls `arrived` once, on the thread that first learns that it is done.
/// Everything else is the work's own.
class ReceivedWork final : public c10d::Work {
 public:
  using Ptr = c10::intrusive_ptr<c10d::Work>;

  ReceivedWork(Ptr work, std::function<void()> arrived, std::function<void(const Ptr&)> by_future);

  bool wait(std::chrono::milliseconds timeout) override;
  bool isCompleted() override;
  void synchronize() override;
  void blockCurrentStream() override;

  bool isSuccess() const override { return work_->isSuccess(); }
  std::exception_ptr exception() const override { return work_->exception(); }
  int sourceRank() const override { return work_->sourceRank(); }
  std::vector<at::Tensor> result() override { return work_->result(); }
  void abort() override { work_->abort(); }
  /// A caller that waits for the future alone does not call wait(): `by_future` is called, once,
  /// with the work to wait for.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override {
    return work_->getFutureResult();
  }
  float getDuration() const override { return work_->getDuration(); }
  uint64_t getSequencenumber() const override { return work_->getSequencenumber(); }

 private:
  Ptr work_;
  std::mutex arrived_mutex_;
  std::function<void()> arrived_;
  std::function<void(const Ptr&)> by_future_;

  void arrive();
};

}  // namespace qshard
