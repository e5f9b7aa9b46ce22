// The kernels for AVX-512 with AMX; setup.py has the flags.
#include "decoder.h"
#include "delta_rule.h"
#include "quantize.h"
#include "sampler.h"
