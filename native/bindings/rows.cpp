// What Python sees of a step's rows: drafts and verdicts go in and out as arrays and tuples; step/rows.h has the parts of a step.
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
#include "step/rows.h"

namespace outpace {
namespace {

template <class Item, class Made>
nb::object filled(Made&& array, const std::vector<Item>& values) {
    std::copy(values.begin(), values.end(), array.data);
    return array.object;
}

nb::object ints(const std::vector<int32_t>& values) { return filled(IntArray({static_cast<Py_ssize_t>(values.size())}), values); }

struct BoundRow {
    Row row;
    nb::object drafter;  // keeps it alive
};

class BoundRows {
public:
    BoundRows(int vocab, std::vector<int> hidden_layers, nb::str target)
        : rows_(vocab, std::move(hidden_layers)), target_(std::move(target)) {}
    BoundRows(const BoundRows&) = delete;

    std::unique_ptr<BoundRow> row(int32_t row, int64_t request, int64_t prompt, bool adaptive, const nb::str& drafter,
        const nb::object& native, const nb::tuple& names, bool natively, bool drafts, bool reads, bool ruled, const std::string& acceptance,
        bool watched, const nb::dict& chooser, const nb::object& levels, bool nodes, bool trims) {
        NativeDrafter* drafts_for = native.is_none() ? nullptr : nb::cast<NativeDrafter*>(native);
        if (natively && (!drafts_for || names.size() == 0)) throw std::invalid_argument("a native drafter's sources need names");
        const Sampling sampling = sampling_of(chooser);
        const Policy::Kind kind{request, Policy::sampling_class(sampling.temperature), acceptance == "rejection", number(drafter),
            levels.is_none() ? -1 : number(levels), nodes, trims};
        std::vector<int> sources;
        for (const nb::handle name : names) sources.push_back(number(name));
        return std::make_unique<BoundRow>(BoundRow{{row, prompt, drafts, adaptive, drafts_for, natively, std::move(sources), reads, ruled,
                                                       acceptance == "coupled", watched, sampling, kind},
            native});
    }

    // A new step. rows: (row, tokens, how many are committed, most nodes), and for one with rules the chooser that has those which
    // are known here (None: not all that no single token can be tested by), and whether it has others; chunks: (row, tokens, where
    // it begins, how many, whether logits are wanted), at least one token before the last one. policy: None, where every row
    // drafts what it may.
    void begin(const nb::object& policy, const nb::list& rows, const nb::list& chunks) {
        end();
        held_.push_back(policy);
        for (const nb::handle one : rows) {
            const nb::tuple given = nb::borrow<nb::tuple>(one);
            Row& row = row_of(given);
            const IntView& tokens = views_.emplace_back(nb::handle(given[1]).ptr());
            const long length = whole(nb::handle(given[2]).ptr()), most = whole(nb::handle(given[3]).ptr());
            if (length < 1 || length > tokens.size() || most < 0) throw std::invalid_argument("a row's length or most is out of range");
            row.begin(tokens.data(), static_cast<size_t>(length), static_cast<int>(most));
            rows_.rows.push_back(&row);
            if (given.size() < 6) continue;
            const nb::object chooser = given[4];
            row.rules = chooser.is_none() ? Rules::kForeign : nb::cast<bool>(given[5]) ? Rules::kTested : Rules::kKnown;
            if (!chooser.is_none()) row.chooser.edits = edits_of(nb::cast<nb::list>(chooser));
        }
        for (const nb::handle one : chunks) {
            const nb::tuple given = nb::borrow<nb::tuple>(one);
            const Row& row = row_of(given);
            const IntView tokens(nb::handle(given[1]).ptr());
            const long first = whole(nb::handle(given[2]).ptr()), count = whole(nb::handle(given[3]).ptr());
            if (first < 0 || count < 1 || first + count >= tokens.size()) throw std::invalid_argument("a chunk is out of range");
            rows_.chunks.push_back(
                {&row, static_cast<int32_t>(first), {tokens.data() + first, tokens.data() + first + count + 1}, nb::cast<bool>(given[4])});
        }
        rows_.plan(policy.is_none() ? nullptr : nb::cast<Policy*>(policy));
    }

