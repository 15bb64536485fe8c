/* The parts of a decode step that are not matrix products, for float32 on a CPU: one pass over memory each.
 *
 * Compiled on first use by the machine's own C compiler (see kernels.py); without one, the same arithmetic runs as torch
 * operations. Rows are shared by threads of OpenMP, which wait for the next call awake for a moment: a call takes as long
 * as waking somebody. Without OpenMP there is one thread.
 */
#include "vectors.h"

static inline void rms(const float *in, const float *weight, float *out, int64_t dim, float eps) {
    v16 squares = splat(0);
    int64_t i = 0;
    for (; i + LANES <= dim; i += LANES) squares += load(in + i) * load(in + i);
    float sum = total(squares);
    for (; i < dim; i++) sum += in[i] * in[i];
    float scale = 1.0f / sqrtf(sum / (float)dim + eps);
    for (i = 0; i + LANES <= dim; i += LANES) store(out + i, load(in + i) * splat(scale) * load(weight + i));
    for (; i < dim; i++) out[i] = in[i] * scale * weight[i];
}

/* y = x / rms(x) * weight, rows of `dim`. */
void tm_rms(const float *x, const float *weight, float *y, int64_t rows, int64_t dim, float eps, int threads) {
#pragma omp parallel for num_threads(threads)
    for (int64_t r = 0; r < rows; r++) rms(x + r * dim, weight, y + r * dim, dim, eps);
}

/* x (rows, heads, dim) in place: optional norm over dim, then rotation by the tables' row of each position. The first
 * half of `sin` carries its minus sign. */
void tm_rotate(float *x, const float *norm, const float *cos, const float *sin, const int64_t *position, int64_t rows,
               int64_t heads, int64_t dim, float eps, int threads) {
    int64_t half = dim / 2;
#pragma omp parallel for num_threads(threads)
    for (int64_t r = 0; r < rows; r++) {
        const float *c = cos + position[r] * dim, *s = sin + position[r] * dim;
        for (int64_t h = 0; h < heads; h++) {
            float *row = x + (r * heads + h) * dim;
            if (norm) rms(row, norm, row, dim, eps);
            int64_t i = 0;
            for (; i + LANES <= half; i += LANES) {
                v16 a = load(row + i), b = load(row + half + i);
                store(row + i, a * load(c + i) + b * load(s + i));
                store(row + half + i, b * load(c + half + i) + a * load(s + half + i));
            }
            for (; i < half; i++) {
                float a = row[i], b = row[half + i];
                row[i] = a * c[i] + b * s[i];
                row[half + i] = b * c[half + i] + a * s[half + i];
            }
        }
    }
}

/* gate = silu(gate) * up, rows of `dim`. */
void tm_gate(float *all_gates, const float *all_ups, int64_t rows, int64_t dim, int threads) {
#pragma omp parallel for num_threads(threads)
    for (int64_t r = 0; r < rows; r++) {
        float *gate = all_gates + r * dim;
        const float *up = all_ups + r * dim;
        int64_t i = 0;
        for (; i + LANES <= dim; i += LANES) {
            v16 g = load(gate + i);
            store(gate + i, g / (splat(1.0f) + vexp(-vmax(splat(-80.0f), g))) * load(up + i));
        }
        for (; i < dim; i++) gate[i] = gate[i] / (1.0f + expf(-gate[i])) * up[i];
    }
}

typedef struct {
    const float *q, *k, *v; /* (rows, heads, dim), (rows, kv_heads, dim), (rows, kv_heads, v_dim) */
    void *keys, *values;    /* (pages, kv_heads, dim, page), (pages, kv_heads, page, v_dim) floats; int8 with scales */
    float *key_scale, *value_scale; /* (pages, kv_heads, page), or none */
    const int64_t *table, *slot, *length; /* pages of each slot; slot and tokens seen of each row */
    const float *sinks; /* (heads): a score beside the others, or none */
    float *out, *scratch;
    int64_t table_stride, heads, kv_heads, dim, v_dim, page, window, chunk; /* window, chunk 0: none */
    float scale, softcap; /* softcap 0: none */
} attention;

