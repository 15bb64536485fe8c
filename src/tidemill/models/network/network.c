/* Small dense networks for float32 on a CPU: decisions of many environments in one call, and all gradient steps of an
 * update in one call. What torch does with some sixty operations for each minibatch is one pass here; the tests hold it to
 * torch's numbers.
 *
 * Rows of activations are padded to whole vectors. A product runs over blocks of 6 rows by 64 columns, which stay in
 * registers. Policy and critic are apart: with two threads each has one, and they meet at the gradient's norm.
 */
#include <stdlib.h>

#include "vectors.h"

#define MOST 9  /* linear layers */
#define ROWS 6  /* of a block */
#define VECTORS 4

#if defined(__AVX512F__)
#define HOLD(x) __asm__("" : "+v"(x))
#else
#define HOLD(x)
#endif

typedef struct {
    int64_t layers, relu, sizes[MOST + 1];
    float *weight[MOST], *bias[MOST]; /* (out, in) and (out), as torch has them */
    float *moments[MOST][4];          /* Adam's, first and second: of the weight, of the bias */
} tower;

static inline int64_t padded(int64_t n) { return (n + LANES - 1) / LANES * LANES; }

/* c (rows, 16 * vectors) = a (rows, inner) b (inner, ldb); a's element (i, k) lies at i * down + k * right. */
static inline __attribute__((always_inline)) void block(const float *a, int64_t down, int64_t right, const float *b, int64_t ldb,
                                                        const float *bias, float *c, int64_t ldc, int64_t inner, int rows,
                                                        int vectors) {
    v16 sum[ROWS][VECTORS];
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < vectors; j++) sum[r][j] = bias ? load(bias + j * LANES) : splat(0);
    for (int64_t k = 0; k < inner; k++) {
        v16 own[VECTORS];
        for (int j = 0; j < vectors; j++) {
            own[j] = load(b + k * ldb + j * LANES);
            HOLD(own[j]);
        }
        for (int r = 0; r < rows; r++) {
            v16 x = splat(a[r * down + k * right]);
            for (int j = 0; j < vectors; j++) sum[r][j] += x * own[j];
        }
    }
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < vectors; j++) store(c + r * ldc + j * LANES, sum[r][j]);
}

#define WIDE(r)                                                                                          \
    switch (left) {                                                                                      \
    case 1: block(a0, down, right, b0, ldb, bias0, c0, ldc, inner, r, 1); break;                         \
    case 2: block(a0, down, right, b0, ldb, bias0, c0, ldc, inner, r, 2); break;                         \
    case 3: block(a0, down, right, b0, ldb, bias0, c0, ldc, inner, r, 3); break;                         \
    default: block(a0, down, right, b0, ldb, bias0, c0, ldc, inner, r, 4); break;                        \
    }

/* c (m, n) = a b + bias, n whole vectors. */
static void product(const float *a, int64_t down, int64_t right, const float *b, int64_t ldb, const float *bias, float *c,
                    int64_t ldc, int64_t m, int64_t n, int64_t inner) {
    for (int64_t j = 0; j < n; j += VECTORS * LANES) {
        int64_t left = (n - j) / LANES;
        const float *b0 = b + j, *bias0 = bias ? bias + j : 0;
        for (int64_t i = 0; i < m; i += ROWS) {
            const float *a0 = a + i * down;
            float *c0 = c + i * ldc + j;
            switch (m - i) {
            case 1: WIDE(1) break;
            case 2: WIDE(2) break;
            case 3: WIDE(3) break;
            case 4: WIDE(4) break;
            case 5: WIDE(5) break;
            default: WIDE(ROWS) break;
            }
        }
    }
}

/* tanh x = 1 - 2 / (e^2x + 1), and by its series where that would lose digits. */
static inline v16 vtanh(v16 x) {
    v16 bounded = vmax(splat(-9.0f), -vmax(splat(-9.0f), -x));
    v16 large = splat(1.0f) - splat(2.0f) / (vexp(bounded + bounded) + splat(1.0f));
    v16 s = x * x;
    v16 small = x * (splat(1.0f) + s * (splat(-1.0f / 3.0f) + s * (splat(2.0f / 15.0f) + s * splat(-17.0f / 315.0f))));
    i16 is_small = s < splat(0.015f);
    return (v16)(((i16)small & is_small) | ((i16)large & ~is_small));
}

