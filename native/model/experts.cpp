// Mixtures of experts: a layer's router, the products of the experts that its tokens chose, and their sums.
//
// A pair's outputs depend on its token alone, and a token's pairs are summed in the router's order: neither the width, the
// batch nor a thread can show in them.
#include "model/experts.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/functions.h"
#include "model/run.h"
#include "runtime/denormals.h"

namespace outpace {

// Takes the keys of experts out of the choice whose groups are not among the best; ties go to the lower one.
void Routes::bar_groups(const Experts& e) {
    const size_t each = static_cast<size_t>(e.count / e.groups), groups = static_cast<size_t>(e.groups);
    std::vector<float> scores(groups);
    std::vector<size_t> order(groups);
    for (size_t g = 0; g < groups; ++g) {
        float first = -INFINITY, second = -INFINITY;
        for (size_t i = g * each; i < (g + 1) * each; ++i) {
            second = std::max(second, std::min(first, keys_[i]));
            first = std::max(first, keys_[i]);
        }
        scores[g] = e.best_two && each > 1 ? first + second : first;
        order[g] = g;
    }
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return scores[a] > scores[b]; });
    for (size_t k = static_cast<size_t>(e.used_groups); k < groups; ++k)
        std::fill_n(keys_.begin() + static_cast<std::ptrdiff_t>(order[k] * each), each, -INFINITY);
}

void Routes::choose(const Experts& e, const float* logits, int* chosen, float* weights) {
    const size_t count = static_cast<size_t>(e.count);
    values_.assign(logits, logits + count);
    for (size_t i = 0; i < e.router_bias.size(); ++i) values_[i] += e.router_bias[i];
    scores_ = values_;
    if (e.score == Score::Softmax) {
        const double top = *std::max_element(values_.begin(), values_.end());
        double total = 0.0;
        for (const float value : values_) total += exponential(value - top);
        for (size_t i = 0; i < count; ++i) scores_[i] = narrowed(exponential(values_[i] - top) / total);
    } else if (e.score == Score::Sigmoid) {
        for (size_t i = 0; i < count; ++i) scores_[i] = narrowed(logistic(values_[i]));
    }
    keys_ = scores_;
    for (size_t i = 0; i < e.choice_bias.size(); ++i) keys_[i] += e.choice_bias[i];
    if (e.used_groups < e.groups) bar_groups(e);
    double total = 0.0;
    for (int k = 0; k < e.used; ++k) {
        int best = -1;  // the lowest id on ties
        for (int i = 0; i < e.count; ++i)
            if (std::find(chosen, chosen + k, i) == chosen + k &&
                (best < 0 || keys_[static_cast<size_t>(i)] > keys_[static_cast<size_t>(best)]))
                best = i;
        chosen[k] = best;
        weights[k] = scores_[static_cast<size_t>(best)];
    }
    if (e.score == Score::OfChosen) {
        const double top = weights[0];
        for (int k = 0; k < e.used; ++k) weights[k] = narrowed(exponential(weights[k] - top));
    }
    for (int k = 0; k < e.used; ++k) total += weights[k];
    const double divisor = e.renormalise || e.score == Score::OfChosen ? std::max(total, static_cast<double>(e.least_total)) : 1.0;
    for (int k = 0; k < e.used; ++k) {
        weights[k] = narrowed(weights[k] / divisor * e.scale);
        if (!e.expert_scale.empty()) weights[k] = times(weights[k], e.expert_scale[static_cast<size_t>(chosen[k])]);
    }
    // A NaN must show, and comparisons pass over it.
    if (std::any_of(values_.begin(), values_.end(), [](float value) { return std::isnan(value); })) std::fill_n(weights, e.used, NAN);
}

void Routes::plan(const Experts& e, const float* logits, int stride, int n) {
    used_ = static_cast<size_t>(e.used);
    const size_t pairs = static_cast<size_t>(n) * used_;
    chosen_.resize(pairs);
    places_.resize(pairs);
    tokens_.resize(pairs);
    weights_.resize(pairs);
    shared_.assign(static_cast<size_t>(n), 1.0f);
    starts_.assign(static_cast<size_t>(e.count) + 1, 0);
    for (int t = 0; t < n; ++t) {
        const float* own = logits + static_cast<size_t>(t) * static_cast<size_t>(stride);
        choose(e, own, chosen_.data() + at(t, 0), weights_.data() + at(t, 0));
        if (e.router.rows > e.count) shared_[static_cast<size_t>(t)] = narrowed(logistic(own[e.count]));
    }
    for (const int expert : chosen_) ++starts_[static_cast<size_t>(expert) + 1];
    groups_.clear();
    for (int i = 0; i < e.count; ++i) {
        int &first = starts_[static_cast<size_t>(i)], &next = starts_[static_cast<size_t>(i) + 1];
        if (next > 0) groups_.push_back({i, first, next});
        next += first;
    }
    for (int t = 0; t < n; ++t)
        for (int k = 0; k < e.used; ++k) {
            const int place = starts_[static_cast<size_t>(chosen_[at(t, k)])]++;
            places_[at(t, k)] = place;
            tokens_[static_cast<size_t>(place)] = t;
        }
}

