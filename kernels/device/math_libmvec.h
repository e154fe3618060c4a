// The functions of C's <math.h> of which glibc has vectors, in libmvec, from 2.35 on: within 4 ulp, zeros, infinities and NaN as
// C has them, and whatever the other elements of a vector are. So declared, gcc calls the vectors where it vectorises a loop;
// glibc's headers declare them so for -ffast-math only, which would break NaN.
//
// The loader defines JITACT_LIBMVEC where it found that this file compiles to calls of vectors, alone, with JITACT_PROBE.
#pragma once

#define JITACT_VECTORS(name)                                                           \
  extern "C" __attribute__((simd("notinbranch"), const)) double name(double) noexcept; \
  extern "C" __attribute__((simd("notinbranch"), const)) float name##f(float) noexcept;
#define JITACT_VECTORS_2(name)                                                                 \
  extern "C" __attribute__((simd("notinbranch"), const)) double name(double, double) noexcept; \
  extern "C" __attribute__((simd("notinbranch"), const)) float name##f(float, float) noexcept;
#define JITACT_EACH_OF_LIBMVEC(f, f_2)                                                                             \
  f(acos) f(acosh) f(asin) f(asinh) f(atan) f(atanh) f(cbrt) f(cos) f(cosh) f(erf) f(erfc) f(exp2) f(log) f(log10) \
  f(log1p) f(log2) f(sin) f(sinh) f(tan) f_2(atan2) f_2(hypot) f_2(pow)

JITACT_EACH_OF_LIBMVEC(JITACT_VECTORS, JITACT_VECTORS_2)

#ifdef JITACT_PROBE
#define JITACT_LOOPS(name)                                                                        \
  void all_##name(double* x) { for (int i = 0; i < 64; i++) x[i] = name(x[i]); }                  \
  void all_##name(float* x) { for (int i = 0; i < 64; i++) x[i] = name##f(x[i]); }
#define JITACT_LOOPS_2(name)                                                                      \
  void all_##name(double* x, double y) { for (int i = 0; i < 64; i++) x[i] = name(x[i], y); }     \
  void all_##name(float* x, float y) { for (int i = 0; i < 64; i++) x[i] = name##f(x[i], y); }
JITACT_EACH_OF_LIBMVEC(JITACT_LOOPS, JITACT_LOOPS_2)
#endif

#undef JITACT_VECTORS
#undef JITACT_VECTORS_2
#undef JITACT_EACH_OF_LIBMVEC
