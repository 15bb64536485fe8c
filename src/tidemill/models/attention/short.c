/* Causal attention over short packed sequences, forward and backward, for float32 on a CPU.
 *
 * A family is sequences that share rows: a prompt and the responses that continue it, or one sample alone. A unit is a
 * family and one key/value head. It reads and writes no other unit's keys and values, so threads can share units, and
 * sums do not depend on how many threads there are.
 *
 * Keys and values of what a sequence sees lie in scratch twice: row by row, and turned, so that a query's products with
 * 16 keys are one vector. Rows are padded to whole vectors with zeros. */
#include <stdlib.h>

#include "vectors.h"

typedef struct {
    const float *q, *k, *v, *dout;
    float *out, *top, *dq, *dk, *dv; /* top: of every query and head, log of the sum of exponentials */
    const int64_t *families;         /* first sequence of each, and one past the last */
    const int64_t *sequences;        /* start, length, start of what it continues, length of that */
    int64_t heads, kv_heads, dim, v_dim, longest;
    float scale;
} Job;

typedef struct {
    int64_t dim, v_dim, keys; /* padded */
    float *k, *v, *kt, *vt, *dk, *dv, *score, *dscore, *q, *dout, *sum;
} Scratch;

static int64_t whole(int64_t n) { return (n + LANES - 1) / LANES * LANES; }

static float *opened(Scratch *s, const Job *job) {
    s->dim = whole(job->dim), s->v_dim = whole(job->v_dim), s->keys = whole(job->longest);
    int64_t rows = s->keys * (s->dim + s->v_dim), row = s->dim + s->v_dim;
    float *all = calloc(3 * rows + 2 * s->keys + row + (s->dim > s->v_dim ? s->dim : s->v_dim), sizeof(float));
    if (all == NULL) return NULL;
    s->k = all, s->v = s->k + s->keys * s->dim;
    s->kt = all + rows, s->vt = s->kt + s->keys * s->dim;
    s->dk = all + 2 * rows, s->dv = s->dk + s->keys * s->dim;
    s->score = all + 3 * rows, s->dscore = s->score + s->keys;
    s->q = s->dscore + s->keys, s->dout = s->q + s->dim, s->sum = s->dout + s->v_dim;
    return all;
}

/* Rows start .. start + count of one head into scratch from row `at` on. */
static void fetch(const float *from, int64_t stride, int64_t dim, int64_t count, int64_t at, int64_t padded, int64_t keys,
                  float *rows, float *turned) {
    for (int64_t j = 0; j < count; j++) {
        const float *row = from + j * stride;
        memcpy(rows + (at + j) * padded, row, dim * sizeof(float));
        for (int64_t d = 0; d < dim; d++) turned[d * keys + at + j] = row[d];
    }
}

static void fetch_both(const Job *job, const Scratch *s, int64_t head, int64_t start, int64_t count, int64_t at) {
    int64_t k = job->kv_heads * job->dim, v = job->kv_heads * job->v_dim;
    fetch(job->k + start * k + head * job->dim, k, job->dim, count, at, s->dim, s->keys, s->k, s->kt);
    fetch(job->v + start * v + head * job->v_dim, v, job->v_dim, count, at, s->v_dim, s->keys, s->v, s->vt);
}

/* out[j] = x . column j, for as many whole vectors of columns as hold n. */
static void products(const float *x, const float *turned, int64_t dim, int64_t keys, int64_t n, float factor, float *out) {
    int64_t j = 0, end = whole(n);
    for (; j + 2 * LANES <= end; j += 2 * LANES) {
        v16 a = splat(0), b = splat(0);
        for (int64_t d = 0; d < dim; d++) {
            v16 each = splat(x[d]);
            a += each * load(turned + d * keys + j);
            b += each * load(turned + d * keys + j + LANES);
        }
        store(out + j, a * splat(factor)), store(out + j + LANES, b * splat(factor));
    }
    if (j < end) {
        v16 a = splat(0);
        for (int64_t d = 0; d < dim; d++) a += splat(x[d]) * load(turned + d * keys + j);
        store(out + j, a * splat(factor));
    }
}

/* out = sum over j < n of weight[j] * row j */
static void weighed(const float *weight, const float *rows, int64_t padded, int64_t n, float *out) {
    for (int64_t d = 0; d < padded; d += LANES) {
        v16 a = splat(0), b = splat(0);
        int64_t j = 0;
        for (; j + 2 <= n; j += 2) {
            a += splat(weight[j]) * load(rows + j * padded + d);
            b += splat(weight[j + 1]) * load(rows + (j + 1) * padded + d);
        }
        if (j < n) a += splat(weight[j]) * load(rows + j * padded + d);
        store(out + d, a + b);
    }
}

/* row j += weight[j] * x, for j < n */
static void spread(const float *weight, const float *x, int64_t padded, int64_t n, float *rows) {
    for (int64_t d = 0; d < padded; d += LANES) {
        v16 each = load(x + d);
        for (int64_t j = 0; j < n; j++) {
            float *row = rows + j * padded + d;
            store(row, load(row) + splat(weight[j]) * each);
        }
    }
}

