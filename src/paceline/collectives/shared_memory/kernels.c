/* The things that Python can't do quickly: wait for words in shared memory, add many buffers in one pass, and do both in
   turn, many times in one all-reduce.

   Built into a wheel, or at first use by the system's compiler (kernel_build.py); kernels.py holds the versions in Python and
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
#define CALL_BYTES 96
#define CALLS_AT 64    /* in a line: two calls, taken in turn */
#define ALIGNED 64     /* floats: parts of a piece begin on cache lines */
#define BLOCK 2048     /* floats worked on at a time: a few of them fit the first cache */
#define MOST_ROWS 128
#define STREAM_FROM (8u << 20) /* bytes: less is likely to be read again from a cache */

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

/* What a rank knows of its group's meetings; the same fields as in barrier.py. */
struct meeting {
  uint8_t *lines;
  uint64_t count; /* meetings so far */
  int64_t spin_ns;
  int32_t rank, size;
  int32_t slow_reads; /* in a row, of what others wrote through the caches */
};

/* Come to the next meeting about `call`: -1 when all have come about the same. Otherwise the first rank that has not come
   after `patience_ns`, or `size` plus the first that calls something else. */
int paceline_meet(struct meeting *m, const uint8_t *call, int64_t patience_ns) {
  uint8_t *calls = m->lines + CALLS_AT + (m->count & 1) * CALL_BYTES;
  uint8_t *mine = calls + (size_t)m->rank * LINE;
  if (memcmp(mine, call, CALL_BYTES)) memcpy(mine, call, CALL_BYTES); /* what stays the same stays in others' caches */
  m->count++;
  paceline_arrive(m->lines, m->rank, (uint32_t)m->count);
  int first = (m->rank + 1) % m->size;
  int late = paceline_await(m->lines, m->size, first, (uint32_t)m->count, m->spin_ns, patience_ns);
  if (late >= 0) return late;
  for (int rank = 0; rank < m->size; rank++)
    if (memcmp(calls + (size_t)rank * LINE, call, CALL_BYTES)) return m->size + rank;
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

void paceline_copy(uint8_t *to, const uint8_t *from, size_t bytes, int streamed) {
  if (((uintptr_t)to | (uintptr_t)from | bytes) % 4 == 0 && (streamed || bytes >= STREAM_FROM))
    stream_copy((float *)to, (const float *)from, bytes / 4);
  else
    memcpy(to, from, bytes);
}

static void add_rows(float *restrict left, const float *restrict right, size_t n) {
  for (size_t i = 0; i < n; i++) left[i] += right[i];
}

static void add_two(float *to, const float *left, const float *right, size_t n) {
#pragma GCC ivdep
  for (size_t i = 0; i < n; i++) to[i] = left[i] + right[i];
}

/* Either out may be either row. */
static void add_two_twice(float *to, float *also, const float *left, const float *right, size_t n) {
#pragma GCC ivdep
  for (size_t i = 0; i < n; i++) {
    float sum = left[i] + right[i];
    to[i] = sum;
    also[i] = sum;
  }
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
  if (row_count == 2 && out_count == 2 && !streamed[0] && !streamed[1]) {
    add_two_twice(outs[0], outs[1], rows[0], rows[1], n);
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

#define ALL_REDUCED (-1)
#define CALL_AGAIN (-2)
#define NO_MEMORY (-3)

/* One all-reduce and how far it is; the same fields as in all_reduce_in_c.py. */
struct all_reduce {
  float *tensor;
  uint8_t *slots; /* 2 sets × size ranks × slot_bytes; in place: everybody's tensors, slot_bytes apart */
  const uint8_t *call;
  const int32_t *merges;
  uint64_t elements, slot_bytes;
  uint64_t step;  /* elements of a piece, whole ALIGNED */
  uint64_t begun; /* meetings that this rank has come to */
  int32_t merge_count;
  int32_t whole; /* everybody adds up whole pieces, and no sums are told */
};

static const uint8_t through_caches[MOST_ROWS];

/* Lines that another core has just written come from its cache: quickly if both share the last one, and otherwise at a
   tenth of the speed of memory. Which cores we are on, nobody says, and it changes: so reads are timed. After two slow ones
   in a row this rank writes past the caches, and so do the others, who see the same; except at every PROBE_EVERYth
   meeting, when all try again. */
#define TIMED_FROM (64u << 10) /* bytes: less says nothing */
#define SLOWEST 4              /* bytes in a ns: memory gives more */
#define PROBE_EVERY 127

static int writes_past(const struct meeting *m, size_t n) {
  return m->slow_reads >= 2 && n * 4 >= TIMED_FROM && m->count % PROBE_EVERY;
}

static void judge(struct meeting *m, size_t bytes, int64_t ns) {
  if (bytes < TIMED_FROM || (m->slow_reads >= 2 && (m->count - 1) % PROBE_EVERY)) return;
  if (ns * SLOWEST < (int64_t)bytes)
    m->slow_reads = 0;
  else if (m->slow_reads < 2)
    m->slow_reads++;
}

/* Where the part of owner `rank` begins in a piece of n elements; as `owner_ranges`. */
static size_t cut(size_t n, int rank, int size) {
  size_t blocks = (n + ALIGNED - 1) / ALIGNED, at = (size_t)rank * blocks / (size_t)size * ALIGNED;
  return rank == size || at > n ? n : at;
}

static float *slot_of(const struct meeting *m, const struct all_reduce *w, uint64_t meeting, int rank) {
  return (float *)(w->slots + ((meeting & 1) * (uint64_t)m->size + (uint64_t)rank) * w->slot_bytes);
}

static size_t length_of(const struct all_reduce *w, uint64_t piece) {
  uint64_t left = w->elements - piece * w->step;
  return left < w->step ? left : w->step;
}

static void write_others(const struct meeting *m, const struct all_reduce *w, uint64_t piece) {
  const float *from = w->tensor + piece * w->step;
  float *slot = slot_of(m, w, m->count, m->rank);
  size_t n = length_of(w, piece), low = cut(n, m->rank, m->size), high = cut(n, m->rank + 1, m->size);
  if (w->whole) low = high = n;
  if (writes_past(m, n)) {
    stream_copy(slot, from, low);
    stream_copy(slot + high, from + high, n - high);
  } else {
    memcpy(slot, from, low * 4);
    memcpy(slot + high, from + high, (n - high) * 4);
  }
}

static int sum_own(const struct meeting *m, const struct all_reduce *w, uint64_t piece, size_t *bytes) {
  float *mine = w->tensor + piece * w->step;
  size_t n = length_of(w, piece), low = cut(n, m->rank, m->size), high = cut(n, m->rank + 1, m->size);
  if (w->whole) low = 0, high = n;
  if (low == high) return 0;
  const float *rows[MOST_ROWS];
  for (int rank = 0; rank < m->size; rank++)
    rows[rank] = (rank == m->rank ? mine : slot_of(m, w, m->count - 1, rank)) + low;
  float *outs[2] = {mine + low, slot_of(m, w, m->count, m->rank) + w->step};
  uint8_t past[2] = {0, (uint8_t)writes_past(m, n)};
  *bytes += (size_t)(m->size - 1) * (high - low) * 4;
  return paceline_sum(outs, w->whole ? 1 : 2, rows, m->size, w->merges, w->merge_count, high - low, past);
}

static void read_sums(const struct meeting *m, const struct all_reduce *w, uint64_t piece, size_t *bytes) {
  float *to = w->tensor + piece * w->step;
  size_t n = length_of(w, piece);
  for (int next = 1; next < m->size; next++) {
    int rank = (m->rank + next) % m->size;
    size_t low = cut(n, rank, m->size), high = cut(n, rank + 1, m->size);
    memcpy(to + low, slot_of(m, w, m->count - 1, rank) + w->step, (high - low) * 4);
    *bytes += (high - low) * 4;
  }
}

/* The sum of everybody's tensor, in place. Before meeting k a rank writes what others need of piece k, and its sums of
   piece k-1 behind it; so a piece costs one meeting, and what was written stays where it is until the meeting after next.

   ALL_REDUCED, or what `paceline_meet` said of a meeting: once that is over, call it again and it goes on behind it.
   CALL_AGAIN after `patience_ns`, so that whoever calls can look after signals. */
int paceline_all_reduce(struct meeting *m, struct all_reduce *w, int64_t patience_ns) {
  int64_t came = now_ns();
  uint64_t pieces = (w->elements + w->step - 1) / w->step;
  if (m->size > MOST_ROWS) return NO_MEMORY;
  for (;;) {
    uint64_t k = w->begun;
    size_t bytes = 0;
    int64_t began = now_ns();
    if (k >= 2 && !w->whole) read_sums(m, w, k - 2, &bytes);
    if (k >= 1 && k <= pieces && sum_own(m, w, k - 1, &bytes)) return NO_MEMORY;
    if (k <= pieces) judge(m, bytes, now_ns() - began); /* reading sums alone says too little */
    if (k == pieces + (w->whole ? 0 : 1)) return ALL_REDUCED;
    if (k < pieces) write_others(m, w, k);
    w->begun = k + 1;
    int other = paceline_meet(m, w->call, patience_ns);
    if (other >= 0) return other;
    if (now_ns() - came > patience_ns) return CALL_AGAIN;
  }
}

/* The same on tensors in shared memory, where everybody's lie beside each other: each rank writes its sums to all. */
int paceline_all_reduce_in_place(struct meeting *m, struct all_reduce *w, int64_t patience_ns) {
  if (m->size > MOST_ROWS) return NO_MEMORY;
  while (w->begun < 2) {
    if (w->begun == 1) {
      size_t low = cut(w->elements, m->rank, m->size), high = cut(w->elements, m->rank + 1, m->size);
      float *rows[MOST_ROWS];
      for (int rank = 0; rank < m->size; rank++) rows[rank] = (float *)(w->slots + (uint64_t)rank * w->slot_bytes) + low;
      if (low < high && paceline_sum(rows, m->size, (const float *const *)rows, m->size, w->merges, w->merge_count,
                                     high - low, through_caches))
        return NO_MEMORY;
    }
    w->begun++;
    int other = paceline_meet(m, w->call, patience_ns);
    if (other >= 0) return other;
  }
  return ALL_REDUCED;
}

/* Rows of int8 with a scale (compression/int8.py). Codes and scale of a row whose largest size has the bits `largest`: what
   coding loses is left in `v`. */
static inline void int8_row(float *restrict v, int8_t *restrict codes, size_t block, uint32_t largest) {
  const float smallest = 1.17549435e-38f;
  float scale;
  memcpy(&scale, &largest, 4);
  scale /= 127.0f;
  if (scale < smallest) scale = smallest;
  float inverse = 1.0f / scale;
  for (size_t i = 0; i < block; i++) {
    int32_t code = (int32_t)__builtin_rintf(v[i] * inverse);
    codes[i] = (int8_t)code;
    v[i] -= (float)(int8_t)code * scale;
  }
  memcpy(codes + block, &scale, 4);
}

/* The size of a number as a whole one: their order is the same, and what is not a number is above all. */
static inline uint32_t size_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits & 0x7fffffffu;
}

/* v += more, where there is any; the largest size of the sums. */
static inline uint32_t largest_with(float *restrict v, const float *restrict more, size_t block) {
  uint32_t largest = 0;
  if (more) {
    for (size_t i = 0; i < block; i++) {
      v[i] += more[i];
      uint32_t bits = size_bits(v[i]);
      largest = bits > largest ? bits : largest;
    }
  } else {
    for (size_t i = 0; i < block; i++) {
      uint32_t bits = size_bits(v[i]);
      largest = bits > largest ? bits : largest;
    }
  }
  return largest;
}

static inline void int8_row_decode(const uint8_t *payload, float *restrict out, size_t block) {
  const int8_t *codes = (const int8_t *)payload;
  float scale;
  memcpy(&scale, payload + block, 4);
  for (size_t i = 0; i < block; i++) out[i] = (float)codes[i] * scale;
}

/* `values` of rows × block, plus `residual` where there is one, are coded in one pass over memory, and what that loses is
   left in `values`. */
void paceline_int8_split(float *values, const float *residual, uint8_t *payload, size_t rows, size_t block) {
  for (size_t row = 0; row < rows; row++) {
    float *v = values + row * block;
    uint32_t largest = largest_with(v, residual ? residual + row * block : NULL, block);
    int8_row(v, (int8_t *)(payload + row * (block + 4)), block, largest);
  }
}

void paceline_int8_decode(const uint8_t *payload, float *out, size_t rows, size_t block) {
  for (size_t row = 0; row < rows; row++) int8_row_decode(payload + row * (block + 4), out + row * block, block);
}

/* What the owner of rows does, in one pass: decode `part_count` payloads, add them along `merges` (to part 0 in the end) and
   to `residual` where there is one, code the sum into `payload`, decode that to `out`, and leave what it loses in `lost`. */
int paceline_int8_sum(const uint8_t *const *parts, int part_count, const int32_t *merges, int merge_count,
                      const float *residual, float *lost, uint8_t *payload, float *out, size_t rows, size_t block) {
  float *held = aligned_alloc(64, (size_t)part_count * block * 4);
  if (!held) return 1;
  for (size_t row = 0; row < rows; row++) {
    size_t at = row * (block + 4);
    for (int part = 0; part < part_count; part++) int8_row_decode(parts[part] + at, held + (size_t)part * block, block);
    for (int merge = 0; merge < merge_count; merge++)
      add_rows(held + (size_t)merges[2 * merge] * block, held + (size_t)merges[2 * merge + 1] * block, block);
    uint32_t largest = largest_with(held, residual ? residual + row * block : NULL, block);
    int8_row(held, (int8_t *)(payload + at), block, largest);
    memcpy(lost + row * block, held, block * 4);
    int8_row_decode(payload + at, out + row * block, block);
  }
  free(held);
  return 0;
}
