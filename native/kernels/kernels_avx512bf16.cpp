// avx512, but for what multiplies pairs of bfloat16: only that is compiled again.
#define OUTPACE_AVX512
#define OUTPACE_NS isa_avx512bf16
#include "kernels/attention.h"
#include "kernels/matmul.h"

namespace outpace {
namespace OUTPACE_NS {

static void product_of(const Matrix& m, const uint8_t* acts, int n, int begin, int end, float* y, int64_t ldy) {
    if (m.format == Format::B16)
        product<Format::B16>(m, acts, n, begin, end, y, ldy);
    else
        kernels_avx512().matmul(m, acts, n, begin, end, y, ldy);
}

static void attention_of(const AttentionJob& job) {
    if (job.type == KVType::BF16)
        Attention<KVType::BF16>(job).run();
    else
        kernels_avx512().attention(job);
}

}  // namespace OUTPACE_NS

const Kernels& kernels_avx512bf16() {
    static const Kernels table = [] {
        Kernels t = kernels_avx512();
        t.name = "avx512-bf16";
        t.matmul = OUTPACE_NS::product_of;
        t.dot_pairs = OUTPACE_NS::dot_pairs_of;
        t.attention = OUTPACE_NS::attention_of;
        return t;
    }();
    return table;
}

}  // namespace outpace
