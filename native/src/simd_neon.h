// NEON of AArch64: 32 registers of 4 floats.
#pragma once
#include <arm_neon.h>

#include <cstdint>
#include <cstring>

namespace jaxmha {
namespace neon {

using Vector = float32x4_t;
using Lanes = uint32x4_t;
constexpr int W = 4;
constexpr int MR = 6, NR = 4;

inline Vector load(const float* p) { return vld1q_f32(p); }
inline void store(float* p, Vector x) { vst1q_f32(p, x); }
inline Vector set1(float x) { return vdupq_n_f32(x); }
inline Vector fma(Vector a, Vector b, Vector c) { return vfmaq_f32(c, a, b); }
inline Vector add(Vector a, Vector b) { return vaddq_f32(a, b); }
inline Vector sub(Vector a, Vector b) { return vsubq_f32(a, b); }
inline Vector mul(Vector a, Vector b) { return vmulq_f32(a, b); }
inline Vector div(Vector a, Vector b) { return vdivq_f32(a, b); }
inline Lanes less(Vector a, Vector b) { return vcltq_f32(a, b); }
inline Lanes is_zero(Vector x) { return vceqzq_f32(x); }
inline Vector select(Lanes m, Vector yes, Vector no) { return vbslq_f32(m, yes, no); }
// b where one is NaN, as on x86; vmaxq_f32 would return the NaN.
inline Vector max(Vector a, Vector b) { return select(less(b, a), a, b); }
inline Vector round(Vector x) { return vrndnq_f32(x); }
inline Vector scale_down(Vector p, Vector n) {
  const Lanes kept = vmvnq_u32(less(n, set1(-126.f)));  // NaN stays NaN
  const Lanes steps = vshlq_n_u32(vreinterpretq_u32_s32(vcvtnq_s32_f32(n)), 23);
  return vreinterpretq_f32_u32(vandq_u32(kept, vaddq_u32(vreinterpretq_u32_f32(p), steps)));
}
inline float sum(Vector x) { return vaddvq_f32(x); }
inline void store_sums(float* to, Vector a, Vector b, Vector c, Vector d) {
  store(to, vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d)));
}

// W bytes.
inline uint8x8_t load_bytes(const void* p) {
  uint32_t bytes;
  std::memcpy(&bytes, p, W);
  return vcreate_u8(bytes);
}
inline Lanes nonzero(const uint8_t* p) {
  const Lanes wide = vmovl_u16(vget_low_u16(vmovl_u8(load_bytes(p))));
  return vtstq_u32(wide, wide);
}

// W 16-bit numbers, and their conversions to float32.
using Halves = uint16x4_t;
inline Halves load_halves(const void* p) {
  uint64_t bits;
  std::memcpy(&bits, p, sizeof(bits));
  return vcreate_u16(bits);
}
inline Halves bytes_to_halves(const void* p) { return vget_low_u16(vmovl_u8(load_bytes(p))); }
inline Vector f16_to_f32(Halves x) { return vcvt_f32_f16(vreinterpret_f16_u16(x)); }
inline Vector bf16_to_f32(Halves x) {
  return vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(x), 16));
}
inline Vector s8_to_f32(const void* p) {
  const int16x4_t halves = vget_low_s16(vmovl_s8(vreinterpret_s8_u8(load_bytes(p))));
  return vcvtq_f32_s32(vmovl_s16(halves));
}
inline Halves e5m2_to_f16(Halves x) { return vshl_n_u16(x, 8); }
inline Halves e4m3_to_f16(Halves x) {
  const Halves most = vdup_n_u16(0x7f), size = vand_u16(x, most);
  const Halves sign = vshl_n_u16(vbic_u16(x, most), 8), nan = vceq_u16(size, most);
  return vorr_u16(vorr_u16(sign, nan), vshl_n_u16(size, 7));
}

inline Halves f32_to_f16(Vector x) { return vreinterpret_u16_f16(vcvt_f16_f32(x)); }
inline float from_f16(uint16_t x) { return vgetq_lane_f32(f16_to_f32(vdup_n_u16(x)), 0); }
inline uint16_t to_f16(float x) { return vget_lane_u16(f32_to_f16(set1(x)), 0); }
inline void from_f16x8(const uint16_t* from, float* to) {
  store(to, f16_to_f32(vld1_u16(from))), store(to + 4, f16_to_f32(vld1_u16(from + 4)));
}
inline void to_f16x8(const float* from, uint16_t* to) {
  vst1_u16(to, f32_to_f16(load(from))), vst1_u16(to + 4, f32_to_f16(load(from + 4)));
}

inline void transpose4(const float* from, long ld, float* to, long ldt) {
  const float32x4x2_t even = vtrnq_f32(load(from), load(from + ld));
  const float32x4x2_t odd = vtrnq_f32(load(from + 2 * ld), load(from + 3 * ld));
  for (int i = 0; i < 2; i++) {
    store(to + i * ldt, vcombine_f32(vget_low_f32(even.val[i]), vget_low_f32(odd.val[i])));
    store(to + (i + 2) * ldt, vcombine_f32(vget_high_f32(even.val[i]), vget_high_f32(odd.val[i])));
  }
}
inline void transpose8(const float* from, long ld, float* to, long ldt) {
  for (int i = 0; i < 8; i += 4)
    for (int j = 0; j < 8; j += 4) transpose4(from + i * ld + j, ld, to + j * ldt + i, ldt);
}
inline void and_transposed8(const uint8_t* from, long ld, uint8_t* to, long ldt) {
  uint8x8_t x[8];
  for (int i = 0; i < 8; i++) x[i] = vld1_u8(from + i * ld);
  for (int i = 0; i < 8; i += 2) {
    const uint8x8x2_t y = vtrn_u8(x[i], x[i + 1]);
    x[i] = y.val[0], x[i + 1] = y.val[1];
  }
  for (const int i : {0, 1, 4, 5}) {
    const auto y = vtrn_u16(vreinterpret_u16_u8(x[i]), vreinterpret_u16_u8(x[i + 2]));
    x[i] = vreinterpret_u8_u16(y.val[0]), x[i + 2] = vreinterpret_u8_u16(y.val[1]);
  }
  for (int i = 0; i < 4; i++) {
    const auto y = vtrn_u32(vreinterpret_u32_u8(x[i]), vreinterpret_u32_u8(x[i + 4]));
    x[i] = vreinterpret_u8_u32(y.val[0]), x[i + 4] = vreinterpret_u8_u32(y.val[1]);
  }
  for (int i = 0; i < 8; i++) vst1_u8(to + i * ldt, vand_u8(vld1_u8(to + i * ldt), x[i]));
}

}  // namespace neon
}  // namespace jaxmha