static void activate(float *y, int64_t n, int64_t relu) {
    if (relu)
        for (int64_t i = 0; i < n; i += LANES) store(y + i, vmax(splat(0), load(y + i)));
    else
        for (int64_t i = 0; i < n; i += LANES) store(y + i, vtanh(load(y + i)));
}

/* d *= the slope at y, which is what the activation gave. */
static void descend(float *d, const float *y, int64_t n, int64_t relu) {
    for (int64_t i = 0; i < n; i += LANES) {
        v16 own = load(y + i);
        v16 slope = relu ? (v16)((i16)splat(1.0f) & (i16)(own > splat(0))) : splat(1.0f) - own * own;
        store(d + i, load(d + i) * slope);
    }
}

/* Floats of one layer's weights laid out for the forward pass: (in, padded out), then the bias. */
static inline int64_t packed_size(const tower *t, int64_t l) { return (t->sizes[l] + 1) * padded(t->sizes[l + 1]); }

static void pack_layer(const tower *t, int64_t l, float *to) {
    int64_t in = t->sizes[l], out = t->sizes[l + 1], wide = padded(out);
    const float *w = t->weight[l];
    if (out < wide) memset(to, 0, sizeof(float) * packed_size(t, l));
    for (int64_t o0 = 0; o0 < out; o0 += LANES) { /* tiles, so that both sides stay in the cache */
        int64_t o1 = o0 + LANES < out ? o0 + LANES : out;
        for (int64_t i = 0; i < in; i++)
            for (int64_t o = o0; o < o1; o++) to[i * wide + o] = w[o * in + i];
    }
    memcpy(to + in * wide, t->bias[l], sizeof(float) * out);
}

int64_t tm_net_packed(const tower *t) {
    int64_t n = 0;
    for (int64_t l = 0; l < t->layers; l++) n += packed_size(t, l);
    return n;
}

void tm_net_pack(const tower *t, float *to) {
    for (int64_t l = 0; l < t->layers; l++) {
        pack_layer(t, l, to);
        to += packed_size(t, l);
    }
}

/* x (n, sizes[0]) standardised: mean and scale may be none. The last `raw` entries stay as they are. out (n, outputs). */
void tm_net_forward(const tower *t, const float *packed, const float *x, const float *mean, const float *scale, int64_t raw,
                    float limit, int64_t n, float *out, float *scratch) {
    int64_t in = t->sizes[0], last = t->layers, outputs = t->sizes[last];
    float *y = scratch, *z = 0;
    for (int64_t i = 0; i < n; i++)
        for (int64_t k = 0; k < in; k++) {
            float v = x[i * in + k];
            if (mean && k < in - raw) {
                v = (v - mean[k]) * scale[k];
                v = v > limit ? limit : v < -limit ? -limit : v;
            }
            y[i * in + k] = v;
        }
    int64_t ld = in;
    z = y + n * in;
    for (int64_t l = 0; l < last; l++) {
        int64_t wide = padded(t->sizes[l + 1]);
        product(y, ld, 1, packed, wide, packed + t->sizes[l] * wide, z, wide, n, wide, t->sizes[l]);
        if (l + 1 < last) activate(z, n * wide, t->relu);
        packed += packed_size(t, l);
        y = z;
        ld = wide;
        z = y + n * wide;
    }
    for (int64_t i = 0; i < n; i++) memcpy(out + i * outputs, y + i * ld, sizeof(float) * outputs);
}

/* Learning */

enum { POLICY_LOSS, VALUE_LOSS, ENTROPY, OLD_KL, RATIO_SUM, CLIPPED_LOW, CLIPPED_HIGH, VALUE_CLIPPED, LOSS, NORM, COUNT, STEPS,
       SKIPPED, RATIO_MAX, RATIO_MIN, STATS };

