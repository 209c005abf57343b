#include "model/fusion.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include "model/model.h"

namespace outpace {

Fusion::Fusion(Model& m, Matrix matrix, std::vector<std::vector<float>> norms) : matrix_(std::move(matrix)), norms_(std::move(norms)) {
    const auto wrong = [](const std::string& what) { throw std::invalid_argument("this is no learned drafter: " + what); };
    const int hidden = m.hidden();
    if (matrix_.rows != hidden || matrix_.cols % hidden != 0 || !matrix_.data)
        wrong("fc is " + std::to_string(matrix_.rows) + " x " + std::to_string(matrix_.cols) + " beside a hidden size of " +
              std::to_string(hidden));
    if (norms_.size() > 1 && norms_.size() != wide() / static_cast<size_t>(hidden))
        wrong("it has neither one norm for each layer nor one over all");
    for (const std::vector<float>& norm : norms_)
        if (norm.size() * norms_.size() != wide()) wrong("a norm of its layers has " + std::to_string(norm.size()) + " values");
    std::lock_guard<std::mutex> lock(m.lock());
    Scratch& s = m.scratch_;
    for (ActBuffer& in : s.in) in.need(matrix_.acts(), matrix_.groups);
    for (Buffer<float>& line : s.line) line.need(static_cast<size_t>(matrix_.in_padded()));
    fused_.need(static_cast<size_t>(kChunk) * static_cast<size_t>(matrix_.out_padded()));
}

void Fusion::run(Model& m, const float* hidden_states, int n, float* out) {
    std::vector<const float*> each;
    for (int t = 0; t < n; ++t) each.push_back(hidden_states + static_cast<size_t>(t) * wide());
    run(m, each, out);
}

void Fusion::run(Model& m, const std::vector<const float*>& hidden_states, float* out) {
    Pool& pool = m.runtime_->pool();
    const Kernels& k = m.kernels_;
    const int wide = matrix_.cols, padded = matrix_.out_padded(), hidden = m.weights_->config.hidden;
    for (size_t first = 0; first < hidden_states.size(); first += kChunk) {
        const int count = static_cast<int>(std::min<size_t>(kChunk, hidden_states.size() - first));
        const bool solo = count <= 2 && pool.size() > 1;  // as in Model::Run
        const auto body = [&](Seat& me) {
            uint8_t* in = m.scratch_.in[solo ? static_cast<size_t>(me.id) : 0].get(matrix_.acts());
            float* line = m.scratch_.line[static_cast<size_t>(me.id)].get();
            const Part part = solo ? Part{0, count} : me.of(count);
            for (int t = part.begin; t < part.end; ++t) {
                const float* from = hidden_states[first + static_cast<size_t>(t)];
                const int each = norms_.empty() ? 0 : wide / static_cast<int>(norms_.size());
                for (size_t i = 0; i < norms_.size(); ++i)
                    k.rmsnorm(from + i * static_cast<size_t>(each), norms_[i].data(), m.weights_->config.eps, each,
                        line + i * static_cast<size_t>(each));
                if (norms_.empty()) std::memcpy(line, from, static_cast<size_t>(wide) * 4);
                std::fill(line + wide, line + matrix_.in_padded(), 0.0f);
                k.encode(matrix_.acts(), line, 0, matrix_.groups, in, count, t);
            }
            if (!solo && !pool.meet(me)) return;
            const Part blocks = me.of(matrix_.blocks);
            if (blocks.begin < blocks.end) k.matmul(matrix_, in, count, blocks.begin, blocks.end, fused_.get(), padded);
        };
        pool.run(body, Pool::kDrafting, static_cast<double>(matrix_.bytes()));
        for (int t = 0; t < count; ++t)
            std::memcpy(out + (first + static_cast<size_t>(t)) * static_cast<size_t>(hidden),
                fused_.get() + static_cast<size_t>(t) * static_cast<size_t>(padded), static_cast<size_t>(hidden) * 4);
    }
}

}  // namespace outpace
