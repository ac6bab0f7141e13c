// Attention of a few rows over a cache, between the projections, as two kernels.
//
//     split_attention   norm and rotation of queries and keys, append to the cache, attention over one chunk of it
//     combine           the chunks' sums to one, times sigmoid(gate)
//
// A block has all query rows of one kv head and one chunk of the cache. Chunks are equally long, a multiple of kUnit that
// is read off the length on the device: a captured launch keeps its blocks and spreads any length over them. All rows of a
// forward see the same chunks, so a row gets the same bits in a forward of one row and of several, unless a multiple of
// kUnit * splits lies between the two lengths.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "ptx.cuh"

namespace attention {

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kTile = 64, kUnit = 32;  // keys that a block takes at once; keys that a chunk is a multiple of
constexpr int kMaxRows = 16, kMaxQueries = 64, kMaxSplits = 160;
constexpr int kAligned = 8;  // what offsets, width and rotary_half are a multiple of

template <typename T>
struct Arguments {
  const T* qkvg;        // [rows, width]: at their offsets q and gate [heads, D], k and v [kv_heads, D]
  const int* last_row;  // position of the last row
  const T *cosines, *sines;  // [capacity, rotary_half]
  const T *q_norm, *k_norm;  // [D]
  T *key, *value;       // [kv_heads, capacity, D], updated in place
  T* y;                 // [rows, heads * D]
  float* sums;          // [splits, kv_heads, rows * group, D]
  float* stats;         // [splits, kv_heads, rows * group, 2]: maximum, in powers of two, and sum
  int rows, width, heads, kv_heads, capacity, rotary_half, splits;
  int q_offset, k_offset, v_offset, gate_offset;
  float eps, scale_log2;
};

template <int D, int MT>  // MT * 16 query rows
struct Shape {
  static constexpr int kQueryTiles = MT == 3 ? 4 : MT;             // scores: a warp has 16 queries
  static constexpr int kKeyGroups = kWarps / kQueryTiles;          // and this part of a tile's keys
  static constexpr int kKeyTiles = kTile / 8 / kKeyGroups;
  static constexpr int kValueTiles = D / 8 / kWarps;               // sums: a warp has all queries and these columns
  static constexpr int kChunks = D / 8;                            // of 16 bytes, in a row of the cache
  static constexpr int kStages = D == 256 ? 3 : D == 128 ? 5 : 6;
  static constexpr int kTileBytes = kTile * D * 2, kStageBytes = 2 * kTileBytes;
  static constexpr int kQueries = MT * 16, kLane = D / 32;         // numbers of a head that a lane has
  static constexpr int kWeightsAt = kStages * kStageBytes, kMaximaAt = kWeightsAt + kQueries * kTile * 2;
  static constexpr int kFactorsAt = kMaximaAt + kKeyGroups * kQueries * 4;
  static constexpr int kBytes = kFactorsAt + kQueries * 4;
  // while the queries are made they lie in the last stage, with the rotations behind them
  static constexpr int kQueryAt = (kStages - 1) * kStageBytes, kRotationsAt = kQueryAt + kQueries * D * 2;
  static_assert(kRotationsAt + kMaxRows * D / 2 * 8 <= kWeightsAt, "the rotations leave the stage");
};

__device__ __forceinline__ void mma(float* c, const uint32_t* a, uint32_t b0, uint32_t b1, __half) { w4::mma_fp16(c, a, b0, b1); }
__device__ __forceinline__ void mma(float* c, const uint32_t* a, uint32_t b0, uint32_t b1, __nv_bfloat16) {
  w4::mma_bf16(c, a, b0, b1);
}
__device__ __forceinline__ uint32_t pack(float low, float high, __half) { return w4::pack_fp16(low, high); }
__device__ __forceinline__ uint32_t pack(float low, float high, __nv_bfloat16) { return w4::pack_bf16(low, high); }
__device__ __forceinline__ float wide(__half x) { return __half2float(x); }
__device__ __forceinline__ float wide(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float warp_sum(float x) {
  for (int lane = 16; lane; lane /= 2) x += __shfl_xor_sync(~0u, x, lane);
  return x;
}
__device__ __forceinline__ float warp_max(float x) {
  for (int lane = 16; lane; lane /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, lane));
  return x;
}

// N numbers in one load or store
template <typename T, int N>
struct __align__(N * 2) Vector {
  T x[N];
};
template <typename T, int N>
__device__ __forceinline__ Vector<T, N> load(const T* from) {
  return *reinterpret_cast<const Vector<T, N>*>(from);
}
template <int N, typename T>
__device__ __forceinline__ void store(void* to, const float* x, T kind) {
  Vector<T, N> v;
  for (int i = 0; i < N; i += 2) {
    const uint32_t word = pack(x[i], x[i + 1], kind);
    memcpy(v.x + i, &word, 4);
  }
  *reinterpret_cast<Vector<T, N>*>(to) = v;
}

// Keys of a chunk, so that all of a cache of `length` rows fall into at most `splits`.
__device__ __forceinline__ int chunk_of(int length, int splits) {
  const int units = (length + kUnit - 1) / kUnit;
  return max(1, (units + splits - 1) / splits) * kUnit;
}
// A length or position that the device holds is never believed beyond the cache.
template <typename T>
__device__ __forceinline__ int last_position(const Arguments<T>& a) {
  return min(__ldcg(a.last_row), a.capacity - 1);
}

template <int N>
struct alignas(N < 4 ? N * 4 : 16) Floats {
  float x[N];
};

// A warp norms and rotates one head; x becomes what lies at lane * N and on. The two halves of the rotated channels begin
// at lanes of their own (kAligned), so a pair meets by a shuffle. `rotation`: half cosines, then half sines.
template <int N, typename T>
__device__ __forceinline__ void norm_and_rotate(const Vector<T, N>& from, const Vector<T, N>& weight, const float* rotation,
                                                int half, float eps, float* x) {
  const int lane = threadIdx.x % 32, lanes = half / N, at = lane < lanes ? lane : lane - lanes;
  float squares = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) x[i] = wide(from.x[i]), squares += x[i] * x[i];
  const float factor = rsqrtf(warp_sum(squares) / (32 * N) + eps);
  const bool rotated = lane < 2 * lanes;
  const int other = lane < lanes ? lane + lanes : rotated ? at : lane;
  Floats<N> c{}, s{};
  if (rotated) {
    c = *reinterpret_cast<const Floats<N>*>(rotation + at * N);
    s = *reinterpret_cast<const Floats<N>*>(rotation + half + at * N);
  }
#pragma unroll
  for (int i = 0; i < N; ++i) {
    x[i] *= factor * wide(weight.x[i]);
    const float pair = __shfl_sync(~0u, x[i], other);
    if (rotated) x[i] = x[i] * c.x[i] + (lane < lanes ? -pair : pair) * s.x[i];
  }
}

