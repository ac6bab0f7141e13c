// The operator onnx_mtp::GdnRows for ONNX Runtime's CUDA provider: gdn_rows.cuh with a node's tensors.
//
//     y T [1, S, Hv*dv], conv [.., K-1, conv_dim], state [.., Hv, dk, dv]
//         = GdnRows(mixed T [1, S, width], conv_weight [conv_dim, 1, 4], dt_bias [Hv], decay_scale [Hv], norm [dv],
//                   past_conv [.., K-1, conv_dim], past_state [.., Hv, dk, dv])
//
// float32 unless T is said. Of a past with several slots the last one is read. With keep_rows=1, conv and state get the
// slot after every row, [S, 1, ..], else the one after the last row, [1, ..].
#pragma once
#include "gdn_rows.cuh"
#include "op.cuh"

namespace gdn_rows {

ort::Status* invalid(const std::string& text) { return api->make_status(ort::kInvalidArgument, ("GdnRows: " + text).c_str()); }

struct Kernel {
  int element;
  int64_t key_heads, value_heads, z_offset, b_offset, a_offset, keep_rows, sigmoid_gate;
  float eps, l2_eps;
};

constexpr int kInputs = 7;

template <typename T>
ort::Status* compute(const Kernel& kernel, ort::KernelContext* context) {
  Tensor in[kInputs];
  for (int i = 0; i < kInputs; ++i) {
    bool there;
    TRY(read_tensor(context, i, &in[i], &there));
    if (!there) return invalid("input " + std::to_string(i) + " is missing");
  }
  const Tensor &mixed = in[0], &past_conv = in[5], &past_state = in[6];
  if (mixed.dims.size() != 3 || mixed.dims[0] != 1) return invalid("mixed must be [1, S, width]");
  const size_t rank = past_state.dims.size(), conv_rank = past_conv.dims.size();
  if (rank < 3 || conv_rank < 2) return invalid("past_state must end in [Hv, dk, dv] and past_conv in [3, conv_dim]");
  const int64_t rows = mixed.dims[1], width = mixed.dims[2], dk = past_state.dims[rank - 2], dv = past_state.dims[rank - 1];
  const int64_t conv_dim = past_conv.dims[conv_rank - 1], state = kernel.value_heads * dk * dv, window = 3 * conv_dim;
  const int64_t values = kernel.value_heads * dv;
  if (rows < 1 || rows > gdn::kMaxRows) return invalid(std::to_string(rows) + " rows; it takes 1 to " + std::to_string(gdn::kMaxRows));
  if (past_state.dims[rank - 3] != kernel.value_heads || kernel.value_heads % kernel.key_heads ||
      conv_dim != 2 * kernel.key_heads * dk + values || past_conv.dims[conv_rank - 2] != 3)
    return invalid("states and heads do not go together");
  if (in[1].elements() != conv_dim * gdn::kTaps || in[2].elements() != kernel.value_heads || in[3].elements() != kernel.value_heads ||
      in[4].elements() != dv)
    return invalid("a weight has another size than the states ask for");
  if (kernel.z_offset + values > width || kernel.a_offset + kernel.value_heads > width || kernel.b_offset + kernel.value_heads > width ||
      conv_dim > width)
    return invalid("an offset leaves the width of mixed, " + std::to_string(width));
  const int64_t kept = kernel.keep_rows ? rows : 1;
  const int64_t y_dims[] = {1, rows, values};
  std::vector<int64_t> conv_dims, state_dims;
  if (kernel.keep_rows) conv_dims = state_dims = {kept};
  conv_dims.insert(conv_dims.end(), {1, 3, conv_dim});
  state_dims.insert(state_dims.end(), {1, kernel.value_heads, dk, dv});
  void* out[3];
  ort::Value* value;
  TRY(api->output(context, 0, y_dims, 3, &value));
  TRY(api->data(value, &out[0]));
  TRY(api->output(context, 1, conv_dims.data(), conv_dims.size(), &value));
  TRY(api->data(value, &out[1]));
  TRY(api->output(context, 2, state_dims.data(), state_dims.size(), &value));
  TRY(api->data(value, &out[2]));
  void* handle;
  TRY(api->stream(context, &handle));
  gdn::Arguments<T> a{};
  a.mixed = static_cast<const T*>(mixed.data);
  a.conv_weight = static_cast<const float*>(in[1].data);
  a.dt_bias = static_cast<const float*>(in[2].data);
  a.decay_scale = static_cast<const float*>(in[3].data);
  a.norm = static_cast<const float*>(in[4].data);
  a.past_conv = static_cast<const float*>(past_conv.data) + past_conv.elements() - window;
  a.past_state = static_cast<const float*>(past_state.data) + past_state.elements() - state;
  a.y = static_cast<T*>(out[0]);
  a.conv = static_cast<float*>(out[1]);
  a.state = static_cast<float*>(out[2]);
  if (a.conv == a.past_conv) return invalid("conv must not lie over past_conv: other blocks still read it");
  a.rows = static_cast<int>(rows);
  a.width = static_cast<int>(width);
  a.key_heads = static_cast<int>(kernel.key_heads);
  a.value_heads = static_cast<int>(kernel.value_heads);
  a.z_offset = static_cast<int>(kernel.z_offset);
  a.b_offset = static_cast<int>(kernel.b_offset);
  a.a_offset = static_cast<int>(kernel.a_offset);
  a.eps = kernel.eps;
  a.l2_eps = kernel.l2_eps;
  a.keep_rows = kernel.keep_rows;
  a.sigmoid_gate = kernel.sigmoid_gate;
  const cudaError_t error = gdn::launch(a, static_cast<int>(dk), static_cast<int>(dv), static_cast<cudaStream_t>(handle));
  if (error == cudaErrorInvalidValue) return invalid("heads of " + std::to_string(dk) + " x " + std::to_string(dv) + "; 64 x 64 and 128 x 128 are built");
  TRY_CUDA("the launch of GdnRows failed", error);
  return nullptr;
}

ort::Status* create_kernel(const ort::CustomOp* op, const ort::Api*, const ort::KernelInfo* info, void** out) {
  Kernel kernel{};
  int unused;
  kernel.element = static_cast<const Op*>(op)->element;
  TRY(check_device("GdnRows", &unused));
  TRY(api->int_attribute(info, "key_heads", &kernel.key_heads));
  TRY(api->int_attribute(info, "value_heads", &kernel.value_heads));
  TRY(api->int_attribute(info, "z_offset", &kernel.z_offset));
  TRY(api->int_attribute(info, "b_offset", &kernel.b_offset));
  TRY(api->int_attribute(info, "a_offset", &kernel.a_offset));
  TRY(int_attribute(info, "keep_rows", 0, &kernel.keep_rows));
  TRY(int_attribute(info, "sigmoid_gate", 0, &kernel.sigmoid_gate));
  TRY(api->float_attribute(info, "epsilon", &kernel.eps));
  TRY(api->float_attribute(info, "l2_epsilon", &kernel.l2_eps));
  if (kernel.key_heads < 1 || kernel.value_heads < 1 || kernel.z_offset < 0 || kernel.a_offset < 0 || kernel.b_offset < 0)
    return invalid("an attribute is below what it can be");
  *out = new Kernel(kernel);
  return nullptr;
}

Op make_op(ort::Element element) {
  Op op{};
  op.element = element;
  op.version = ort::kVersion;
  op.name = [](const ort::CustomOp*) { return "GdnRows"; };
  op.provider = [](const ort::CustomOp*) { return "CUDAExecutionProvider"; };
  op.input_count = [](const ort::CustomOp*) -> size_t { return kInputs; };
  op.output_count = [](const ort::CustomOp*) -> size_t { return 3; };
  op.input_type = [](const ort::CustomOp* self, size_t i) -> int { return i ? ort::kFloat : static_cast<const Op*>(self)->element; };
  op.output_type = [](const ort::CustomOp* self, size_t i) -> int { return i ? ort::kFloat : static_cast<const Op*>(self)->element; };
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

}  // namespace gdn_rows
