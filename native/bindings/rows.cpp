// What Python sees of a step's rows: drafts and verdicts go in and out as arrays and tuples; step/rows.h has the parts of a step.
#include <deque>
#include <memory>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/variant.h>

#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "bindings/chooser.h"
#include "bindings/field.h"
#include "bindings/policy.h"
#include "step/rows.h"

namespace outpace {
namespace {

template <class Item, class Made>
ArrayOf<Item> filled(Made&& array, const std::vector<Item>& values) {
    std::copy(values.begin(), values.end(), array.data);
    return array.object;
}

I32 ints(const std::vector<int32_t>& values) { return filled(IntArray({static_cast<Py_ssize_t>(values.size())}), values); }

// int32 [L] in memory that Python holds.
struct TokensOf : nb::object {
    NB_OBJECT(TokensOf, nb::object, "memoryview | numpy.typing.NDArray[numpy.int32]", is_any)
};
// Values of outpace/exact/drafts.py.
struct DraftsOf : nb::object {
    NB_OBJECT(DraftsOf, nb::object, "outpace.exact.drafts.Drafts", is_any)
};
struct VerdictsOf : nb::object {
    NB_OBJECT(VerdictsOf, nb::object, "outpace.exact.drafts.Verdicts", is_any)
};

struct BoundRow {
    Row row;
    nb::object drafter;  // keeps it alive
    const void* of;      // whose names its sources are numbers of
};

// A row that decodes: its tokens int32 [L], how many are committed, most nodes; and, where it has rules, the chooser's that are
// known here, and whether it has others. A chunk of a prompt: its tokens, where it begins, how many, whether logits are wanted.
using Decoding =
    std::variant<TupleOf<BoundRow, TokensOf, int, int>, TupleOf<BoundRow, TokensOf, int, int, std::optional<ListOf<Named>>, bool>>;
using Chunk = TupleOf<BoundRow, I32, int, int, bool>;
using DraftsFields =
    TupleOf<I32, I32, std::optional<I32>, std::nullptr_t, std::optional<F32>, std::optional<U8>, TuplesOf<nb::str>, std::optional<I32>>;
using Outcome = TupleOf<ListOf<int>, ListOf<int>, ListOf<nb::str>, ListOf<nb::str>, int, int, std::optional<double>>;

class BoundRows {
public:
    BoundRows(int vocab, std::vector<int> hidden_layers, nb::str target)
        : rows_(vocab, std::move(hidden_layers)), target_(std::move(target)) {}
    BoundRows(const BoundRows&) = delete;

    std::unique_ptr<BoundRow> row(int32_t row, int64_t request, int64_t prompt, bool adaptive, const nb::str& drafter,
        const nb::typed<nb::object, NativeDrafter>& native, const TuplesOf<nb::str>& names, bool natively, bool drafts, bool reads,
        bool ruled, const std::string& acceptance, bool watched, const Named& chooser, const nb::typed<nb::object, nb::str>& levels,
        bool nodes, bool trims, bool reads_prompts, int64_t limit) {
        NativeDrafter* drafts_for = native.is_none() ? nullptr : nb::cast<NativeDrafter*>(native);
        if (natively && (!drafts_for || names.size() == 0)) throw std::invalid_argument("a native drafter's sources need names");
        const Sampling sampling = sampling_of(chooser);
        const Policy::Kind kind{request, Policy::sampling_class(sampling.temperature), acceptance == "rejection", number(drafter),
            levels.is_none() ? -1 : number(levels), nodes, trims, reads_prompts, prompt, limit};
        std::vector<int> sources;
        for (const nb::handle name : names) sources.push_back(number(name));
        return std::make_unique<BoundRow>(BoundRow{{row, prompt, drafts, adaptive, drafts_for, natively, std::move(sources), reads, ruled,
                                                       acceptance == "coupled", watched, sampling, kind},
            native, this});
    }

