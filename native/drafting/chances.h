// How often drafted nodes are accepted, learned online: what a drafter's own confidence is worth.
//
// A node is *tried* when its parent was accepted (or is the pending token). The chance that a tried node is accepted is
// learned by source, kind of sampling, depth and the drafter's own conditional confidence, in buckets that all rows share
// and that forget. A drafter's own word is where a bucket starts.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <map>
#include <utility>

namespace outpace {

struct Chance {  // of nodes that are alike
    double accepted = 0.0, tried = 0.0;

    static constexpr double kStrength = 4.0;  // trials that a drafter's own word counts for
    static constexpr double kMemory = 400.0;  // trials that are remembered

    double given(double said) const { return (accepted + kStrength * said) / (tried + kStrength); }
    void learn(double good) {
        accepted = accepted * (1.0 - 1.0 / kMemory) + good;
        tried = tried * (1.0 - 1.0 / kMemory) + 1.0;
    }
};

class Chances {
public:
    static constexpr double kUnknown = 0.6;  // of a node whose drafter gives no confidence
    static constexpr int kLevels = 8;        // depths that are told apart where there is no confidence, and by `level`

    struct Table {  // of one source and kind of sampling
        std::array<std::array<Chance, 14>, 3> said;  // of first nodes, deeper ones, and second choices, by confidence
        std::array<Chance, kLevels> unsaid;
        std::array<Chance, kLevels> levels;  // that a draft goes on being accepted at a level: for whoever pays by the level
        double failed = 1.0, nats = 1.0;     // nodes, and -log of what their drafter said until they failed: decayed sums

        // A path's chance is what its drafter says of it to this power: less than 1 where it is too modest.
        double power() const { return std::min(std::max(failed / nats, 0.02), 4.0); }
        // The rate of a Poisson process that each node goes through for -log of what its drafter said; where in it a node
        // failed is not seen: what is expected of it counts (as in the EM algorithm).
        void learn(double said, bool good) {
            constexpr double keep = 1.0 - 1.0 / 200.0;
            const double its = -std::log(said), rate = power(), chance = std::exp(-rate * its);
            failed = failed * keep + !good, nats = nats * keep + (good ? its : 1.0 / rate - its * chance / (1.0 - chance));
        }
    };

    // `said`: the drafter's chance for the node, given its parent; negative: it gives none. `second`: a child after another.
    static Chance& of(Table& table, int depth, double said, bool second) {
        if (said < 0) return table.unsaid[static_cast<size_t>(std::min(depth, kLevels - 1))];
        static constexpr double edges[] = {0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.88, 0.94, 0.98};
        const auto at = std::upper_bound(std::begin(edges), std::end(edges), said) - std::begin(edges);
        return table.said[second ? 2 : depth > 0][static_cast<size_t>(at)];
    }

    Table& table(int source, int kind) { return tables_[{source, kind}]; }  // it never moves

    // Called once a step: what a bad spell taught fades, and is tried again.
    void tick() {
        if (++ticks_ % 64) return;
        const auto fade = [](auto& chances) {
            for (Chance& chance : chances) chance.accepted *= 0.98, chance.tried *= 0.98;
        };
        for (auto& [key, table] : tables_)
            fade(table.said[0]), fade(table.said[1]), fade(table.said[2]), fade(table.unsaid), fade(table.levels);
    }

private:
    std::map<std::pair<int, int>, Table> tables_;
    int64_t ticks_ = 0;
};

}  // namespace outpace
