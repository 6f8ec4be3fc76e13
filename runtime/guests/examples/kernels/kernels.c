// Compute kernels never written for suspension; run(kind, n) returns bits that depend on all work.
// kernels.wat is this file compiled, as text, so that tests need no compiler:
//   zig cc -target wasm32-freestanding -O2 -nostdlib -Wl,--no-entry -Wl,-z,stack-size=65536 -s
#include <stdint.h>

#define EXPORT(name) __attribute__((export_name(name)))
#define APART __attribute__((noinline))

// 0: a hash over a buffer that it keeps changing
static uint8_t buffer[1 << 15];
APART static uint64_t hashing(uint32_t rounds) {
  uint64_t h = 0xcbf29ce484222325ull;
  for (uint32_t i = 0; i < sizeof buffer; i++) buffer[i] = (uint8_t)(i * 7 + 3);
  for (uint32_t r = 0; r < rounds; r++)
    for (uint32_t i = 0; i < sizeof buffer; i++) {
      h = (h ^ buffer[i]) * 0x100000001b3ull;
      buffer[i] = (uint8_t)(h >> 29);
    }
  return h;
}

// 1: floats whose last bit matters
APART static uint64_t floating(uint32_t n) {
  double x = 0.3, y = 0.7, sum = 0;
  for (uint32_t i = 0; i < n; i++)
    for (int k = 0; k < 100; k++) {
      x = 3.99 * x * (1 - x);
      y = y * 0.9 + x / (1.5 + y);
      sum += x * y;
    }
  union { double d; uint64_t u; } bits = {.d = sum};
  return bits.u;
}

// 2: two calls per call
APART static uint64_t doubled(uint32_t n) { return n < 2 ? n : doubled(n - 1) + doubled(n - 2); }

// 3: deep frames with something to save in each
APART static uint64_t deep(uint32_t depth, uint64_t seed) {
  volatile uint64_t kept[4] = {seed, seed ^ depth, seed + depth, seed * 31};
  uint64_t sum = 0;
  for (int i = 0; i < 40; i++) { kept[i & 3] += i * seed; sum += kept[(i + 1) & 3]; }
  if (depth == 0) return sum;
  uint64_t inner = deep(depth - 1, sum | 1);
  return inner * 3 + kept[0] + kept[3];
}
APART static uint64_t deeper(uint32_t n) {
  uint64_t out = 1;
  for (uint32_t i = 0; i < n; i++) out ^= deep(300, out + i);
  return out;
}

// 4: a small machine whose instructions are function pointers
typedef struct { uint64_t a, b; uint32_t at, left; } Machine;
typedef void (*Step)(Machine *);
static void add(Machine *m) { m->a += m->b ^ m->at; }
static void turn(Machine *m) { m->b = (m->b << 7 | m->b >> 57) + m->a; }
static void jump(Machine *m) { m->at += (uint32_t)(m->a & 3); }
static void mix(Machine *m) { for (int i = 0; i < 5; i++) m->a = m->a * 0x9e3779b97f4a7c15ull + (m->b >> i); }
static Step steps[8];
APART static uint64_t machine(uint32_t n) {
  Step all[4] = {add, turn, jump, mix};
  for (int i = 0; i < 8; i++) steps[i] = all[(i * 5 + 1) & 3];
  Machine m = {1, 2, 0, n * 1000};
  while (m.left--) { steps[m.at & 7](&m); m.at++; }
  return m.a ^ m.b;
}

// 5: never ends
APART static uint64_t endless(void) {
  for (volatile uint32_t i = 0;; i++) buffer[i & 255]++;
}

EXPORT("run") uint64_t run(uint32_t kind, uint32_t n) {
  switch (kind) {
    case 0: return hashing(n);
    case 1: return floating(n);
    case 2: return doubled(n);
    case 3: return deeper(n);
    case 4: return machine(n);
    case 5: return endless();
  }
  return 0;
}
