#include "model/draft_network.h"

#include <cstring>

namespace outpace {

DraftNetwork::DraftNetwork(std::shared_ptr<Model> model, Matrix fuse, std::vector<std::vector<float>> norms, std::vector<int32_t> tokens)
    : model_(std::move(model)),
      fuse_(std::move(fuse)),
      norms_(std::move(norms)),
      ranking_(std::move(tokens), model_->outputs(), model_->vocab(), model_->threads()) {
    const auto wrong = [](const std::string& what) { throw std::invalid_argument("this is no learned drafter: " + what); };
    const int hidden = model_->hidden();
    if (fuse_.data && (fuse_.rows != hidden || fuse_.cols % hidden != 0))
        wrong("fc is " + std::to_string(fuse_.rows) + " x " + std::to_string(fuse_.cols) + " beside a hidden size of " +
              std::to_string(hidden));
    if (norms_.size() > 1 && static_cast<int>(norms_.size()) != layers_read())
        wrong("it has neither one norm for each layer nor one over all");
    for (const std::vector<float>& norm : norms_)
        if (norm.size() * norms_.size() != wide()) wrong("a norm of its layers has " + std::to_string(norm.size()) + " values");
    if (!fuse_.data) return;
    std::lock_guard<std::mutex> lock(model_->lock());
    Scratch& s = model_->scratch_;
    s.need_in(fuse_);
    for (Buffer<float>& line : s.line) line.need(static_cast<size_t>(fuse_.in_padded()));
    fused_.need(static_cast<size_t>(kChunk) * static_cast<size_t>(fuse_.out_padded()));
}

std::vector<float> DraftNetwork::features(const std::vector<const float*>& hidden_states) {
    Model& m = *model_;
    Pool& pool = m.runtime_->pool();
    const size_t padded = static_cast<size_t>(fuse_.out_padded()), hidden = static_cast<size_t>(m.hidden());
    const size_t each = norms_.empty() ? 0 : wide() / norms_.size();
    std::vector<float> found;
    if (!fuse_.data) {
        found.resize(hidden_states.size() * hidden);
        for (size_t t = 0; t < hidden_states.size(); ++t)
            if (norms_.empty())
                std::copy_n(hidden_states[t], hidden, found.data() + t * hidden);
            else
                m.kernels_.rmsnorm(
                    hidden_states[t], norms_[0].data(), m.weights_->config.eps, static_cast<int>(hidden), found.data() + t * hidden);
        return found;
    }
    for (size_t first = 0; first < hidden_states.size(); first += kChunk) {
        const int count = static_cast<int>(std::min<size_t>(kChunk, hidden_states.size() - first));
        const bool solo = count <= kSolo && pool.size() > 1;  // as in Model::Run
        const auto body = [&](Seat& me) {
            uint8_t* in = m.scratch_.in[solo ? static_cast<size_t>(me.id) : 0].get(fuse_.acts());
            float* line = m.scratch_.line[static_cast<size_t>(me.id)].get();
            const Part part = solo ? Part{0, count} : me.of(count);
            for (int t = part.begin; t < part.end; ++t) {
                const float* from = hidden_states[first + static_cast<size_t>(t)];
                for (size_t i = 0; i < norms_.size(); ++i)
                    m.kernels_.rmsnorm(from + i * each, norms_[i].data(), m.weights_->config.eps, static_cast<int>(each), line + i * each);
                if (norms_.empty()) std::memcpy(line, from, wide() * 4);
                std::fill(line + wide(), line + fuse_.in_padded(), 0.0f);
                m.kernels_.encode(fuse_.acts(), line, 0, fuse_.groups, in, count, t);
            }
            if (!solo && !pool.meet(me)) return;
            const Part blocks = me.of(fuse_.blocks);
            if (blocks.begin < blocks.end) m.kernels_.matmul(fuse_, in, count, blocks.begin, blocks.end, fused_.get(), fuse_.out_padded());
        };
        pool.run(body, Pool::kDrafting, static_cast<double>(fuse_.bytes()));
        for (size_t t = 0; t < static_cast<size_t>(count); ++t)
            found.insert(found.end(), fused_.get() + t * padded, fused_.get() + t * padded + hidden);
    }
    return found;
}

}  // namespace outpace
