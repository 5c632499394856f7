// float16 and bfloat16 to float and back, rounding to nearest even.
#pragma once
#include <cstdint>
#include <cstring>

namespace halsim {

inline float widen_bf16(uint16_t v) {
  const uint32_t bits = static_cast<uint32_t>(v) << 16;
  float f;
  std::memcpy(&f, &bits, sizeof f);
  return f;
}

inline uint16_t narrow_bf16(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, sizeof bits);
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>((bits >> 16) | 0x40);  // keep it a NaN
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline float widen_f16(uint16_t v) {
  const uint32_t sign = (v & 0x8000u) << 16, exponent = (v >> 10) & 0x1f, mantissa = v & 0x3ff;
  if (exponent == 0) {
    const float f = static_cast<float>(mantissa) / 16777216.0f;  // 2^-24 a unit
    return sign ? -f : f;
  }
  const uint32_t bits = sign | ((exponent == 31 ? 255 : exponent + 112) << 23) | (mantissa << 13);
  float f;
  std::memcpy(&f, &bits, sizeof f);
  return f;
}

inline uint16_t narrow_f16(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, sizeof bits);
  const auto sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
  const uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00);
  if (magnitude >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);
  if (magnitude < 0x38800000) {  // below the smallest normal number: count units of 2^-24
    float rest;
    std::memcpy(&rest, &magnitude, sizeof rest);
    rest = rest * 16777216.0f + 12582912.0f;  // adding 1.5 * 2^23 rounds to nearest even
    uint32_t units;
    std::memcpy(&units, &rest, sizeof units);
    return static_cast<uint16_t>(sign | (units & 0x7ff));
  }
  const uint32_t rounded = magnitude + 0xfff + ((magnitude >> 13) & 1);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000) >> 13));
}

}  // namespace halsim
