/* Decoding rows on a CPU with quantised weights: products, and whole pre-norm layers in one call.

With few rows a product is bound by reading its weight, so weights are read as integers and multiplied out in registers;
activations and sums stay float32. A row's sums are added in an order that does not depend on how many rows there are.
Written in vectors of GCC and Clang, which every processor has in some width. quantized.py and cpu_layers.py are the plain
twins and hold what is called here to them.

Kinds of weights, O outputs of I inputs:
  int8   I signed bytes an output, and one float scale
  int4   groups of 32 inputs, 16 bytes each: input j in the low half of byte j, input j + 16 in the high half; for each
         group a scale and a minimum, bfloat16 beside each other in 32 bits (scale below)
*/

#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef _OPENMP
#include <omp.h>
#endif
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

/* As many floats as the processor takes at once. */
#if defined(__AVX512F__)
#define WIDE 16
#elif defined(__AVX2__)
#define WIDE 8
#else
#define WIDE 4
#endif
typedef float vec __attribute__((vector_size(4 * WIDE)));

#define GROUP 32
#define AHEAD 4096 /* bytes: outputs are short, and a processor that follows each by itself starts anew at every one */
#define INLINE static inline __attribute__((always_inline))

enum { INT8 = 0, INT4 = 1 };

typedef struct {
    int64_t kind, outputs, inputs;
    const void *data, *scales;
} Weight;

INLINE vec load(const float *p) {
    vec v;
    memcpy(&v, p, sizeof v);
    return v;
}

/* Signed bytes as floats. GCC 12 takes a conversion of vectors apart, so the processor's own instruction is named. */
INLINE vec from_bytes(const int8_t *p) {
#if defined(__AVX512F__)
    return (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
#elif defined(__AVX2__)
    return (vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
#elif defined(__ARM_NEON)
    int32_t four;
    memcpy(&four, p, sizeof four);
    return (vec)vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(four))))));
#else
    return (vec){p[0], p[1], p[2], p[3]};
#endif
}

INLINE float from_bf16(uint32_t bits) {
    float f;
    bits <<= 16;
    memcpy(&f, &bits, sizeof f);
    return f;
}

/* A group of int4, sixteen bytes, as floats: those in the low halves, then those in the high ones. */
INLINE void group(const uint8_t *data, uint32_t both, vec out[GROUP / WIDE]) {
#if defined(__AVX512F__)
    /* All sixteen values at once, and then each weight looks its own up: it reads the low four bits only. */
    const __m512i bits = _mm512_set1_epi32((int)both), bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)data));
    const __m512 scale = _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
    const __m512 least = _mm512_castsi512_ps(_mm512_and_epi32(bits, _mm512_set1_epi32((int)0xffff0000)));
    const __m512 levels = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512 values = _mm512_fmadd_ps(levels, scale, least);
    out[0] = (vec)_mm512_permutexvar_ps(bytes, values);
    out[1] = (vec)_mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), values);
#else
    const float scale = from_bf16(both & 0xffff), least = from_bf16(both >> 16);
    for (int i = 0; i < 16 / WIDE; i++) {
#if defined(__AVX2__)
        const __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(data + WIDE * i)));
        const vec low = (vec)_mm256_cvtepi32_ps(_mm256_and_si256(bytes, _mm256_set1_epi32(15)));
        const vec high = (vec)_mm256_cvtepi32_ps(_mm256_srli_epi32(bytes, 4));
#else
        int8_t halves[2 * WIDE];
        for (int j = 0; j < WIDE; j++) halves[j] = data[WIDE * i + j] & 15, halves[WIDE + j] = data[WIDE * i + j] >> 4;
        const vec low = from_bytes(halves), high = from_bytes(halves + WIDE);
#endif
        out[i] = low * scale + least;
        out[16 / WIDE + i] = high * scale + least;
    }
#endif
}

INLINE float total(vec v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)v);
#else
    float parts[WIDE];
    memcpy(parts, &v, sizeof v);
    for (int width = WIDE / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) parts[i] += parts[i + width];
    return parts[0];