    // Native drafters draft. Rows whose drafter is Python's; and (rows, why) of each native drafter that failed.
    nb::tuple propose() {
        std::vector<Rows::Failed> failed;
        {
            require_idle();
            const Running running(running_);  // until the GIL is back
            std::optional<nb::gil_scoped_release> release;
            if (rows_.computes()) release.emplace();
            failed = rows_.propose();
        }
        nb::list left, why;
        for (size_t i = 0; i < rows().rows.size(); ++i)
            if (rows().rows[i]->nodes && !rows().rows[i]->natively) left.append(i);
        for (const Rows::Failed& one : failed) why.append(nb::make_tuple(nb::cast(one.rows), one.why));
        return nb::make_tuple(left, why);
    }
    // Rows with rules that may edit their draft.
    nb::list ruled() const {
        nb::list found;
        for (size_t i = 0; i < rows().rows.size(); ++i)
            if (rows().rows[i]->ruled && rows().rows[i]->most && !rows().rows[i]->drawn) found.append(i);
        return found;
    }

    std::shared_ptr<Result> forward(Model& model) {
        rows().pack();
        const BatchView batch = rows().batch(static_cast<int>(model.weights().layers.size()));
        const Running running(running_);
        return with_lock(model.lock(), [&] { return std::shared_ptr<Result>(model.forward(batch)); });
    }
    void verify(const std::shared_ptr<Result>& result) {
        require_idle();
        const Running running(running_);
        if (std::any_of(
                rows_.rows.begin(), rows_.rows.end(), [](const Row* row) { return row->sampling.temperature != 0.0 || row->drafter; }))
            without_gil([&] { rows_.verify(result); });
        else
            rows_.verify(result);
    }
    // Rows that Python has to look at: not decided, or with rules that can test a token.
    nb::list undecided() const {
        nb::list found;
        for (size_t i = 0; i < rows().rows.size(); ++i)
            if (rows().rows[i]->undecided()) found.append(i);
        return found;
    }
    nb::list settle(Model& model) {
        require_idle();
        const auto lost = [&] {
            const Running running(running_);
            return with_lock(model.lock(), [&] { return rows_.settle(model); });
        }();
        nb::list found;
        for (const auto& [i, why] : lost) found.append(nb::make_tuple(i, why));
        return found;
    }
    // For a cache in Python: (row, where its slots begin, slots of the path, whether those are the first, whether others follow) of
    // every row with a draft.
    nb::list paths() const {
        nb::list found;
        std::vector<int32_t> slots;
        for (size_t i = 0; i < rows().rows.size(); ++i) {
            const Row& row = *rows().rows[i];
            if (row.draft().empty()) continue;
            const bool straight = rows().path_of(i, slots);
            found.append(nb::make_tuple(i, row.row, row.length - 1, ints(slots), straight, slots.size() <= row.draft().size()));
        }
        return found;
    }

    // The step is over: nothing of it is kept, its rows' drafters least of all.
    void end() {
        rows().clear();
        views_.clear(), held_.clear();
    }

    nb::tuple sizes() const {
        nb::list nodes, depths, floors;
        for (const Row* row : rows().rows) nodes.append(row->nodes), depths.append(row->depth), floors.append(row->floor);
        return nb::make_tuple(nodes, depths, floors);
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
            rows().put(where[j], std::move(draft));
            Row& row = *rows().rows[where[j]];
            row.drawn = drawn && row.kind.rejection;
        }
    }
    // The rows have no drafts.
    void drop(const std::vector<size_t>& where) {
        for (const size_t i : where) rows().rows.at(i)->proposed = {};
    }
    void lead(size_t i, const std::vector<int32_t>& tokens, const nb::str& source) { rows().lead(i, tokens, number(source)); }
    void keep(size_t i, const std::vector<int32_t>& nodes) { rows().keep(i, nodes); }

    // Tokens, parents, gains and sources' numbers of what is to be verified in row i.
    nb::tuple draft(size_t i) const {
        const Draft& draft = rows().rows.at(i)->draft();
        return nb::make_tuple(draft.tokens, draft.parents, draft.gains, draft.sources);
    }
    // The fields of Drafts, of all rows: as they were proposed, or what the policy has left of them.
    nb::tuple drafts(bool kept) {
        flat_.fill(rows().rows.size(), [&](size_t i) -> const Draft& { return kept ? rows().rows[i]->draft() : rows().rows[i]->proposed; });
        const auto b = static_cast<Py_ssize_t>(rows().rows.size()), w = static_cast<Py_ssize_t>(flat_.width);
        nb::object parents = nb::none(), gains = nb::none(), source = nb::none(), levels = nb::none();
        std::vector<int> place(names_.size(), -1);
        nb::list names;
        for (size_t i = 0; i < rows().rows.size(); ++i)
            for (size_t n = i * static_cast<size_t>(w); n < i * static_cast<size_t>(w) + static_cast<size_t>(flat_.widths[i]); ++n) {
                int& at = place[flat_.sources[n]];
                if (at < 0) at = static_cast<int>(names.size()), names.append(names_[flat_.sources[n]]);
                flat_.sources[n] = static_cast<uint8_t>(at);
            }
        if (!flat_.chains) parents = filled(IntArray({b, w}), flat_.parents);
        if (!kept) gains = filled(Array<float>(Names::get().float32, {b, w}), flat_.confidence);
        if (names.size() > 1) source = filled(Array<uint8_t>(Names::get().uint8, {b, w}), flat_.sources);
        if (!kept && rows().limits_depth()) {
            for (int32_t& n : flat_.levels) n = std::max(n, 0);
            levels = filled(IntArray({b}), flat_.levels);
        }
        return nb::make_tuple(filled(IntArray({b, w}), flat_.tokens), filled(IntArray({b}), flat_.widths), parents, nb::none(), gains,
            source, nb::tuple(names), levels);
    }