typedef struct {
    tower policy, critic;
    int64_t has_critic, is_gaussian, parts, is_masked, is_ratio;
    const int64_t *choices;
    float *log_std, *std_moments[2];
    const float *x, *legal, *actions, *old, *advantages, *returns, *values; /* rows in the order of the samples */
    const int64_t *chosen;                                          /* (rows, parts) of choices */
    const int64_t *order, *edges;                                   /* minibatch b: order[edges[b]] to order[edges[b + 1]] */
    int64_t minibatches, reported, ldx, steps;                      /* reported: the first of the last pass */
    float lr, beta1, beta2, eps, decay, clip_norm, clip_low, clip_high, value_coef, value_clip, entropy_coef;
    double *stats;
    int32_t threads;
} learning;

typedef struct {
    float *packed[MOST], *y[MOST + 1], *delta[2], *gradient[MOST], *bias_gradient[MOST];
    float *memory;
} room;

static float *taken(float **at, int64_t n) {
    float *p = *at;
    *at += padded(n);
    return p;
}

static int make_room(const tower *t, int64_t rows, int64_t ldx, room *r) {
    int64_t n = rows * ldx, widest = 0;
    for (int64_t l = 0; l < t->layers; l++) {
        int64_t in = l ? padded(t->sizes[l]) : ldx, out = padded(t->sizes[l + 1]);
        if (out > widest) widest = out;
        n += padded(packed_size(t, l)) + rows * out + padded(t->sizes[l + 1] * in) + out;
    }
    n += 2 * rows * widest + LANES * 4 * (MOST + 2);
    if (posix_memalign((void **)&r->memory, 64, sizeof(float) * n)) return 0;
    memset(r->memory, 0, sizeof(float) * n);
    float *at = r->memory;
    r->y[0] = taken(&at, rows * ldx);
    for (int64_t l = 0; l < t->layers; l++) {
        int64_t in = l ? padded(t->sizes[l]) : ldx, out = padded(t->sizes[l + 1]);
        r->packed[l] = taken(&at, packed_size(t, l));
        r->y[l + 1] = taken(&at, rows * out);
        r->gradient[l] = taken(&at, t->sizes[l + 1] * in);
        r->bias_gradient[l] = taken(&at, out);
    }
    for (int i = 0; i < 2; i++) r->delta[i] = taken(&at, rows * widest);
    return 1;
}

static void forward(const tower *t, const learning *g, room *r, const int64_t *rows, int64_t n) {
    for (int64_t i = 0; i < n; i++) memcpy(r->y[0] + i * g->ldx, g->x + rows[i] * g->ldx, sizeof(float) * g->ldx);
    int64_t ld = g->ldx;
    for (int64_t l = 0; l < t->layers; l++) {
        int64_t wide = padded(t->sizes[l + 1]);
        pack_layer(t, l, r->packed[l]);
        product(r->y[l], ld, 1, r->packed[l], wide, r->packed[l] + t->sizes[l] * wide, r->y[l + 1], wide, n, wide, t->sizes[l]);
        if (l + 1 < t->layers) activate(r->y[l + 1], n * wide, t->relu);
        ld = wide;
    }
}

/* Gradients from that of the output, which lies in delta[0]; returns the sum of their squares. */
static double backward(const tower *t, const learning *g, room *r, int64_t n) {
    double square = 0;
    for (int64_t l = t->layers - 1; l >= 0; l--) {
        int64_t in = t->sizes[l], out = t->sizes[l + 1], wide = padded(out), ld = l ? padded(in) : g->ldx;
        float *d = r->delta[0];
        product(d, 1, wide, r->y[l], ld, 0, r->gradient[l], ld, out, ld, n);
        for (int64_t j = 0; j < wide; j += LANES) {
            v16 sum = splat(0);
            for (int64_t i = 0; i < n; i++) sum += load(d + i * wide + j);
            store(r->bias_gradient[l] + j, sum);
        }
        for (int64_t o = 0; o < out; o++) {
            float own = 0;
            for (int64_t k = 0; k < in; k++) own += r->gradient[l][o * ld + k] * r->gradient[l][o * ld + k];
            square += (double)own + (double)r->bias_gradient[l][o] * r->bias_gradient[l][o];
        }
        if (l) {
            product(d, wide, 1, t->weight[l], in, 0, r->delta[1], ld, n, ld, out);
            descend(r->delta[1], r->y[l], n * ld, t->relu);
            r->delta[0] = r->delta[1];
            r->delta[1] = d;
        }
    }
    return square;
}

