#include "drafting/recycling.h"

#include <algorithm>
#include <queue>
#include <stdexcept>
#include <tuple>
#include <utility>

namespace outpace {

RecyclingLookup::RecyclingLookup(int64_t capacity, std::vector<double> hit, bool shared)
    : capacity_(capacity), hit_(std::move(hit)), shared_(shared) {
    if (capacity_ < 1 || hit_.empty()) throw std::invalid_argument("capacity must be at least 1 and hit not empty");
}

const RecyclingLookup::Table* RecyclingLookup::find(int64_t row) const {
    const auto found = tables_.find(shared_ ? 0 : row);
    return found == tables_.end() ? nullptr : &found->second;
}

const int32_t* RecyclingLookup::list(const Table& table, int32_t token) const {
    const auto found = table.place.find(token);
    return found == table.place.end() ? nullptr : table.ids.data() + found->second * hit_.size();
}

Draft RecyclingLookup::draft(const Table& table, int32_t last, int budget) const {
    Draft tree;
    std::priority_queue<std::tuple<double, int, int32_t, int32_t>> queue;  // path probability, -order, parent, token
    int order = 0;
    const auto open = [&](int32_t token, int32_t parent, double probability) {
        const int32_t* ids = list(table, token);
        for (size_t r = 0; ids && r < hit_.size() && ids[r] >= 0; ++r) queue.emplace(probability * hit_[r], --order, parent, ids[r]);
    };
    open(last, -1, 1.0);
    while (!queue.empty() && static_cast<int>(tree.tokens.size()) < budget) {
        const auto [probability, unused, parent, token] = queue.top();
        queue.pop();
        open(token, tree.add(token, parent, probability), probability);
    }
    return tree;
}

void RecyclingLookup::propose(const std::vector<Asked>& rows, std::vector<Draft>& trees) {
    trees.clear();
    for (const Asked& asked : rows) {
        const Table* table = find(asked.row);
        trees.push_back(table ? draft(*table, asked.tokens[asked.n - 1], asked.size) : Draft());
    }
}

void RecyclingLookup::rank(int64_t row, const int32_t* tokens, size_t n, const int32_t* ids) {
    const size_t k = hit_.size();
    Table* table = &tables_[shared_ ? 0 : row];
    int64_t left = capacity_ - lists();
    for (size_t i = 0; i < n; ++i) {
        auto found = table->place.find(tokens[i]);
        if (found == table->place.end()) {
            if (left-- < 1) {  // the largest table starts anew
                const auto largest = std::max_element(tables_.begin(), tables_.end(),
                    [](const auto& a, const auto& b) { return a.second.place.size() < b.second.place.size(); });
                largest->second = Table();
                left = capacity_ - lists() - 1;
            }
            found = table->place.emplace(tokens[i], table->place.size()).first;
            table->ids.resize(table->ids.size() + k);
        }
        std::copy(ids + i * k, ids + (i + 1) * k, table->ids.begin() + static_cast<std::ptrdiff_t>(found->second * k));
    }
}

void RecyclingLookup::release(int64_t row) {
    if (!shared_) tables_.erase(row);
}

int64_t RecyclingLookup::lists() const {
    size_t sum = 0;
    for (const auto& [row, table] : tables_) sum += table.place.size();
    return static_cast<int64_t>(sum);
}

std::vector<int64_t> RecyclingLookup::rows() const {
    std::vector<int64_t> found;
    for (const auto& [row, table] : tables_)
        if (!shared_) found.push_back(row);
    return found;
}

std::vector<int32_t> RecyclingLookup::after(int64_t row, int32_t token) const {
    const Table* table = find(row);
    const int32_t* ids = table ? list(*table, token) : nullptr;
    return ids ? std::vector<int32_t>(ids, ids + hit_.size()) : std::vector<int32_t>();
}

}  // namespace outpace