// The queries of kv head `head` as the tensor core's left operand, and the forward's own rows of the cache where they lie
// in begin .. end.
template <typename T, int D, int MT>
__device__ __forceinline__ void prepare(const Arguments<T>& a, uint8_t* memory, int head, int first, int begin, int end) {
  using S = Shape<D, MT>;
  constexpr int N = S::kLane;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = a.heads / a.kv_heads, queries = a.rows * group;
  T* query = reinterpret_cast<T*>(memory + S::kQueryAt);
  float* rotations = reinterpret_cast<float*>(memory + S::kRotationsAt);
  Vector<T, N> raw[2 * MT];
#pragma unroll
  for (int i = 0; i < 2 * MT; ++i) {
    const int r = warp + i * kWarps, q = min(r, queries - 1);
    raw[i] = load<T, N>(a.qkvg + static_cast<size_t>(q / group) * a.width + a.q_offset + (head * group + q % group) * D + lane * N);
  }
  for (int i = threadIdx.x; i < a.rows * a.rotary_half; i += kThreads) {
    const int row = i / a.rotary_half, angle = i % a.rotary_half;
    const size_t at = static_cast<size_t>(max(first + row, 0)) * a.rotary_half + angle;
    float* to = rotations + row * 2 * a.rotary_half + angle;
    to[0] = wide(a.cosines[at]), to[a.rotary_half] = wide(a.sines[at]);
  }
  const Vector<T, N> q_norm = load<T, N>(a.q_norm + lane * N), k_norm = load<T, N>(a.k_norm + lane * N);
  float x[N];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 2 * MT; ++i) {
    const int r = warp + i * kWarps;
    if (r < queries)
      norm_and_rotate<N>(raw[i], q_norm, rotations + r / group * 2 * a.rotary_half, a.rotary_half, a.eps, x);
    else
      for (int j = 0; j < N; ++j) x[j] = 0;
    store<N>(query + (r * S::kChunks + ((lane * N / 8) ^ (r & 7))) * 8 + lane * N % 8, x, T{});
  }
  const int from = max(max(first, begin), 0), fresh = end - from;
  for (int task = warp; task < 2 * fresh; task += kWarps) {
    const int position = from + task / 2, row = position - first;
    const T* source = a.qkvg + static_cast<size_t>(row) * a.width + head * D + lane * N;
    const size_t place = (static_cast<size_t>(head) * a.capacity + position) * D + lane * N;
    if (task % 2) {
      *reinterpret_cast<Vector<T, N>*>(a.value + place) = load<T, N>(source + a.v_offset);
    } else {
      norm_and_rotate<N>(load<T, N>(source + a.k_offset), k_norm, rotations + row * 2 * a.rotary_half, a.rotary_half, a.eps, x);
      store<N>(a.key + place, x, T{});
    }
  }
  __syncthreads();
}

