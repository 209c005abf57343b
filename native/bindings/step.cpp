// A step of rows that need no Python: drafts, the policy, one forward (with prompts' chunks beside them), verdicts, the
// rows' cache, and what their drafters hear of it. What engine/step.py and engine/verifier.py do is the reference, value for value; engine/native.py calls this.
//
// Between two forwards every line of code and data is cold, so what counts is how much different code runs.
#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <stdexcept>
#include <utility>
#include <vector>

#include <nanobind/stl/pair.h>

#include "bindings/bindings.h"
#include "bindings/step_drafts.h"
#include "model/walk.h"

namespace outpace {
namespace {

class Stepper {
public:
    // `target`: the source of tokens that no draft had. `taps`: layers that drafters read.
    Stepper(int layers, nb::str target, std::vector<int> taps) : layers_(layers), target_(std::move(target)), taps_(std::move(taps)) {}
    Stepper(const Stepper&) = delete;

    // rows: (StepRow, tokens, how many are committed, most nodes); chunks: (StepRow, tokens, where it begins, how many), at
    // least one token before the last one. policy: None, where every row gets as many nodes as it may.
    // A tuple for each row, threads, seconds of drafting, forward and verdicts, and whether all rows were decided.
    nb::tuple step(Model& model, const nb::object& policy, const nb::list& rows, const nb::list& chunks) {
        const auto begun = Clock::now();
        model_ = &model;
        result_.reset();
        states_.reset();
        struct Given {  // the rows' tokens, whatever happens
            std::deque<RowNow>& rows;
            ~Given() {
                for (RowNow& now : rows) now.tokens.reset();
            }
        } const given{rows_};
        drafts_.take(rows);
        const int64_t prefill = take(chunks);
        try {
            drafts_.draft(policy, model.vocab(), prefill);
        } catch (const nb::python_error&) {
            throw;
        } catch (const std::exception& error) {
            throw DraftFault(error.what());
        }
        const auto drafted = Clock::now();
        Clock::time_point computed;
        {
            nb::gil_scoped_release release;
            forward();
            computed = Clock::now();
            verify();
        }
        const nb::tuple said = outcome(drafted - begun, computed - drafted, Clock::now() - computed);
        if (decided_) result_.reset();  // its logits' memory is the next forward's
        return said;
    }

    // What the policy makes of the step that was: seconds that drafting took, and all else.
    void learn(double draft, double body) {
        if (BoundPolicy* policy = drafts_.policy()) policy->policy().learn(accepted_.data(), path_.data(), static_cast<size_t>(kept().width), {draft, body});
    }

    // The last step's drafts before and after the policy, its verdicts and decisions, as the arrays of Drafts and Verdicts,
    // and where rows and chunks were packed.
    nb::tuple record() const {
        nb::list decisions;
        const BoundPolicy* policy = drafts_.policy();
        for (size_t i = 0; policy && i < rows_.size(); ++i) decisions.append(policy->decision(i));
        const auto b = static_cast<Py_ssize_t>(rows_.size()), w = static_cast<Py_ssize_t>(kept().width);
        const nb::tuple verdicts = nb::make_tuple(filled(IntArray({b, w + 1}), gained_), filled(IntArray({b}), accepted_),
                                                  filled(IntArray({b, w}), path_));
        return nb::make_tuple(drafts_.before(), drafts_.after(), verdicts, policy ? nb::object(decisions) : nb::none(),
                              filled(IntArray({static_cast<Py_ssize_t>(starts_.size())}), starts_));
    }

