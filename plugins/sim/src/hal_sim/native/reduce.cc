#include <algorithm>
#include <cstring>

#include "collectives.h"
#include "half.h"

namespace halsim {

namespace {

template <typename T>
T combine(T a, T b, Reduce how) {
  switch (how) {
    case Reduce::maximum: return std::max(a, b);
    case Reduce::minimum: return std::min(a, b);
    case Reduce::product: return static_cast<T>(a * b);
    default: return static_cast<T>(a + b);  // an average is divided at the end
  }
}

template <typename T>
void fold(void* into, const void* from, size_t count, Reduce how) {
  auto* a = static_cast<char*>(into);
  const auto* b = static_cast<const char*>(from);
  for (size_t i = 0; i < count; ++i) {
    T x, y;
    std::memcpy(&x, a + i * sizeof x, sizeof x);
    std::memcpy(&y, b + i * sizeof y, sizeof y);
    x = combine(x, y, how);
    std::memcpy(a + i * sizeof x, &x, sizeof x);
  }
}

template <float (*widen)(uint16_t), uint16_t (*narrow)(float)>
void fold_half(void* into, const void* from, size_t count, Reduce how) {
  auto* a = static_cast<uint16_t*>(into);
  const auto* b = static_cast<const uint16_t*>(from);
  for (size_t i = 0; i < count; ++i) a[i] = narrow(combine(widen(a[i]), widen(b[i]), how));
}

template <typename T>
void divide_all(void* data, size_t count, uint32_t by) {
  auto* a = static_cast<T*>(data);
  for (size_t i = 0; i < count; ++i) a[i] = static_cast<T>(a[i] / static_cast<T>(by));
}

}  // namespace

size_t type_bytes(Type type) {
  switch (type) {
    case Type::b8: case Type::u8: case Type::i8: return 1;
    case Type::u16: case Type::i16: case Type::f16: case Type::bf16: return 2;
    case Type::u32: case Type::i32: case Type::f32: return 4;
    case Type::c128: return 16;
    case Type::none: return 0;
    default: return 8;
  }
}

bool can_reduce(Type type) { return type > Type::none && type < Type::c64; }

void reduce_into(void* into, const void* from, size_t count, Type type, Reduce how) {
  switch (type) {
    case Type::b8: case Type::u8: return fold<uint8_t>(into, from, count, how);
    case Type::i8: return fold<int8_t>(into, from, count, how);
    case Type::u16: return fold<uint16_t>(into, from, count, how);
    case Type::i16: return fold<int16_t>(into, from, count, how);
    case Type::u32: return fold<uint32_t>(into, from, count, how);
    case Type::i32: return fold<int32_t>(into, from, count, how);
    case Type::u64: return fold<uint64_t>(into, from, count, how);
    case Type::i64: return fold<int64_t>(into, from, count, how);
    case Type::f32: return fold<float>(into, from, count, how);
    case Type::f64: return fold<double>(into, from, count, how);
    case Type::f16: return fold_half<widen_f16, narrow_f16>(into, from, count, how);
    case Type::bf16: return fold_half<widen_bf16, narrow_bf16>(into, from, count, how);
    default: return;
  }
}

void divide(void* data, size_t count, Type type, uint32_t by) {
  switch (type) {
    case Type::f32: return divide_all<float>(data, count, by);
    case Type::f64: return divide_all<double>(data, count, by);
    case Type::i32: return divide_all<int32_t>(data, count, by);
    case Type::i64: return divide_all<int64_t>(data, count, by);
    case Type::f16: case Type::bf16: {
      auto* a = static_cast<uint16_t*>(data);
      const bool half = type == Type::f16;
      for (size_t i = 0; i < count; ++i) {
        const float f = (half ? widen_f16(a[i]) : widen_bf16(a[i])) / static_cast<float>(by);
        a[i] = half ? narrow_f16(f) : narrow_bf16(f);
      }
      return;
    }
    default: return;
  }
}

}  // namespace halsim
