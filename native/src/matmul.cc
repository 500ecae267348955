// Matmuls of whole layers: b is copied into panels of 64 columns, which stay in the L2 cache while
// chunks of rows pass. Source of the blocking: Goto and van de Geijn, "Anatomy of High-Performance
// Matrix Multiplication" (2008).
#include "matmul.h"

#include "parallel.h"
#include "product.h"
#include "rows.h"
#include "scratch.h"

namespace jaxmha {
namespace JAXMHA_ISA {
namespace {

static_assert(PANEL == ROWS, "transpose writes panels");
constexpr long PART = 128;                    // depth that few rows are multiplied by at a time
constexpr long DEPTH = 256;                   // of one register tile's sum
constexpr long MOST_PACKED = (8l << 20) / 4;  // floats of the panels at a time

// The panels of `depth` rows of b, from `first` on; panel0 is the first of them.
struct Panels {
  float* data;
  const Depths& depths;
  long first, depth, panel0 = 0;
  float* at(long panel, long p) const {
    return data + ((panel - panel0) * depth + p - first) * PANEL;
  }
};

void pack(const Matmul& m, const float* b, const Panels& to, long panel, long p0, long depth) {
  const long j0 = panel * PANEL, count = std::min(PANEL, m.columns - j0);
  float* const into = to.at(panel, p0);
  if (m.b_transposed) return transpose(b + j0 * m.depth + p0, m.depth, count, depth, into);
  for (long p = 0; p < depth; p++) {
    const float* const from = b + to.depths[p0 + p] * m.columns + j0;
    std::copy(from, from + count, into + p * PANEL);
    std::fill(into + p * PANEL + count, into + (p + 1) * PANEL, 0.f);
  }
}

// One register-tiled product of some rows and one panel into y.
template <class Each>
void multiply(const Matmul& m, Left a, const float* b, long rows, long panel, long depth, bool added,
              float* edge, float* y, Each& each) {
  const long count = std::min(PANEL, m.columns - panel * PANEL), vectors = PANEL / W;
  if (count == PANEL) {
    if (added)
      product<Into::added>(rows, vectors, depth, a, b, PANEL, y, m.columns, nullptr, each);
    else
      product<Into::replaced>(rows, vectors, depth, a, b, PANEL, y, m.columns, nullptr, each);
    return;
  }
  product<Into::replaced>(rows, vectors, depth, a, b, PANEL, edge, PANEL, nullptr, each);
  for (long i = 0; i < rows; i++)
    for (long j = 0; j < count; j++) {
      float& to = y[i * m.columns + j];
      to = added ? to + edge[i * PANEL + j] : edge[i * PANEL + j];
    }
}

void add_bias(const Matmul& m, const float* bias, long rows, long panel, float* y) {
  const long j0 = panel * PANEL, count = std::min(PANEL, m.columns - j0);
  for (long i = 0; i < rows; i++)
    for (long j = 0; j < count; j++) y[i * m.columns + j] += bias[j0 + j];
}

// Rows [r0, r0 + rows) of a, at `depth` depths from p0 on, as `depth x rows`.
void pack_rows(const Matmul& m, const float* a, const Depths& depths, long r0, long rows, long p0,
               long depth, float* to) {
  for (long p = 0; p < depth; p++) {
    const float* const from = a + depths[p0 + p] * m.rows + r0;
    std::copy(from, from + rows, to + p * rows);
  }
}

template <class Each>
void compute(const Matmul& m, long batch, const Panels& panels, long r0, long rows, long first,
             long end, Each& each) {
  Scratch memory((m.a_transposed ? rows * DEPTH : 0) + 16 + rows * PANEL);
  float* const own = memory.take(m.a_transposed ? rows * DEPTH : 0);
  float* const edge = memory.take(rows * PANEL);
  float* const y = m.y + (batch * m.rows + r0) * m.columns;
  const long last = panels.first + panels.depth;
  for (long p0 = panels.first; p0 < last; p0 += DEPTH) {
    const long depth = std::min(DEPTH, last - p0);
    Left a{m.a.of(batch) + r0 * m.depth + p0, m.depth, 1};
    if (m.a_transposed) {
      pack_rows(m, m.a.of(batch), panels.depths, r0, rows, p0, depth, own);
      a = {own, 1, rows};
    }
    for (long panel = first; panel < end; panel++) {
      float* const to = y + panel * PANEL;
      multiply(m, a, panels.at(panel, p0), rows, panel, depth, p0 > 0, edge, to, each);
      const bool last_part = p0 + depth == panels.depths.count;
      if (m.bias && last_part) add_bias(m, m.bias.of(batch), rows, panel, to);
    }
  }
}

// What a row without a product is: the bias, or 0.
void clear(const Matmul& m, long batch, long row, long first, long end) {
  const long from = first * PANEL, to = std::min(end * PANEL, m.columns);
  float* const y = m.y + (batch * m.rows + row) * m.columns;
  if (m.bias)
    std::copy(m.bias.of(batch) + from, m.bias.of(batch) + to, y + from);
  else
    std::fill(y + from, y + to, 0.f);
}

// The same of the rows that are kept. Others in a register tile are multiplied along with them.
template <class Each>
void compute_kept(const Matmul& m, long batch, const Panels& panels, long r0, long rows, long first,
                  long end, Each& each) {
  if (!m.kept || m.a_transposed) return compute(m, batch, panels, r0, rows, first, end, each);
  const uint8_t* const kept = m.kept.of(batch);
  const long last = r0 + rows;
  const auto any = [&](long r) {
    return std::any_of(kept + r, kept + std::min(r + MR, last), [](uint8_t x) { return x; });
  };
  for (long r = r0, next; r < last; r = next) {
    const bool found = any(r);
    for (next = r + MR; next < last && any(next) == found;) next += MR;
    if (found) compute(m, batch, panels, r, std::min(next, last) - r, first, end, each);
  }
  if (panels.first + panels.depth < m.depth) return;
  for (long r = r0; r < last; r++)
    if (!kept[r]) clear(m, batch, r, first, end);
}

// The part of b that is packed next: a cache line of it is fetched before each step of a tile.
struct NextPart {
  const float* row;
  long rows, lines, stride, line = 0;
  void operator()() {
    if (rows == 0) return;
    __builtin_prefetch(row + line * 16, 0, 2);
    if (++line < lines) return;
    line = 0, row += stride, rows--;
  }
};

NextPart next_part(const Matmul& m, long batch, const Depths& depths, long first, long end, long p,
                   long depth) {
  const long j0 = first * PANEL, columns = std::min(end * PANEL, m.columns) - j0;
  if (depth <= 0 || !depths.kept.empty()) return {nullptr, 0, 0, 0};
  const float* const b = m.b.of(batch);
  if (m.b_transposed) return {b + j0 * m.depth + p, columns, (depth + 15) / 16, m.depth};
  return {b + p * m.columns + j0, depth, (columns + 15) / 16, m.columns};
}

// Some panels of few rows, which wait for b: it is packed where it is used, along its rows, and the
// next part is fetched meanwhile.
void compute_few(const Matmul& m, long batch, const Depths& depths, long first, long end) {
  Scratch memory(PART * (end - first) * PANEL);
  float* const packed = memory.take(PART * (end - first) * PANEL);
  for (long p0 = 0; p0 < depths.count; p0 += PART) {
    const Panels part{packed, depths, p0, std::min(PART, depths.count - p0), first};
    const long step = m.b_transposed ? part.depth : 1;
    for (long p = p0; p < p0 + part.depth; p += step)
      for (long panel = first; panel < end; panel++)
        pack(m, m.b.of(batch), part, panel, p, step);
    NextPart next = next_part(m, batch, depths, first, end, p0 + PART,
                              std::min(PART, depths.count - p0 - PART));
    compute_kept(m, batch, part, 0, m.rows, first, end, next);
  }
}

}  // namespace

void matmul(const Matmul& m, Pool& pool) {
  const long count = (m.columns + PANEL - 1) / PANEL;
  const long fit = MOST_PACKED / (count * PANEL) / DEPTH * DEPTH;
  const long most = std::max(DEPTH, std::min(BLOCK, fit));
  const Items size = items_of(m.rows, m.columns, m.depth, pool.threads());
  const long chunks = (m.rows + size.rows - 1) / size.rows;
  const long groups = (count + size.panels - 1) / size.panels;
  const long of_few = panels_of_few(m.rows, m.columns, pool.threads());
  const long floats = of_few ? 0 : count * PANEL * std::min(most, m.depth);
  Scratch memory(floats);
  float* const packed = memory.take(floats);
  Nothing nothing;
  for (long batch = 0; batch < m.batches; batch++) {
    const Depths depths(m, batch);
    for (long r = 0; !depths.count && r < m.rows; r++) clear(m, batch, r, 0, count);
    if (of_few) {
      parallel(pool, (count + of_few - 1) / of_few, [&](long i) {
        compute_few(m, batch, depths, i * of_few, std::min((i + 1) * of_few, count));
      });
      continue;
    }
    for (long p0 = 0; p0 < depths.count; p0 += most) {
      const Panels panels{packed, depths, p0, std::min(most, depths.count - p0)};
      const long parts = (panels.depth + DEPTH - 1) / DEPTH;
      parallel(pool, count * parts, [&](long i) {
        const long p = p0 + i % parts * DEPTH;
        pack(m, m.b.of(batch), panels, i / parts, p, std::min(DEPTH, p0 + panels.depth - p));
      });
      parallel(pool, chunks * groups, [&](long i) {
        const long r0 = i % chunks * size.rows, first = i / chunks * size.panels;
        compute_kept(m, batch, panels, r0, std::min(size.rows, m.rows - r0), first,
                     std::min(first + size.panels, count), nothing);
      });
    }
  }
}

}  // namespace JAXMHA_ISA
}  // namespace jaxmha
