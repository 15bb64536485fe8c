/* Arithmetic whose result for a row depends on that row alone, bit for bit: however many rows share the call, and wherever
 * they lie in it. Every sum is taken in one fixed order; blocking changes what is computed when, never in what order.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

typedef float v16 __attribute__((vector_size(64), aligned(4)));
typedef float v8 __attribute__((vector_size(32)));
typedef float v4 __attribute__((vector_size(16)));

#define LANES 16

/* Keeps a loaded vector in its register: loaded again for every use, loads would bound the loop at half its speed. */
#if defined(__AVX512F__)
#define HOLD(x) __asm__("" : "+v"(x))
#else
#define HOLD(x)
#endif

static inline v16 load(const float *p) {
    v16 x;
    memcpy(&x, p, sizeof x);
    return x;
}

static inline float total(v16 x) {
    v8 a, b;
    memcpy(&a, &x, sizeof a);
    memcpy(&b, (const char *)&x + sizeof a, sizeof b);
    a += b;
    v4 c, d;
    memcpy(&c, &a, sizeof c);
    memcpy(&d, (const char *)&a + sizeof c, sizeof d);
    c += d;
    return (c[0] + c[2]) + (c[1] + c[3]);
}

/* rows x columns products of length k: one vector of partial sums each, then what is left of k one by one. */
static inline __attribute__((always_inline)) void block(const float *x, const float *w, const float *bias, float *y, int rows,
                                                        int columns, int64_t k, int64_t n) {
    v16 sum[4][4];
    int64_t i = 0;
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) sum[r][c] = (v16){0};
    for (; i + LANES <= k; i += LANES) {
        v16 b[4];
        for (int c = 0; c < columns; c++) {
            b[c] = load(w + c * k + i);
            HOLD(b[c]);
        }
        for (int r = 0; r < rows; r++) {
            v16 a = load(x + r * k + i);
            HOLD(a);
            for (int c = 0; c < columns; c++) sum[r][c] += a * b[c];
        }
    }
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) {
            float s = total(sum[r][c]);
            for (int64_t j = i; j < k; j++) s = __builtin_fmaf(x[r * k + j], w[c * k + j], s);
            y[r * n + c] = bias ? s + bias[c] : s;
        }
}

/* y (rows, n) = x (rows, k) w (n, k)^T + bias */
void tm_rows_linear(const float *x, const float *w, const float *bias, float *y, int64_t first, int64_t last, int64_t k,
                    int64_t n) {
    int64_t c = 0;
    for (; c + 4 <= n; c += 4) {
        const float *b = bias ? bias + c : 0;
        int64_t r = first;
        for (; r + 4 <= last; r += 4) block(x + r * k, w + c * k, b, y + r * n + c, 4, 4, k, n);
        for (; r < last; r++) block(x + r * k, w + c * k, b, y + r * n + c, 1, 4, k, n);
    }
    for (; c < n; c++)
        for (int64_t r = first; r < last; r++) block(x + r * k, w + c * k, bias ? bias + c : 0, y + r * n + c, 1, 1, k, n);
}

typedef struct {
    const float *q, *keys, *values;        /* (rows, heads, dim), (tokens, kv_heads, dim), (tokens, kv_heads, v_dim) */
    const int64_t *table, *which, *length; /* pages of each sequence; sequence and tokens seen of each row */
    const float *sinks;                    /* (heads): a score beside the others, or none */
    float *out;                            /* (rows, heads, v_dim) */
    int64_t table_stride, heads, kv_heads, dim, v_dim, page, window, chunk; /* window, chunk 0: none */
    float scale, softcap;                                                   /* softcap 0: none */
} attention;

static float dot(const float *a, const float *b, int64_t n) {
    v16 sum = {0};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) sum += load(a + i) * load(b + i);
    float s = total(sum);
    for (; i < n; i++) s = __builtin_fmaf(a[i], b[i], s);
    return s;
}

/* The first position that a token sees, which is the last of `length`. */
static int64_t first_seen(const attention *a, int64_t length) {
    int64_t from = a->window > 0 && length > a->window ? length - a->window : 0, begin = a->chunk > 0 ? (length - 1) / a->chunk * a->chunk : 0;
    return begin > from ? begin : from;
}

static void attend_head(const attention *a, int64_t row, int64_t head, float *weight) {
    int64_t kv = head / (a->heads / a->kv_heads), length = a->length[row];
    int64_t from = first_seen(a, length);
    const int64_t *pages = a->table + a->which[row] * a->table_stride;
    const float *q = a->q + (row * a->heads + head) * a->dim;
    float *out = a->out + (row * a->heads + head) * a->v_dim, peak = -INFINITY, sum = 0;
    for (int64_t t = from; t < length; t++) {
        int64_t at = pages[t / a->page] * a->page + t % a->page;
        float s = dot(q, a->keys + (at * a->kv_heads + kv) * a->dim, a->dim) * a->scale;
        if (a->softcap > 0) s = tanhf(s / a->softcap) * a->softcap;
        weight[t] = s;
        peak = s > peak ? s : peak;
    }
    if (a->sinks) {
        peak = a->sinks[head] > peak ? a->sinks[head] : peak;
        sum = expf(a->sinks[head] - peak);
    }
    for (int64_t t = from; t < length; t++) sum += weight[t] = expf(weight[t] - peak);
    memset(out, 0, sizeof(float) * a->v_dim);
    for (int64_t t = from; t < length; t++) {
        int64_t at = pages[t / a->page] * a->page + t % a->page;
        const float *value = a->values + (at * a->kv_heads + kv) * a->v_dim;
        for (int64_t i = 0; i < a->v_dim; i++) out[i] = __builtin_fmaf(weight[t], value[i], out[i]);
    }
    for (int64_t i = 0; i < a->v_dim; i++) out[i] /= sum;
}

/* Each row sees the first `length` tokens of its sequence. `scratch` holds as many floats as the longest has. */
void tm_rows_attend(const attention *a, float *scratch, int64_t first, int64_t last) {
    for (int64_t row = first; row < last; row++)
        for (int64_t head = 0; head < a->heads; head++) attend_head(a, row, head, scratch);
}
