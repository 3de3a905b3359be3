/*
 * Products of rows with a weight (docs/spec.md, section 13), included by declared_body.h. The 16 sums of a product are the lanes of
 * one, two or four vectors. A file kernel_<isa>.c may have more names than pairs.h asks for; these are made of its own:
 *
 *   P, P_LANES, P_VECTORS      a vector of so many floats, 4, 8 or 16; like U it may have no size; and how many have 16
 *   p_zero p_set1 p_add p_fma  p_fma rounds x * w + s once
 *   p_mul                      rounds x * w
 *   p_load                     widens P_LANES elements
 *   p_store                    stores floats
 *
 * Portable kernels have none of them: their loops are plain C, of which the compiler makes vectors.
 */
enum { SUMS = 16 };

#if !defined(P_LANES) && LANES > 1 /* SVE has its own */
#define P_LANES LANES
#define P_VECTORS (SUMS / LANES)
typedef V P;
FN_INLINE P p_zero(void) { return v_set1(0); }
FN_INLINE P p_set1(float x) { return v_set1(x); }
FN_INLINE P p_add(P x, P y) { return v_add(x, y); }
FN_INLINE P p_mul(P x, P w) { return v_mul(x, w); }
FN_INLINE P p_fma(P x, P w, P s) { return v_fma(x, w, s); }
FN_INLINE P p_load(int kind, const char *p) { return kind == F32 ? v_load(p) : kind == F16 ? f16_load(p) : bf16_load(p); }
FN_INLINE void p_store(float *p, P x) { v_store(p, x); }
#endif

/* n elements as float, and +0 up to whole sums. */
static void widen_terms(int64_t kind, const char *row, int64_t begin, int64_t n, float *to) {
    const int64_t whole = fn_round_up(n, SUMS);
    int64_t i = 0;
    for (; i + UNIT <= n; i += UNIT) u_store(F32, to, i, UNIT, load_any(kind, row, begin + i, UNIT));
    for (; i < whole; i += UNIT) {
        const int left = (int)(n - i < UNIT ? n - i : UNIT), room = (int)(whole - i < UNIT ? whole - i : UNIT);
        u_store(F32, to, i, room, left > 0 ? load_any(kind, row, begin + i, left) : u_set1(0));
    }
}

/* The halving tree of 16 sums, which it may overwrite. */
FN_INLINE float halve_sums_of_product(float *s) {
#if !defined(P_LANES)
    return halve_sums(s, SUMS);
#elif LANES == 16 /* a sum is half a unit */
    return v_halve(v_load(s));
#else
    if ((int)UNIT >= SUMS) return u_halve(0, u_load(F32, s, 0, SUMS));
    return u_halve(0, u_add(u_load(F32, s, 0, UNIT), u_load(F32, s, UNIT, UNIT)));
#endif
}

/* The rows and columns of a block: those of the same rows come one after the other. */
struct place {
    int64_t begin, end, first;
    int columns;
};
static struct place place_of_block(const struct fn_declared *job, int64_t i) {
    const int64_t columns = fn_product_columns(job), blocks = (job->columns + columns - 1) / columns;
    const int64_t m = i / blocks * FN_PRODUCT_ROWS, first = i % blocks * columns, left = job->columns - first;
    const int64_t end = job->rows - m < FN_PRODUCT_ROWS ? job->rows : m + FN_PRODUCT_ROWS;
    return (struct place){m, end, first, (int)(left < columns ? left : columns)};
}

/* Adds operand `of_bias` to products of a row, and rounds them into columns [begin, begin + n) of operand `of_out`. */
static void end_products(const struct fn_declared *job, int of_bias, int of_out, int64_t m, int64_t begin, int n, float *y) {
    const struct fn_operand *const bias = &job->operand[of_bias], *const out = &job->operand[of_out];
    char *const row = fn_row_of(job, of_out, m);
    for (int i = 0; i < n; i += UNIT) {
        const int count = n - i < UNIT ? n - i : UNIT;
        U u = u_load(F32, y, i, count);
        if (bias->kind) u = u_add(u, load_any(bias->kind, (const char *)bias->address, begin + i, count));
        store_any(out->kind, row, begin + i, count, u);
    }
}

#if defined(P_LANES)
#define EACH_ROW(fn) fn(0) fn(1) fn(2) fn(3)
#define STEP(fused, x, w, s) ((fused) ? p_fma(x, w, s) : p_add(s, p_mul(x, w)))

