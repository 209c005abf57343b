// What a learned drafter shares with its target: the embedding, the final norm and the head, computed as a forward does.
#include <algorithm>
#include <cstring>
#include <numeric>

#include "model/model.h"
#include "runtime/denormals.h"
#include "weights/pack.h"

namespace outpace {

void Model::embed(const int32_t* tokens, int n, float* out) const {
    const DenormalsAsZero mode;
    for (int t = 0; t < n; ++t, out += weights_->config.hidden) {
        unpack_row(weights_->embedding, tokens[t], out);
        if (weights_->config.embedding_scale != 1.0f)
            for (int i = 0; i < weights_->config.hidden; ++i) out[i] = times(out[i], weights_->config.embedding_scale);
    }
}

void Model::final_norm(const float* hidden, int n, float* out) const {
    const DenormalsAsZero mode;
    for (int t = 0; t < n; ++t, hidden += weights_->config.hidden, out += weights_->config.hidden)
        kernels_.rmsnorm(hidden, weights_->final_norm.data(), weights_->config.eps, weights_->config.hidden, out);
}

void Model::head(const float* normed, int n, const int32_t* ids, int count, float* out) {
    const DenormalsAsZero mode;
    std::vector<int> order(static_cast<size_t>(count));  // columns of `out` by the row block of the head that they need
    std::iota(order.begin(), order.end(), 0);
    const auto row = [ids](int column) { return ids ? ids[column] : column; };
    if (ids) std::sort(order.begin(), order.end(), [&](int a, int b) { return row(a) < row(b); });
    std::vector<int> firsts;  // where a new row block begins in `order`
    for (int i = 0; i < count; ++i)
        if (i == 0 || row(order[static_cast<size_t>(i)]) / kRows != row(order[static_cast<size_t>(i) - 1]) / kRows) firsts.push_back(i);
    const int blocks = static_cast<int>(firsts.size());
    firsts.push_back(count);
    uint8_t* in = scratch_.in[0].get(weights_->head.acts());
    for (int first = 0; first < n; first += kChunk) {
        const int width = std::min(kChunk, n - first);
        encode_rows(kernels_, weights_->head, normed + static_cast<size_t>(first) * weights_->config.hidden, width, in);
        float* to = out + static_cast<size_t>(first) * static_cast<size_t>(count);
        runtime_->pool().run([&](Seat& me) {
            const Part part = me.of(blocks);
            float* y = scratch_.pair[static_cast<size_t>(me.id)].get();  // [width][kRows]
            for (int b = part.begin; b < part.end; ++b) {
                const int begin = firsts[static_cast<size_t>(b)], end = firsts[static_cast<size_t>(b) + 1];
                const int block = row(order[static_cast<size_t>(begin)]) / kRows;
                // The kernels write at row block * 16: shift the origin so that this block starts at the buffer's own.
                kernels_.matmul(weights_->head, in, width, block, block + 1, y - block * kRows, kRows);
                if (weights_->config.logit_cap > 0.0f) kernels_.cap(y, width * kRows, weights_->config.logit_cap);
                for (int i = begin; i < end; ++i) {
                    const int column = order[static_cast<size_t>(i)], lane = row(column) % kRows;
                    for (int t = 0; t < width; ++t) to[static_cast<size_t>(t) * count + column] = y[t * kRows + lane];
                }
            }
        });
    }
}

}  // namespace outpace
