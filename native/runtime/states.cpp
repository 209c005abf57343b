#include "runtime/states.h"

#include <new>
#include <stdexcept>
#include <string>
#include <unordered_map>

namespace outpace {
namespace {

// On a cache line's boundary; what is in it is not set.
RecurrentStates::State state_of(size_t floats) {
    constexpr std::align_val_t line{64};
    auto* data = static_cast<float*>(::operator new(floats * sizeof(float), line));
    return {data, [](float* p) { ::operator delete(p, line); }};
}

}  // namespace

void Window::fit(const StateShape& s, int count) {
    const auto sized = [&](std::vector<float>& all, int before, int width) {
        const auto records = [&](int tokens) {
            return static_cast<size_t>(before + tokens) * static_cast<size_t>(s.layers) * static_cast<size_t>(width);
        };
        const size_t least = std::max(records(count), records(kLeastRoom));
        if (all.capacity() < records(count) || all.capacity() > 4 * least) {  // exactly: what it takes is counted
            std::vector<float> other;
            other.reserve(least);
            other.assign(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(std::min(all.size(), records(count))));
            all.swap(other);
        }
        all.resize(records(count));
    };
    count_ = count;
    sized(inputs_, s.taps - 1, s.channels());
    sized(keys_, 0, s.keys());
    sized(updates_, 0, s.values());
    sized(decays_, 0, s.value_heads);
}

void Window::move(const StateShape& s, int from, int to) {
    if (from == to) return;
    const auto copy = [&](std::vector<float>& all, int before, int width) {
        const size_t size = static_cast<size_t>(s.layers) * static_cast<size_t>(width);
        std::copy_n(all.data() + static_cast<size_t>(before + from) * size, size, all.data() + static_cast<size_t>(before + to) * size);
    };
    copy(inputs_, s.taps - 1, s.channels());
    copy(keys_, 0, s.keys());
    copy(updates_, 0, s.values());
    copy(decays_, 0, s.value_heads);
}

int RecurrentStates::sharers(const Row& row) const {
    return static_cast<int>(std::count_if(rows_.begin(), rows_.end(), [&](const Row& other) { return other.state == row.state; }));
}

std::deque<RecurrentStates::Snapshot>::const_iterator RecurrentStates::at_most(int row, int n) const {
    auto best = snapshots_.end();
    for (auto each = snapshots_.begin(); each != snapshots_.end(); ++each)
        if (each->row == row && each->base <= n && (best == snapshots_.end() || each->base > best->base)) best = each;
    return best;
}

bool RecurrentStates::drop_snapshot() {
    if (snapshots_.empty()) return false;
    snapshots_.pop_front();
    return true;
}

void RecurrentStates::clear(int row) {
    snapshots_.erase(
        std::remove_if(snapshots_.begin(), snapshots_.end(), [&](const Snapshot& each) { return each.row == row; }), snapshots_.end());
    if (static_cast<size_t>(row) < rows_.size()) rows_[static_cast<size_t>(row)] = Row{};
}

int RecurrentStates::reachable(int row, int n) const {
    const Row* r = find(row);
    if (!r || n >= r->base) return r ? n : 0;
    const auto snapshot = at_most(row, n);
    return snapshot == snapshots_.end() ? 0 : snapshot->base;
}

void RecurrentStates::truncate(int row, int n) {
    if (n == 0) return clear(row);
    Row& r = at(row);
    if (n < r.base) {
        const auto snapshot = at_most(row, n);
        r = Row{snapshot->base, snapshot->state, snapshot->window};
    } else if (n - r.base < r.window.count()) {
        r.window.fit(shape_, n - r.base);
    }
    snapshots_.erase(
        std::remove_if(snapshots_.begin(), snapshots_.end(), [&](const Snapshot& each) { return each.row == row && each.base > n; }),
        snapshots_.end());
}

void RecurrentStates::compact(int row, int start, const int32_t* keep, int n) {
    Row& r = at(row);
    const int first = start - r.base;
    for (int i = 0; i < n; ++i) r.window.move(shape_, first + keep[i], first + i);
    r.window.fit(shape_, first + n);
}

void RecurrentStates::fork(int src, int dst, int n) {
    if (n == 0) return clear(dst);
    at(std::max(src, dst));
    const Row& from = at(src);
    Row copy{from.base, from.state, from.window};
    if (n < from.base) {
        const auto snapshot = at_most(src, n);
        copy = Row{snapshot->base, snapshot->state, snapshot->window};
    }
    copy.window.fit(shape_, n - copy.base);
    at(dst) = std::move(copy);
    snap(dst, true);  // who begins like it may, too
}

int64_t RecurrentStates::fork_bytes(int src, int n) const { return n > 0 ? window_bytes(n - std::min(base(src), n)) : 0; }

void RecurrentStates::keep(int row) {
    for (Snapshot& each : snapshots_) each.kept = each.kept || (each.row == row && each.base == base(row));
}

void RecurrentStates::snap(int row, bool kept) {
    const Row& r = at(row);
    const auto there = at_most(row, r.base);
    if (!r.state || (there != snapshots_.end() && there->base == r.base)) return;
    Window tail = r.window;
    tail.fit(shape_, 0);
    snapshots_.push_back({row, r.base, kept, r.state, std::move(tail)});
    while (snapshot_bytes(false) > kSnapshots * shape_.bytes()) snapshots_.pop_front();
}

int64_t RecurrentStates::growth(int row, int64_t n, int64_t settled) const {
    if (n <= 0) return 0;
    const Row* r = find(row);
    const bool own = r && r->state && sharers(*r) == 1;
    return (own ? 0 : shape_.bytes()) + window_bytes(n - settled);  // beside the window that it has
}

int64_t RecurrentStates::bytes_for(int64_t positions) const { return positions > 0 ? shape_.bytes() + 2 * window_bytes(1) : 0; }

int64_t RecurrentStates::exclusive(const std::vector<int>& rows) const {
    std::unordered_map<const float*, long> seen;
    int64_t bytes = 0;
    for (const int row : rows) {
        const Row* r = find(row);
        if (!r) continue;
        bytes += r->window.bytes();
        if (r->state && ++seen[r->state.get()] == sharers(*r)) bytes += shape_.bytes();
    }
    return bytes;
}

int64_t RecurrentStates::bytes() const {
    std::vector<const float*> there;
    int64_t bytes = 0;
    for (const Row& row : rows_) {
        bytes += row.window.bytes();
        if (row.state) there.push_back(row.state.get());
    }
    std::sort(there.begin(), there.end());
    return bytes + (std::unique(there.begin(), there.end()) - there.begin()) * shape_.bytes();
}

int64_t RecurrentStates::snapshot_bytes(bool alone) const {
    std::vector<const float*> states;
    for (const Snapshot& each : snapshots_)
        if (!alone || std::none_of(rows_.begin(), rows_.end(), [&](const Row& row) { return row.state == each.state; }))
            states.push_back(each.state.get());
    std::sort(states.begin(), states.end());
    return (std::unique(states.begin(), states.end()) - states.begin()) * shape_.bytes();
}

int64_t RecurrentStates::spare_bytes() const {
    int64_t bytes = 0;
    for (const Snapshot& each : snapshots_) bytes += each.window.bytes();
    for (const std::shared_ptr<Window>& window : spare_) bytes += window->bytes();
    return bytes;
}

int RecurrentStates::length(int row) const {
    const Row* r = find(row);
    return r ? r->base + r->window.count() : 0;
}

void RecurrentStates::check(int row, int positions) const {
    const Row* r = find(row);
    const int base = r ? r->base : 0;
    if (length(row) != positions) throw std::logic_error("a row's recurrent state is not where its keys and values end");
    if (base > 0 && !r->state) throw std::logic_error("a row has lost its recurrent state");
    if (base == 0 && r && r->state) throw std::logic_error("a row without positions has a recurrent state");
}

std::vector<int> RecurrentStates::ends(int row) const {
    std::vector<int> found;
    if (const Row* r = find(row); r && r->state) found.push_back(r->base);
    for (const Snapshot& each : snapshots_)
        if (each.row == row) found.push_back(each.base);
    std::sort(found.begin(), found.end());
    found.erase(std::unique(found.begin(), found.end()), found.end());
    return found;
}

void RecurrentStates::give(int row, int n, float* to) const {
    const Row* r = find(row);
    const auto snapshot = at_most(row, n);
    const bool own = r && r->state && r->base == n;
    if (!own && (snapshot == snapshots_.end() || snapshot->base != n))
        throw std::invalid_argument("KV row " + std::to_string(row) + " has no recurrent state after " + std::to_string(n) + " positions");
    Window window = own ? r->window : snapshot->window;
    window.fit(shape_, 0);
    to = std::copy_n((own ? r->state : snapshot->state).get(), shape_.state(), to);
    std::copy_n(window.before(), Window::before_floats(shape_), to);
}

void RecurrentStates::take(int row, int n, const float* from) {
    Row taken{n, state_of(shape_.state()), {}};
    std::copy_n(from, shape_.state(), taken.state.get());
    taken.window.fit(shape_, 0);
    std::copy_n(from + shape_.state(), Window::before_floats(shape_), taken.window.before());
    at(row) = std::move(taken);
    snap(row, true);  // who begins like it may be forked there
}

RecurrentStates::Step RecurrentStates::begin(int row, int settled, int kept) {
    Row& r = at(row);
    Step step{row, &r.window, r.state.get(), nullptr, settled, kept, nullptr, nullptr};
    if (!spare_.empty()) {
        step.next = std::move(spare_.back());
        spare_.pop_back();
    } else {
        step.next = std::make_shared<Window>();
    }
    if (r.window.count() == 0 && r.base == 0) r.window.fit(shape_, 0);  // zeros before the first token
    step.next->fit(shape_, kept);
    if (r.window.count() + settled > 0) {
        step.state = r.state && r.state.use_count() == 1 ? r.state : state_of(shape_.state());
        step.to = step.state.get();
    }
    return step;
}

void RecurrentStates::end(Step& step) {
    Row& r = at(step.row);
    const bool went_on = r.reads;
    r.base += r.window.count() + step.settled;
    if (step.state) r.state = std::move(step.state);
    std::swap(r.window, *step.next);
    if (constexpr size_t most = 4; spare_.size() < most && step.next->bytes() <= window_bytes(0)) spare_.push_back(std::move(step.next));
    r.reads = step.settled > 0;
    if (!r.reads) return;
    // What a prompt's next part makes out of date: unless it is far from the one before.
    const auto last = went_on ? at_most(step.row, r.base - 1) : snapshots_.cend();
    if (last != snapshots_.cend() && !last->kept) {
        const auto before = at_most(step.row, last->base - 1);
        if (last->base - (before == snapshots_.cend() ? 0 : before->base) < kSnapshotEvery) snapshots_.erase(last);
    }
    snap(step.row);
}

}  // namespace outpace
