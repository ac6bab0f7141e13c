// A Gated DeltaNet layer between its projections, for a few rows, as one kernel: causal convolution, SiLU, L2 norms,
// gates, gated delta rule with the state after every row, gated norm. Everything is float32 inside.
//
// One cluster of DV / 32 blocks a value head; a block holds DK x 32 numbers of the state in registers. The blocks of a
// cluster meet once, for the mean of squares of the gated norm.
#pragma once
#include <cooperative_groups.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace gdn {

constexpr int kColumns = 32, kThreads = 128, kWarps = 4, kTaps = 4, kMaxRows = 16;

template <typename T>
struct Arguments {
  const T* mixed;            // [rows, width]: q | k | v, and at their offsets z, b, a
  const float* conv_weight;  // [conv_dim, kTaps]
  const float* dt_bias;      // [Hv]
  const float* decay_scale;  // [Hv], -exp(A_log)
  const float* norm;         // [DV]
  const float* past_conv;    // [kTaps - 1, conv_dim]
  const float* past_state;   // [Hv, DK, DV]
  T* y;                      // [rows, Hv * DV]
  float* conv;               // [rows, kTaps - 1, conv_dim], or the last row's alone
  float* state;              // [rows, Hv, DK, DV], or the last row's alone
  int rows, width, key_heads, value_heads, z_offset, b_offset, a_offset;
  float eps, l2_eps;
  bool keep_rows, sigmoid_gate;
};

__device__ inline float to_float(__half x) { return __half2float(x); }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline void store(__half* to, float x) { *to = __float2half(x); }
__device__ inline void store(__nv_bfloat16* to, float x) { *to = __float2bfloat16(x); }
__device__ inline float sigmoid(float x) { return 1.f / (1.f + __expf(-x)); }
__device__ inline float softplus(float x) { return x > 20.f ? x : log1pf(__expf(x)); }
__device__ inline float warp_sum(float x) {
  for (int lane = 16; lane; lane /= 2) x += __shfl_xor_sync(~0u, x, lane);
  return x;
}

// Convolves one channel over all rows, hands each value to `take`, and keeps the window after each row.
template <typename T, typename Take>
__device__ void convolve(const Arguments<T>& a, int channel, int conv_dim, bool writes, Take take) {
  const float4 w = *reinterpret_cast<const float4*>(a.conv_weight + channel * kTaps);
  float x0 = a.past_conv[channel], x1 = a.past_conv[conv_dim + channel], x2 = a.past_conv[2 * conv_dim + channel];
  for (int row = 0; row < a.rows; ++row) {
    const float x3 = to_float(a.mixed[static_cast<size_t>(row) * a.width + channel]);
    const float sum = w.x * x0 + w.y * x1 + w.z * x2 + w.w * x3;
    take(row, sum * sigmoid(sum));
    x0 = x1, x1 = x2, x2 = x3;
    if (writes && (a.keep_rows || row == a.rows - 1)) {
      float* to = a.conv + (a.keep_rows ? static_cast<size_t>(row) * 3 * conv_dim : 0) + channel;
      to[0] = x0, to[conv_dim] = x1, to[2 * conv_dim] = x2;
    }
  }
}

