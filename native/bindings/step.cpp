// What Python sees of a step: rows, drafts and verdicts go in and out as arrays and tuples; step/step.h has the stages.
#include <deque>
#include <memory>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>

#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "bindings/chooser.h"
#include "bindings/field.h"
#include "bindings/policy.h"
#include "step/step.h"

namespace outpace {
namespace {

template <class Item, class Made>
nb::object filled(Made&& array, const std::vector<Item>& values) {
    std::copy(values.begin(), values.end(), array.data);
    return array.object;
}

nb::object ints(const std::vector<int32_t>& values) { return filled(IntArray({static_cast<Py_ssize_t>(values.size())}), values); }

struct BoundRow {
    StepRow row;
    nb::object drafter;  // keeps it alive
};

class BoundStep {
public:
    BoundStep(int vocab, int layers, std::vector<int> hidden_layers, nb::str target)
        : step_(vocab, layers, std::move(hidden_layers)), target_(std::move(target)) {}
    BoundStep(const BoundStep&) = delete;

    std::unique_ptr<BoundRow> row(int32_t row, int64_t request, int64_t prompt, bool adaptive, const nb::str& drafter,
        const nb::object& native, const nb::tuple& names, bool natively, bool drafts, bool reads, bool ruled, const std::string& acceptance,
        bool watched, const nb::dict& chooser, const nb::object& levels, bool nodes, bool trims) {
        NativeDrafter* its = native.is_none() ? nullptr : nb::cast<NativeDrafter*>(native);
        if (natively && (!its || names.size() == 0)) throw std::invalid_argument("a native drafter's sources need names");
        const Sampling sampling = sampling_of(chooser);
        const Policy::Kind kind{request, Policy::sampling_class(sampling.temperature), acceptance == "rejection", number(drafter),
            levels.is_none() ? -1 : number(levels), nodes, trims};
        std::vector<int> sources;
        for (const nb::handle name : names) sources.push_back(number(name));
        return std::make_unique<BoundRow>(BoundRow{{row, prompt, drafts, adaptive, its, natively, std::move(sources), reads, ruled,
                                                       acceptance == "coupled", watched, sampling, kind},
            native});
    }

    // rows: (row, tokens, how many are committed, most nodes), and for one with rules the chooser that has those which are known
    // here (None: not all that no single token can be tested by), and whether it has others; chunks: (row, tokens, where it
    // begins, how many, whether logits are wanted), at least one token before the last one. policy: None, where every row drafts
    // what it may. As `run`.
    int begin(const nb::object& model, const nb::object& policy, const nb::list& rows, const nb::list& chunks) {
        require_idle();
        held_.clear(), views_.clear();
        held_.push_back(policy), held_.push_back(model);
        step().begin(model.is_none() ? nullptr : nb::cast<Model*>(model), policy.is_none() ? nullptr : nb::cast<Policy*>(policy));
        for (const nb::handle one : rows) {
            const nb::tuple given = nb::borrow<nb::tuple>(one);
            const StepRow& fixed = fixed_of(given);
            const IntView& tokens = views_.emplace_back(nb::handle(given[1]).ptr());
            const long length = whole(nb::handle(given[2]).ptr()), most = whole(nb::handle(given[3]).ptr());
            if (length < 1 || length > tokens.size() || most < 0) throw std::invalid_argument("a row's length or most is out of range");
            RowNow& now = step().rows.emplace_back();
            now.fixed = &fixed;
            now.tokens = tokens.data();
            now.length = static_cast<size_t>(length);
            now.most = static_cast<int>(most);
            now.rules = Rules::kNone;
            if (given.size() < 6) continue;
            const nb::object chooser = given[4];
            now.rules = chooser.is_none() ? Rules::kForeign : nb::cast<bool>(given[5]) ? Rules::kTested : Rules::kKnown;
            if (!chooser.is_none()) now.chooser.edits = edits_of(nb::cast<nb::list>(chooser));
        }
        for (const nb::handle one : chunks) {
            const nb::tuple given = nb::borrow<nb::tuple>(one);
            const StepRow& fixed = fixed_of(given);
            const IntView tokens(nb::handle(given[1]).ptr());
            const long first = whole(nb::handle(given[2]).ptr()), count = whole(nb::handle(given[3]).ptr());
            if (first < 0 || count < 1 || first + count >= tokens.size()) throw std::invalid_argument("a chunk is out of range");
            step().chunks.push_back({&fixed, static_cast<int32_t>(first), {tokens.data() + first, tokens.data() + first + count + 1},
                nb::cast<bool>(given[4])});
        }
        return run();
    }