// What the router, the experts and the shared expert read of token t.
void Model::Run::encode_for_experts(const Seat& me, int t, const Layer& l) {
    const Experts& e = l.experts;
    if (e.norm.empty()) return encode_normed(me, t, n_, t, l.ffn_norm, {&l.gate, &l.up, &e.router, &e.gate, &e.up});
    encode_normed(me, t, n_, t, l.ffn_norm, {&l.gate, &l.up});
    encode_normed(me, t, n_, t, e.router_norm, {&e.router}, s_.router_in);
    encode_normed(me, t, n_, t, e.norm, {&e.gate, &e.up}, s_.expert_in);
}

// Inputs [groups][count] for products of `m`, of tokens `from` of the n that are encoded.
const uint8_t* Model::Run::gathered(const Seat& me, const Experts& e, const Matrix& m, const int* tokens, int count) {
    const uint8_t* all = (e.norm.empty() ? s_.in : s_.expert_in)[static_cast<size_t>(mine(me))].get(m.acts());
    if (count == n_) return all;  // tokens ascend
    uint8_t* to = s_.gathered[static_cast<size_t>(me.id)].get(m.acts());
    const size_t size = static_cast<size_t>(act_bytes(m.acts()));
    uint8_t* at = to;
    for (int g = 0; g < m.groups; ++g)
        for (int i = 0; i < count; ++i, at += size)
            std::memcpy(at, all + (static_cast<size_t>(g) * static_cast<size_t>(n_) + static_cast<size_t>(tokens[i])) * size, size);
    return to;
}

// One stretch of an expert's inner rows: gate and up, activation, encoded for its down product.
void Model::Run::expert_gate_up(const Seat& me, const Experts& e, const Routes& routes, const Routes::Group& group, int stretch) {
    constexpr int blocks = kGateRows / kRows;
    const int each = e.up.blocks / e.count, begin = stretch * blocks, end = std::min(begin + blocks, each), rows = (end - begin) * kRows;
    const int first_block = group.expert * each + begin, first_group = begin * kRows / kGroup, end_group = end * kRows / kGroup;
    const Acts acts = e.down.acts();
    uint8_t* middle = s_.pairs_in.get(acts) + static_cast<size_t>(group.first) * static_cast<size_t>(e.down.groups * act_bytes(acts));
    float* g = s_.pair[static_cast<size_t>(me.id)].get();
    float* u = g + static_cast<size_t>(kGateRows) * kGather;
    for (int first = 0; first < group.count; first += kGather) {
        const int count = std::min(kGather, group.count - first);
        const int* tokens = routes.tokens(group) + first;
        // The kernels write at row block * 16: shift the origin so that this stretch starts at the buffer's own.
        const auto product = [&](const Matrix& m, float* y) {
            k_.matmul(
                m, gathered(me, e, m, tokens, count), count, first_block, first_block + end - begin, y - first_block * kRows, kGateRows);
        };
        if (e.gate.data) product(e.gate, g);
        product(e.up, u);
        for (int i = 0; i < count; ++i) {
            float *values = g + i * kGateRows, *up = u + i * kGateRows;
            if (!e.gate_bias.empty()) k_.add(values, e.gate_bias.data() + first_block * kRows, rows);
            if (!e.up_bias.empty()) k_.add(up, e.up_bias.data() + first_block * kRows, rows);
            k_.gate(c_.activation, e.gate.data ? values : up, up, rows, values);
            k_.encode(acts, values, first_group, std::min(end_group, e.down.groups), middle, group.count, first + i);
            if (end == each && end_group < e.down.groups) {  // inputs that only pad the next product
                std::fill(up, up + kGateRows, 0.0f);
                for (int from = end_group; from < e.down.groups; from += kGateRows / kGroup)
                    k_.encode(acts, up, from, std::min(from + kGateRows / kGroup, e.down.groups), middle, group.count, first + i);
            }
        }
    }
}