template <typename T, int D, int MT>
__global__ void __launch_bounds__(kThreads, 1) split_attention(const Arguments<T> a) {
  using S = Shape<D, MT>;
  extern __shared__ __align__(128) uint8_t memory[];
  w4::let_next_kernel_start();
  w4::await_previous_kernel();
  const int last = last_position(a), first = last + 1 - a.rows, length = last + 1, head = blockIdx.y;
  const int chunk = chunk_of(length, a.splits), begin = blockIdx.x * chunk, end = min(begin + chunk, length);
  if (begin >= end) return;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int group = a.heads / a.kv_heads, queries = a.rows * group, tiles = (end - begin + kTile - 1) / kTile;
  const T* keys = a.key + static_cast<size_t>(head) * a.capacity * D;
  const T* values = a.value + static_cast<size_t>(head) * a.capacity * D;
  const uint32_t base = w4::shared_address(memory);

  auto fetch = [&](int tile) {
    constexpr int kAtOnce = kThreads / S::kChunks;
    const int column = threadIdx.x % S::kChunks, row0 = threadIdx.x / S::kChunks, at = begin + tile * kTile;
    const uint32_t to = base + tile % S::kStages * S::kStageBytes + (row0 * S::kChunks + (column ^ (row0 & 7))) * 16;
#pragma unroll
    for (int both = 0; both < 2; ++both)
#pragma unroll
      for (int row = 0; row < kTile; row += kAtOnce) {
        const bool there = at + row0 + row < end;
        const T* from = (both ? values : keys) + static_cast<size_t>(there ? at + row0 + row : begin) * D + column * 8;
        w4::copy_async(to + both * S::kTileBytes + row * S::kChunks * 16, from, there);
      }
    w4::close_copies();
  };
  // what the cache holds already can come while the queries are made; the last stage is theirs
  int fetched = 0;
  while (fetched < S::kStages - 1 && fetched < tiles && begin + (fetched + 1) * kTile <= first) fetch(fetched++);
  prepare<T, D, MT>(a, memory, head, first, begin, end);
  for (; fetched < S::kStages - 1; ++fetched)
    if (fetched < tiles)
      fetch(fetched);
    else
      w4::close_copies();

  const int m = warp / S::kKeyGroups, part = warp % S::kKeyGroups, key0 = part * S::kKeyTiles * 8;
  const bool scores = m < MT;  // of four warps' worth of queries three can be in use
  uint32_t q[D / 16][4];
  if (scores)
#pragma unroll
    for (int i = 0; i < D / 16; ++i) {
      const int row = m * 16 + lane % 16;
      w4::load_matrices(q[i], base + S::kQueryAt + (row * S::kChunks + ((2 * i + lane / 16) ^ (row & 7))) * 16);
    }
  const int row0 = m * 16 + g, row1 = row0 + 8;
  const int limit0 = min(end, first + row0 / group + 1), limit1 = min(end, first + row1 / group + 1);
  float* maxima = reinterpret_cast<float*>(memory + S::kMaximaAt);
  float* factors = reinterpret_cast<float*>(memory + S::kFactorsAt);
  float most0 = -INFINITY, most1 = -INFINITY, o[MT][S::kValueTiles][4] = {}, sum[4] = {};

  for (int tile = 0; tile < tiles; ++tile) {
    w4::await_copies<S::kStages - 2>();
    __syncthreads();
    if (tile + S::kStages - 1 < tiles)
      fetch(tile + S::kStages - 1);
    else
      w4::close_copies();
    const uint32_t keys_at = base + tile % S::kStages * S::kStageBytes, values_at = keys_at + S::kTileBytes;

    float s[S::kKeyTiles][4] = {};
    if (scores) {
#pragma unroll
      for (int i = 0; i < D / 32; ++i)
#pragma unroll
        for (int n = 0; n < S::kKeyTiles; ++n) {
          uint32_t b[4];
          const int key = key0 + n * 8 + lane % 8;
          w4::load_matrices(b, keys_at + (key * S::kChunks + ((4 * i + lane / 8) ^ (lane & 7))) * 16);
          mma(s[n], q[2 * i], b[0], b[1], T{});
          mma(s[n], q[2 * i + 1], b[2], b[3], T{});
        }
      float top0 = -INFINITY, top1 = -INFINITY;
#pragma unroll
      for (int n = 0; n < S::kKeyTiles; ++n)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int key = begin + tile * kTile + key0 + n * 8 + 2 * t + j;
          if (key >= limit0) s[n][j] = -INFINITY;
          if (key >= limit1) s[n][2 + j] = -INFINITY;
          top0 = fmaxf(top0, s[n][j]), top1 = fmaxf(top1, s[n][2 + j]);
        }
#pragma unroll
      for (int other = 1; other < 4; other *= 2) {
        top0 = fmaxf(top0, __shfl_xor_sync(~0u, top0, other));
        top1 = fmaxf(top1, __shfl_xor_sync(~0u, top1, other));
      }
      if (t == 0) maxima[part * S::kQueries + row0] = top0, maxima[part * S::kQueries + row1] = top1;
    }
    __syncthreads();
    if (scores) {
      const float before0 = most0 * a.scale_log2, before1 = most1 * a.scale_log2;
#pragma unroll
      for (int i = 0; i < S::kKeyGroups; ++i)
        most0 = fmaxf(most0, maxima[i * S::kQueries + row0]), most1 = fmaxf(most1, maxima[i * S::kQueries + row1]);
      // a row that has seen no key yet: any finite number serves
      const float at0 = most0 == -INFINITY ? 0.f : most0 * a.scale_log2, at1 = most1 == -INFINITY ? 0.f : most1 * a.scale_log2;
      uint8_t* weights = memory + S::kWeightsAt;
#pragma unroll
      for (int n = 0; n < S::kKeyTiles; ++n) {
        float p[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) p[j] = w4::power_of_two(s[n][j] * a.scale_log2 - (j < 2 ? at0 : at1));
        const int to = ((key0 / 8 + n) ^ g) * 16 + t * 4;  // row0 & 7 is g, and row1's too
        *reinterpret_cast<uint32_t*>(weights + row0 * kTile * 2 + to) = pack(p[0], p[1], T{});
        *reinterpret_cast<uint32_t*>(weights + row1 * kTile * 2 + to) = pack(p[2], p[3], T{});
      }
      if (part == 0 && t == 0) factors[row0] = w4::power_of_two(before0 - at0), factors[row1] = w4::power_of_two(before1 - at1);
    }
    __syncthreads();

#pragma unroll
    for (int i = 0; i < MT; ++i) {
      const float f0 = factors[i * 16 + g], f1 = factors[i * 16 + g + 8];
#pragma unroll
      for (int n = 0; n < S::kValueTiles; ++n) o[i][n][0] *= f0, o[i][n][1] *= f0, o[i][n][2] *= f1, o[i][n][3] *= f1;
      if (warp == i) sum[0] *= f0, sum[1] *= f0, sum[2] *= f1, sum[3] *= f1;
    }
    const uint32_t one = pack(1.f, 1.f, T{});
    uint32_t v[4 * ((S::kValueTiles + 1) / 2)];
#pragma unroll
    for (int k = 0; k < kTile / 16; ++k) {
      const uint32_t* b = v;
      if constexpr (S::kValueTiles == 1) {  // two steps of 16 keys in one load
        if (k % 2 == 0) w4::load_transposed(v, values_at + ((k * 16 + lane) * S::kChunks + (warp ^ (lane & 7))) * 16);
        b = v + k % 2 * 2;
      } else {
#pragma unroll
        for (int n = 0; n < S::kValueTiles; n += 2) {
          const int column = warp * S::kValueTiles + n + lane / 16;
          w4::load_transposed(v + 2 * n, values_at + ((k * 16 + lane % 16) * S::kChunks + (column ^ (lane & 7))) * 16);
        }
      }
#pragma unroll
      for (int i = 0; i < MT; ++i) {
        uint32_t p[4];
        w4::load_matrices(p, base + S::kWeightsAt + (i * 16 + lane % 16) * kTile * 2 + (((2 * k + lane / 16) ^ (lane & 7)) * 16));
#pragma unroll
        for (int n = 0; n < S::kValueTiles; ++n) mma(o[i][n], p, b[2 * n], b[2 * n + 1], T{});
        if (warp == i) mma(sum, p, one, one, T{});
      }
    }
  }

  const size_t at = (static_cast<size_t>(blockIdx.x) * a.kv_heads + head) * queries;
  if (scores && part == 0 && t == 0) {
    if (row0 < queries) a.stats[2 * (at + row0)] = most0 * a.scale_log2;
    if (row1 < queries) a.stats[2 * (at + row1)] = most1 * a.scale_log2;
  }