    // Goes on to the next stage that leaves something to the caller: its number (Stage), or that of the end.
    int run() {
        require_idle();
        const Running running(running_);  // until the GIL is back
        std::optional<nb::gil_scoped_release> released;
        Stage now = step_.stage();
        for (; now != Stage::kDone; now = step_.stage()) {
            if (!released && step_.computes()) released.emplace();
            if (!step_.advance()) break;
        }
        if (now >= Stage::kForward) views_.clear();
        return static_cast<int>(now);
    }

    // The step is over: nothing of it is kept, its rows' drafters and the model least of all.
    void end() {
        step().end();
        views_.clear(), held_.clear();
    }

    nb::list failed() const {
        nb::list found;
        for (const Step::Failed& one : step().failed()) found.append(nb::make_tuple(nb::cast(one.rows), one.why));
        return found;
    }
    nb::tuple sizes() const {
        nb::list nodes, levels, floors;
        for (const RowNow& now : step().rows) nodes.append(now.asked), levels.append(now.levels), floors.append(now.floor);
        return nb::make_tuple(nodes, levels, floors);
    }

    // Drafts for rows `where`.
    void put(const std::vector<size_t>& where, const nb::object& drafts) {
        const Field<int32_t> tokens(drafts.attr("tokens"), "tokens"), widths(drafts.attr("widths"), "widths");
        const Field<int32_t> parents(drafts.attr("parents"), "parents"), levels(drafts.attr("levels"), "levels");
        const Field<float> confidence(drafts.attr("confidence"), "confidence");
        const Field<uint8_t> source(drafts.attr("source"), "source");
        const size_t b = where.size(), w = tokens.shape(1);
        tokens.expect(b, w, "tokens"), widths.expect(b, std::nullopt, "widths"), parents.expect(b, w, "parents");
        levels.expect(b, std::nullopt, "levels"), confidence.expect(b, w, "confidence"), source.expect(b, w, "source");
        const bool drawn = !nb::object(drafts.attr("q")).is_none();
        std::vector<int> names;
        for (const nb::handle name : nb::cast<nb::tuple>(drafts.attr("sources"))) names.push_back(number(name));
        if (names.empty()) names.push_back(number(nb::str("draft")));
        for (size_t j = 0; j < b; ++j) {
            const int32_t k = widths.data()[j];
            if (k < 0 || static_cast<size_t>(k) > w) throw std::invalid_argument("it proposed more nodes than its arrays hold");
            Draft draft;
            draft.levels = levels.data() ? levels.data()[j] : -1;
            for (size_t n = j * w; n < j * w + static_cast<size_t>(k); ++n) {
                const size_t from = source.data() ? source.data()[n] : 0;
                if (from >= names.size()) throw std::invalid_argument("a source has no name");
                draft.add(tokens.data()[n], parents.data() ? parents.data()[n] : static_cast<int32_t>(n - j * w) - 1,
                    confidence.data() ? confidence.data()[n] : NAN, names[from]);
            }
            step().put(where[j], std::move(draft));
            RowNow& now = step().rows[where[j]];
            now.drawn = drawn && now.fixed->kind.rejection;
        }
    }
    // The rows have no drafts.
    void drop(const std::vector<size_t>& where) {
        for (const size_t i : where) step().rows.at(i).proposed = {};
    }
    void lead(size_t i, const std::vector<int32_t>& tokens, const nb::str& source) { step().lead(i, tokens, number(source)); }
    void keep(size_t i, const std::vector<int32_t>& nodes) { step().keep(i, nodes); }

