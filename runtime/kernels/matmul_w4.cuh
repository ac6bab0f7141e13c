// y[M,N] = x[M,K] * W[N,K]^T for M <= 8, W in four bits: symmetric, zero point 8, one scale a block of 32.
//
// Layout of the packed weights (repack.py writes it). A tile is 16 rows x 64 k. A half is ROW_TILES tiles below each
// other: 512 B of four-bit values a tile, then the scales, 128 B for each two tiles. A unit is two halves beside each
// other, 128 k, in one piece; units follow each other along k, then along rows, so a contiguous run of units is a
// contiguous run of bytes.
//
// Work: the run of all units is cut into one even piece a block of threads (stream-K), whatever N and K are. A producer
// warp streams the piece into a ring in shared memory by bulk copies, a unit of x beside it; each of the other
// warps multiplies its own row tiles with mma m16n8k16, the weights as A and the rows of x as the columns of B. Integer
// weights are exact in fp16 and bf16, the scale is applied to the fp32 sum of each block of 32. Where a row block is
// cut, each side leaves fp32 sums, and whoever comes last adds them in the order of k. So the sum for a row is the same,
// bit for bit, whatever M is and whatever the other rows hold.
//
// Programmatic dependent launch: everything before griddepcontrol.wait reads weights only, so a block may start while
// the kernel before it drains.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "ptx.cuh"

namespace w4 {

constexpr int kTileRows = 16, kHalfK = 64, kUnitK = 2 * kHalfK, kTileBytes = 512, kScaleBytes = 64, kMaxRows = 8;

template <typename T>
struct Arguments {
  const uint8_t* packed;
  const T* x;          // [M, K]
  const T* residual;   // [M, N] or null: added to the result
  T* y;                // [M, N]
  float4* partials;    // workspace, see workspace_bytes
  unsigned* arrivals;  // workspace, zero between launches
  int rows, n, k;      // M, N, K; with SWIGLU, N is the number of results, half the rows of W
  int share, extra;    // units of W a block, and how many blocks have one more
  int stages;          // length of the ring
};

template <typename T>
struct Number;

template <>
struct Number<__half> {
  // 0x6400 | q is 1024 + q, 0x5400 | q << 4 is 64 + q; both less their offset and 8 are exact
  static __device__ __forceinline__ void weights(uint32_t q, uint32_t* a) {
    const uint32_t up = q >> 8;
    a[0] = less_fp16(masked(q, 0x000f000f, 0x64006400), 0x64086408);
    a[1] = less_fp16(masked(q, 0x00f000f0, 0x54005400), 0x54805480);
    a[2] = less_fp16(masked(up, 0x000f000f, 0x64006400), 0x64086408);
    a[3] = less_fp16(masked(up, 0x00f000f0, 0x54005400), 0x54805480);
  }
  static __device__ __forceinline__ void multiply(float* c, const uint32_t* a, uint32_t b0, uint32_t b1) { mma_fp16(c, a, b0, b1); }
  static __device__ __forceinline__ float2 widen(uint32_t pair) {
    __half2 h;
    *reinterpret_cast<uint32_t*>(&h) = pair;
    return __half22float2(h);
  }
  static __device__ __forceinline__ float wide(__half v) { return __half2float(v); }
  static __device__ __forceinline__ __half narrow(float v) { return __float2half_rn(v); }
};

template <>
struct Number<__nv_bfloat16> {
  // 0x4300 | q is 128 + q; less 136 it is exact
  static __device__ __forceinline__ void weights(uint32_t q, uint32_t* a) {
#pragma unroll
    for (int i = 0; i < 4; i++) a[i] = less_bf16(masked(q >> 4 * i, 0x000f000f, 0x43004300), 0x43084308);
  }
  static __device__ __forceinline__ void multiply(float* c, const uint32_t* a, uint32_t b0, uint32_t b1) { mma_bf16(c, a, b0, b1); }
  static __device__ __forceinline__ float2 widen(uint32_t pair) {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
  }
  static __device__ __forceinline__ float wide(__nv_bfloat16 v) { return __bfloat162float(v); }
  static __device__ __forceinline__ __nv_bfloat16 narrow(float v) { return __float2bfloat16_rn(v); }
};

// Block `c` has `share` units from first_unit(c) on, and one more while c < `extra`. No 64-bit division: it costs more
// than adding one block's sums does.
__device__ __forceinline__ int first_unit(int c, int share, int extra) { return c * share + min(c, extra); }
__device__ __forceinline__ int holder(unsigned u, unsigned share, unsigned extra) {
  const unsigned longer = extra * (share + 1);
  return u < longer ? u / (share + 1) : extra + (u - longer) / share;
}

template <typename T, bool SWIGLU>
__device__ __forceinline__ void store(const Arguments<T>& a, int row_tile, int g, int t, const float* v) {
  using Num = Number<T>;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int m = 2 * t + i;
    if (m >= a.rows) continue;
    if constexpr (SWIGLU) {  // rows 0..7 of a tile are gates, rows 8..15 the values that they scale
      const int n = row_tile * 8 + g;
      if (n < a.n) {
        const float gate = v[i], value = v[2 + i];
        a.y[static_cast<size_t>(m) * a.n + n] = Num::narrow(gate / (1.f + __expf(-gate)) * value);
      }
    } else {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int n = row_tile * kTileRows + g + 8 * h;
        if (n < a.n) {
          const size_t at = static_cast<size_t>(m) * a.n + n;
          float r = v[2 * h + i];
          if (a.residual) r += Num::wide(a.residual[at]);
          a.y[at] = Num::narrow(r);
        }
      }
    }
  }
}

