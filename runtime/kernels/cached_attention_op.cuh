// The operator onnx_mtp::CachedAttention for ONNX Runtime's CUDA provider: cached_attention.cuh with a node's tensors.
//
//     y T [1, S, H*D], present_key, present_value T [1, Hkv, C, D]
//         = CachedAttention(qkvg T [1, S, width], past_key, past_value T [1, Hkv, C, D], last_row int32 [1],
//                           cos, sin T [C, rotary / 2], q_norm, k_norm T [D])
//
// y = attention * sigmoid(gate), gate and q being [H*D] of a row of qkvg, k and v [Hkv*D]. Row i has position
// last_row - S + 1 + i; its key and value are written there, so the present must lie over the past. A row whose position is
// negative gives 0. The first channels of a head are rotated by halves, as many as cos and sin have angles for.
#pragma once
#include <cmath>
#include <map>
#include <mutex>

#include "launch_attention.cuh"
#include "op.cuh"

namespace cached_attention {

ort::Status* invalid(const std::string& text) {
  return api->make_status(ort::kInvalidArgument, ("CachedAttention: " + text).c_str());
}

struct Kernel {
  int element, multiprocessors;
  int64_t heads, kv_heads, q_offset, k_offset, v_offset, gate_offset;
  float eps, scale;
};

constexpr int kInputs = 8;
constexpr int64_t kMostWidth = 1 << 24;

// Kernels of one stream follow each other, so those of one size share a workspace; it lives as long as the process.
ort::Status* workspace_of(cudaStream_t stream, size_t bytes, float** out) {
  static std::mutex mutex;
  static std::map<std::tuple<int, cudaStream_t, size_t>, float*> all;
  const std::lock_guard<std::mutex> lock(mutex);
  int device;
  TRY_CUDA("no current device", cudaGetDevice(&device));
  float*& memory = all[{device, stream, bytes}];
  if (!memory) {
    cudaStreamCaptureStatus capturing;
    TRY_CUDA("no capture status", cudaStreamIsCapturing(stream, &capturing));
    if (capturing != cudaStreamCaptureStatusNone)
      return api->make_status(
          ort::kFail, "CachedAttention: the first run on a stream allocates and cannot be captured; run once without capture first");
    void* made;
    TRY_CUDA("no memory for the workspace of CachedAttention", cudaMalloc(&made, bytes));
    memory = static_cast<float*>(made);
  }
  *out = memory;
  return nullptr;
}

// What does not go together, or nothing.
std::string fault(const Kernel& kernel, const Tensor* in) {
  const Tensor &qkvg = in[0], &key = in[1], &cosines = in[4];
  if (qkvg.dims.size() != 3 || qkvg.dims[0] != 1) return "qkvg must be [1, S, width]";
  if (key.dims.size() != 4 || key.dims[0] != 1 || key.dims[1] != kernel.kv_heads || in[2].dims != key.dims)
    return "past_key and past_value must be [1, " + std::to_string(kernel.kv_heads) + ", C, D]";
  const int64_t rows = qkvg.dims[1], width = qkvg.dims[2], capacity = key.dims[2], d = key.dims[3];
  const int64_t group = kernel.heads / kernel.kv_heads, q = kernel.heads * d, kv = kernel.kv_heads * d;
  if (d != 64 && d != 128 && d != 256) return "heads of " + std::to_string(d) + "; 64, 128 and 256 are built";
  if (rows < 1 || rows > attention::kMaxRows || rows * group > attention::kMaxQueries)
    return std::to_string(rows) + " rows of " + std::to_string(group) + " query heads a kv head; it takes up to " +
           std::to_string(attention::kMaxRows) + " rows and " + std::to_string(attention::kMaxQueries) + " queries a kv head";
  if (capacity < 1 || capacity > 0x7fffffff || width > kMostWidth) return "the cache or a row is too long";
  if (in[3].elements() != 1) return "last_row must be one number";
  if (cosines.dims.size() != 2 || cosines.dims[0] < capacity || in[5].dims != cosines.dims || cosines.dims[1] > d / 2)
    return "cos and sin must be [C, up to D / 2]";
  if (in[6].elements() != d || in[7].elements() != d) return "q_norm and k_norm must have a head's width";
  if (kernel.q_offset + q > width || kernel.gate_offset + q > width || kernel.k_offset + kv > width || kernel.v_offset + kv > width)
    return "an offset leaves the width of qkvg, " + std::to_string(width);
  for (int64_t size : {width, kernel.q_offset, kernel.k_offset, kernel.v_offset, kernel.gate_offset, cosines.dims[1]})
    if (size % attention::kAligned) return "width, offsets and angles must be multiples of " + std::to_string(attention::kAligned);
  for (int i : {0, 1, 2, 6, 7})
    if (reinterpret_cast<uintptr_t>(in[i].data) % 16) return "qkvg, caches and norms must lie at multiples of 16 bytes";
  return "";
}

template <typename T>
ort::Status* compute(const Kernel& kernel, ort::KernelContext* context) {
  Tensor in[kInputs];
  for (int i = 0; i < kInputs; ++i) {
    bool there;
    TRY(read_tensor(context, i, &in[i], &there));
    if (!there) return invalid("input " + std::to_string(i) + " is missing");
  }
  const std::string wrong = fault(kernel, in);
  if (!wrong.empty()) return invalid(wrong);
  const int64_t rows = in[0].dims[1], d = in[1].dims[3], y_dims[] = {1, rows, kernel.heads * d};
  void* out[3];
  for (int i = 0; i < 3; ++i) {
    ort::Value* value;
    TRY(api->output(context, i, i ? in[i].dims.data() : y_dims, i ? 4 : 3, &value));
    TRY(api->data(value, &out[i]));
    if (i && out[i] != in[i].data) return invalid("present must be bound to the memory of past: the cache is written in place");
  }
  void* handle;
  TRY(api->stream(context, &handle));
  const cudaStream_t stream = static_cast<cudaStream_t>(handle);
  attention::Arguments<T> a{};
  a.qkvg = static_cast<const T*>(in[0].data);
  a.key = static_cast<T*>(out[1]);
  a.value = static_cast<T*>(out[2]);
  a.last_row = static_cast<const int*>(in[3].data);
  a.cosines = static_cast<const T*>(in[4].data);
  a.sines = static_cast<const T*>(in[5].data);
  a.q_norm = static_cast<const T*>(in[6].data);
  a.k_norm = static_cast<const T*>(in[7].data);
  a.y = static_cast<T*>(out[0]);
  a.rows = static_cast<int>(rows);
  a.width = static_cast<int>(in[0].dims[2]);
  a.heads = static_cast<int>(kernel.heads);
  a.kv_heads = static_cast<int>(kernel.kv_heads);
  a.capacity = static_cast<int>(in[1].dims[2]);
  a.rotary_half = static_cast<int>(in[4].dims[1]);
  a.splits = attention::splits_of(kernel.multiprocessors, a.kv_heads, a.capacity);
  a.q_offset = static_cast<int>(kernel.q_offset);
  a.k_offset = static_cast<int>(kernel.k_offset);
  a.v_offset = static_cast<int>(kernel.v_offset);
  a.gate_offset = static_cast<int>(kernel.gate_offset);
  a.eps = kernel.eps;
  a.scale_log2 = kernel.scale * static_cast<float>(M_LOG2E);
  const size_t sums = attention::sums_of(a.splits, a.heads, a.rows, static_cast<int>(d));
  TRY(workspace_of(stream, (sums + attention::stats_of(a.splits, a.heads, a.rows)) * sizeof(float), &a.sums));
  a.stats = a.sums + sums;
  TRY_CUDA("the launch of CachedAttention failed", attention::launch(a, static_cast<int>(d), stream));
  return nullptr;
}

ort::Status* create_kernel(const ort::CustomOp* op, const ort::Api*, const ort::KernelInfo* info, void** out) {
  Kernel kernel{};
  kernel.element = static_cast<const Op*>(op)->element;
  TRY(check_device("CachedAttention", &kernel.multiprocessors));
  TRY(api->int_attribute(info, "num_heads", &kernel.heads));
  TRY(api->int_attribute(info, "kv_num_heads", &kernel.kv_heads));
  TRY(api->int_attribute(info, "q_offset", &kernel.q_offset));
  TRY(api->int_attribute(info, "k_offset", &kernel.k_offset));
  TRY(api->int_attribute(info, "v_offset", &kernel.v_offset));
  TRY(api->int_attribute(info, "gate_offset", &kernel.gate_offset));
  TRY(api->float_attribute(info, "epsilon", &kernel.eps));
  TRY(api->float_attribute(info, "scale", &kernel.scale));
  if (kernel.kv_heads < 1 || kernel.heads < 1 || kernel.heads > 65535 || kernel.heads % kernel.kv_heads)
    return invalid("num_heads must be a multiple of kv_num_heads, and both from 1 to 65535");
  for (int64_t offset : {kernel.q_offset, kernel.k_offset, kernel.v_offset, kernel.gate_offset})
    if (offset < 0 || offset > kMostWidth) return invalid("an offset is negative or beyond 2^24");
  if (!(kernel.scale > 0) || !std::isfinite(kernel.scale) || !(kernel.eps >= 0)) return invalid("scale must be positive, epsilon not negative");
  *out = new Kernel(kernel);
  return nullptr;
}

Op make_op(ort::Element element) {
  Op op{};
  op.element = element;
  op.version = ort::kVersion;
  op.name = [](const ort::CustomOp*) { return "CachedAttention"; };
  op.provider = [](const ort::CustomOp*) { return "CUDAExecutionProvider"; };
  op.input_count = [](const ort::CustomOp*) -> size_t { return kInputs; };
  op.output_count = [](const ort::CustomOp*) -> size_t { return 3; };
  op.input_type = [](const ort::CustomOp* self, size_t i) -> int { return i == 3 ? ort::kInt32 : static_cast<const Op*>(self)->element; };
  op.output_type = [](const ort::CustomOp* self, size_t) -> int { return static_cast<const Op*>(self)->element; };
  op.input_characteristic = op.output_characteristic = [](const ort::CustomOp*, size_t) -> int { return ort::kRequired; };
  op.input_memory = [](const ort::CustomOp*, size_t) { return ort::kDeviceMemory; };
  op.variadic_input_least = op.variadic_output_least = [](const ort::CustomOp*) { return 1; };
  op.variadic_input_same = op.variadic_output_same = [](const ort::CustomOp*) { return 1; };
  op.create_checked = create_kernel;
  op.compute_checked = [](void* kernel, ort::KernelContext* context) {
    const Kernel& self = *static_cast<Kernel*>(kernel);
    return self.element == ort::kFloat16 ? compute<__half>(self, context) : compute<__nv_bfloat16>(self, context);
  };
  op.destroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
  op.first_version = [](const ort::CustomOp*) { return 1; };
  op.last_version = [](const ort::CustomOp*) { return 0x7fffffff; };
  return op;
}

}  // namespace cached_attention
