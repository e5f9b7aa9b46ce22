// The activations of MLPs, for vectors.
#pragma once
#include "vector.h"

// Mirrors ACTIVATIONS in mlp.py.
enum class Activation : int64_t { kSilu, kGeluTanh, kGelu, kQuickGelu };

RAYLENS_INLINE Vec sigmoid(Vec x) { return 1.f / (exp(-x) + 1.f); }

// Returns erf x within 4e-7, by Eigen's rational approximation on [-4, 4]. Beyond, erf is 1 in float32.
RAYLENS_INLINE Vec erf(Vec x) {
  x = smaller(larger(x, all(-4.f)), all(4.f));
  Vec square = x * x;
  Vec p = polynomial(square, -2.72614225801306e-10f, 2.77068142495902e-08f, -2.10102402082508e-06f,
                     -5.69250639462346e-05f, -7.34990630326855e-04f, -2.95459980854025e-03f, -1.60960333262415e-02f);
  Vec q = polynomial(square, -1.45660718464996e-05f, -2.13374055278905e-04f, -1.68282697438203e-03f,
                     -7.37332916720468e-03f, -1.42647390514189e-02f);
  return x * p / q;
}

RAYLENS_INLINE Vec activate(Activation activation, Vec x) {
  switch (activation) {
    case Activation::kSilu:
      return x * sigmoid(x);
    case Activation::kGeluTanh:
      return x * 0.5f * (tanh(0.79788456080286536f * (x + 0.044715f * (x * x * x))) + 1.f);
    case Activation::kGelu:
      return x * 0.5f * (erf(x * 0.70710678118654752f) + 1.f);
    case Activation::kQuickGelu:
      return x * sigmoid(1.702f * x);
  }
  return x;
}