    // A new step. Rules: None, not all that no single token can be tested by. Chunks end before the last token. policy: None, where
    // every row drafts what it may.
    void begin(const nb::typed<nb::object, Policy>& policy, const SequenceOf<Decoding>& rows, const SequenceOf<Chunk>& chunks) {
        end();
        held_.push_back(policy);
        for (const nb::handle one : rows) {
            const nb::tuple given = nb::borrow<nb::tuple>(one);
            Row& row = row_of(given);
            const IntView& tokens = views_.emplace_back(nb::handle(given[1]).ptr());
            const long length = whole(nb::handle(given[2]).ptr()), most = whole(nb::handle(given[3]).ptr());
            if (length < 1 || length > tokens.size() || most < 0) throw std::invalid_argument("a row's length or most is out of range");
            if (row.tokens) throw std::invalid_argument("a row is in a step once");
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

    // From where on a row's drafter had better read its prompt; and what it has read, in how long, beside the step's other work.
    int64_t reads(const BoundRow& bound) {
        const Policy* policy = rows().given();
        const Row& row = bound.row;
        if (!row.adaptive || !policy) return 0;
        const double end = static_cast<double>(row.prompt);
        const Policy::Reading found = policy->reading(row.kind, static_cast<double>(row.start), static_cast<double>(row.read), end, 0.0);
        return found.pays() ? static_cast<int64_t>(found.start) : -1;
    }
    void has_read(const std::vector<std::tuple<BoundRow*, int64_t, int64_t, int64_t>>& read, double seconds, double body) {
        int64_t tokens = 0;
        for (const auto& [row, start, end, count] : read) {
            tokens += count;
            row->row.start = start, row->row.read = end;
        }
        if (Policy* policy = rows().given(); policy && !read.empty())
            policy->time_reading(std::get<0>(read[0])->row.kind, tokens, seconds, body);
    }

    TupleOf<ListOf<int>, ListOf<TupleOf<std::vector<int>, nb::str>>> propose() {
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
    ListOf<int> ruled() const {
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
    ListOf<int> undecided() const {
        nb::list found;
        for (size_t i = 0; i < rows().rows.size(); ++i)
            if (rows().rows[i]->undecided()) found.append(i);
        return found;
    }
    ListOf<TupleOf<int, nb::str>> settle(Model& model) {
        require_idle();
        const auto lost = [&] {
            const Running running(running_);
            return with_lock(model.lock(), [&] { return rows_.settle(model); });
        }();
        nb::list found;
        for (const auto& [i, why] : lost) found.append(nb::make_tuple(i, why));
        return found;
    }
    ListOf<TupleOf<int, int, int, I32, bool, bool>> paths() const {
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

    TupleOf<ListOf<int>, ListOf<int>, ListOf<double>, ListOf<int>> sizes() const {
        nb::list nodes, depths, floors, starts;
        for (const Row* row : rows().rows)
            nodes.append(row->nodes), depths.append(row->depth), floors.append(row->floor), starts.append(row->start);
        return nb::make_tuple(nodes, depths, floors, starts);
    }

    std::optional<InStep> in_step(size_t i) const {
        const std::vector<int>& sources = rows().rows.at(i)->sources;
        if (!rows().policy() || sources.empty()) return std::nullopt;
        return InStep{held_.at(0), i, sources};
    }

    void put(const std::vector<size_t>& where, const DraftsOf& drafts) {
        const Field<int32_t> tokens(drafts.attr("tokens"), "tokens"), widths(drafts.attr("widths"), "widths");
        const Field<int32_t> parents(drafts.attr("parents"), "parents"), levels(drafts.attr("levels"), "levels");
        const Field<float> confidence(drafts.attr("confidence"), "confidence");
        const Field<uint8_t> source(drafts.attr("source"), "source");
        const size_t b = where.size(), w = tokens.shape(1);
        if (!tokens.held() || !widths.held()) throw std::invalid_argument("tokens and widths must be arrays of int32, and one is None");
        tokens.expect(b, w, "tokens"), widths.expect(b, std::nullopt, "widths"), parents.expect(b, w, "parents");
        levels.expect(b, std::nullopt, "levels"), confidence.expect(b, w, "confidence"), source.expect(b, w, "source");
        const bool drawn = !nb::object(drafts.attr("q")).is_none();
        std::vector<int> names;
        const nb::object sources = drafts.attr("sources");
        if (!nb::isinstance<nb::tuple>(sources)) throw std::invalid_argument("sources must be a tuple of names");
        for (const nb::handle name : nb::cast<nb::tuple>(sources)) {
            if (!nb::isinstance<nb::str>(name)) throw std::invalid_argument("sources must be a tuple of names");
            names.push_back(number(name));
        }
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
    void drop(const std::vector<size_t>& where) {
        for (const size_t i : where) rows().drop(i);
    }
    void lead(size_t i, const std::vector<int32_t>& tokens, const nb::str& source) { rows().lead(i, tokens, number(source)); }
    void keep(size_t i, const std::vector<int32_t>& nodes) { rows().keep(i, nodes); }

    TupleOf<std::vector<int32_t>, std::vector<int32_t>, std::vector<double>, std::vector<int>> draft(size_t i) const {
        const Draft& draft = rows().rows.at(i)->draft();
        return nb::make_tuple(draft.tokens, draft.parents, draft.gains, draft.sources);
    }
    DraftsFields drafts(bool kept) {
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

    TupleOf<I32, I32, I32, I32, I32, I32> batch() const {
        return nb::make_tuple(
            ints(rows().token), ints(rows().row), ints(rows().position), ints(rows().parent), ints(rows().starts), ints(rows().wanted));
    }

    void decide_all(const VerdictsOf& verdicts) {
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
    TupleOf<std::vector<int32_t>, std::vector<int32_t>> verdict(size_t i) const {
        const Verdict& verdict = rows().rows.at(i)->verdict;
        return nb::make_tuple(nb::cast(verdict.tokens), nb::cast(verdict.path));
    }
    TupleOf<I32, I32, I32> verdicts() const {
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
    std::optional<ListOf<Decided>> decisions() const {
        if (!rows().policy()) return std::nullopt;
        nb::list found;
        for (size_t i = 0; i < rows().rows.size(); ++i) found.append(decision_of(*rows().policy(), i));
        return found;
    }

    ListOf<Outcome> outcome() const {
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
        BoundRow& bound = *nb::inst_ptr<BoundRow>(given[0]);
        if (bound.of != this) throw std::invalid_argument("a row of another Rows");
        held_.push_back(given[0]);
        return bound.row;
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
    nb::class_<BoundRow>(m, "Row", "A sequence while it has its row: what `Rows.row` gives.");
    nb::class_<BoundRows>(m, "Rows",
        "The rows of a step, with their drafts and verdicts; see native/step/rows.h and engine/step.py. target: the source of tokens that "
        "no draft had; hidden_layers: layers whose outputs drafters read. What does not fit raises ValueError.")
        .def(nb::init<int, std::vector<int>, nb::str>(), "vocab"_a, "hidden_layers"_a, "target"_a)
        .def("row", &BoundRows::row, "row"_a, "request"_a, "prompt"_a, "adaptive"_a, "drafter"_a, "native"_a.none(), "names"_a,
            "natively"_a, "drafts"_a, "reads"_a, "ruled"_a, "acceptance"_a, "watched"_a, "chooser"_a, "levels"_a.none(), "nodes"_a,
            "trims"_a, "reads_prompts"_a, "limit"_a,
            "native: the row's native drafter, which drafts for it where `natively`; drafts: whether any does. reads: it reads hidden "
            "states; ruled: rules may edit a draft; watched: the caller looks at the row's logits; levels, nodes, trims, reads_prompts: "
            "see DraftCost; limit: the most tokens of it.")
        .def("reads", &BoundRows::reads, "row"_a,
            "From which token on its drafter had better read its prompt, for what drafts are expected to save; -1: not at all.")
        .def("has_read", &BoundRows::has_read, "read"_a, "seconds"_a, "body"_a,
            "Rows of one drafter, which positions it has read of each, from the one to the other, and how many of them now; what that "
            "took, and all else of the step.")
        .def("begin", &BoundRows::begin, "policy"_a.none(), "rows"_a, "chunks"_a,
            "A new step: rows (row, its tokens, how many are committed, most nodes) and, for one with rules, those that are known here "
            "(None: not all that must be) and whether others can test a token; chunks (row, its tokens, where it begins, how many, whether "
            "logits are wanted).")
        .def("end", &BoundRows::end, "Keep nothing of the step.")
        .def("propose", &BoundRows::propose,
            "Native drafters draft. Rows whose drafter is in Python; rows of native drafters that failed, and why.")
        .def_prop_ro("ruled", &BoundRows::ruled, "Rows with rules that may edit their draft.")
        .def("trim", [](BoundRows& x) { x.rows().trim(); }, "The policy drops nodes that do not pay.")
        .def("pack", [](BoundRows& x) { x.rows().pack(); }, "Make batch, starts and hidden_rows.")
        .def("forward", &BoundRows::forward, "model"_a, "`pack`, and the model's forward. Raises MemoryLimit, and what a forward raises.")
        .def("verify", &BoundRows::verify, "result"_a,
            "Decide rows, as far as that is possible here; their drafters get the likeliest tokens.")
        .def_prop_ro(
            "undecided", &BoundRows::undecided, "Rows that Python has to look at: not decided, or with rules that can test a token.")
        .def("settle", &BoundRows::settle, "model"_a, "The rows' KV becomes what their verdicts say. Rows where that failed, and why.")
        .def_prop_ro("paths", &BoundRows::paths,
            "Of rows with drafts: number in the step and in the cache, where its slots begin, slots of the path, whether those are the "
            "first, and whether others follow.")
        .def_prop_ro("sizes", &BoundRows::sizes, "Nodes to ask for, levels to draft, floors, and where drafters that read begin, by row.")
        .def("in_step", &BoundRows::in_step, "i"_a, "Row i in its policy's step, for its drafter in Python; None: it has none.")
        .def_prop_ro("batch", &BoundRows::batch, "token, row, position, parent, starts and wanted of the packed Batch.")
        .def_prop_ro("starts", [](BoundRows& x) { return ints(x.rows().starts); })
        .def_prop_ro("hidden_layers", [](BoundRows& x) { return TuplesOf<int>(nb::cast(x.rows().hidden_layers())); },
            "Layers whose outputs drafters read.")
        .def_prop_ro("hidden_rows", [](BoundRows& x) { return x.rows().hidden_rows; })
        .def("put", &BoundRows::put, "where"_a, "drafts"_a, "Drafts of rows `where`.")
        .def("drop", &BoundRows::drop, "where"_a, "These rows have no drafts.")
        .def("lead", &BoundRows::lead, "row"_a, "tokens"_a, "source"_a, "Tokens that must follow come before what was drafted.")
        .def("keep", &BoundRows::keep, "row"_a, "nodes"_a, "Nodes, ascending, that stay, with their parents.")
        .def("draft", &BoundRows::draft, "row"_a, "The fields of Draft, of a row's draft as it stands.")
        .def("drafts", &BoundRows::drafts, "kept"_a, "The fields of Drafts, of all rows: as they were proposed, or as they are verified.")
        .def(
            "decide_all", &BoundRows::decide_all, "verdicts"_a, "Verdicts of all rows (accepted below 0: undecided), by a model in Python.")
        .def("decide", &BoundRows::decide, "row"_a, "tokens"_a, "path"_a)
        .def("verdict", &BoundRows::verdict, "row"_a, "Tokens (none: undecided) and path.")
        .def("verdicts", &BoundRows::verdicts, "The fields of Verdicts.")
        .def("decisions", &BoundRows::decisions, "The fields of the native policy's Decisions; None: it was not asked.")
        .def("outcome", &BoundRows::outcome,
            "By row: tokens gained, path, the tokens' sources, those of all nodes, depth of the draft, nodes verified, the speed that the "
            "policy expected.")
        .def("observe", &BoundRows::observe, "gains"_a,
            "Native drafters take in what became final: (row of the step, how many tokens). Raises what a network's forward raises.")
        .def("learn", [](BoundRows& x, double draft, double body, double experts) { x.rows().learn(draft, body, experts); }, "draft"_a,
            "body"_a, "experts"_a = 0.0,
            "The policy, where it planned the step, takes in what became of it: seconds that drafting took, and all else, and how many "
            "experts a mixture read (0: not known).");
}

}  // namespace outpace
