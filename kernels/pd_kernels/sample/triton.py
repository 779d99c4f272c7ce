"""Choosing tokens on a GPU: one program a row.

The steps are the reference's. Random words, noise, exp and the comparison of top-k are bit for bit the same. Only the
float64 sums of top-p are added in another order, so that an entry whose cumulative probability is within 2^-50 of
top_p may fall on the other side.

Entries are ranked by (value descending, index ascending); what min-p, top-k and top-p leave are the first ones of the
ranking. Where that ends is a key (entries with larger ones stay) and how many of the entries with this very key stay.
Instead of a sort, it is found digit by digit: an entry stays while the weight of those before it (their number, or
their probability) is below a target. Eight passes of 4 bits find the value at which that ends; a count finds the index.
"""

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from pd_kernels.elementary.triton import exp, log
from pd_kernels.ops import SamplingRows
from pd_kernels.sample import philox as reference_philox
from pd_kernels.sample import reference

BLOCK = 2048
MULTIPLIER_0 = tl.constexpr(reference_philox.MULTIPLIER_0)
MULTIPLIER_1 = tl.constexpr(reference_philox.MULTIPLIER_1)
WEYL_0 = tl.constexpr(reference_philox.WEYL_0)
WEYL_1 = tl.constexpr(reference_philox.WEYL_1)
NUM_ROUNDS = tl.constexpr(reference_philox.NUM_ROUNDS)
MIN_TEMPERATURE = tl.constexpr(reference.MIN_TEMPERATURE)
NO_TOKEN = tl.constexpr(2**31 - 1)


