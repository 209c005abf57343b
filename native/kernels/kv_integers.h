// Blocks of int8 and int4 numbers: their products with queries and with weights are sums of integers, which are exact, so
// that no order of them can show.
//
// Keys and values alike stand in units of 16 slots by 16 dimensions, as bytes that are 128 too high, or nibbles 8 too high: a
// unit is 4 vectors, for dot4, of 4 dimensions of 16 keys, or of 4 slots of 16 dimensions. Nibbles of two units share bytes,
// the first low; see integer_at in table.h. Scales follow, [groups][64 slots]: one group of all dimensions, of float32, or
// groups of 32, of float16. What meets them, a query or the weights of a block's positions, is a whole number of 15 bits times
// a scale, in two bytes.
#pragma once

#include "kernels/kv_block.h"
#include "runtime/denormals.h"

namespace outpace {
namespace OUTPACE_NS {

#ifdef OUTPACE_MADDUBS
constexpr int kIntegerQueries = 1;  // most queries of a tile, whose two bytes need twice the sums
#else
constexpr int kIntegerQueries = kQueries < 2 ? 1 : kQueries / 2;
#endif

// How much numbers are too high where they are multiplied: int8 ones are made signed where an operand must be.
template <KVType type>
constexpr int excess() {
#if defined(OUTPACE_MADDUBS) || defined(OUTPACE_SIGNED)
    return type == KVType::I4 ? 8 : 0;
#else
    return type == KVType::I4 ? 8 : 128;
#endif
}

// x [n] is (128 high + low) * scale, whole numbers up to 127 * 128, to the nearest; and the bytes' sums, `high` first. n a
// multiple of 16.
static float split(const float* x, int n, uint8_t* high, uint8_t* low, int32_t (&sums)[2]) {
    constexpr float top = 127.0f * 128.0f, least = 1e-30f;  // whatever is that small counts for nothing
    F most = zero();
    for (int i = 0; i < n; i += 16) most = max(abs(load(x + i)), most);
    const float largest = peak(most);
    const F by = set1(largest > least ? top / largest : 0.0f);
    I uppers = zero_i(), lowers = zero_i();
    for (int i = 0; i < n; i += 16) {
        const F y = min(max(mul(load(x + i), by), set1(-top)), set1(top));
        const I upper = to_int(mul(y, set1(1.0f / 128.0f)));
        const I lower = to_int(fma(to_float(upper), set1(-128.0f), y));
        store_i8(high + i, upper);
        store_i8(low + i, lower);
        uppers = add_i(uppers, upper);
        lowers = add_i(lowers, lower);
    }
    sums[0] = sum_i(uppers);
    sums[1] = sum_i(lowers);
    return over(largest, top);
}

// What takes the numbers' excess off sums of products with these bytes.
template <KVType type>
INLINE int32_t correction(const uint8_t* bytes, int n) {
    int32_t sum = 0;
    for (int i = 0; i < n && excess<type>() > 0; ++i) sum += static_cast<int8_t>(bytes[i]);
    return -excess<type>() * sum;
}

struct SplitQuery {
    alignas(64) uint8_t part[2][kMaxHead];
    int32_t start[2][kMaxGroups];
    float scale;
};
// Of a query's weights of a block, one for each group of dimensions; `part` by slots.
struct SplitWeights {
    alignas(64) uint8_t part[2][kBlock];
    uint8_t apart[2][kBlock];  // by positions, of those that stand in another block
    int32_t start[2];
    float scale;
};

template <KVType type>
static void split_query(const float* x, int dim, SplitQuery& q) {
    int32_t all[2];
    q.scale = split(x, dim, q.part[0], q.part[1], all);
    const int size = group_dims(type, dim);
    for (int g = 0, d = 0; d < dim; d += size, ++g)
        for (int l = 0; l < 2; ++l) q.start[l][g] = correction<type>(q.part[l] + d, dim - d < size ? dim - d : size);
}

template <KVType type>
INLINE F load_scales(const uint8_t* p) {
    if constexpr (type == KVType::I4)
        return load_f16(reinterpret_cast<const uint16_t*>(p));
    else
        return load(reinterpret_cast<const float*>(p));
}
template <KVType type>
INLINE const uint8_t* scales_of(const uint8_t* part, int dim, int group, int slot) {
    return part + kBlock * kv_row_bytes(type, dim) + (group * kBlock + slot) * scale_bytes(type);
}
template <KVType type>
INLINE float scale_at(const uint8_t* part, int dim, int group, int slot) {
    const uint8_t* p = scales_of<type>(part, dim, group, slot);
    return type == KVType::I4 ? f16_to_float(u16_at(p)) : float_at(p);
}

// Vector t of unit u of 16 slots' numbers.
template <KVType type>
INLINE W load_unit(const uint8_t* slots, int u, int t) {
    if constexpr (type == KVType::I4) {
        const W both = load_w(slots + 256 * (u / 2) + 64 * t);
        return u % 2 ? high_nibbles(both) : low_nibbles(both);
    } else {
        const W w = load_w(slots + 256 * u + 64 * t);
#ifdef OUTPACE_SIGNED
        return add_w(w, 128);
#else
        return w;
#endif
    }
}

template <int count>
struct IntegerSums {
    I of[2][count];
};

// Adds products of units by bytes [16]: unit(v, t) is vector t of the v-th, bytes(i, l, v) what meets it of query i's part l.
template <KVType type, int... i, int... v, class Unit, class Bytes>
INLINE void add_products(Pack<i...>, Pack<v...>, IntegerSums<sizeof...(v)> (&acc)[sizeof...(i)], const Unit& unit, const Bytes& bytes) {
#ifdef OUTPACE_MADDUBS
    const auto one = [&](auto at) __attribute__((always_inline)) {
        const W w[] = {unit(at.value, 0), unit(at.value, 1), unit(at.value, 2), unit(at.value, 3)};
        const auto add = [&](I& sum, const uint8_t* a)
                             __attribute__((always_inline)) { sum = add_i(sum, dot16<type == KVType::I4, type != KVType::I4>(w, a)); };
        ((add(acc[i].of[0][at.value], bytes(i, 0, at.value)), add(acc[i].of[1][at.value], bytes(i, 1, at.value))), ...);
    };
    (one(std::integral_constant<int, v>{}), ...);
#else
    const auto quarter = [&](int t) __attribute__((always_inline)) {
        const W w[] = {unit(v, t)...};
        const auto add = [&](IntegerSums<sizeof...(v)>& sums, int query) __attribute__((always_inline)) {
            ((sums.of[0][v] = dot4(sums.of[0][v], w[v], bytes(query, 0, v) + 4 * t)), ...);
            ((sums.of[1][v] = dot4(sums.of[1][v], w[v], bytes(query, 1, v) + 4 * t)), ...);
        };
        (add(acc[i], i), ...);
    };
    quarter(0);
    quarter(1);
    quarter(2);
    quarter(3);
#endif
}

template <int count>
INLINE F joined(const IntegerSums<count>& sums, int v) {
    return fma(to_float(sums.of[0][v]), set1(128.0f), to_float(sums.of[1][v]));
}

// scores [q][kBlock], at [16 k + lane], of key tiles first + k for the queries of the pack.
template <KVType type, int... i, int... k>
static void score_integers(
    Pack<i...> queries, Pack<k...> tiles, const SplitQuery* q, const uint8_t* part, int first, int dim, Fetch& fetching, float* scores) {
    constexpr int vectors = static_cast<int>(sizeof...(k));
    Fetch fetch = fetching;
    const uint8_t* keys = part + first * kSub * kv_row_bytes(type, dim);
    const int tile = kSub * kv_row_bytes(type, dim), units = dim / 16, size = group_dims(type, dim) / 16;
    Vectors<vectors> sums[] = {(static_cast<void>(i), zeros(tiles))...};
    for (int g = 0, u = 0; u < units; ++g) {
        const auto begin = [&](const SplitQuery& query) __attribute__((always_inline)) {
            const I high = set1_i(query.start[0][g]), low = set1_i(query.start[1][g]);
            return IntegerSums<vectors>{{{(static_cast<void>(k), high)...}, {(static_cast<void>(k), low)...}}};
        };
        IntegerSums<vectors> acc[] = {begin(q[i])...};
        for (const int end = u + size < units ? u + size : units; u < end; ++u) {
            fetch.step();
            add_products<type>(queries, tiles, acc, [&](int v, int t) __attribute__((always_inline)) {
                return load_unit<type>(keys + v * tile, u, t);
            }, [&](int query, int l, int) __attribute__((always_inline)) { return q[query].part[l] + 16 * u; });
        }
        const auto scale = [&](Vectors<vectors>& to, const IntegerSums<vectors>& from) __attribute__((always_inline)) {
            ((to.of[k] = fma(joined(from, k), load_scales<type>(scales_of<type>(part, dim, g, kSub * (first + k))), to.of[k])), ...);
        };
        (scale(sums[i], acc[i]), ...);
    }
    fetching = fetch;
    const auto put = [&](const Vectors<vectors>& from, int query) {
        (store(scores + query * kBlock + kSub * k, mul(from.of[k], set1(q[query].scale))), ...);
    };
    (put(sums[i], i), ...);
}

}  // namespace OUTPACE_NS
}  // namespace outpace
