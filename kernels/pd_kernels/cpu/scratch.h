// Working memory of a thread: taken in order, given back all at once when its `Scratch` ends, kept for the next op.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace pd {

class Scratch {
  public:
    Scratch() : slab_(arena().slab), used_(arena().used) {}
    ~Scratch() {
        arena().slab = slab_;
        arena().used = used_;
    }
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;

    // Room for `count` elements, aligned to a cache line, uninitialised.
    template <class T>
    T* take(size_t count) {
#if defined(__SANITIZE_ADDRESS__)
        owned_.emplace_back(new char[count * sizeof(T)]);  // with nothing behind it, so that a step too far is seen
        return (T*)owned_.back().get();
#endif
        const size_t bytes = (count * sizeof(T) + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
        Arena& a = arena();
        while (a.slab < a.slabs.size() && a.used + bytes > a.slabs[a.slab].size) {
            a.slab++;
            a.used = 0;
        }
        if (a.slab == a.slabs.size()) {
            const size_t size = bytes > SLAB_BYTES ? bytes : SLAB_BYTES;
            a.slabs.push_back({std::unique_ptr<char[]>(new char[size + ALIGNMENT]), size});
            a.used = 0;
        }
        char* base = a.slabs[a.slab].memory.get();
        base += (ALIGNMENT - (uintptr_t)base % ALIGNMENT) % ALIGNMENT;
        char* result = base + a.used;
        a.used += bytes;
        return (T*)result;
    }

  private:
    static constexpr size_t ALIGNMENT = 64, SLAB_BYTES = 1 << 20;
    struct Slab { std::unique_ptr<char[]> memory; size_t size; };
    struct Arena { std::vector<Slab> slabs; size_t slab = 0, used = 0; };
    static Arena& arena() {
        static thread_local Arena a;
        return a;
    }
    size_t slab_, used_;
    std::vector<std::unique_ptr<char[]>> owned_;
};

}  // namespace pd