template <typename T, int DK, int DV>
__global__ void __cluster_dims__(DV / kColumns, 1, 1) __launch_bounds__(kThreads) gdn_rows(const Arguments<T> a) {
  namespace cg = cooperative_groups;
  constexpr int kKept = DK / kWarps;  // rows of the state a thread holds
  __shared__ float q[kMaxRows][DK], k[kMaxRows][DK], v[kMaxRows][kColumns], part[2][kWarps][kColumns];
  __shared__ float read[kMaxRows][kWarps][kColumns], g[kMaxRows], beta[kMaxRows], squares[kMaxRows];
  const int head = blockIdx.y, group = a.value_heads / a.key_heads, key_head = head / group;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, column = blockIdx.x * kColumns + lane;
  const int keys = a.key_heads * DK, conv_dim = 2 * keys + a.value_heads * DV;

  const float* from = a.past_state + (static_cast<size_t>(head) * DK + warp * kKept) * DV + column;
  float s[kKept];
#pragma unroll
  for (int i = 0; i < kKept; ++i) s[i] = from[i * DV];

  const bool owns_keys = blockIdx.x == 0 && head % group == 0;  // several heads read a key, one keeps its window
  for (int c = threadIdx.x; c < 2 * DK; c += kThreads) {
    const bool is_key = c >= DK;
    const int channel = (is_key ? keys + c - DK : c) + key_head * DK;
    convolve(a, channel, conv_dim, owns_keys, [&](int row, float x) { (is_key ? k : q)[row][c % DK] = x; });
  }
  if (warp == 0)
    convolve(a, 2 * keys + head * DV + column, conv_dim, true, [&](int row, float x) { v[row][lane] = x; });
  if (threadIdx.x < a.rows) {
    const T* row = a.mixed + static_cast<size_t>(threadIdx.x) * a.width;
    g[threadIdx.x] = a.decay_scale[head] * softplus(to_float(row[a.a_offset + head]) + a.dt_bias[head]);
    beta[threadIdx.x] = sigmoid(to_float(row[a.b_offset + head]));
  }
  __syncthreads();
  for (int vector = warp; vector < 2 * a.rows; vector += kWarps) {
    float* x = vector < a.rows ? q[vector] : k[vector - a.rows];
    float sum = 0;
    for (int i = lane; i < DK; i += 32) sum += x[i] * x[i];
    const float factor = rsqrtf(warp_sum(sum) + a.l2_eps) * (vector < a.rows ? rsqrtf(static_cast<float>(DK)) : 1.f);
    for (int i = lane; i < DK; i += 32) x[i] *= factor;
  }
  __syncthreads();

  const size_t tile = (static_cast<size_t>(head) * DK + warp * kKept) * DV + column;
  const size_t all = static_cast<size_t>(a.value_heads) * DK * DV;
  for (int row = 0; row < a.rows; ++row) {
    const float decay = __expf(g[row]);
    const float* key = k[row] + warp * kKept;
    const float* query = q[row] + warp * kKept;
    float found = 0;
#pragma unroll
    for (int i = 0; i < kKept; ++i) s[i] *= decay, found += s[i] * key[i];
    part[row % 2][warp][lane] = found;
    __syncthreads();
    found = part[row % 2][0][lane] + part[row % 2][1][lane] + part[row % 2][2][lane] + part[row % 2][3][lane];
    const float delta = beta[row] * (v[row][lane] - found);
    float out = 0;
#pragma unroll
    for (int i = 0; i < kKept; ++i) s[i] += key[i] * delta, out += s[i] * query[i];
    read[row][warp][lane] = out;
    if (a.keep_rows || row == a.rows - 1) {
      float* to = a.state + (a.keep_rows ? row * all : 0) + tile;
#pragma unroll
      for (int i = 0; i < kKept; ++i) to[i * DV] = s[i];
    }
  }
  __syncthreads();

  for (int row = warp; row < a.rows; row += kWarps) {
    const float o = read[row][0][lane] + read[row][1][lane] + read[row][2][lane] + read[row][3][lane];
    read[row][0][lane] = o;
    const float sum = warp_sum(o * o);
    if (lane == 0) squares[row] = sum;
  }
  cg::cluster_group cluster = cg::this_cluster();
  cluster.sync();
  for (int row = warp; row < a.rows; row += kWarps) {
    float sum = 0;
    for (int block = 0; block < DV / kColumns; ++block) sum += cluster.map_shared_rank(squares, block)[row];
    const size_t place = static_cast<size_t>(head) * DV + column;
    const float z = to_float(a.mixed[static_cast<size_t>(row) * a.width + a.z_offset + place]);
    const float gate = a.sigmoid_gate ? sigmoid(z) : z * sigmoid(z);
    const float normed = read[row][0][lane] * rsqrtf(sum / DV + a.eps) * a.norm[column];
    store(a.y + static_cast<size_t>(row) * a.value_heads * DV + place, normed * gate);
  }
  cluster.sync();  // nobody leaves while another still reads its sum
}

template <typename T>
cudaError_t launch(const Arguments<T>& a, int dk, int dv, cudaStream_t stream) {
  if (dk == 128 && dv == 128)
    gdn_rows<T, 128, 128><<<dim3(4, a.value_heads), kThreads, 0, stream>>>(a);
  else if (dk == 64 && dv == 64)
    gdn_rows<T, 64, 64><<<dim3(2, a.value_heads), kThreads, 0, stream>>>(a);
  else
    return cudaErrorInvalidValue;
  return cudaGetLastError();
}

}  // namespace gdn
