// Checks cached attention against fp64 and times it in CUDA graphs, 64 nodes over caches of their own.
//
//     nvcc -std=c++17 -O3 -I runtime/kernels -gencode=arch=compute_90a,code=sm_90a -o bench tests/gpu/attention_bench.cu
//     ./bench OUT.json
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <type_traits>

#include "launch_attention.cuh"

static float number(__half v) { return __half2float(v); }
static float number(__nv_bfloat16 v) { return __bfloat162float(v); }
template <typename T> T rounded(float v) {
  if constexpr (std::is_same_v<T, __half>) return __float2half(v);
  else return __float2bfloat16(v);
}
#include "attention_case.h"

#define CHECK(e)                                                 \
  do {                                                           \
    cudaError_t r_ = (e);                                        \
    if (r_ != cudaSuccess) {                                     \
      printf("line %d: %s\n", __LINE__, cudaGetErrorString(r_)); \
      exit(1);                                                   \
    }                                                            \
  } while (0)

static cudaStream_t stream;
static int multiprocessors, wrong, cases;
static FILE* out;

template <typename T>
struct Device {
  T* p;
  size_t n;
  explicit Device(const std::vector<T>& v) : n(v.size()) {
    CHECK(cudaMalloc(&p, n * sizeof(T)));
    CHECK(cudaMemcpy(p, v.data(), n * sizeof(T), cudaMemcpyHostToDevice));
  }
  Device(const Device&) = delete;
  ~Device() { cudaFree(p); }
  std::vector<T> read() const {
    std::vector<T> v(n);
    CHECK(cudaMemcpy(v.data(), p, n * sizeof(T), cudaMemcpyDeviceToHost));
    return v;
  }
};

template <typename T>
attention::Arguments<T> arguments(const Sizes& s, int splits) {
  attention::Arguments<T> a{};
  a.rows = s.rows, a.width = s.all(), a.heads = s.heads, a.kv_heads = s.kv_heads, a.capacity = s.capacity;
  a.rotary_half = s.rotary / 2, a.splits = splits, a.q_offset = s.q_at(), a.k_offset = s.k_at(), a.v_offset = s.v_at();
  a.gate_offset = s.gate_at(), a.eps = 1e-6f, a.scale_log2 = 1.44269504f / std::sqrt(static_cast<float>(s.width));
  return a;
}