    // Tokens, parents, gains and sources' numbers of what is to be verified in row i.
    nb::tuple draft(size_t i) const {
        const Draft& draft = step().rows.at(i).draft();
        return nb::make_tuple(draft.tokens, draft.parents, draft.gains, draft.sources);
    }
    // The fields of Drafts, of all rows: as they were proposed, or what the policy has left of them.
    nb::tuple drafts(bool kept) {
        flat_.fill(step().rows.size(), [&](size_t i) -> const Draft& { return kept ? step().rows[i].draft() : step().rows[i].proposed; });
        const auto b = static_cast<Py_ssize_t>(step().rows.size()), w = static_cast<Py_ssize_t>(flat_.width);
        nb::object parents = nb::none(), gains = nb::none(), source = nb::none(), levels = nb::none();
        std::vector<int> place(names_.size(), -1);
        nb::list names;
        for (size_t i = 0; i < step().rows.size(); ++i)
            for (size_t n = i * static_cast<size_t>(w); n < i * static_cast<size_t>(w) + static_cast<size_t>(flat_.widths[i]); ++n) {
                int& its = place[flat_.sources[n]];
                if (its < 0) its = static_cast<int>(names.size()), names.append(names_[flat_.sources[n]]);
                flat_.sources[n] = static_cast<uint8_t>(its);
            }
        if (!flat_.chains) parents = filled(IntArray({b, w}), flat_.parents);
        if (!kept) gains = filled(Array<float>(Names::get().float32, {b, w}), flat_.confidence);
        if (names.size() > 1) source = filled(Array<uint8_t>(Names::get().uint8, {b, w}), flat_.sources);
        if (!kept && step().levelled()) {
            for (int32_t& n : flat_.levels) n = std::max(n, 0);
            levels = filled(IntArray({b}), flat_.levels);
        }
        return nb::make_tuple(filled(IntArray({b, w}), flat_.tokens), filled(IntArray({b}), flat_.widths), parents, nb::none(), gains,
            source, nb::tuple(names), levels);
    }

    // token, row, position, parent, starts, wanted, as in Batch.
    nb::tuple batch() const {
        return nb::make_tuple(
            ints(step().token), ints(step().row), ints(step().position), ints(step().parent), ints(step().starts), ints(step().wanted));
    }

