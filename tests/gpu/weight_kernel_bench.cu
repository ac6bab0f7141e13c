// Checks the four-bit weight kernel against fp64, tunes it over the weights of a whole 27B forward, and times it.
//
//     nvcc -std=c++17 -O3 -I runtime/kernels -gencode=arch=compute_90a,code=sm_90a -o bench tests/gpu/weight_kernel_bench.cu
//     ./bench OUT.json
//
// Every matrix of a chain has memory of its own; times are medians of replays of one CUDA graph.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <chrono>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "launch_w4.cuh"

#define CHECK(e)                                                                         \
  do {                                                                                   \
    cudaError_t r_ = (e);                                                                \
    if (r_ != cudaSuccess) {                                                             \
      printf("line %d: %s\n", __LINE__, cudaGetErrorString(r_));                         \
      exit(1);                                                                           \
    }                                                                                    \
  } while (0)

using Half = __half;
using Bf16 = __nv_bfloat16;

static uint8_t* arena;
static size_t arena_bytes;
static float4* partials;
static unsigned* arrivals;
static void *x_buffer, *y_buffer, *residual_buffer;
static cudaStream_t stream;
static FILE* out;

static uint32_t bits16(Half v) { return __half_as_ushort(v); }
static uint32_t bits16(Bf16 v) { return __bfloat16_as_ushort(v); }
template <typename T> T from_float(float v);
template <> Half from_float<Half>(float v) { return __float2half(v); }
template <> Bf16 from_float<Bf16>(float v) { return __float2bfloat16(v); }
static float to_float(Half v) { return __half2float(v); }
static float to_float(Bf16 v) { return __bfloat162float(v); }

// One matrix, written the plain way: element by element, by the positions that the tensor core's operand asks for.
template <typename T>
std::vector<uint8_t> pack(const std::vector<uint8_t>& q, const std::vector<T>& scales, int n, int k, int row_tiles) {
  const int k_halves = (k + 127) / 128 * 2, blocks = (n + row_tiles * 16 - 1) / (row_tiles * 16), half = row_tiles * 576;
  std::vector<uint8_t> to(static_cast<size_t>(blocks) * k_halves * half, 0);
  for (size_t b = 0; b < static_cast<size_t>(blocks) * k_halves; b++) memset(to.data() + b * half, 0x88, row_tiles * 512);
  for (int row = 0; row < n; row++) {
    const int block = row / (row_tiles * 16), tile = row / 16 % row_tiles, r = row % 16, g = r % 8, high = r / 8;
    for (int c = 0; c < k; c++) {
      uint8_t* at = to.data() + (static_cast<size_t>(block) * k_halves + c / 64) * half;
      const int word = c % 64 / 32 * 2 + c % 8 / 4, t = c % 32 / 8, pair = c % 4 / 2, odd = c % 2;
      const int bit = odd * 16 + pair * 8 + high * 4;
      uint8_t& byte = at[tile * 512 + (g * 4 + t) * 16 + word * 4 + bit / 8];
      byte = (byte & ~(15 << bit % 8)) | q[static_cast<size_t>(row) * k + c] << bit % 8;
      if (c % 32 == 0) {
        const uint32_t s = bits16(scales[static_cast<size_t>(row) * (k / 32) + c / 32]);
        memcpy(at + row_tiles * 512 + tile / 2 * 128 + g * 16 + tile % 2 * 8 + c % 64 / 32 * 4 + high * 2, &s, 2);
      }
    }
  }
  return to;
}

__global__ void fill(uint32_t* p, size_t words, int unit_words, int value_words, uint32_t seed) {
  for (size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x; i < words; i += static_cast<size_t>(gridDim.x) * blockDim.x) {
    uint32_t h = static_cast<uint32_t>(i) * 2654435761u ^ static_cast<uint32_t>(i >> 32) * 40503u ^ seed;
    h ^= h >> 16, h *= 0x85ebca6bu, h ^= h >> 13, h *= 0xc2b2ae35u, h ^= h >> 16;
    p[i] = i % unit_words < value_words ? h : (0x18001800u | (h & 0x03ff03ffu));
  }
}
__global__ void idle(float* p) { if (p[threadIdx.x] == 12345.f) p[threadIdx.x] = 0.f; }

