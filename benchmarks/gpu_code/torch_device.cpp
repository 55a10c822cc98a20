// A CUDA device for a PyTorch that was built without CUDA: its memory is the host's, and its operators run on the
// processor. The compiler of torch.compile then generates the code of a GPU, and folds constants, as it does with one.

#include <cstdlib>

#include <ATen/core/Tensor.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

namespace {

using at::IntArrayRef;
using at::Tensor;
using c10::DeviceType;

C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::NoOpDeviceGuardImpl<DeviceType::CUDA>);

struct HostMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* begin = std::malloc(bytes ? bytes : 1);
    return {begin, begin, &std::free, c10::Device(DeviceType::CUDA, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

HostMemory memory;
constexpr c10::DispatchKeySet cuda(c10::DispatchKey::CUDA);

Tensor on_host(const Tensor& tensor) {
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), at::TensorOptions(at::kCPU).dtype(tensor.dtype()));
}

Tensor empty(IntArrayRef size, std::optional<c10::ScalarType> type, std::optional<c10::Layout>,
             std::optional<c10::Device>, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  return at::detail::empty_generic(size, &memory, cuda, type.value_or(c10::ScalarType::Float), format);
}

Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<c10::ScalarType> type,
                     std::optional<c10::Layout>, std::optional<c10::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &memory, cuda, type.value_or(c10::ScalarType::Float));
}

Tensor& copy_(Tensor& to, const Tensor& from, bool) {
  on_host(to).copy_(on_host(from));
  return to;
}

const Tensor& resize_(const Tensor& self, IntArrayRef size, std::optional<c10::MemoryFormat>) {
  Tensor fresh = at::detail::empty_generic(size, &memory, cuda, self.scalar_type(), std::nullopt);
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(fresh.storage());
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  if (to.sizes() != from.sizes()) resize_(to, from.sizes(), std::nullopt);
  on_host(to).copy_(on_host(from));
  return to;
}

Tensor as_strided(const Tensor& self, IntArrayRef size, IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

Tensor reshape_alias(const Tensor& self, IntArrayRef size, IntArrayRef stride) {
  return at::native::as_strided_tensorimpl(self, size, stride, std::nullopt);
}

Tensor view(const Tensor& self, IntArrayRef size) { return at::native::view(self, size); }

void on_processor(const c10::OperatorHandle& op, torch::jit::Stack* stack) { at::native::cpu_fallback(op, stack); }

TORCH_LIBRARY_IMPL(_, CUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&on_processor>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("copy_", copy_);
  library.impl("resize_", resize_);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("as_strided", as_strided);
  library.impl("_reshape_alias", reshape_alias);
  library.impl("view", view);
}

}  // namespace