#endif
}

INLINE float dot(const float *a, const float *b, int64_t size) {
    vec sum = {0};
    int64_t i = 0;
    for (; i + WIDE <= size; i += WIDE) sum += load(a + i) * load(b + i);
    float out = total(sum);
    for (; i < size; i++) out += a[i] * b[i];
    return out;
}

/* R rows times C outputs, from output o on. */
INLINE void tile(const int R, const int C, const Weight *w, int64_t o, const float *x, int64_t x_stride, float *out,
                 int64_t out_stride, int add) {
    vec sum[4][4];
    float rest[4][4];
    const int64_t I = w->inputs;
    for (int c = 0; c < C; c++)
        for (int r = 0; r < R; r++) sum[c][r] = (vec){0}, rest[c][r] = 0.0f;
    if (w->kind == INT8) {
        const int8_t *data = (const int8_t *)w->data + o * I;
        int64_t i = 0;
        for (; i + WIDE <= I; i += WIDE) {
            vec here[4];
            for (int c = 0; c < C; c++) here[c] = from_bytes(data + c * I + i);
            __builtin_prefetch(data + AHEAD + C * i);
            for (int r = 0; r < R; r++) {
                vec row = load(x + r * x_stride + i);
                for (int c = 0; c < C; c++) sum[c][r] += here[c] * row;
            }
        }
        for (; i < I; i++)
            for (int c = 0; c < C; c++)
                for (int r = 0; r < R; r++) rest[c][r] += (float)data[c * I + i] * x[r * x_stride + i];
    } else {
        const int64_t groups = I / GROUP;
        const uint8_t *data = (const uint8_t *)w->data + o * (I / 2);
        const uint32_t *scales = (const uint32_t *)w->scales + o * groups;
        for (int64_t g = 0; g < groups; g++) {
            __builtin_prefetch(data + AHEAD + C * 16 * g);
            for (int c = 0; c < C; c++) {
                vec here[GROUP / WIDE];
                group(data + c * (I / 2) + g * 16, scales[c * groups + g], here);
                for (int r = 0; r < R; r++)
                    for (int i = 0; i < GROUP / WIDE; i++)
                        sum[c][r] += here[i] * load(x + r * x_stride + g * GROUP + i * WIDE);
            }
        }
    }
    for (int c = 0; c < C; c++) {
        const float scale = w->kind == INT8 ? ((const float *)w->scales)[o + c] : 1.0f;
        for (int r = 0; r < R; r++) {
            const float value = (total(sum[c][r]) + rest[c][r]) * scale;
            float *to = out + r * out_stride + c;
            *to = add ? *to + value : value;
        }
    }
}

#define TILES(R)                                                                                           \
    static void tiles_##R(const Weight *w, int64_t from, int64_t to, const float *x, int64_t x_stride, float *out, \
                          int64_t out_stride, int add) {                                                    \
        int64_t o = from;                                                                                   \
        for (; o + 4 <= to; o += 4) tile(R, 4, w, o, x, x_stride, out + (o - from), out_stride, add);       \
        for (; o < to; o++) tile(R, 1, w, o, x, x_stride, out + (o - from), out_stride, add);               \
    }
TILES(1)
TILES(2)
TILES(4)

/* out[n][o - from] = x[n] . weight[o], or added to it. Outputs go in blocks that stay in the cache for all rows. */
static void product(const Weight *w, int64_t from, int64_t to, const float *x, int64_t rows, int64_t x_stride, float *out,
                    int64_t out_stride, int add) {
    for (int64_t o = from; o < to; o += 16) {
        const int64_t end = o + 16 < to ? o + 16 : to;
        float *here = out + (o - from);
        int64_t n = 0;
        for (; n + 4 <= rows; n += 4) tiles_4(w, o, end, x + n * x_stride, x_stride, here + n * out_stride, out_stride, add);
        for (; n + 2 <= rows; n += 2) tiles_2(w, o, end, x + n * x_stride, x_stride, here + n * out_stride, out_stride, add);
        for (; n < rows; n++) tiles_1(w, o, end, x + n * x_stride, x_stride, here + n * out_stride, out_stride, add);
    }
}

