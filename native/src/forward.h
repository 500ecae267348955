// What the forward passes share: items of rows, and how a row is written.
#pragma once
#include <functional>

#include "conditions.h"
#include "parallel.h"

namespace jaxmha {
namespace JAXMHA_ISA {

// The part of a block that a panel reads begins at a multiple of so many keys: sums of a row must not
// depend on the other rows of its panel, which follow from the number of threads.
constexpr long BEGIN = 16;

constexpr size_t MOST_PACKED = 48 << 20;  // bytes of the keys and values of some heads at a time

// Reads query rows [row0, row0 + rows) of a head, times scale: `rows H`.
void read_queries(const Problem& p, long b, long n, long row0, long rows, float* to);

// Key heads [first, end) of all batch rows, numbered b K + k; calls body(b, n, row0, rows) for every
// `size` query rows of each of their query heads.
void for_rows(const Problem& p, long first, long end, long size, Pool& pool,
              const std::function<void(long, long, long, long)>& body);

// Some rows of a head, in float32; the item copies the keys and values that it reads.
void attend_rows(const Forward& f, long b, long n, long row0, long rows);

// Writes a row and its statistics, from the sum of exponentials times values; `weighted` is
// overwritten.
void write_attended(const Forward& f, const View& view, long b, long n, long row, float row_max,
                    float row_sum, float* weighted);

}  // namespace JAXMHA_ISA
}  // namespace jaxmha
