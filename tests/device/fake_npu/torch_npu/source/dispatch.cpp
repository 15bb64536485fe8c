// Operators. An operator that torch_npu implements is computed by the host's kernel over the same memory; any other
// would fall back to the host on a real device, with a copy each way, and is refused.
#include "state.h"

#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/Resize.h>
#include <torch/library.h>

namespace fake_npu {

using c10::IValue;
using torch::jit::Stack;

void check_dtype(const std::string& op, const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.device().type() != NPU) return;
  if (state().refused_dtypes.count(tensor.scalar_type()))
    refuse(op + " with " + c10::toString(tensor.scalar_type()) + " on the device");
}

namespace {

std::string name_of(const c10::OperatorHandle& op) {
  auto& name = op.schema().operator_name();
  auto plain = name.name.rfind("aten::", 0) == 0 ? name.name.substr(6) : name.name;
  return name.overload_name.empty() ? plain : plain + "." + name.overload_name;
}

template <typename F>
void each_tensor(const IValue& value, F&& visit) {
  if (value.isTensor()) visit(value.toTensor());
  else if (value.isTensorList()) for (const at::Tensor& one : value.toTensorVector()) visit(one);
  else if (value.isList()) for (const IValue& one : value.toListRef()) each_tensor(one, visit);
}

IValue on_host(const IValue& value) {
  if (value.isTensor()) return as_cpu(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> made;
    for (const at::Tensor& one : value.toTensorVector()) made.push_back(as_cpu(one));
    return made;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> made;
    for (const auto& one : value.toOptionalTensorList()) {
      std::optional<at::Tensor> given = one;
      made.push_back(given.has_value() ? std::optional<at::Tensor>(as_cpu(*given)) : std::nullopt);
    }
    return made;
  }
  if (value.isDevice()) return c10::Device(c10::kCPU);
  return value;
}

std::vector<IValue> compute(const c10::OperatorHandle& op, const std::vector<IValue>& inputs) {
  at::AutoDispatchBelowADInplaceOrView below;
  auto& arguments = op.schema().arguments();
  Stack stack;
  for (size_t i = 0; i < inputs.size(); ++i) {
    bool draws = arguments[i].type()->str() == "Generator?";
    if (draws) {
      auto given = inputs[i].isNone() ? std::nullopt : std::optional<at::Generator>(inputs[i].toGenerator());
      auto host = host_generator(given);
      stack.emplace_back(host.has_value() ? IValue(*host) : IValue());
    } else {
      stack.push_back(on_host(inputs[i]));
    }
  }
  std::vector<IValue> held(stack.begin(), stack.end());
  op.callBoxed(stack);
  // Where a result was given memory of another size, the device's tensor takes that size on.
  for (size_t i = 0; i < inputs.size(); ++i) {
    auto* alias = arguments[i].alias_info();
    if (!alias || !alias->isWrite() || !inputs[i].isTensor()) continue;
    auto& mine = inputs[i].toTensor();
    auto& theirs = held[i].toTensor();
    if (!mine.defined() || mine.sizes().equals(theirs.sizes())) continue;
    at::native::resize_impl_cpu_(mine.unsafeGetTensorImpl(), theirs.sizes(), std::nullopt);
    as_cpu(mine).copy_(theirs);
  }
  return {stack.begin(), stack.end()};
}

// The argument that a result is, by its alias annotation.
std::optional<size_t> written_argument(const c10::FunctionSchema& schema, size_t result) {
  auto* alias = schema.returns()[result].alias_info();
  if (!alias || !alias->isWrite()) return std::nullopt;
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    auto* theirs = schema.arguments()[i].alias_info();
    if (theirs && theirs->isWrite() && theirs->beforeSets() == alias->beforeSets()) return i;
  }
  return std::nullopt;
}

at::Tensor brought(const at::Tensor& made, const std::vector<IValue>& inputs, c10::Device device) {
  if (!made.defined()) return made;
  at::Tensor base;  // a result that is a view of an input stays one
  for (auto& input : inputs)
    each_tensor(input, [&](const at::Tensor& t) {
      bool holds = t.defined() && t.device().type() == NPU && t.storage().nbytes();
      if (holds && t.storage().data() == made.storage().data()) base = t;
    });
  if (!base.defined()) return as_npu(made, device);
  auto view = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(base.storage()), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), made.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(made.sizes(), made.strides(), made.storage_offset());
  return view;
}

c10::Device device_of(const std::vector<IValue>& inputs) {
  std::optional<c10::Device> found;
  for (auto& input : inputs) {
    if (input.isDevice() && input.toDevice().has_index()) found = input.toDevice();
    each_tensor(input, [&](const at::Tensor& t) {
      if (!found && t.defined() && t.device().type() == NPU) found = t.device();
    });
  }
  return found.value_or(current_device());
}

