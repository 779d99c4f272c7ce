// One library of all ops for one instruction set: the compiler's flags choose the lanes (lanes.h), and everything
// else is the same source.

#include <type_traits>

#define PD_EXPORT extern "C" __attribute__((visibility("default")))

#include "elementary.h"
#include "lanes.h"
#include "matmul.h"
#include "pool.h"
#include "program.h"
#include "scratch.h"
#include "storage.h"

#include "../block_checksum/cpu.cpp"
#include "../block_copy/cpu.cpp"
#include "../block_stream/cpu.cpp"
#include "../embed/cpu.cpp"
#include "../linear/cpu.cpp"
#include "../rms_norm/cpu.cpp"
#include "../rope/cpu.cpp"

#include "../absorb/cpu.cpp"
#include "../latent_write/cpu.cpp"
#include "../mla_attention/cpu.cpp"
#include "../mla_attention/cpu_expanded.cpp"
#include "../moe_experts/cpu.cpp"
#include "../moe_gate/cpu.cpp"
#include "../sample/cpu.cpp"

static const char SOURCES[] = "pd-sources-" PD_SOURCES;  // pd_kernels.build looks for it in the file

PD_EXPORT const char* pd_sources() { return SOURCES; }
PD_EXPORT const char* pd_isa() { return pd::ISA_NAME; }
PD_EXPORT const char* pd_arithmetic() { return pd::ARITHMETIC; }
PD_EXPORT int pd_num_threads() { return pd::Pool::instance().size(); }
PD_EXPORT void pd_set_num_threads(int num_threads) { pd::Pool::instance().resize(num_threads); }

// The ops that a program may hold.
static const struct {
    const char* name;
    long (*run)(const pd::Argument*);
} CALLERS[] = {
    {"pd_embed", pd::Caller<pd::pd_embed>::run},
    {"pd_rms_norm", pd::Caller<pd::pd_rms_norm>::run},
    {"pd_add_rms_norm", pd::Caller<pd::pd_add_rms_norm>::run},
    {"pd_linear", pd::Caller<pd::pd_linear>::run},
    {"pd_latent_write", pd::Caller<pd::pd_latent_write>::run},
    {"pd_mla_queries", pd::Caller<pd::pd_mla_queries>::run},
    {"pd_absorb_values", pd::Caller<pd::pd_absorb_values>::run},
    {"pd_mla_attention", pd::Caller<pd::pd_mla_attention>::run},
    {"pd_mla_attention_expanded", pd::Caller<pd::pd_mla_attention_expanded>::run},
    {"pd_moe_gate", pd::Caller<pd::pd_moe_gate>::run},
    {"pd_moe_experts", pd::Caller<pd::pd_moe_experts>::run},
    {"pd_swiglu", pd::Caller<pd::pd_swiglu>::run},
};

PD_EXPORT void* pd_find_caller(const char* name) {
    for (const auto& caller : CALLERS)
        if (std::strcmp(caller.name, name) == 0) return (void*)caller.run;
    return nullptr;
}

// Runs calls in order. Returns -1, or the number of the first that refused its input; what it said is in `refused`.
PD_EXPORT long pd_run(const pd::Call* calls, long count, long* refused) {
    for (long i = 0; i < count; i++)
        if ((*refused = calls[i].run(calls[i].arguments)) >= 0) return i;
    return -1;
}