void Model::Run::expert_down(const Experts& e, const Routes::Group& group, int stretch) {
    constexpr int blocks = kGateRows / kRows;
    const int each = e.down.blocks / e.count, begin = stretch * blocks, end = std::min(begin + blocks, each), origin = group.expert * each;
    const Acts acts = e.down.acts();
    const size_t first = static_cast<size_t>(group.first), stride = static_cast<size_t>(each) * kRows;
    k_.matmul(e.down, s_.pairs_in.get(acts) + first * static_cast<size_t>(e.down.groups * act_bytes(acts)), group.count, origin + begin,
        origin + end, s_.pairs.get() + first * stride - origin * kRows, static_cast<int64_t>(stride));
}

// The router and the shared expert's first products; the chosen experts' first ones; all second ones.
bool Model::Run::mixture(Seat& me, const Layer& l, int index) {
    const Experts& e = l.experts;
    share(me, kClaimRouter, index, e.router.blocks, [&](int begin, int end) {
        const ActBuffer& in = (e.norm.empty() ? s_.in : s_.router_in)[static_cast<size_t>(mine(me))];
        k_.matmul(e.router, in.get(e.router.acts()), n_, begin, end, s_.router.get(), e.router.out_padded());
    });
    if (e.shared > 0) gate_up(me, l, index);
    if (!meet(me)) return false;

    Routes& routes = m_.routes_[static_cast<size_t>(me.id)];
    routes.plan(e, s_.router.get(), e.router.out_padded(), n_);
    const std::vector<Routes::Group>& groups = routes.groups();
    if (me.rank == 0) result_.read_ += static_cast<int64_t>(groups.size());
    // work(group, stretch) on what no thread has claimed yet; an expert's stretches follow one another.
    const auto claim = [&](Claim phase, const Matrix& m, const auto& work) {
        const int stretches = (m.blocks / e.count * kRows + kGateRows - 1) / kGateRows;
        const int total = static_cast<int>(groups.size()) * stretches;
        std::atomic<int>& next = m_.claimed_[static_cast<size_t>(index) * kClaims + phase];
        for (int i; (i = next.fetch_add(1, std::memory_order_relaxed)) < total;)
            work(groups[static_cast<size_t>(i / stretches)], i % stretches);
    };
    claim(kClaimExperts, e.up, [&](const Routes::Group& group, int stretch) { expert_gate_up(me, e, routes, group, stretch); });
    if (!meet(me)) return false;
    clock(me, kGateUp);

    claim(kClaimExpertsDown, e.down, [&](const Routes::Group& group, int stretch) { expert_down(e, group, stretch); });
    if (e.shared > 0) down(me, l, index);
    if (!meet(me)) return false;
    clock(me, kDown);
    return true;
}

// What a mixture gives token t, in the thread's line: its experts' outputs in the router's order, then the shared expert's.
const float* Model::Run::mixed(const Seat& me, int t, const Layer& l) const {
    const Experts& e = l.experts;
    const Routes& routes = m_.routes_[static_cast<size_t>(me.id)];
    const size_t stride = static_cast<size_t>(e.down.blocks / e.count) * kRows;
    float* line = s_.line[static_cast<size_t>(me.id)].get();
    std::fill(line, line + c_.hidden, 0.0f);
    for (int k = 0; k < e.used; ++k) {
        const float* y = s_.pairs.get() + static_cast<size_t>(routes.place(t, k)) * stride;
        const float weight = routes.weight(t, k);
        if (e.down_bias.empty()) {
            for (int i = 0; i < c_.hidden; ++i) line[i] += times(weight, y[i]);
        } else {
            const float* bias = e.down_bias.data() + static_cast<size_t>(routes.expert(t, k)) * static_cast<size_t>(c_.hidden);
            for (int i = 0; i < c_.hidden; ++i) line[i] += times(weight, y[i] + bias[i]);
        }
    }
    if (!e.norm.empty()) k_.rmsnorm(line, e.post_norm.data(), c_.eps, c_.hidden, line);
    if (e.shared > 0) {
        const float* y = product_of(t, l.down);
        if (!e.norm.empty()) {
            float* other = line + round_up(c_.hidden, 64);
            k_.rmsnorm(y, e.shared_post_norm.data(), c_.eps, c_.hidden, other);
            y = other;
        }
        const float weight = routes.shared(t);
        for (int i = 0; i < c_.hidden; ++i) line[i] += times(weight, y[i]);
    }
    return line;
}

}  // namespace outpace
