// The kernels for any processor of the platform; setup.py has the flags.
#include "decoder.h"
#include "delta_rule.h"
#include "quantize.h"
#include "sampler.h"