static void adam(float *p, const float *gradient, float *first, float *second, int64_t n, float scale, float decay,
                 const learning *g, float rate, float root) {
    for (int64_t i = 0; i < n; i++) {
        float x = gradient[i] * scale;
        first[i] += (x - first[i]) * (1.0f - g->beta1);
        second[i] = g->beta2 * second[i] + (1.0f - g->beta2) * x * x;
        p[i] = p[i] * (1.0f - g->lr * decay) - rate * first[i] / (sqrtf(second[i]) * root + g->eps);
    }
}

static void step_tower(tower *t, const learning *g, room *r, float scale, float rate, float root) {
    for (int64_t l = 0; l < t->layers; l++) {
        int64_t in = t->sizes[l], out = t->sizes[l + 1], ld = l ? padded(in) : g->ldx;
        float **m = t->moments[l];
        for (int64_t o = 0; o < out; o++)
            adam(t->weight[l] + o * in, r->gradient[l] + o * ld, m[0] + o * in, m[1] + o * in, in, scale, g->decay, g, rate, root);
        adam(t->bias[l], r->bias_gradient[l], m[2], m[3], out, scale, 0.0f, g, rate, root);
    }
}

/* What the policy's loss makes of one decision: its share of the statistics, and the slope by the log-probability. */
static inline float judge(const learning *g, float logprob, float entropy, int64_t row, float share, double *s) {
    float advantage = g->advantages[row], gap = logprob - g->old[row], loss, slope;
    if (g->is_ratio) {
        float ratio = expf(gap), low = 1.0f - g->clip_low, high = 1.0f + g->clip_high;
        float clipped = ratio < low ? low : ratio > high ? high : ratio;
        int is_free = ratio * advantage <= clipped * advantage;
        loss = -(is_free ? ratio : clipped) * advantage;
        slope = is_free ? -ratio * advantage : 0.0f;
        s[OLD_KL] += expm1f(gap) - gap;
        s[RATIO_SUM] += ratio;
        s[CLIPPED_LOW] += ratio < low && advantage < 0;
        s[CLIPPED_HIGH] += ratio > high && advantage > 0;
        if (ratio > s[RATIO_MAX]) s[RATIO_MAX] = ratio;
        if (ratio < s[RATIO_MIN]) s[RATIO_MIN] = ratio;
    } else {
        loss = -logprob * advantage;
        slope = -advantage;
    }
    if (loss != loss) slope = loss; /* not a number: no step may follow */
    s[POLICY_LOSS] += loss;
    s[ENTROPY] += entropy;
    s[LOSS] += share * (loss - g->entropy_coef * entropy);
    return slope;
}

