// Decoder layers for few rows on a CPU. kernels.py compiles this file for the machine it runs on.
//
// A weight is read from memory once for many rows. A row's sums run in one order, whichever rows are computed
// with it, so its result has the same bits alone. Sums are float32; weights are float32 or rounded.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__AVX512F__)
#define FLOATS 16
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define FLOATS 8
#else
#define FLOATS 4
#endif
#if FLOATS > 4
#include <immintrin.h>
#endif

namespace {

constexpr int WIDTH = FLOATS; // in a register: GCC keeps wider vectors on the stack
typedef float Floats __attribute__((vector_size(4 * WIDTH)));
typedef int32_t Ints __attribute__((vector_size(4 * WIDTH)));
typedef float Unaligned __attribute__((vector_size(4 * WIDTH), aligned(4)));

// Rows and channels per tile, as many as registers hold sums for; a row alone has a tile of more channels.
constexpr int ROWS = 6, CHANNELS = WIDTH == 16 ? 4 : 2, CHANNELS_ALONE = 4;
constexpr int64_t CHUNK = 32;                // channels for a thread, with their weights in the second cache
constexpr int64_t FIRST_CACHE = 36 << 10;    // bytes of inputs that stay in the first cache
constexpr int64_t MOST_INPUTS = 768;         // longer products run in ranges, for the same reason
constexpr int64_t LEAST_PARALLEL = 1 << 17;  // multiplications worth starting threads
constexpr int64_t MOST_HEAD_SIZE = 512;      // as in kernels.py

enum Kind { FLOAT32, FLOAT16, BFLOAT16, INT8, INT4 };

// An int4 block as in GGUF's Q4_1: 32 weights w = scale * nibble + least. The low nibbles come first.
constexpr int BLOCK = 32, PARTS = BLOCK / WIDTH;
struct Block {
    uint16_t scale, least;
    uint8_t nibbles[BLOCK / 2];
};

constexpr int64_t row_bytes(int kind, int64_t inputs) {
    switch (kind) {
    case FLOAT32: return 4 * inputs;
    case FLOAT16:
    case BFLOAT16: return 2 * inputs;
    case INT8: return inputs;
    default: return inputs / BLOCK * sizeof(Block);
    }
}

inline Floats load(const float *from) { return *reinterpret_cast<const Unaligned *>(from); }
inline void store(float *to, Floats x) { *reinterpret_cast<Unaligned *>(to) = x; }
inline Floats fill(float x) { return x - Floats{}; }

inline Floats multiply_add(Floats a, Floats b, Floats sum) {
#if FLOATS == 16
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#elif FLOATS == 8
    return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#else
    return a * b + sum;
#endif
}

// A half has a float's bits with a shorter exponent; finite ones only.
inline float to_float(uint16_t half) {
#if FLOATS == 8
    return _cvtsh_ss(half);
#else
    const uint32_t bits = (uint32_t)(half & 0x7fff) << 13;
    float size;
    memcpy(&size, &bits, 4);
    size *= 0x1p112f; // exponents count from 15 and from 127
    return half & 0x8000 ? -size : size;
#endif
}

inline float sum(Floats x) {
#if FLOATS == 16
    return _mm512_reduce_add_ps((__m512)x);
#elif FLOATS == 8
    __m128 four = _mm_add_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
#else
    for (int half = WIDTH / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) x[i] += x[i + half];
    return x[0];
#endif
}

// Compilers widen number by number in the plain loop, so we name the instructions.
template <class Number> inline Ints widen(const Number *from) {
#if FLOATS == 16
    if constexpr (sizeof(Number) == 2)
        return (Ints)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from));
    const __m128i bytes = _mm_loadu_si128((const __m128i *)from);
    return (Ints)(Number(-1) < 0 ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
#elif FLOATS == 8
    if constexpr (sizeof(Number) == 2)
        return (Ints)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from));
    const __m128i bytes = _mm_loadl_epi64((const __m128i *)from);
    return (Ints)(Number(-1) < 0 ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
#else
    typedef Number Narrow __attribute__((vector_size(sizeof(Number) * WIDTH)));
    Narrow numbers;
    memcpy(&numbers, from, sizeof(numbers));
    return __builtin_convertvector(numbers, Ints);
#endif
}