// ---------------------------------------------------------------- values
template <typename T, int WARPS, int TILES, bool SWIGLU>
bool check(int n, int k, int grid, bool residual, double* worst) {
  const int rows = SWIGLU ? 2 * n : n;
  std::mt19937 rng(n * 31 + k);
  std::normal_distribution<float> normal;
  std::vector<uint8_t> q(static_cast<size_t>(rows) * k);
  for (auto& v : q) v = rng() & 15;
  std::vector<T> scales(static_cast<size_t>(rows) * (k / 32)), x(static_cast<size_t>(8) * k), add(static_cast<size_t>(8) * n);
  for (auto& v : scales) v = from_float<T>((rng() & 1 ? 1 : -1) * 0.01f * (1 + (rng() & 255) / 256.f));
  for (auto& v : x) v = from_float<T>(normal(rng));
  for (auto& v : add) v = from_float<T>(normal(rng));
  std::vector<uint8_t> packed = pack(q, scales, rows, k, WARPS * TILES);
  CHECK(cudaMemcpy(arena, packed.data(), packed.size(), cudaMemcpyHostToDevice));
  CHECK(cudaMemcpy(residual_buffer, add.data(), add.size() * sizeof(T), cudaMemcpyHostToDevice));
  std::vector<T> eight;
  bool same = true;
  const int step = std::max(1, n / 400);
  std::vector<double> reference(static_cast<size_t>(8) * n, 0.);
  auto product = [&](int m, int row) {
    double s = 0;
    for (int b = 0; b < k / 32; b++) {
      double p = 0;
      for (int i = 0; i < 32; i++) p += static_cast<double>(to_float(x[static_cast<size_t>(m) * k + b * 32 + i])) * (q[static_cast<size_t>(row) * k + b * 32 + i] - 8);
      s += p * to_float(scales[static_cast<size_t>(row) * (k / 32) + b]);
    }
    return s;
  };
  for (int m = 0; m < 8; m++)
    for (int c = 0; c < n; c += step) {
      double r;
      if (SWIGLU) {
        const int row = c / 8 * 16 + c % 8;
        if (row + 8 >= rows) continue;
        const double gate = product(m, row), value = product(m, row + 8);
        r = gate / (1 + exp(-gate)) * value;
      } else {
        r = product(m, c) + (residual ? to_float(add[static_cast<size_t>(m) * n + c]) : 0.);
      }
      reference[static_cast<size_t>(m) * n + c] = r;
    }
  for (int m : {8, 7, 6, 5, 4, 3, 2, 1}) {
    // what lies after the last row of x must not matter
    CHECK(cudaMemset(x_buffer, 0xff, static_cast<size_t>(9) * k * sizeof(T)));
    CHECK(cudaMemcpy(x_buffer, x.data(), static_cast<size_t>(m) * k * sizeof(T), cudaMemcpyHostToDevice));
    CHECK(cudaMemset(y_buffer, 0xff, static_cast<size_t>(9) * n * sizeof(T)));
    w4::Arguments<T> a{};
    a.packed = arena, a.x = static_cast<T*>(x_buffer), a.y = static_cast<T*>(y_buffer);
    a.residual = residual ? static_cast<T*>(residual_buffer) : nullptr;
    a.partials = partials, a.arrivals = arrivals, a.rows = m, a.n = n, a.k = k;
    CHECK((w4::launch<T, WARPS, TILES, SWIGLU>(a, {grid, 111 * 1024, 1}, stream)));
    CHECK(cudaStreamSynchronize(stream));
    std::vector<T> y(static_cast<size_t>(9) * n);
    CHECK(cudaMemcpy(y.data(), y_buffer, y.size() * sizeof(T), cudaMemcpyDeviceToHost));
    double error = 0, norm = 0;
    for (int r = 0; r < m; r++)
      for (int c = 0; c < n; c += step) {
        if (SWIGLU && c / 8 * 16 + c % 8 + 8 >= rows) continue;
        const double want = reference[static_cast<size_t>(r) * n + c], e = to_float(y[static_cast<size_t>(r) * n + c]) - want;
        error += e * e, norm += want * want;
      }
    const double relative = std::sqrt(error / norm);
    *worst = std::max(*worst, relative);
    if (!(relative < (std::is_same<T, Half>::value ? 5e-4 : 4e-3))) {
      printf("WRONG n=%d k=%d grid=%d m=%d: relative error %.3e\n", n, k, grid, m, relative);
      same = false;
    }
    for (int c = 0; c < n; c++)
      if (bits16(y[static_cast<size_t>(m) * n + c]) != 0xffff) { printf("written past the last row: n=%d k=%d m=%d\n", n, k, m); same = false; break; }
    if (m == 8) eight = y;
    if (memcmp(eight.data(), y.data(), static_cast<size_t>(m) * n * sizeof(T)) != 0) {
      printf("n=%d k=%d grid=%d: rows differ between M=8 and M=%d\n", n, k, grid, m);
      same = false;
    }
  }
  return same;
}