bool is_mask(const at::Tensor& index) {
  return index.scalar_type() == at::kBool || index.scalar_type() == at::kByte;
}

void check(const std::string& name, const std::vector<IValue>& inputs) {
  auto narrow = state().narrow.find(name.substr(0, name.find('.')));
  bool is_index = name.rfind("index", 0) == 0 || name.rfind("_index_put", 0) == 0;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (is_index && inputs[i].isList() && !inputs[i].isIntList()) {
      each_tensor(inputs[i], [&](const at::Tensor& t) {
        if (t.defined() && is_mask(t)) wait(name + " with a mask");
        if (t.defined() && t.device().type() != NPU && t.dim()) wait(name + " with an index on the host");
      });
      continue;
    }
    each_tensor(inputs[i], [&](const at::Tensor& t) {
      if (!t.defined()) return;
      check_dtype(name, t);
      if (t.device().type() != NPU && t.dim()) refuse(name + " of a tensor on " + t.device().str());
      if (narrow != state().narrow.end() && i == 0 && !narrow->second.count(t.scalar_type()))
        refuse(name + " of " + c10::toString(t.scalar_type()));
      if (t.device().type() == NPU && t.storage().nbytes() && memory_of(t)->format != BASE_FORMAT) {
        bool whole = static_cast<size_t>(t.numel() * t.element_size()) == t.storage().nbytes();
        if (!whole) refuse(name + " of a part of a tensor in a private format");
      }
    });
  }
}

void run(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  auto& schema = op.schema();
  auto name = name_of(op);
  auto taken = schema.arguments().size();
  std::vector<IValue> inputs(stack->end() - taken, stack->end());
  {
    std::lock_guard<std::recursive_mutex> held(state().mutex);
    check(name, inputs);
    state().counts.launches += 1;
  }
  if (state().waiting.count(name)) wait(name);
  auto device = device_of(inputs);
  auto results = compute(op, inputs);
  torch::jit::drop(*stack, taken);
  std::vector<at::Tensor> outputs;
  for (size_t i = 0; i < results.size(); ++i) {
    if (auto same = written_argument(schema, i)) {
      stack->push_back(inputs[*same]);
      outputs.emplace_back();
    } else if (results[i].isTensor()) {
      auto made = brought(results[i].toTensor(), inputs, device);
      check_dtype(name, made);
      stack->push_back(made);
      outputs.push_back(made);
    } else if (results[i].isTensorList()) {
      c10::List<at::Tensor> made;
      for (const at::Tensor& one : results[i].toTensorVector()) made.push_back(brought(one, inputs, device));
      stack->push_back(made);
      for (const at::Tensor& one : made) outputs.push_back(one);
    } else {
      stack->push_back(results[i]);
    }
  }
  if (auto* graph = state().capturing)
    graph->steps.push_back({op, inputs, outputs, graph->has_updates && state().updatable.count(name) > 0});
}

void refuse_fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack*) {
  std::lock_guard<std::recursive_mutex> held(state().mutex);
  refuse(name_of(op) + ", which torch_npu leaves to the host");
}

// -- what a device implements itself --------------------------------------------------------------------------------

void check_new(std::optional<at::ScalarType> dtype) {
  auto given = dtype.value_or(at::typeMetaToScalarType(at::get_default_dtype()));
  std::lock_guard<std::recursive_mutex> held(state().mutex);
  if (state().refused_dtypes.count(given)) refuse(std::string("a new tensor of ") + c10::toString(given));
}

at::Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
    std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  check_new(dtype);
  if (layout.value_or(at::kStrided) != at::kStrided) refuse("a tensor that is not strided");
  c10::OptionalDeviceGuard guard(device);
  auto given = dtype.value_or(at::typeMetaToScalarType(at::get_default_dtype()));
  return at::detail::empty_generic(
      size, device_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), given, format);
}

at::Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>) {
  check_new(dtype);
  c10::OptionalDeviceGuard guard(device);
  auto given = dtype.value_or(at::typeMetaToScalarType(at::get_default_dtype()));
  return at::detail::empty_strided_generic(
      size, stride, device_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), given);
}

at::Tensor view_of(const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride, int64_t offset) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(self.storage()), self.key_set(),
      self.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return made;
}

at::Tensor as_strided(
    const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride, std::optional<int64_t> offset) {
  return view_of(self, size, stride, offset.value_or(self.storage_offset()));
}

at::Tensor view(const at::Tensor& self, at::IntArrayRef size) {
  auto host = as_cpu(self).view(size);
  return view_of(self, host.sizes(), host.strides(), self.storage_offset());
}

at::Tensor reshape_alias(const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride) {
  return view_of(self, size, stride, self.storage_offset());
}