/* A thread's share of `many` things, in units of `unit`. */
INLINE void share(int64_t many, int64_t unit, int64_t thread, int64_t threads, int64_t *from, int64_t *to) {
    const int64_t units = (many + unit - 1) / unit;
    *from = units * thread / threads * unit;
    *to = units * (thread + 1) / threads * unit;
    if (*from > many) *from = many;
    if (*to > many) *to = many;
}

INLINE int64_t this_thread(void) {
#ifdef _OPENMP
    return omp_get_thread_num();
#else
    return 0;
#endif
}

INLINE int64_t all_threads(void) {
#ifdef _OPENMP
    return omp_get_num_threads();
#else
    return 1;
#endif
}

/* out (N, O) = x (N, I) times the weight. */
void fathom_linear(const Weight *w, const float *x, int64_t rows, float *out, int64_t threads) {
    (void)threads;
#pragma omp parallel num_threads((int)threads) if (threads > 1)
    {
        int64_t from, to;
        share(w->outputs, 16, this_thread(), all_threads(), &from, &to);
        product(w, from, to, x, rows, w->inputs, out + from, w->outputs, 0);
    }
}

/* A layer: norm, attention, norm, gated feed-forward part. */
typedef struct {
    Weight q, k, v, o, gate, up, down;
    const float *norm_attn, *norm_mlp;
} Layer;

typedef struct {
    int64_t layer;
    float *k, *v;
    int64_t page_stride, entry_stride, head_stride, page_size;
    int64_t window; /* 0: all entries */
    int64_t reads;  /* the entries are another step's */
    int64_t rotates;
    int64_t starts; /* which of `starts`; -1: by the window */
} Step;

typedef struct {
    int64_t rows, hidden, inner, heads, groups, width, pages, threads, most_entries;
    float eps, scale;
} Shape;

static void normed(const float *x, const float *weight, float *out, const Shape *s) {
    for (int64_t n = 0; n < s->rows; n++) {
        const float *row = x + n * s->hidden;
        const float by = 1.0f / sqrtf(dot(row, row, s->hidden) / (float)s->hidden + s->eps);
        for (int64_t i = 0; i < s->hidden; i++) out[n * s->hidden + i] = row[i] * by * weight[i];
    }
}

static void rotate(float *head, const float *cos, const float *sin, int64_t width) {
    const int64_t half = width / 2;
    for (int64_t i = 0; i < half; i++) { /* the first half of the sines is negated */
        const float a = head[i], b = head[i + half];
        head[i] = a * cos[i] + b * sin[i];
        head[i + half] = b * cos[i + half] + a * sin[i + half];
    }
}

INLINE int64_t place(const Step *step, const int32_t *table, int64_t entry, int64_t group) {
    return (int64_t)table[entry / step->page_size] * step->page_stride + entry % step->page_size * step->entry_stride +
           group * step->head_stride;
}

static void attend(const Step *step, const Shape *s, const float *q, int64_t group, const int32_t *table, int64_t first,
                   int64_t length, float *scores, float *out) {
    const int64_t D = s->width;
    float most = -INFINITY, sum = 0.0f;
    for (int64_t e = first; e < length; e++) {
        const float score = dot(q, step->k + place(step, table, e, group), D) * s->scale;
        scores[e] = score;
        most = score > most ? score : most;
    }
    memset(out, 0, (size_t)D * sizeof(float));
    for (int64_t e = first; e < length; e++) {
        const float weight = expf(scores[e] - most);
        const float *v = step->v + place(step, table, e, group);
        sum += weight;
        for (int64_t i = 0; i < D; i++) out[i] += weight * v[i];
    }
    const float by = sum > 0.0f || sum != sum ? 1.0f / sum : 0.0f;
    for (int64_t i = 0; i < D; i++) out[i] *= by;
}

/* x (N, M) through some steps, in place. Every thread keeps the normed rows for itself, which is cheaper than to wait.
   scratch: floats, threads x (N M + most_entries) + N (2 H D + I) */
