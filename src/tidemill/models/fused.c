/* Norms, gates and rotary positions of decoder layers, forward and backward, for float32 on a CPU: one pass over memory each.
 *
 * Every function works on rows (or elements) first..last, so that threads can share them. */
#include "vectors.h"

/* y = x * scale * weight with scale = 1 / rms(x), which is kept for the backward pass. */
void tm_norm(const float *x, const float *weight, float *y, float *scales, int64_t first, int64_t last, int64_t dim,
             float eps) {
    for (int64_t r = first; r < last; r++) {
        const float *in = x + r * dim;
        float *out = y + r * dim;
        v16 squares = splat(0);
        int64_t i = 0;
        for (; i + LANES <= dim; i += LANES) squares += load(in + i) * load(in + i);
        float sum = total(squares);
        for (; i < dim; i++) sum += in[i] * in[i];
        float scale = scales[r] = 1.0f / sqrtf(sum / (float)dim + eps);
        for (i = 0; i < dim; i++) out[i] = in[i] * scale * weight[i];
    }
}

/* dx = scale * (w dy - x * scale^2 * mean(w dy x)); dweight += dy * x * scale. */
void tm_norm_back(const float *x, const float *weight, const float *scales, const float *dy, float *dx, float *dweight,
                  int64_t first, int64_t last, int64_t dim) {
    for (int64_t r = first; r < last; r++) {
        const float *in = x + r * dim, *up = dy + r * dim;
        float *out = dx + r * dim, scale = scales[r];
        v16 products = splat(0);
        int64_t i = 0;
        for (; i + LANES <= dim; i += LANES) products += load(up + i) * load(weight + i) * load(in + i);
        float sum = total(products);
        for (; i < dim; i++) sum += up[i] * weight[i] * in[i];
        float along = sum * scale * scale / (float)dim;
        for (i = 0; i < dim; i++) {
            out[i] = scale * (up[i] * weight[i] - in[i] * along);
            dweight[i] += up[i] * in[i] * scale;
        }
    }
}

static inline v16 sigmoid(v16 x) { return splat(1.0f) / (splat(1.0f) + vexp(-vmax(splat(-80.0f), x))); }

/* y = silu(gate) * up */
void tm_gated(const float *gate, const float *up, float *y, int64_t first, int64_t last) {
    int64_t i = first;
    for (; i + LANES <= last; i += LANES) store(y + i, load(gate + i) * sigmoid(load(gate + i)) * load(up + i));
    for (; i < last; i++) y[i] = gate[i] / (1.0f + expf(-gate[i])) * up[i];
}

/* dgate = dy * up * s * (1 + gate * (1 - s)) with s = sigmoid(gate); dup = dy * gate * s */
void tm_gated_back(const float *gate, const float *up, const float *dy, float *dgate, float *dup, int64_t first,
                   int64_t last) {
    int64_t i = first;
    for (; i + LANES <= last; i += LANES) {
        v16 g = load(gate + i), s = sigmoid(g), d = load(dy + i);
        store(dgate + i, d * load(up + i) * s * (splat(1.0f) + g * (splat(1.0f) - s)));
        store(dup + i, d * g * s);
    }
    for (; i < last; i++) {
        float s = 1.0f / (1.0f + expf(-gate[i]));
        dgate[i] = dy[i] * up[i] * s * (1.0f + gate[i] * (1.0f - s));
        dup[i] = dy[i] * gate[i] * s;
    }
}

/* Rows of `heads` times `dim` turned to their positions: with x = (a, b) in halves, y = (a c - b s, b c' + a s'). `back`
 * gives what a gradient of y is for x. */
void tm_turn(const float *restrict x, const float *restrict cos, const float *restrict sin, float *restrict y, int64_t first,
             int64_t last, int64_t heads, int64_t dim, int back) {
    int64_t half = dim / 2;
    for (int64_t r = first; r < last; r++) {
        const float *c = cos + r * dim, *s = sin + r * dim;
        for (int64_t h = 0; h < heads; h++) {
            const float *in = x + (r * heads + h) * dim;
            float *out = y + (r * heads + h) * dim;
            if (back)
                for (int64_t i = 0; i < half; i++) {
                    out[i] = in[i] * c[i] + in[half + i] * s[half + i];
                    out[half + i] = in[half + i] * c[half + i] - in[i] * s[i];
                }
            else
                for (int64_t i = 0; i < half; i++) {
                    out[i] = in[i] * c[i] - in[half + i] * s[i];
                    out[half + i] = in[half + i] * c[half + i] + in[i] * s[half + i];
                }
        }
    }
}
