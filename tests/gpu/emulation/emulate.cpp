// Runs matmul_w4.cuh on a CPU and compares with fp64; ends with 0 if all is right.
//
//     g++ -std=c++20 -O1 -pthread -I tests/gpu/emulation -I runtime/kernels -o emulate tests/gpu/emulation/emulate.cpp && ./emulate
#include <barrier>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <type_traits>
#include <vector>

#include "ptx.cuh"  // first: the kernel's own include of its instructions is then empty

#include "matmul_w4.cuh"

thread_local uint3_ threadIdx, blockIdx;

alignas(128) uint8_t w4::ring[256 * 1024];
using w4::ring;

namespace {
struct Warp {
  std::barrier<> meet{32};
  uint32_t a[32][4], b[32][2];
  unsigned value;
};
struct Barrier {
  int count = 0, pending = 0, bytes = 0;
  unsigned phase = 0;
};
std::vector<std::unique_ptr<Warp>> warps;
std::unique_ptr<std::barrier<>> all;
std::map<uint32_t, Barrier> barriers;
std::mutex mutex;
std::condition_variable changed;
thread_local std::vector<std::function<void()>> copies;
thread_local std::mt19937 delays(std::hash<std::thread::id>()(std::this_thread::get_id()));
std::vector<std::thread> engines;

Warp& mine() { return *warps[threadIdx.x / 32]; }
void settle(Barrier& b) {
  if (b.pending == 0 && b.bytes == 0) b.phase++, b.pending = b.count, changed.notify_all();
}
void later(std::function<void()> action) {
  const int delay = static_cast<int>(delays() % 300);
  const std::lock_guard<std::mutex> lock(mutex);
  engines.emplace_back([=] { std::this_thread::sleep_for(std::chrono::microseconds(delay)); action(); });
}
template <typename Wide>
void mma(float* c, const uint32_t* a, uint32_t b0, uint32_t b1, Wide wide) {
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
      c[i] += wide(k % 2 ? pa >> 16 : pa & 0xffff) * wide(k % 2 ? pb >> 16 : pb & 0xffff);
    }
  }
  w.meet.arrive_and_wait();
}
float wide_half(uint32_t b) { return __half2float({static_cast<uint16_t>(b)}); }
float wide_bf16(uint32_t b) { return __uint_as_float(b << 16); }
}  // namespace