at::Tensor unfold(const at::Tensor& self, int64_t dim, int64_t size, int64_t step) {
  auto host = as_cpu(self).unfold(dim, size, step);
  return view_of(self, host.sizes(), host.strides(), self.storage_offset());
}

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  at::native::resize_impl_cpu_(self.unsafeGetTensorImpl(), size, std::nullopt);
  if (format.has_value()) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return self;
}

at::Tensor& set_storage(
    at::Tensor& self, c10::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  std::vector<int64_t> dense(size.size(), 1);
  for (int64_t i = static_cast<int64_t>(size.size()) - 2; i >= 0; --i) dense[i] = dense[i + 1] * size[i + 1];
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride.data() ? stride : at::IntArrayRef(dense), offset);
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, c10::Storage source) {
  auto count = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_storage(self, std::move(source), 0, {count}, {1});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_nothing(at::Tensor& self) {
  c10::Storage none(c10::Storage::use_byte_size_t(), 0, device_allocator(), true);
  return set_storage(self, none, 0, {0}, {1});
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  check_dtype("item", self);
  wait("a number read on the host");
  return at::_local_scalar_dense(as_cpu(self));
}

void to_host(const at::Tensor& source, const at::Tensor& target, bool may_run_behind) {
  auto bytes = as_cpu(source).to(target.scalar_type()).expand_as(target);
  state().counts.to_host += source.numel() * source.element_size();
  if (!may_run_behind || !is_pinned(target.storage().data())) {
    wait("a copy to the host");
    target.copy_(bytes);
    return;
  }
  std::lock_guard<std::recursive_mutex> held(state().mutex);
  if (state().capturing) refuse("a copy to the host inside a captured graph");
  state().coming.emplace_back(target, bytes.contiguous().clone());
}

void to_device(const at::Tensor& source, const at::Tensor& target, bool may_run_behind) {
  check_dtype("a copy to the device", target);
  state().counts.to_device += target.numel() * target.element_size();
  if (!may_run_behind || !is_pinned(source.storage().data())) wait("a copy from the host");
  if (state().capturing) refuse("a copy from the host inside a captured graph");
  as_cpu(target).copy_(source);
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& target, bool non_blocking) {
  if (!self.numel()) return target;
  if (self.device().type() != NPU) {
    to_device(self, target, non_blocking);
  } else if (target.device().type() != NPU) {
    to_host(self, target, non_blocking);
  } else {
    static auto op = c10::Dispatcher::singleton().findSchemaOrThrow("fake_npu::copy", "");
    op.typed<void(const at::Tensor&, at::Tensor)>().call(self, target);
  }
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& target) {
  if (!target.sizes().equals(self.sizes())) target.resize_(self.sizes());
  return copy_from(self, target, false);
}

void record_stream(at::Tensor&, at::Stream) {}

// A parameter that moves here stays the object it is, as torch_npu has it: ties between parameters hold.
bool keeps_identity(const at::Tensor&, const at::Tensor&) { return true; }

int64_t plain_attention(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double, bool,
    std::optional<double>, bool) {
  return 0;  // SDPBackend::math: products and a softmax, which autograd knows
}

}  // namespace

void replay(Graph& graph) {
  at::NoGradGuard none;
  for (auto& step : graph.steps) {
    auto results = compute(step.op, step.inputs);
    size_t place = 0;
    for (auto& result : results)
      each_tensor(result, [&](const at::Tensor& made) {
        auto& kept = step.outputs.at(place++);
        if (!kept.defined() || !made.defined()) return;
        auto to = as_cpu(kept);
        if (to.data_ptr() != made.data_ptr()) to.copy_(made);
      });
  }
}

torch::CppFunction boxed(bool is_known) {
  return is_known ? torch::CppFunction::makeFromBoxedFunction<&run>()
                  : torch::CppFunction::makeFromBoxedFunction<&refuse_fallback>();
}

TORCH_LIBRARY(fake_npu, m) {
  m.def("copy(Tensor source, Tensor(a!) target) -> ()");
}

TORCH_LIBRARY_IMPL(fake_npu, CPU, m) {
  m.impl("copy", [](const at::Tensor& source, at::Tensor target) { target.copy_(source); });
}

// The host has no product of 16-bit matrices in float32, which devices do.
TORCH_LIBRARY_IMPL(aten, CPU, m) {
  m.impl("mm.dtype", [](const at::Tensor& a, const at::Tensor& b, at::ScalarType dtype) {
    return at::mm(a.to(dtype), b.to(dtype));
  });
}

TORCH_LIBRARY_IMPL(fake_npu, PrivateUse1, m) {
  m.impl("copy", boxed(true));
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(boxed(false));
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("unfold", &unfold);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_nothing);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("record_stream", &record_stream);
  m.impl("_fused_sdp_choice", &plain_attention);
  m.impl("_has_compatible_shallow_copy_type", &keeps_identity);
}

}  // namespace fake_npu
