// Devices, streams, events, random numbers and pinned memory: what torch asks of any accelerator. Work is done at once,
// in the order it is asked for; only copies to the host arrive no earlier than somebody waits for them.
#include "state.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstdlib>

namespace fake_npu {

int device_count() {
  static const char* given = std::getenv("FAKE_NPU_DEVICES");
  return given ? std::atoi(given) : 2;
}

namespace {

thread_local c10::DeviceIndex current = 0;
thread_local std::map<c10::DeviceIndex, c10::StreamId> streams;
std::atomic<c10::StreamId> next_stream{1};


c10::Stream stream_of(c10::DeviceIndex index) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(NPU, index), streams.count(index) ? streams[index] : 0);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = NPU;
  c10::DeviceType type() const override { return NPU; }
  c10::Device exchangeDevice(c10::Device to) const override {
    auto before = getDevice();
    setDevice(to);
    return before;
  }
  c10::Device getDevice() const override { return {NPU, current}; }
  void setDevice(c10::Device to) const override {
    TORCH_CHECK(to.index() < device_count(), "there are ", device_count(), " NPUs; npu:", to.index(), " is none");
    current = to.index() < 0 ? current : to.index();
  }
  void uncheckedSetDevice(c10::Device to) const noexcept override { current = to.index(); }
  c10::Stream getStream(c10::Device of) const override { return stream_of(of.index() < 0 ? current : of.index()); }
  c10::Stream getDefaultStream(c10::Device of) const override {
    return c10::Stream(c10::Stream::UNSAFE, of, 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device of, bool) const override { return getNewStream(of, 0); }
  c10::Stream getNewStream(c10::Device of, int) const override {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(NPU, of.index() < 0 ? current : of.index()), next_stream++);
  }
  c10::Stream exchangeStream(c10::Stream to) const override {
    auto before = stream_of(to.device_index());
    streams[to.device_index()] = to.id();
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream) const override { return nullptr; }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new int64_t(0);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<int64_t*>(event);
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override {
    std::lock_guard<std::recursive_mutex> held(state().mutex);
    deliver();
    return true;
  }
  void synchronizeEvent(void* event) const override {
    if (event) wait("event.synchronize");
  }
  bool queryStream(const c10::Stream&) const override { return queryEvent(nullptr); }
  void synchronizeStream(const c10::Stream&) const override { wait("stream.synchronize"); }
  void synchronizeDevice(const c10::DeviceIndex) const override { wait("device.synchronize"); }
  bool isStreamCapturing(const c10::Stream&) const override { return state().capturing != nullptr; }
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override { return 0.0; }
  c10::DeviceIndex deviceCount() const noexcept override { return device_count(); }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// Draws the numbers of the host's generator, from a state of its own.
struct Random final : c10::GeneratorImpl {
  explicit Random(c10::DeviceIndex index, at::Generator kept = at::detail::createCPUGenerator())
      : GeneratorImpl(c10::Device(NPU, index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        host(std::move(kept)) {}
  at::Generator host;
  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.seed(); }
  void set_state(const c10::TensorImpl& to) override { host.unsafeGetGeneratorImpl()->set_state(to); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return host.unsafeGetGeneratorImpl()->get_state(); }
  c10::GeneratorImpl* clone_impl() const override { return new Random(device_.index(), host.clone()); }
};

const at::Generator& generator_of(c10::DeviceIndex index) {
  static std::map<c10::DeviceIndex, at::Generator> made;
  std::lock_guard<std::recursive_mutex> held(state().mutex);
  index = index < 0 ? current : index;
  if (!made.count(index)) made.emplace(index, at::make_generator<Random>(index));
  return made.at(index);
}

std::map<const char*, size_t> pinned;  // address and size

void unpin(void* data) {
  std::lock_guard<std::recursive_mutex> held(state().mutex);
  pinned.erase(static_cast<const char*>(data));
  std::free(data);
}

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    void* data = nullptr;
    if (posix_memalign(&data, 512, std::max<size_t>(nbytes, 1))) throw std::bad_alloc();
    std::lock_guard<std::recursive_mutex> held(state().mutex);
    pinned[static_cast<const char*>(data)] = std::max<size_t>(nbytes, 1);
    return {data, data, &unpin, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, size_t nbytes) const override { default_copy_data(to, from, nbytes); }
};

PinnedMemory pinned_memory;

struct Hooks final : at::PrivateUse1HooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return device_count(); }
  void setCurrentDevice(c10::DeviceIndex to) const override { Guard().setDevice({NPU, to}); }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex to) const override {
    return Guard().exchangeDevice({NPU, to}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex to) const override { return exchangeDevice(to); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override { return generator_of(index); }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<Random>(index < 0 ? current : index);
  }
  at::Device getDeviceFromPtr(void*) const override { return {NPU, current}; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    auto grown = device_allocator()->allocate(nbytes);
    if (storage.data()) std::memcpy(grown.get(), storage.data(), std::min(nbytes, storage.nbytes()));
    storage.set_data_ptr_noswap(std::move(grown));
    storage.set_nbytes(nbytes);
  }
};

[[maybe_unused]] const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

}  // namespace

at::Generator default_generator() { return generator_of(current); }

c10::Device current_device() { return {NPU, current}; }

bool is_pinned(const void* data) {
  std::lock_guard<std::recursive_mutex> held(state().mutex);
  auto after = pinned.upper_bound(static_cast<const char*>(data));
  if (after == pinned.begin()) return false;
  auto& [start, size] = *--after;
  return static_cast<const char*>(data) < start + size;
}

std::optional<at::Generator> host_generator(const std::optional<at::Generator>& given) {
  auto device = given.has_value() && given->defined() ? given->device() : current_device();
  if (device.type() != NPU) return given;
  auto& mine = given.has_value() && given->defined() ? *given : generator_of(device.index());
  return static_cast<Random*>(mine.unsafeGetGeneratorImpl())->host;
}

}  // namespace fake_npu
