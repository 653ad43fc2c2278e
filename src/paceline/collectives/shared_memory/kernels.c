/* The two things that Python can't do quickly: wait for a word in shared memory, and add many buffers in one pass.

   Built at first use with the system's compiler and kept in the user's cache; kernels.py holds the versions in Python and
   torch that are used without it, and whose bits these must have. */

#define _GNU_SOURCE
#include <limits.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#if defined(__AVX__)
#include <immintrin.h>
#endif

#define LINE 256       /* bytes of a rank's line: its count of meetings first, then how many sleep on it */
#define BLOCK 2048     /* floats worked on at a time: a few of them fit the first cache */
#define MOST_ROWS 128

static inline void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

static inline int64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static long futex(_Atomic uint32_t *word, int operation, uint32_t value, const struct timespec *timeout) {
  return syscall(SYS_futex, word, operation, value, timeout, NULL, 0);
}

/* Say that this rank has come to meeting `count`. */
void paceline_arrive(uint8_t *lines, int rank, uint32_t count) {
  _Atomic uint32_t *word = (_Atomic uint32_t *)(lines + (size_t)rank * LINE);
  _Atomic uint32_t *sleepers = word + 1;
  atomic_store_explicit(word, count, memory_order_seq_cst);
  if (atomic_load_explicit(sleepers, memory_order_seq_cst)) futex(word, FUTEX_WAKE, INT_MAX, NULL);
}

/* Wait until every rank has come to meeting `count`: -1, or after `patience_ns` the first rank that has not. */
int paceline_await(uint8_t *lines, int size, int first, uint32_t count, int64_t spin_ns, int64_t patience_ns) {
  int64_t began = 0;
  for (int step = 0; step < size; step++) {
    int rank = (first + step) % size;
    _Atomic uint32_t *word = (_Atomic uint32_t *)(lines + (size_t)rank * LINE);
    _Atomic uint32_t *sleepers = word + 1;
    for (int turns = 0;; turns++) {
      uint32_t seen = atomic_load_explicit(word, memory_order_acquire);
      if ((int32_t)(seen - count) >= 0) break;
      if (!began) began = now_ns();
      if (turns % 64 != 63) {
        relax();
        continue;
      }
      int64_t waited = now_ns() - began;
      if (waited > patience_ns) return rank;
      if (waited < spin_ns) continue;
      int64_t left = patience_ns - waited;
      struct timespec nap = {left / 1000000000, left % 1000000000};
      atomic_fetch_add_explicit(sleepers, 1, memory_order_seq_cst);
      if (atomic_load_explicit(word, memory_order_seq_cst) == seen) futex(word, FUTEX_WAIT, seen, &nap);
      atomic_fetch_sub_explicit(sleepers, 1, memory_order_seq_cst);
    }
  }
  return -1;
}

/* Copy past the caches: what others will read, or what is read much later, only pushes other things out of them. */
static void stream_copy(float *to, const float *from, size_t n) {
#if defined(__AVX__)
  size_t head = ((32 - ((uintptr_t)to & 31)) & 31) / 4;
  if (head > n) head = n;
  memcpy(to, from, head * 4);
  size_t i = head;
  for (; i + 8 <= n; i += 8) _mm256_stream_ps(to + i, _mm256_loadu_ps(from + i));
  memcpy(to + i, from + i, (n - i) * 4);
  _mm_sfence();
#else
  memcpy(to, from, n * 4);
#endif
}

void paceline_copy(uint8_t *to, const uint8_t *from, size_t bytes) {
  if (((uintptr_t)to | (uintptr_t)from | bytes) % 4 == 0 && bytes >= (1 << 20))
    stream_copy((float *)to, (const float *)from, bytes / 4);
  else
    memcpy(to, from, bytes);
}

static void add_rows(float *restrict left, const float *restrict right, size_t n) {
  for (size_t i = 0; i < n; i++) left[i] += right[i];
}

static void add_two(float *to, const float *left, const float *right, size_t n) {
  for (size_t i = 0; i < n; i++) to[i] = left[i] + right[i];
}

static void stream_two(float *to, const float *left, const float *right, size_t n) {
#if defined(__AVX__)
  size_t head = ((32 - ((uintptr_t)to & 31)) & 31) / 4;
  if (head > n) head = n;
  add_two(to, left, right, head);
  size_t i = head;
  for (; i + 8 <= n; i += 8) _mm256_stream_ps(to + i, _mm256_add_ps(_mm256_loadu_ps(left + i), _mm256_loadu_ps(right + i)));
  add_two(to + i, left + i, right + i, n - i);
  _mm_sfence();
#else
  add_two(to, left, right, n);
#endif
}

/* outs[k][:] = the rows added along `merges` (pairs left, right: left += right), block by block. A row may be an out.

   `streamed` says which outs are written past the caches; one of two rows that is also an out must not be. */
int paceline_sum(float *const *outs, int out_count, const float *const *rows, int row_count, const int32_t *merges,
                 int merge_count, size_t n, const uint8_t *streamed) {
  if (row_count > MOST_ROWS || row_count < 1 || out_count < 1) return 1;
  if (row_count == 2 && out_count == 1) {
    if (streamed[0])
      stream_two(outs[0], rows[0], rows[1], n);
    else
      add_two(outs[0], rows[0], rows[1], n);
    return 0;
  }
  float total[BLOCK] __attribute__((aligned(64)));
  static _Thread_local float *held = NULL;
  static _Thread_local size_t held_rows = 0;
  if (row_count > 2 && held_rows < (size_t)row_count) {
    free(held);
    held = aligned_alloc(64, (size_t)row_count * BLOCK * 4);
    held_rows = held ? (size_t)row_count : 0;
    if (!held) return 2;
  }
  for (size_t low = 0; low < n; low += BLOCK) {
    size_t m = n - low < BLOCK ? n - low : BLOCK;
    const float *sum = total;
    if (row_count == 1) {
      sum = rows[0] + low;
    } else if (row_count == 2) {
      add_two(total, rows[0] + low, rows[1] + low, m);
    } else {
      uint8_t mine[MOST_ROWS] = {0};
      int root = 0;
      for (int k = 0; k < merge_count; k++) {
        int left = merges[2 * k], right = merges[2 * k + 1];
        const float *from = mine[right] ? held + (size_t)right * BLOCK : rows[right] + low;
        float *to = held + (size_t)left * BLOCK;
        if (mine[left])
          add_rows(to, from, m);
        else
          add_two(to, rows[left] + low, from, m);
        mine[left] = 1;
        root = left;
      }
      sum = held + (size_t)root * BLOCK;
    }
    for (int k = 0; k < out_count; k++) {
      float *to = outs[k] + low;
      if (to == sum) continue;
      if (streamed[k])
        stream_copy(to, sum, m);
      else
        memcpy(to, sum, m * 4);
    }
  }
  return 0;
}