/* x as int8 times the scale it gives: the largest element becomes 127. */
static float narrow(const float *x, int8_t *out, int64_t n, int64_t stride) {
    float most = 1e-12f;
    for (int64_t i = 0; i < n; i++) most = fabsf(x[i]) > most ? fabsf(x[i]) : most;
    float scale = most / 127.0f;
    for (int64_t i = 0; i < n; i++) out[i * stride] = (int8_t)lrintf(x[i] / scale);
    return scale;
}

static void write_token(const attention *a, int64_t row, int64_t head) {
    int64_t at = a->length[row] - 1;
    int64_t page = a->table[a->slot[row] * a->table_stride + at / a->page], offset = at % a->page;
    const float *k = a->k + (row * a->kv_heads + head) * a->dim, *v = a->v + (row * a->kv_heads + head) * a->v_dim;
    int64_t cell = page * a->kv_heads + head;
    if (a->key_scale) {
        int8_t *keys = (int8_t *)a->keys + cell * a->dim * a->page + offset;
        a->key_scale[cell * a->page + offset] = narrow(k, keys, a->dim, a->page);
        int8_t *values = (int8_t *)a->values + (cell * a->page + offset) * a->v_dim;
        a->value_scale[cell * a->page + offset] = narrow(v, values, a->v_dim, 1);
        return;
    }
    float *keys = (float *)a->keys + cell * a->dim * a->page + offset;
    for (int64_t i = 0; i < a->dim; i++) keys[i * a->page] = k[i];
    memcpy((float *)a->values + (cell * a->page + offset) * a->v_dim, v, sizeof(float) * a->v_dim);
}

/* Scores of `group` query heads against 16 positions of a page. A constant `group` keeps the sums in registers. */
static inline __attribute__((always_inline)) void score_block(const float *q, const float *keys, float *scores, int64_t stride,
                                                              int group, int64_t dim, int64_t page, float scale) {
    v16 sum[4];
    for (int g = 0; g < group; g++) sum[g] = splat(0);
    for (int64_t i = 0; i < dim; i++) {
        v16 k = load(keys + i * page);
        for (int g = 0; g < group; g++) sum[g] += splat(q[g * dim + i]) * k;
    }
    for (int g = 0; g < group; g++) store(scores + g * stride, sum[g] * splat(scale));
}

/* out[g] += weight[g][t] * values[t] for the positions of one page, 64 columns at a time. */
static inline __attribute__((always_inline)) void weigh_block(const float *weight, const float *values, float *out, int vectors,
                                                              int64_t tokens, int64_t v_dim) {
    v16 sum[4];
    for (int j = 0; j < vectors; j++) sum[j] = load(out + j * LANES);
    for (int64_t t = 0; t < tokens; t++) {
        v16 w = splat(weight[t]);
        for (int j = 0; j < vectors; j++) sum[j] += w * load(values + t * v_dim + j * LANES);
    }
    for (int j = 0; j < vectors; j++) store(out + j * LANES, sum[j]);
}

static void weigh(const float *weight, const float *values, float *out, int64_t tokens, int64_t v_dim) {
    int64_t i = 0;
    for (; i + 4 * LANES <= v_dim; i += 4 * LANES) weigh_block(weight, values + i, out + i, 4, tokens, v_dim);
    for (; i + 2 * LANES <= v_dim; i += 2 * LANES) weigh_block(weight, values + i, out + i, 2, tokens, v_dim);
    for (; i + LANES <= v_dim; i += LANES) weigh_block(weight, values + i, out + i, 1, tokens, v_dim);
    for (; i < v_dim; i++)
        for (int64_t t = 0; t < tokens; t++) out[i] += weight[t] * values[t * v_dim + i];
}

typedef int8_t b16 __attribute__((vector_size(16), aligned(1)));

static inline v16 widen(const int8_t *p) {
    b16 x;
    memcpy(&x, p, sizeof x);
    return __builtin_convertvector(x, v16);
}