template <typename T, int WARPS, int TILES>
bool check_all(const char* name) {
  double worst = 0;
  bool good = true;
  for (int grid : {132, 5, 264})
    for (auto [n, k] : std::vector<std::pair<int, int>>{{1, 32}, {200, 96}, {256, 64}, {1000, 1056}, {2000, 17408}, {4368, 256}, {5121, 640}, {300, 1120}})
      if (k < 10000 || grid == 132) good &= check<T, WARPS, TILES, false>(n, k, grid, (n + grid) % 2, &worst);
  for (auto [n, k] : std::vector<std::pair<int, int>>{{8, 32}, {1000, 1056}, {2184, 256}}) good &= check<T, WARPS, TILES, true>(n, k, 132, false, &worst);
  printf("values %-22s %s, worst relative error %.2e\n", name, good ? "right" : "WRONG", worst);
  fprintf(out, "  {\"check\": \"%s\", \"right\": %s, \"worst\": %.3e},\n", name, good ? "true" : "false", worst);
  fflush(stdout);
  return good;
}

// ---------------------------------------------------------------- time
struct Matrix { int n, k; bool swiglu; };
using Launch = std::function<cudaError_t(w4::Arguments<Half>, bool, const w4::Tuning&)>;
struct Variant { const char* name; int row_tiles; Launch launch; };

template <int WARPS, int TILES>
Variant variant(const char* name) {
  return {name, WARPS * TILES, [](w4::Arguments<Half> a, bool swiglu, const w4::Tuning& t) {
            return swiglu ? w4::launch<Half, WARPS, TILES, true>(a, t, stream) : w4::launch<Half, WARPS, TILES, false>(a, t, stream);
          }};
}

static int filled;
static void fill_arena(int row_tiles) {
  if (filled == row_tiles) return;
  fill<<<132 * 8, 256, 0, stream>>>(reinterpret_cast<uint32_t*>(arena), arena_bytes / 4, row_tiles * 144, row_tiles * 128, 7);
  CHECK(cudaStreamSynchronize(stream));
  filled = row_tiles;
}

// Microseconds of one replay, or -1 where the configuration cannot be launched. `gap` small kernels follow each matrix.
static double time_chain(const Variant& v, const std::vector<Matrix>& chain, int m, const w4::Tuning& t, int replays, int gap = 0, bool weights = true) {
  fill_arena(v.row_tiles);
  auto issue = [&]() {
    std::vector<uint8_t*> at(chain.size());
    uint8_t* p = arena;
    for (size_t i = 0; i < chain.size(); i++) {
      at[i] = p;
      p += (w4::packed_bytes(chain[i].swiglu ? 2 * chain[i].n : chain[i].n, chain[i].k, v.row_tiles) + 255) / 256 * 256;
      if (p > arena + arena_bytes) { printf("the arena is too small\n"); exit(1); }
    }
    for (size_t i = 0; i < chain.size(); i++) {
      w4::Arguments<Half> a{};
      a.packed = at[i], a.x = static_cast<Half*>(x_buffer), a.y = static_cast<Half*>(y_buffer);
      a.partials = partials, a.arrivals = arrivals, a.rows = m, a.n = chain[i].n, a.k = chain[i].k;
      if (weights) {
        cudaError_t e = v.launch(a, chain[i].swiglu, t);
        if (e != cudaSuccess) return e;
      }
      for (int j = 0; j < gap; j++) idle<<<64, 256, 0, stream>>>(static_cast<float*>(y_buffer));
    }
    return cudaGetLastError();
  };
  if (issue() != cudaSuccess) { cudaGetLastError(); return -1; }
  CHECK(cudaStreamSynchronize(stream));
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  CHECK(issue());
  CHECK(cudaStreamEndCapture(stream, &graph));
  CHECK(cudaGraphInstantiate(&exec, graph, 0));
  cudaEvent_t a, b;
  CHECK(cudaEventCreate(&a));
  CHECK(cudaEventCreate(&b));
  std::vector<float> times;
  for (int i = 0; i < replays + 2; i++) {
    CHECK(cudaEventRecord(a, stream));
    CHECK(cudaGraphLaunch(exec, stream));
    CHECK(cudaEventRecord(b, stream));
    CHECK(cudaEventSynchronize(b));
    float ms;
    CHECK(cudaEventElapsedTime(&ms, a, b));
    if (i >= 2) times.push_back(ms);
  }
  std::sort(times.begin(), times.end());
  cudaEventDestroy(a), cudaEventDestroy(b), cudaGraphExecDestroy(exec), cudaGraphDestroy(graph);
  return times[times.size() / 2] * 1e3;
}

