// 0, 1, ..., N - 1 as a type: a loop whose indices are constants, so that what it indexes can live in registers.
#pragma once

namespace outpace {
namespace OUTPACE_NS {

template <int... t>
struct Pack {};
template <int T, int... t>
struct Counted : Counted<T - 1, T - 1, t...> {};
template <int... t>
struct Counted<0, t...> {
    using type = Pack<t...>;
};
template <int T>
using Range = typename Counted<T>::type;

}  // namespace OUTPACE_NS
}  // namespace outpace
