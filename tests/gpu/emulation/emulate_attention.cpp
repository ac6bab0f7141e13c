// Runs cached_attention.cuh on a CPU and compares with fp64; ends with 0 if all is right.
//
//     g++ -std=c++20 -O1 -pthread -I tests/gpu/emulation -I tests/gpu -I runtime/kernels -o emulate \
//         tests/gpu/emulation/emulate_attention.cpp && ./emulate
#include <barrier>
#include <cstdio>
#include <functional>
#include <memory>
#include <thread>
#include <type_traits>

#include "cuda_bf16.h"
#include "ptx.cuh"  // first: the kernel's own include of its instructions is then empty

#include "cached_attention.cuh"

float number(__half v) { return __half2float(v); }
float number(__nv_bfloat16 v) { return __bfloat162float(v); }
template <typename T> T rounded(float v) {
  if constexpr (std::is_same_v<T, __half>) return __float2half_rn(v);
  else return __float2bfloat16_rn(v);
}
#include "attention_case.h"

thread_local uint3_ threadIdx, blockIdx;
alignas(128) uint8_t attention::memory[256 * 1024];
alignas(128) uint8_t w4::ring[16];  // shared addresses count from here

namespace {
struct Warp {
  std::barrier<> meet{32};
  uint32_t a[32][4], b[32][2], address[32];
  float value[32];
};
std::unique_ptr<Warp> warps[attention::kWarps];
std::unique_ptr<std::barrier<>> all;
struct Copy { uint8_t* to; const void* from; bool there; };
thread_local std::vector<std::vector<Copy>> closed;
thread_local std::vector<Copy> copies;

Warp& mine() { return *warps[threadIdx.x / 32]; }
uint8_t* shared(uint32_t p) { return w4::ring + static_cast<int32_t>(p); }
template <typename Wide>
void mma(float* c, const uint32_t* a, uint32_t b0, uint32_t b1, Wide wide_of) {
  Warp& w = mine();
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  for (int i = 0; i < 4; i++) w.a[lane][i] = a[i];
  w.b[lane][0] = b0, w.b[lane][1] = b1;
  w.meet.arrive_and_wait();
  for (int i = 0; i < 4; i++) {
    const int row = g + 8 * (i / 2), column = 2 * t + i % 2;
    for (int k = 0; k < 16; k++) {
      const int part = k % 8 / 2, high = k / 8;
      const uint32_t pa = w.a[row % 8 * 4 + part][row / 8 + 2 * high], pb = w.b[column * 4 + part][high];
      c[i] += wide_of(k % 2 ? pa >> 16 : pa & 0xffff) * wide_of(k % 2 ? pb >> 16 : pb & 0xffff);
    }
  }
  w.meet.arrive_and_wait();
}
void matrices(uint32_t* r, uint32_t p, bool transposed) {
  Warp& w = mine();
  const int lane = threadIdx.x % 32;
  w.address[lane] = p;
  w.meet.arrive_and_wait();
  for (int i = 0; i < 4; i++) {
    uint16_t pair[2];
    for (int j = 0; j < 2; j++) {
      const int row = transposed ? 2 * (lane % 4) + j : lane / 4, column = transposed ? lane / 4 : 2 * (lane % 4) + j;
      memcpy(&pair[j], shared(w.address[8 * i + row]) + 2 * column, 2);
    }
    memcpy(&r[i], pair, 4);
  }
  w.meet.arrive_and_wait();
}
template <typename T> uint32_t packed(float low, float high) {
  const T pair[2] = {rounded<T>(low), rounded<T>(high)};
  uint32_t word;
  memcpy(&word, pair, 4);
  return word;
}
}  // namespace

void __syncthreads() { all->arrive_and_wait(); }
void __syncwarp() { mine().meet.arrive_and_wait(); }
float __shfl_sync(unsigned, float value, int from) {
  Warp& w = mine();
  w.value[threadIdx.x % 32] = value;
  w.meet.arrive_and_wait();
  value = w.value[from];
  w.meet.arrive_and_wait();
  return value;
}
float __shfl_xor_sync(unsigned mask, float value, int other) { return __shfl_sync(mask, value, threadIdx.x % 32 ^ other); }
namespace w4 {
void mma_fp16(float* c, const uint32_t* a, uint32_t b0, uint32_t b1) {
  mma(c, a, b0, b1, [](uint32_t b) { return __half2float({static_cast<uint16_t>(b)}); });
}
void mma_bf16(float* c, const uint32_t* a, uint32_t b0, uint32_t b1) {
  mma(c, a, b0, b1, [](uint32_t b) { return __uint_as_float(b << 16); });
}
void load_matrices(uint32_t* r, uint32_t p) { matrices(r, p, false); }
void load_transposed(uint32_t* r, uint32_t p) { matrices(r, p, true); }
uint32_t pack_fp16(float low, float high) { return packed<__half>(low, high); }
uint32_t pack_bf16(float low, float high) { return packed<__nv_bfloat16>(low, high); }
// a copy lands when it is waited for, over poisoned bytes
void copy_async(uint32_t to, const void* from, bool there) {
  memset(shared(to), 0xff, 16);
  copies.push_back({shared(to), from, there});
}
void close_copies() { closed.push_back(std::move(copies)), copies.clear(); }
void await_groups(size_t open) {
  while (closed.size() > open) {
    for (const Copy& c : closed.front()) c.there ? memcpy(c.to, c.from, 16) : memset(c.to, 0, 16);
    closed.erase(closed.begin());
  }
}
}  // namespace w4

