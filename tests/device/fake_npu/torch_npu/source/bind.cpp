// What Python sees of the stand-in.
#include "state.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <deque>

namespace fake_npu {

c10::intrusive_ptr<c10d::Backend> hccl_over(c10::intrusive_ptr<c10d::Backend> carrier);
torch::CppFunction boxed(bool is_known);

namespace {

namespace py = pybind11;

py::dict counts() {
  auto& held = state().counts;
  py::dict found;
  found["syncs"] = held.syncs;
  found["launches"] = held.launches;
  found["replays"] = held.replays;
  found["to_device"] = held.to_device;
  found["to_host"] = held.to_host;
  found["sent"] = held.sent;
  found["allocated"] = held.allocated;
  found["most_allocated"] = held.most;
  found["waits"] = state().waits;
  found["refusals"] = state().refusals;
  return found;
}

void reset() {
  auto allocated = state().counts.allocated;
  state().counts = Counts{};
  state().counts.allocated = state().counts.most = allocated;
  state().waits.clear();
  state().refusals.clear();
}

// Operators of a namespace that the device implements; every other one is refused.
void implement(const std::string& space, const std::vector<std::string>& names) {
  static std::deque<torch::Library> held;
  held.emplace_back(
      torch::Library::IMPL, space, std::make_optional(c10::DispatchKey::PrivateUse1), __FILE__, __LINE__);
  for (auto& name : names) held.back().impl(name.c_str(), boxed(true));
}

void listen(py::object heard) {
  if (heard.is_none()) {
    state().listener = nullptr;
    return;
  }
  auto kept = std::make_shared<py::object>(std::move(heard));
  state().listener = [kept](const std::string& why) {
    py::gil_scoped_acquire gil;
    (*kept)(why);
  };
}

std::set<at::ScalarType> dtypes(const std::vector<py::object>& given) {
  std::set<at::ScalarType> found;
  for (auto& one : given) found.insert(reinterpret_cast<THPDtype*>(one.ptr())->scalar_type);
  return found;
}

struct PyGraph {
  Graph graph;
  void begin(bool has_updates) {
    TORCH_CHECK(!state().capturing, "another graph is being captured");
    graph = Graph{};
    graph.has_updates = has_updates;
    state().capturing = &graph;
  }
  void end() { state().capturing = nullptr; }
  void run() {
    state().counts.replays += 1;
    py::gil_scoped_release released;
    replay(graph);
  }
  // New values of host arguments: one mapping for each operator that can be updated, or one for all.
  void update(const std::vector<std::map<std::string, std::vector<int64_t>>>& given) {
    size_t place = 0;
    for (auto& step : graph.steps) {
      if (!step.is_updatable) continue;
      auto& mine = given.size() == 1 ? given[0] : given.at(place);
      ++place;
      for (auto& [name, values] : mine) {
        auto at = step.op.schema().argumentIndexWithName(name);
        TORCH_CHECK(at.has_value(), "no argument ", name);
        step.inputs[*at] = c10::IValue(values);
      }
    }
    TORCH_CHECK(given.size() <= 1 || place == given.size(), place, " operators can be updated, not ", given.size());
  }
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("counts", &counts);
  m.def("reset", &reset);
  m.def("implement", &implement);
  m.def("listen", &listen);
  m.def("hccl_over", &hccl_over);
  m.def("as_cpu", [](const at::Tensor& t) { return as_cpu(t); });
  m.def("format", [](const at::Tensor& t) { return memory_of(t)->format; });
  m.def("set_format", [](const at::Tensor& t, int64_t to) { memory_of(t)->format = to; });
  m.def("set_waiting", [](std::set<std::string> names) { state().waiting = std::move(names); });
  m.def("set_updatable", [](std::set<std::string> names) { state().updatable = std::move(names); });
  m.def("set_refused_dtypes", [](const std::vector<py::object>& t) { state().refused_dtypes = dtypes(t); });
  m.def("set_reducible_dtypes", [](const std::vector<py::object>& t) { state().reducible_dtypes = dtypes(t); });
  m.def("set_narrow", [](const std::string& op, const std::vector<py::object>& t) { state().narrow[op] = dtypes(t); });
  m.def("default_generator", [] { return default_generator(); });
  m.def("device_count", &device_count);
  m.def("is_capturing", [] { return state().capturing != nullptr; });
  py::class_<PyGraph>(m, "Graph")
      .def(py::init<>())
      .def("begin", &PyGraph::begin)
      .def("end", &PyGraph::end)
      .def("replay", &PyGraph::run)
      .def("update", &PyGraph::update);
}

}  // namespace fake_npu