void __syncthreads() { all->arrive_and_wait(); }
void __syncwarp() { mine().meet.arrive_and_wait(); }
unsigned __shfl_sync(unsigned, unsigned value, int lane) {
  Warp& w = mine();
  if (static_cast<int>(threadIdx.x % 32) == lane) w.value = value;
  w.meet.arrive_and_wait();
  value = w.value;
  w.meet.arrive_and_wait();
  return value;
}
namespace w4 {
uint32_t masked(uint32_t a, uint32_t mask, uint32_t set) { return (a & mask) | set; }
uint32_t less_fp16(uint32_t a, uint32_t b) {
  auto one = [](uint32_t x, uint32_t y) { return static_cast<uint32_t>(__float2half_rn(wide_half(x) - wide_half(y)).bits); };
  return one(a & 0xffff, b & 0xffff) | one(a >> 16, b >> 16) << 16;
}
uint32_t less_bf16(uint32_t a, uint32_t b) {
  auto one = [](uint32_t x, uint32_t y) { return static_cast<uint32_t>(__float2bfloat16_rn(wide_bf16(x) - wide_bf16(y)).bits); };
  return one(a & 0xffff, b & 0xffff) | one(a >> 16, b >> 16) << 16;
}
void mma_fp16(float* c, const uint32_t* a, uint32_t b0, uint32_t b1) { mma(c, a, b0, b1, wide_half); }
void mma_bf16(float* c, const uint32_t* a, uint32_t b0, uint32_t b1) { mma(c, a, b0, b1, wide_bf16); }
void barrier_init(uint32_t bar, int count) {
  const std::lock_guard<std::mutex> lock(mutex);
  barriers[bar] = {count, count, 0, 0};
}
void barrier_arrive(uint32_t bar) {
  const std::lock_guard<std::mutex> lock(mutex);
  Barrier& b = barriers.at(bar);
  b.pending--, settle(b);
}
void barrier_expect(uint32_t bar, int bytes) {
  const std::lock_guard<std::mutex> lock(mutex);
  Barrier& b = barriers.at(bar);
  b.bytes += bytes, b.pending--, settle(b);
}
void barrier_wait(uint32_t bar, uint32_t parity) {
  std::unique_lock<std::mutex> lock(mutex);
  changed.wait(lock, [&] { return (barriers.at(bar).phase & 1) != parity; });
}
void load_bulk(uint32_t to, const void* from, int bytes, uint32_t bar, uint64_t) {
  memset(ring + to, 0xff, bytes);
  later([=] {
    memcpy(ring + to, from, bytes);
    const std::lock_guard<std::mutex> lock(mutex);
    Barrier& b = barriers.at(bar);
    b.bytes -= bytes, settle(b);
  });
}
void copy_async(uint32_t to, const void* from, bool there) {
  memset(ring + to, 0xff, 16);
  copies.push_back([=] { there ? memcpy(ring + to, from, 16) : memset(ring + to, 0, 16); });
}
void barrier_arrive_after_copies(uint32_t bar) {
  auto all_copies = std::move(copies);
  copies.clear();
  later([=] {
    for (auto& copy : all_copies) copy();
    barrier_arrive(bar);
  });
}
unsigned count_arrival(unsigned* counter) { return (*counter)++; }
}  // namespace w4

template <typename T> float wide(T v);
template <> float wide(__half v) { return __half2float(v); }
template <> float wide(__nv_bfloat16 v) { return __bfloat162float(v); }
template <typename T> T narrow(float v) {
  if constexpr (std::is_same_v<T, __half>) return __float2half_rn(v);
  else return __float2bfloat16_rn(v);
}

