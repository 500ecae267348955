// What the forward passes share: items of rows, and how a row is written.
#pragma once
#include <functional>

#include "conditions.h"
#include "parallel.h"

namespace jaxmha {
namespace JAXMHA_ISA {

constexpr long MOST_PACKED = (48l << 20) / 4;  // floats of the keys and values of some heads at a time

// Key heads whose packed keys and values, of so many floats, are in memory at a time: as many as fit, or
// up to four times as many where those have too few items of `size` rows for the threads.
long heads_at_once(const Problem& p, long floats_of_head, long size, long threads);

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