    // Verdicts that the caller found for all rows at once (accepted below 0: not decided); None: there are none.
    void found(const nb::object& verdicts) {
        if (!verdicts.is_none()) {
            const Field<int32_t> tokens(verdicts.attr("tokens"), "tokens"), accepted(verdicts.attr("accepted"), "accepted"),
                path(verdicts.attr("path"), "path");
            const size_t b = step().rows.size(), w = path.shape(1);
            tokens.expect(b, w + 1, "tokens"), accepted.expect(b, std::nullopt, "accepted"), path.expect(b, w, "path");
            for (size_t i = 0; i < b; ++i) {
                const int32_t n = accepted.data()[i];
                if (n > static_cast<int32_t>(w)) throw std::invalid_argument("more was accepted than was verified");
                if (n < 0) continue;
                const int32_t *gained = tokens.data() + i * (w + 1), *nodes = path.data() + i * w;
                step().decide(i, {{gained, gained + n + 1}, {nodes, nodes + n}});
            }
        }
        step().reopen();
    }
    void decide(size_t i, std::vector<int32_t> tokens, std::vector<int32_t> path) {
        step().decide(i, {std::move(tokens), std::move(path)});
    }
    nb::tuple verdict(size_t i) const {
        const Verdict& verdict = step().rows.at(i).verdict;
        return nb::make_tuple(nb::cast(verdict.tokens), nb::cast(verdict.path));
    }
    // The fields of Verdicts.
    nb::tuple verdicts() const {
        const auto b = static_cast<Py_ssize_t>(step().rows.size());
        size_t w = 0;
        for (const RowNow& now : step().rows) w = std::max(w, now.draft().tokens.size());
        std::vector<int32_t> tokens(step().rows.size() * (w + 1)), accepted, path(step().rows.size() * w);
        for (size_t i = 0; i < step().rows.size(); ++i) {
            const Verdict& verdict = step().rows[i].verdict;
            accepted.push_back(static_cast<int32_t>(verdict.path.size()));
            std::copy(verdict.tokens.begin(), verdict.tokens.end(), tokens.begin() + static_cast<std::ptrdiff_t>(i * (w + 1)));
            std::copy(verdict.path.begin(), verdict.path.end(), path.begin() + static_cast<std::ptrdiff_t>(i * w));
        }
        return nb::make_tuple(filled(IntArray({b, static_cast<Py_ssize_t>(w) + 1}), tokens), ints(accepted),
            filled(IntArray({b, static_cast<Py_ssize_t>(w)}), path));
    }
    nb::object decisions() const {
        if (!step().policy()) return nb::none();
        nb::list found;
        for (size_t i = 0; i < step().rows.size(); ++i) found.append(decision_of(*step().policy(), i));
        return found;
    }

    // By row: tokens, path, their sources, the sources of all nodes, the draft's levels, nodes verified, and the speed that was
    // expected. Then threads, and seconds of drafting, forward and verdicts.
    nb::tuple outcome() const {
        nb::list found;
        for (size_t i = 0; i < step().rows.size(); ++i) {
            const RowNow& now = step().rows[i];
            const Draft& draft = now.draft();
            nb::list tokens, path, sources, named;
            for (const int32_t token : now.verdict.tokens) tokens.append(token);
            for (const int32_t node : now.verdict.path) {
                path.append(node);
                sources.append(names_[static_cast<size_t>(draft.sources[static_cast<size_t>(node)])]);
            }
            sources.append(target_);
            for (const int source : draft.sources) named.append(names_[static_cast<size_t>(source)]);
            int size = static_cast<int>(draft.tokens.size());
            nb::object expected = nb::none();
            if (step().policy()) {
                const Policy::Decision& decision = step().policy()->decision(i);
                size = decision.size;
                if (decision.expected > 0.0) expected = nb::float_(decision.expected);
            }
            const std::vector<int> depths = draft.depths();
            const int deepest = depths.empty() ? 0 : *std::max_element(depths.begin(), depths.end());
            found.append(nb::make_tuple(tokens, path, sources, named, deepest, size, expected));
        }
        const auto& seconds = step().seconds();
        return nb::make_tuple(found, step().threads(), seconds[0], seconds[1], seconds[2]);
    }

    std::shared_ptr<Result> result() const {
        if (!step().result()) throw std::invalid_argument("the step computed nothing here");
        return step().result();
    }

    void observe(const std::vector<std::pair<int, int>>& heard) {
        const std::vector<NativeDrafter*> behind = step().observe(heard);
        const Running running(running_);
        for (NativeDrafter* drafter : behind) {
            nb::gil_scoped_release release;  // only for forwards: a server's event loop keeps it for milliseconds
            drafter->read_ahead();
        }
    }

    Step& step() {
        require_idle();
        return step_;
    }
    const Step& step() const {
        require_idle();
        return step_;
    }

private:
    // While it runs, the GIL may be another thread's: whatever that calls here is refused.
    struct Running {
        explicit Running(bool& flag) : flag(flag) { flag = true; }
        ~Running() { flag = false; }
        bool& flag;
    };
    void require_idle() const {
        if (running_) throw std::runtime_error("another thread runs this step: wait until it has ended");
    }

