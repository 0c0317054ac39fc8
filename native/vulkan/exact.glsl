// Arithmetic that Vulkan leaves to the device within bounds that are too wide here: sums and products are rounded correctly everywhere,
// quotients, sines and conversions to 16 bits are not.

// The difference between a and q * b: the product without its rounding error (Dekker 1971).
float left_over(float a, float q, float b) {
    const float SPLIT = 4097.0;
    precise float t = SPLIT * q, u = SPLIT * b;
    precise float q1 = t - (t - q), b1 = u - (u - b), q2 = q - q1, b2 = b - b1;
    precise float p = q * b;
    precise float error = ((q1 * b1 - p) + q1 * b2 + q2 * b1) + q2 * b2;
    precise float rest = (a - p) - error;
    return rest;
}

// a / b, correctly rounded, except for ties, which are next to impossible.
float divided(float a, float b) {
    precise float q = a / b;
    const bool is_plain = abs(q) > 1e-20 && abs(q) < 1e20 && abs(b) > 1e-18 && abs(b) < 1e18;
    precise float better = is_plain ? q + left_over(a, q, b) / b : q;
    return better;
}

// cos and sin of any angle. It is a whole number times a power of two, and its product with 2/pi is taken exactly as far as it matters:
// 64 bits after the point, and the quarter of a turn before it.
vec2 cos_sin(float x) {
    const uint bits = floatBitsToUint(x);
    const int shift = 150 - int(bits >> 23 & 255);  // x = mantissa / 2^shift
    const uint64_t mantissa = uint64_t(bits & 0x7fffff | 0x800000);
    const uint64_t high = mantissa * 0xa2f9836eul, low = mantissa * 0x4e44152aul;  // of the digits of 2/pi
    uint64_t whole = high + (low >> 32) >> 32, part = (high << 32) + low;
    if (shift > 0) {
        part = shift < 64 ? part >> shift | whole << (64 - shift) : shift < 128 ? whole >> (shift - 64) : 0ul;
        whole = shift < 64 ? whole >> shift : 0ul;
    } else if (shift < 0 && shift > -64) {
        whole = whole << -shift | part >> (64 + shift);
        part = part << -shift;
    }
    const int rounded = int(uint(part >> 32)), quarter = int(uint(whole)) + (rounded < 0 ? 1 : 0);
    const float r = float(rounded) * (1.5707963267948966 / 4294967296.0), z = r * r;
    // of the series of Taylor, enough terms for an eighth of a turn
    const float s = r + r * z * (-1.0 / 6.0 + z * (1.0 / 120.0 + z * (-1.0 / 5040.0 + z * (1.0 / 362880.0))));
    const float c = 1.0 + z * (-0.5 + z * (1.0 / 24.0 + z * (-1.0 / 720.0 + z * (1.0 / 40320.0 - z * (1.0 / 3628800.0)))));
    const int q = quarter & 3;
    const vec2 cs = q == 0 ? vec2(c, s) : q == 1 ? vec2(-s, c) : q == 2 ? vec2(-c, -s) : vec2(s, -c);
    return x < 0.0 ? vec2(cs.x, -cs.y) : cs;
}

// The nearest f16 number, ties to even.
uint to_half(float x) {
    const uint bits = floatBitsToUint(x), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    if (size > 0x7f800000) {
        return sign | 0x7e00;
    }
    const int exponent = int(size >> 23) - 112;  // as halves count it
    const int drop = exponent > 0 ? 13 : 14 - exponent;
    if (drop > 25) {
        return sign;
    }
    const uint mantissa = exponent > 0 ? size - (112u << 23) : size & 0x7fffff | 0x800000;
    const uint even = mantissa >> drop & 1;
    return sign | min(mantissa + (1u << (drop - 1)) - 1 + even >> drop, 0x7c00u);
}

uint to_bf16(float x) {
    const uint bits = floatBitsToUint(x);
    return (bits & 0x7fffffff) > 0x7f800000 ? bits >> 16 | 64 : bits + 0x7fff + (bits >> 16 & 1) >> 16;
}

// 2^x, to about 2e-4, and log2(x) as the CPU has them (../cpu/index.h): the same chunks are chosen, except at near ties.
float power_of_2(float x) {
    const float limited = max(x, -120.0), n = roundEven(limited), f = limited - n;
    const float p = ((f * 0.0558011 + 0.2401397) * f + 0.6931472) * f + 1.0;
    return uintBitsToFloat(floatBitsToUint(p) + (int(n) << 23));
}
float log_2(float x) {
    const int bits = floatBitsToInt(x), exponent = bits - 0x3f3504f3 >> 23;
    const float m = intBitsToFloat(bits - (exponent << 23)), z = divided(m - 1.0, m + 1.0), zz = z * z;
    return float(exponent) + 2.88539008 * z * ((((1.0 / 9.0 * zz + 1.0 / 7.0) * zz + 1.0 / 5.0) * zz + 1.0 / 3.0) * zz + 1.0);
}
