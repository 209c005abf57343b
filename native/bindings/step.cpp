// A step of rows that need no Python: drafts from lookups, the policy, one forward, verdicts, the rows' cache. What
// engine/step.py, engine/drafting.py and engine/verifier.py do is the reference, value for value; engine/native.py calls this.
//
// Between two forwards every line of code and data is cold, so what counts is how much different code runs.
#include <chrono>
#include <deque>
#include <memory>
#include <mutex>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/policy.h"
#include "bindings/step_rows.h"
#include "model/walk.h"

namespace outpace {
namespace {

template <class Item, class Made>
nb::object filled(Made&& array, const std::vector<Item>& values) {
    std::copy(values.begin(), values.end(), array.data);
    return array.object;
}

class Stepper {
public:
    // `target`: the source of tokens that no draft had.
    Stepper(int layers, nb::str target) : layers_(layers), target_(std::move(target)) {}
    Stepper(const Stepper&) = delete;

    // rows: (StepRow, tokens, how many are committed, most nodes). policy: None, where every row gets as many as it may.
    // A tuple for each row, threads, seconds of drafting, forward and verdicts, and whether all rows were decided.
    nb::tuple step(Model& model, const nb::object& policy, const nb::list& rows) {
        const auto begun = Clock::now();
        model_ = &model;
        result_.reset();
        struct Given {  // the rows' tokens, whatever happens
            std::deque<RowNow>& rows;
            ~Given() {
                for (RowNow& now : rows) now.tokens.reset();
            }
        } const given{rows_};
        take(rows);
        held_ = policy;
        policy_ = policy.is_none() || !planned_ ? nullptr : nb::cast<BoundPolicy*>(policy);
        try {
            draft();
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
        if (policy_) policy_->policy().learn(accepted_.data(), path_.data(), static_cast<size_t>(kept().width), {draft, body});
    }

    // The last step's drafts before and after the policy, its verdicts and decisions, as the arrays of Drafts and Verdicts.
    nb::tuple record() const {
        nb::list decisions;
        for (size_t i = 0; policy_ && i < rows_.size(); ++i) decisions.append(policy_->decision(i));
        const auto b = static_cast<Py_ssize_t>(rows_.size()), w = static_cast<Py_ssize_t>(kept().width);
        const nb::tuple verdicts = nb::make_tuple(filled(IntArray({b, w + 1}), gained_), filled(IntArray({b}), accepted_),
                                                  filled(IntArray({b, w}), path_));
        return nb::make_tuple(drafts(proposed_, true), all_kept_ ? nb::none() : nb::object(drafts(kept_, false)), verdicts,
                              policy_ ? nb::object(decisions) : nb::none(), filled(IntArray({b + 1}), starts_));
    }

    // The forward's result, where some row was left undecided.
    std::unique_ptr<Result> result() {
        if (!result_) throw std::invalid_argument("every row of the last step was decided");
        return std::move(result_);
    }

private:
    using Clock = std::chrono::steady_clock;

    const Nodes& kept() const { return all_kept_ ? proposed_ : kept_; }

    void take(const nb::list& rows) {
        rows_.clear();
        planned_ = false;
        if (rows.size() == 0) throw std::invalid_argument("a step has at least one row");
        for (const nb::handle one : rows) {
            const nb::tuple given = nb::borrow<nb::tuple>(one);
            if (!nb::isinstance<StepRow>(given[0])) throw nb::type_error("a row is (StepRow, tokens, length, most)");
            RowNow& now = rows_.emplace_back();
            now.its = nb::inst_ptr<StepRow>(given[0]);
            now.tokens.emplace(nb::handle(given[1]).ptr());
            const long length = whole(nb::handle(given[2]).ptr()), most = whole(nb::handle(given[3]).ptr());
            if (length < 1 || length > now.tokens->size() || most < 0) throw std::invalid_argument("a row's length or most is out of range");
            now.length = static_cast<size_t>(length);
            now.most = now.its->lookup ? static_cast<int>(most) : 0;
            now.asked = now.most;
            now.pending = now.tokens->data()[length - 1];
            now.settled = false;
            planned_ = planned_ || now.its->lookup;
        }
    }

    // engine/drafting.py: plan, propose, trim.
    void draft() {
        all_kept_ = true;
        names_ = nb::tuple();
        if (!planned_) return proposed_.clear(rows_.size(), 0);
        if (policy_) {
            views_.clear();
            for (const RowNow& now : rows_) {
                const StepRow& its = *now.its;
                policy_->admit(its.row, its.request, its.sampling.temperature, its.drafter);
                views_.push_back({its.row, its.adaptive, now.most, static_cast<double>(now.length - 1)});
            }
            policy_->policy().plan(views_, 0);
            for (size_t i = 0; i < rows_.size(); ++i) rows_[i].asked = policy_->policy().nodes(i);
        }
        propose();
        if (policy_) trim();
    }

    void propose() {
        found_.assign(rows_.size(), {});
        std::vector<char> done(rows_.size());
        std::vector<nb::object> names;
        std::vector<std::vector<int>> number(rows_.size());  // of each row's sources among `names`
        int widest = 0;
        for (size_t first = 0; first < rows_.size(); ++first) {
            if (done[first] || !rows_[first].asked) continue;
            asked_.clear();
            at_.clear();
            for (size_t i = first; i < rows_.size(); ++i) {
                const RowNow& now = rows_[i];
                if (!now.asked || now.its->lookup != rows_[first].its->lookup) continue;
                asked_.push_back({now.its->row, now.its->request, now.its->prompt, now.tokens->data(), now.length, now.asked});
                at_.push_back(i);
                done[i] = 1;
            }
            rows_[first].its->lookup->propose(asked_, trees_);
            std::vector<int> its;
            for (const nb::handle name : rows_[first].its->names) {
                size_t n = 0;
                while (n < names.size() && !names[n].equal(name)) ++n;
                if (n == names.size()) names.push_back(nb::borrow(name));
                its.push_back(static_cast<int>(n));
            }
            for (size_t i = 0; i < at_.size(); ++i) {
                found_[at_[i]] = std::move(trees_[i]);
                number[at_[i]] = its;
                widest = std::max(widest, static_cast<int>(found_[at_[i]].tokens.size()));
            }
        }
        nb::list all;
        for (const nb::object& name : names) all.append(name);
        names_ = nb::tuple(all);
        proposed_.clear(rows_.size(), widest);
        for (size_t i = 0; i < rows_.size(); ++i) {
            const SourcedTree& tree = found_[i];
            const size_t k = tree.tokens.size(), to = proposed_.at(i);
            if (k > static_cast<size_t>(rows_[i].asked)) throw std::runtime_error("a lookup proposed more nodes than were asked for");
            proposed_.widths[i] = static_cast<int32_t>(k);
            for (size_t n = 0; n < k; ++n) {
                if (tree.tokens[n] < 0 || tree.tokens[n] >= model_->vocab())
                    throw std::runtime_error("a lookup proposed a token that is not in the vocabulary of " + std::to_string(model_->vocab()));
                proposed_.tokens[to + n] = tree.tokens[n];
                proposed_.parents[to + n] = tree.parents[n];
                proposed_.chains = proposed_.chains && tree.parents[n] == static_cast<int32_t>(n) - 1;
                proposed_.gains[to + n] = static_cast<float>(tree.gains[n]);
                proposed_.sources[to + n] = static_cast<uint8_t>(number[i][static_cast<size_t>(tree.sources[n])]);
            }
        }
    }

    void trim() {
        const bool none = names_.size() == 0;  // nobody was asked
        const std::vector<int>& sources = policy_->numbers(names_);
        Policy& policy = policy_->policy();
        policy.trim({proposed_.widths.data(), proposed_.chains ? nullptr : proposed_.parents.data(), none ? nullptr : proposed_.gains.data(),
                     names_.size() > 1 ? proposed_.sources.data() : nullptr, static_cast<size_t>(proposed_.width), sources.data(), false},
                    policy_->explain());
        size_t widest = 0;
        for (size_t i = 0; i < rows_.size(); ++i) {
            all_kept_ = all_kept_ && static_cast<int32_t>(policy.kept(i).size()) == proposed_.widths[i];
            widest = std::max(widest, policy.kept(i).size());
        }
        if (all_kept_) return;
        kept_.clear(rows_.size(), static_cast<int>(widest));
        kept_.chains = proposed_.chains;
        std::vector<int32_t> place(static_cast<size_t>(proposed_.width));
        for (size_t i = 0; i < rows_.size(); ++i) {
            const std::vector<int>& nodes = policy.kept(i);
            kept_.widths[i] = static_cast<int32_t>(nodes.size());
            for (size_t n = 0; n < nodes.size(); ++n) {
                const size_t old = proposed_.at(i) + static_cast<size_t>(nodes[n]), at = kept_.at(i) + n;
                place[static_cast<size_t>(nodes[n])] = static_cast<int32_t>(n);
                kept_.tokens[at] = proposed_.tokens[old];
                kept_.parents[at] = proposed_.parents[old] < 0 ? -1 : place[static_cast<size_t>(proposed_.parents[old])];
                kept_.sources[at] = proposed_.sources[old];
            }
        }
    }

    // Pending tokens with their drafts, packed and run.
    void forward() {
        const Nodes& nodes = kept();
        const auto n = static_cast<size_t>(std::accumulate(nodes.widths.begin(), nodes.widths.end(), 0)) + rows_.size();
        token_.resize(n), row_.resize(n), position_.resize(n), parent_.resize(n), wanted_.resize(n);
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
        const BatchView batch{static_cast<int>(n), static_cast<int>(rows_.size()), static_cast<int>(n), token_.data(), row_.data(), position_.data(),
                              parent_.data(), starts_.data(), wanted_.data(), {}, layers_, nullptr, nullptr};
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
                sources.append(name_of(from + static_cast<size_t>(node)));
            }
            for (int32_t n = 0; n <= accepted_[i]; ++n) tokens.append(gained_[i * (w + 1) + static_cast<size_t>(n)]);
            sources.append(target_);
            int levels = 0;
            depths_.resize(w);
            for (size_t n = 0; n < static_cast<size_t>(nodes.widths[i]); ++n) {
                const int32_t above = nodes.parents[from + n];
                depths_[n] = above < 0 ? 1 : depths_[static_cast<size_t>(above)] + 1;
                levels = std::max(levels, depths_[n]);
                named.append(name_of(from + n));
            }
            int size = nodes.widths[i];
            nb::object expected = nb::none();
            if (policy_) {
                const Policy::Said& its = policy_->policy().said(i);
                size = its.size;
                if (its.expected > 0.0) expected = nb::float_(its.expected);
            }
            said.append(nb::make_tuple(tokens, path, sources, named, levels, size, expected, rows_[i].settled));
        }
        return nb::make_tuple(said, threads_, seconds(drafting), seconds(computing), seconds(verifying), decided_);
    }

