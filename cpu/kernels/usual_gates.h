/*
 * Gates of float whose exponentials need no care, as nearly all gates of a program are; included by gate_body.h. None is so
 * low that the function is the exponential itself. Then exp(-v) is a normal number, or so small that 1 + exp(-v) is 1, and
 * one factor 2^k is enough: the bits of activations.h by fewer operations. A NaN makes silu and gelu_tanh NaN as their
 * dividend; for sigmoids it is not usual.
 */

/* Below -LEAST_USUAL a gate may be low: gelu_tanh's v is below -80 from -9.67 down. From MOST_USUAL on, 1 + exp(-v) is 1. */
#define LEAST_USUAL(activation) ((activation) == FN_GELU_TANH ? 9.625f : 80.0f)
#define MOST_USUAL 80.0f

/*
 * The first half of exp(-v): what is left of v beside whole multiples k of ln 2, and 2^k, as a number that is added to the
 * bits. All signs are opposite to those of activations.h, which makes no difference to rounding. Two loops do the work:
 * from a load to the quotient an element takes so many steps that a processor's queues hold only a few vectors, which wait
 * for each other. One loop took a third longer on Zen 4.
 *
 * Returns whether all are usual. The bits of floats, as whole numbers, have the order of the floats; those of negative ones
 * grow with the magnitude as unsigned numbers; a NaN is beyond infinity. With `backward` no z may be large either, because
 * exp(-v) itself is multiplied then.
 */
FN_INLINE int reduce(int activation, float alpha, int backward, const float *restrict z, int n, float *restrict rest,
                     uint32_t *restrict power) {
    const uint32_t least = bits_of_f32(LEAST_USUAL(activation));
    uint32_t lowest = 0;
    int32_t greatest = 0;
    FN_VECTORS(reduction(max : lowest, greatest))
    for (int i = 0; i < n; i++) {
        float v = activation == SWISH ? alpha * z[i] : z[i];
        const int32_t bits = (int32_t)bits_of_f32(v), most = (int32_t)bits_of_f32(MOST_USUAL);
        if (backward) {
            greatest = (bits & 0x7fffffff) > greatest ? bits & 0x7fffffff : greatest;
        } else {
            lowest = (uint32_t)bits > lowest ? (uint32_t)bits : lowest;
            if (activation == FN_SIGMOID) greatest = bits > greatest ? bits : greatest;
        }
        if (activation == FN_GELU_TANH) v = argument_float(v);
        if (!backward) {
            const int32_t place = (int32_t)bits_of_f32(v);
            v = f32_of_bits((uint32_t)(place < most ? place : most));
        }
        const float shifted = v * -log2_e_float + rounder_float, k = shifted - rounder_float;
        rest[i] = (v + k * ln2_high_float) + k * ln2_low_float;
        power[i] = bits_of_f32(shifted) << 23;
    }
    if (backward) return greatest <= (int32_t)least;
    return lowest <= (0x80000000 | least) && greatest <= 0x7f800000;
}

/* exp(-v) of both halves. */
FN_INLINE float usual_exponential(float r, uint32_t power) {
    const float *const c = coefficients_float;
    const float square = r * r;
    float p = ((c[4] - c[5] * r) * square + (c[2] - c[3] * r)) * square + (c[0] - c[1] * r);
    return f32_of_bits(bits_of_f32(p * square - r + 1) + power);
}

/* One function with its constants; 0, if a gate is not usual. */
FN_INLINE int activate_usual_with(int activation, float alpha, const float *restrict z, int n, float *restrict f,
                                  float *restrict slope) {
    float rest[FN_GATE_TILE];
    uint32_t power[FN_GATE_TILE];
    if (!slope) {
        if (!reduce(activation, alpha, FN_FORWARD, z, n, rest, power)) return 0;
        FN_VECTORS()
        for (int i = 0; i < n; i++)
            f[i] = (activation == FN_SIGMOID ? 1 : z[i]) / (1 + usual_exponential(rest[i], power[i]));
        return 1;
    }
    if (!reduce(activation, alpha, FN_BACKWARD, z, n, rest, power)) return 0;
    FN_VECTORS()
    for (int i = 0; i < n; i++) {
        const float e = usual_exponential(rest[i], power[i]), s = 1 / (1 + e);
        f[i] = activation == FN_SIGMOID ? s : z[i] / (1 + e);
        slope[i] = f[i] * (e * s);
        if (activation == FN_GELU_TANH) slope[i] *= slope_of_argument_float(z[i]);
        if (activation == SWISH) slope[i] *= alpha;
        if (activation != FN_SIGMOID) slope[i] += s;
    }
    return 1;
}

/* activate_float for usual gates; 0, if some are not, having done nothing that counts. */
FN_ON_A_LINE
static FN_NOINLINE int activate_usual(int activation, const float *restrict z, int n, float *restrict f, float *restrict slope) {
    if (activation == FN_SILU) return activate_usual_with(FN_SILU, 1, z, n, f, slope);
    if (activation == FN_SIGMOID) return activate_usual_with(FN_SIGMOID, 1, z, n, f, slope);
    return activate_usual_with(FN_GELU_TANH, 1, z, n, f, slope);
}

/* The same of z * sigmoid(alpha * z), apart: in one function the loops of the others begin elsewhere and take longer. */
static FN_NOINLINE int activate_usual_swish(float alpha, const float *restrict z, int n, float *restrict f, float *restrict slope) {
    return activate_usual_with(SWISH, alpha, z, n, f, slope);
}
