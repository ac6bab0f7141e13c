// The instructions of runtime/kernels/ptx.cuh on a CPU. Copies land late and from another thread, over poisoned bytes,
// so that a read before its barrier or a write into a slot in use shows in the result.
#ifndef W4_PTX  // the same as in the real one, which is then left out
#define W4_PTX
#include "cuda_fp16.h"

namespace w4 {
extern uint8_t ring[];
uint32_t masked(uint32_t a, uint32_t mask, uint32_t set);
uint32_t less_fp16(uint32_t a, uint32_t b);
uint32_t less_bf16(uint32_t a, uint32_t b);
void mma_fp16(float* c, const uint32_t* a, uint32_t b0, uint32_t b1);
void mma_bf16(float* c, const uint32_t* a, uint32_t b0, uint32_t b1);
inline uint32_t shared_address(const void* p) { return static_cast<uint32_t>(static_cast<const uint8_t*>(p) - ring); }
void barrier_init(uint32_t bar, int count);
void barrier_arrive(uint32_t bar);
void barrier_expect(uint32_t bar, int bytes);
void barrier_wait(uint32_t bar, uint32_t parity);
void load_bulk(uint32_t to, const void* from, int bytes, uint32_t bar, uint64_t policy);
inline uint4 load_shared(uint32_t p) { uint4 v; memcpy(&v, ring + p, 16); return v; }
void copy_async(uint32_t to, const void* from, bool there);
void load_matrices(uint32_t* r, uint32_t p);
void load_transposed(uint32_t* r, uint32_t p);
uint32_t pack_fp16(float low, float high);
uint32_t pack_bf16(float low, float high);
inline float power_of_two(float x) { return exp2f(x); }
void close_copies();
void await_groups(size_t open);
template <int open> void await_copies() { await_groups(open); }
void barrier_arrive_after_copies(uint32_t bar);
inline void publish_barriers() {}
inline uint64_t read_once_policy() { return 0; }
inline void let_next_kernel_start() {}
inline void await_previous_kernel() {}
unsigned count_arrival(unsigned* counter);
}  // namespace w4
#endif