template <typename T, int WARPS, int TILES, bool SILU>
bool run(int n, int k, int m, int grid, int stages, bool residual) {
  constexpr int kRowTiles = WARPS * TILES, kHalf = kRowTiles * 576;
  const int rows = SILU ? 2 * n : n, blocks = (rows + kRowTiles * 16 - 1) / (kRowTiles * 16), k_units = (k + 127) / 128;
  std::mt19937 rng(n + k);
  std::normal_distribution<float> normal;
  std::vector<uint8_t> q(static_cast<size_t>(rows) * k), packed(static_cast<size_t>(blocks) * k_units * 2 * kHalf, 0);
  std::vector<T> scales(static_cast<size_t>(rows) * (k / 32)), x(m * k), y((m + 1) * n, T{0xffff}), add(m * n);
  for (auto& v : q) v = rng() & 15;
  for (auto& v : scales) v = narrow<T>(0.01f * (1 + (rng() & 255) / 256.f));
  for (auto& v : x) v = narrow<T>(normal(rng));
  for (auto& v : add) v = narrow<T>(normal(rng));
  for (size_t i = 0; i < packed.size(); i++)
    if (i % kHalf < kRowTiles * 512) packed[i] = 0x88;
  for (int r = 0; r < rows; r++)
    for (int c = 0; c < k; c++) {
      const int tile = r / 16 % kRowTiles, g = r % 8, high = r % 16 / 8;
      uint8_t* half = packed.data() + (static_cast<size_t>(r / (kRowTiles * 16)) * k_units * 2 + c / 64) * kHalf;
      uint8_t& byte = half[tile * 512 + (g * 4 + c % 32 / 8) * 16 + (c % 64 / 32 * 2 + c % 8 / 4) * 4 + c % 2 * 2 + c % 4 / 2];
      byte = high ? (byte & 15) | q[r * k + c] << 4 : (byte & 0xf0) | q[r * k + c];
      memcpy(half + kRowTiles * 512 + tile / 2 * 128 + g * 16 + tile % 2 * 8 + c % 64 / 32 * 4 + high * 2, &scales[r * (k / 32) + c / 32], 2);
    }
  const int units = blocks * k_units;
  grid = min(grid, units);
  std::vector<float4> partials(static_cast<size_t>(grid) * 2 * kRowTiles * 32, float4{NAN, NAN, NAN, NAN});
  std::vector<unsigned> arrivals(grid * WARPS, 0);
  w4::Arguments<T> a{};
  a.packed = packed.data(), a.x = x.data(), a.y = y.data(), a.residual = residual ? add.data() : nullptr;
  a.partials = partials.data(), a.arrivals = arrivals.data(), a.rows = m, a.n = n, a.k = k;
  a.share = units / grid, a.extra = units % grid, a.stages = stages;
  std::vector<int> order(grid);
  for (int i = 0; i < grid; i++) order[i] = i;
  std::shuffle(order.begin(), order.end(), rng);
  for (int block : order) {
    barriers.clear(), warps.clear();
    for (int i = 0; i <= WARPS; i++) warps.push_back(std::make_unique<Warp>());
    all = std::make_unique<std::barrier<>>((WARPS + 1) * 32);
    std::vector<std::thread> threads;
    for (int t = 0; t < (WARPS + 1) * 32; t++)
      threads.emplace_back([&, t] {
        threadIdx = {t, 0, 0}, blockIdx = {block, 0, 0};
        w4::multiply<T, WARPS, TILES, SILU>(a);
      });
    for (auto& t : threads) t.join();
    for (auto& e : engines) e.join();
    engines.clear();
  }
  double error = 0, norm = 0;
  auto product = [&](int i, int r) {
    double s = 0;
    for (int c = 0; c < k; c++) s += static_cast<double>(wide(x[i * k + c])) * (q[r * k + c] - 8) * wide(scales[r * (k / 32) + c / 32]);
    return s;
  };
  for (int i = 0; i < m; i++)
    for (int c = 0; c < n; c++) {
      const int r = SILU ? c / 8 * 16 + c % 8 : c;
      if (SILU && r + 8 >= rows) continue;
      double want = product(i, r);
      if (SILU) want = want / (1 + exp(-want)) * product(i, r + 8);
      if (residual) want += wide(add[i * n + c]);
      const double e = wide(y[i * n + c]) - want;
      error += e * e, norm += want * want;
    }
  bool clean = true;
  for (int c = 0; c < n; c++) clean &= y[m * n + c].bits == 0xffff;
  for (unsigned v : arrivals) clean &= v == 0;
  const double relative = std::sqrt(error / norm);
  const bool right = clean && relative < (std::is_same_v<T, __half> ? 5e-4 : 4e-3);
  printf("%s n=%d k=%d m=%d grid=%d stages=%d silu=%d: relative error %.2e %s\n", std::is_same_v<T, __half> ? "fp16" : "bf16", n, k, m, grid, stages, SILU, relative, right ? "" : "WRONG");
  fflush(stdout);
  return right;
}

int main() {
  bool right = run<__half, 2, 2, false>(150, 352, 3, 4, 2, false);
  right &= run<__half, 2, 2, false>(64, 1120, 8, 5, 3, true);     // one row block in five pieces
  right &= run<__half, 2, 2, false>(520, 96, 1, 3, 2, false);     // pieces of several whole row blocks
  right &= run<__half, 2, 4, false>(300, 256, 5, 3, 2, false);
  right &= run<__half, 2, 2, true>(72, 384, 4, 4, 3, false);
  right &= run<__nv_bfloat16, 2, 2, false>(129, 640, 7, 7, 2, true);
  right &= run<__half, 8, 2, false>(300, 160, 2, 3, 6, false);
  right &= run<__half, 2, 2, false>(1, 32, 8, 132, 2, false);
  return right ? 0 : 1;
}
