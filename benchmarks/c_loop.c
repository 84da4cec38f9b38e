/* FedAvg on logistic regression with a ridge, as one would write it by hand: a client's rows stay
   in cache during its local steps, a row is read once per step, and the clients are split over the
   threads. Compiled with -DREAL=float or double, and with -DBLOCKED=1 for the tuned loop over eight
   rows at a time or 0 for the plain one. Rows lie one client after the other; client k has rows
   first[k] to first[k + 1]. */

#include <math.h>
#include <omp.h>
#include <stdlib.h>
#include <string.h>

#define BLOCK 8 /* rows at a time, so that z and the gradient are read once for all of them */

static REAL sigmoid(REAL t) { return (REAL)1 / ((REAL)1 + (REAL)exp(-t)); }

/* g += sum_i (sigmoid(X_i z) - y_i) X_i over n rows; with `value` also the sum of the losses. */
static void accumulate(const REAL *X, const REAL *y, long n, long d, const REAL *z, REAL *g,
                       double *value) {
    for (long i = 0; i < n; i += BLOCK) {
        long m = n - i < BLOCK ? n - i : BLOCK;
        REAL t[BLOCK] = {0}, r[BLOCK] = {0};
        const REAL *row = X + i * d;
        if (BLOCKED && m == BLOCK) {
            const REAL *a = row, *b = a + d, *c = b + d, *e = c + d;
            const REAL *p = e + d, *q = p + d, *u = q + d, *v = u + d;
            REAL t0 = 0, t1 = 0, t2 = 0, t3 = 0, t4 = 0, t5 = 0, t6 = 0, t7 = 0;
#pragma omp simd reduction(+ : t0, t1, t2, t3, t4, t5, t6, t7)
            for (long j = 0; j < d; j++) {
                REAL zj = z[j];
                t0 += a[j] * zj, t1 += b[j] * zj, t2 += c[j] * zj, t3 += e[j] * zj;
                t4 += p[j] * zj, t5 += q[j] * zj, t6 += u[j] * zj, t7 += v[j] * zj;
            }
            t[0] = t0, t[1] = t1, t[2] = t2, t[3] = t3, t[4] = t4, t[5] = t5, t[6] = t6, t[7] = t7;
#pragma omp simd
            for (int k = 0; k < BLOCK; k++) r[k] = sigmoid(t[k]) - y[i + k];
            REAL r0 = r[0], r1 = r[1], r2 = r[2], r3 = r[3];
            REAL r4 = r[4], r5 = r[5], r6 = r[6], r7 = r[7];
#pragma omp simd
            for (long j = 0; j < d; j++)
                g[j] += r0 * a[j] + r1 * b[j] + r2 * c[j] + r3 * e[j] + r4 * p[j] + r5 * q[j] +
                        r6 * u[j] + r7 * v[j];
        } else {
            for (long k = 0; k < m; k++) {
                for (long j = 0; j < d; j++) t[k] += row[k * d + j] * z[j];
                r[k] = sigmoid(t[k]) - y[i + k];
                for (long j = 0; j < d; j++) g[j] += r[k] * row[k * d + j];
            }
        }
        if (value) {
            double sum = 0;
#pragma omp simd reduction(+ : sum)
            for (long k = 0; k < m; k++)
                sum += log(1 + exp(-fabs((double)t[k]))) + (t[k] > 0 ? t[k] : 0) - y[i + k] * t[k];
            *value += sum;
        }
    }
}

/* Adds what client k uploads, z - x after `steps` gradient steps, to `total`. */
static void visit(const REAL *X, const REAL *y, long n, long d, const REAL *x, REAL lr, REAL l2,
                  long steps, REAL *z, REAL *g, REAL *total) {
    memcpy(z, x, d * sizeof(REAL));
    for (long s = 0; s < steps; s++) {
        memset(g, 0, d * sizeof(REAL));
        accumulate(X, y, n, d, z, g, NULL);
        for (long j = 0; j < d; j++) z[j] -= lr * (g[j] / n + l2 * z[j]);
    }
    for (long j = 0; j < d; j++) total[j] += z[j] - x[j];
}

