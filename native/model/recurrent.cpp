// Recurrent layers: short convolutions, which keep inputs alone; gated delta nets and state spaces, with their convolution and
// gates, and the states that a chunk's tokens go through.
//
// A value head's tiles are one thread's, and a tile is read and written once whatever the width: what the row keeps from the
// last forward is replayed, tokens that are sure are gone over, and those that may be taken back start from there, each node of a
// tree from its parent's tile, in tiles of the thread's own.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "kernels/functions.h"
#include "model/run.h"
#include "runtime/denormals.h"

namespace outpace {
namespace {

// log(1 + e^x)
double softplus(double x) { return x > 30.0 ? x : natural_log(1.0 + exponential(x)); }

}  // namespace

// Which of a row's new tokens settle as they are read: of a chain of which only the last one's output is wanted, or one that is
// too long to be kept, all but that one. Those are never taken back.
int Model::settled(const BatchView& batch, int row) const {
    const int begin = batch.starts[row], n = batch.starts[row + 1] - begin;
    bool chain = true;
    for (int i = 1; i < n && chain; ++i) chain = batch.parent[begin + i] == i - 1;
    const int32_t *wanted = std::lower_bound(batch.wanted, batch.wanted + batch.wanted_count, begin),
                  *end = batch.wanted + batch.wanted_count;
    const bool reads = chain && (wanted == end || *wanted >= begin + n - 1);
    if (reads || (chain && n > kPending)) return n - 1;
    if (n > kPending)
        throw std::invalid_argument("malformed batch: a tree of " + std::to_string(n) + " tokens is more than the " +
                                    std::to_string(kPending) + " that recurrent layers can take back");
    return 0;
}

// How many tokens from `first` on pass through the layers together: what a row may take back stays together.
int Model::pass(const BatchView& batch, int first) const {
    int count = std::min(kChunk, batch.tokens - first);
    if (!recurrent() || first + count == batch.tokens) return count;
    const int row = static_cast<int>(std::upper_bound(batch.starts, batch.starts + batch.rows + 1, first + count) - batch.starts) - 1;
    const int begin = batch.starts[row];
    return begin > first && settled(batch, row) == 0 ? begin - first : count;
}

void Model::begin_pass(const BatchView& batch, int first, int count) {
    recurrences_.clear();
    if (!recurrent()) return;
    parents_.assign(static_cast<size_t>(count), -1);
    slots_.assign(static_cast<size_t>(count), -1);
    std::vector<int> left(static_cast<size_t>(count)), free;  // children that are to come
    for (int b = 0; b < batch.rows; ++b) {
        const int begin = std::max(batch.starts[b], first), end = std::min(batch.starts[b + 1], first + count);
        if (begin >= end) continue;
        const int sure = std::min(batch.starts[b] + settled(batch, b), end) - begin;
        recurrences_.push_back({kv_.states().begin(batch.row[begin], sure, end - begin - sure), begin - first});
        const auto at = [&](int token) { return static_cast<size_t>(token - first); };
        for (int t = begin; t < end; ++t) {
            const int parent = batch.parent[t] < 0 ? -1 : batch.starts[b] + batch.parent[t];
            if (parent >= begin) parents_[at(t)] = parent - first;
            if (parent >= begin + sure) ++left[at(parent)];
        }
        // Tiles of a thread's own: a node's last child takes its parent's over; one without children needs none.
        free.clear();
        int tiles = 0;
        for (int t = begin + sure; t < end; ++t) {
            const int parent = parents_[at(t)], of_parent = parent < begin - first + sure ? -1 : slots_[static_cast<size_t>(parent)];
            const bool last = of_parent >= 0 && --left[static_cast<size_t>(parent)] == 0;
            if (left[at(t)] == 0) {
                if (last) free.push_back(of_parent);
            } else if (last) {
                slots_[at(t)] = of_parent;
            } else if (!free.empty()) {
                slots_[at(t)] = free.back();
                free.pop_back();
            } else {
                slots_[at(t)] = tiles++;
            }
        }
        for (Buffer<float>& own : scratch_.tiles)
            own.need(static_cast<size_t>(tiles) * static_cast<size_t>(kv_.states().shape().key_dim * kStateColumns));
    }
}

void Model::end_pass() {
    for (Recurrence& each : recurrences_) kv_.states().end(each.step);
    recurrences_.clear();
}

// Inputs of token t's convolution, the oldest first; `own` [tokens][stride]: those of this pass.
void Model::Run::taps(const float* own, size_t stride, int place, const Recurrence& of, int t, const float** inputs) const {
    const StateShape& shape = m_.kv_.states().shape();
    int token = t, before = of.step.window->count();
    for (int j = shape.taps - 1; j >= 0; --j) {
        if (token >= 0) {
            inputs[j] = own + static_cast<size_t>(token) * stride;
            token = m_.parents_[static_cast<size_t>(token)];
        } else {
            inputs[j] = of.step.window->inputs(shape, place, --before);
        }
    }
}

// Of channels [from, from + width): inputs that the next forward's first tokens read, of all that is kept, and of the last that
// is sure, or was before.
void Model::Run::remember(int place, const Recurrence& of, int t, const float* const* inputs, int from, int width) const {
    const StateShape& shape = m_.kv_.states().shape();
    const int keep = shape.taps - 1, index = t - of.first - of.step.settled;  // among those that are kept
    const auto put = [&](int token, const float* x) {
        std::memcpy(of.step.next->inputs(shape, place, token) + from, x + from, static_cast<size_t>(width) * 4);
    };
    if (index >= -keep) put(index, inputs[keep]);
    if (t == of.first)
        for (int j = 0; j < keep; ++j)
            if (const int token = index - keep + j; token >= -keep) put(token, inputs[j]);
}

// Convolutions of all heads, norms of queries and keys, a value head's rates; what the row is to keep of it.
void Model::Run::convolve(const Seat& me, const Layer& l, int place) {
    const DeltaNet& d = l.delta;
    const StateShape& shape = m_.kv_.states().shape();
    const int heads = 2 * d.key_heads + d.value_heads, channels = shape.channels(), keep = shape.taps - 1;
    const float* inputs[kMostTaps];
    const Part part = me.of(n_ * heads);
    const Recurrence* of = m_.recurrences_.data();
    for (int unit = part.begin; unit < part.end; ++unit) {
        const int t = unit / heads, head = unit % heads;
        while (t >= of->first + of->step.settled + of->step.kept) ++of;
        const int value = head - 2 * d.key_heads, width = value < 0 ? d.key_dim : d.value_dim;
        const int from = value < 0 ? head * d.key_dim : 2 * d.key_heads * d.key_dim + value * d.value_dim;
        taps(s_.q.get(), static_cast<size_t>(d.qkv.out_padded()), place, *of, t, inputs);
        remember(place, *of, t, inputs, from, width);
        Window& next = *of->step.next;
        const int index = t - of->first - of->step.settled;  // among those that are kept
        for (int j = 0; j <= keep; ++j) inputs[j] += from;
        float* out = s_.convolved.get() + static_cast<size_t>(t) * static_cast<size_t>(channels) + from;
        k_.convolve(inputs, d.convolution.data() + from, d.convolution_bias.empty() ? nullptr : d.convolution_bias.data() + from, channels,
            shape.taps, width, true, out);
        if (value < 0) {  // x / sqrt(sum of squares + 1e-6), queries times key_dim^-0.5
            const std::vector<float>& scale = head < d.key_heads ? m_.query_scale_ : m_.key_scale_;
            if (!d.scans()) k_.rmsnorm(out, scale.data(), 1e-6f / static_cast<float>(d.key_dim), d.key_dim, out);
            if (head >= d.key_heads && index >= 0)
                std::memcpy(next.keys(shape, place, index) + (head - d.key_heads) * d.key_dim, out, static_cast<size_t>(width) * 4);
            continue;
        }
        const auto at = static_cast<size_t>(value);
        const double a = times(product_in(s_.a, t, d.a)[value], d.step_scale), b = d.scans() ? a : product_in(s_.v, t, d.b)[value];
        const double step = softplus(a + static_cast<double>(d.dt_bias[at]));
        float* rates = s_.rates.get() + 2 * (static_cast<size_t>(t) * static_cast<size_t>(d.value_heads) + at);
        rates[0] = std::isnan(b) ? NAN : narrowed(d.scans() ? step : logistic(b));
        rates[1] = std::isnan(a) ? NAN : narrowed(exponential(static_cast<double>(d.decay[at]) * step));
        if (index >= 0) next.decays(shape, place, index)[value] = rates[1];
    }
}

// A value head of one row: its states, its tokens' outputs; of a delta net, these normed, gated and encoded for the product behind.
void Model::Run::go_over(const Seat& me, const Layer& l, int place, const Recurrence& of, int head) {
    const DeltaNet& d = l.delta;
    const StateShape& shape = m_.kv_.states().shape();
    const int key_head = d.tiled ? head % d.key_heads : head / (d.value_heads / d.key_heads);
    const int rows = d.key_dim, channels = shape.channels(), tokens = of.step.settled + of.step.kept;
    const size_t tile = static_cast<size_t>(rows) * kStateColumns;
    Window &before = *of.step.window, &next = *of.step.next;
    const float* zeros = s_.zeros.get();
    float* tiles = s_.tiles[static_cast<size_t>(me.id)].get();
    float unkept[kStateColumns];
    const auto step = d.scans() ? k_.scan_step : k_.delta_step;
    for (int column = 0; column < d.value_dim; column += kStateColumns) {
        const size_t place_of = static_cast<size_t>(place) * shape.layer() +
                                static_cast<size_t>(head) * static_cast<size_t>(d.value_dim) * rows +
                                static_cast<size_t>(column / kStateColumns) * tile;
        const float* state = of.step.from ? of.step.from + place_of : zeros;
        float* to = of.step.to ? of.step.to + place_of : nullptr;
        for (int i = 0; i < before.count(); ++i, state = to)
            k_.delta_replay(state, before.keys(shape, place, i) + key_head * rows,
                before.updates(shape, place, i) + head * d.value_dim + column, before.decays(shape, place, i)[head], rows, to);
        for (int i = 0; i < tokens; ++i) {
            const int t = of.first + i, kept = i - of.step.settled;
            const float* mixed = s_.convolved.get() + static_cast<size_t>(t) * static_cast<size_t>(channels);
            const float* rates = s_.rates.get() +
                                 2 * (static_cast<size_t>(t) * static_cast<size_t>(d.value_heads) + static_cast<size_t>(head));
            DeltaToken token{};
            token.query = mixed + key_head * rows;
            token.key = mixed + shape.keys() + key_head * rows;
            token.value = mixed + 2 * shape.keys() + head * d.value_dim + column;
            token.update = kept < 0 ? unkept : next.updates(shape, place, kept) + head * d.value_dim + column;
            token.out = s_.attended.get() + static_cast<size_t>(t) * static_cast<size_t>(shape.values()) + head * d.value_dim + column;
            token.beta = rates[0];
            token.decay = rates[1];
            token.skip = d.scans() ? d.skip[static_cast<size_t>(head)] : 0.0f;
            if (kept < 0) {
                step(token, state, rows, to);
                state = to;
                continue;
            }
            const int parent = m_.parents_[static_cast<size_t>(t)], slot = m_.slots_[static_cast<size_t>(t)];
            const float* from = parent < of.first + of.step.settled
                                    ? state
                                    : tiles + static_cast<size_t>(m_.slots_[static_cast<size_t>(parent)]) * tile;
            step(token, from, rows, slot < 0 ? nullptr : tiles + static_cast<size_t>(slot) * tile);
        }
    }
    if (d.scans()) return;
    const Acts acts = l.o.acts();
    uint8_t* encoded = s_.heads.get(acts);
    const int used = shape.values() / kGroup, groups = d.value_dim / kGroup;
    for (int t = of.first; t < of.first + tokens; ++t) {
        float* out = s_.attended.get() + static_cast<size_t>(t) * static_cast<size_t>(shape.values()) + head * d.value_dim;
        k_.rmsnorm(out, d.norm.data(), c_.eps, d.value_dim, out);
        k_.gate(Activation::Silu, product_in(s_.k, t, d.z) + head * d.value_dim, out, d.value_dim, out);
        k_.encode(acts, out, head * groups, (head + 1) * groups, encoded, n_, t);
        if (head == d.value_heads - 1 && used < l.o.groups) {  // inputs that only pad the product
            float* line = s_.line[static_cast<size_t>(me.id)].get();
            std::fill(line, line + (l.o.groups - used) * kGroup, 0.0f);
            k_.encode(acts, line, used, l.o.groups, encoded, n_, t);
        }
    }
}

// A state space's outputs, gated, normed group by group and encoded for the product behind.
void Model::Run::gate_scanned(const Seat& me, const Layer& l) {
    const DeltaNet& d = l.delta;
    const Matrix& o = l.recurrent_output();
    const int values = d.value_heads * d.value_dim, real = o.cols / d.value_heads, group = o.cols / d.key_heads;
    float* line = s_.line[static_cast<size_t>(me.id)].get();
    const Part part = me.of(n_);
    for (int t = part.begin; t < part.end; ++t) {
        float* out = s_.attended.get() + static_cast<size_t>(t) * static_cast<size_t>(values);
        float* z = s_.k.get() + static_cast<size_t>(t) * static_cast<size_t>(d.z.out_padded());
        for (int i = 0; i < values && d.gate_scale != 1.0f; ++i) z[i] = times(z[i], d.gate_scale);
        k_.gate(Activation::Silu, z, out, values, out);
        for (int head = 0; head < d.value_heads; ++head)
            std::memcpy(line + head * real, out + head * d.value_dim, static_cast<size_t>(real) * 4);
        for (int from = 0; from < o.cols && !d.norm.empty(); from += group)
            k_.rmsnorm(line + from, d.norm.data() + from, c_.eps, group, line + from);
        std::fill(line + o.cols, line + o.in_padded(), 0.0f);
        k_.encode(o.acts(), line, 0, o.groups, s_.heads.get(o.acts()), n_, t);
    }
}

bool Model::Run::short_conv(Seat& me, const Layer& l, int index) {
    const int place = m_.state_places_[static_cast<size_t>(index)], hidden = c_.hidden, taps_there = l.conv.taps;
    products(me, index, {{&l.conv.in, s_.q.get()}});
    if (!meet(me)) return false;
    clock(me, kQkv);

    Part part = me.of(n_);
    for (int t = part.begin; t < part.end; ++t) {
        const float *before = product_in(s_.q, t, l.conv.in), *x = before + 2 * hidden;
        float* own = s_.convolved.get() + static_cast<size_t>(t) * static_cast<size_t>(hidden);
        for (int i = 0; i < hidden; ++i) own[i] = times(before[i], x[i]);
    }
    if (!meet(me)) return false;
    clock(me, kRope);

    part = me.of(n_);
    const float* inputs[kMostTaps];
    const Recurrence* of = m_.recurrences_.data();
    float* line = s_.line[static_cast<size_t>(me.id)].get();
    for (int t = part.begin; t < part.end; ++t) {
        while (t >= of->first + of->step.settled + of->step.kept) ++of;
        taps(s_.convolved.get(), static_cast<size_t>(hidden), place, *of, t, inputs);
        remember(place, *of, t, inputs, 0, hidden);
        k_.convolve(inputs, l.conv.convolution.data(), nullptr, hidden, taps_there, hidden, false, line);
        const float* behind = product_in(s_.q, t, l.conv.in) + hidden;
        for (int i = 0; i < hidden; ++i) line[i] = times(behind[i], line[i]);
        std::fill(line + hidden, line + l.o.in_padded(), 0.0f);
        k_.encode(l.o.acts(), line, 0, l.o.groups, s_.heads.get(l.o.acts()), n_, t);
    }
    return true;
}

bool Model::Run::recurrence(Seat& me, const Layer& l, int index) {
    const DeltaNet& d = l.delta;
    const int place = m_.state_places_[static_cast<size_t>(index)];
    products(me, index, {{&d.qkv, s_.q.get()}, {&d.z, s_.k.get()}, {&d.b, s_.v.get()}, {&d.a, s_.a.get()}});
    if (!meet(me)) return false;
    clock(me, kQkv);

    convolve(me, l, place);
    if (!meet(me)) return false;
    clock(me, kRope);

    std::atomic<int>& next = m_.next_head_[static_cast<size_t>(index)];
    const int jobs = static_cast<int>(m_.recurrences_.size()) * d.value_heads;
    for (int job; (job = next.fetch_add(1, std::memory_order_relaxed)) < jobs;)
        go_over(me, l, place, m_.recurrences_[static_cast<size_t>(job / d.value_heads)], job % d.value_heads);
    if (!d.scans()) return true;
    if (!meet(me)) return false;
    gate_scanned(me, l);
    return true;
}

}  // namespace outpace
