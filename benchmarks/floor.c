/* The floor: the lowest cost of a softmax loss with its gradient, for logits in memory.
 *
 *   pass 1  reads every logit, one exp each                       (the loss)
 *   pass 2  reads every logit, one exp each, writes the gradient  (over the logits)
 *
 * No rows, labels, lattice, or guard against overflow: only the memory traffic and the exps that no kernel can avoid.
 */
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* Relative error 2e-7 for |x| < 87. Without branches, so that the compiler vectorises the loops around it. */
static inline float fast_exp(float x) {
  float k = x * 1.44269504f + 12582912.0f; /* 1.5 * 2^23: leaves the nearest integer in the low bits */
  int32_t bits;
  memcpy(&bits, &k, sizeof bits);
  k -= 12582912.0f;
  float r = x - k * 0.693359375f + k * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 0.5f;
  p = p * r * r + r + 1.0f;
  int32_t scale = (int32_t)((uint32_t)bits << 23) + 0x3f800000;
  float power;
  memcpy(&power, &scale, sizeof power);
  return p * power;
}

static float sum_exp(const float* x, int64_t n) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += fast_exp(x[i]);
  return sum;
}

static void scale_exp(float* x, int64_t n, float scale) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) x[i] = scale * fast_exp(x[i]);
}

typedef struct {
  float* x;
  const int64_t* begin; /* chunks [begin, end) of x */
  const int64_t* end;
  int64_t chunks;
  int write;
  atomic_llong next, done;
  atomic_int users; /* the last user frees, since a thread may start after the work is done */
  _Atomic float sum;
} Pass;

static void drain(Pass* p) {
  float sum = 0;
  for (int64_t i; (i = atomic_fetch_add(&p->next, 1)) < p->chunks; atomic_fetch_add(&p->done, 1)) {
    float* x = p->x + p->begin[i];
    int64_t n = p->end[i] - p->begin[i];
    if (p->write) {
      scale_exp(x, n, 1e-3f);
    } else {
      sum += sum_exp(x, n);
    }
  }
  p->sum = sum; /* kept, so that the reading pass is not dead code */
}

static void* help(void* arg) {
  Pass* p = arg;
  drain(p);
  if (atomic_fetch_sub(&p->users, 1) == 1) free(p);
  return NULL;
}

/* passes: 1 for the loss, 2 for loss and gradient. */
void floor_run(float* x, const int64_t* begin, const int64_t* end, int64_t chunks, int passes, int threads) {
  for (int write = 0; write < passes; ++write) {
    Pass* p = malloc(sizeof *p);
    *p = (Pass){.x = x, .begin = begin, .end = end, .chunks = chunks, .write = write, .users = threads};
    for (int i = 1; i < threads; ++i) {
      pthread_t thread;
      if (pthread_create(&thread, NULL, help, p)) abort();
      pthread_detach(thread);
    }
    drain(p);
    while (atomic_load(&p->done) < chunks) sched_yield();
    if (atomic_fetch_sub(&p->users, 1) == 1) free(p);
  }
}