/* The mean objective of the clients and the norm of its gradient are recorded before round 0 and
   after every `record_every` rounds. */
void fedavg(const REAL *X, const REAL *y, const long *first, long n_clients, long d,
            const long *cohorts, long per_round, long rounds, double lr, double l2, long steps,
            long record_every, long n_threads, REAL *x, double *objective, double *gradient) {
    REAL *sums = calloc((size_t)n_threads * d, sizeof(REAL));
    double *values = calloc(n_threads, sizeof(double));
#pragma omp parallel num_threads(n_threads)
    {
        long me = omp_get_thread_num();
        REAL *z = aligned_alloc(64, (d * sizeof(REAL) + 63) / 64 * 64);
        REAL *g = aligned_alloc(64, (d * sizeof(REAL) + 63) / 64 * 64);
        REAL *total = aligned_alloc(64, (d * sizeof(REAL) + 63) / 64 * 64);
        for (long r = 0; r <= rounds; r++) {
            if (r % record_every == 0) {
                double value = 0;
                memset(total, 0, d * sizeof(REAL));
#pragma omp for schedule(static)
                for (long k = 0; k < n_clients; k++) {
                    long n = first[k + 1] - first[k];
                    double loss = 0;
                    memset(g, 0, d * sizeof(REAL));
                    accumulate(X + first[k] * d, y + first[k], n, d, x, g, &loss);
                    value += loss / n;
                    for (long j = 0; j < d; j++) total[j] += g[j] / n;
                }
                memcpy(sums + me * d, total, d * sizeof(REAL));
                values[me] = value;
#pragma omp barrier
#pragma omp single
                {
                    double norm = 0, square = 0, F = 0;
                    for (long t = 0; t < n_threads; t++) F += values[t] / n_clients;
                    for (long j = 0; j < d; j++) {
                        double sum = l2 * x[j];
                        for (long t = 0; t < n_threads; t++) sum += sums[t * d + j] / n_clients;
                        norm += sum * sum, square += x[j] * x[j];
                    }
                    objective[r / record_every] = F + 0.5 * l2 * square;
                    gradient[r / record_every] = sqrt(norm);
                }
            }
            if (r == rounds) break;
            const long *cohort = cohorts + r * per_round;
            memset(total, 0, d * sizeof(REAL));
#pragma omp for schedule(static)
            for (long i = 0; i < per_round; i++) {
                long k = cohort[i];
                visit(X + first[k] * d, y + first[k], first[k + 1] - first[k], d, x, lr, l2, steps,
                      z, g, total);
            }
            memcpy(sums + me * d, total, d * sizeof(REAL));
#pragma omp barrier
#pragma omp single
            for (long j = 0; j < d; j++)
                for (long t = 0; t < n_threads; t++) x[j] += sums[t * d + j] / per_round;
        }
        free(z), free(g), free(total);
    }
    free(sums), free(values);
}

/* The limits of the machine: bytes copied, and bytes of a matrix read by `times` matrix-vector
   products, in which each thread keeps its rows. */
void copy(const REAL *from, REAL *to, long n, long n_threads) {
#pragma omp parallel for num_threads(n_threads) schedule(static)
    for (long i = 0; i < n; i++) to[i] = from[i];
}

void gemv(const REAL *X, long n, long d, const REAL *z, REAL *out, long times, long n_threads) {
#pragma omp parallel num_threads(n_threads)
    for (long r = 0; r < times; r++)
#pragma omp for schedule(static) nowait
        for (long i = 0; i < n; i++) {
            REAL t = 0;
            for (long j = 0; j < d; j++) t += X[i * d + j] * z[j];
            out[i] = t;
        }
}