/* out (n, wide): the logits' gradient takes their place in d. */
static void of_choices(const learning *g, const float *out, float *d, int64_t wide, const int64_t *rows, int64_t n, double *s) {
    float share = 1.0f / (float)n;
    int64_t all = g->policy.sizes[g->policy.layers];
    for (int64_t i = 0; i < n; i++) {
        int64_t row = rows[i], at = 0;
        const float *logits = out + i * wide;
        const float *legal = g->is_masked ? g->legal + row * all : 0;
        float *p = d + i * wide, logprob = 0, entropy = 0, own[64];
        for (int64_t c = 0; c < g->parts; c++) {
            int64_t count = g->choices[c];
            float most = -INFINITY, sum = 0, part = 0;
            for (int64_t j = 0; j < count; j++) {
                float x = legal && legal[at + j] < 0.5f ? -1e9f : logits[at + j];
                p[at + j] = x;
                most = x > most ? x : most;
            }
            for (int64_t j = 0; j < count; j++) sum += expf(p[at + j] - most);
            float log_sum = most + logf(sum);
            for (int64_t j = 0; j < count; j++) {
                float log_p = p[at + j] - log_sum, q = expf(log_p);
                part -= q * log_p;
                p[at + j] = log_p;
            }
            logprob += p[at + g->chosen[row * g->parts + c]];
            entropy += part;
            own[c] = part;
            at += count;
        }
        float slope = judge(g, logprob, entropy, row, share, s) * share;
        at = 0;
        for (int64_t c = 0; c < g->parts; c++) {
            int64_t count = g->choices[c], taken_one = g->chosen[row * g->parts + c];
            for (int64_t j = 0; j < count; j++) {
                float log_p = p[at + j], q = expf(log_p);
                if (legal && legal[at + j] < 0.5f)
                    p[at + j] = 0;
                else
                    p[at + j] = slope * ((j == taken_one) - q) + share * g->entropy_coef * q * (log_p + own[c]);
            }
            at += count;
        }
        for (; at < wide; at++) p[at] = 0;
    }
}

static void of_numbers(const learning *g, const float *out, float *d, float *d_std, int64_t wide, const int64_t *rows, int64_t n,
                       double *s) {
    int64_t width = g->policy.sizes[g->policy.layers];
    float share = 1.0f / (float)n, constant = 0, inverse[256];
    for (int64_t j = 0; j < width; j++) {
        constant += g->log_std[j] + 0.918938533f;
        inverse[j] = expf(-g->log_std[j]);
        d_std[j] = -g->entropy_coef;
    }
    for (int64_t i = 0; i < n; i++) {
        int64_t row = rows[i];
        const float *mean = out + i * wide, *action = g->actions + row * width;
        float *p = d + i * wide, square = 0;
        for (int64_t j = 0; j < width; j++) {
            p[j] = (action[j] - mean[j]) * inverse[j];
            square += p[j] * p[j];
        }
        float slope = judge(g, -0.5f * square - constant, constant + 0.5f * (float)width, row, share, s) * share;
        for (int64_t j = 0; j < width; j++) {
            d_std[j] += slope * (p[j] * p[j] - 1.0f);
            p[j] *= slope * inverse[j];
        }
        for (int64_t j = width; j < wide; j++) p[j] = 0;
    }
}

static double learn_policy(learning *g, room *r, float *d_std, const int64_t *rows, int64_t n, double *s) {
    tower *t = &g->policy;
    int64_t wide = padded(t->sizes[t->layers]);
    forward(t, g, r, rows, n);
    double square = 0;
    if (g->is_gaussian) {
        of_numbers(g, r->y[t->layers], r->delta[0], d_std, wide, rows, n, s);
        for (int64_t j = 0; j < t->sizes[t->layers]; j++) square += (double)d_std[j] * d_std[j];
    } else {
        of_choices(g, r->y[t->layers], r->delta[0], wide, rows, n, s);
    }
    return square + backward(t, g, r, n);
}

static double learn_critic(learning *g, room *r, const int64_t *rows, int64_t n, double *s) {
    tower *t = &g->critic;
    int64_t wide = padded(1);
    forward(t, g, r, rows, n);
    float share = 1.0f / (float)n;
    memset(r->delta[0], 0, sizeof(float) * n * wide);
    for (int64_t i = 0; i < n; i++) {
        int64_t row = rows[i];
        float value = r->y[t->layers][i * wide], wanted = g->returns[row], error = value - wanted;
        float loss = error * error, slope = 2.0f * error;
        if (g->value_clip >= 0) {
            float moved = value - g->values[row], low = -g->value_clip, high = g->value_clip;
            float bounded = moved < low ? low : moved > high ? high : moved;
            float other = g->values[row] + bounded - wanted;
            if (bounded != moved && other * other > loss) {
                s[VALUE_CLIPPED] += 1;
                loss = other * other;
                slope = 0.0f;
            }
        }
        s[VALUE_LOSS] += g->value_coef * loss;
        s[LOSS] += share * g->value_coef * loss;
        r->delta[0][i * wide] = share * g->value_coef * slope;
    }
    return backward(t, g, r, n);
}

