// How the kernels of cached_attention.cuh are launched. Works inside a stream capture.
#pragma once
#include <algorithm>

#include "cached_attention.cuh"

namespace attention {

// A block fills a multiprocessor; more blocks than units of a full cache would have nothing to do.
inline int splits_of(int multiprocessors, int kv_heads, int capacity) {
  return std::max(1, std::min({multiprocessors / kv_heads, (capacity + kUnit - 1) / kUnit, kMaxSplits}));
}
// float32 numbers of `sums` and of `stats`
inline size_t sums_of(int splits, int heads, int rows, int width) { return static_cast<size_t>(splits) * heads * rows * width; }
inline size_t stats_of(int splits, int heads, int rows) { return static_cast<size_t>(splits) * heads * rows * 2; }

template <typename T>
cudaError_t start(void (*kernel)(Arguments<T>), dim3 grid, size_t bytes, const Arguments<T>& a, cudaStream_t stream) {
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, a);
}

template <typename T, int D>
cudaError_t launch_both(const Arguments<T>& a, cudaStream_t stream) {
  const dim3 grid(a.splits, a.kv_heads);
  cudaError_t error = cudaErrorInvalidValue;
  switch ((a.rows * (a.heads / a.kv_heads) + 15) / 16) {
    case 1: error = start<T>(split_attention<T, D, 1>, grid, Shape<D, 1>::kBytes, a, stream); break;
    case 2: error = start<T>(split_attention<T, D, 2>, grid, Shape<D, 2>::kBytes, a, stream); break;
    case 3: error = start<T>(split_attention<T, D, 3>, grid, Shape<D, 3>::kBytes, a, stream); break;
    case 4: error = start<T>(split_attention<T, D, 4>, grid, Shape<D, 4>::kBytes, a, stream); break;
  }
  if (error != cudaSuccess) return error;
  return start<T>(combine<T, D>, dim3(a.heads, a.rows), combine_bytes(a.splits), a, stream);
}

// cudaErrorInvalidValue where heads are not 64, 128 or 256 wide.
template <typename T>
cudaError_t launch(const Arguments<T>& a, int width, cudaStream_t stream) {
  switch (width) {
    case 64: return launch_both<T, 64>(a, stream);
    case 128: return launch_both<T, 128>(a, stream);
    case 256: return launch_both<T, 256>(a, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace attention
