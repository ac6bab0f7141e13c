// How the kernel of matmul_w4.cuh is launched: ring, workspace, attributes. Works inside a stream capture.
#pragma once
#include <algorithm>

#include "matmul_w4.cuh"

namespace w4 {

struct Tuning {
  int grid;        // blocks of threads
  int ring_bytes;  // shared memory for the ring; half of a multiprocessor's lets two kernels overlap
  int least;       // units a block has at least: more blocks than that make sums that are dearer than the bytes
};

inline int row_blocks(int weight_rows, int row_tiles) {
  return (weight_rows + row_tiles * kTileRows - 1) / (row_tiles * kTileRows);
}
inline int unit_count(int weight_rows, int k, int row_tiles) {
  return row_blocks(weight_rows, row_tiles) * ((k + kUnitK - 1) / kUnitK);
}
inline size_t packed_bytes(int weight_rows, int k, int row_tiles) {
  return static_cast<size_t>(unit_count(weight_rows, k, row_tiles)) * 2 * row_tiles * (kTileBytes + kScaleBytes);
}
inline size_t partial_bytes(int grid, int row_tiles) { return static_cast<size_t>(grid) * 2 * row_tiles * 512; }
inline size_t arrival_bytes(int grid, int warps) { return static_cast<size_t>(grid) * warps * 4; }

// Everything of `a` but share, extra and stages must be set.
template <typename T, int WARPS, int TILES, bool SWIGLU>
cudaError_t launch(Arguments<T> a, const Tuning& tuning, cudaStream_t stream) {
  constexpr int kRowTiles = WARPS * TILES;
  auto kernel = multiply<T, WARPS, TILES, SWIGLU>;
  const int units = unit_count(SWIGLU ? 2 * a.n : a.n, a.k, kRowTiles);
  const int grid = std::max(1, std::min(tuning.grid, units / tuning.least));
  const int stage = 2 * (kRowTiles * (kTileBytes + kScaleBytes) + a.rows * kHalfK * 2) + 16;
  a.share = units / grid, a.extra = units % grid;
  a.stages = std::max(2, tuning.ring_bytes / stage);
  const int bytes = a.stages * stage;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(grid);
  config.blockDim = dim3((WARPS + 1) * 32);
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, a);
}

}  // namespace w4