namespace {
void on_block(int x, int y, const std::function<void()>& kernel) {
  memset(attention::memory, 0xff, sizeof(attention::memory));
  for (auto& w : warps) w = std::make_unique<Warp>();
  all = std::make_unique<std::barrier<>>(attention::kThreads);
  std::vector<std::thread> threads;
  for (int t = 0; t < attention::kThreads; t++)
    threads.emplace_back([&, t] {
      threadIdx = {t, 0, 0}, blockIdx = {x, y, 0};
      kernel();
    });
  for (auto& t : threads) t.join();
}

template <typename T, int D, int MT>
std::vector<T> run(Case<T>& c, int splits, std::vector<T>& key, std::vector<T>& value) {
  const Sizes& s = c.s;
  const size_t queries = static_cast<size_t>(splits) * s.heads * s.rows;
  std::vector<float> sums(queries * D, NAN), stats(queries * 2, NAN);
  std::vector<T> y(static_cast<size_t>(s.rows) * s.heads * D);
  attention::Arguments<T> a{};
  a.qkvg = c.qkvg.data(), a.last_row = &c.last, a.cosines = c.cosines.data(), a.sines = c.sines.data();
  a.q_norm = c.q_norm.data(), a.k_norm = c.k_norm.data(), a.key = key.data(), a.value = value.data(), a.y = y.data();
  a.sums = sums.data(), a.stats = stats.data(), a.rows = s.rows, a.width = s.all(), a.heads = s.heads, a.kv_heads = s.kv_heads;
  a.capacity = s.capacity, a.rotary_half = s.rotary / 2, a.splits = splits, a.q_offset = s.q_at(), a.k_offset = s.k_at();
  a.v_offset = s.v_at(), a.gate_offset = s.gate_at(), a.eps = c.eps, a.scale_log2 = 1.44269504f / std::sqrt(static_cast<float>(D));
  for (int x = splits; x-- > 0;)
    for (int y2 = 0; y2 < s.kv_heads; y2++) on_block(x, y2, [&] { attention::split_attention<T, D, MT>(a); });
  for (int head = 0; head < s.heads; head++)
    for (int row = 0; row < s.rows; row++) on_block(head, row, [&] { attention::combine<T, D>(a); });
  return y;
}

template <typename T, int D, int MT>
bool check(const Sizes& s, int last, int splits) {
  Case<T> c(s, last, 7 * last + s.rows);
  std::vector<T> key = c.key, value = c.value;
  const std::vector<T> y = run<T, D, MT>(c, splits, key, value);
  const auto want = c.answer();
  const double error = Case<T>::error_of(y, want);
  const bool caches = c.same_cache(key, c.key) && c.same_cache(value, c.value);
  bool right = caches && error < (std::is_same_v<T, __half> ? 1e-3 : 8e-3), alike = true;
  for (int row = 0; row < s.rows && s.rows > 1; row += s.rows - 1) {  // the first and the last row alone
    Sizes one = s;
    one.rows = 1;
    Case<T> single(one, last + 1 - s.rows + row, 1);
    single.qkvg.assign(c.qkvg.begin() + static_cast<long>(row) * s.all(), c.qkvg.begin() + static_cast<long>(row + 1) * s.all());
    single.q_norm = c.q_norm, single.k_norm = c.k_norm;
    const std::vector<T> alone = run<T, D, 1>(single, splits, key, value);
    alike &= memcmp(alone.data(), y.data() + static_cast<size_t>(row) * s.heads * D, alone.size() * sizeof(T)) == 0;
  }
  right &= alike;
  printf("%s %d/%d heads of %d, rotary %d, %d rows up to %d, %d splits: relative error %.2e, caches %d, rows alone %d%s\n",
         std::is_same_v<T, __half> ? "fp16" : "bf16", s.heads, s.kv_heads, D, s.rotary, s.rows, last, splits, error, caches, alike,
         right ? "" : " WRONG");
  fflush(stdout);
  return right;
}
}  // namespace

int main() {
  // heads, kv_heads, width, capacity, rotary, rows
  bool right = check<__half, 64, 1>({2, 1, 64, 80, 16, 1}, 0, 2);
  right &= check<__half, 64, 1>({2, 2, 64, 100, 64, 3}, 63, 1);
  right &= check<__half, 64, 4>({8, 1, 64, 300, 16, 8}, 269, 2);
  right &= check<__half, 128, 2>({4, 1, 128, 700, 32, 8}, 640, 1);      // more tiles than stages
  right &= check<__half, 256, 3>({6, 1, 256, 400, 64, 8}, 390, 1);
  right &= check<__half, 256, 2>({6, 1, 256, 200, 64, 4}, 130, 3);      // the last row is in a chunk of its own
  right &= check<__nv_bfloat16, 256, 4>({8, 1, 256, 200, 64, 8}, 199, 2);
  right &= check<__nv_bfloat16, 64, 1>({2, 2, 64, 150, 16, 8}, 7, 4);   // a cache that was empty
  right &= check<__half, 64, 1>({4, 2, 64, 100, 16, 4}, 2, 2);          // a row before the first
  return right ? 0 : 1;
}
