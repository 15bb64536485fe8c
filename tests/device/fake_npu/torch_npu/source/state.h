// What the parts of the stand-in share: counters, the rules it enforces, memory it knows, the graph being captured.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>

#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace fake_npu {

constexpr auto NPU = c10::DeviceType::PrivateUse1;
constexpr int64_t BASE_FORMAT = 2;  // ACL_FORMAT_ND: what torch calls strided

// A block of device memory; torch's storages hold it as their context.
struct Memory {
  void* data;
  size_t nbytes;
  c10::Device device;
  c10::Storage kept;  // of a result that the host's kernel allocated
  int64_t format = BASE_FORMAT;
};

struct Counts {
  int64_t syncs = 0, launches = 0, replays = 0, to_device = 0, to_host = 0, sent = 0, allocated = 0, most = 0;
};

// An operation of a captured graph: computed again at every replay, into the same memory.
struct Step {
  c10::OperatorHandle op;
  std::vector<c10::IValue> inputs;
  std::vector<at::Tensor> outputs;
  bool is_updatable = false;
};

struct Graph {
  std::vector<Step> steps;
  bool has_updates = false;  // captured with auto_dispatch_capture
};

struct State {
  std::recursive_mutex mutex;
  Counts counts;
  std::map<std::string, int64_t> waits;  // why the host waited, and how often
  std::vector<std::string> refusals;
  std::set<std::string> waiting;  // operators whose result the host must see
  std::map<std::string, std::set<at::ScalarType>> narrow;  // operators that take few dtypes
  std::set<std::string> updatable;  // operators whose host arguments a captured graph can be given anew
  std::set<at::ScalarType> refused_dtypes, reducible_dtypes;
  std::vector<std::pair<at::Tensor, at::Tensor>> coming;  // (host memory, bytes) of copies that nobody waited for yet
  std::function<void(const std::string&)> listener;  // hears of every wait
  Graph* capturing = nullptr;
};

State& state();

// The host waits until the device has done all it was asked; inside a captured graph that is an error.
void wait(const std::string& why);
// What nobody waited for arrives.
void deliver();
[[noreturn]] void refuse(const std::string& what);

c10::Allocator* device_allocator();
bool is_pinned(const void* data);
Memory* memory_of(const at::Tensor& tensor);
void check_dtype(const std::string& op, const at::Tensor& tensor);

at::Tensor as_cpu(const at::Tensor& tensor);
at::Tensor as_npu(const at::Tensor& tensor, c10::Device device);
c10::Device current_device();
int device_count();
at::Generator default_generator();
std::optional<at::Generator> host_generator(const std::optional<at::Generator>& given);

void replay(Graph& graph);

}  // namespace fake_npu