static double bytes_of(const std::vector<Matrix>& chain) {
  double b = 0;
  for (auto& c : chain) b += (c.swiglu ? 2. : 1.) * c.n * c.k * 0.5625;
  return b;
}

enum class Mlp { kMerged, kFused, kApart };
static std::vector<Matrix> whole_forward(Mlp mlp) {
  std::vector<Matrix> c;
  for (int layer = 0; layer < 64; layer++) {
    c.push_back({layer % 4 == 3 ? 14336 : 16480, 5120, false});
    c.push_back({5120, 6144, false});
    if (mlp == Mlp::kApart) c.push_back({17408, 5120, false}), c.push_back({17408, 5120, false});
    if (mlp == Mlp::kMerged) c.push_back({34816, 5120, false});
    if (mlp == Mlp::kFused) c.push_back({17408, 5120, true});
    c.push_back({5120, 17408, false});
  }
  c.push_back({248320, 5120, false});
  return c;
}

int main(int argc, char** argv) {
  out = fopen(argc > 1 ? argv[1] : "bench.json", "w");
  const auto begin = std::chrono::steady_clock::now();
  auto spent = [&]() { return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count(); };
  cudaDeviceProp device;
  CHECK(cudaGetDeviceProperties(&device, 0));
  int driver, runtime;
  cudaDriverGetVersion(&driver), cudaRuntimeGetVersion(&runtime);
  fprintf(out, "{\"device\": \"%s\", \"multiprocessors\": %d, \"driver\": %d, \"runtime\": %d, \"results\": [\n", device.name, device.multiProcessorCount, driver, runtime);
  CHECK(cudaStreamCreate(&stream));
  arena_bytes = static_cast<size_t>(15) << 30;
  CHECK(cudaMalloc(&arena, arena_bytes));
  CHECK(cudaMalloc(&partials, w4::partial_bytes(264, 16)));
  CHECK(cudaMalloc(&arrivals, w4::arrival_bytes(264, 16)));
  CHECK(cudaMemset(arrivals, 0, w4::arrival_bytes(264, 16)));
  CHECK(cudaMalloc(&x_buffer, 9 * 17408 * 2));
  CHECK(cudaMalloc(&y_buffer, static_cast<size_t>(9) * 250000 * 2));
  CHECK(cudaMalloc(&residual_buffer, static_cast<size_t>(9) * 250000 * 2));

  bool good = check_all<Half, 8, 2>("fp16 8x2");
  good &= check_all<Half, 4, 2>("fp16 4x2");
  good &= check_all<Half, 4, 4>("fp16 4x4");
  good &= check_all<Bf16, 8, 2>("bf16 8x2");
  printf("checks took %.1f s\n", spent());

  {
    std::mt19937 rng(3);
    std::normal_distribution<float> normal;
    std::vector<Half> x(8 * 17408);
    for (auto& v : x) v = __float2half(normal(rng));
    CHECK(cudaMemcpy(x_buffer, x.data(), x.size() * 2, cudaMemcpyHostToDevice));
  }
  std::vector<Variant> variants{variant<8, 2>("8x2"), variant<4, 4>("4x4"), variant<4, 2>("4x2")};
  const auto forward = whole_forward(Mlp::kMerged);
  printf("floor at 4.3 TB/s %.0f us\n", bytes_of(forward) / 4.3e6);
  double least_time = 1e9;
  int chosen = 0;
  w4::Tuning t{};
  for (int v = 0; v < static_cast<int>(variants.size()); v++)
    for (int ring : {111, 92, 74, 55, 222})
      for (int blocks_each : {1, 2}) {
        const w4::Tuning point{device.multiProcessorCount * blocks_each, ring * 1024, 2};
        const double one = time_chain(variants[v], forward, 1, point, 9), four = time_chain(variants[v], forward, 4, point, 9);
        printf("%s grid %d ring %d K: M=1 %.0f M=4 %.0f us\n", variants[v].name, point.grid, ring, one, four);
        fprintf(out, "  {\"tune\": \"%s\", \"grid\": %d, \"ring\": %d, \"m1\": %.1f, \"m4\": %.1f},\n", variants[v].name, point.grid, point.ring_bytes, one, four);
        if (one > 0 && one + four < least_time) least_time = one + four, chosen = v, t = point;
      }
  const Variant best = variants[chosen];
  printf("chosen: %s grid %d ring %d\n", best.name, t.grid, t.ring_bytes);
  fflush(stdout);
  for (auto [name, mlp] : std::vector<std::pair<const char*, Mlp>>{{"gate|up merged", Mlp::kMerged}, {"gate|up with SiLU", Mlp::kFused}, {"gate, up apart", Mlp::kApart}}) {
    printf("whole forward, %s:", name);
    for (int m = 1; m <= 8; m++) {
      const double us = time_chain(best, whole_forward(mlp), m, t, 15);
      printf(" M=%d %.0f", m, us);
      fprintf(out, "  {\"forward\": \"%s\", \"m\": %d, \"us\": %.1f},\n", name, m, us);
    }
    printf(" us\n");
  }
  struct Named { const char* model; int n, k; };
  for (auto& s : std::vector<Named>{{"27B", 17408, 5120}, {"27B", 34816, 5120}, {"27B", 5120, 17408}, {"27B", 16480, 5120}, {"27B", 14336, 5120}, {"27B", 5120, 6144}, {"27B", 248320, 5120},
                                    {"9B", 24576, 4096}, {"9B", 4096, 12288}, {"4B", 18432, 2560}, {"4B", 2560, 9216}, {"0.8B", 7168, 1024}, {"0.8B", 1024, 3584}}) {
    std::vector<Matrix> chain(std::min<size_t>(24, (arena_bytes - (1 << 20)) / (w4::packed_bytes(s.n, s.k, best.row_tiles) + 256)), Matrix{s.n, s.k, false});
    printf("%-4s N=%-6d K=%-5d", s.model, s.n, s.k);
    for (int m = 1; m <= 8; m++) {
      const double us = time_chain(best, chain, m, t, 9) / chain.size();
      printf(" %7.2f", us);
      fprintf(out, "  {\"model\": \"%s\", \"n\": %d, \"k\": %d, \"m\": %d, \"us\": %.2f, \"tb_s\": %.3f},\n", s.model, s.n, s.k, m, us, bytes_of(chain) / chain.size() / us / 1e6);
    }
    printf("  floor %.2f\n", bytes_of(chain) / chain.size() / 4.3e6);
  }
  for (int least : {1, 2, 4, 8}) {
    printf("at least %d units a block, 0.8B and 4B shapes, M=1:", least);
    for (auto& s : std::vector<Named>{{"0.8B", 7168, 1024}, {"0.8B", 1024, 3584}, {"0.8B", 1024, 2048}, {"4B", 2560, 9216}, {"27B", 5120, 6144}}) {
      const double us = time_chain(best, std::vector<Matrix>(64, Matrix{s.n, s.k, false}), 1, {t.grid, t.ring_bytes, least}, 9) / 64;
      printf(" %dx%d %.2f", s.n, s.k, us);
      fprintf(out, "  {\"least\": %d, \"n\": %d, \"k\": %d, \"us\": %.2f},\n", least, s.n, s.k, us);
    }
    printf("\n");
  }
  for (int gap : {2, 4}) {
    const double alone = time_chain(best, forward, 1, t, 9, gap, false), one = time_chain(best, forward, 1, t, 9, gap), four = time_chain(best, forward, 4, t, 9, gap);
    printf("with %d small kernels after each matrix (alone %.0f us): M=1 %.0f M=4 %.0f us\n", gap, alone, one, four);
    fprintf(out, "  {\"gap\": %d, \"alone\": %.1f, \"m1\": %.1f, \"m4\": %.1f},\n", gap, alone, one, four);
  }
  fprintf(out, "  {}]}\n");
  fclose(out);
  printf("took %.1f s in all; values %s\n", spent(), good ? "right" : "WRONG");
  return good ? 0 : 1;
}