    // The drafters of rows hear what became final: (row of the step, how many of its verdict's tokens), where rows of chunks
    // follow those that decode, and have all their tokens. Throws what they throw.
    void observe(const std::vector<std::pair<int, int>>& rows) {
        if (!states_) throw std::invalid_argument("the last step kept no hidden states, or rows of it were undecided");
        std::map<Lookup*, std::vector<Final>> heard;
        for (const auto& [row, count] : rows) {
            const auto i = static_cast<size_t>(row), b = rows_.size();
            if (row < 0 || i >= b + chunks_.size()) throw std::invalid_argument("no row of the last step");
            const StepRow& its = i < b ? *rows_[i].its : *chunks_[i - b].its;
            const int most = i < b ? accepted_[i] + 1 : static_cast<int>(chunks_[i - b].count());
            if (!reads(its) || count < 1 || count > most || (i >= b && count < most)) throw std::invalid_argument("no tokens that a row of the last step gained");
            heard[its.lookup].push_back(i < b ? gained(i, count) : written(i - b));
        }
        for (const auto& [lookup, its] : heard) {
            if (!lookup->observe(its, {states_.get(), taps_})) continue;
            nb::gil_scoped_release release;  // only for forwards: a server's event loop keeps it for milliseconds
            lookup->read_ahead();
        }
    }

    // The forward's result, where some row was left undecided.
    std::unique_ptr<Result> result() {
        if (!result_) throw std::invalid_argument("every row of the last step was decided");
        return std::move(result_);
    }

private:
    using Clock = std::chrono::steady_clock;

    const Nodes& kept() const { return drafts_.kept(); }
    static bool reads(const StepRow& its) { return its.lookup && !its.lookup->taps().empty(); }

    // The step's chunks; how many tokens they have.
    int64_t take(const nb::list& chunks) {
        chunks_.clear();
        int64_t sum = 0;
        for (const nb::handle one : chunks) {
            const nb::tuple given = nb::borrow<nb::tuple>(one);
            const StepRow& its = StepDrafts::row_of(given);
            const IntView tokens(nb::handle(given[1]).ptr());
            const long first = whole(nb::handle(given[2]).ptr()), count = whole(nb::handle(given[3]).ptr());
            if (first < 0 || count < 1 || first + count >= tokens.size()) throw std::invalid_argument("a chunk is out of range");
            chunks_.push_back({&its, static_cast<int32_t>(first), {tokens.data() + first, tokens.data() + first + count + 1}});
            sum += count;
        }
        return sum;
    }

    // What became final of row i: the first `count` tokens of its verdict.
    Final gained(size_t i, int count) const {
        const size_t w = static_cast<size_t>(kept().width);
        Final final{rows_[i].its->row, static_cast<int>(rows_[i].length) - 1, {}, {}};
        for (int n = 0; n < count; ++n) {
            const int32_t slot = n ? path_[i * w + static_cast<size_t>(n) - 1] + 1 : 0;
            final.tokens.push_back(gained_[i * (w + 1) + static_cast<size_t>(n)]);
            final.places.push_back(places_[static_cast<size_t>(starts_[i] + slot)]);
        }
        return final;
    }

    // What became final of chunk j.
    Final written(size_t j) const {
        const ChunkNow& chunk = chunks_[j];
        const auto from = places_.begin() + starts_[rows_.size() + j];
        return {chunk.its->row, chunk.first, {chunk.tokens.begin() + 1, chunk.tokens.end()}, {from, from + static_cast<std::ptrdiff_t>(chunk.count())}};
    }