inline Floats to_floats(const uint16_t *halves) {
#if FLOATS == 16
    return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)halves));
#elif FLOATS == 8
    return (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)halves));
#else
    const Ints bits = widen(halves);
    const Floats size = (Floats)((bits & 0x7fff) << 13) * 0x1p112f; // as in to_float
    return (Floats)((Ints)size | (bits & 0x8000) << 16);
#endif
}

// Reads a row's weights by blocks: `begin`, then each part.
template <int kind> struct Reader {
#if FLOATS == 16
    Floats table; // the block's 16 values in int4
#else
    Floats scale, least; // the block's in int4
#endif

    inline void begin(const char *row, int64_t first) {
#if FLOATS == 16
        if constexpr (kind == INT4) {
            const Block *block = (const Block *)row + first / BLOCK;
            int32_t pair;
            memcpy(&pair, block, 4);
            const __m128 both = _mm_cvtph_ps(_mm_cvtsi32_si128(pair));
            const __m512 scale = _mm512_broadcastss_ps(both);
            const __m512 least = _mm512_broadcastss_ps(_mm_movehdup_ps(both));
            const Floats steps = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
            table = multiply_add(steps, (Floats)scale, (Floats)least);
        }
#else
        if constexpr (kind == INT4) {
            const Block *block = (const Block *)row + first / BLOCK;
            scale = fill(to_float(block->scale)), least = fill(to_float(block->least));
        }
#endif
    }

    // Return the WIDTH weights in one part of the block at `first`.
    inline Floats weights(const char *row, int64_t first, int part) const {
        const int64_t at = first + part * WIDTH;
        if constexpr (kind == FLOAT32) {
            return load((const float *)row + at);
        } else if constexpr (kind == FLOAT16) {
            return to_floats((const uint16_t *)row + at);
        } else if constexpr (kind == BFLOAT16) { // the upper half of a float
            return (Floats)(widen((const uint16_t *)row + at) << 16);
        } else if constexpr (kind == INT8) {
            return __builtin_convertvector(widen((const int8_t *)row + at), Floats);
        } else {
            const Block *block = (const Block *)row + first / BLOCK;
            const bool is_high = part >= PARTS / 2;
            const Ints bytes = widen(block->nibbles + part % (PARTS / 2) * WIDTH);
#if FLOATS == 16 // the instruction reads the lowest four bits
            return (Floats)_mm512_permutexvar_ps((__m512i)(is_high ? bytes >> 4 : bytes), (__m512)table);
#else
            const Ints nibbles = bytes >> (is_high ? 4 : 0) & 15;
            return multiply_add(__builtin_convertvector(nibbles, Floats), scale, least);
#endif
        }
    }
};

} // namespace

extern "C" struct Weight {
    const char *rows;   // [channels, inputs]
    const float *scale; // [channels] for int8
    const float *bias;  // [channels] or null
    int64_t kind, channels, inputs;
};

