// A case of cached attention and its answer in fp64, for the emulation and for a card. Wants `float number(T)` and
// `T rounded<T>(float)` from whoever includes it.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

struct Sizes {
  int heads, kv_heads, width, capacity, rotary, rows;  // width: of a head
  int group() const { return heads / kv_heads; }
  int q_at() const { return 0; }
  int k_at() const { return heads * width; }
  int v_at() const { return k_at() + kv_heads * width; }
  int gate_at() const { return v_at() + kv_heads * width; }
  int all() const { return gate_at() + heads * width; }
};

template <typename T>
struct Case {
  Sizes s;
  int last;  // position of the last row
  std::vector<T> qkvg, cosines, sines, q_norm, k_norm, key, value;  // rows of the cache from the first new one on are NaN
  float eps = 1e-6f;

  Case(const Sizes& sizes, int last_row, uint32_t seed) : s(sizes), last(last_row) {
    std::mt19937 rng(seed);
    auto fill = [&](std::vector<T>& to, size_t n, float mean, float by) {
      to.resize(n);
      for (auto& v : to) v = rounded<T>(mean + by * 1.7f * (static_cast<float>(rng()) * 0x1p-31f - 1));
    };
    fill(qkvg, static_cast<size_t>(s.rows) * s.all(), 0, 1);
    fill(q_norm, s.width, 1.5f, 0.3f), fill(k_norm, s.width, 1.5f, 0.3f);
    cosines.resize(static_cast<size_t>(s.capacity) * s.rotary / 2), sines.resize(cosines.size());
    for (size_t i = 0; i < cosines.size(); i++) {
      const double angle = i / (s.rotary / 2) * std::pow(1e4, -2.0 * (i % (s.rotary / 2)) / s.rotary);
      cosines[i] = rounded<T>(static_cast<float>(std::cos(angle))), sines[i] = rounded<T>(static_cast<float>(std::sin(angle)));
    }
    const size_t cache = static_cast<size_t>(s.kv_heads) * s.capacity * s.width;
    fill(key, cache, 0, 1), fill(value, cache, 0, 1);
    for (int h = 0; h < s.kv_heads; h++)
      for (int p = std::max(0, last + 1 - s.rows); p < s.capacity; p++) {
        memset(&key[at(h, p)], 0xff, s.width * sizeof(T));
        memset(&value[at(h, p)], 0xff, s.width * sizeof(T));
      }
  }
  size_t at(int head, int position) const { return (static_cast<size_t>(head) * s.capacity + position) * s.width; }

  std::vector<double> rotated(const T* x, const std::vector<T>& weight, int position) const {
    double squares = 0;
    for (int i = 0; i < s.width; i++) squares += std::pow(static_cast<double>(number(x[i])), 2);
    std::vector<double> n(s.width), r(s.width);
    for (int i = 0; i < s.width; i++) n[i] = number(x[i]) / std::sqrt(squares / s.width + eps) * number(weight[i]);
    const int half = s.rotary / 2;
    for (int i = 0; i < s.width; i++) {
      if (i >= s.rotary) { r[i] = n[i]; continue; }
      const double c = number(cosines[static_cast<size_t>(position) * half + i % half]), d = number(sines[static_cast<size_t>(position) * half + i % half]);
      r[i] = i < half ? n[i] * c - n[i + half] * d : n[i] * c + n[i - half] * d;
    }
    for (auto& v : r) v = number(rounded<T>(static_cast<float>(v)));
    return r;
  }

  // What should come out, of every `step`-th head of a row, NaN elsewhere; key and value become the caches after it.
  std::vector<double> answer(int step = 1) {
    const int first = last + 1 - s.rows;
    for (int row = std::max(0, -first); row < s.rows; row++)
      for (int h = 0; h < s.kv_heads; h++) {
        const T* from = &qkvg[static_cast<size_t>(row) * s.all()] + h * s.width;
        const auto k = rotated(from + s.k_at(), k_norm, first + row);
        for (int i = 0; i < s.width; i++) key[at(h, first + row) + i] = rounded<T>(static_cast<float>(k[i]));
        memcpy(&value[at(h, first + row)], from + s.v_at(), s.width * sizeof(T));
      }
    std::vector<float> keys(key.size()), values(key.size());
    for (int h = 0; h < s.kv_heads; h++)
      for (size_t i = at(h, 0); i < at(h, last + 1); i++) keys[i] = number(key[i]), values[i] = number(value[i]);
    std::vector<double> y(static_cast<size_t>(s.rows) * s.heads * s.width, 0.);
    for (int row = std::max(0, -first); row < s.rows; row++)  // rows before the cache's first are 0
      for (int head = 0; head < s.heads; head++) {
        double* to = &y[(static_cast<size_t>(row) * s.heads + head) * s.width];
        if ((row * s.heads + head) % step) {
          std::fill_n(to, s.width, NAN);
          continue;
        }
        const T* x = &qkvg[static_cast<size_t>(row) * s.all()] + head * s.width;
        const auto q = rotated(x + s.q_at(), q_norm, first + row);
        const int h = head / s.group(), n = first + row + 1;
        std::vector<double> weight(n), out(s.width, 0.);
        double most = -INFINITY, total = 0;
        for (int p = 0; p < n; p++) {
          double sum = 0;
          for (int i = 0; i < s.width; i++) sum += q[i] * keys[at(h, p) + i];
          most = std::max(most, weight[p] = sum / std::sqrt(s.width));
        }
        for (auto& w : weight) total += w = std::exp(w - most);
        for (int p = 0; p < n; p++)
          for (int i = 0; i < s.width; i++) out[i] += weight[p] / total * values[at(h, p) + i];
        for (int i = 0; i < s.width; i++)
          to[i] = out[i] / (1 + std::exp(-static_cast<double>(number(x[s.gate_at() + i]))));
      }
    return y;
  }

  // The relative error of y; NaN where something is missing.
  static double error_of(const std::vector<T>& y, const std::vector<double>& want) {
    double error = 0, norm = 0;
    for (size_t i = 0; i < want.size(); i++)
      if (!std::isnan(want[i])) error += std::pow(number(y[i]) - want[i], 2), norm += want[i] * want[i];
    return std::sqrt(error / norm);
  }
  // Whether a cache is as it should be: bits where nothing is written, a rounding where something is.
  bool same_cache(const std::vector<T>& got, const std::vector<T>& want) const {
    for (int h = 0; h < s.kv_heads; h++)
      for (int p = 0; p < s.capacity; p++)
        for (int i = 0; i < s.width; i++) {
          const T &a = got[at(h, p) + i], &b = want[at(h, p) + i];
          const bool fresh = p > last - s.rows && p <= last;
          if (memcmp(&a, &b, sizeof(T)) != 0 && !(fresh && std::fabs(number(a) - number(b)) <= 0.01f * std::fabs(number(b)) + 1e-4f)) return false;
        }
    return true;
  }
};
