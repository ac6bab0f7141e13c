// The operator onnx_mtp::MatMulW4 for ONNX Runtime's CUDA provider.
//
//     y [.., N] = MatMulW4<N, silu>(x [.., K], packed uint8 [bytes], residual [.., N]?)      x, residual, y: T
//
// `packed` is what repack.py makes of W [N, K] and its scales in T. With silu=1, W is [2 N, K], gates and values
// interleaved, and y = silu(gate) * value. Launches go to ONNX Runtime's stream, so a CUDA graph captures them.
#pragma once
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "launch_w4.cuh"
#include "op.cuh"

namespace matmul_w4 {

ort::Status* invalid(const std::string& text) { return api->make_status(ort::kInvalidArgument, ("MatMulW4: " + text).c_str()); }

constexpr int kWarps = 8, kTiles = 2, kRowTiles = kWarps * kTiles;
constexpr int kRingBytes = 74 * 1024;  // measured best over a 27B forward, M = 1 and 4
constexpr int kLeastUnits = 2;

struct Workspace {
  float4* partials;
  unsigned* arrivals;
};

// Kernels of one stream follow each other, so they share a workspace; it lives as long as the process.
ort::Status* workspace_of(cudaStream_t stream, int grid, Workspace* out) {
  static std::mutex mutex;
  static std::map<std::pair<int, cudaStream_t>, Workspace> all;
  const std::lock_guard<std::mutex> lock(mutex);
  int device;
  TRY_CUDA("no current device", cudaGetDevice(&device));
  const auto found = all.find({device, stream});
  if (found != all.end()) {
    *out = found->second;
    return nullptr;
  }
  cudaStreamCaptureStatus capturing;
  TRY_CUDA("no capture status", cudaStreamIsCapturing(stream, &capturing));
  if (capturing != cudaStreamCaptureStatusNone)
    return api->make_status(ort::kFail, "MatMulW4: the first run on a stream allocates and cannot be captured; run once without capture first");
  Workspace made;
  const size_t sums = w4::partial_bytes(grid, kRowTiles), counts = w4::arrival_bytes(grid, kWarps);
  void* memory;
  TRY_CUDA("no memory for its workspace", cudaMalloc(&memory, sums + counts));
  made.partials = static_cast<float4*>(memory);
  made.arrivals = reinterpret_cast<unsigned*>(static_cast<char*>(memory) + sums);
  TRY_CUDA("its workspace cannot be cleared", cudaMemsetAsync(made.arrivals, 0, counts, stream));
  all[{device, stream}] = *out = made;
  return nullptr;
}

struct Kernel {
  int64_t n, silu;
  int element, multiprocessors;
};

template <typename T>
ort::Status* compute(const Kernel& kernel, ort::KernelContext* context) {
  Tensor x, packed, residual;
  bool there, added = false;
  TRY(read_tensor(context, 0, &x, &there));
  TRY(read_tensor(context, 1, &packed, &there));
  size_t inputs;
  TRY(api->input_count(context, &inputs));
  if (inputs > 2) TRY(read_tensor(context, 2, &residual, &added));
  if (x.dims.empty() || x.dims.back() % 32 != 0 || x.dims.back() <= 0)
    return invalid("the last dimension of x must be a positive multiple of 32");
  const int64_t k = x.dims.back(), weight_rows = kernel.n * (kernel.silu ? 2 : 1);
  if (k > (1 << 24) || weight_rows > (1 << 26)) return invalid("K is over 2^24 or N over 2^26");
  const int64_t wanted = static_cast<int64_t>(w4::packed_bytes(static_cast<int>(weight_rows), static_cast<int>(k), kRowTiles));
  if (packed.elements() != wanted)
    return invalid("packed has " + std::to_string(packed.elements()) + " bytes; N = " + std::to_string(kernel.n) + " and K = " +
                   std::to_string(k) + " need " + std::to_string(wanted) + ": repack the matrix for this shape");
  if (reinterpret_cast<uintptr_t>(x.data) % 16 || reinterpret_cast<uintptr_t>(packed.data) % 16)
    return invalid("x and packed must lie at multiples of 16 bytes");
  std::vector<int64_t> dims = x.dims;
  dims.back() = kernel.n;
  if (added && (residual.dims != dims || kernel.silu)) return invalid("residual must have the shape of y, and goes without silu");
  ort::Value* value;
  void* y;
  TRY(api->output(context, 0, dims.data(), dims.size(), &value));
  TRY(api->data(value, &y));
  void* handle;
  TRY(api->stream(context, &handle));
  const cudaStream_t stream = static_cast<cudaStream_t>(handle);
  Workspace workspace;
  TRY(workspace_of(stream, kernel.multiprocessors, &workspace));
  const int64_t rows = x.elements() / k;
  for (int64_t row = 0; row < rows; row += w4::kMaxRows) {
    w4::Arguments<T> a{};
    a.packed = static_cast<const uint8_t*>(packed.data);
    a.x = static_cast<const T*>(x.data) + row * k;
    a.residual = added ? static_cast<const T*>(residual.data) + row * kernel.n : nullptr;
    a.y = static_cast<T*>(y) + row * kernel.n;
    a.partials = workspace.partials;
    a.arrivals = workspace.arrivals;
    a.rows = static_cast<int>(std::min<int64_t>(w4::kMaxRows, rows - row));
    a.n = static_cast<int>(kernel.n);
    a.k = static_cast<int>(k);
    const w4::Tuning tuning{kernel.multiprocessors, kRingBytes, kLeastUnits};
    TRY_CUDA("the launch failed", kernel.silu ? (w4::launch<T, kWarps, kTiles, true>(a, tuning, stream))
                                              : (w4::launch<T, kWarps, kTiles, false>(a, tuning, stream)));
  }
  return nullptr;
}

ort::Status* create_kernel(const ort::CustomOp* op, const ort::Api*, const ort::KernelInfo* info, void** out) {
  Kernel kernel{};
  kernel.element = static_cast<const Op*>(op)->element;
  TRY(api->int_attribute(info, "N", &kernel.n));
  if (kernel.n <= 0) return invalid("attribute N must be positive");
  if (ort::Status* absent = api->int_attribute(info, "silu", &kernel.silu)) {
    api->release(absent);
    kernel.silu = 0;
  }
  TRY(check_device("MatMulW4", &kernel.multiprocessors));
  *out = new Kernel(kernel);
  return nullptr;
}

// ONNX Runtime asks the first operator of this name only, so the type comes from x.
ort::Status* infer_shape(const ort::CustomOp*, ort::ShapeContext* context) {
  ort::Shape *x, *y;
  int element;
  TRY(api->inferred_input(context, 0, &x));
  TRY(api->element(x, &element));
  size_t rank = 0, written = 0;
  TRY(api->dim_count(x, &rank));
  if (rank == 0) return nullptr;
  std::vector<int64_t> dims(rank);
  std::vector<const char*> names(rank, "");
  TRY(api->dims(x, dims.data(), rank));
  TRY(api->names(x, names.data(), rank));
  const ort::Attribute* attribute;
  int64_t n;
  TRY(api->inferred_attribute(context, "N", &attribute));
  TRY(api->read(attribute, ort::kIntAttribute, &n, sizeof(n), &written));
  dims.back() = n;
  names.back() = "";
  TRY(api->create_shape(&y));
  ort::Status* status = api->set_element(y, static_cast<ort::Element>(element));
  if (!status) status = api->set_dims(y, dims.data(), rank);
  if (!status) status = api->set_names(y, names.data(), rank);
  if (!status) status = api->infer_output(context, 0, y);
  api->release(y);
  return status;
}

Op make_op(ort::Element element) {
  Op op{};
  op.element = element;
  op.version = ort::kVersion;
  op.name = [](const ort::CustomOp*) { return "MatMulW4"; };
  op.provider = [](const ort::CustomOp*) { return "CUDAExecutionProvider"; };
  op.input_count = [](const ort::CustomOp*) -> size_t { return 3; };
  op.output_count = [](const ort::CustomOp*) -> size_t { return 1; };
  op.input_type = [](const ort::CustomOp* self, size_t i) -> int { return i == 1 ? ort::kUint8 : static_cast<const Op*>(self)->element; };
  op.output_type = [](const ort::CustomOp* self, size_t) { return static_cast<const Op*>(self)->element; };
  op.input_characteristic = [](const ort::CustomOp*, size_t i) -> int { return i == 2 ? ort::kOptional : ort::kRequired; };
  op.output_characteristic = [](const ort::CustomOp*, size_t) -> int { return ort::kRequired; };
  op.input_memory = [](const ort::CustomOp*, size_t) { return ort::kDeviceMemory; };
  op.variadic_input_least = op.variadic_output_least = [](const ort::CustomOp*) { return 1; };
  op.variadic_input_same = op.variadic_output_same = [](const ort::CustomOp*) { return 1; };
  op.create_checked = create_kernel;
  op.compute_checked = [](void* kernel, ort::KernelContext* context) {
    const Kernel& self = *static_cast<Kernel*>(kernel);
    return self.element == ort::kFloat16 ? compute<__half>(self, context) : compute<__nv_bfloat16>(self, context);
  };
  op.destroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
  op.infer_shape = infer_shape;
  op.first_version = [](const ort::CustomOp*) { return 1; };
  op.last_version = [](const ort::CustomOp*) { return 0x7fffffff; };
  return op;
}

}  // namespace matmul_w4