@triton.jit
def position_words(seed, position, entry):
    """The random word of each vocabulary entry: `reference_philox.position_words`. seed and position are int64."""
    c0 = (entry >> 2).to(tl.uint32)
    c3 = c0 * 0
    c1 = c3 + position.to(tl.uint32)
    c2 = c3 + (position >> 32).to(tl.uint32)
    k0 = seed.to(tl.uint32)
    k1 = (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(NUM_ROUNDS):
        low_0 = c0 * MULTIPLIER_0
        low_1 = c2 * MULTIPLIER_1
        high_0 = tl.umulhi(MULTIPLIER_0, c0)
        high_1 = tl.umulhi(MULTIPLIER_1, c2)
        c0 = high_1 ^ c1 ^ k0
        c2 = high_0 ^ c3 ^ k1
        c1 = low_1
        c3 = low_0
        k0 += WEYL_0
        k1 += WEYL_1
    even = tl.where((entry & 2) == 0, c0, c2)
    odd = tl.where((entry & 2) == 0, c1, c3)
    return tl.where((entry & 1) == 0, even, odd)


@triton.jit
def gumbel(words):
    """Noise of the standard Gumbel distribution from uniform words: `reference.gumbel`."""
    uniform = ((words >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    return -log(-log(uniform))


@triton.jit
def load_scaled(logits, first, size, temperature, BLOCK: tl.constexpr):
    """(entries, logits / temperature) of a stretch of a row; NaN and what is beyond the row's end give -inf."""
    entry = first + tl.arange(0, BLOCK)
    z = tl.load(logits + entry, mask=entry < size, other=float("-inf"))
    return entry, tl.div_rn(tl.where(z == z, z, float("-inf")), temperature)


@triton.jit
def rank_key(z):
    """uint32 in the order of z, above 0 for every number; both zeros alike."""
    bits = (z + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, ~bits, bits | -2147483648).to(tl.uint32, bitcast=True)


@triton.jit
def best_of(value, entry, kept, best, token):
    """(best, token) so far and of a further stretch; ties go to the lowest entry."""
    value = tl.where(kept, value, float("-inf"))
    here = tl.max(value, 0)
    first = tl.min(tl.where(kept & (value == here), entry, NO_TOKEN), 0)
    better = (here > best) | ((token == NO_TOKEN) & (first != NO_TOKEN))
    return tl.where(better, here, best), tl.where(better, first, token)


@triton.jit
def find_cut(logits, size, temperature, maximum, target, floor_key, floor_weight, MASS: tl.constexpr,
             BLOCK: tl.constexpr):
    """(key, weight of the entries above it): the last key whose first entry has less than `target` before it.

    An entry weighs 1, or with MASS exp(z - maximum). Only those above floor_key count,
    and floor_weight for those at it.
    """
    digit = tl.arange(0, 16)
    one = tl.full([16], 1, tl.uint32)
    key = tl.full([16], 0, tl.uint32)  # 16 times the same
    above = tl.full([16], 0.0, tl.float64)
    for step in range(8):
        shift = 28 - 4 * step
        bound = key + (digit.to(tl.uint32) << shift) + ((one << shift) - 1)  # the largest key with that digit
        weight = tl.where(floor_key > bound, floor_weight, 0.0).to(tl.float64)
        for first in range(0, size, BLOCK):
            entry, z = load_scaled(logits, first, size, temperature, BLOCK)
            keys = rank_key(z)
            weights = tl.full([BLOCK], 1.0, tl.float64)
            if MASS:
                weights = exp(z - maximum).to(tl.float64)
            weights = tl.where((entry < size) & (keys > floor_key), weights, 0.0)
            weight += tl.sum(tl.where(keys[:, None] > bound[None, :], weights[:, None], 0.0), 0)
        chosen = tl.min(tl.where(weight < target, digit, 15), 0)
        above = tl.sum(tl.where(digit == chosen, weight, 0.0), 0) + tl.full([16], 0.0, tl.float64)
        key += (one << shift) * chosen.to(tl.uint32)
    return tl.max(key, 0), tl.max(above, 0)


@triton.jit
def find_least_likely(logits, size, temperature, maximum, min_p, BLOCK: tl.constexpr):
    """(key, number of entries with this key) of the last value that min-p leaves."""
    threshold = log(min_p)
    lowest = maximum
    for first in range(0, size, BLOCK):
        entry, z = load_scaled(logits, first, size, temperature, BLOCK)
        likely = (entry < size) & (z - maximum >= threshold)
        lowest = tl.minimum(lowest, tl.min(tl.where(likely, z, maximum), 0))
    key = rank_key(lowest)
    ties = tl.full([], 0.0, tl.float64)
    for first in range(0, size, BLOCK):
        entry, z = load_scaled(logits, first, size, temperature, BLOCK)
        ties += tl.sum(((entry < size) & (rank_key(z) == key)).to(tl.float64), 0)
    return key, ties


@triton.jit
def sample_kernel(logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr, position_ptr, token_ptr, size,
                  BLOCK: tl.constexpr):
    """The token of one row."""
    row = tl.program_id(0).to(tl.int64)
    logits = logits_ptr + row * size
    temperature = tl.load(temperature_ptr + row)
    greedy = temperature < MIN_TEMPERATURE
    temperature = tl.where(greedy, 1.0, temperature)
    maximum = tl.full([], float("-inf"), tl.float32)
    token = tl.full([], NO_TOKEN, tl.int32)
    for first in range(0, size, BLOCK):
        entry, z = load_scaled(logits, first, size, temperature, BLOCK)
        maximum, token = best_of(z, entry, entry < size, maximum, token)
    if not greedy:
        key = tl.full([], 0, tl.uint32)  # larger ones stay
        ties = tl.full([], 0.0, tl.float64)  # and so many of this one
        tie_weight = tl.full([], 0.0, tl.float64)
        min_p = tl.load(min_p_ptr + row)
        if min_p > 0.0:
            key, ties = find_least_likely(logits, size, temperature, maximum, min_p, BLOCK)
            tie_weight = exp(key_value(key) - maximum).to(tl.float64)
        top_k = tl.load(top_k_ptr + row)
        if (top_k > 0) & (top_k < size):
            target = top_k.to(tl.float64)
            no_key, no_weight = tl.full([], 0, tl.uint32), tl.full([], 0.0, tl.float64)
            k_key, above = find_cut(logits, size, temperature, maximum, target, no_key, no_weight, False, BLOCK)
            k_ties = target - above
            if k_key >= key:
                ties = tl.where(k_key == key, tl.minimum(ties, k_ties), k_ties)
                key = k_key
                tie_weight = exp(key_value(key) - maximum).to(tl.float64)
        top_p = tl.load(top_p_ptr + row)
        if top_p < 1.0:
            total = ties * tie_weight
            for first in range(0, size, BLOCK):
                entry, z = load_scaled(logits, first, size, temperature, BLOCK)
                counted = (entry < size) & (rank_key(z) > key)
                total += tl.sum(tl.where(counted, exp(z - maximum).to(tl.float64), 0.0), 0)
            target = top_p.to(tl.float64) * total
            p_key, above = find_cut(logits, size, temperature, maximum, target, key, ties * tie_weight, True, BLOCK)
            p_ties = tl.ceil((target - above) / exp(key_value(p_key) - maximum).to(tl.float64))
            ties = tl.where(p_key == key, tl.minimum(ties, p_ties), p_ties)
            key = p_key
        seed, position = tl.load(seed_ptr + row), tl.load(position_ptr + row)
        first_token = token
        best = tl.full([], float("-inf"), tl.float32)
        token = tl.full([], NO_TOKEN, tl.int32)
        seen = tl.full([], 0, tl.int32)
        for first in range(0, size, BLOCK):
            entry, z = load_scaled(logits, first, size, temperature, BLOCK)
            keys = rank_key(z)
            tied = ((keys == key) & (entry < size)).to(tl.int32)
            before = seen + tl.cumsum(tied, 0) - tied
            seen += tl.sum(tied, 0)
            kept = (keys > key) | ((tied == 1) & (before.to(tl.float64) < ties)) | (entry == first_token)
            noisy = z + gumbel(position_words(seed, position, entry))
            best, token = best_of(noisy, entry, kept & (entry < size), best, token)
    tl.store(token_ptr + row, token)


@triton.jit
def key_value(key):
    """The number of a rank key."""
    bits = key.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits & 2147483647, ~bits).to(tl.float32, bitcast=True)


@triton.jit
def logprobs_kernel(logits_ptr, out_ptr, size, BLOCK: tl.constexpr):
    """log softmax of one row."""
    row = tl.program_id(0).to(tl.int64)
    logits = logits_ptr + row * size
    lane = tl.arange(0, BLOCK)
    maximum = tl.full([], float("-inf"), tl.float32)
    for first in range(0, size, BLOCK):
        z = tl.load(logits + first + lane, mask=first + lane < size, other=float("-inf"))
        maximum = tl.maximum(maximum, tl.max(z, 0))
    total = tl.full([], 0.0, tl.float64)
    for first in range(0, size, BLOCK):
        z = tl.load(logits + first + lane, mask=first + lane < size, other=float("-inf"))
        total += tl.sum(tl.where(first + lane < size, exp(z - maximum).to(tl.float64), 0.0), 0)
    log_total = maximum.to(tl.float64) + tl.log(total)
    for first in range(0, size, BLOCK):
        z = tl.load(logits + first + lane, mask=first + lane < size, other=0.0)
        tl.store(out_ptr + row * size + first + lane, (z.to(tl.float64) - log_total).to(tl.float32),
                 mask=first + lane < size)


def sample(logits_TZ: Tensor, rows: SamplingRows) -> npt.NDArray[np.int32]:
    """The token of each row of float32 logits. Waits for the device."""
    parameters = (
        rows.temperature_T, rows.top_k_T, rows.top_p_T, rows.min_p_T, rows.seed_T.view(np.int64), rows.position_T)
    return sample_tokens(logits_TZ, *(torch.from_numpy(p).to(logits_TZ.device) for p in parameters)).cpu().numpy()


def sample_tokens(logits_TZ: Tensor, temperature_T: Tensor, top_k_T: Tensor, top_p_T: Tensor, min_p_T: Tensor,
                  seed_T: Tensor, position_T: Tensor) -> Tensor:
    """The same, all on the device: int32 [T]. `seed_T` has the bits of the uint64 seeds as int64."""
    num_rows, size = logits_TZ.shape
    tokens_T = torch.empty(num_rows, dtype=torch.int32, device=logits_TZ.device)
    if num_rows:
        sample_kernel[(num_rows,)](
            logits_TZ.contiguous(), temperature_T, top_k_T, top_p_T, min_p_T, seed_T, position_T, tokens_T, size,
            BLOCK=BLOCK, num_warps=8, enable_fp_fusion=False,
        )
    return tokens_T


def logprobs(logits_TZ: Tensor) -> npt.NDArray[np.float32]:
    """log softmax of the unprocessed logits, float32 [T, Z]. Waits for the device."""
    return log_softmax(logits_TZ).cpu().numpy()


def log_softmax(logits_TZ: Tensor) -> Tensor:
    """The same on the device."""
    out_TZ = torch.empty_like(logits_TZ, memory_format=torch.contiguous_format)
    if logits_TZ.shape[0]:
        logprobs_kernel[(logits_TZ.shape[0],)](
            logits_TZ.contiguous(), out_TZ, logits_TZ.shape[1], BLOCK=BLOCK, num_warps=8, enable_fp_fusion=False)
    return out_TZ
