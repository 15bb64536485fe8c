/* Norms, gates, rotary positions of decoder layers, forward and backward, for float32 on a CPU: one pass over memory each.
 *
 * Rows are shared by `threads` of OpenMP, whose threads wait for the next call awake for a moment. */
#include "vectors.h"

static inline float scale_of(const float *x, int64_t dim, float eps) {
    v16 squares = splat(0);
    int64_t i = 0;
    for (; i + LANES <= dim; i += LANES) squares += load(x + i) * load(x + i);
    float sum = total(squares);
    for (; i < dim; i++) sum += x[i] * x[i];
    return 1.0f / sqrtf(sum / (float)dim + eps);
}

/* y = x * scale * weight with scale = 1 / rms(x), which is kept for the backward pass. */
void tm_norm(const float *restrict x, const float *restrict weight, float *restrict y, float *restrict scales, int64_t rows,
             int64_t dim, float eps, int threads) {
#pragma omp parallel for num_threads(threads)
    for (int64_t r = 0; r < rows; r++) {
        const float *in = x + r * dim;
        float *out = y + r * dim, scale = scales[r] = scale_of(in, dim, eps);
        for (int64_t i = 0; i < dim; i++) out[i] = in[i] * scale * weight[i];
    }
}

/* dx = scale * (w dy - x * scale^2 * mean(w dy x)); dweight += dy * x * scale. */
static inline void norm_back(const float *restrict x, const float *restrict weight, float scale, const float *restrict dy,
                             float *restrict dx, float *restrict dweight, int64_t dim) {
    v16 products = splat(0);
    int64_t i = 0;
    for (; i + LANES <= dim; i += LANES) products += load(dy + i) * load(weight + i) * load(x + i);
    float sum = total(products);
    for (; i < dim; i++) sum += dy[i] * weight[i] * x[i];
    float along = sum * scale * scale / (float)dim;
    for (i = 0; i < dim; i++) {
        dx[i] = scale * (dy[i] * weight[i] - x[i] * along);
        dweight[i] += dy[i] * x[i] * scale;
    }
}

/* `past`: the gradient that went past the norm, added to dx; or none. `dweight` holds a row for each thread. */
void tm_norm_back(const float *x, const float *weight, const float *scales, const float *dy, const float *past, float *dx,
                  float *dweight, int64_t rows, int64_t dim, int threads) {
#pragma omp parallel for num_threads(threads)
    for (int part = 0; part < threads; part++)
        for (int64_t r = rows * part / threads; r < rows * (part + 1) / threads; r++) {
            float *out = dx + r * dim;
            norm_back(x + r * dim, weight, scales[r], dy + r * dim, out, dweight + part * dim, dim);
            if (past)
                for (int64_t i = 0; i < dim; i++) out[i] += past[r * dim + i];
        }
}

static inline v16 sigmoid(v16 x) { return splat(1.0f) / (splat(1.0f) + vexp(-vmax(splat(-80.0f), x))); }

/* Rows of both (gate, up), each `dim` wide: y = silu(gate) * up */
void tm_gated(const float *restrict both, float *restrict y, int64_t rows, int64_t dim, int threads) {
#pragma omp parallel for num_threads(threads)
    for (int64_t r = 0; r < rows; r++) {
        const float *gate = both + 2 * r * dim, *up = gate + dim;
        float *out = y + r * dim;
        int64_t i = 0;
        for (; i + LANES <= dim; i += LANES) store(out + i, load(gate + i) * sigmoid(load(gate + i)) * load(up + i));
        for (; i < dim; i++) out[i] = gate[i] / (1.0f + expf(-gate[i])) * up[i];
    }
}

/* dgate = dy * up * s * (1 + gate * (1 - s)) with s = sigmoid(gate); dup = dy * gate * s */
void tm_gated_back(const float *restrict both, const float *restrict dy, float *restrict dboth, int64_t rows, int64_t dim,
                   int threads) {
#pragma omp parallel for num_threads(threads)
    for (int64_t r = 0; r < rows; r++) {
        const float *gate = both + 2 * r * dim, *up = gate + dim, *in = dy + r * dim;
        float *dgate = dboth + 2 * r * dim, *dup = dgate + dim;
        int64_t i = 0;
        for (; i + LANES <= dim; i += LANES) {
            v16 g = load(gate + i), s = sigmoid(g), d = load(in + i);
            store(dgate + i, d * load(up + i) * s * (splat(1.0f) + g * (splat(1.0f) - s)));
            store(dup + i, d * g * s);
        }
        for (; i < dim; i++) {
            float s = 1.0f / (1.0f + expf(-gate[i]));
            dgate[i] = in[i] * up[i] * s * (1.0f + gate[i] * (1.0f - s));
            dup[i] = in[i] * gate[i] * s;
        }
    }
}

