/* Printed by fusednorm/calls/function_constants.py, which has the same numbers for Python and Triton. */
#ifndef FUSEDNORM_FUNCTION_CONSTANTS_H
#define FUSEDNORM_FUNCTION_CONSTANTS_H

enum { mantissa_float = 23, bias_float = 127 };
static const int32_t root_float = 0x3f3504f3;
static const float least_float = -110.0f;
static const float low_float = -80.0f;
static const float rounder_float = 0x1.8p+23f;
static const float log2_e_float = 0x1.715476p+0f;
static const float ln2_high_float = 0x1.62e4p-1f;
static const float ln2_low_float = 0x1.7f7d1cp-20f;
static const float reach_float = 13.1875f;
static const float density_float = 0x1.988454p-2f;
static const float flat_float = 10.0f;
static const float coefficients_float[] = {
    0.5f, 0x1.55553cp-3f, 0x1.5554f2p-5f, 0x1.1136aep-7f, 0x1.6d40a6p-10f, 0x1.6c3104p-13f
};
static const float numerator_float[] = {
    0.5f, 0x1.bce64cp-2f, 0x1.71644cp-3f, 0x1.44dc48p-5f, 0x1.040fb6p-8f
};
static const float denominator_float[] = {
    1.0f, 0x1.aab554p+0f, 0x1.30cfa4p+0f, 0x1.d8f9bp-2f, 0x1.972ef6p-4f, 0x1.45ef08p-7f
};
static const float tangent_float[] = {
    -0x1.555554p-2f, 0x1.111042p-3f, -0x1.b9d7aep-5f, 0x1.622538p-6f, -0x1.03f99ap-7f, 0x1.f4908ap-10f
};
static const float logarithm_float[] = {
    0x1.55555cp-1f, 0x1.997c3p-2f, 0x1.2ee61p-2f
};

enum { mantissa_double = 52, bias_double = 1023 };
static const int64_t root_double = 0x3fe6a09e667f3bcd;
static const double least_double = -760.0;
static const double low_double = -680.0;
static const double rounder_double = 0x1.8p+52;
static const double log2_e_double = 0x1.71547652b82fep+0;
static const double ln2_high_double = 0x1.62e42fefa38p-1;
static const double ln2_low_double = 0x1.ef35793c7673p-45;
static const double reach_double = 37.625;
static const double density_double = 0x1.9884533d43651p-2;
static const double flat_double = 20.0;
static const double coefficients_double[] = {
    0.5, 0x1.5555555555556p-3, 0x1.5555555555557p-5, 0x1.1111111110e61p-7, 0x1.6c16c16c156cdp-10, 0x1.a01a01a183f68p-13,
    0x1.a01a01ab4b9c3p-16, 0x1.71de34f283766p-19, 0x1.27e4d0cd3dd2bp-22, 0x1.ae7757c5bb063p-26, 0x1.1f849744516fbp-29,
    0x1.4816247897b6bp-33
};
static const double numerator_double[] = {
    0.5, 0x1.a695cc614ce9fp-1, 0x1.59e28fbe180a6p-1, 0x1.6aae56a1f9583p-2, 0x1.0b370da0cdae9p-3, 0x1.1fc2ca64de9cp-5,
    0x1.ca0c9f44be687p-8, 0x1.0a57ff14494c5p-10, 0x1.b2bdfec1cf8f9p-14, 0x1.c4bf808326fd9p-18, 0x1.ce4cd6f3470cdp-23
};
static const double denominator_double[] = {
    1.0, 0x1.396bfafff74e4p+1, 0x1.670454ae3ce44p+1, 0x1.fce9b81e3d8b3p+0, 0x1.f11d249f89feep-1, 0x1.60515c10d6bap-2,
    0x1.72f2aa28f8122p-4, 0x1.23476878a0fbep-6, 0x1.500766f505f7fp-9, 0x1.1100054519b63p-12, 0x1.1bb7bfb21aaa4p-16,
    0x1.21b4230e18e46p-21
};
static const double tangent_double[] = {
    -0x1.5555555555555p-2, 0x1.111111111101fp-3, -0x1.ba1ba1ba03fdep-5, 0x1.664f487b7c37ep-6, -0x1.226e3434333f1p-7,
    0x1.d6d397c6172ccp-9, -0x1.7d9fdd51d36fap-10, 0x1.353280941795ap-11, -0x1.f351c7b8d9d91p-13, 0x1.8b4d9f3447ab6p-14,
    -0x1.215cdb73c8b35p-15, 0x1.51282042d0b9ap-17, -0x1.b87709c583a0fp-20
};
static const double logarithm_double[] = {
    0x1.5555555555558p-1, 0x1.99999999952e2p-2, 0x1.2492492df148dp-2, 0x1.c71c62e5800a1p-3, 0x1.7462b4ab2ef6bp-3,
    0x1.39fe606542ddep-3, 0x1.2b584aae78a57p-3
};

#endif