/* All minibatches, one after the other. 0: there is no memory. */
int tm_net_learn(learning *g) {
    room policy = {0}, critic = {0};
    int64_t most = 0;
    for (int64_t b = 0; b < g->minibatches; b++) {
        int64_t n = g->edges[b + 1] - g->edges[b];
        most = n > most ? n : most;
    }
    int is_there = make_room(&g->policy, most, g->ldx, &policy) && (!g->has_critic || make_room(&g->critic, most, g->ldx, &critic));
    float d_std[256];
    double squares[2][2] = {{0, 0}, {0, 0}}; /* by parity of the minibatch, so that one meeting of the threads is enough */
    double stats[2][STATS];
    int32_t threads = g->has_critic && g->threads > 1 ? 2 : 1;
    if (is_there) {
#pragma omp parallel num_threads(threads)
        {
#ifdef _OPENMP
            extern int omp_get_thread_num(void), omp_get_num_threads(void);
            int me = omp_get_thread_num(), all = omp_get_num_threads();
#else
            int me = 0, all = 1;
#endif
            int64_t made = g->steps;
            for (int which = 0; which < 2; which++)
                if (which == me || all == 1) {
                    memset(stats[which], 0, sizeof stats[which]);
                    stats[which][RATIO_MIN] = INFINITY;
                }
            for (int64_t b = 0; b < g->minibatches; b++) {
                const int64_t *rows = g->order + g->edges[b];
                int64_t n = g->edges[b + 1] - g->edges[b];
                double *square = squares[b & 1];
                if (b == g->reported)
                    for (int which = 0; which < 2; which++)
                        if (which == me || all == 1) {
                            double skipped = stats[which][SKIPPED];
                            memset(stats[which], 0, sizeof stats[which]);
                            stats[which][RATIO_MIN] = INFINITY;
                            stats[which][SKIPPED] = skipped;
                        }
                if (me == 0 || all == 1) square[0] = learn_policy(g, &policy, d_std, rows, n, stats[0]);
                if (me == 1 || all == 1) square[1] = g->has_critic ? learn_critic(g, &critic, rows, n, stats[1]) : 0;
#pragma omp barrier
                double norm = sqrt(square[0] + square[1]);
                if (me == 0) {
                    stats[0][NORM] += norm;
                    stats[0][COUNT] += n;
                    stats[0][STEPS] += 1;
                }
                if (!isfinite(norm)) {
                    if (me == 0) stats[0][SKIPPED] += 1;
                    continue;
                }
                made += 1;
                float scale = g->clip_norm > 0 && norm > g->clip_norm ? (float)(g->clip_norm / (norm + 1e-6)) : 1.0f;
                float rate = g->lr / (float)(1.0 - pow(g->beta1, (double)made));
                float root = (float)(1.0 / sqrt(1.0 - pow(g->beta2, (double)made)));
                if (me == 0 || all == 1) {
                    step_tower(&g->policy, g, &policy, scale, rate, root);
                    if (g->is_gaussian)
                        adam(g->log_std, d_std, g->std_moments[0], g->std_moments[1], g->policy.sizes[g->policy.layers], scale, 0.0f,
                             g, rate, root);
                }
                if ((me == 1 || all == 1) && g->has_critic) step_tower(&g->critic, g, &critic, scale, rate, root);
            }
            if (me == 0) g->steps = made;
        }
        for (int i = 0; i < RATIO_MAX; i++) g->stats[i] = stats[0][i] + stats[1][i];
        g->stats[RATIO_MAX] = stats[0][RATIO_MAX];
        g->stats[RATIO_MIN] = stats[0][RATIO_MIN];
    }
    free(policy.memory);
    free(critic.memory);
    return is_there;
}
