// Recorded calls of ops, run one after the other without Python in between.
#pragma once

#include <cstddef>
#include <type_traits>
#include <utility>

namespace pd {

union Argument {
    long integer;
    double number;
    void* pointer;
};

constexpr int MAX_ARGUMENTS = 26;

struct Call {
    long (*run)(const Argument*);
    Argument arguments[MAX_ARGUMENTS];
};

template <class T>
inline T argument_as(Argument a) {
    if constexpr (std::is_pointer<T>::value) return (T)a.pointer;
    else if constexpr (std::is_floating_point<T>::value) return (T)a.number;
    else return (T)a.integer;
}

// An op with its parameters taken from an array; ops that cannot fail return -1.
template <auto op>
struct Caller;

template <class Result, class... Parameters, Result (*op)(Parameters...)>
struct Caller<op> {
    static_assert(sizeof...(Parameters) <= MAX_ARGUMENTS);

    static long run(const Argument* arguments) { return spread(arguments, std::index_sequence_for<Parameters...>()); }

    template <size_t... i>
    static long spread(const Argument* arguments, std::index_sequence<i...>) {
        if constexpr (std::is_void<Result>::value) {
            op(argument_as<Parameters>(arguments[i])...);
            return -1;
        } else {
            return op(argument_as<Parameters>(arguments[i])...);
        }
    }
};

}  // namespace pd