namespace {

// Inputs [begin, end) of a product. `sums` [rows, CHUNK] keeps unfinished sums from one range to the next, so
// that ranges change no bits.
struct Range {
    int64_t begin, end;
    Floats *sums;
};

// y[m, g] = x[m] . w[g] for `rows` rows and `channels` channels from `first` on.
template <int kind, int rows, int channels>
void tile(const Weight &w, const float *x, float *y, int64_t first, const Range &range, Floats *kept) {
    Floats sums[rows][channels] = {};
    if (range.begin > 0)
#pragma GCC unroll 6
        for (int m = 0; m < rows; m++)
#pragma GCC unroll 4
            for (int c = 0; c < channels; c++) sums[m][c] = kept[m * CHUNK + c];
    Reader<kind> readers[channels];
    const int64_t bytes = row_bytes(kind, w.inputs);
    const char *from = w.rows + first * bytes;
    if constexpr (rows == 1) {
        // By blocks, for the speed of memory. GCC keeps the sums of several rows in registers only below.
        for (int64_t h = range.begin; h < range.end; h += BLOCK) {
#pragma GCC unroll 4
            for (int c = 0; c < channels; c++) {
                const char *ahead = from + (c + channels) * bytes + row_bytes(kind, h); // in the next tile
                __builtin_prefetch(ahead);
                if (kind == FLOAT32) __builtin_prefetch(ahead + 64);
                readers[c].begin(from + c * bytes, h);
            }
#pragma GCC unroll 8
            for (int part = 0; part < PARTS; part++) {
                const Floats own = load(x + h + part * WIDTH);
#pragma GCC unroll 4
                for (int c = 0; c < channels; c++)
                    sums[0][c] = multiply_add(readers[c].weights(from + c * bytes, h, part), own, sums[0][c]);
            }
        }
    } else {
#pragma GCC unroll 2
        for (int64_t h = range.begin; h < range.end; h += WIDTH) {
            const int part = h % BLOCK / WIDTH;
            Floats own_weights[channels];
#pragma GCC unroll 4
            for (int c = 0; c < channels; c++) {
                if (!part) readers[c].begin(from + c * bytes, h);
                own_weights[c] = readers[c].weights(from + c * bytes, h - part * WIDTH, part);
                if (row_bytes(kind, h) % 64 == 0)
                    __builtin_prefetch(from + (c + channels) * bytes + row_bytes(kind, h));
            }
#pragma GCC unroll 6
            for (int m = 0; m < rows; m++) {
                const Floats own = load(x + m * w.inputs + h);
#pragma GCC unroll 4
                for (int c = 0; c < channels; c++) sums[m][c] = multiply_add(own_weights[c], own, sums[m][c]);
            }
        }
    }
    if (range.end < w.inputs) {
#pragma GCC unroll 6
        for (int m = 0; m < rows; m++)
#pragma GCC unroll 4
            for (int c = 0; c < channels; c++) kept[m * CHUNK + c] = sums[m][c];
        return;
    }
#pragma GCC unroll 6
    for (int m = 0; m < rows; m++)
#pragma GCC unroll 4
        for (int c = 0; c < channels; c++) {
            float out = sum(sums[m][c]);
            if (w.scale) out *= w.scale[first + c];
            y[m * w.channels + first + c] = w.bias ? out + w.bias[first + c] : out;
        }
}

template <int kind, int channels>
void tiles(const Weight &w, const float *x, float *y, int64_t rows, int64_t first, const Range &range) {
    for (int64_t m = 0; m < rows; m += ROWS) {
        const float *own = x + m * w.inputs;
        float *out = y + m * w.channels;
        Floats *kept = range.sums + m * CHUNK + first % CHUNK;
        switch (std::min<int64_t>(rows - m, ROWS)) {
        case 1: tile<kind, 1, channels>(w, own, out, first, range, kept); break;
        case 2: tile<kind, 2, channels>(w, own, out, first, range, kept); break;
        case 3: tile<kind, 3, channels>(w, own, out, first, range, kept); break;
        case 4: tile<kind, 4, channels>(w, own, out, first, range, kept); break;
        case 5: tile<kind, 5, channels>(w, own, out, first, range, kept); break;
        case 6: tile<kind, 6, channels>(w, own, out, first, range, kept); break;
        }
    }
}

// Channels [first, end) of a product, for as many rows and inputs at a time as stay in the first cache.
template <int kind>
void multiply_chunk(const Weight &w, const float *x, float *y, int64_t rows, int64_t first, int64_t end) {
    const int64_t inputs = rows > 1 ? std::min(w.inputs, MOST_INPUTS) : w.inputs;
    const int64_t part = std::max<int64_t>(ROWS, FIRST_CACHE / (4 * inputs) / ROWS * ROWS);
    thread_local std::vector<Floats> sums;
    if (inputs < w.inputs) sums.resize(part * CHUNK);
    for (int64_t m = 0; m < rows; m += part) {
        const int64_t some = std::min(rows - m, part);
        const float *own = x + m * w.inputs;
        float *out = y + m * w.channels;
        for (int64_t h = 0; h < w.inputs; h += inputs) {
            const Range range = {h, std::min(h + inputs, w.inputs), sums.data()};
            int64_t g = first;
            for (; some == 1 && g + CHANNELS_ALONE <= end; g += CHANNELS_ALONE)
                tile<kind, 1, CHANNELS_ALONE>(w, own, out, g, range, range.sums + g % CHUNK);
            for (; g + CHANNELS <= end; g += CHANNELS) tiles<kind, CHANNELS>(w, own, out, some, g, range);
            for (; g < end; g++) tiles<kind, 1>(w, own, out, some, g, range);
        }
    }
}

template <int kind> void multiply(const Weight &w, const float *x, float *y, int64_t rows) {
#pragma omp parallel for schedule(static) if (rows * w.channels * w.inputs >= LEAST_PARALLEL)
    for (int64_t first = 0; first < w.channels; first += CHUNK)
        multiply_chunk<kind>(w, x, y, rows, first, std::min(first + CHUNK, w.channels));
}

// exp, to 2 units in the last place between -87 and 88, where it is cut off.
inline Floats exponential(Floats x) {
    x = x < -87.0f ? fill(-87.0f) : x > 88.0f ? fill(88.0f) : x;
    const Floats magic = fill(12582912.0f); // adding it rounds to an integer
    const Floats power = multiply_add(x, fill(1.44269504f), magic) - magic;
    const Floats rest = x - power * 0.693359375f + power * 2.12194440e-4f;
    Floats y = fill(1.9875691500e-4f);
    for (float term : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
        y = multiply_add(y, rest, fill(term));
    y = multiply_add(y, rest * rest, rest + 1.0f);
    const Ints exponent = (__builtin_convertvector(power, Ints) + 127) << 23;
    return y * (Floats)exponent;
}

// y = w x / sqrt(mean(x^2) + eps); `size` is a multiple of WIDTH.
void norm(const float *x, const float *w, float eps, int64_t size, float *y) {
    Floats squares = {};
    for (int64_t i = 0; i < size; i += WIDTH) squares = multiply_add(load(x + i), load(x + i), squares);
    const float factor = 1.0f / std::sqrt(sum(squares) / size + eps);
    for (int64_t i = 0; i < size; i += WIDTH) store(y + i, load(x + i) * factor * load(w + i));
}

// y = x cos + [r, l] sin for x = [l, r]: the sign is in sin; `size` / 2 is a multiple of WIDTH.
void turn(const float *x, const float *cos, const float *sin, int64_t size, float *y) {
    const int64_t half = size / 2;
    for (int64_t i = 0; i < half; i += WIDTH) {
        const Floats left = load(x + i), right = load(x + half + i);
        store(y + i, left * load(cos + i) + right * load(sin + i));
        store(y + half + i, right * load(cos + half + i) + left * load(sin + half + i));
    }
}

float *scratch(int which, int64_t size) {
    thread_local std::vector<float> buffers[3];
    if ((int64_t)buffers[which].size() < size) buffers[which].resize(size);
    return buffers[which].data();
}

} // namespace

extern "C" {

struct Layer {
    Weight query_key_value, output, gate_up, down;
    const float *input_norm, *attention_norm, *query_norm, *key_norm; // the last two may be null
    double eps, scale;
    int64_t hidden, heads, kv_heads, head_size;
};

// y = x W^T + b; x [rows, inputs], y [rows, channels].
void product(const Weight *w, const float *x, float *y, int64_t rows) {
    switch (w->kind) {
    case FLOAT32: multiply<FLOAT32>(*w, x, y, rows); break;
    case FLOAT16: multiply<FLOAT16>(*w, x, y, rows); break;
    case BFLOAT16: multiply<BFLOAT16>(*w, x, y, rows); break;
    case INT8: multiply<INT8>(*w, x, y, rows); break;
    case INT4: multiply<INT4>(*w, x, y, rows); break;
    }
}

// Rotated queries [heads, rows, D] and keys [kv_heads, rows, D], then values like keys; cos, sin [rows, D].
void before_attention(
    const Layer *layer, const float *x, const float *cos, const float *sin, float *out, int64_t rows) {
    const int64_t H = layer->hidden, D = layer->head_size, N = layer->heads, J = layer->kv_heads;
    const int64_t channels = (N + 2 * J) * D;
    float *normed = scratch(0, rows * H), *joined = scratch(1, rows * channels), own[MOST_HEAD_SIZE];
    for (int64_t m = 0; m < rows; m++)
        norm(x + m * H, layer->input_norm, layer->eps, H, normed + m * H);
    product(&layer->query_key_value, normed, joined, rows);
    for (int64_t m = 0; m < rows; m++)
        for (int64_t head = 0; head < N + 2 * J; head++) {
            const float *from = joined + m * channels + head * D;
            float *to = out + (head * rows + m) * D;
            if (head >= N + J) {
                memcpy(to, from, D * sizeof(float));
                continue;
            }
            const float *weight = head < N ? layer->query_norm : layer->key_norm;
            if (weight) {
                norm(from, weight, layer->eps, D, own);
                from = own;
            }
            turn(from, cos + m * D, sin + m * D, D, to);
        }
}

// softmax(scale q k^T) v; q [heads, rows, D], k and v [kv_heads, columns, D] with `stride` floats from head to
// head, mask [rows, columns] with 0 for visible columns, out [rows, heads D]. Hidden columns are skipped, so they
// change no bits.
void attend(
    const float *q, const float *k, const float *v, const float *mask, float *out, int64_t rows, int64_t columns,
    int64_t N, int64_t shared, int64_t D, int64_t stride, int64_t mask_stride, double scale) {
    const int64_t whole = D / WIDTH * WIDTH;
    std::vector<int32_t> seen(columns);
    for (int64_t m = 0; m < rows; m++) {
        int64_t count = 0;
        for (int64_t c = 0; c < columns; c++)
            if (mask[m * mask_stride + c] == 0) seen[count++] = c;
#pragma omp parallel for schedule(static) if (N * count * D >= LEAST_PARALLEL)
        for (int64_t head = 0; head < N; head++) {
            const float *own = q + (head * rows + m) * D;
            const float *keys = k + head / shared * stride, *values = v + head / shared * stride;
            float *scores = scratch(2, count + WIDTH), largest = -INFINITY;
            for (int64_t i = 0; i < count; i++) {
                Floats parts = {};
                for (int64_t d = 0; d < whole; d += WIDTH)
                    parts = multiply_add(load(own + d), load(keys + seen[i] * D + d), parts);
                float dot = sum(parts);
                for (int64_t d = whole; d < D; d++) dot += own[d] * keys[seen[i] * D + d];
                scores[i] = dot * (float)scale;
                largest = std::max(largest, scores[i]);
            }
            for (int64_t i = count; i < count + WIDTH; i++) scores[i] = -INFINITY; // exp of it is cut off below
            float total = 0;
            for (int64_t i = 0; i < count; i += WIDTH) {
                Floats power = exponential(load(scores + i) - largest);
                for (int64_t j = count - i; j < WIDTH; j++) power[j] = 0;
                store(scores + i, power);
                total += sum(power);
            }
            float *to = out + (m * N + head) * D;
            const float factor = total > 0 ? 1 / total : 0; // a row that sees nothing has zeros
            for (int64_t d = 0; d < whole; d += WIDTH) {
                Floats mixed = {};
                for (int64_t i = 0; i < count; i++)
                    mixed = multiply_add(fill(scores[i]), load(values + seen[i] * D + d), mixed);
                store(to + d, mixed * factor);
            }
            for (int64_t d = whole; d < D; d++) {
                float mixed = 0;
                for (int64_t i = 0; i < count; i++) mixed += scores[i] * values[seen[i] * D + d];
                to[d] = mixed * factor;
            }
        }
    }
}

// The layer's output [rows, hidden] from its input and attended [rows, heads D].
void after_attention(const Layer *layer, const float *x, const float *attended, float *out, int64_t rows) {
    const int64_t H = layer->hidden, I = layer->down.inputs;
    float *normed = scratch(0, rows * H), *joined = scratch(1, rows * 2 * I), *active = scratch(2, rows * I);
    product(&layer->output, attended, out, rows);
    for (int64_t m = 0; m < rows; m++) {
        for (int64_t i = 0; i < H; i += WIDTH)
            store(out + m * H + i, load(x + m * H + i) + load(out + m * H + i));
        norm(out + m * H, layer->attention_norm, layer->eps, H, normed + m * H);
    }
    product(&layer->gate_up, normed, joined, rows);
    for (int64_t m = 0; m < rows; m++)
        for (int64_t i = 0; i < I; i += WIDTH) {
            const Floats gate = load(joined + 2 * m * I + i), up = load(joined + (2 * m + 1) * I + i);
            store(active + m * I + i, gate / (1.0f + exponential(-gate)) * up);
        }
    product(&layer->down, active, normed, rows);
    for (int64_t i = 0; i < rows * H; i += WIDTH) store(out + i, load(out + i) + load(normed + i));
}
}
