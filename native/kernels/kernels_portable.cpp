#define OUTPACE_PORTABLE
#define OUTPACE_NS isa_portable
#include "instantiate.h"

OUTPACE_TABLE(kernels_portable, "portable")
