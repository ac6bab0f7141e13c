#pragma once
#include "cuda_fp16.h"
struct __nv_bfloat16 { uint16_t bits; };
inline float __bfloat162float(__nv_bfloat16 v) { return __uint_as_float(static_cast<uint32_t>(v.bits) << 16); }
inline __nv_bfloat16 __float2bfloat16_rn(float v) {
  const uint32_t b = bits_of(v);
  return {static_cast<uint16_t>((b + 0x7fff + (b >> 16 & 1)) >> 16)};
}
