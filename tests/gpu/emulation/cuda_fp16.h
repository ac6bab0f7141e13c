// Enough of CUDA to run the kernels on a CPU: one thread a CUDA thread, one block after the other.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#define __device__
#define __global__
#define __host__
#define __shared__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

struct uint3_ { int x, y, z; };
struct uint4 { uint32_t x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
extern thread_local uint3_ threadIdx, blockIdx;

template <typename T> uint32_t bits_of(T v) { uint32_t b = 0; memcpy(&b, &v, sizeof(T)); return b; }
struct __half { uint16_t bits; };
struct __half2 { __half x, y; };
inline float __half2float(__half h) { _Float16 f; memcpy(&f, &h, 2); return static_cast<float>(f); }
inline __half __float2half_rn(float v) { const _Float16 f = static_cast<_Float16>(v); __half h; memcpy(&h, &f, 2); return h; }
inline float2 __half22float2(__half2 h) { return {__half2float(h.x), __half2float(h.y)}; }
inline float __uint_as_float(uint32_t u) { float f; memcpy(&f, &u, 4); return f; }
using std::max;
using std::min;
#define __expf expf
void __syncthreads();
void __syncwarp();
unsigned __shfl_sync(unsigned mask, unsigned value, int lane);
float __shfl_xor_sync(unsigned mask, float value, int lane);
float __shfl_sync(unsigned mask, float value, int lane);
inline float rsqrtf(float x) { return 1 / std::sqrt(x); }
template <typename T> T __ldcg(const T* p) { return *p; }
template <typename T> void __stcg(T* p, T v) { *p = v; }