#pragma unroll
  for (int i = 0; i < MT; ++i)
#pragma unroll
    for (int high = 0; high < 2; ++high) {
      const int row = i * 16 + g + 8 * high;
      if (row >= queries) continue;
      if (warp == i && t == 0) a.stats[2 * (at + row) + 1] = sum[2 * high];
      float* to = a.sums + (at + row) * D + warp * S::kValueTiles * 8 + 2 * t;
#pragma unroll
      for (int n = 0; n < S::kValueTiles; ++n)
        *reinterpret_cast<float2*>(to + n * 8) = make_float2(o[i][n][2 * high], o[i][n][2 * high + 1]);
    }
}

// One head of one row a block.
template <typename T, int D>
__global__ void __launch_bounds__(kThreads) combine(const Arguments<T> a) {
  constexpr int kLanes = D / 4, kGroups = kThreads / kLanes;
  extern __shared__ __align__(128) uint8_t memory[];
  float4* parts = reinterpret_cast<float4*>(memory);
  float* weights = reinterpret_cast<float*>(memory + kThreads * 16);
  w4::let_next_kernel_start();
  w4::await_previous_kernel();
  const int head = blockIdx.x, row = blockIdx.y, group = a.heads / a.kv_heads, lane = threadIdx.x % 32;
  const int length = last_position(a) + 1, chunk = chunk_of(length, a.splits), used = length > 0 ? (length + chunk - 1) / chunk : 0;
  const size_t at = static_cast<size_t>(head / group) * a.rows * group + row * group + head % group;
  const size_t step = static_cast<size_t>(a.heads) * a.rows;
  const int column = threadIdx.x % kLanes * 4, mine = threadIdx.x / kLanes;
  // all that is read is on its way before any of it is needed
  constexpr int kEarly = 36 / kGroups < 1 ? 1 : 36 / kGroups;
  const float4* sums = reinterpret_cast<const float4*>(a.sums + at * D + column);
  const size_t stride = step * D / 4;
  float4 early[kEarly];
#pragma unroll
  for (int j = 0; j < kEarly; ++j) {
    const int i = mine + j * kGroups;
    early[j] = i < used ? __ldcg(sums + i * stride) : make_float4(0, 0, 0, 0);
  }
  const Vector<T, 4> gate = load<T, 4>(a.qkvg + static_cast<size_t>(row) * a.width + a.gate_offset + head * D + column);
  if (threadIdx.x < 32) {
    float2 stat[kMaxSplits / 32];
    float most = -INFINITY, total = 0;
#pragma unroll
    for (int j = 0; j < kMaxSplits / 32; ++j) {
      const int i = lane + 32 * j;
      stat[j] = i < used ? __ldcg(reinterpret_cast<const float2*>(a.stats) + at + i * step) : make_float2(-INFINITY, 0);
      most = fmaxf(most, stat[j].x);
    }
    most = warp_max(most);
    if (most == -INFINITY) most = 0;
#pragma unroll
    for (int j = 0; j < kMaxSplits / 32; ++j) {
      const float weight = w4::power_of_two(stat[j].x - most);
      total += weight * stat[j].y;
      if (lane + 32 * j < a.splits) weights[lane + 32 * j] = weight;
    }
    total = warp_sum(total);
    if (lane == 0) weights[a.splits] = total > 0 ? 1 / total : 0.f;
  }
  __syncthreads();
  float4 sum = make_float4(0, 0, 0, 0);
  auto add = [&](const float4& x, float w) { sum.x += w * x.x, sum.y += w * x.y, sum.z += w * x.z, sum.w += w * x.w; };
#pragma unroll
  for (int j = 0; j < kEarly; ++j)
    if (mine + j * kGroups < used) add(early[j], weights[mine + j * kGroups]);
#pragma unroll 4
  for (int i = mine + kEarly * kGroups; i < used; i += kGroups) add(__ldcg(sums + i * stride), weights[i]);
  parts[threadIdx.x] = sum;
  __syncthreads();
  if (mine > 0) return;
  for (int i = 1; i < kGroups; ++i) {
    const float4 x = parts[i * kLanes + threadIdx.x];
    sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
  }
  float out[4] = {sum.x, sum.y, sum.z, sum.w};
  for (int i = 0; i < 4; ++i) out[i] *= weights[a.splits] / (1.f + __expf(-wide(gate.x[i])));
  store<4>(a.y + (static_cast<size_t>(row) * a.heads + head) * D + column, out, T{});
}

inline size_t combine_bytes(int splits) { return kThreads * 16 + (splits + 1) * 4; }

}  // namespace attention