    // Pending tokens with their drafts, then chunks, packed and run.
    void forward() {
        const Nodes& nodes = kept();
        const auto asked = static_cast<size_t>(std::accumulate(nodes.widths.begin(), nodes.widths.end(), 0)) + rows_.size();
        size_t n = asked;
        for (const ChunkNow& chunk : chunks_) n += chunk.count();
        token_.resize(n), row_.resize(n), position_.resize(n), parent_.resize(n), wanted_.resize(asked);
        std::iota(wanted_.begin(), wanted_.end(), 0);
        starts_.assign(1, 0);
        size_t at = 0;
        for (size_t i = 0; i < rows_.size(); ++i) {
            const auto pending = static_cast<int32_t>(rows_[i].length) - 1;
            const size_t first = at, from = nodes.at(i);
            token_[at] = rows_[i].pending, row_[at] = rows_[i].its->row, position_[at] = pending, parent_[at] = -1;
            ++at;
            for (size_t k = 0; k < static_cast<size_t>(nodes.widths[i]); ++k, ++at) {
                const int32_t above = nodes.parents[from + k] + 1;
                token_[at] = nodes.tokens[from + k], row_[at] = rows_[i].its->row, parent_[at] = above;
                position_[at] = position_[first + static_cast<size_t>(above)] + 1;
            }
            starts_.push_back(static_cast<int32_t>(at));
        }
        for (const ChunkNow& chunk : chunks_) {
            for (size_t k = 0; k < chunk.count(); ++k, ++at) {
                const auto place = static_cast<int32_t>(k);
                token_[at] = chunk.tokens[k], row_[at] = chunk.its->row, position_[at] = chunk.first + place, parent_[at] = place - 1;
            }
            starts_.push_back(static_cast<int32_t>(at));
        }
        tapped_.clear();
        for (const RowNow& row : rows_) tapped_.push_back(reads(*row.its));
        for (const ChunkNow& chunk : chunks_) tapped_.push_back(reads(*chunk.its));
        const bool any = std::any_of(tapped_.begin(), tapped_.end(), [](uint8_t tapped) { return tapped; });
        const BatchView batch{static_cast<int>(n), static_cast<int>(tapped_.size()), static_cast<int>(asked), token_.data(), row_.data(), position_.data(),
                              parent_.data(), starts_.data(), wanted_.data(), any ? taps_ : std::vector<int>(), layers_, tapped_.data(), nullptr};
        std::lock_guard<std::mutex> lock(model_->lock());
        result_ = model_->forward(batch);
        threads_ = result_->threads;
    }

    // Verdicts, and what they leave in the cache. A row whose cache cannot be settled is left to `step.settle`, which says why.
    void verify() {
        const Nodes& nodes = kept();
        const size_t b = rows_.size(), w = static_cast<size_t>(nodes.width);
        gained_.assign(b * (w + 1), 0);
        accepted_.assign(b, -1);
        path_.assign(b * w, 0);
        choosers_.resize(b);
        int sampled = 0;
        for (size_t i = 0; i < b; ++i) {
            choosers_[i].sampling = rows_[i].its->sampling;
            choosers_[i].sampling.index = static_cast<uint32_t>(static_cast<int64_t>(rows_[i].length) - rows_[i].its->prompt);
            sampled += choosers_[i].sampling.temperature != 0.0;
        }
        decide_all(result_->runtime.get(), static_cast<int>(b), sampled, [&](int row, Workspace& workspace) {
            const auto i = static_cast<size_t>(row);
            accepted_[i] = walk(*result_, starts_[i], nodes.tokens.data() + nodes.at(i), nodes.chains ? nullptr : nodes.parents.data() + nodes.at(i),
                                nodes.widths[i], choosers_[i].sampling.temperature != 0.0 ? &choosers_[i] : nullptr,
                                gained_.data() + i * (w + 1), path_.data() + i * w, workspace);
        });
        decided_ = std::all_of(accepted_.begin(), accepted_.end(), [](int32_t accepted) { return accepted >= 0; });
        if (!decided_) return;
        states_ = result_->taps;
        places_ = std::move(result_->tap_place);
        std::lock_guard<std::mutex> lock(model_->lock());
        for (size_t i = 0; i < b; ++i) rows_[i].settled = settle(i);
    }

    bool settle(size_t i) {
        const Nodes& nodes = kept();
        const int before = static_cast<int>(rows_[i].length) - 1, gained = accepted_[i] + 1, row = rows_[i].its->row;
        try {
            if (!nodes.chains) {
                slots_.assign(1, 0);
                for (int n = 0; n < accepted_[i]; ++n) slots_.push_back(path_[nodes.at(i) + static_cast<size_t>(n)] + 1);
                model_->kv().compact(row, before, slots_.data(), gained);
            } else if (gained <= nodes.widths[i]) {
                model_->kv().truncate(row, before + gained);
            }
            return true;
        } catch (const std::exception&) {
            return false;
        }
    }

