// Keys and values of a call into a cache: keys[block, :, place] = new keys[row, column], and the same for values.
//
// Promise: what is written is what was given, to the bit. Limits: numbers of 16 or 32 bits in heads of a multiple of 16
// bytes, which start at multiples of 16 bytes.

#include "common.cuh"

namespace rlspec {

// [first, second, heads, width] with strides in packs of 16 bytes.
struct Placed {
    uint4* data;
    int64_t first, second, head;
};

// One pack a thread; blockIdx.y is 0 for keys and 1 for values. `table` has rows, columns, blocks and places.
__global__ void __launch_bounds__(128) write(Placed keys, Placed values, Placed new_keys, Placed new_values,
                                             int64_t const* table, int64_t tokens, unsigned heads, unsigned packs) {
    in_turn();
    bool const of_keys = blockIdx.y == 0;
    Placed const to{of_keys ? keys.data : values.data, keys.first, keys.second, keys.head};
    Placed const from{of_keys ? new_keys.data : new_values.data, of_keys ? new_keys.first : new_values.first,
                      of_keys ? new_keys.second : new_values.second, of_keys ? new_keys.head : new_values.head};
    int64_t const number = int64_t(blockIdx.x) * 128 + threadIdx.x, token = number / (heads * packs);
    unsigned const inside = unsigned(number % (heads * packs)), head = inside / packs, pack = inside % packs;
    if (token >= tokens) return;
    int64_t const row = table[token], column = table[tokens + token];
    int64_t const block = table[2 * tokens + token], place = table[3 * tokens + token];
    to.data[block * to.first + place * to.second + head * to.head + pack] =
        from.data[row * from.first + column * from.second + head * from.head + pack];
}

}  // namespace rlspec

using namespace rlspec;

// keys and values [blocks, heads, places, width] with strides of a block, a head and a place, the same for both; new
// ones [rows, columns, heads, width] with strides of their own; table int64 [4, tokens]. Strides in packs of 16 bytes.
extern "C" int kv_cache_write(void* keys, void* values, void const* new_keys, void const* new_values,
                              int64_t const* table, int64_t tokens, int64_t heads, int64_t packs, int64_t block,
                              int64_t head, int64_t place, int64_t key_row, int64_t key_column, int64_t key_head,
                              int64_t value_row, int64_t value_column, int64_t value_head, cudaStream_t stream) {
    if (!aligned(keys) || !aligned(values) || !aligned(new_keys) || !aligned(new_values)) return cudaErrorInvalidValue;
    dim3 const blocks(unsigned(ceil_div(tokens * heads * packs, 128)), 2);
    return launch_behind(write, blocks, 128, 0, stream, Placed{(uint4*)keys, block, place, head},
                         Placed{(uint4*)values, block, place, head},
                         Placed{(uint4*)new_keys, key_row, key_column, key_head},
                         Placed{(uint4*)new_values, value_row, value_column, value_head}, table, tokens,
                         unsigned(heads), unsigned(packs));
}