/*
 * The sums of one row or two of floats with a row of the weight as it lies in memory, which is read once and from its first element
 * to its last one: memory gives it faster than two rows at once. `vectors`: how many have the sums.
 */
FN_INLINE void few_rows(int rows, int kind, int fused, int vectors, const float *x, int64_t room, const char *w, int64_t n, float *sums) {
    const int64_t size = kind == F32 ? 4 : 2, whole = n / SUMS * SUMS;
#define EACH_VECTOR(fn) fn(0) fn(1) fn(2) fn(3)
#define BEGIN(v) P a##v = p_zero(), b##v = p_zero();
    EACH_VECTOR(BEGIN)
#undef BEGIN
#define X(r, v) p_load(F32, (const char *)(x + r * room + k + v * P_LANES))
#define TERMS(v)                                                                                     \
    if (v < vectors) {                                                                               \
        const P w##v = p_load(w_kind, from + v * P_LANES * (w_kind == F32 ? 4 : 2));                 \
        a##v = STEP(fused, X(0, v), w##v, a##v);                                                     \
        if (rows > 1) b##v = STEP(fused, X(1, v), w##v, b##v);                                       \
    }
    for (int64_t k = 0; k < whole; k += SUMS) {
        const int w_kind = kind;
        const char *const from = w + k * size;
        EACH_VECTOR(TERMS)
    }
    if (whole < n) {
        float last[SUMS];
        widen_terms(kind, w, whole, n - whole, last);
        const int w_kind = F32;
        const char *const from = (const char *)last;
        const int64_t k = whole;
        EACH_VECTOR(TERMS)
    }
#undef TERMS
#undef X
#define END(v)                                                        \
    if (v < vectors) {                                                \
        p_store(sums + v * P_LANES, a##v);                            \
        if (rows > 1) p_store(sums + SUMS + v * P_LANES, b##v);       \
    }
    EACH_VECTOR(END)
#undef END
#undef EACH_VECTOR
}

/* The same as one function for each number of rows, where the weight is of a kind that can be read as it lies. */
#define FEW(rows, kind, fused)                                                                                         \
    static FN_NOINLINE void few_##rows##_##kind(const float *x, int64_t room, const char *w, int64_t n, float *sums) { \
        FN_UNSWITCH(P_VECTORS == 1, few_rows(rows, kind, fused, P_VECTORS, x, room, w, n, sums));                      \
    }
#define FEW_OF(kind, fused) FEW(1, kind, fused) FEW(2, kind, fused)
FEW_OF(F32, 0) FEW_OF(F16, 1) FEW_OF(BF16, 1)
typedef void few_fn(const float *x, int64_t room, const char *w, int64_t n, float *sums);
#define FEW_ENTRIES(kind) [kind] = {few_1_##kind, few_2_##kind},
static few_fn *const few[4][FN_FEW_ROWS] = {FEW_ENTRIES(F32) FEW_ENTRIES(F16) FEW_ENTRIES(BF16)};

/*
 * Adds n terms, whole sums, to the sums of a tile: four rows, and as many columns as registers hold sums of. Steps lead from a row,
 * or a column, to the next one: of x in elements, of w in bytes. So many bytes ahead of w are fetched meanwhile.
 */
#if defined(MANY_REGISTERS)
enum { TILE_COLUMNS = 6 };
#define EACH_COLUMN(fn, r) fn(r, 0) fn(r, 1) fn(r, 2) fn(r, 3) fn(r, 4) fn(r, 5)
#else
enum { TILE_COLUMNS = 3 };
#define EACH_COLUMN(fn, r) fn(r, 0) fn(r, 1) fn(r, 2)
#endif
#define TILE_ARGUMENTS const float *x, int64_t x_step, const char *w, int64_t w_step, int64_t n, float *sums, int64_t ahead
FN_INLINE void add_tile(int kind, int fused, TILE_ARGUMENTS) {
    const int64_t size = kind == F32 ? 4 : 2;
    for (int lane = 0; lane < SUMS; lane += P_LANES, x += P_LANES, w += P_LANES * size, sums += P_LANES, ahead = 0) {
#define AT(r, c) (sums + ((r) * FN_PRODUCT_COLUMNS + (c)) * SUMS)
#define BEGIN(r, c) P s##r##c = p_load(F32, (const char *)AT(r, c));
#define BEGIN_ROW(r) EACH_COLUMN(BEGIN, r)
        EACH_ROW(BEGIN_ROW)
#define COLUMN(r, c)                                  \
    const char *const at##c = w + c * w_step + k * size; \
    FN_PREFETCH_2(at##c + ahead);                     \
    const P w##c = p_load(kind, at##c);
#define TERM(r, c) s##r##c = STEP(fused, x##r, w##c, s##r##c);
#define TERMS(r)                                                       \
    const P x##r = p_load(F32, (const char *)(x + r * x_step + k));    \
    EACH_COLUMN(TERM, r)
        for (int64_t k = 0; k < n; k += SUMS) {
            EACH_COLUMN(COLUMN, 0)
            EACH_ROW(TERMS)
        }
#define END(r, c) p_store(AT(r, c), s##r##c);
#define END_ROW(r) EACH_COLUMN(END, r)
        EACH_ROW(END_ROW)
#undef END_ROW
#undef END
#undef TERMS
#undef TERM
#undef COLUMN
#undef BEGIN_ROW
#undef BEGIN
#undef AT
    }
}
#define TILE(kind, fused) \
    static FN_NOINLINE void tile_##kind##_##fused(TILE_ARGUMENTS) { add_tile(kind, fused, x, x_step, w, w_step, n, sums, ahead); }
TILE(F32, 0) TILE(F32, 1) TILE(F16, 1) TILE(BF16, 1)
typedef void tile_fn(TILE_ARGUMENTS);
static tile_fn *const tiles[4][2] = {[F32] = {tile_F32_0, tile_F32_1}, [F16] = {NULL, tile_F16_1}, [BF16] = {NULL, tile_BF16_1}};
#else /* portable kernels: without a fused multiply-add that every compiler has */
enum { TILE_COLUMNS = 3 };
#define TILE_ARGUMENTS const float *x, int64_t x_step, const char *w, int64_t w_step, int64_t n, float *sums, int64_t ahead
FN_INLINE void add_tile(int fused, TILE_ARGUMENTS) {
    (void)ahead;
    for (int r = 0; r < 4; r++)
        for (int c = 0; c < TILE_COLUMNS; c++) {
            float *const restrict s = sums + (r * FN_PRODUCT_COLUMNS + c) * SUMS;
            const float *const restrict row = x + r * x_step, *const restrict column = (const float *)(const void *)(w + c * w_step);
            for (int64_t k = 0; k < n; k += SUMS) {
                /* double holds a product of 16-bit numbers, and its sum rounds to float as the fused operation (docs/spec.md) */
                FN_VECTORS()
                for (int j = 0; j < SUMS; j++)
                    s[j] = fused ? (float)((double)row[k + j] * column[k + j] + s[j]) : s[j] + row[k + j] * column[k + j];
            }
        }
}
static void tile_F32_0(TILE_ARGUMENTS) { add_tile(0, x, x_step, w, w_step, n, sums, ahead); }
static void tile_F32_1(TILE_ARGUMENTS) { add_tile(1, x, x_step, w, w_step, n, sums, ahead); }
typedef void tile_fn(TILE_ARGUMENTS);
static tile_fn *const tiles[4][2] = {[F32] = {tile_F32_0, tile_F32_1}};
#endif

/* A block of products: rows of x as float, in whole tiles, columns of the weight from this one on, and the sums. */
struct block {
    const struct fn_declared *job;
    int fused;
    int64_t padded, depth; /* elements of a row in whole sums, and how many of them stay in the first cache */
    const float *x;
    int64_t rows;
    const char *first;
    int64_t step;
    float *sums;
};

/* Adds terms [begin, end) of columns from c on, which lie at w, to their sums. */
static void add_terms_of_tiles(const struct block *b, int64_t begin, int64_t end, int c, int columns, int kind, const char *w, int64_t w_step,
                               int64_t ahead) {
    tile_fn *const add = tiles[kind][b->fused];
    for (int i = 0; i < columns; i += TILE_COLUMNS)
        for (int64_t m = 0; m < b->rows; m += 4)
            add(b->x + m * b->padded + begin, b->padded, w + i * w_step, w_step, end - begin, b->sums + (m * FN_PRODUCT_COLUMNS + c + i) * SUMS,
                m ? 0 : ahead);
}

/* Columns [c, end), whose terms from `begin` on are widened into memory at w: where tiles do not take them as they lie. */
static void add_widened(const struct block *b, int64_t begin, int c, int end, float *w) {
    const struct fn_operand *const weight = &b->job->operand[FN_LINEAR_WEIGHT];
    const int all = (int)fn_round_up(end - c, TILE_COLUMNS);
    const int64_t n = b->padded - begin;
    for (int i = 0; i < all; i++) {
        if (c + i < end) widen_terms(weight->kind, b->first + (c + i) * b->step, begin, b->job->hidden - begin, w + i * n);
        else memset(w + i * n, 0, (size_t)n * sizeof *w);
    }
    for (int64_t k = 0; k < n; k += b->depth)
        add_terms_of_tiles(b, begin + k, begin + (n - k < b->depth ? n : k + b->depth), c, all, F32, (const char *)(w + k),
                           n * (int64_t)sizeof *w, 0);
}

/* Products of rows [begin, end), at most FN_PRODUCT_ROWS, with columns [first, first + columns). */
static void block_of_products(struct block *b, int64_t begin, int64_t end, int64_t first, int columns, float *room) {
    const struct fn_declared *const job = b->job;
    const struct fn_operand *const weight = &job->operand[FN_LINEAR_WEIGHT];
    b->rows = fn_round_up(end - begin, 4);
    b->first = (const char *)weight->address + first * b->step;
    b->sums = room;
    float *const w = room + b->rows * FN_PRODUCT_COLUMNS * SUMS;
    memset(b->sums, 0, (size_t)(b->rows * FN_PRODUCT_COLUMNS * SUMS) * sizeof *b->sums);
    int c = 0;
#if defined(P_LANES) /* columns are taken as they lie in memory: it does not pay to widen them in advance, for 512 rows either */
    if (tiles[weight->kind][b->fused]) {
        c = columns / TILE_COLUMNS * TILE_COLUMNS;
        const int64_t whole = job->hidden / SUMS * SUMS, size = fn_element_size(weight->kind);
        for (int64_t k = 0; k < whole; k += b->depth)
            add_terms_of_tiles(b, k, whole - k < b->depth ? whole : k + b->depth, 0, c, (int)weight->kind, b->first + k * size, b->step,
                               TILE_COLUMNS * b->step);
        if (whole < job->hidden && c) add_widened(b, whole, 0, c, w);
    }
#endif
    if (c < columns) add_widened(b, 0, c, columns, w);
    float y[FN_PRODUCT_COLUMNS];
    for (int64_t m = begin; m < end; m++) {
        for (c = 0; c < columns; c++) y[c] = halve_sums_of_product(b->sums + ((m - begin) * FN_PRODUCT_COLUMNS + c) * SUMS);
        end_products(job, FN_LINEAR_BIAS, FN_LINEAR_OUT, m, first, columns, y);
    }
}

/* Rows [begin, end) as float, and rows of 0 up to a multiple of `tile`. */
static void widen_rows_of_products(const struct fn_declared *job, int64_t begin, int64_t end, int tile, float *x) {
    const int64_t padded = fn_product_padded(job), rows = fn_round_up(end - begin, tile);
    for (int64_t m = begin; m < end; m++)
        widen_terms(job->operand[FN_LINEAR_X].kind, fn_row_of(job, FN_LINEAR_X, m), 0, job->hidden, x + (m - begin) * padded);
    memset(x + (end - begin) * padded, 0, (size_t)((rows - (end - begin)) * padded) * sizeof *x);
}

#if defined(P_LANES)
/* Columns [begin, end) of one row or two. */
static void products_of_few_rows(const struct fn_declared *job, int64_t begin, int64_t end, float *x) {
    const struct fn_operand *const weight = &job->operand[FN_LINEAR_WEIGHT];
    const int rows = (int)job->rows;
    const int64_t step = fn_step(weight), padded = fn_product_padded(job);
    few_fn *const add = few[weight->kind][rows - 1];
    widen_rows_of_products(job, 0, rows, 1, x);
    float sums[FN_FEW_ROWS * SUMS], y[FN_FEW_ROWS][FN_PRODUCT_COLUMNS];
    for (int64_t first = begin; first < end; first += FN_PRODUCT_COLUMNS) {
        const int columns = (int)(end - first < FN_PRODUCT_COLUMNS ? end - first : FN_PRODUCT_COLUMNS);
        for (int c = 0; c < columns; c++) {
            add(x, padded, (const char *)weight->address + (first + c) * step, job->hidden, sums);
            for (int r = 0; r < rows; r++) y[r][c] = halve_sums_of_product(sums + r * SUMS);
        }
        for (int r = 0; r < rows; r++) end_products(job, FN_LINEAR_BIAS, FN_LINEAR_OUT, r, first, columns, y[r]);
    }
}
#endif

/* A product of float64 rows. */
static double product_of_doubles(const struct fn_declared *job, const char *x, const char *w, double *room) {
    const int64_t x_kind = job->operand[FN_LINEAR_X].kind, w_kind = job->operand[FN_LINEAR_WEIGHT].kind;
    double sums[SUMS] = {0}, *const other = room + FN_PRODUCT_DEPTH;
    for (int64_t k = 0; k < job->hidden; k += FN_PRODUCT_DEPTH) {
        const int n = (int)(job->hidden - k < FN_PRODUCT_DEPTH ? job->hidden - k : FN_PRODUCT_DEPTH);
        widen_double(x_kind, x, k, n, room);
        widen_double(w_kind, w, k, n, other);
        int i = 0;
        for (; i + SUMS <= n; i += SUMS)
            for (int j = 0; j < SUMS; j++) sums[j] += room[i + j] * other[i + j];
        for (int j = 0; i + j < n; j++) sums[j] += room[i + j] * other[i + j];
    }
    for (int half = SUMS / 2; half; half /= 2)
        for (int j = 0; j < half; j++) sums[j] += sums[j + half];
    return sums[0];
}
static void block_of_doubles(const struct fn_declared *job, int64_t begin, int64_t end, int64_t first, int columns, double *room) {
    const struct fn_operand *const o = job->operand;
    for (int64_t m = begin; m < end; m++) {
        double y[FN_PRODUCT_COLUMNS], bias[FN_PRODUCT_COLUMNS];
        if (o[FN_LINEAR_BIAS].kind) widen_double(o[FN_LINEAR_BIAS].kind, (const char *)o[FN_LINEAR_BIAS].address, first, columns, bias);
        for (int c = 0; c < columns; c++) {
            const char *const w = (const char *)o[FN_LINEAR_WEIGHT].address + (first + c) * fn_step(&o[FN_LINEAR_WEIGHT]);
            y[c] = product_of_doubles(job, fn_row_of(job, FN_LINEAR_X, m), w, room);
            if (o[FN_LINEAR_BIAS].kind) y[c] += bias[c];
        }
        narrow_double(o[FN_LINEAR_OUT].kind, y, columns, fn_row_of(job, FN_LINEAR_OUT, m), first);
    }
}

static void float_products(const struct fn_declared *job, int64_t begin, int64_t end, char *room) {
    const int64_t x_kind = job->operand[FN_LINEAR_X].kind, w_kind = job->operand[FN_LINEAR_WEIGHT].kind;
    const int fused = fn_element_size(x_kind) == 2 && fn_element_size(w_kind) == 2;
#if defined(P_LANES)
    if (!job->wide && job->rows <= (job->hidden <= FN_SHORT_ROW ? FN_FEW_ROWS : 1) && tiles[w_kind][fused]) {
        const int64_t columns = fn_product_columns(job), last = end * columns;
        products_of_few_rows(job, begin * columns, last < job->columns ? last : job->columns, (float *)(void *)room);
        return;
    }
#endif
    float *const x = (float *)(void *)room;
    struct block b = {.job = job, .fused = fused, .padded = fn_product_padded(job), .depth = fn_product_depth(job), .x = x,
                      .step = fn_step(&job->operand[FN_LINEAR_WEIGHT])};
    int64_t widened = -1;
    for (int64_t i = begin; i < end; i++) {
        const struct place at = place_of_block(job, i);
        if (job->wide) {
            block_of_doubles(job, at.begin, at.end, at.first, at.columns, (double *)(void *)room);
            continue;
        }
        if (widened != at.begin) widen_rows_of_products(job, at.begin, at.end, 4, x);
        widened = at.begin;
        block_of_products(&b, at.begin, at.end, at.first, at.columns, x + fn_round_up(at.end - at.begin, 4) * b.padded);
    }
}