/* `score_block` and `weigh` over int8: a position's scale is a factor of its score, and of its weight. */
static inline __attribute__((always_inline)) void score_block8(const float *q, const int8_t *keys, const float *scales,
                                                               float *scores, int64_t stride, int group, int64_t dim,
                                                               int64_t page, float scale) {
    v16 sum[4];
    for (int g = 0; g < group; g++) sum[g] = splat(0);
    for (int64_t i = 0; i < dim; i++) {
        v16 k = widen(keys + i * page);
        for (int g = 0; g < group; g++) sum[g] += splat(q[g * dim + i]) * k;
    }
    v16 factor = load(scales) * splat(scale);
    for (int g = 0; g < group; g++) store(scores + g * stride, sum[g] * factor);
}

static void weigh8(const float *weight, const int8_t *values, const float *scales, float *out, int64_t tokens, int64_t v_dim) {
    int64_t i = 0;
    for (; i + LANES <= v_dim; i += LANES) {
        v16 sum = load(out + i);
        for (int64_t t = 0; t < tokens; t++) sum += splat(weight[t] * scales[t]) * widen(values + t * v_dim + i);
        store(out + i, sum);
    }
    for (; i < v_dim; i++)
        for (int64_t t = 0; t < tokens; t++) out[i] += weight[t] * scales[t] * (float)values[t * v_dim + i];
}

static void score(const attention *a, const float *q, int64_t cell, int64_t at, float *s, int64_t stride, int64_t group) {
    int64_t g = 0;
    if (a->key_scale) {
        const int8_t *keys = (int8_t *)a->keys + cell * a->dim * a->page + at;
        const float *scales = a->key_scale + cell * a->page + at;
        for (; g + 4 <= group; g += 4) score_block8(q + g * a->dim, keys, scales, s + g * stride, stride, 4, a->dim, a->page, a->scale);
        for (; g + 2 <= group; g += 2) score_block8(q + g * a->dim, keys, scales, s + g * stride, stride, 2, a->dim, a->page, a->scale);
        for (; g < group; g++) score_block8(q + g * a->dim, keys, scales, s + g * stride, stride, 1, a->dim, a->page, a->scale);
        return;
    }
    const float *keys = (float *)a->keys + cell * a->dim * a->page + at;
    for (; g + 4 <= group; g += 4) score_block(q + g * a->dim, keys, s + g * stride, stride, 4, a->dim, a->page, a->scale);
    for (; g + 2 <= group; g += 2) score_block(q + g * a->dim, keys, s + g * stride, stride, 2, a->dim, a->page, a->scale);
    for (; g < group; g++) score_block(q + g * a->dim, keys, s + g * stride, stride, 1, a->dim, a->page, a->scale);
}

/* Scores to unnormalised weights; gives 1 / their sum. `from`..`to` are the visible positions of `padded` ones; `sink`, if
 * there is one, is a score beside theirs. */
static float soften(float *s, int64_t from, int64_t to, int64_t padded, float softcap, const float *sink) {
    if (softcap > 0)
        for (int64_t t = from; t < to; t++) s[t] = tanhf(s[t] / softcap) * softcap;
    for (int64_t t = 0; t < from; t++) s[t] = -INFINITY;
    for (int64_t t = to; t < padded; t++) s[t] = -INFINITY;
    v16 most = splat(-INFINITY), sum = splat(0);
    for (int64_t t = 0; t < padded; t += LANES) most = vmax(load(s + t), most);
    float peak = most[0];
    for (int i = 1; i < LANES; i++) peak = most[i] > peak ? most[i] : peak;
    if (sink && *sink > peak) peak = *sink;
    for (int64_t t = 0; t < padded; t += LANES) {
        v16 w = vexp(load(s + t) - splat(peak));
        store(s + t, w);
        sum += w;
    }
    for (int64_t t = 0; t < from; t++) { sum[0] -= s[t]; s[t] = 0; }
    for (int64_t t = to; t < padded; t++) { sum[0] -= s[t]; s[t] = 0; }
    return 1.0f / (total(sum) + (sink ? expf(*sink - peak) : 0));
}

/* The first position that a token sees, which is the last of `length`. */
static int64_t first_seen(const attention *a, int64_t length) {
    int64_t from = a->window > 0 && length > a->window ? length - a->window : 0, begin = a->chunk > 0 ? (length - 1) / a->chunk * a->chunk : 0;
    return begin > from ? begin : from;
}

