// The search of `retrieval` in a datastore's arrays, which drafters/lookup/datastore.py writes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "drafting/drafter.h"
#include "drafting/votes.h"
#include "runtime/mapped.h"

namespace outpace {

class Datastore {
public:
    static constexpr int kDepth = 16;  // tokens of a context that order the places
    static constexpr int kKeyed = 3, kBits = 21;  // tokens in a key; bits of each

    // Arrays of others, which must outlive the datastore. They may hold anything: what points outside is skipped, and a token
    // outside the vocabulary is an end.
    struct Segment {
        const int32_t* tokens;
        int64_t size;
        const int32_t* order;
        const int64_t* keys;
        int64_t places;  // in `order` and `keys`
    };
    struct Place {
        const Segment* segment;
        int64_t at;  // where what follows stands
        int length;  // of the match
    };

    // `files`: where the arrays lie, which must outlive the datastore; none: in memory. `vocab`: tokens that may be proposed are
    // below. Throws std::invalid_argument.
    Datastore(std::vector<Segment> segments, std::vector<const Mapped*> files, VoteRules rules, int32_t vocab);

    // At most `most` places that end like the context of `n` tokens, longest matches first.
    std::vector<Place> places(const int32_t* context, size_t n, int most) const;
    // The tree of what follows those with matches of at least `least` tokens. Throws std::runtime_error where a file was cut
    // short while it was open.
    Draft propose(const int32_t* context, size_t n, int most, int least, int budget) const;

private:
    std::vector<Segment> segments_;
    std::vector<const Mapped*> files_;
    VoteRules rules_;
    int32_t vocab_;
};

class RetrievalLookup : public NativeDrafter {
public:
    // The datastore must outlive it.
    RetrievalLookup(const Datastore& store, int places, int least) : store_(store), places_(places), least_(least) {}
    void propose(const std::vector<Asked>& rows, std::vector<Draft>& trees) override;

private:
    const Datastore& store_;
    int places_, least_;
};

}  // namespace outpace