    nb::handle name_of(size_t node) const { return PyTuple_GetItem(names_.ptr(), kept().sources[node]); }

    nb::tuple drafts(const Nodes& nodes, bool confident) const {
        const auto b = static_cast<Py_ssize_t>(rows_.size()), w = static_cast<Py_ssize_t>(nodes.width);
        nb::object parents = nb::none(), gains = nb::none(), source = nb::none();
        if (!nodes.chains) parents = filled(IntArray({b, w}), nodes.parents);
        if (confident && names_.size()) gains = filled(Array<float>(Names::get().float32, {b, w}), nodes.gains);
        if (names_.size() > 1) source = filled(Array<uint8_t>(Names::get().uint8, {b, w}), nodes.sources);
        return nb::make_tuple(filled(IntArray({b, w}), nodes.tokens), filled(IntArray({b}), nodes.widths), parents, nb::none(), gains, source, names_);
    }

    Model* model_ = nullptr;  // in a step
    const int layers_;
    const nb::str target_;
    // The step that is under way, or was the last one.
    nb::object held_;  // keeps the policy alive
    BoundPolicy* policy_ = nullptr;
    std::deque<RowNow> rows_;
    bool planned_ = false, all_kept_ = true, decided_ = true;
    int threads_ = 0;
    nb::tuple names_;  // of sources
    Nodes proposed_, kept_;
    std::vector<Policy::View> views_;
    std::vector<Asked> asked_;
    std::vector<size_t> at_;
    std::vector<SourcedTree> trees_, found_;
    std::vector<int32_t> token_, row_, position_, parent_, starts_, wanted_, gained_, accepted_, path_, slots_;
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
                nb::tuple names, const nb::tuple& chooser) {
                 Lookup* its = lookup.is_none() ? nullptr : nb::cast<Lookup*>(lookup);
                 if (its && names.size() == 0) throw std::invalid_argument("a lookup's sources need names");
                 new (self) StepRow{row, request, prompt, adaptive, drafter, lookup, its, names, sampling_of(chooser)};
             },
             "row"_a, "request"_a, "prompt"_a, "adaptive"_a, "drafter"_a, "lookup"_a.none(), "names"_a, "chooser"_a);
    nb::class_<Stepper>(m, "Stepper")
        .def(nb::init<int, nb::str>(), "layers"_a, "target"_a)
        .def("step", &Stepper::step, "model"_a, "policy"_a.none(), "rows"_a)
        .def("learn", &Stepper::learn, "draft"_a, "body"_a)
        .def("record", &Stepper::record)
        .def("result", &Stepper::result);
}

}  // namespace outpace