void fathom_steps(const Layer *layers, const Step *steps, int64_t many, const Shape *shape, float *x, const float *cos,
                  const float *sin, const int64_t *slots, const int32_t *table, const int32_t *lengths,
                  const int32_t *starts, float *scratch) {
    const Shape *s = shape;
    const int64_t N = s->rows, M = s->hidden, D = s->width, HD = s->heads * D, I = s->inner, P = s->pages;
    float *const q = scratch, *const mixed = q + N * HD, *const inner = mixed + N * HD, *const own = inner + N * I;
#pragma omp parallel num_threads((int)s->threads) if (s->threads > 1)
    {
        const int64_t me = this_thread(), all = all_threads();
        float *const n_NM = own + me * (N * M + s->most_entries), *const scores = n_NM + N * M;
        int64_t from, to;
        for (int64_t number = 0; number < many; number++) {
            const Step *step = steps + number;
            const Layer *layer = layers + step->layer;
            normed(x, layer->norm_attn, n_NM, s);
            share(s->heads + (step->reads ? 0 : 2 * s->groups), 1, me, all, &from, &to);
            for (int64_t h = from; h < to; h++) {
                const int64_t key = h - s->heads, value = key - s->groups;
                if (key < 0) {
                    product(&layer->q, h * D, (h + 1) * D, n_NM, N, M, q + h * D, HD, 0);
                    for (int64_t n = 0; n < N && step->rotates; n++)
                        rotate(q + n * HD + h * D, cos + n * D, sin + n * D, D);
                    continue;
                }
                const int64_t group = value < 0 ? key : value;
                for (int64_t n = 0; n < N; n++) {
                    if (slots[n] < 0) continue;
                    float *to_page = (value < 0 ? step->k : step->v) + slots[n] / step->page_size * step->page_stride +
                                     slots[n] % step->page_size * step->entry_stride + group * step->head_stride;
                    product(value < 0 ? &layer->k : &layer->v, group * D, (group + 1) * D, n_NM + n * M, 1, M, to_page, D, 0);
                    if (value < 0 && step->rotates) rotate(to_page, cos + n * D, sin + n * D, D);
                }
            }
#pragma omp barrier
            share(N * s->heads, 1, me, all, &from, &to);
            for (int64_t task = from; task < to; task++) {
                const int64_t n = task / s->heads, h = task % s->heads, length = lengths[n];
                const int64_t least = step->window > 0 && length > step->window ? length - step->window : 0;
                attend(step, s, q + n * HD + h * D, h / (s->heads / s->groups), table + n * P,
                       step->starts < 0 ? least : starts[step->starts * N + n], length, scores, mixed + n * HD + h * D);
            }
#pragma omp barrier
            share(M, 16, me, all, &from, &to);
            product(&layer->o, from, to, mixed, N, HD, x + from, M, 1);
#pragma omp barrier
            normed(x, layer->norm_mlp, n_NM, s);
            share(I, 16, me, all, &from, &to);
            for (int64_t i = from; i < to; i += 16) { /* one block of the gate and the same of up, then both at once */
                const int64_t end = i + 16 < to ? i + 16 : to;
                for (int64_t n = 0; n < N; n += 4) {
                    float up[4 * 16];
                    const int64_t rows = N - n < 4 ? N - n : 4;
                    product(&layer->gate, i, end, n_NM + n * M, rows, M, inner + n * I + i, I, 0);
                    product(&layer->up, i, end, n_NM + n * M, rows, M, up, 16, 0);
                    for (int64_t r = 0; r < rows; r++)
                        for (int64_t j = 0; j < end - i; j++) {
                            float *gate = inner + (n + r) * I + i + j;
                            *gate = *gate / (1.0f + expf(-*gate)) * up[r * 16 + j];
                        }
                }
            }
#pragma omp barrier
            share(M, 16, me, all, &from, &to);
            product(&layer->down, from, to, inner, N, I, x + from, M, 1);
#pragma omp barrier
        }
    }
}