// One lane's share of a half: x of its row, and the weights and scales of TILES row tiles.
template <int TILES>
struct Half {
  uint4 x[2], w[TILES], scales[TILES / 2];
};

template <typename T, int TILES>
__device__ __forceinline__ void accumulate(const Half<TILES>& half, float (&acc)[TILES][4]) {
  using Num = Number<T>;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const uint4 b = half.x[h];
#pragma unroll
    for (int r = 0; r < TILES; r++) {
      const uint4 s = half.scales[r / 2];
      float c[4] = {0.f, 0.f, 0.f, 0.f};
      uint32_t f[4];
      Num::weights(h ? half.w[r].z : half.w[r].x, f);
      Num::multiply(c, f, b.x, b.y);
      Num::weights(h ? half.w[r].w : half.w[r].y, f);
      Num::multiply(c, f, b.z, b.w);
      const float2 scale = Num::widen(r % 2 ? (h ? s.w : s.z) : (h ? s.y : s.x));
      acc[r][0] += scale.x * c[0];
      acc[r][1] += scale.x * c[1];
      acc[r][2] += scale.y * c[2];
      acc[r][3] += scale.y * c[3];
    }
  }
}

// WARPS warps of TILES row tiles each.
template <typename T, int WARPS, int TILES, bool SWIGLU>
__global__ void __launch_bounds__((WARPS + 1) * 32, 2) multiply(const __grid_constant__ Arguments<T> a) {
  static_assert(TILES % 2 == 0, "the scales of two tiles lie together");
  constexpr int kRowTiles = WARPS * TILES, kHalfBytes = kRowTiles * (kTileBytes + kScaleBytes), kUnitBytes = 2 * kHalfBytes;
  extern __shared__ __align__(128) uint8_t ring[];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, block = blockIdx.x;
  const int first = first_unit(block, a.share, a.extra), count = a.share + (block < a.extra), last = first + count;
  const int x_bytes = a.rows * kHalfK * 2;  // of one half
  const uint32_t weights_at = shared_address(ring), x_at = weights_at + a.stages * kUnitBytes;
  const uint32_t full = x_at + a.stages * 2 * x_bytes, empty = full + 8 * a.stages;

  if (threadIdx.x < a.stages) {
    barrier_init(full + 8 * threadIdx.x, 33);  // the weights' announcement and a share of x from each lane
    barrier_init(empty + 8 * threadIdx.x, WARPS);
    publish_barriers();
  }
  __syncthreads();
  // once every block is here the next kernel may fill its ring, beside this one's
  let_next_kernel_start();

  if (warp == WARPS) {
    const uint8_t* from = a.packed + static_cast<size_t>(first) * kUnitBytes;
    const uint64_t policy = read_once_policy();
    auto load_weights = [&](int i, int slot) {
      barrier_expect(full + 8 * slot, kUnitBytes);
      load_bulk(weights_at + slot * kUnitBytes, from + static_cast<size_t>(i) * kUnitBytes, kUnitBytes, full + 8 * slot, policy);
    };
    const int early = min(a.stages, count);
    if (lane == 0)
      for (int i = 0; i < early; i++) load_weights(i, i);
    const int k_units = (a.k + kUnitK - 1) / kUnitK;
    int k_unit = first % k_units;
    auto load_x = [&](int slot) {
      const uint32_t to = x_at + slot * 2 * x_bytes;
      for (int j = lane; j < a.rows * 16; j += 32) {
        const int m = j >> 4, half = j >> 3 & 1, part = j & 7, k = k_unit * kUnitK + (j & 15) * 8;
        // odd rows swap the parts of their blocks, so that a quarter warp reads all banks once
        copy_async(to + half * x_bytes + m * 128 + ((part ^ ((m & 1) << 2)) << 4), a.x + static_cast<size_t>(m) * a.k + (k < a.k ? k : 0), k < a.k);
      }
      if (++k_unit == k_units) k_unit = 0;
      barrier_arrive_after_copies(full + 8 * slot);
    };
    await_previous_kernel();
    for (int i = 0; i < early; i++) load_x(i);
    int slot = 0, parity = 0;
    for (int i = early; i < count; i++) {
      barrier_wait(empty + 8 * slot, parity);
      if (lane == 0) load_weights(i, slot);
      load_x(slot);
      if (++slot == a.stages) slot = 0, parity ^= 1;
    }
    return;
  }

  const int g = lane >> 2, t = lane & 3, k_units = (a.k + kUnitK - 1) / kUnitK;
  const int m = min(g, a.rows - 1);  // columns past M repeat the last row; nothing reads them
  const uint32_t x_lane = x_at + m * 128 + ((m & 1) << 6) + t * 16;
  const uint32_t w_lane = weights_at + warp * TILES * kTileBytes + lane * 16;
  const uint32_t s_lane = weights_at + kRowTiles * kTileBytes + warp * TILES * kScaleBytes + g * 16;
  auto read = [&](Half<TILES>& half, int slot, int which) {
    const uint32_t at = slot * kUnitBytes + which * kHalfBytes, x = x_lane + (slot * 2 + which) * x_bytes;
#pragma unroll
    for (int r = 0; r < TILES; r++) half.w[r] = load_shared(w_lane + at + r * kTileBytes);
#pragma unroll
    for (int r = 0; r < TILES / 2; r++) half.scales[r] = load_shared(s_lane + at + r * 2 * kScaleBytes);
    half.x[0] = load_shared(x), half.x[1] = load_shared(x ^ 64);
  };
  await_previous_kernel();

  // Registers hold one half beyond the one being multiplied, so that waiting and shared memory's latency hide behind it.
  Half<TILES> one, two;
  int slot = 0, parity = 0;
  barrier_wait(full, 0);
  read(one, 0, 0);
  for (int at = first; at < last;) {
    const int row_block = at / k_units, begin = row_block * k_units, stop = min(begin + k_units, last);
    float acc[TILES][4] = {};
    for (; at < stop; at++) {
      read(two, slot, 1);
      accumulate<T>(one, acc);
      __syncwarp();
      if (lane == 0) barrier_arrive(empty + 8 * slot);
      if (++slot == a.stages) slot = 0, parity ^= 1;
      if (at + 1 < last) {
        barrier_wait(full + 8 * slot, parity);
        read(one, slot, 0);
      }
      accumulate<T>(two, acc);
    }
    const int row_tile = row_block * kRowTiles + warp * TILES, end = begin + k_units;
    if (first <= begin && end <= last) {
#pragma unroll
      for (int r = 0; r < TILES; r++) store<T, SWIGLU>(a, row_tile + r, g, t, acc[r]);
      continue;
    }
    // a cut row block: leave the sums, and whoever is last adds all of them
    const int from = first <= begin ? block : holder(begin, a.share, a.extra);
    const int to = end <= last ? block : holder(end - 1, a.share, a.extra);
    const bool counted = 2 * t < a.rows;
    // a block cuts at most two row blocks: the one that its piece begins in, and the one that it ends in
    auto sums = [&](int c, bool second) { return a.partials + static_cast<size_t>((c * 2 + second) * kRowTiles + warp * TILES) * 32 + lane; };
    if (counted) {
      float4* mine = sums(block, first < begin);
#pragma unroll
      for (int r = 0; r < TILES; r++) __stcg(mine + r * 32, make_float4(acc[r][0], acc[r][1], acc[r][2], acc[r][3]));
    }
    __syncwarp();
    unsigned before = 0;
    unsigned* arrivals = a.arrivals + from * WARPS + warp;
    if (lane == 0) before = count_arrival(arrivals);
    before = __shfl_sync(0xffffffffu, before, 0);
    __syncwarp();
    if (before != static_cast<unsigned>(to - from)) continue;
    if (lane == 0) *arrivals = 0;
    const bool second = first_unit(from, a.share, a.extra) < begin;
    float sum[TILES][4] = {};
    for (int c = from; c <= to; c += 4) {
      float4 part[4][TILES];
#pragma unroll
      for (int i = 0; i < 4; i++)
#pragma unroll
        for (int r = 0; r < TILES; r++)
          part[i][r] = counted && c + i <= to ? __ldcg(sums(c + i, c + i == from && second) + r * 32) : make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
      for (int i = 0; i < 4; i++)
#pragma unroll
        for (int r = 0; r < TILES; r++)
          sum[r][0] += part[i][r].x, sum[r][1] += part[i][r].y, sum[r][2] += part[i][r].z, sum[r][3] += part[i][r].w;
    }
#pragma unroll
    for (int r = 0; r < TILES; r++) store<T, SWIGLU>(a, row_tile + r, g, t, sum[r]);
  }
}

}  // namespace w4