// A case on the card: eager, then a graph that was captured at another length; rows alone where the chunks are the same.
template <typename T>
double check(const Sizes& s, int last, int splits) {
  Case<T> c(s, last, 31 * last + s.rows);
  Device<T> qkvg(c.qkvg), cosines(c.cosines), sines(c.sines), q_norm(c.q_norm), k_norm(c.k_norm), key(c.key), value(c.value);
  Device<T> y(std::vector<T>(static_cast<size_t>(s.rows + 1) * s.heads * s.width, rounded<T>(NAN)));
  Device<int> position(std::vector<int>{last});
  Device<float> sums(std::vector<float>(attention::sums_of(splits, s.heads, s.rows, s.width), NAN));
  Device<float> stats(std::vector<float>(attention::stats_of(splits, s.heads, s.rows), NAN));
  attention::Arguments<T> a = arguments<T>(s, splits);
  a.qkvg = qkvg.p, a.last_row = position.p, a.cosines = cosines.p, a.sines = sines.p, a.q_norm = q_norm.p, a.k_norm = k_norm.p;
  a.key = key.p, a.value = value.p, a.y = y.p, a.sums = sums.p, a.stats = stats.p;
  CHECK(attention::launch(a, s.width, stream));
  CHECK(cudaStreamSynchronize(stream));
  std::vector<T> got = y.read();
  const double macs = 1.0 * s.rows * s.heads * s.width * last;
  const auto want = c.answer(macs > 2e7 ? static_cast<int>(macs / 2e7) * 2 + 1 : 1);
  const double error = Case<T>::error_of(got, want);
  const bool caches = c.same_cache(key.read(), c.key) && c.same_cache(value.read(), c.value);

  CHECK(cudaMemcpy(key.p, c.key.data(), c.key.size() * sizeof(T), cudaMemcpyHostToDevice));
  const int other = std::max(s.rows - 1, last / 3);
  cudaGraph_t graph;
  cudaGraphExec_t run;
  CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  CHECK(attention::launch(a, s.width, stream));
  CHECK(cudaStreamEndCapture(stream, &graph));
  CHECK(cudaGraphInstantiate(&run, graph, 0));
  if (other + s.rows <= last + 1 - s.rows) {  // its rows must not be those of the check
    CHECK(cudaMemcpy(position.p, &other, 4, cudaMemcpyHostToDevice));
    CHECK(cudaGraphLaunch(run, stream));
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaMemcpy(position.p, &last, 4, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(key.p, c.key.data(), c.key.size() * sizeof(T), cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(value.p, c.value.data(), c.value.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  CHECK(cudaMemset(y.p, 0xff, y.n * sizeof(T)));
  CHECK(cudaGraphLaunch(run, stream));
  CHECK(cudaStreamSynchronize(stream));
  const std::vector<T> replayed = y.read();
  const size_t used = static_cast<size_t>(s.rows) * s.heads * s.width;
  const bool replays = memcmp(got.data(), replayed.data(), used * sizeof(T)) == 0;
  CHECK(cudaGraphExecDestroy(run));
  CHECK(cudaGraphDestroy(graph));

  auto chunk = [&](int length) { return (length + attention::kUnit * splits - 1) / (attention::kUnit * splits); };
  bool alone = true;
  for (int row = 0; row < s.rows; row++) {
    const int place = last + 1 - s.rows + row;
    if (place < 0 || chunk(place + 1) != chunk(last + 1)) continue;
    CHECK(cudaMemcpy(position.p, &place, 4, cudaMemcpyHostToDevice));
    attention::Arguments<T> one = a;
    one.rows = 1, one.qkvg = qkvg.p + static_cast<size_t>(row) * s.all();
    CHECK(attention::launch(one, s.width, stream));
    CHECK(cudaStreamSynchronize(stream));
    const std::vector<T> y1 = y.read();
    alone &= memcmp(y1.data(), got.data() + static_cast<size_t>(row) * s.heads * s.width, static_cast<size_t>(s.heads) * s.width * sizeof(T)) == 0;
  }
  bool clean = true;
  for (size_t i = used; i < got.size(); i++) clean &= std::isnan(number(got[i]));
  const bool right = error < (std::is_same_v<T, __half> ? 1e-3 : 8e-3) && caches && replays && alone && clean;
  cases++, wrong += !right;
  if (!right)
    printf("WRONG %s %d/%d heads of %d, %d rows up to %d, %d splits: error %.2e caches %d replays %d alone %d clean %d\n",
           std::is_same_v<T, __half> ? "fp16" : "bf16", s.heads, s.kv_heads, s.width, s.rows, last, splits, error, caches, replays, alone, clean);
  return error;
}

template <typename T>
void check_all(const char* name) {
  double worst = 0;
  auto one = [&](const Sizes& s, int last, int splits = 0) {
    worst = std::max(worst, check<T>(s, last, splits ? splits : attention::splits_of(multiprocessors, s.kv_heads, s.capacity)));
  };
  for (int rows : {1, 2, 3, 4, 5, 6, 7, 8}) {
    for (int last : {rows - 1, 31, 32, 65, 511, 1056, 1199}) one({24, 4, 256, 1200, 64, rows}, last);
    one({8, 2, 256, 700, 64, rows}, 600);
    one({16, 4, 256, 700, 64, rows}, 699);
    one({8, 1, 256, 3000, 256, rows}, 2999);
    one({16, 2, 128, 700, 32, rows}, 333);
    one({5, 1, 128, 3000, 128, rows}, 2998, 3);
    one({8, 8, 64, 300, 16, rows}, 257);
    one({8, 1, 64, 3000, 64, rows}, 2500, 2);
  }
  one({4, 4, 64, 300, 64, 16}, 200), one({16, 4, 256, 900, 64, 16}, 800), one({4, 2, 128, 64, 64, 4}, 2);
  for (int rows : {1, 4, 8}) one({6, 1, 256, 32768, 64, rows}, 31999, 33);
  printf("%s: %d cases, %d wrong, worst relative error %.2e\n", name, cases, wrong, worst);
  fprintf(out, " \"%s\": {\"cases so far\": %d, \"wrong so far\": %d, \"worst relative error\": %.3e},\n", name, cases, wrong, worst);
  fflush(stdout);
}

__global__ void fill(__half* p, size_t n) {
  for (size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x; i < n; i += static_cast<size_t>(gridDim.x) * blockDim.x) {
    uint32_t h = static_cast<uint32_t>(i) * 2654435761u ^ static_cast<uint32_t>(i >> 32);
    h ^= h >> 16, h *= 0x85ebca6bu, h ^= h >> 13;
    p[i] = __float2half((static_cast<int>(h & 0xffff) - 32768) / 32768.f);
  }
}

constexpr int kNodes = 64, kReplays = 9;

// Microseconds a node, the median of replays.
static double time_graph(const std::function<void(int)>& node) {
  cudaGraph_t graph;
  cudaGraphExec_t run;
  CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  for (int i = 0; i < kNodes; i++) node(i);
  CHECK(cudaStreamEndCapture(stream, &graph));
  CHECK(cudaGraphInstantiate(&run, graph, 0));
  cudaEvent_t begin, end;
  CHECK(cudaEventCreate(&begin));
  CHECK(cudaEventCreate(&end));
  std::vector<float> times;
  for (int i = 0; i < kReplays + 2; i++) {
    CHECK(cudaEventRecord(begin, stream));
    CHECK(cudaGraphLaunch(run, stream));
    CHECK(cudaEventRecord(end, stream));
    CHECK(cudaStreamSynchronize(stream));
    float ms;
    CHECK(cudaEventElapsedTime(&ms, begin, end));
    if (i > 1) times.push_back(ms);
  }
  std::sort(times.begin(), times.end());
  CHECK(cudaGraphExecDestroy(run));
  CHECK(cudaGraphDestroy(graph));
  return times[kReplays / 2] * 1000. / kNodes;
}

static void time_all() {
  const Sizes most{24, 4, 256, 32768, 64, 8};
  const size_t cache = static_cast<size_t>(most.kv_heads) * most.capacity * most.width;
  const size_t small = static_cast<size_t>(most.rows) * most.all() + 2ul * most.capacity * 32 + 2 * most.width;
  __half *arena, *rest, *y;
  float* workspace;
  int* position;
  CHECK(cudaMalloc(&arena, kNodes * 2 * cache * 2));
  CHECK(cudaMalloc(&rest, small * 2));
  CHECK(cudaMalloc(&y, static_cast<size_t>(most.rows) * most.heads * most.width * 2));
  CHECK(cudaMalloc(&workspace, 4 * (attention::sums_of(132, most.heads, most.rows, most.width) + attention::stats_of(132, most.heads, most.rows))));
  CHECK(cudaMalloc(&position, 4));
  fill<<<2048, 256, 0, stream>>>(arena, kNodes * 2 * cache);
  fill<<<64, 256, 0, stream>>>(rest, small);
  CHECK(cudaStreamSynchronize(stream));
  auto node = [&](int rows, int splits, int i, int parts) {
    Sizes s = most;
    s.rows = rows;
    attention::Arguments<__half> a = arguments<__half>(s, splits);
    a.qkvg = rest, a.cosines = rest + static_cast<size_t>(most.rows) * most.all(), a.sines = a.cosines + most.capacity * 32;
    a.q_norm = a.sines + most.capacity * 32, a.k_norm = a.q_norm + most.width, a.last_row = position, a.y = y;
    a.key = arena + i * 2 * cache, a.value = a.key + cache, a.sums = workspace;
    a.stats = workspace + attention::sums_of(splits, s.heads, rows, s.width);
    if (parts == 3) {
      CHECK(attention::launch(a, s.width, stream));
    } else if (parts == 2) {
      CHECK(attention::start<__half>(attention::combine<__half, 256>, dim3(s.heads, rows), attention::combine_bytes(splits), a, stream));
    } else {
      auto kernel = rows == 1 ? attention::split_attention<__half, 256, 1> : rows == 4 ? attention::split_attention<__half, 256, 2> : attention::split_attention<__half, 256, 3>;
      const int bytes = rows == 1 ? attention::Shape<256, 1>::kBytes : rows == 4 ? attention::Shape<256, 2>::kBytes : attention::Shape<256, 3>::kBytes;
      CHECK(attention::start<__half>(kernel, dim3(splits, s.kv_heads), bytes, a, stream));
    }
  };
  const int usual = attention::splits_of(multiprocessors, most.kv_heads, most.capacity);
  fprintf(out, " \"shape\": \"24 query / 4 kv heads of 256, rotary 64, cache of 32768, fp16; %d nodes, each its own cache\",\n", kNodes);
  fprintf(out, " \"microseconds a node\": {\n");
  bool begun = false;
  for (int rows : {1, 4, 8})
    for (int length : {512, 1024, 3072, 4096, 8192, 16384, 32000}) {
      const int last = length - 1;
      CHECK(cudaMemcpy(position, &last, 4, cudaMemcpyHostToDevice));
      const double both = time_graph([&](int i) { node(rows, usual, i, 3); });
      const double attention_alone = time_graph([&](int i) { node(rows, usual, i, 1); });
      const double combine_alone = time_graph([&](int i) { node(rows, usual, i, 2); });
      const double bytes = 2. * length * most.kv_heads * most.width * 2;
      printf("M=%d length %5d: %.2f us (attention %.2f, combine %.2f), %.2f TB/s\n", rows, length, both, attention_alone, combine_alone, bytes / both / 1e6);
      fprintf(out, "%s  \"M=%d, length %d\": {\"both\": %.2f, \"attention\": %.2f, \"combine\": %.2f, \"cache TB/s\": %.2f}", begun ? ",\n" : "", rows, length, both, attention_alone, combine_alone, bytes / both / 1e6);
      begun = true;
      fflush(stdout);
    }
  fprintf(out, "\n },\n \"microseconds a node by splits\": {\n");
  begun = false;
  for (int rows : {1, 4})
    for (int length : {512, 32000})
      for (int splits : {8, 16, 24, 32, 33, 66}) {
        const int last = length - 1;
        CHECK(cudaMemcpy(position, &last, 4, cudaMemcpyHostToDevice));
        const double both = time_graph([&](int i) { node(rows, splits, i, 3); });
        printf("M=%d length %d splits %d: %.2f us\n", rows, length, splits, both);
        fprintf(out, "%s  \"M=%d, length %d, splits %d\": %.2f", begun ? ",\n" : "", rows, length, splits, both);
        begun = true;
      }
  fprintf(out, "\n }\n");
}

int main(int argc, char** argv) {
  if (argc != 2 || !(out = fopen(argv[1], "w"))) return printf("usage: bench OUT.json\n"), 2;
  const auto begin = std::chrono::steady_clock::now();
  auto seconds = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count(); };
  CHECK(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, 0));
  CHECK(cudaStreamCreate(&stream));
  cudaDeviceProp card;
  CHECK(cudaGetDeviceProperties(&card, 0));
  fprintf(out, "{\n \"device\": \"%s\",\n", card.name);
  time_all();
  fprintf(out, ",\n");
  printf("%.1f s\n", seconds());
  check_all<__half>("fp16");
  printf("%.1f s\n", seconds());
  check_all<__nv_bfloat16>("bf16");
  fprintf(out, " \"seconds\": %.1f\n}\n", seconds());
  fclose(out);
  return wrong > 0;
}
