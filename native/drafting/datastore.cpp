#include "drafting/datastore.h"

#include <algorithm>
#include <array>
#include <stdexcept>
#include <string>
#include <utility>

namespace outpace {

namespace {

// The end of a context, last token first.
struct Backwards {
    std::array<int32_t, Datastore::kDepth> tokens;
    int n;
};

// Keys [low, high) of the places that end like the last n tokens of a context.
std::pair<int64_t, int64_t> key_range(const Backwards& context, int n) {
    int64_t key = 0;
    for (int i = 0; i < n; ++i) key = key << Datastore::kBits | (static_cast<int64_t>(context.tokens[static_cast<size_t>(i)]) + 1);
    const int left = Datastore::kBits * (Datastore::kKeyed - n);
    return {key << left, (key + 1) << left};
}

// Whether the tokens before a position, read backwards, come before the context; both agree in what a key holds.
bool precedes(const Datastore::Segment& segment, int64_t position, const Backwards& context) {
    for (int i = Datastore::kKeyed; i < context.n; ++i) {
        const int64_t at = position - 1 - i;
        if (at < 0) return true;
        const int32_t token = segment.tokens[at], other = context.tokens[static_cast<size_t>(i)];
        if (token != other) return token < other;
    }
    return false;
}

// Of the places from `from` on the `most` of the longest matches; of equals the earlier.
void keep_longest(std::vector<Datastore::Place>& found, std::ptrdiff_t from, int most) {
    std::stable_sort(found.begin() + from, found.end(), [](const auto& a, const auto& b) { return a.length > b.length; });
    if (static_cast<std::ptrdiff_t>(found.size()) > from + most) found.erase(found.begin() + from + most, found.end());
}

// Adds the places of a segment whose neighbours in its order are nearest to where the context would stand.
void search(const Datastore::Segment& segment, const Backwards& context, int most, std::vector<Datastore::Place>& found) {
    const int64_t* end_of_keys = segment.keys + segment.places;
    int64_t begin = 0, end = 0, at = 0;
    for (int n = std::min(context.n, Datastore::kKeyed); n > 0 && begin == end; --n) {
        const auto [low, high] = key_range(context, n);
        begin = std::lower_bound(segment.keys, end_of_keys, low) - segment.keys;
        end = std::lower_bound(segment.keys + begin, end_of_keys, high) - segment.keys;
        at = (begin + end) / 2;
        if (n < Datastore::kKeyed) continue;
        int64_t first = begin, last = end;
        while (first < last) {
            const int64_t middle = (first + last) / 2;
            if (precedes(segment, std::min<int64_t>(std::max<int64_t>(segment.order[middle], 0), segment.size), context))
                first = middle + 1;
            else
                last = middle;
        }
        at = first;
    }
    const auto from = static_cast<int64_t>(found.size());
    for (int64_t i = std::max(begin, at - most); i < std::min(end, at + most); ++i) {
        const int64_t position = segment.order[i];
        if (position < 0 || position >= segment.size) continue;
        int length = 0;
        while (
            length < context.n && length < position && segment.tokens[position - 1 - length] == context.tokens[static_cast<size_t>(length)])
            ++length;
        found.push_back({&segment, position, length});
    }
    keep_longest(found, from, most);
}

}  // namespace

Datastore::Datastore(std::vector<Segment> segments, std::vector<const Mapped*> files, VoteRules rules, int32_t vocab)
    : segments_(std::move(segments)), files_(std::move(files)), rules_(std::move(rules)), vocab_(vocab) {
    if (rules_.weights.empty()) throw std::invalid_argument("weights must not be empty");
    if (vocab < 1) throw std::invalid_argument("a vocabulary of " + std::to_string(vocab) + " tokens is not possible");
    for (const Segment& segment : segments_)
        if (segment.size > INT32_MAX || segment.places > INT32_MAX)
            throw std::invalid_argument("a segment has more than 2147483647 tokens");
}

std::vector<Datastore::Place> Datastore::places(const int32_t* context, size_t n, int most) const {
    Backwards end{{}, static_cast<int>(std::min<size_t>(n, kDepth))};
    for (int i = 0; i < end.n; ++i) {
        const int32_t token = context[n - 1 - static_cast<size_t>(i)];
        if (token < 0 || token >= (1 << kBits) - 1) end.n = i;  // no key has it, so that nothing ends like more than this
        end.tokens[static_cast<size_t>(i)] = token;
    }
    std::vector<Place> found;
    for (const Segment& segment : segments_) search(segment, end, most, found);
    if (segments_.size() > 1) keep_longest(found, 0, most);
    return found;
}

Draft Datastore::propose(const int32_t* context, size_t n, int most, int least, int budget) const {
    if (most < 1) throw std::invalid_argument("places=" + std::to_string(most) + " is out of range: give at least 1");
    Mapped::guard();
    std::vector<Place> arena = places(context, n, most);
    const auto shorter = [least](const Place& place) { return place.length < least; };
    arena.erase(std::remove_if(arena.begin(), arena.end(), shorter), arena.end());
    const auto next = [this](const Place& place, const std::vector<int32_t>&) {
        if (place.at >= place.segment->size) return kEnd;
        const int32_t token = place.segment->tokens[place.at];
        return token >= 0 && token < vocab_ ? token : kEnd;
    };
    Draft tree = grow(arena, rules_, budget, true, next);
    for (const Mapped* file : files_)  // after the search: what it read was there
        if (file->torn()) throw std::runtime_error("a file of the datastore was cut short while it was open: build the datastore anew");
    return tree;
}

void RetrievalLookup::propose(const std::vector<Asked>& rows, std::vector<Draft>& trees) {
    trees.clear();
    Mapped::guard();
    for (const Asked& asked : rows) {
        const size_t n = std::min(asked.n, static_cast<size_t>(Datastore::kDepth));
        trees.push_back(store_.propose(asked.tokens + (asked.n - n), n, places_, least_, asked.size));
    }
}

}  // namespace outpace