    // token, row, position, parent, starts, wanted, as in Batch.
    nb::tuple batch() const {
        return nb::make_tuple(
            ints(rows().token), ints(rows().row), ints(rows().position), ints(rows().parent), ints(rows().starts), ints(rows().wanted));
    }

    // Verdicts of all rows at once (accepted below 0: not decided).
    void decide_all(const nb::object& verdicts) {
        const Field<int32_t> tokens(verdicts.attr("tokens"), "tokens"), accepted(verdicts.attr("accepted"), "accepted"),
            path(verdicts.attr("path"), "path");
        const size_t b = rows().rows.size(), w = path.shape(1);
        tokens.expect(b, w + 1, "tokens"), accepted.expect(b, std::nullopt, "accepted"), path.expect(b, w, "path");
        for (size_t i = 0; i < b; ++i) {
            const int32_t n = accepted.data()[i];
            if (n > static_cast<int32_t>(w)) throw std::invalid_argument("more was accepted than was verified");
            if (n < 0) continue;
            const int32_t *gained = tokens.data() + i * (w + 1), *nodes = path.data() + i * w;
            rows().decide(i, {{gained, gained + n + 1}, {nodes, nodes + n}});
        }
    }
    void decide(size_t i, std::vector<int32_t> tokens, std::vector<int32_t> path) {
        rows().decide(i, {std::move(tokens), std::move(path)});
    }
    nb::tuple verdict(size_t i) const {
        const Verdict& verdict = rows().rows.at(i)->verdict;
        return nb::make_tuple(nb::cast(verdict.tokens), nb::cast(verdict.path));
    }
    // The fields of Verdicts.
    nb::tuple verdicts() const {
        const auto b = static_cast<Py_ssize_t>(rows().rows.size());
        size_t w = 0;
        for (const Row* row : rows().rows) w = std::max(w, row->draft().tokens.size());
        std::vector<int32_t> tokens(rows().rows.size() * (w + 1)), accepted, path(rows().rows.size() * w);
        for (size_t i = 0; i < rows().rows.size(); ++i) {
            const Verdict& verdict = rows().rows[i]->verdict;
            accepted.push_back(static_cast<int32_t>(verdict.path.size()));
            std::copy(verdict.tokens.begin(), verdict.tokens.end(), tokens.begin() + static_cast<std::ptrdiff_t>(i * (w + 1)));
            std::copy(verdict.path.begin(), verdict.path.end(), path.begin() + static_cast<std::ptrdiff_t>(i * w));
        }
        return nb::make_tuple(filled(IntArray({b, static_cast<Py_ssize_t>(w) + 1}), tokens), ints(accepted),
            filled(IntArray({b, static_cast<Py_ssize_t>(w)}), path));
    }
    nb::object decisions() const {
        if (!rows().policy()) return nb::none();
        nb::list found;
        for (size_t i = 0; i < rows().rows.size(); ++i) found.append(decision_of(*rows().policy(), i));
        return found;
    }

    // By row: tokens, path, their sources, the sources of all nodes, the draft's depth, nodes verified, and the speed that was
    // expected.
    nb::list outcome() const {
        nb::list found;
        for (size_t i = 0; i < rows().rows.size(); ++i) {
            const Row& row = *rows().rows[i];
            const Draft& draft = row.draft();
            nb::list tokens, path, sources, named;
            for (const int32_t token : row.verdict.tokens) tokens.append(token);
            for (const int32_t node : row.verdict.path) {
                path.append(node);
                sources.append(names_[static_cast<size_t>(draft.sources[static_cast<size_t>(node)])]);
            }
            sources.append(target_);
            for (const int source : draft.sources) named.append(names_[static_cast<size_t>(source)]);
            int size = static_cast<int>(draft.tokens.size());
            nb::object expected = nb::none();
            if (rows().policy()) {
                const Policy::Decision& decision = rows().policy()->decision(i);
                size = decision.size;
                if (decision.expected > 0.0) expected = nb::float_(decision.expected);
            }
            const std::vector<int> depths = draft.depths();
            const int deepest = depths.empty() ? 0 : *std::max_element(depths.begin(), depths.end());
            found.append(nb::make_tuple(tokens, path, sources, named, deepest, size, expected));
        }
        return found;
    }