    // By row: tokens, path, their sources, the sources of all nodes, the draft's levels, nodes verified, the speed that was
    // expected, and whether its cache is settled.
    nb::tuple outcome(Clock::duration drafting, Clock::duration computing, Clock::duration verifying) {
        const Nodes& nodes = kept();
        const auto seconds = [](Clock::duration d) { return std::chrono::duration<double>(d).count(); };
        nb::list said;
        for (size_t i = 0; i < rows_.size(); ++i) {
            const size_t from = nodes.at(i), w = static_cast<size_t>(nodes.width);
            nb::list tokens, path, sources, named;
            for (int32_t n = 0; n < accepted_[i]; ++n) {
                const int32_t node = path_[from + static_cast<size_t>(n)];
                path.append(node);
                sources.append(drafts_.name_of(from + static_cast<size_t>(node)));
            }
            for (int32_t n = 0; n <= accepted_[i]; ++n) tokens.append(gained_[i * (w + 1) + static_cast<size_t>(n)]);
            sources.append(target_);
            int levels = 0;
            depths_.resize(w);
            for (size_t n = 0; n < static_cast<size_t>(nodes.widths[i]); ++n) {
                const int32_t above = nodes.parents[from + n];
                depths_[n] = above < 0 ? 1 : depths_[static_cast<size_t>(above)] + 1;
                levels = std::max(levels, depths_[n]);
                named.append(drafts_.name_of(from + n));
            }
            int size = nodes.widths[i];
            nb::object expected = nb::none();
            if (BoundPolicy* policy = drafts_.policy()) {
                const Policy::Said& its = policy->policy().said(i);
                size = its.size;
                if (its.expected > 0.0) expected = nb::float_(its.expected);
            }
            said.append(nb::make_tuple(tokens, path, sources, named, levels, size, expected, rows_[i].settled));
        }
        return nb::make_tuple(said, threads_, seconds(drafting), seconds(computing), seconds(verifying), decided_);
    }

    Model* model_ = nullptr;  // in a step
    const int layers_;
    const nb::str target_;
    const std::vector<int> taps_;
    // The step that is under way, or was the last one.
    StepDrafts drafts_;
    std::deque<RowNow>& rows_ = drafts_.rows();
    std::vector<ChunkNow> chunks_;
    bool decided_ = true;
    int threads_ = 0;
    std::vector<int32_t> token_, row_, position_, parent_, starts_, wanted_, gained_, accepted_, path_, slots_;
    std::vector<int32_t> places_;       // where packed tokens stand among the tapped
    std::shared_ptr<float[]> states_;  // of those, where all rows were decided
    std::vector<uint8_t> tapped_;
    std::vector<int> depths_;
    std::vector<Chooser> choosers_;
    std::unique_ptr<Result> result_;
};

}  // namespace

void bind_step(nb::module_& m) {
    nb::exception<DraftFault>(m, "DraftFault", PyExc_RuntimeError);
    nb::class_<StepRow>(m, "StepRow")
        .def("__init__",
             [](StepRow* self, int32_t row, int64_t request, int64_t prompt, bool adaptive, nb::str drafter, const nb::object& lookup,
                nb::tuple names, const nb::dict& chooser, const nb::object& levels, bool nodes) {
                 Lookup* its = lookup.is_none() ? nullptr : nb::cast<Lookup*>(lookup);
                 if (its && names.size() == 0) throw std::invalid_argument("a lookup's sources need names");
                 new (self) StepRow{row, request, prompt, adaptive, drafter, lookup, its, names, sampling_of(chooser), levels, nodes};
             },
             "row"_a, "request"_a, "prompt"_a, "adaptive"_a, "drafter"_a, "lookup"_a.none(), "names"_a, "chooser"_a,
             "levels"_a.none(), "nodes"_a);
    nb::class_<Stepper>(m, "Stepper")
        .def(nb::init<int, nb::str, std::vector<int>>(), "layers"_a, "target"_a, "taps"_a)
        .def("step", &Stepper::step, "model"_a, "policy"_a.none(), "rows"_a, "chunks"_a)
        .def("learn", &Stepper::learn, "draft"_a, "body"_a)
        .def("record", &Stepper::record)
        .def("observe", &Stepper::observe, "rows"_a)
        .def("result", &Stepper::result);
}

}  // namespace outpace