static void attend_head(const attention *a, int64_t row, int64_t head) {
    int64_t group = a->heads / a->kv_heads, length = a->length[row], page = a->page;
    int64_t from = first_seen(a, length), skip = from / page * page; /* whole pages before it */
    int64_t seen = length - skip, padded = (seen + LANES - 1) / LANES * LANES;
    const int64_t *table = a->table + a->slot[row] * a->table_stride + skip / page;
    const float *q = a->q + (row * a->heads + head * group) * a->dim;
    float *out = a->out + (row * a->heads + head * group) * a->v_dim, *s = a->scratch;
    for (int64_t t = 0; t < padded; t += LANES)
        score(a, q, table[t / page] * a->kv_heads + head, t % page, s + t, padded, group);
    for (int64_t g = 0; g < group; g++) {
        float *weight = s + g * padded, *sum = out + g * a->v_dim;
        float scale = soften(weight, from - skip, seen, padded, a->softcap, a->sinks ? a->sinks + head * group + g : 0);
        memset(sum, 0, sizeof(float) * a->v_dim);
        for (int64_t t = 0; t < seen; t += page) {
            int64_t cell = (table[t / page] * a->kv_heads + head) * page, count = seen - t < page ? seen - t : page;
            if (a->value_scale)
                weigh8(weight + t, (int8_t *)a->values + cell * a->v_dim, a->value_scale + cell, sum, count, a->v_dim);
            else
                weigh(weight + t, (float *)a->values + cell * a->v_dim, sum, count, a->v_dim);
        }
        for (int64_t i = 0; i < a->v_dim; i++) sum[i] *= scale;
    }
}

/* One new token per row: write its key and value to its page, then attend to everything the row has. `scratch` holds for
 * each thread `wide` floats: (heads / kv_heads) * (longest row rounded up to 16). */
void tm_attend(const attention *a, float *scratch, int64_t wide, int64_t rows, int threads) {
#pragma omp parallel for num_threads(threads)
    for (int part = 0; part < threads; part++) {
        attention mine = *a;
        mine.scratch = scratch + part * wide;
        for (int64_t row = rows * part / threads; row < rows * (part + 1) / threads; row++)
            for (int64_t head = 0; head < a->kv_heads; head++) {
                write_token(&mine, row, head);
                attend_head(&mine, row, head);
            }
    }
}

typedef struct {
    const float *logits, *temperature, *uniform; /* logits (rows, vocab) */
    const uint8_t *greedy;
    int64_t *tokens;
    float *logprobs;
    int64_t rows, vocab;
} draws;

static void draw(const draws *d, int64_t r, float *scratch) {
    const float *x = d->logits + r * d->vocab;
    float scale = 1.0f / d->temperature[r], peak = -INFINITY;
    int64_t best = 0, vocab = d->vocab, i;
    int is_number = 1;
    for (i = 0; i < vocab; i++) is_number &= x[i] == x[i];
    for (i = 0; i < vocab; i++) if (x[i] > peak) { peak = x[i]; best = i; }
    double sum = 0;
    for (i = 0; i + LANES <= vocab; i += LANES) {
        v16 w = vexp((load(x + i) - splat(peak)) * splat(scale));
        store(scratch + i, w);
        sum += total(w);
    }
    for (; i < vocab; i++) sum += scratch[i] = expf((x[i] - peak) * scale);
    int64_t chosen = best;
    if (!d->greedy[r]) {
        double left = d->uniform[r] * sum;
        chosen = -1;
        for (i = 0; i < vocab && chosen < 0; i++) {
            left -= scratch[i];
            if (left < 0) chosen = i;
        }
        if (chosen < 0) chosen = best;
    }
    d->tokens[r] = chosen;
    d->logprobs[r] = is_number ? (x[chosen] - peak) * scale - (float)log(sum) : NAN;
}

/* One token per row of logits: the first whose cumulative probability exceeds the row's uniform number, or the most likely
 * one where `greedy`; and its log-probability at the row's temperature. `scratch` holds vocab floats for each thread. */
void tm_draw(const draws *d, float *scratch, int threads) {
#pragma omp parallel for num_threads(threads)
    for (int part = 0; part < threads; part++)
        for (int64_t r = d->rows * part / threads; r < d->rows * (part + 1) / threads; r++)
            draw(d, r, scratch + part * d->vocab);
}
