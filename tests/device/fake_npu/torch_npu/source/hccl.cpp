// Collectives with HCCL's rules, carried by gloo over the same memory.
#include "state.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace fake_npu {

namespace {

using at::Tensor;
using c10d::Work;
using Tensors = std::vector<Tensor>;
using Done = c10::intrusive_ptr<Work>;

Tensors hosts(const Tensors& given) {
  Tensors made;
  for (auto& one : given) made.push_back(as_cpu(one));
  return made;
}

std::vector<Tensors> hosts(const std::vector<Tensors>& given) {
  std::vector<Tensors> made;
  for (auto& one : given) made.push_back(hosts(one));
  return made;
}

void check(const char* what, const Tensors& given, bool reduces = false) {
  std::lock_guard<std::recursive_mutex> held(state().mutex);
  std::string name = std::string("HCCL ") + what;
  state().counts.launches += 1;
  for (auto& one : given) {
    auto dtype = one.scalar_type();
    if (one.device().type() != NPU) refuse(name + " of a tensor on " + one.device().str());
    if (!one.is_contiguous()) refuse(name + " of a tensor that is not contiguous");
    if (state().refused_dtypes.count(dtype) || (reduces && !state().reducible_dtypes.count(dtype)))
      refuse(name + " of " + c10::toString(dtype));
    state().counts.sent += one.numel() * one.element_size();
  }
}

void check(const char* what, const std::vector<Tensors>& given, bool reduces = false) {
  for (auto& one : given) check(what, one, reduces);
}

struct Hccl final : c10d::Backend {
  explicit Hccl(c10::intrusive_ptr<c10d::Backend> carrier)
      : Backend(carrier->getRank(), carrier->getSize()), carrier(std::move(carrier)) {}
  c10::intrusive_ptr<c10d::Backend> carrier;

  const std::string getBackendName() const override { return "hccl"; }
  void setSequenceNumberForGroup() override { carrier->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return carrier->getSequenceNumberForGroup(); }
  void setTimeout(std::chrono::milliseconds timeout) override { carrier->setTimeout(timeout); }
  void abort() override { carrier->abort(); }
  void shutdown() override { carrier->shutdown(); }

  Done broadcast(Tensors& tensors, const c10d::BroadcastOptions& how) override {
    check("broadcast", tensors);
    auto own = hosts(tensors);
    return carrier->broadcast(own, how);
  }
  Done allreduce(Tensors& tensors, const c10d::AllreduceOptions& how) override {
    check("all-reduce", tensors, true);
    auto own = hosts(tensors);
    return carrier->allreduce(own, how);
  }
  Done allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& how) override {
    check("all-reduce", tensors, true);
    auto own = hosts(tensors);
    return carrier->allreduce_coalesced(own, how);
  }
  Done reduce(Tensors& tensors, const c10d::ReduceOptions& how) override {
    check("reduce", tensors, true);
    auto own = hosts(tensors);
    return carrier->reduce(own, how);
  }
  Done allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& how) override {
    check("all-gather", outputs);
    check("all-gather", inputs);
    auto to = hosts(outputs);
    auto from = hosts(inputs);
    return carrier->allgather(to, from, how);
  }
  Done _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& how) override {
    check("all-gather", Tensors{output, input});
    auto to = as_cpu(output), from = as_cpu(input);
    return carrier->_allgather_base(to, from, how);
  }
  Done allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& how) override {
    check("all-gather", outputs);
    auto to = hosts(outputs), from = hosts(inputs);
    return carrier->allgather_into_tensor_coalesced(to, from, how);
  }
  Done gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& how) override {
    check("gather", inputs);
    auto to = hosts(outputs);
    auto from = hosts(inputs);
    return carrier->gather(to, from, how);
  }
  Done scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& how) override {
    check("scatter", outputs);
    auto to = hosts(outputs);
    auto from = hosts(inputs);
    return carrier->scatter(to, from, how);
  }
  Done reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& how) override {
    check("reduce-scatter", outputs, true);
    check("reduce-scatter", inputs, true);
    auto to = hosts(outputs);
    auto from = hosts(inputs);
    return carrier->reduce_scatter(to, from, how);
  }
  Done _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& how) override {
    check("reduce-scatter", Tensors{output, input}, true);
    auto to = as_cpu(output), from = as_cpu(input);
    return carrier->_reduce_scatter_base(to, from, how);
  }
  Done alltoall_base(
      Tensor& output, Tensor& input, std::vector<int64_t>& out, std::vector<int64_t>& in,
      const c10d::AllToAllOptions& how) override {
    check("all-to-all", Tensors{output, input});
    auto to = as_cpu(output), from = as_cpu(input);
    return carrier->alltoall_base(to, from, out, in, how);
  }
  Done send(Tensors& tensors, int to, int tag) override {
    check("send", tensors);
    auto own = hosts(tensors);
    return carrier->send(own, to, tag);
  }
  Done recv(Tensors& tensors, int from, int tag) override {
    check("receive", tensors);
    auto own = hosts(tensors);
    return carrier->recv(own, from, tag);
  }
  Done barrier(const c10d::BarrierOptions& how) override {
    wait("a barrier");
    return carrier->barrier(how);
  }
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> hccl_over(c10::intrusive_ptr<c10d::Backend> carrier) {
  return c10::make_intrusive<Hccl>(std::move(carrier));
}

}  // namespace fake_npu
