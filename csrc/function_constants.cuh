// Printed by fusednorm/calls/function_constants.py, which has the same numbers for Python and Triton.
#pragma once

constexpr int MANTISSA = IN_F64 ? 52 : 23;
constexpr Whole BIAS = IN_F64 ? 1023 : 127;
constexpr Whole ROOT = IN_F64 ? 0x3fe6a09e667f3bcd : 0x3f3504f3;
constexpr A LEAST = IN_F64 ? -760.0 : -110.0;
constexpr A LOW = IN_F64 ? -680.0 : -80.0;
constexpr A ROUNDER = IN_F64 ? 0x1.8p+52 : 0x1.8p+23;
constexpr A LOG2_E = IN_F64 ? 0x1.71547652b82fep+0 : 0x1.715476p+0;
constexpr A LN2_HIGH = IN_F64 ? 0x1.62e42fefa38p-1 : 0x1.62e4p-1;
constexpr A LN2_LOW = IN_F64 ? 0x1.ef35793c7673p-45 : 0x1.7f7d1cp-20;
constexpr A REACH = IN_F64 ? 37.625 : 13.1875;
constexpr A DENSITY = IN_F64 ? 0x1.9884533d43651p-2 : 0x1.988454p-2;
constexpr A FLAT = IN_F64 ? 20.0 : 10.0;
#define COEFFICIENTS_F32 \
    0.5f, 0x1.55553cp-3f, 0x1.5554f2p-5f, 0x1.1136aep-7f, 0x1.6d40a6p-10f, 0x1.6c3104p-13f
#define NUMERATOR_F32 \
    0.5f, 0x1.bce64cp-2f, 0x1.71644cp-3f, 0x1.44dc48p-5f, 0x1.040fb6p-8f
#define DENOMINATOR_F32 \
    1.0f, 0x1.aab554p+0f, 0x1.30cfa4p+0f, 0x1.d8f9bp-2f, 0x1.972ef6p-4f, 0x1.45ef08p-7f
#define TANGENT_F32 \
    -0x1.555554p-2f, 0x1.111042p-3f, -0x1.b9d7aep-5f, 0x1.622538p-6f, -0x1.03f99ap-7f, 0x1.f4908ap-10f
#define LOGARITHM_F32 \
    0x1.55555cp-1f, 0x1.997c3p-2f, 0x1.2ee61p-2f
#define COEFFICIENTS_F64 \
    0.5, 0x1.5555555555556p-3, 0x1.5555555555557p-5, 0x1.1111111110e61p-7, 0x1.6c16c16c156cdp-10, \
    0x1.a01a01a183f68p-13, 0x1.a01a01ab4b9c3p-16, 0x1.71de34f283766p-19, 0x1.27e4d0cd3dd2bp-22, \
    0x1.ae7757c5bb063p-26, 0x1.1f849744516fbp-29, 0x1.4816247897b6bp-33
#define NUMERATOR_F64 \
    0.5, 0x1.a695cc614ce9fp-1, 0x1.59e28fbe180a6p-1, 0x1.6aae56a1f9583p-2, 0x1.0b370da0cdae9p-3, \
    0x1.1fc2ca64de9cp-5, 0x1.ca0c9f44be687p-8, 0x1.0a57ff14494c5p-10, 0x1.b2bdfec1cf8f9p-14, 0x1.c4bf808326fd9p-18, \
    0x1.ce4cd6f3470cdp-23
#define DENOMINATOR_F64 \
    1.0, 0x1.396bfafff74e4p+1, 0x1.670454ae3ce44p+1, 0x1.fce9b81e3d8b3p+0, 0x1.f11d249f89feep-1, \
    0x1.60515c10d6bap-2, 0x1.72f2aa28f8122p-4, 0x1.23476878a0fbep-6, 0x1.500766f505f7fp-9, 0x1.1100054519b63p-12, \
    0x1.1bb7bfb21aaa4p-16, 0x1.21b4230e18e46p-21
#define TANGENT_F64 \
    -0x1.5555555555555p-2, 0x1.111111111101fp-3, -0x1.ba1ba1ba03fdep-5, 0x1.664f487b7c37ep-6, -0x1.226e3434333f1p-7, \
    0x1.d6d397c6172ccp-9, -0x1.7d9fdd51d36fap-10, 0x1.353280941795ap-11, -0x1.f351c7b8d9d91p-13, \
    0x1.8b4d9f3447ab6p-14, -0x1.215cdb73c8b35p-15, 0x1.51282042d0b9ap-17, -0x1.b87709c583a0fp-20
#define LOGARITHM_F64 \
    0x1.5555555555558p-1, 0x1.99999999952e2p-2, 0x1.2492492df148dp-2, 0x1.c71c62e5800a1p-3, 0x1.7462b4ab2ef6bp-3, \
    0x1.39fe606542ddep-3, 0x1.2b584aae78a57p-3
