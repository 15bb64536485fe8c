/* Vectors of 16 floats for the C sources here; the compiler splits them where the machine is narrower. */
#include <math.h>
#include <stdint.h>
#include <string.h>

typedef float v16 __attribute__((vector_size(64), aligned(4)));
typedef int32_t i16 __attribute__((vector_size(64), aligned(4)));

#define LANES 16

static inline v16 splat(float x) { return (v16){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }

static inline v16 load(const float *p) {
    v16 x;
    memcpy(&x, p, sizeof x);
    return x;
}

static inline void store(float *p, v16 x) { memcpy(p, &x, sizeof x); }

static inline float total(v16 x) {
    float s = 0;
    for (int i = 0; i < LANES; i++) s += x[i];
    return s;
}

static inline v16 vmax(v16 a, v16 b) {
    i16 take = a > b;
    return (v16)(((i16)a & take) | ((i16)b & ~take));
}

/* e^x to about 1 ulp for x <= 88: 2^n * e^r with |r| <= ln(2)/2, e^r by its Taylor polynomial of degree 7. NaN stays NaN. */
static inline v16 vexp(v16 x) {
    x = (v16)(((i16)x & ~(i16)(x < splat(-87.0f))) | ((i16)splat(-87.0f) & (i16)(x < splat(-87.0f))));
    v16 magic = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    v16 n = (x * splat(1.44269504f) + magic) - magic;
    v16 r = x - n * splat(0.693359375f);
    r = r - n * splat(-2.12194440e-4f);
    v16 p = splat(1.0f / 5040.0f);
    p = p * r + splat(1.0f / 720.0f);
    p = p * r + splat(1.0f / 120.0f);
    p = p * r + splat(1.0f / 24.0f);
    p = p * r + splat(1.0f / 6.0f);
    p = p * r + splat(0.5f);
    p = p * r + splat(1.0f);
    p = p * r + splat(1.0f);
    i16 power = (__builtin_convertvector(n, i16) + 127) << 23;
    return p * (v16)power;
}
