#define OUTPACE_PORTABLE
#define OUTPACE_NS isa_portable
#include "kernels/instantiate.h"

OUTPACE_TABLE(kernels_portable, "portable")