    void observe(const std::vector<std::pair<int, int>>& gains) {
        const std::vector<NativeDrafter*> behind = rows().observe(gains);
        const Running running(running_);
        for (NativeDrafter* drafter : behind) {
            nb::gil_scoped_release release;  // only for forwards: a server's event loop keeps it for milliseconds
            drafter->read_ahead();
        }
    }

    Rows& rows() {
        require_idle();
        return rows_;
    }
    const Rows& rows() const {
        require_idle();
        return rows_;
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

    Row& row_of(const nb::tuple& given) {
        if (!nb::isinstance<BoundRow>(given[0]))
            throw nb::type_error("a row is (Row, tokens, length, most), a chunk (Row, tokens, start, count, wanted)");
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

    Rows rows_;
    bool running_ = false;
    const nb::str target_;  // the source of tokens that no draft had
    std::vector<nb::object> held_;  // the step's rows and policy
    std::deque<IntView> views_;     // of the rows' tokens
    std::vector<nb::object> names_; // of sources and drafters
    Drafts flat_;
};

}  // namespace

void bind_step_rows(nb::module_& m) {
    nb::class_<BoundRow>(m, "Row");
    nb::class_<BoundRows>(m, "Rows")
        .def(nb::init<int, std::vector<int>, nb::str>(), "vocab"_a, "hidden_layers"_a, "target"_a)
        .def("row", &BoundRows::row, "row"_a, "request"_a, "prompt"_a, "adaptive"_a, "drafter"_a, "native"_a.none(), "names"_a,
            "natively"_a, "drafts"_a, "reads"_a, "ruled"_a, "acceptance"_a, "watched"_a, "chooser"_a, "levels"_a.none(), "nodes"_a,
            "trims"_a)
        .def("begin", &BoundRows::begin, "policy"_a.none(), "rows"_a, "chunks"_a)
        .def("end", &BoundRows::end)
        .def("propose", &BoundRows::propose)
        .def_prop_ro("ruled", &BoundRows::ruled)
        .def("trim", [](BoundRows& x) { x.rows().trim(); })
        .def("pack", [](BoundRows& x) { x.rows().pack(); })
        .def("forward", &BoundRows::forward, "model"_a)
        .def("verify", &BoundRows::verify, "result"_a)
        .def_prop_ro("undecided", &BoundRows::undecided)
        .def("settle", &BoundRows::settle, "model"_a)
        .def_prop_ro("paths", &BoundRows::paths)
        .def_prop_ro("sizes", &BoundRows::sizes)
        .def_prop_ro("batch", &BoundRows::batch)
        .def_prop_ro("starts", [](BoundRows& x) { return ints(x.rows().starts); })
        .def_prop_ro("hidden_layers", [](BoundRows& x) { return nb::tuple(nb::cast(x.rows().hidden_layers())); })
        .def_prop_ro("hidden_rows", [](BoundRows& x) { return x.rows().hidden_rows; })
        .def("put", &BoundRows::put, "where"_a, "drafts"_a)
        .def("drop", &BoundRows::drop, "where"_a)
        .def("lead", &BoundRows::lead, "row"_a, "tokens"_a, "source"_a)
        .def("keep", &BoundRows::keep, "row"_a, "nodes"_a)
        .def("draft", &BoundRows::draft, "row"_a)
        .def("drafts", &BoundRows::drafts, "kept"_a)
        .def("decide_all", &BoundRows::decide_all, "verdicts"_a)
        .def("decide", &BoundRows::decide, "row"_a, "tokens"_a, "path"_a)
        .def("verdict", &BoundRows::verdict, "row"_a)
        .def("verdicts", &BoundRows::verdicts)
        .def("decisions", &BoundRows::decisions)
        .def("outcome", &BoundRows::outcome)
        .def("observe", &BoundRows::observe, "gains"_a)
        .def("learn", [](BoundRows& x, double draft, double body) { x.rows().learn(draft, body); }, "draft"_a, "body"_a);
}

}  // namespace outpace