    const StepRow& fixed_of(const nb::tuple& given) {
        if (!nb::isinstance<BoundRow>(given[0]))
            throw nb::type_error("a row is (StepRow, tokens, length, most), a chunk (StepRow, tokens, start, count, wanted)");
        held_.push_back(given[0]);
        return nb::inst_ptr<BoundRow>(given[0])->row;
    }

    int number(const nb::handle name) {
        for (size_t n = 0; n < names_.size(); ++n)
            if (names_[n].is(name) || names_[n].equal(name)) return static_cast<int>(n);
        if (names_.size() == 256) throw std::invalid_argument("an engine's drafters have at most 256 names");
        names_.push_back(nb::borrow(name));
        return static_cast<int>(names_.size()) - 1;
    }

    Step step_;
    bool running_ = false;  // read and written with the GIL
    const nb::str target_;  // the source of tokens that no draft had
    std::vector<nb::object> held_;  // the step's rows, model and policy
    std::deque<IntView> views_;     // of the rows' tokens
    std::vector<nb::object> names_; // of sources and drafters
    Drafts flat_;
};

}  // namespace

void bind_step(nb::module_& m) {
    nb::class_<BoundRow>(m, "StepRow");
    nb::class_<BoundStep>(m, "Step")
        .def(nb::init<int, int, std::vector<int>, nb::str>(), "vocab"_a, "layers"_a, "hidden_layers"_a, "target"_a)
        .def("row", &BoundStep::row, "row"_a, "request"_a, "prompt"_a, "adaptive"_a, "drafter"_a, "native"_a.none(), "names"_a,
            "natively"_a, "drafts"_a, "reads"_a, "ruled"_a, "acceptance"_a, "watched"_a, "chooser"_a, "levels"_a.none(), "nodes"_a,
            "trims"_a)
        .def("begin", &BoundStep::begin, "model"_a.none(), "policy"_a.none(), "rows"_a, "chunks"_a)
        .def("run", &BoundStep::run)
        .def("end", &BoundStep::end)
        .def_prop_ro("open", [](BoundStep& x) { return x.step().open(); })
        .def_prop_ro("lost", [](BoundStep& x) { return x.step().lost(); })
        .def_prop_ro("calls", [](BoundStep& x) { return nb::make_tuple(x.step().calls()[0], x.step().calls()[1], x.step().calls()[2]); })
        .def_prop_ro("failed", &BoundStep::failed)
        .def_prop_ro("sizes", &BoundStep::sizes)
        .def_prop_ro("batch", &BoundStep::batch)
        .def_prop_ro("starts", [](BoundStep& x) { return ints(x.step().starts); })
        .def_prop_ro("hidden_rows", [](BoundStep& x) { return x.step().hidden_rows; })
        .def_prop_ro("result", &BoundStep::result)
        .def("put", &BoundStep::put, "where"_a, "drafts"_a)
        .def("drop", &BoundStep::drop, "where"_a)
        .def("lead", &BoundStep::lead, "row"_a, "tokens"_a, "source"_a)
        .def("keep", &BoundStep::keep, "row"_a, "nodes"_a)
        .def("draft", &BoundStep::draft, "row"_a)
        .def("drafts", &BoundStep::drafts, "kept"_a)
        .def("found", &BoundStep::found, "verdicts"_a.none())
        .def("decide", &BoundStep::decide, "row"_a, "tokens"_a, "path"_a)
        .def("verdict", &BoundStep::verdict, "row"_a)
        .def("verdicts", &BoundStep::verdicts)
        .def("decisions", &BoundStep::decisions)
        .def("outcome", &BoundStep::outcome)
        .def("observe", &BoundStep::observe, "rows"_a)
        .def("learn", [](BoundStep& x, double draft, double body) { x.step().learn(draft, body); }, "draft"_a, "body"_a);
}

}  // namespace outpace
