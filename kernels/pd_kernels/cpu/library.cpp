// One library of all ops for one instruction set: the compiler's flags choose the lanes (lanes.h), and everything
// else is the same source.

#include <type_traits>

#define PD_EXPORT extern "C" __attribute__((visibility("default")))

#include "elementary.h"
#include "lanes.h"
#include "matmul.h"
#include "pool.h"
#include "scratch.h"
#include "storage.h"

#include "../block_checksum/cpu.cpp"
#include "../block_copy/cpu.cpp"
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
PD_EXPORT int pd_native_bf16() { return std::is_same<pd::Product<pd::bf16>::X, uint32_t>::value; }
PD_EXPORT int pd_num_threads() { return pd::Pool::instance().size(); }
PD_EXPORT void pd_set_num_threads(int num_threads) { pd::Pool::instance().resize(num_threads); }