/* e^(score - shift) in place, zero behind n; their sum. */
static float exponentials(float *score, int64_t n, float shift) {
    int64_t end = whole(n);
    for (int64_t j = n; j < end; j++) score[j] = -1e30f;
    for (int64_t j = 0; j < end; j += LANES) store(score + j, vexp(load(score + j) - splat(shift)));
    for (int64_t j = n; j < end; j++) score[j] = 0;
    v16 sums = splat(0);
    for (int64_t j = 0; j < end; j += LANES) sums += load(score + j);
    return total(sums);
}

static void forward_query(const Job *job, const Scratch *s, int64_t token, int64_t head, int64_t n) {
    int64_t cell = token * job->heads + head;
    products(job->q + cell * job->dim, s->kt, job->dim, s->keys, n, job->scale, s->score);
    float most = s->score[0];
    for (int64_t j = 1; j < n; j++) most = s->score[j] > most ? s->score[j] : most;
    float sum = exponentials(s->score, n, most);
    job->top[cell] = most + logf(sum);
    weighed(s->score, s->v, s->v_dim, n, s->sum);
    float *out = job->out + cell * job->v_dim;
    for (int64_t d = 0; d < job->v_dim; d++) out[d] = s->sum[d] / sum;
}

static void backward_query(const Job *job, const Scratch *s, int64_t token, int64_t head, int64_t n) {
    int64_t cell = token * job->heads + head, end = whole(n);
    memcpy(s->q, job->q + cell * job->dim, job->dim * sizeof(float));
    memcpy(s->dout, job->dout + cell * job->v_dim, job->v_dim * sizeof(float));
    products(s->q, s->kt, job->dim, s->keys, n, job->scale, s->score);
    exponentials(s->score, n, job->top[cell]);
    products(s->dout, s->vt, job->v_dim, s->keys, n, 1.0f, s->dscore);
    for (int64_t j = n; j < end; j++) s->dscore[j] = 0;
    v16 along = splat(0);
    for (int64_t j = 0; j < end; j += LANES) along += load(s->score + j) * load(s->dscore + j);
    v16 mean = splat(total(along)), scale = splat(job->scale);
    for (int64_t j = 0; j < end; j += LANES)
        store(s->dscore + j, load(s->score + j) * (load(s->dscore + j) - mean) * scale);
    spread(s->score, s->dout, s->v_dim, n, s->dv);
    spread(s->dscore, s->q, s->dim, n, s->dk);
    weighed(s->dscore, s->k, s->dim, n, s->sum);
    memcpy(job->dq + cell * job->dim, s->sum, job->dim * sizeof(float));
}

/* Gradients of scratch rows at .. at + count to where the rows came from; scratch is zero afterwards. */
static void hand_over(const Job *job, const Scratch *s, int64_t head, int64_t start, int64_t count, int64_t at) {
    for (int64_t j = 0; j < count; j++) {
        int64_t cell = (start + j) * job->kv_heads + head;
        memcpy(job->dk + cell * job->dim, s->dk + (at + j) * s->dim, job->dim * sizeof(float));
        memcpy(job->dv + cell * job->v_dim, s->dv + (at + j) * s->v_dim, job->v_dim * sizeof(float));
    }
    memset(s->dk + at * s->dim, 0, count * s->dim * sizeof(float));
    memset(s->dv + at * s->v_dim, 0, count * s->v_dim * sizeof(float));
}

/* The first sequence of a family is what the others continue. Its gradients are whole when all of them are done. */
static void run_unit(const Job *job, const Scratch *s, int64_t unit, int backward) {
    int64_t family = unit / job->kv_heads, head = unit % job->kv_heads, each = job->heads / job->kv_heads;
    int64_t first = job->families[family], last = job->families[family + 1];
    for (int64_t i = first; i < last; i++) {
        const int64_t *own = job->sequences + 4 * i;
        int64_t start = own[0], length = own[1], before = own[3];
        fetch_both(job, s, head, start, length, before);
        for (int64_t h = head * each; h < (head + 1) * each; h++)
            for (int64_t t = 0; t < length; t++)
                (backward ? backward_query : forward_query)(job, s, start + t, h, before + t + 1);
        if (backward && i > first) hand_over(job, s, head, start, length, before);
    }
    if (backward) hand_over(job, s, head, job->sequences[4 * first], job->sequences[4 * first + 1], 0);
}

/* How many threads found no memory for scratch. */
int tm_short(const Job *job, int64_t units, int backward, int threads) {
    int failed = 0;
#pragma omp parallel for num_threads(threads) reduction(+ : failed)
    for (int part = 0; part < threads; part++) {
        Scratch scratch;
        float *all = opened(&scratch, job);
        if (all == NULL) failed++;
        else
            for (int64_t unit = units * part / threads; unit < units * (part + 1) / threads; unit++)
                run_unit(job, &scratch, unit, backward);
        free(all);
    }
    return failed;
}
