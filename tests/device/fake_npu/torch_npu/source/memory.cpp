// Device and pinned memory, and tensors that are seen from the other side without a copy.
#include "state.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <cstdlib>
#include <cstring>

namespace fake_npu {

State& state() {
  static State* held = new State();
  return *held;
}

void deliver() {
  for (auto& [host, bytes] : state().coming) host.copy_(bytes);
  state().coming.clear();
}

void wait(const std::string& why) {
  std::unique_lock<std::recursive_mutex> held(state().mutex);
  if (state().capturing) refuse(why + " makes the host wait inside a captured graph");
  state().counts.syncs += 1;
  state().waits[why] += 1;
  deliver();
  auto listener = state().listener;
  held.unlock();
  if (listener) listener(why);
}

void refuse(const std::string& what) {
  state().refusals.push_back(what);
  throw std::runtime_error("the NPU refuses this: " + what);
}

namespace {

void count(int64_t bytes) {
  auto& counts = state().counts;
  counts.allocated += bytes;
  counts.most = std::max(counts.most, counts.allocated);
}

void release(void* context) {
  auto* memory = static_cast<Memory*>(context);
  std::lock_guard<std::recursive_mutex> held(state().mutex);
  count(-static_cast<int64_t>(memory->nbytes));
  if (!memory->kept) std::free(memory->data);
  delete memory;
}

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t nbytes) override {
    void* data = nullptr;
    auto device = current_device();
    if (nbytes && posix_memalign(&data, 512, nbytes)) throw std::bad_alloc();
    if (nbytes) std::memset(data, 0x7f, nbytes);  // what was never written must not look like zeros
    std::lock_guard<std::recursive_mutex> held(state().mutex);
    count(nbytes);
    return {data, new Memory{data, nbytes, device, {}}, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t nbytes) const override { std::memcpy(to, from, nbytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    c10::CachingDeviceAllocator::DeviceStats found;
    auto& counts = state().counts;
    for (auto* one : {&found.allocated_bytes[0], &found.reserved_bytes[0], &found.active_bytes[0]}) {
      one->current = counts.allocated;
      one->peak = counts.most;
    }
    return found;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override { state().counts.most = state().counts.allocated; }
};

DeviceMemory device_memory;
REGISTER_ALLOCATOR(NPU, &device_memory);

}  // namespace

c10::Allocator* device_allocator() { return &device_memory; }

Memory* memory_of(const at::Tensor& tensor) {
  auto* found = static_cast<Memory*>(tensor.storage().data_ptr().get_context());
  TORCH_CHECK(found || !tensor.storage().nbytes(), "device memory that nobody allocated");
  return found;
}

namespace {

c10::DataPtr borrowed(const c10::Storage& storage) {
  auto* kept = new c10::Storage(storage);
  return {kept->mutable_data(), kept, [](void* held) { delete static_cast<c10::Storage*>(held); }, c10::kCPU};
}

at::Tensor tensor_over(c10::Storage storage, c10::DispatchKey key, const at::Tensor& like) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return made;
}

}  // namespace

at::Tensor as_cpu(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.device().type() != NPU) return tensor;
  auto& storage = tensor.storage();
  c10::Storage host(
      c10::Storage::use_byte_size_t(), storage.nbytes(), borrowed(storage), c10::GetCPUAllocator(), true);
  return tensor_over(std::move(host), c10::DispatchKey::CPU, tensor);
}

at::Tensor as_npu(const at::Tensor& tensor, c10::Device device) {
  if (!tensor.defined() || tensor.device().type() == NPU) return tensor;
  auto& storage = tensor.storage();
  auto nbytes = storage.nbytes();
  std::lock_guard<std::recursive_mutex> held(state().mutex);
  count(nbytes);
  auto* memory = new Memory{const_cast<void*>(storage.data()), nbytes, device, storage};
  c10::DataPtr pointer(memory->data, memory, &release, device);
  c10::Storage made(c10::Storage::use_byte_size_t(), nbytes, std::move(pointer), &device_memory, true);
  return tensor_over(std::move(made), c10::DispatchKey::PrivateUse1, tensor);
}

}  // namespace fake_npu