/* With x = (a, b) in halves, y = (a c - b s, b c' + a s'). */
static inline void turn(const float *restrict x, const float *restrict c, const float *restrict s, float *restrict y,
                        int64_t half) {
    for (int64_t i = 0; i < half; i++) {
        y[i] = x[i] * c[i] - x[half + i] * s[i];
        y[half + i] = x[half + i] * c[half + i] + x[i] * s[half + i];
    }
}

/* What a gradient of y is for x. */
static inline void turn_back(const float *restrict dy, const float *restrict c, const float *restrict s, float *restrict dx,
                             int64_t half) {
    for (int64_t i = 0; i < half; i++) {
        dx[i] = dy[i] * c[i] + dy[half + i] * s[half + i];
        dx[half + i] = dy[half + i] * c[half + i] - dy[i] * s[i];
    }
}

/* A token's projections lie in one row: `heads` queries, `kv_heads` keys, as many values, each of `dim`. */
typedef struct {
    const float *rows_in, *cos, *sin, *norms[2]; /* norms of queries and of keys, or none */
    float *q, *k, *v, *scales;                   /* scales: 1 / rms of every query and key of a token */
    int64_t tokens, heads, kv_heads, dim;
    float eps;
} Placing;

/* Queries and keys normed (where there are norms) and turned to their positions; values as they are. */
void tm_place(const Placing *p, int threads) {
    int64_t dim = p->dim, heads = p->heads, both = heads + p->kv_heads, wide = both + p->kv_heads;
#pragma omp parallel for num_threads(threads)
    for (int64_t t = 0; t < p->tokens; t++) {
        const float *in = p->rows_in + t * wide * dim, *c = p->cos + t * dim, *s = p->sin + t * dim;
        float normed[dim];
        for (int64_t h = 0; h < both; h++, in += dim) {
            float *out = h < heads ? p->q + (t * heads + h) * dim : p->k + (t * p->kv_heads + h - heads) * dim;
            const float *weight = p->norms[h >= heads], *x = in;
            if (weight) {
                float scale = p->scales[t * both + h] = scale_of(in, dim, p->eps);
                for (int64_t i = 0; i < dim; i++) normed[i] = in[i] * scale * weight[i];
                x = normed;
            }
            turn(x, c, s, out, dim / 2);
        }
        memcpy(p->v + t * p->kv_heads * dim, in, p->kv_heads * dim * sizeof(float));
    }
}

/* q, k, v are gradients here; `out` gets those of the rows, `dnorms` those of both norms, (2, dim) for each thread. */
void tm_place_back(const Placing *p, float *out, float *dnorms, int threads) {
    int64_t dim = p->dim, heads = p->heads, both = heads + p->kv_heads, wide = both + p->kv_heads;
#pragma omp parallel for num_threads(threads)
    for (int part = 0; part < threads; part++) {
        float back[dim];
        for (int64_t t = p->tokens * part / threads; t < p->tokens * (part + 1) / threads; t++) {
            const float *in = p->rows_in + t * wide * dim, *c = p->cos + t * dim, *s = p->sin + t * dim;
            float *dx = out + t * wide * dim;
            for (int64_t h = 0; h < both; h++, in += dim, dx += dim) {
                int is_key = h >= heads;
                const float *dy = is_key ? p->k + (t * p->kv_heads + h - heads) * dim : p->q + (t * heads + h) * dim;
                const float *weight = p->norms[is_key];
                turn_back(dy, c, s, weight ? back : dx, dim / 2);
                if (weight) norm_back(in, weight, p->scales[t * both + h], back, dx, dnorms + (2 * part + is_key) * dim, dim);
            }
            memcpy(dx, p->v + t * p->kv_heads * dim, p->kv_heads * dim * sizeof(float));
        }
    }
}
