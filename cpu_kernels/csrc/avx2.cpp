// The kernels for AVX2 and FMA; setup.py has the flags.
#include "decoder.h"
#include "delta_rule.h"
#include "quantize.h"
#include "sampler.h"
