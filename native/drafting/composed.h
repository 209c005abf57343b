// Compositions: what several drafters propose for a row as one tree, under one budget.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "drafting/drafter.h"

namespace outpace {

class ComposedDrafter : public NativeDrafter {
public:
    struct Part {
        NativeDrafter* drafter;  // outlives the composition; null: it is Python's, and what it proposes is put into its slot
        bool fallback;           // asked only where the parts before it have proposed nothing
        bool draws;              // it samples under rejection; asked after all that do not
        bool stepwise;           // takes a forward of its own for every depth; asked after all that do not, of those that draw or do not
    };
    explicit ComposedDrafter(std::vector<Part> parts);

    // What the parts propose for rows in one step. Each part is asked once, in `order`. Where rows have a policy, a path counts
    // as much as drafts of its source have been worth, and stepwise parts go as deep as pays beside what the others have found.
    class Slots {
    public:
        Slots(const ComposedDrafter& composed, const std::vector<Asked>& rows);
        // The rows that a part is asked for, with the nodes that are left for it; `at`: their numbers.
        std::vector<Asked> wanted(size_t part, std::vector<size_t>& at);
        // A native part proposes for rows `at`, as `wanted` gave them. No memory for it: it proposes nothing.
        void ask(size_t part, const std::vector<Asked>& asked, const std::vector<size_t>& at);
        void put(size_t part, size_t row, Draft draft);  // parents first
        std::vector<Draft> merged();

    private:
        void weigh();
        void settle();

        const ComposedDrafter& composed_;
        std::vector<Asked> rows_;
        std::vector<std::vector<Draft>> drafts_;  // by row, then part
        std::vector<Draft> certain_;              // what the parts that do not draw come to, by row
        std::vector<int> left_;                   // nodes for the parts that draw, by row
        std::vector<int> depths_;                 // what a stepwise part took; 0: it was not asked
        bool weighed_ = false, settled_ = false;
    };

    const std::vector<Part>& parts() const { return parts_; }
    const std::vector<size_t>& order() const { return order_; }
    void propose(const std::vector<Asked>& rows, std::vector<Draft>& trees) override;  // where every part is native
    const std::vector<int>& hidden_layers() const override { return layers_; }
    bool stepwise() const override { return stepwise_; }
    bool observe(const std::vector<Final>& rows, const States& states) override;
    void read_ahead() override;
    int ranks() const override;
    void rank(int64_t row, const int32_t* tokens, size_t n, const int32_t* ids) override;

private:
    std::vector<Part> parts_;
    std::vector<size_t> order_;
    std::vector<int> layers_;
    bool draws_ = false, stepwise_ = false;
};

}  // namespace outpace
